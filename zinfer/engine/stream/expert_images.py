"""Images of experts in host memory: each routed expert of a layer is a run of bytes of its own, encoded like a layer.

The classes of experts that `transformers` dispatches through its `ExpertsInterface` keep their weights stacked, ``[E,
..]``, so that experts are found and taken apart without code for architectures.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from zinfer.engine.pinned import ALIGNMENT, PinnedArena, TensorPlace, lay_out
from zinfer.engine.quantization.dequantize import Codes, expand
from zinfer.engine.state import Entry
from zinfer.engine.stream.packed_layer import Chunk, pack, plain

UNIT = 16  # bytes; kernels that unpack write to multiples of it
PART = 16 << 20  # bytes of an expert that are unpacked when they have arrived, at least: enough for the link's rate

Key = tuple[int, int]  # numbers of a layer and of an expert in it


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: the module that computes them, and its stacked weights by their names within the
    layer."""

    module: nn.Module
    weights: Mapping[str, Entry]
    count: int


def find_experts(layer: nn.Module, entries: Mapping[str, Entry]) -> Experts | str | None:
    """Return the routed experts of `layer`, whose `entries` go by their names within it; None if it has none, and the
    reason if they cannot come on demand."""
    found = routed_experts(layer)
    if len(found) != 1:
        return "a layer has several modules of experts" if found else None
    ((path, module),) = found
    count = max((one.shape[0] for one in module.parameters(recurse=False) if one.dim() == 3), default=0)
    weights = {}
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2 or parameter.shape[0] != count:
            continue
        entry = entries.get(f"{path}.{leaf}")
        if entry is None:
            return f"{path}.{leaf} is shared between layers"
        if parameter.dim() == 3 and entry.tensor[0].nbytes % UNIT:
            return f"an expert's part of {path}.{leaf} is no multiple of {UNIT} bytes"
        weights[f"{path}.{leaf}"] = entry
    if sum(entry.tensor.dim() == 3 for entry in weights.values()) < 2:
        return f"{path} does not keep its matrices stacked"
    return Experts(module, weights, count)


