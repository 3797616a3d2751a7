"""Packing of decoder layers while a model loads: one loop for every place that layers go to.

A layer is packed into the memory that its caller names: an arena of host memory, of one process or of all ranks, memory
of the device for a layer that stays there, or memory whose bytes are then written to files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zinfer.core.progress import Progress
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.quantization.dequantize import Codes
from zinfer.engine.state import Loaded, ModelState, by_layer
from zinfer.engine.stream.weights.chunk import LayerMemory, Memory, PackedLayer, pack
from zinfer.engine.stream.weights.packed_experts import (
    Experts,
    PackedExperts,
    pack_experts,
)

AnyMemory = LayerMemory | PinnedArena


class LayerPacker:
    """Packing of one layer, whose entries come one by one. What shrinks is encoded on the device of `how`."""

    def __init__(self, how: "Packing", number: int, memory: Memory, expert_memory: Memory) -> None:
        self._how, self._experts, self._entries = how, how.experts.get(number), how.state.of_layer(number)
        self._memory, self._expert_memory = memory, expert_memory
        self._device = how.device if how.lossless else torch.device("cpu")
        self.missing = set(self._entries)  # a buffer may come before the rest of its layer
        self._tensors: dict[str, Tensor] = {}
        self._codes: dict[str, list[Codes]] = {}

    def add(self, name: str, loaded: Loaded) -> None:
        """Take an entry. It is valid until the next one comes."""
        self.missing.discard(name)
        if isinstance(loaded, Tensor):
            self._tensors[name] = loaded.to(self._device, copy=True)
        else:
            # Those on a GPU were made there, and are nobody else's.
            self._codes[name] = [codes if codes.numbers.is_cuda else codes.to(self._device) for codes in loaded]

    def finish(self) -> tuple[PackedLayer, PackedExperts | None]:
        """Return the layer once all entries have come."""
        how, on_demand = self._how, () if self._experts is None else self._experts.weights
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in on_demand}
        coded = {
            name: (self._entries[name].tensor, codes) for name, codes in self._codes.items() if name not in on_demand
        }
        quantised = sum(self._entries[name].tensor.numel() for name in self._codes)
        mostly = 2 * quantised > sum(entry.tensor.numel() for entry in self._entries.values())
        layer, experts = pack(tensors, self._memory, coded, how.gpus, mostly, not how.lossless), None
        if self._experts is not None:
            plain = how.plain or not how.lossless
            experts = pack_experts(self._experts, self._tensors, self._codes, self._expert_memory, plain)
        return layer, experts


@dataclass(frozen=True)
class Packing:
    """Load of a model whose layers are packed. Layers are encoded on `device` if `lossless`. `experts` come on demand,
    by layer, not encoded if `plain`; `gpus` copy a layer together."""

    state: ModelState
    lossless: bool
    device: torch.device
    progress: Progress
    experts: Mapping[int, Experts] = field(default_factory=dict)
    gpus: int = 1
    plain: bool = False

    def unpacked_bytes(self, number: int) -> int:
        """Return the bytes of a layer, without its experts, uncoded."""
        on_demand = self.experts[number].weights if number in self.experts else ()
        entries = self.state.of_layer(number).items()
        return lay_out((name, entry.tensor) for name, entry in entries if name not in on_demand)[1]

    def layers(
        self, memory_of: Callable[[int], tuple[AnyMemory, AnyMemory]], resident: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[int, PackedLayer, PackedExperts | None, AnyMemory]]:
        """Load the model, and yield each packed layer once it is whole. Yields its number, chunks, experts and memory,
        in any order. `memory_of` names the memory that a layer is packed into, and that of its experts. Entries outside
        the layers are copied to `resident`, by name, or skipped if that is None."""
        packers = dict[int, tuple[LayerPacker, AnyMemory]]()
        for index, group in by_layer(self.state, self.state.load(self.device, self.progress, stored=self.lossless)):
            if index is None:
                if resident is not None:
                    copy_into(resident, group)
                continue
            if index not in packers:
                memory, apart = memory_of(index)
                packers[index] = LayerPacker(self, index, memory, apart), memory
            packer, memory = packers[index]
            for name, tensor in group:
                packer.add(name, tensor)
            if not packer.missing:
                del packers[index]
                layer, packed_experts = packer.finish()
                del packer  # its tensors, before the caller copies the layer
                yield index, layer, packed_experts, memory

    def one_by_one(self, resident: Mapping[str, Tensor] | None = None) -> Iterator[tuple[int, PackedLayer, Tensor]]:
        """Load the model as `layers` does; yield each layer's number, places from byte 0 on, and bytes. These are
        valid until the next layer is requested."""

        def memory_of(number: int) -> tuple[PinnedArena, PinnedArena]:
            return (PinnedArena(self.unpacked_bytes(number), pin=False, grow=True),) * 2

        for number, layer, _, arena in self.layers(memory_of, resident):
            assert isinstance(arena, PinnedArena)
            yield number, layer, arena.memory
            arena.close()


def copy_into(resident: Mapping[str, Tensor], loaded: Iterable[tuple[str, Loaded]]) -> None:
    """Copy weights to their places on the device, by name."""
    for name, tensor in loaded:
        assert isinstance(tensor, Tensor)
        resident[name].copy_(tensor)
