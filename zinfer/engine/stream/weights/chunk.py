"""Packed layer: a layer's bytes in host memory, encoded where that shrinks them, and their places once unpacked.

The GPU computes a layer from one layer buffer. A packed layer is cut into chunks of at most `CHUNK_BYTES` unpacked, or
some times as many (`zinfer.core.engine.chunk_factor`). A chunk crosses the link in one copy and is unpacked in one
step, so that the GPU memory between link and layer buffer is a few chunks, not a few layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zinfer.core.engine import CHUNK_BYTES, chunk_factor
from zinfer.engine.pinned import ALIGNMENT, TensorPlace, lay_out
from zinfer.engine.quantization.dequantize import Codes
from zinfer.engine.stream.weights import codec, formats


class Memory(Protocol):
    """Memory that layers are packed into, as `zinfer.engine.pinned.PinnedArena`."""

    @property
    def used(self) -> int: ...  # bytes that were handed out
    def allocate(self, size: int, /) -> Tensor: ...  # the next `size` bytes, uint8


class LayerMemory:
    """Memory of `device` for one layer, which grows with each allocation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Tensor] = []
        self.used = 0

    def allocate(self, size: int, /) -> Tensor:
        """Allocate the next `size` bytes, as uint8 ``[size]``. Raises torch.OutOfMemoryError."""
        self._parts.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.used += size
        return self._parts[-1]

    def whole(self) -> Tensor:
        """Return all bytes as one tensor, and drop them here."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Repeat(NamedTuple):
    """Chunks alike that are unpacked together: how many, and the bytes from one to the next, packed and unpacked."""

    times: int = 1
    packed: int = 0
    unpacked: int = 0


ONCE = Repeat()


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `end` of the source, unpacked to `place`. `place` is a byte of the layer buffer; `layout` tells
    how they are encoded, None that they are not."""

    start: int
    end: int
    place: int
    layout: codec.Layout | formats.CodesLayout | None = None

    @property
    def size(self) -> int:
        """Bytes that cross the link."""
        return self.end - self.start

    @property
    def unpacked_bytes(self) -> int:
        """Bytes in the layer buffer."""
        return self.size if self.layout is None else self.layout.nbytes

    @property
    def repeats(self) -> bool:
        """True if chunks like it may be unpacked together."""
        return self.layout is None or (isinstance(self.layout, formats.CodesLayout) and self.layout.coded is None)

    def unpack(self, wire: Tensor, layer_buffer: Tensor, repeat: Repeat = ONCE) -> None:
        """Unpack the first bytes of `wire` into `layer_buffer`. If the chunk `repeats`, those of `repeat`, too. A
        GPU does so on the current stream."""
        times, packed, unpacked = repeat
        out = layer_buffer[self.place : self.place + (times - 1) * unpacked + self.unpacked_bytes]
        if self.layout is None:
            shape = times, self.size
            out.as_strided(shape, (unpacked, 1)).copy_(wire.as_strided(shape, (packed, 1)), non_blocking=True)
        elif isinstance(self.layout, formats.CodesLayout):
            wire = wire[: (times - 1) * packed + self.layout.size]
            formats.unpack(wire, self.layout, out.view(self.layout.dtype), times, (packed, unpacked))
        else:
            codec.decode(wire[: self.layout.size], self.layout, out.view(torch.bfloat16))


