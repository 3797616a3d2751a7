"""Layers as they cross the link: what shrinks is coded, the rest goes as it is, all of a layer in one range of bytes.

The range comes in one copy, is unpacked into the slot that the layer's parameters are views of, and is free again.
Unpacking is far faster than the link, and one slot is enough: while a layer computes in it, the next ones wait packed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from zinfer.engine.arena import ALIGNMENT, Block, HostArena
from zinfer.engine.stream import codec
from zinfer.engine.stream.ring import Ring


@dataclass(frozen=True)
class Coded:
    """A coded tensor: where its data begin in the image, and where it goes in the slot."""

    offset: int
    layout: codec.Layout
    block: Block


@dataclass(frozen=True)
class Image:
    """A layer as it lies in the arena, from `start` to `end`, and in a slot of `slot_bytes`."""

    start: int
    end: int
    slot_bytes: int
    blocks: Mapping[str, Block]  # of all parameters, in the slot
    coded: tuple[Coded, ...]
    raw: tuple[int, int, int]  # the rest: offset in the image, offset in the slot, bytes


def pack(tensors: Mapping[str, Tensor], arena: HostArena) -> Image:
    """Put a layer's parameters into `arena`, behind what it holds; they may lie on any device."""
    coded: list[Coded] = []
    data: list[Tensor] = []
    blocks: dict[str, Block] = {}
    rest: dict[str, Tensor] = {}
    offset = slot = 0
    for name, tensor in tensors.items():
        found = codec.encode(tensor, codec.MIN_NUMEL)
        if found is None:
            rest[name] = tensor
            continue
        blocks[name] = Block(slot, tensor.shape, tensor.dtype)
        coded.append(Coded(offset, found.layout, blocks[name]))
        data.append(found.data.clone())
        offset, slot = offset + _aligned(found.layout.size), slot + _aligned(blocks[name].size)
    raw_offset, raw_slot = offset, slot
    for name, tensor in rest.items():
        blocks[name] = Block(slot, tensor.shape, tensor.dtype)
        slot += _aligned(blocks[name].size)
    size = raw_offset + slot - raw_slot
    start = arena.used
    memory = arena.take(size)
    for piece, content in zip(coded, data, strict=True):
        memory[piece.offset : piece.offset + content.numel()].copy_(content)
    for name, tensor in rest.items():
        blocks[name].view(memory, raw_offset - raw_slot).copy_(tensor)
    return Image(start, start + size, slot, blocks, tuple(coded), (raw_offset, raw_slot, slot - raw_slot))


def by_layer(
    prefix: str, loaded: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[int | None, Iterator[tuple[str, Tensor]]]]:
    """What `loaded` gives, a decoder layer at a time, by the names within it; None for what lies outside the layers.

    The tensors are loans until the next one, in either iterator.
    """

    def layer_of(item: tuple[str, Tensor]) -> int | None:
        return int(item[0].removeprefix(prefix).split(".", 1)[0]) if item[0].startswith(prefix) else None

    for index, group in groupby(loaded, layer_of):
        start = 0 if index is None else len(f"{prefix}{index}.")
        yield index, ((name[start:], tensor) for name, tensor in group)


def unpack(image: Image, wire: Tensor, slot: Tensor) -> None:
    """Fill `slot` with the layer whose image's bytes are at the front of `wire`; on a GPU, on the current stream."""
    for piece in image.coded:
        codec.decode(wire[piece.offset :][: piece.layout.size], piece.layout, piece.block.view(slot))
    offset, place, size = image.raw
    slot[place : place + size].copy_(wire[offset : offset + size], non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class CodedRing(Ring):
    """A ring of packed layers, and one slot that each is unpacked into when its turn comes."""

    def __init__(self, source: Tensor, images: list[Image], depth: int, device: torch.device) -> None:
        super().__init__(source, [*(image.start for image in images), images[-1].end], depth, device)
        self._images = images
        self._slot = torch.empty(max(image.slot_bytes for image in images), dtype=torch.uint8, device=device)

    def bind(self, index: int, layer: nn.Module) -> None:
        """Let `layer`, the sequence's number `index`, find its parameters in the slot whenever it is called."""
        self._attach(index, layer, self._images[index].blocks, [self._slot])

    def _acquire(self, index: int) -> None:
        if index in self._kept:  # packed there, too: it holds more layers, and unpacking takes little
            unpack(self._images[index], self._kept[index], self._slot)
            return
        self._expect(index)
        turn = self._used % self.depth
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._ready[turn])
        unpack(self._images[index], self._slots[turn], self._slot)
        if self._cuda:
            self._free[turn].record()
        self._copy()

    def _release(self) -> None:
        self._used += 1

    def close(self) -> None:
        super().close()
        self._slot = torch.empty(0, dtype=torch.uint8)
