"""Packed experts: each routed expert of a layer is a run of bytes of its own in host memory, encoded like a layer.

The classes of experts that `transformers` dispatches through its `ExpertsInterface` keep their weights stacked, ``[E,
..]`` (`zinfer.engine.stream.experts.modules`), so that they are taken apart without code for architectures.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from zinfer.engine.pinned import ALIGNMENT, TensorPlace, lay_out
from zinfer.engine.quantization.dequantize import Codes, expand
from zinfer.engine.state import Entry
from zinfer.engine.stream.weights.chunk import Chunk, Memory, Repeat, pack, place_of

UNIT = 16  # bytes; kernels that unpack write to multiples of it
PART_BYTES = 16 << 20  # smallest copy of an expert that is unpacked once it has arrived: enough for the link's rate
RUN_BYTES = 64 << 20  # of small experts that come and are unpacked together: launches of each alone take longer

Key = tuple[int, int]  # numbers of a layer and of an expert in it


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: their module, and its stacked weights. The weights go by their names within the
    layer."""

    module: nn.Module
    weights: Mapping[str, Entry]
    count: int


@dataclass(frozen=True)
class PackedExpert:
    """Chunks of one expert, which follow each other in host memory."""

    chunks: tuple[Chunk, ...]
    unpacked_bytes: int

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def size(self) -> int:
        """Bytes that cross the link."""
        return self.chunks[-1].end - self.start

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Ends of the copies, in bytes from the beginning: each brings a chunk, or several small ones."""
        ends = [0]
        for chunk in self.chunks:
            if chunk.end - self.start - ends[-1] >= PART_BYTES:
                ends.append(chunk.end - self.start)
        return tuple(ends[1:]) if ends[-1] == self.size else (*ends[1:], self.size)

    def part_of(self, chunk: Chunk) -> int:
        """Return the number of the copy that brings the end of `chunk`."""
        return bisect_left(self.parts, chunk.end - self.start)


@dataclass(frozen=True)
class PackedExperts:
    """Packed experts of a layer, and the places of its stacked weights."""

    experts: tuple[PackedExpert, ...]
    blocks: Mapping[str, TensorPlace]
    unpacked_bytes: int

    @property
    def start(self) -> int:
        return self.experts[0].start

    @property
    def size(self) -> int:
        """Bytes of all experts, which follow each other."""
        return self.experts[-1].chunks[-1].end - self.start

    @cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """Distances between chunks of successive experts. Empty unless all are alike."""
        first, *others = self.experts
        if not others or not all(chunk.repeats for chunk in first.chunks):
            return ()
        packed = others[0].start - first.start
        steps = tuple(
            Repeat(packed=packed, unpacked=after.place - chunk.place)
            for chunk, after in zip(first.chunks, others[0].chunks, strict=False)
        )

        def follows(number: int, expert: PackedExpert) -> bool:
            expected = (
                replace(chunk, start=chunk.start + number * packed, end=chunk.end + number * packed,
                        place=chunk.place + number * step.unpacked)
                for chunk, step in zip(first.chunks, steps, strict=True)
            )  # fmt: skip
            return tuple(expected) == expert.chunks

        alike = len(steps) == len(first.chunks) and all(follows(*pair) for pair in enumerate(self.experts))
        return steps if alike else ()

    def run(self, buffer_bytes: int) -> int:
        """Return how many experts come and are unpacked together. A buffer has `buffer_bytes`."""
        together = bool(self.repeats) and self.repeats[0].packed == buffer_bytes
        return max(1, RUN_BYTES // buffer_bytes) if together else 1


def chunks_of(packed: PackedExperts, block: TensorPlace, number: int) -> list[Chunk]:
    """Return the chunks of an expert's part of a stacked weight. They are in the order of its rows."""
    stride = block.size // len(packed.experts)
    first = block.offset + number * stride
    chunks = [chunk for chunk in packed.experts[number].chunks if first <= chunk.place < first + stride]
    return sorted(chunks, key=lambda chunk: chunk.place)


def padding(experts: Experts) -> int:
    """Return the maximum of bytes that aligning each expert's tensors adds."""
    return (experts.count + 1) * ALIGNMENT * len(experts.weights)


def pack_experts(
    experts: Experts,
    tensors: Mapping[str, Tensor],
    coded: Mapping[str, Sequence[Codes]],
    memory: Memory,
    plain: bool = False,
) -> PackedExperts:
    """Append a layer's experts to `memory`, encoded where that shrinks them. `tensors` and `coded` are their stacked
    weights, as `zinfer.engine.stream.weights.chunk.pack` takes them; if `plain`, none is encoded, and rows are outputs,
    as the CPU reads them."""
    exchanged = plain and getattr(experts.module, "is_transposed", False)
    if exchanged:
        tensors = {name: tensor.mT if tensor.dim() == 3 else tensor for name, tensor in tensors.items()}

    def place(name: str, block: TensorPlace) -> TensorPlace:
        if name in coded:
            return place_of(block, coded[name])
        return replace(block, transposed=exchanged and len(block.shape) == 3)

    def packed_part(name: str, number: int) -> Iterable[Chunk]:
        if name not in coded:
            return pack({name: tensors[name][number]}, memory, plain=plain).chunks
        shape = experts.weights[name].tensor[number]
        codes = _codes_of_expert(coded[name], number, experts.count)
        if codes is not None:
            return pack({}, memory, {name: (shape, codes)}, plain=plain).chunks
        whole = torch.cat([expand(matrix, shape.dtype) for matrix in coded[name]])
        return pack({name: whole.view(blocks[name].stored_shape)[number]}, memory, plain=plain).chunks

    blocks, size = lay_out((name, entry.tensor) for name, entry in experts.weights.items())
    blocks = {name: place(name, block) for name, block in blocks.items()}
    strides = {name: block.size // experts.count for name, block in blocks.items()}
    packed = list[PackedExpert]()
    for number in range(experts.count):
        chunks: list[Chunk] = []
        for name, stride in strides.items():
            for chunk in packed_part(name, number):
                # Uncoded ones end with the tensor: the next expert's begins there.
                end = chunk.end if chunk.layout is not None else min(chunk.end, chunk.start + stride - chunk.place)
                chunks.append(replace(chunk, end=end, place=blocks[name].offset + number * stride + chunk.place))
        packed.append(PackedExpert(tuple(chunks), sum(strides.values())))
    return PackedExperts(tuple(packed), blocks, size)


def _codes_of_expert(matrices: Sequence[Codes], number: int, count: int) -> list[Codes] | None:
    """Return an expert's part of a stacked weight. None if its blocks of scales reach beyond one expert."""
    if len(matrices) % count == 0:
        each = len(matrices) // count
        return list(matrices[number * each : (number + 1) * each])
    if len(matrices) != 1 or matrices[0].rows % count:
        return None
    (codes,) = matrices
    rows = codes.rows // count
    if codes.scales.shape[0] > 1 and rows % codes.block[0]:
        return None
    return [codes.part(number * rows, rows)]
