"""Hugging Face Accelerate: hooks that fetch a module's weights before it runs and drop them after it.

A fetch is a blocking copy, one weight at a time, on the stream that computes, and ends with freeing the device's cached
memory (`set_module_tensor_to_device`). Nothing overlaps: a step takes copies, allocations and compute together.
Page-locked memory, which a user can add, is worth a factor of six on PCIe; Accelerate pins nothing by itself.
Weights outside the decoder layers stay on the device, as a user's device map would have it.
"""

from collections.abc import Sequence
from typing import Any

from accelerate.hooks import attach_align_device_hook_on_blocks
from accelerate.utils import OffloadedWeightsLoader, offload_weight, save_offload_index
from torch import Tensor

from zinfer.engine.base import Work, is_step
from zinfer.engine.decoder import Decoder, scratch
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.state import ModelState
from zinfer.record.measurement import Effective
from zinfer.spec.engine import AccelerateOptions
from zinfer.spec.lease import OwnFolder


class Accelerate(Decoder):
    """Engine `accelerate`: the model whole on the device (`none`), or its layers in host memory (`cpu`) or in files
    (`nvme`).

    Files are read through the page cache, as Accelerate does it: files that fit into free host memory are read from
    there.
    """

    options: AccelerateOptions
    _arena: PinnedArena | None = None
    _folder: OwnFolder | None = None
    _offloaded: "_Weights | None" = None
    _streamed_per_step = 0

    def _load(self) -> None:
        case = self.plan.case
        state = ModelState(self.plan.model, case.load_format, allow_nan=case.allow_nan)
        self.model = state.model
        streamed = {
            name: entry.tensor
            for name, entry in state.entries.items()
            if case.offload != "none" and entry.layer is not None and entry.is_parameter
        }
        host: dict[str, Tensor] = {}
        index: dict[str, dict[str, Any]] = {}
        if case.offload == "cpu":
            blocks, size = lay_out(streamed.items())
            pin = self.options.pin_memory and self.device.type == "cuda"
            self._arena = PinnedArena(size, pin, self.progress)
            host = self._arena.views(blocks)
        elif case.offload == "nvme":
            self._folder = scratch(self.plan.nvme_path, ("*.dat", "index.json"))
        resident: dict[str, Tensor] = {}
        for name, tensor in state.load(self.device, self.progress):
            if name in host:
                host[name].copy_(tensor)
            elif name in streamed and self._folder is not None:
                offload_weight(tensor, name, self._folder.name, index)
            else:
                resident[name] = tensor.to(self.device, copy=True)
        for name, tensor in resident.items():
            state.entries[name].put(tensor)
        if streamed:
            if self._folder is not None:
                save_offload_index(index, self._folder.name)
            self._offloaded = _Weights(host, self._folder.name if self._folder else None)
            self._attach([f"{state.stack}.{number}" for number in range(len(state.layers))])
        self._ready()

    def _attach(self, layers: list[str]) -> None:
        """Set Accelerate's own hooks on `layers`, as `dispatch_model` sets them for a device map that offloads
        these."""
        attach_align_device_hook_on_blocks(
            self.model,
            execution_device=dict.fromkeys(["", *layers], self.device),
            offload=dict.fromkeys(layers, True),
            weights_map=self._offloaded,
            skip_keys=list(self.model._skip_keys_device_placement or ["past_key_values"]),
        )

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        before, step = self._offloaded.bytes_read if self._offloaded is not None else 0, is_step(works)
        logits = super().forward(works)
        if self._offloaded is not None and step:
            self._streamed_per_step = self._offloaded.bytes_read - before
        return logits

    def effective(self) -> Effective:
        parameters = dict(self.model.named_parameters())
        away = {name: parameter.nbytes for name, parameter in parameters.items() if parameter.is_meta}
        on_disk = {name for name in away if self._offloaded is not None and name in self._offloaded.index}
        pinned = self._arena is not None and self._arena.pinned
        return Effective(
            gpu_weight_bytes=sum(parameter.nbytes for parameter in parameters.values() if not parameter.is_meta),
            host_weight_bytes=sum(size for name, size in away.items() if name not in on_disk),
            nvme_weight_bytes=sum(away[name] for name in on_disk),
            streamed_bytes_per_step=self._streamed_per_step,
            pinned_bytes=self._arena.size if self._arena is not None and pinned else 0,
            settings={
                "pin_memory": pinned,
                "attention": self.model.config._attn_implementation,
            },
        )

    def close(self) -> None:
        super().close()
        self._offloaded = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Weights(OffloadedWeightsLoader):  # type: ignore[misc]
    """Accelerate's map from names to offloaded weights, in memory or in files, with a count of the bytes read from
    it."""

    def __init__(self, host: dict[str, Tensor], folder: str | None) -> None:
        super().__init__(state_dict=host, save_folder=folder)
        self.bytes_read = 0

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = super().__getitem__(key)
        self.bytes_read += tensor.nbytes
        return tensor
