"""KV snapshots: keys and values of a conversation, kept in host memory, from which a later prefill continues.

To prefill a position takes a pass through the whole model; to copy it back takes only its keys and values. They lie
layer by layer in one block of exactly their size. The layout does not depend on the engine: an engine can continue from
a snapshot that another one made.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

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

    def select(self, rows: Sequence[int]) -> "Past":
        """Return those of some sequences, in this order. Raises MemoryError."""
        ...


class Borrowed(NamedTuple):
    """Memory of a snapshot that somebody else owns."""

    memory: Tensor
    pinned: bool = False

    def close(self) -> None:
        pass


class KVSnapshot:
    """Keys and values of a batch for `length` positions from `first` on: ``[B, kv_heads, length, head_dim]`` each, for
    every decoder layer, in page-locked memory if `pin`, until it is closed."""

    def __init__(
        self, first: int, blocks: Mapping[str, TensorPlace], pin: bool, borrowed: Tensor | None = None
    ) -> None:
        self.first, self.blocks = first, blocks
        self.length: int = next(iter(blocks.values())).shape[2]
        self.nbytes = sum(block.size for block in blocks.values())
        self._arena = PinnedArena(self.nbytes, pin) if borrowed is None else Borrowed(borrowed)

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

    @classmethod
    def joined(
        cls, parts: Sequence[tuple["KVSnapshot", Sequence[int]]], count: int, first: int, last: int, pin: bool
    ) -> Self:
        """Return a copy of the positions from `first` to `last` of a batch of `count` rows, which are in several
        snapshots, each with the numbers of its rows, that end together; what none of them has is zero. Raises
        MemoryError."""
        states = dict[str, Tensor]()
        for name, block in parts[0][0].blocks.items():
            _, heads, _, size = block.shape
            states[name] = whole = torch.zeros((count, heads, last - first, size), dtype=block.dtype)
            for part, rows in parts:
                whole[list(rows), :, last - first - part.length :] = part.blocks[name].view(part.memory)
        return cls._filled(first, states, pin)

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

    def select(self, rows: Sequence[int]) -> Self:
        states = {name: block.view(self.memory)[list(rows), :, : self.length] for name, block in self.blocks.items()}
        return self._filled(self.first, states, False)

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

    def __init__(
        self,
        rows: Sequence[Sequence[KVSnapshot]],
        pads: Sequence[int],
        length: int,
        blocks: Mapping[str, TensorPlace] | None = None,
    ) -> None:
        self.length = length
        self.rows = [(list(_cut_to(parts, length - pad)), pad) for parts, pad in zip(rows, pads, strict=True)]
        # Type and shape of keys and values, in the blocks of any snapshot: all of some rows may be padding.
        self.blocks = blocks or next((part.blocks for parts, _ in self.rows for part in parts), {})

    def select(self, rows: Sequence[int]) -> "RowsPast":
        own = [self.rows[row] for row in rows]
        return RowsPast([parts for parts, _ in own], [pad for _, pad in own], self.length, self.blocks)

    def fits(self, layers: int, batch_size: int) -> bool:
        def whole(parts: Sequence[KVSnapshot], pad: int) -> bool:
            ends = [0, *(part.first + part.length for part in parts)]
            in_order = all(part.first == end for part, end in zip(parts, ends, strict=False))
            return in_order and ends[-1] == max(0, self.length - pad) and all(part.fits(layers, 1) for part in parts)

        return len(self.rows) == batch_size and all(whole(*row) for row in self.rows)

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        for index, layer in enumerate(layers):
            both = []
            for half in HALVES:
                name = f"{index}.{half}"
                (_, heads, _, size), dtype = self.blocks[name].shape, self.blocks[name].dtype
                # Padding must be numbers: attention multiplies it by zero.
                states = torch.zeros((len(self.rows), heads, self.length, size), dtype=dtype, device=device)
                for row, (parts, pad) in enumerate(self.rows):
                    for part in parts:
                        begin = pad + part.first
                        states[row, :, begin : begin + part.length] = part.states(name, device)[0]
                both.append(states)
            layer.update(*both)


class Sent(NamedTuple):
    """Positions of a batch on their way to another process: `memory` has the bytes of the snapshots, each once."""

    snapshots: list[tuple[int, int, dict[str, TensorPlace]]]  # first position, length, blocks
    memory: list[int]  # number of each snapshot's bytes
    rows: list[tuple[list[int], int]] | None  # snapshots and padding of each row; None: one snapshot of all rows
    length: int
    blocks: dict[str, TensorPlace]


def sent(past: Past) -> tuple[Sent, list[Tensor]]:
    """Return a `KVSnapshot` or a `RowsPast` in a form that another process can have, and the bytes that it needs."""
    snapshots, memory, places = list[KVSnapshot](), list[Tensor](), dict[int, int]()

    def number(one: KVSnapshot) -> int:
        snapshots.append(one)
        places.setdefault(one.memory.data_ptr(), len(memory))
        if places[one.memory.data_ptr()] == len(memory):
            memory.append(one.memory)
        return len(snapshots) - 1

    rows = None
    if isinstance(past, RowsPast):
        rows = [([number(one) for one in parts], pad) for parts, pad in past.rows]
    else:
        assert isinstance(past, KVSnapshot)
        number(past)
    told = [(one.first, one.length, dict(one.blocks)) for one in snapshots]
    return Sent(
        told, [places[one.memory.data_ptr()] for one in snapshots], rows, past.length, dict(past.blocks)
    ), memory


def received(past: Sent, memory: Sequence[Tensor]) -> Past:
    """Return what another process has `sent`, over its bytes, for as long as these last."""
    snapshots = []
    for (first, length, blocks), place in zip(past.snapshots, past.memory, strict=True):
        snapshots.append(KVSnapshot(first, blocks, False, memory[place]).head(length))
    if past.rows is None:
        return snapshots[0]
    rows = [[snapshots[one] for one in parts] for parts, _ in past.rows]
    return RowsPast(rows, [pad for _, pad in past.rows], past.length, past.blocks)


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
