"""Packed layer: a layer's bytes in host memory, encoded where that makes them smaller, and their places in the slot.

The slot is the GPU memory that a layer computes from. A packed layer is cut into chunks of at most `PIECE` bytes in the
slot, or some times as many (`zinfer.core.engine.chunk_factor`). A chunk crosses the link in one copy and is unpacked in
one step, so that the GPU memory between link and slot is a few chunks, not a few layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zinfer.core.engine import CHUNK_BYTES, chunk_factor
from zinfer.engine.pinned import ALIGNMENT, TensorPlace, lay_out
from zinfer.engine.quantization.dequantize import Codes
from zinfer.engine.stream import codec, quantized

# Bytes of a chunk: enough for the link's full rate, and for its launches to be cheap.
PIECE = CHUNK_BYTES


class Memory(Protocol):
    """Memory that layers are packed into, as `zinfer.engine.pinned.PinnedArena`."""

    @property
    def used(self) -> int: ...  # bytes that were handed out
    def take(self, size: int, /) -> Tensor: ...  # the next `size` bytes, uint8


class LayerMemory:
    """Memory of `device` for one layer, which grows with what is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[Tensor] = []
        self.used = 0

    def take(self, size: int, /) -> Tensor:
        """Hand out the next `size` bytes, as uint8 ``[size]``. Raises torch.OutOfMemoryError."""
        self._taken.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.used += size
        return self._taken[-1]

    def whole(self) -> Tensor:
        """Return all that was taken, in one piece, and forget it."""
        taken, self._taken = self._taken, []
        return torch.cat(taken)


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `end` of the source, which go to `place` in the slot; `layout` is given if they are encoded."""

    start: int
    end: int
    place: int
    layout: codec.Layout | quantized.CodesLayout | None = None

    @property
    def size(self) -> int:
        """Bytes that cross the link."""
        return self.end - self.start


@dataclass(frozen=True)
class PackedLayer:
    """A layer's chunks, in the order of their copies, and the places of its parameters in a slot of `slot_bytes`."""

    pieces: tuple[Chunk, ...]
    blocks: Mapping[str, TensorPlace]
    slot_bytes: int

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def coded(self) -> bool:
        """True if a chunk is encoded, so that the bytes in host memory differ from those in the slot."""
        return any(piece.layout is not None for piece in self.pieces)


def plain(tensors: Iterable[tuple[str, Tensor]], start: int, gpus: int = 1) -> PackedLayer:
    """Return the packed layer of uncoded tensors (they may be on the meta device), from `start` on, laid out like the
    slot; `gpus` copy it together."""
    blocks, size = lay_out(tensors)
    return PackedLayer(tuple(_cut(start, 0, size, _largest_chunk(size, gpus))), blocks, size)


def pack(
    tensors: Mapping[str, Tensor],
    memory: Memory,
    coded: Mapping[str, tuple[Tensor, Sequence[Codes]]] | None = None,
    gpus: int = 1,
) -> PackedLayer:
    """Append a layer's parameters, on any device, to `memory`, encoded where that makes them smaller; `gpus` copy it
    together.

    `coded` are quantised parameters: a tensor of their shape and type (on the meta device, perhaps), and the matrices
    whose rows, one after the other, they consist of; of these only FP8 codes are encoded. Encoded tensors come first in
    the slot; the others lie together and cross the link together. Matrices too small to be encoded alone are encoded as
    one.
    """
    coded = coded or {}
    large = {name: tensor for name, tensor in tensors.items() if codec.worth_coding(tensor)}
    joined = codec.worth_joining({name: tensor for name, tensor in tensors.items() if name not in large})
    small = {name: tensor for name, tensor in tensors.items() if name not in large and name not in joined}
    shapes = [(name, tensor) for name, (tensor, _) in coded.items()]
    blocks, slot_bytes = lay_out([*shapes, *large.items(), *joined.items(), *small.items()])
    pieces: list[Chunk] = []
    for name, (tensor, matrices) in coded.items():
        place = blocks[name].offset
        most = _largest_chunk(slot_bytes, gpus, matrices[0].bits)
        for matrix in quantized.joined(matrices, tensor.dtype.itemsize, most):
            for layout, data in quantized.pieces(matrix, tensor.dtype, most, place):
                pieces.append(_put(memory, data, place, layout))
                place += layout.nbytes
    whole = [(blocks[name].offset, tensor.detach().contiguous().view(-1)) for name, tensor in large.items()]
    if joined:
        whole.append(_join(joined, blocks))
    for begin, values in whole:
        place = begin
        for part in values.split(_even_part(values, _largest_chunk(slot_bytes, gpus))):
            found = codec.encode(part)
            data = part.view(torch.uint8) if found is None else found.data
            pieces.append(_put(memory, data, place, None if found is None else found.layout))
            place += part.nbytes
    if small:
        place = min(blocks[name].offset for name in small)
        start = memory.used
        own = memory.take(slot_bytes - place)
        for name, tensor in small.items():
            blocks[name].view(own, -place).copy_(tensor)
        pieces += _cut(start, place, slot_bytes - place, _largest_chunk(slot_bytes, gpus))
    return PackedLayer(tuple(pieces), blocks, slot_bytes)


def _join(tensors: Mapping[str, Tensor], blocks: Mapping[str, TensorPlace]) -> tuple[int, Tensor]:
    """Return the place in the slot of bf16 tensors that follow each other there, and their values in one dimension;
    zeros fill what lies in between."""
    place = min(blocks[name].offset for name in tensors)
    end = max(blocks[name].offset + blocks[name].size for name in tensors)
    memory = torch.zeros(end - place, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for name, tensor in tensors.items():
        blocks[name].view(memory, -place).copy_(tensor)
    return place, memory.view(torch.bfloat16)


def _put(memory: Memory, data: Tensor, place: int, layout: codec.Layout | quantized.CodesLayout | None) -> Chunk:
    start = memory.used
    memory.take(-(-data.numel() // ALIGNMENT) * ALIGNMENT)[: data.numel()].copy_(data)
    return Chunk(start, start + data.numel(), place, layout)


def _largest_chunk(layer_bytes: int, gpus: int, bits: float = 16) -> int:
    """Return the most bytes of a chunk in the slot, for a layer of `layer_bytes` with weights of `bits` bits, which
    `gpus` copy together."""
    return PIECE * chunk_factor(bits, layer_bytes, gpus)


def _even_part(values: Tensor, most: int) -> int:
    """Return how many of `values` make a chunk of at most `most` bytes: as many in each, since the ring's buffers are
    as large as the largest one."""
    count, most = values.numel(), most // values.itemsize
    even = -(-count // -(-count // most))
    return min(most, -(-even // codec.BLOCK) * codec.BLOCK)


def _cut(start: int, place: int, size: int, most: int) -> Iterator[Chunk]:
    for done in range(0, size, most):
        yield Chunk(start + done, start + min(done + most, size), place + done)


def unpack(piece: Chunk, wire: Tensor, slot: Tensor) -> None:
    """Put `piece`, whose bytes are at the beginning of `wire`, in its place in `slot`; a GPU does so on the current
    stream."""
    if piece.layout is None:
        slot[piece.place : piece.place + piece.size].copy_(wire[: piece.size], non_blocking=True)
    elif isinstance(piece.layout, quantized.CodesLayout):
        out = slot[piece.place :][: piece.layout.nbytes].view(piece.layout.dtype)
        quantized.unpack(wire[: piece.layout.size], piece.layout, out)
    else:
        out = slot[piece.place :][: 2 * piece.layout.numel].view(torch.bfloat16)
        codec.decode(wire[: piece.layout.size], piece.layout, out)
