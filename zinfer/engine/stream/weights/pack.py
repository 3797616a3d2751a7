"""Packing of decoder layers while a model loads: one loop for every codec and every place that layers go to.

A codec packs a layer into the memory that its caller names: an arena of host memory, of one process or of all ranks,
memory of the device for a layer that stays there, or memory whose bytes are then written to files. Uncoded is the
identity codec, which copies each tensor to its place as it comes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zinfer.core.progress import Progress
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.quantization.dequantize import Codes
from zinfer.engine.state import Entry, Loaded, ModelState, by_layer
from zinfer.engine.stream.weights.chunk import LayerMemory, Memory, PackedLayer, pack, plain
from zinfer.engine.stream.weights.packed_experts import (
    Experts,
    PackedExperts,
    fill_experts,
    lay_out_experts,
    pack_experts,
)

AnyMemory = LayerMemory | PinnedArena


class Identity:
    """Codec that copies tensors to their places, uncoded. It packs one layer, whose entries come one by one."""

    def __init__(
        self, entries: Mapping[str, Entry], experts: Experts | None, memory: Memory, expert_memory: Memory, gpus: int
    ) -> None:
        self._layer = plain(dense_tensors(entries, experts), memory.used, gpus)
        self._content = memory.allocate(self._layer.size)
        self._experts, self._start = None, expert_memory.used
        if experts is not None:
            self._experts, end = lay_out_experts(experts, self._start)
            self._expert_content = expert_memory.allocate(end - self._start)

    def add(self, name: str, loaded: Loaded) -> None:
        """Take an entry. It is valid until the next one comes."""
        assert isinstance(loaded, Tensor)
        if name in self._layer.blocks:
            self._layer.blocks[name].view(self._content).copy_(loaded)
        elif self._experts is not None:
            fill_experts(self._experts, name, loaded, self._expert_content, self._start)

    def finish(self) -> tuple[PackedLayer, PackedExperts | None]:
        """Return the layer once all entries have come."""
        return self._layer, self._experts


class Lossless:
    """Codec that encodes tensors on `device` where that shrinks them; experts stay `plain`, if they are to."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        experts: Experts | None,
        memory: Memory,
        expert_memory: Memory,
        gpus: int,
        device: torch.device,
        plain: bool = False,
    ) -> None:
        self._entries, self._experts = entries, experts
        self._memory, self._expert_memory = memory, expert_memory
        self._gpus, self._device, self._plain = gpus, device, plain
        self._tensors: dict[str, Tensor] = {}
        self._codes: dict[str, list[Codes]] = {}

    def add(self, name: str, loaded: Loaded) -> None:
        if isinstance(loaded, Tensor):
            self._tensors[name] = loaded.to(self._device, copy=True)
        else:
            # Those on a GPU were made there, and are nobody else's.
            self._codes[name] = [codes if codes.numbers.is_cuda else codes.to(self._device) for codes in loaded]

    def finish(self) -> tuple[PackedLayer, PackedExperts | None]:
        on_demand = () if self._experts is None else self._experts.weights
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in on_demand}
        coded = {
            name: (self._entries[name].tensor, codes) for name, codes in self._codes.items() if name not in on_demand
        }
        quantised = sum(self._entries[name].tensor.numel() for name in self._codes)
        mostly = 2 * quantised > sum(entry.tensor.numel() for entry in self._entries.values())
        layer, experts = pack(tensors, self._memory, coded, self._gpus, mostly), None
        if self._experts is not None:
            experts = pack_experts(self._experts, self._tensors, self._codes, self._expert_memory, self._plain)
        return layer, experts


def dense_tensors(entries: Mapping[str, Entry], experts: Experts | None) -> list[tuple[str, Tensor]]:
    """Return the names and shapes of a layer's tensors, without `experts`."""
    on_demand = () if experts is None else experts.weights
    return [(name, entry.tensor) for name, entry in entries.items() if name not in on_demand]


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
        return lay_out(dense_tensors(self.state.of_layer(number), self.experts.get(number)))[1]

    def layers(
        self, memory_of: Callable[[int], tuple[AnyMemory, AnyMemory]], resident: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[int, PackedLayer, PackedExperts | None, AnyMemory]]:
        """Load the model, and yield each packed layer once it is whole. Yields its number, chunks, experts and memory,
        in any order. `memory_of` names the memory that a layer is packed into, and that of its experts. Entries outside
        the layers are copied to `resident`, by name, or skipped if that is None."""
        packers = dict[int, tuple[Identity | Lossless, AnyMemory]]()
        missing = dict[int, set[str]]()  # a buffer may come before the rest of its layer
        for index, group in by_layer(self.state, self.state.load(self.device, self.progress, stored=self.lossless)):
            if index is None:
                if resident is not None:
                    copy_into(resident, group)
                continue
            if index not in packers:
                entries, (memory, apart) = self.state.of_layer(index), memory_of(index)
                missing[index], given = set(entries), (entries, self.experts.get(index), memory, apart, self.gpus)
                packer = Lossless(*given, self.device, self.plain) if self.lossless else Identity(*given)
                packers[index] = packer, memory
            for name, tensor in group:
                packers[index][0].add(name, tensor)
                missing[index].discard(name)
            if not missing[index]:
                packer, memory = packers.pop(index)
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
