"""Execution of a plan on the GPU, with buffers that torch owns."""

import mmap

import torch
from torch import Tensor

from zinfer.core.case import resident_bytes
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.tensorrt.library import Library, Messages
from zinfer.engine.tensorrt.planfile import PlanFile

PREFILL, DECODE = 0, 1  # numbers of the plan's optimisation profiles
SLACK_BYTES = 1 << 30  # GPU memory that a library may take besides weights and scratch: contexts, kernels


class Executor:
    """TensorRT engine read from `file`. With `offload`, `gpu_weights` of its streamable weights stay on the GPU (None:
    the library decides); else all. Raises EngineError for a GPU that the library does not support and for a plan that
    it refuses."""

    def __init__(self, library: Library, file: PlanFile, gpu_weights: str | None, offload: bool) -> None:
        trt, self._messages = library.module, Messages(library.module)
        if why := library.why_not(torch.cuda.get_device_capability()):
            raise EngineError(why)
        self._stream = torch.cuda.Stream()
        self._runtime = trt.Runtime(self._messages.logger)
        before = torch.cuda.mem_get_info()[0]
        with file.path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_WILLNEED)
        self._engine = self._runtime.deserialize_cuda_engine(mapped)
        if self._engine is None:
            raise self._messages.failure(f"{library.name} cannot load {file.path}")
        self.streamable: int = self._engine.streamable_weights_size
        automatic: int = self._engine.get_weight_streaming_automatic_budget()
        self.asked = resident_bytes(gpu_weights or "auto", self.streamable, automatic) if offload else self.streamable
        self._engine.weight_streaming_budget_v2 = self.asked
        self.budget: int = self._engine.weight_streaming_budget_v2
        self.scratch: int = self._engine.weight_streaming_scratch_memory_size
        self._context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise self._messages.failure(f"{library.name} cannot run {file.path}")
        self.taken: int = before - torch.cuda.mem_get_info()[0]  # bytes of GPU memory
        self._profile, self._bound = -1, dict[str, tuple[int, tuple[int, ...]]]()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cuda")

    def run(self, profile: int, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Run one pass, ordered with the current stream. All tensors are contiguous, on the device, and of the
        network's types. Raises EngineError for a shape that the plan does not allow, RuntimeError for a pass that
        fails."""
        context, stream = self._context, self._stream
        stream.wait_stream(torch.cuda.current_stream())
        if profile != self._profile:
            if not context.set_optimization_profile_async(profile, stream.cuda_stream):
                raise self._messages.failure(f"cannot switch to profile {profile}", RuntimeError)
            self._profile, self._bound = profile, {}
        for name, tensor in [*inputs.items(), *outputs.items()]:
            address, shape = self._bound.pop(name, (0, ()))
            if name in inputs and shape != tensor.shape and not context.set_input_shape(name, tuple(tensor.shape)):
                raise self._messages.failure(f"the plan does not allow {name} of shape {tuple(tensor.shape)}")
            if address != tensor.data_ptr():
                context.set_tensor_address(name, tensor.data_ptr())
            self._bound[name] = tensor.data_ptr(), tuple(tensor.shape)
        needed = context.update_device_memory_size_for_shapes()
        if needed > self._memory.numel():
            del self._memory  # before the new one is taken
            self._memory = torch.empty(needed, dtype=torch.uint8, device="cuda")
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        if not context.execute_async_v3(stream.cuda_stream):
            raise self._messages.failure("the pass failed", RuntimeError)
        torch.cuda.current_stream().wait_stream(stream)

    def shortfall(self, weight_bytes: int) -> str | None:
        """Return how the library departed from its settings, if it did."""
        allowed = max(0, weight_bytes - self.streamable) + self.budget + self.scratch
        if self.budget != self.asked:
            return f"a weight budget of {gb(self.asked)} was requested, and the library set {gb(self.budget)}"
        if self.budget < self.streamable and self.taken > 1.05 * allowed + SLACK_BYTES:
            return f"a weight budget of {gb(self.budget)} was set, and the library took {gb(self.taken)} of the GPU"
        return None

    def close(self) -> None:
        """Free the library's objects, the context first."""
        torch.cuda.synchronize()
        self._context = self._engine = self._runtime = None
        self._memory = torch.empty(0, dtype=torch.uint8)
