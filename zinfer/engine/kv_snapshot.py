"""KV snapshots: keys and values of a conversation, kept in host memory, from which a later prefill continues.

To prefill a position takes a pass through the whole model; to copy it back takes only its keys and values. They lie
layer by layer in one block of exactly their size. The layout does not depend on the engine: an engine can continue from
a snapshot that another one made.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from zinfer.engine.pinned import PinnedArena, TensorPlace

if TYPE_CHECKING:  # transformers takes seconds to import, and every engine imports this
    from zinfer.engine.cache import FixedLayer

HALVES = ("keys", "values")


class Past(Protocol):
    """Keys and values of `length` positions of a batch from `first` on, computed before."""

    @property
    def first(self) -> int: ...
    @property
    def length(self) -> int: ...

    def fits(self, layers: int, batch_size: int) -> bool:
        """Tell whether they belong to `batch_size` sequences and a model of `layers` decoder layers."""
        ...

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        """Append them to `layers`, which hold exactly the positions before. The copies run on the current stream,
        before its next work; snapshots must not be closed until they have run."""
        ...


class KVSnapshot:
    """Keys and values of a batch for `length` positions from `first` on: ``[B, kv_heads, length, head_dim]`` each, for
    every decoder layer, in page-locked memory if `pin`, until it is closed."""

    def __init__(self, first: int, blocks: Mapping[str, TensorPlace], pin: bool) -> None:
        self.first, self.blocks = first, blocks
        self.length: int = next(iter(blocks.values())).shape[2]
        self.nbytes = sum(block.size for block in blocks.values())
        self._arena = PinnedArena(self.nbytes, pin)

    @classmethod
    def of(
        cls,
        layers: "Sequence[FixedLayer]",
        first: int,
        last: int,
        pin: bool,
        rows: slice = slice(None),
        pad: int = 0,
    ) -> Self:
        """Copy the positions from `first` to `last` (exclusive) of `rows` out of `layers`, counted from position `pad`;
        the copy is complete on return.

        Raises MemoryError where the host has no room for it.
        """
        states = {
            f"{index}.{half}": part[rows, :, pad + first : pad + last]
            for index, layer in enumerate(layers)
            for half, part in zip(HALVES, (layer.keys, layer.values), strict=True)
        }
        return cls._filled(first, states, pin)

    @classmethod
    def _filled(cls, first: int, states: Mapping[str, Tensor], pin: bool) -> Self:
        """Return a snapshot with a copy of `states`, whose first position is `first`."""
        kept = cls(first, _end_to_end(states), pin)
        try:
            for name, block in kept.blocks.items():
                # Made contiguous on the device: the link copies one contiguous piece at its full rate.
                block.view(kept.memory).copy_(states[name].contiguous(), non_blocking=pin)
            if pin:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            kept.close()
            raise
        return kept

    @property
    def memory(self) -> Tensor:
        """All bytes of the snapshot, uint8 ``[nbytes]``."""
        return self._arena.memory[: self.nbytes]

    @property
    def pinned(self) -> bool:
        return self._arena.pinned

    def head(self, length: int) -> "KVSnapshot":
        """Return a snapshot of the first `length` positions only, in the same memory."""
        part = copy(self)
        part.length = length
        return part

    def cut(self, start: int, end: int) -> Self:
        """Return a copy of the positions from `start` up to `end`, counted from the snapshot's first one, in memory of
        its own. Raises MemoryError."""
        states = {name: block.view(self.memory)[:, :, start:end] for name, block in self.blocks.items()}
        return self._filled(self.first + start, states, self.pinned)

    def states(self, name: str, device: torch.device) -> Tensor:
        """Return one of the blocks on `device`, ``[B, kv_heads, length, head_dim]``: copied whole, which the link does
        at its full rate, and cut there."""
        return self.blocks[name].view(self.memory).to(device, non_blocking=True)[:, :, : self.length]

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        for index, layer in enumerate(layers):
            layer.update(*(self.states(f"{index}.{half}", device) for half in HALVES))

    def fits(self, layers: int, batch_size: int) -> bool:
        return len(self.blocks) == 2 * layers and all(block.shape[0] == batch_size for block in self.blocks.values())

    def close(self) -> None:
        """Free the memory, once no copy from it is under way."""
        if self._arena.pinned:
            torch.cuda.synchronize()
        self._arena.close()


class RowsPast:
    """First `length` positions of left-padded rows, each put together from snapshots of its own.

    `rows` are the snapshots of each row, of one sequence each, in order from its first token on; they hold at least
    what the row has behind its padding, `pads` positions. So rows with different beginnings begin together.
    """

    first = 0

    def __init__(self, rows: Sequence[Sequence[KVSnapshot]], pads: Sequence[int], length: int) -> None:
        self.length = length
        self._rows = [(list(_cut_to(parts, length - pad)), pad) for parts, pad in zip(rows, pads, strict=True)]

    def fits(self, layers: int, batch_size: int) -> bool:
        def whole(parts: Sequence[KVSnapshot], pad: int) -> bool:
            ends = [0, *(part.first + part.length for part in parts)]
            in_order = all(part.first == end for part, end in zip(parts, ends, strict=False))
            return in_order and ends[-1] == max(0, self.length - pad) and all(part.fits(layers, 1) for part in parts)

        return len(self._rows) == batch_size and all(whole(*row) for row in self._rows)

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        sample = next(part for parts, _ in self._rows for part in parts)
        for index, layer in enumerate(layers):
            both = []
            for half in HALVES:
                name = f"{index}.{half}"
                (_, heads, _, size), dtype = sample.blocks[name].shape, sample.blocks[name].dtype
                # Padding must be numbers: attention multiplies it by zero.
                states = torch.zeros((len(self._rows), heads, self.length, size), dtype=dtype, device=device)
                for row, (parts, pad) in enumerate(self._rows):
                    for part in parts:
                        begin = pad + part.first
                        states[row, :, begin : begin + part.length] = part.states(name, device)[0]
                both.append(states)
            layer.update(*both)


def _cut_to(parts: Sequence[KVSnapshot], length: int) -> Iterator[KVSnapshot]:
    """Yield the first `length` positions of snapshots that follow each other."""
    for part in parts:
        if part.first + part.length <= length:
            yield part
        elif part.first < length:
            yield part.head(length - part.first)


def _end_to_end(states: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
    """Return blocks without gaps, as safetensors requires; all tensors have one type, so that all are aligned."""

    def laid_out() -> Iterator[tuple[str, TensorPlace]]:
        end = 0
        for name, tensor in states.items():
            block = TensorPlace(end, tensor.shape, tensor.dtype)
            end += block.size
            yield name, block

    return dict(laid_out())