def routed_experts(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of routed experts of `layer`, by their names within it."""
    return [(name, module) for name, module in layer.named_modules() if through_interface(module)]


def through_interface(module: nn.Module) -> bool:
    """Tell whether `transformers` dispatches the module's forward pass through its `ExpertsInterface`: its decorator
    gives the class these attributes."""
    dispatched = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")
    return dispatched and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


@dataclass(frozen=True)
class ExpertImage:
    """One expert's chunks, which follow each other in host memory; their places are in the slot of its layer."""

    pieces: tuple[Chunk, ...]
    unpacked: int  # bytes in the slot

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def size(self) -> int:
        """Bytes that cross the link."""
        return self.pieces[-1].end - self.start

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Ends of the parts that cross the link one by one, in bytes from the beginning: a chunk each, or several small
        ones."""
        ends = [0]
        for piece in self.pieces:
            if piece.end - self.start - ends[-1] >= PART:
                ends.append(piece.end - self.start)
        if ends[-1] == self.size:
            return tuple(ends[1:])
        return (*ends[1:], self.size)

    def part_of(self, piece: Chunk) -> int:
        """Return the number of the part that brings the end of `piece`."""
        return bisect_left(self.parts, piece.end - self.start)


@dataclass(frozen=True)
class LayerImages:
    """Images of a layer's experts, by number, and the places of the stacked weights in a slot of `slot_bytes`."""

    experts: tuple[ExpertImage, ...]
    blocks: Mapping[str, TensorPlace]
    slot_bytes: int

    @property
    def coded(self) -> bool:
        return any(piece.layout is not None for image in self.experts for piece in image.pieces)


def padding(experts: Experts) -> int:
    """Return the bytes that aligning each expert's tensors adds to their size, at most."""
    return (experts.count + 1) * ALIGNMENT * len(experts.weights)


def plain_experts(experts: Experts, start: int) -> tuple[LayerImages, int]:
    """Return the images of a layer's uncoded experts, from byte `start` on, and the byte behind them."""
    blocks, slot_bytes = lay_out((name, entry.tensor) for name, entry in experts.weights.items())
    images = []
    for number in range(experts.count):
        pieces: list[Chunk] = []
        for name, block in blocks.items():
            own = plain([(name, experts.weights[name].tensor[number])], start)
            pieces += _placed(own.pieces, block, number, experts.count)
            start = own.end
        images.append(ExpertImage(tuple(pieces), _unpacked(blocks, experts.count)))
    return LayerImages(tuple(images), blocks, slot_bytes), start


def fill_plain(images: LayerImages, name: str, tensor: Tensor, memory: Tensor) -> None:
    """Copy the stacked weight `name` of a layer to its experts' images in `memory`."""
    block, count = images.blocks[name], len(images.experts)
    stride = block.size // count
    rows = tensor.detach().contiguous().view(torch.uint8).view(count, -1)
    for number, image in enumerate(images.experts):
        base = block.offset + number * stride
        for piece in image.pieces:
            if base <= piece.place < base + stride:
                memory[piece.start : piece.end].copy_(rows[number, piece.place - base :][: piece.size])


def pack_experts(
    experts: Experts, tensors: Mapping[str, Tensor], coded: Mapping[str, Sequence[Codes]], arena: PinnedArena
) -> LayerImages:
    """Append a layer's experts to `arena`, one by one, encoded where that makes them smaller; `tensors` and `coded` are
    their stacked weights, as `zinfer.engine.stream.packed_layer.pack` takes them."""
    blocks, slot_bytes = lay_out((name, entry.tensor) for name, entry in experts.weights.items())
    images = []
    for number in range(experts.count):
        pieces: list[Chunk] = []
        for name, block in blocks.items():
            one = experts.weights[name].tensor[number]
            if name in coded:
                own = _own_codes(coded[name], number, experts.count)
                if own is None:
                    whole = torch.cat([expand(codes, one.dtype) for codes in coded[name]])
                    packed = pack({name: whole.view(block.shape)[number]}, arena)
                else:
                    packed = pack({}, arena, {name: (one, own)})
            else:
                packed = pack({name: tensors[name][number]}, arena)
            pieces += _placed(packed.pieces, block, number, experts.count)
        images.append(ExpertImage(tuple(pieces), _unpacked(blocks, experts.count)))
    return LayerImages(tuple(images), blocks, slot_bytes)


def _unpacked(blocks: Mapping[str, TensorPlace], count: int) -> int:
    return sum(block.size // count for block in blocks.values())


def _placed(pieces: Iterable[Chunk], block: TensorPlace, number: int, count: int) -> Iterator[Chunk]:
    """Yield the chunks of expert `number`'s part of a stacked tensor with their places in the layer's slot. Uncoded
    ones end with the tensor: the next expert's begins there."""
    stride = block.size // count
    for piece in pieces:
        end = piece.end if piece.layout is not None else min(piece.end, piece.start + stride - piece.place)
        yield replace(piece, end=end, place=block.offset + number * stride + piece.place)


def _own_codes(matrices: Sequence[Codes], number: int, count: int) -> list[Codes] | None:
    """Return expert `number`'s part of a stacked weight; None if its blocks of scales reach beyond one expert."""
    if len(matrices) % count == 0:
        each = len(matrices) // count
        return list(matrices[number * each : (number + 1) * each])
    if len(matrices) != 1 or matrices[0].rows % count:
        return None
    (codes,) = matrices
    rows = codes.rows // count
    own = slice(None)
    if codes.scales.shape[0] > 1:
        if rows % codes.block[0]:
            return None
        own = slice(number * rows // codes.block[0], (number + 1) * rows // codes.block[0])
    zeros = None if codes.zeros is None else codes.zeros[own]
    return [replace(codes, numbers=codes.numbers[number * rows :][:rows], scales=codes.scales[own], zeros=zeros)]