@dataclass(frozen=True)
class PackedLayer:
    """A layer's chunks, in copy order, and its parameters' places. These are in the layer buffer."""

    chunks: tuple[Chunk, ...]
    blocks: Mapping[str, TensorPlace]
    unpacked_bytes: int

    @property
    def start(self) -> int:
        return self.chunks[0].start if self.chunks else 0

    @property
    def end(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    @property
    def size(self) -> int:
        """Bytes in the source."""
        return self.end - self.start

    @property
    def coded(self) -> bool:
        """True if a chunk is encoded."""
        return any(chunk.layout is not None for chunk in self.chunks)

    @cached_property
    def in_place(self) -> Mapping[str, int]:
        """Parameters that the layer's bytes hold as they are. Their places are shifted there by these bytes."""
        shifts = dict[str, int]()
        for name, block in self.blocks.items():
            of_chunks = {None if chunk.layout else chunk.start - chunk.place for chunk in self.chunks_of(block)}
            if len(of_chunks) == 1 and (shift := of_chunks.pop()) is not None:
                shifts[name] = shift - self.start
        return shifts

    @cached_property
    def chunks_to_unpack(self) -> tuple[Chunk, ...]:
        """Chunks with a parameter that is not `in_place`."""
        others = [block for name, block in self.blocks.items() if name not in self.in_place]
        starts = {chunk.start for block in others for chunk in self.chunks_of(block)}
        return tuple(chunk for chunk in self.chunks if chunk.start in starts)

    def chunks_of(self, block: TensorPlace) -> list[Chunk]:
        """Return the chunks that hold a parameter, or part of it."""
        first, end = block.offset, block.offset + block.size
        return [chunk for chunk in self.chunks if chunk.place < end and first < chunk.place + chunk.unpacked_bytes]


def pack(
    tensors: Mapping[str, Tensor],
    memory: Memory,
    coded: Mapping[str, tuple[Tensor, Sequence[Codes]]] | None = None,
    gpus: int = 1,
    mostly: bool = False,
    plain: bool = False,
) -> PackedLayer:
    """Append a layer's parameters to `memory`, encoded where that shrinks them. They may be on any device. `coded` are
    quantised parameters: a tensor of their shape and type (on the meta device, perhaps), and the matrices whose rows,
    one after the other, they consist of; of these only FP8 codes are encoded. Encoded tensors come first in the layer
    buffer; the others lie together and cross the link together. `gpus` copy the layer together. Of a layer that is
    `mostly` quantised the rest is not encoded: that would save a per cent of its bytes, and cost each pass the decoding
    where it stays. If `plain`, nothing is."""
    coded, mostly = coded or {}, mostly or plain
    large = {name: tensor for name, tensor in tensors.items() if not mostly and codec.worth_coding(tensor)}
    small = {name: tensor for name, tensor in tensors.items() if name not in large}
    shapes = [(name, tensor) for name, (tensor, _) in coded.items()]
    blocks, size = lay_out([*shapes, *large.items(), *small.items()])
    blocks |= {name: place_of(blocks[name], matrices) for name, (_, matrices) in coded.items()}
    chunks: list[Chunk] = []
    for name, (tensor, matrices) in coded.items():
        offset, max_bytes = blocks[name].offset, _largest_chunk(size, gpus, matrices[0].bits)
        for matrix in formats.join(matrices, tensor.dtype.itemsize, max_bytes):
            for layout, data in formats.encode_chunks(matrix, tensor.dtype, max_bytes, offset, plain):
                chunks.append(_store(memory, data, offset, layout))
                offset += layout.nbytes
    max_bytes = _largest_chunk(size, gpus)
    for name, tensor in large.items():
        offset, values = blocks[name].offset, tensor.detach().contiguous().view(-1)
        for part in values.split(_even_part(values, max_bytes)):
            encoded = codec.encode(part)
            data, encoding = (part.view(torch.uint8), None) if encoded is None else (encoded.data, encoded.layout)
            chunks.append(_store(memory, data, offset, encoding))
            offset += part.nbytes
    if small:
        offset = min(blocks[name].offset for name in small)
        start, content = memory.used, memory.allocate(size - offset)
        for name, tensor in small.items():
            blocks[name].view(content, -offset).copy_(tensor)
        chunks += _cut(start, offset, size - offset, max_bytes)
    return PackedLayer(tuple(chunks), blocks, size)


def place_of(place: TensorPlace, matrices: Sequence[Codes]) -> TensorPlace:
    """Return the place of a quantised tensor. It consists of the rows of `matrices`."""
    return replace(place, transposed=matrices[0].transposed)


def _store(memory: Memory, data: Tensor, offset: int, layout: codec.Layout | formats.CodesLayout | None) -> Chunk:
    start = memory.used
    memory.allocate(-(-data.numel() // ALIGNMENT) * ALIGNMENT)[: data.numel()].copy_(data)
    return Chunk(start, start + data.numel(), offset, layout)


def _largest_chunk(layer_bytes: int, gpus: int, bits: float = 16) -> int:
    return CHUNK_BYTES * chunk_factor(bits, layer_bytes, gpus)


def _even_part(values: Tensor, max_bytes: int) -> int:
    """Return how many values make a chunk, equal in all. Ring buffers are as large as the largest one."""
    count, limit = values.numel(), max_bytes // values.itemsize
    even = -(-count // -(-count // limit))
    return min(limit, -(-even // codec.BLOCK) * codec.BLOCK)


def _cut(start: int, offset: int, size: int, max_bytes: int) -> Iterator[Chunk]:
    for done in range(0, size, max_bytes):
        yield Chunk(start + done, start + min(done + max_bytes, size), offset + done)
