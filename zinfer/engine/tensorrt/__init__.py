"""Engine `tensorrt`: runs a plan of `zinfer pack`; the library streams.

The plan has the decoder layers; torch computes what surrounds them, on the GPU. The library keeps as many bytes of the
layers there as its budget allows and copies the rest in every pass: all for offload `none`, ``--gpu-weights`` or the
library's own choice for `cpu`.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zinfer.checkpoint.architecture import CACHE_NAMES
from zinfer.core.case import resident_bytes
from zinfer.core.engine import TensorRTOptions
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.cache import RowCache
from zinfer.engine.decoder import Decoder, DecoderBatch
from zinfer.engine.state import ModelState
from zinfer.engine.tensorrt import planfile
from zinfer.engine.tensorrt.build import plan_key
from zinfer.engine.tensorrt.library import Library, Messages, find_library
from zinfer.engine.tensorrt.planfile import PlanFile
from zinfer.record.measurement import Effective

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


class TensorRT(Decoder[DecoderBatch]):
    """Engine that runs the plan which serves the case. Raises EngineError, with a remedy, where there is none."""

    options: TensorRTOptions
    _executor: Executor

    def _load(self) -> None:
        self._library = find_library()
        case, load = self.plan.case, self.plan.case.workload
        shape = case.layers, load.batch_size, load.total_len
        key = plan_key(self._library, case.model, self.plan.model, case.load_format, *shape)
        self.file = file = planfile.find(key, self.options.plan)
        if file.allow_nan and not case.allow_nan:
            raise EngineError(f"{file.path} was built with --allow-nan: add it here, or build the plan again without")
        state = ModelState(self.plan.model, case.load_format, allow_nan=case.allow_nan)
        self.model = state.model
        self.model.config._attn_implementation = "eager"  # its masks are numbers to add
        self.progress(f"loading {file.path.name}", 0.0)
        self._executor = self._make_executor()
        self._opened.callback(self._executor.close)
        loaded = state.load(self.device, self.progress, layers=False)
        outside = {name: tensor.to(self.device, copy=True) for name, tensor in loaded}
        for name, tensor in outside.items():
            state.entries[name].put(tensor)
        self._outside_bytes = sum(tensor.nbytes for tensor in outside.values())
        self._ready()
        del state.layers[1:]  # all are computed in the place of the first
        state.layers[0].forward = self._layer

    @classmethod
    def unable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no GPU; `zinfer pack --engine tensorrt` can still build plans here, with TensorRT-RTX"
        library, capability = find_library(), torch.cuda.get_device_capability()
        return library.why_not(capability) or library.why_no_build(capability)

    def _make_executor(self) -> Executor:
        if self.device.type != "cuda":
            raise EngineError(f"engine tensorrt needs a GPU to run {self.file.path}, and this machine has none")
        case = self.plan.case
        return Executor(self._library, self.file, case.gpu_weights, case.offload != "none")

    def _make_batch(
        self, mask: Tensor, capacity: int, moved: Sequence[tuple[DecoderBatch, Tensor]] = ()
    ) -> DecoderBatch:
        key = self.file.key
        for name, asked in (("max_batch_size", len(mask)), ("max_seq_len", capacity)):
            if asked > (built := getattr(key, name)):
                command = planfile.build_command(key.model_copy(update={name: asked}))
                raise EngineError(f"{name} {asked} is more than the {built} of {self.file.path.name}. Build: {command}")
        return super()._make_batch(mask, capacity, moved)

    def _at_once(self, _rows: int, _count: int) -> int:
        return self.file.prefill_rows

    def _layer(
        self,
        hidden: Tensor,
        *_args: Any,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, ...] = (),
        alibi: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Compute all layers for hidden states ``[B, S, H]``; append to the cache. Arguments are those of a layer."""
        model, (rows, count) = self.plan.model, hidden.shape[:2]
        cache: RowCache = next(others[name] for name in (*CACHE_NAMES, "layer_past") if name in others)
        # Half of the lowest number: a row of padding attends to all keys equally; to none would give NaN.
        bias = attention_mask.clamp(min=torch.finfo(hidden.dtype).min / 2).expand(rows, 1, count, -1)
        inputs = {"hidden": hidden.contiguous(), "bias": bias.contiguous()}
        for name, table in zip(("cos", "sin"), position_embeddings, strict=False):
            inputs[name] = table.expand(rows, -1, -1)[:, None].contiguous()
        if alibi is not None:
            inputs["alibi"] = alibi.view(rows, model.num_heads, 1, -1)
        outputs = {"output": torch.empty_like(inputs["hidden"])}
        shape = len(cache.layers), 2, rows, model.num_kv_heads, count, model.head_dim
        states = hidden.new_empty(shape).unbind()
        for index, (layer, new) in enumerate(zip(cache.layers, states, strict=True)):
            if not layer.is_initialized:
                layer.lazy_initialization(*new)
            for part, name in enumerate((f"key_{index}", f"value_{index}")):
                memory = layer.memories[part]
                inputs[f"past_{name}"] = memory if rows == len(memory) else memory[layer.rows]
                outputs[name] = new[part]
        self._executor.run(DECODE if count == 1 else PREFILL, inputs, outputs)
        for layer, new in zip(cache.layers, states, strict=True):
            slots = layer.advance(count).new
            for memory, part in zip(layer.memories, new, strict=True):
                memory[layer.rows, :, slots] = part
        return outputs["output"] if alibi is None else (outputs["output"], None)  # BLOOM's layers return attention, too

    def effective(self) -> Effective:
        executor, weight_bytes = self._executor, self.file.weight_bytes
        fixed = self._outside_bytes + max(0, weight_bytes - executor.streamable)  # it may count what it adds itself
        return Effective(
            gpu_weight_bytes=fixed + executor.budget,
            host_weight_bytes=executor.streamable,  # the library keeps all in host memory, whatever the budget
            streamed_bytes_per_step=executor.streamable - executor.budget,
            shortfall=executor.shortfall(weight_bytes),
            settings={
                "library": f"{self._library.name} {self._library.version}",
                "plan": self.file.path.name,
                "level": self.file.level,
                "streamable_bytes": executor.streamable,
                "budget_bytes": executor.budget,
                "scratch_bytes": executor.scratch,
                "library_gpu_bytes": executor.taken,
            },
        )
