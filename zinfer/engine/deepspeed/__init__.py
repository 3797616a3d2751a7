"""DeepSpeed's ZeRO-Inference: ZeRO stage 3, weights in pinned memory or files.

Before a module runs, the host waits for all fetches, prefetches included, and then issues the next bucket: the link
idles meanwhile, so few large fetches beat many small ones. The tuned settings, public ones of DeepSpeed, do this:

* a decoder layer is one ZeRO leaf module: one fetch, one wait and one release a layer, not one for each linear;
* the prefetch bucket is a layer's matrices, and as many live parameters are allowed beside the layer that computes (the
  example's `stage3_max_live_parameters` is less than one matrix: hardly anything is prefetched);
* vectors persist on the device; embeddings and head are not offloaded, or they would cross the link every step.

With offload `cpu`, page-locked memory comes from our arena: torch's allocator rounds each weight up to a power of two.
On several GPUs a fetch is a copy of the rank's part and an all-gather; `zero.Init` broadcasts what the leader loads.

Source: DeepSpeed 0.19, `runtime/zero/partitioned_param_coordinator.py` and `partition_parameters.py` (NoGatherHandle).
"""

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from zinfer.checkpoint.resolve import as_released
from zinfer.core.engine import DeepSpeedOptions
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Work, is_step
from zinfer.engine.decoder import Decoder, DecoderBatch, offload_folder
from zinfer.engine.deepspeed import world
from zinfer.engine.pinned import ALIGNMENT, PinnedArena, empty_pinned_cache, pinned_bytes
from zinfer.engine.state import ModelState
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective
from zinfer.system.scratch import Scratch

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group


