"""Experts of a layer that all stay on the device: its own kernels compute them, and none comes.

What is quantised is in the form of the kernels (`zinfer.engine.stream.weights.low_bit`), all else is stacked as the
model's own code reads it.
"""

from dataclasses import dataclass, field

from torch import Tensor, empty, uint8

from zinfer.engine.pinned import TensorPlace
from zinfer.engine.stream.weights.low_bit import Matrix
from zinfer.engine.stream.weights.packed_experts import PackedExperts, chunks_of
from zinfer.engine.stream.weights.products import PackedProducts, Parts, holds_codes


@dataclass(frozen=True)
class ResidentExperts:
    """Experts of a layer on the device: `matrices` of quantised weights, and `tensors` of the others, by name."""

    matrices: dict[str, Matrix] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        matrices = sum(matrix.nbytes for matrix in self.matrices.values())
        return matrices + sum(tensor.nbytes for tensor in self.tensors.values())


def resident(
    packed: PackedExperts, content: Tensor, buffer: Tensor, products: PackedProducts | None
) -> ResidentExperts | None:
    """Return the experts of `content`, their bytes on the device; None if no kernel reads their codes. A trial of
    `products` writes to `buffer`, the layer buffer. Raises torch.OutOfMemoryError."""
    parts = {name: _parts(packed, block, content) for name, block in packed.blocks.items()}
    plain = {name for name, weight in parts.items() if all(chunk.layout is None for chunk, _ in weight)}
    coded = {name: (packed.blocks[name], parts[name]) for name in parts.keys() - plain}
    readable = all(holds_codes([chunk for chunk, _ in weight], block) for block, weight in coded.values())
    matrices = products.matrices_of(coded, buffer) if products is not None and coded and readable else {}
    if matrices.keys() != coded.keys():
        return None
    return ResidentExperts(matrices, {name: _stacked(packed.blocks[name], parts[name]) for name in plain})


def _parts(packed: PackedExperts, block: TensorPlace, content: Tensor) -> Parts:
    """Return the chunks of a stacked weight with their bytes. They are in the order of its rows."""
    chunks = [chunk for number in range(len(packed.experts)) for chunk in chunks_of(packed, block, number)]
    return [(chunk, content[chunk.start - packed.start :][: chunk.size]) for chunk in chunks]


def _stacked(block: TensorPlace, parts: Parts) -> Tensor:
    """Return an uncoded weight in memory of its own."""
    memory = empty(block.size, dtype=uint8, device=parts[0][1].device)
    for chunk, content in parts:
        memory[chunk.place - block.offset :][: chunk.size].copy_(content)
    return block.view(memory, -block.offset)
