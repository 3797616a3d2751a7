"""A layer as bytes: in host memory, coded where that makes it smaller, and in the slot it computes from.

An image is cut into pieces of at most `PIECE` bytes in the slot. A piece is what crosses the link in one copy and is
unpacked in one go, so that the GPU memory between link and slot is a few pieces, not a few layers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zinfer.engine.pinned import ALIGNMENT, Block, PinnedArena, lay_out
from zinfer.engine.stream import codec
from zinfer.plan.cost import PIECE_BYTES

# Large enough for the link's full rate, and for the launches that go with it to be cheap.
PIECE = PIECE_BYTES


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `end` of the source, which become those from `place` on in the slot; `layout` if coded."""

    start: int
    end: int
    place: int
    layout: codec.Layout | None = None

    @property
    def size(self) -> int:
        """On the wire."""
        return self.end - self.start


@dataclass(frozen=True)
class PackedLayer:
    """A layer's pieces, in the order they are copied, and where its parameters are in a slot of `slot_bytes`."""

    pieces: tuple[Chunk, ...]
    blocks: Mapping[str, Block]
    slot_bytes: int

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def coded(self) -> bool:
        """Whether the bytes at `start` are other ones than those in the slot."""
        return any(piece.layout is not None for piece in self.pieces)


def plain(tensors: Iterable[tuple[str, Tensor]], start: int) -> PackedLayer:
    """The image from `start` on of tensors (they may be on the meta device) as they are; it is laid out as the slot."""
    blocks, size = lay_out(tensors)
    return PackedLayer(tuple(_cut(start, 0, size)), blocks, size)


def pack(tensors: Mapping[str, Tensor], arena: PinnedArena) -> PackedLayer:
    """Put a layer's parameters into `arena`, behind what it holds, coded where they shrink; they may lie on any device.

    Tensors that are coded come first in the slot; what is not coded lies together and crosses together.
    """
    large = {name: tensor for name, tensor in tensors.items() if codec.worth_coding(tensor)}
    small = {name: tensor for name, tensor in tensors.items() if name not in large}
    blocks, slot_bytes = lay_out([*large.items(), *small.items()])
    pieces: list[Chunk] = []
    for name, tensor in large.items():
        place = blocks[name].offset
        for part in tensor.detach().contiguous().view(-1).split(PIECE // tensor.itemsize):
            found = codec.encode(part)
            data = part.view(torch.uint8) if found is None else found.data
            pieces.append(_put(arena, data, place, None if found is None else found.layout))
            place += part.nbytes
    if small:
        place = min(blocks[name].offset for name in small)
        start = arena.used
        memory = arena.take(slot_bytes - place)
        for name, tensor in small.items():
            blocks[name].view(memory, -place).copy_(tensor)
        pieces += _cut(start, place, slot_bytes - place)
    return PackedLayer(tuple(pieces), blocks, slot_bytes)


def _put(arena: PinnedArena, data: Tensor, place: int, layout: codec.Layout | None) -> Chunk:
    start = arena.used
    arena.take(-(-data.numel() // ALIGNMENT) * ALIGNMENT)[: data.numel()].copy_(data)
    return Chunk(start, start + data.numel(), place, layout)


def _cut(start: int, place: int, size: int) -> Iterator[Chunk]:
    for done in range(0, size, PIECE):
        yield Chunk(start + done, start + min(done + PIECE, size), place + done)


def unpack(piece: Chunk, wire: Tensor, slot: Tensor) -> None:
    """Put `piece`, whose bytes are at the front of `wire`, in its place; on a GPU, on the current stream."""
    if piece.layout is None:
        slot[piece.place : piece.place + piece.size].copy_(wire[: piece.size], non_blocking=True)
    else:
        out = slot[piece.place :][: 2 * piece.layout.numel].view(torch.bfloat16)
        codec.decode(wire[: piece.layout.size], piece.layout, out)