class DeepSpeed(Decoder[DecoderBatch]):
    """Engine `deepspeed`: weights on the device, in host memory or files. `tuned=False` takes the settings of
    DeepSpeed's own example (run_model.py of its zero_inference) instead of those above. Raises EngineError if the
    system lacks the packages that offload `nvme` is built with, or DeepSpeed refuses the model."""

    several: ClassVar[str] = "zinfer.engine.deepspeed.team:DeepSpeedTeam"
    options: DeepSpeedOptions
    calls = 0  # forward passes of the model that have begun
    _folder: Scratch | None = None
    _engine: Any = None
    _arena: PinnedArena | None = None
    _moved_bytes = _streamed_per_step = 0

    def __init__(self, plan: Plan, progress: Progress = silent, group: "Group | None" = None) -> None:
        self._group = group
        super().__init__(plan, progress)

    def _load(self) -> None:
        self._parameters: dict[str, Any] = {}
        self._pinned_before = pinned_bytes()
        for undo in (empty_pinned_cache, gc.collect):
            self._opened.callback(undo)
        world.prepare(self.device, self._opened, self.progress, self._group)
        with redirect_stdout(sys.stderr):
            self._initialize()

    @property
    def loaded_bytes(self) -> int:
        return as_released(self.plan.model).stored_bytes  # DeepSpeed itself rounds what was loaded

    def _initialize(self) -> None:
        import deepspeed

        case = self.plan.case
        bits = {"int4": 4, "int8": 8}.get(case.weights)
        world.check(self.plan.model.dtype, case.offload, bits, self.device)
        if self._group is not None and self.plan.model.num_experts > 1 and not self.options.tuned:
            raise EngineError(
                f"tuned=false does not go with gpus={self._group.size} for {self.plan.model.name}: DeepSpeed fetches "
                "single experts then, which differ from rank to rank"
            )
        state = ModelState(as_released(self.plan.model), case.load_format, allow_nan=case.allow_nan)
        self.model, layers = state.model, state.layers
        self._offloaded = {
            name
            for name, entry in state.entries.items()
            if case.offload != "none" and entry.is_parameter and (entry.layer is not None or not self.options.tuned)
        }
        if case.offload == "nvme":
            self._folder = self._opened.enter_context(offload_folder(self.plan.nvme_path))
        config = self._config(layers)
        zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_param"}
        if case.offload == "cpu" and self.options.pin_memory:
            max_bytes = sum(state.entries[name].tensor.nbytes + ALIGNMENT for name in self._offloaded)
            self._arena = PinnedArena(max_bytes, self.device.type == "cuda", self.progress, grow=True)
            self._opened.callback(self._arena.close)
        self._opened.callback(self._free_weights)
        partition = {
            True: world.Partition(config, self._arena),
            False: world.Partition(config | {"zero_optimization": zero}),
        }
        quantised = self._linears(layers) if bits is not None else {}
        self._inspect()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._stored(state):
            if state.entries[name].is_parameter:
                tensors[name] = self._parameters[name] = nn.Parameter(tensor, requires_grad=False)
                if name in quantised:
                    world.quantise(self._parameters[name], bits or 16)
                partition[name in self._offloaded](self._parameters[name])
            else:
                tensors[name] = tensor.to(self.device, copy=True)
        if self._arena is not None:
            self._arena.seal()
        for name, tensor in tensors.items():
            state.entries[name].put(tensor)
        for module in quantised.values():
            module.forward = MethodType(world.quantised_linear, module)  # type: ignore[method-assign]
        self._count_fetches()
        if self.options.tuned:
            deepspeed.utils.set_z3_leaf_modules(self.model, list({type(layer) for layer in layers}))
        buffers = dict(self.model.named_buffers())
        try:
            self._engine = deepspeed.initialize(model=self.model, config=config)[0]
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise EngineError(f"DeepSpeed cannot run {self.plan.model.name}: {error}") from error
        self._opened.callback(lambda: self._engine.destroy())
        for name, buffer in buffers.items():  # DeepSpeed before 0.19 casts them to the weights' type
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer
        offload = config["zero_optimization"].get("offload_param", {})
        named = {f"offload_param.{key}": value for key, value in offload.items() if key != "nvme_path"}
        self._settings = zero | named | config.get("aio", {})
        self._ready()

    def _stored(self, state: ModelState) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name; a follower's are zeros for `zero.Init` to fill."""
        group = self._group
        if group is None:
            yield from state.load(self.device, self.progress)
            return
        loaded: Iterator[tuple[str, Tensor]] = iter(()) if group.rank else state.load(self.device, self.progress)
        while True:
            name, tensor = next(loaded, ("", None))
            header = group.share((name, tensor.shape, tensor.dtype) if tensor is not None else None)
            if header is None:
                return
            name, shape, dtype = header
            if tensor is None:
                tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            if not state.entries[name].is_parameter:
                tensor = tensor.to(self.device)
                group.broadcast(tensor)
            yield name, tensor

    def _linears(self, layers: nn.ModuleList) -> dict[str, nn.Linear]:
        """Return the linear modules of the layers by name. Raises EngineError if they do not divide into groups."""
        names = {id(module): name for name, module in self.model.named_modules()}
        linears = {f"{names[id(module)]}.weight": module for module in layers.modules() if type(module) is nn.Linear}
        inputs = {name: module.in_features for name, module in linears.items() if module.in_features % world.GROUP}
        if inputs or not linears:
            what = "no linear modules" if not linears else "{} has {} inputs".format(*next(iter(inputs.items())))
            raise EngineError(f"DeepSpeed quantises linear modules in groups of {world.GROUP}: {what}")
        return linears

    def _config(self, layers: nn.ModuleList) -> dict[str, Any]:
        """Return DeepSpeed's configuration; sizes are in elements."""
        spec, tuned = self.plan.model, self.options.tuned
        vectors = (parameter.numel() for parameter in self.model.parameters() if parameter.dim() == 1)
        persistent = max(vectors, default=0) if tuned else spec.hidden_size
        parameter_sizes = [[p.numel() for p in layer.parameters() if p.numel() > persistent] for layer in layers]
        layer = max(map(sum, parameter_sizes))
        bucket = layer if tuned else 2 * spec.hidden_size**2
        zero: dict[str, Any] = {
            "stage": 3,
            "overlap_comm": True,
            "memory_efficient_linear": False,  # saves memory in training, and replaces torch's linear for good
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": layer + bucket if tuned else bucket,
            "stage3_param_persistence_threshold": persistent,
        }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": spec.dtype == "float16"},
            "bf16": {"enabled": spec.dtype == "bfloat16"},
            "zero_optimization": zero,
        }
        if self.plan.case.offload != "none":
            pin = self.options.pin_memory
            zero["offload_param"] = {"device": self.plan.case.offload, "pin_memory": pin}
        if self._folder is not None:
            zero["offload_param"] |= {
                "nvme_path": str(self._folder.path),
                "buffer_size": max(self.model.get_parameter(name).numel() for name in self._offloaded),
                "buffer_count": 2 * max(map(len, parameter_sizes)) + 1 if tuned else 5,
            }
            config["aio"] = {
                "block_size": 1 << 20,
                "queue_depth": 32 if tuned else 8,
                "intra_op_parallelism": min(8, len(os.sched_getaffinity(0))) if tuned else 1,
                "single_submit": False,
                "overlap_events": True,
            }
        return config

    def _count_fetches(self) -> None:
        offloaded = {id(self._parameters[name]) for name in self._offloaded}

        def counted(gather: Callable[..., Any]) -> Callable[..., Any]:
            def all_gather_coalesced(parameters: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
                parameters = list(parameters)
                self._moved_bytes += sum(_bytes(parameter) for parameter in parameters if id(parameter) in offloaded)
                return gather(parameters, *args, **kwargs)

            return all_gather_coalesced

        for parameter in self._parameters.values():
            parameter.all_gather_coalesced = counted(parameter.all_gather_coalesced)

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        before, step = self._moved_bytes, is_step(works)
        logits = super().forward(works)
        if step:
            self._streamed_per_step = self._moved_bytes - before
        return logits

    def passes_of(self, rows: int, count: int) -> int:
        """Return how many of the model's passes `count` tokens take."""
        split = count > 1 and bool(self._kinds_of_layers)
        return len(self._split(slice(0, rows), count)) if split else 1

    @torch.inference_mode()
    def idle_pass(self) -> None:
        """Run a forward pass without rows, for other ranks' gathers."""
        self.calls += 1
        inputs = {"input_ids": torch.zeros((1, 1), dtype=torch.int64, device=self.device), "use_cache": False}
        self.model(**{name: value for name, value in inputs.items() if name in self._accepted})

    def _call(self, batch: DecoderBatch, **inputs: object) -> Tensor:
        self.calls += 1
        depth = len(world.modules_under_way())
        try:
            return super()._call(batch, **inputs)
        except BaseException:
            self._recover(depth)
            raise

    def _recover(self, depth: int) -> None:
        """Release what an interrupted pass, begun at `depth` modules, left fetched."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        del world.modules_under_way()[depth:]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.model.ds_inflight_param_registry.clear()
        for parameter in self._parameters.values():
            if parameter.ds_status == ZeroParamStatus.INFLIGHT:
                parameter.ds_status = ZeroParamStatus.AVAILABLE
        self._engine.empty_partition_cache()

    def effective(self) -> Effective:
        sizes = {"gpu": 0, "host": 0, "nvme": 0}
        for name, parameter in self._parameters.items():
            size, own = _bytes(parameter), parameter.ds_tensor
            away = name in self._offloaded and own.device.type == "cpu"
            if away:
                sizes["host" if own.final_location is None else "nvme"] += size
            if parameter.ds_persist or not away:
                sizes["gpu"] += size if parameter.ds_persist else int(own.ds_numel) * int(parameter.element_size())
        in_arena = self._arena.size if self._arena is not None and self._arena.pinned else 0
        more = {"leaf_layers": self.options.tuned, "attention": self.model.config._attn_implementation}
        return Effective(
            gpu_weight_bytes=sizes["gpu"],
            host_weight_bytes=sizes["host"],
            nvme_weight_bytes=sizes["nvme"],
            streamed_bytes_per_step=self._streamed_per_step,
            pinned_bytes=pinned_bytes() - self._pinned_before + in_arena,
            settings=self._settings | more,
        )

    def _free_weights(self) -> None:
        """Free the weights' memory, which DeepSpeed's caches may refer to. Its list of modules holds the model."""
        stack, model = world.modules_under_way(), getattr(self, "model", None)
        stack[:] = [module for module in stack if module is not model]
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
            if getattr(parameter, "ds_tensor", None) is not None:
                parameter.ds_tensor.data = parameter.data
        swappers = {id(s): s for p in self._parameters.values() if (s := getattr(p, "nvme_swapper", None)) is not None}
        for swapper in swappers.values():
            swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)
        self._parameters, self._engine = {}, None


def _bytes(parameter: Any) -> int:
    return int(parameter.ds_numel) * int(parameter.element_size())
