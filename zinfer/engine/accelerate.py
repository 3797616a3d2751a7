"""Hugging Face Accelerate: hooks that fetch a module's weights before it runs and drop them after it.

A fetch is a blocking copy, one weight at a time, on the stream that computes, and ends with freeing the device's cached
memory: nothing overlaps (Accelerate 1.15). Page-locked memory is worth a factor of six on PCIe. Weights outside the
decoder layers or shared by them stay on the device, and with `--gpu-weights` the first layers, as `device_map` does it.
"""

import dis
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from accelerate.hooks import attach_align_device_hook_on_blocks
from accelerate.utils import OffloadedWeightsLoader, offload_weight, save_offload_index
from torch import Tensor, nn

from zinfer.checkpoint.architecture import CACHE_NAMES
from zinfer.core.engine import AccelerateOptions
from zinfer.engine.base import Work, is_step
from zinfer.engine.decoder import Decoder, DecoderBatch, offload_folder
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.state import ModelState
from zinfer.record.measurement import Effective
from zinfer.system.scratch import Scratch


class Accelerate(Decoder[DecoderBatch]):
    """Engine `accelerate`: the model on the device, or most layers off it. Offload `none` keeps it whole, `cpu` and
    `nvme` keep all other layers in host memory or in files. Files are read through the page cache, as Accelerate does
    it: files that fit into free host memory are read from there."""

    options: AccelerateOptions
    _arena: PinnedArena | None = None
    _offloaded: "_Weights"
    _streamed_per_step = 0
    _stay: int | None = None  # layers that stay on the device; None without offload

    def _load(self) -> None:
        case = self.plan.case
        state = ModelState(self.plan.model, case.load_format, allow_nan=case.allow_nan)
        self.model = state.model
        away = set[int]()
        if case.offload != "none":
            away = set(range(len(state.layers))) - set(self.plan.placement.resident_layers)
            self._stay = len(state.layers) - len(away)
        parameters = {name: entry for name, entry in state.entries.items() if entry.is_parameter}
        streamed = {name: entry.tensor for name, entry in parameters.items() if entry.layer in away}
        host: dict[str, Tensor] = {}
        index: dict[str, dict[str, Any]] = {}
        folder: Scratch | None = None
        if case.offload == "cpu":
            blocks, size = lay_out(streamed.items())
            self._arena = PinnedArena(size, self.options.pin_memory and self.device.type == "cuda", self.progress)
            self._opened.callback(self._arena.close)
            host = self._arena.views(blocks)
        elif case.offload == "nvme":
            folder = self._opened.enter_context(offload_folder(self.plan.nvme_path))
        resident: dict[str, Tensor] = {}
        for name, tensor in state.load(self.device, self.progress):
            if name in host:
                host[name].copy_(tensor)
            elif name in streamed and folder is not None:
                offload_weight(tensor, name, folder.path, index)
            else:
                resident[name] = tensor.to(self.device, copy=True)
        for name, tensor in resident.items():
            state.entries[name].put(tensor)
        if folder is not None:
            save_offload_index(index, folder.path)
        shared = {
            name: module.get_parameter(leaf)
            for entry in parameters.values() if entry.layer is None and streamed
            for name, (module, leaf) in zip(entry.names, entry.places, strict=True)
            if name.startswith(f"{state.stack}.")
        }  # fmt: skip
        self._offloaded = _Weights(host, str(folder.path) if index and folder is not None else None, shared)
        if streamed:
            layers = {f"{state.stack}.{number}": number in away for number in range(len(state.layers))}
            attach_align_device_hook_on_blocks(
                self.model,
                execution_device=dict.fromkeys(["", *layers], self.device),
                offload=layers,
                weights_map=self._offloaded,
                skip_keys=list(self.model._skip_keys_device_placement or CACHE_NAMES),
                preload_module_classes=sorted({type(p).__name__ for p in self.model.modules() if _reads_children(p)}),
            )
        self._ready()

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        before, step = self._offloaded.bytes_read, is_step(works)
        logits = super().forward(works)
        if step:
            self._streamed_per_step = self._offloaded.bytes_read - before
        return logits

    def effective(self) -> Effective:
        # Hooks take the weights that layers share away, too.
        parameters = dict(self.model.named_parameters()) | self._offloaded.shared
        away = {name: parameter.nbytes for name, parameter in parameters.items() if parameter.is_meta}
        kept = {id(parameter): parameter.nbytes for name, parameter in parameters.items() if name not in away}
        on_disk = sum(size for name, size in away.items() if name in self._offloaded.index)
        arena = self._arena if self._arena is not None and self._arena.pinned else None
        settings = {"pin_memory": arena is not None, "attention": self.model.config._attn_implementation}
        return Effective(
            gpu_weight_bytes=sum(kept.values()),
            host_weight_bytes=sum(away.values()) - on_disk,
            nvme_weight_bytes=on_disk,
            streamed_bytes_per_step=self._streamed_per_step,
            pinned_bytes=0 if arena is None else arena.size,
            settings=settings | ({} if self._stay is None else {"resident_layers": self._stay}),
        )


def _reads_children(module: nn.Module) -> bool:
    """Tell whether a module reads its children's weights, past their hooks."""
    children = dict(module.named_children())
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for method in filter(inspect.isfunction, map(inspect.unwrap, vars(kind).values())):
            names = [step.argval for step in dis.get_instructions(method) if step.opname == "LOAD_ATTR"]
            if any(child in children and name in children[child]._parameters for child, name in pairwise(names)):
                return True
    return False


class _Weights(OffloadedWeightsLoader):  # type: ignore[misc]
    """Accelerate's map of offloaded weights, which counts bytes; `shared` ones stay."""

    def __init__(self, host: dict[str, Tensor], folder: str | None, shared: dict[str, nn.Parameter]) -> None:
        super().__init__(state_dict=host, save_folder=folder)
        self.bytes_read, self.shared = 0, shared

    def __getitem__(self, key: str) -> Tensor:
        if key in self.shared:
            return self.shared[key]
        tensor: Tensor = super().__getitem__(key)
        self.bytes_read += tensor.nbytes
        return tensor
