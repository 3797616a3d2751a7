"""KV cache in host memory that crosses the link. The GPU attends to it in every step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zinfer.engine.cache import SlotAllocation, WindowIndex
from zinfer.engine.stream.kv.store import HostRoom, HostStore
from zinfer.engine.stream.weights.queues import PASSED, Event
from zinfer.engine.stream.weights.ring import PrefetchRing, Transfer


@dataclass(frozen=True)
class PartFetch:
    """`Fetch` of the keys and values of one part of a `LinkStore`: the `length` positions that are stored; each pass
    adds `count` tokens to them."""

    store: "LinkStore"
    part: slice  # rows
    length: int
    count: int
    version: int  # version of the cache's rows

    @property
    def nbytes(self) -> int:
        """Bytes of the largest layer of the full part."""
        parts = self.store.stored_parts.items()
        return max((stored.memory.nbytes for (_, row), stored in parts if row == self.part.start), default=0)

    def transfer(self, layer: int) -> Transfer | None:
        stored = self.store.stored_parts.get((layer, self.part.start))  # None if the layer stores nothing
        if stored is None:
            return None
        return Transfer(
            layer,
            source=lambda: stored.held(self.length).flatten(),
            ready=lambda: stored.length >= self.length,
            before=lambda: stored.written.wait(),
        )

    def following(self) -> "PartFetch":
        return replace(self, length=self.length + self.count)


@dataclass
class StoredPart:
    """Keys and values of one part in one layer: memory, uint8 ``[room, rows, bytes of a key and its value]``, for
    `length` tokens."""

    slots: WindowIndex
    memory: Tensor
    length: int = 0
    written: Event = PASSED  # behind the last copy

    def held(self, length: int) -> Tensor:
        """Return the positions seen after `length` tokens."""
        return self.memory[self.slots.held(length)]


class LinkStore(HostStore):
    """Host store that crosses the link for attention on the GPU. In a layer a part, a range of rows, is one range of
    bytes, a position after the other: ``[room, rows, K and V]``. A pass reads it in one copy, into a buffer of `ring`,
    and adds to it in another. With `shared`, a later layer attends to the same keys, too, which the buffer no longer
    holds by then: they are copied."""

    attends_on, on_cpu = "gpu", False

    def __init__(self, room: HostRoom, ring: PrefetchRing, parts: list[slice], shared: bool) -> None:
        super().__init__(room, parts)
        self._ring, self.shared, self._version = ring, shared, 0
        self.stored_parts: dict[tuple[int, int], StoredPart] = {}  # by layer and first row
        self._shapes: dict[int, tuple[torch.dtype, list[tuple[int, int]]]] = {}  # type; heads and widths of both

    def fetch(self, part: slice, length: int, count: int) -> PartFetch | None:
        return PartFetch(self, part, length, count, self._version) if length and part in self.parts else None

    def drop_fetches(self) -> None:
        self._ring.drop_fetches()

    def stored(self, layer: int, rows: Sequence[int], length: int) -> list[Tensor]:
        self._copier.finish()
        kept = (
            self.stored_parts[layer, part.start].held(length)[:, row - part.start]
            for row in rows
            for part in self.parts
            if part.start <= row < part.stop
        )
        return list(self._states(layer, torch.stack(list(kept), 1)))

    def _states(self, layer: int, held: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored bytes ``[n, rows, ..]`` as keys and values. These are views ``[rows, heads, n, D]``."""
        dtype, shapes = self._shapes[layer]
        halves = held.view(dtype).split([heads * width for heads, width in shapes], 2)
        keys, values = (
            half.unflatten(2, shape).permute(1, 2, 0, 3) for half, shape in zip(halves, shapes, strict=True)
        )
        return keys, values

    def rollback(self, length: int) -> None:
        for stored in self.stored_parts.values():
            stored.slots.rollback(length)
            stored.length = length

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._copier.finish()
        self._ring.drop_fetches()
        old, parts, begins = self.stored_parts, list[slice](), dict[int, int]()
        self.stored_parts = {}
        for part in self.parts:
            indices = [row - part.start for row in rows if part.start <= row < part.stop]
            if not indices:
                continue
            start = parts[-1].stop if parts else first
            parts.append(slice(start, start + len(indices)))
            for (layer, row), stored in old.items():
                if row != part.start:
                    continue
                kept, begin = stored.memory[:, indices], begins.get(layer, 0)
                begins[layer] = begin + kept.nbytes
                memory = self._memory(layer, begins[layer])[begin:].view(kept.shape)
                memory.copy_(kept)
                self.stored_parts[layer, start] = StoredPart(stored.slots, memory, stored.length)
        self.parts, self.rows = parts, slice(first, first + len(rows))
        self._version += 1

    def append(self, layer: int, rows: slice, states: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
        key = layer, rows.start
        new = torch.cat([half.permute(2, 0, 1, 3).flatten(2) for half in states], 2).view(torch.uint8)
        if key not in self.stored_parts:
            slots = self._slots(layer)
            size = slots.room * new.shape[2]  # bytes of a row
            memory = self._memory(layer, size * (self.rows.stop - self.rows.start))
            row_memory = memory[size * (rows.start - self.rows.start) : size * (rows.stop - self.rows.start)]
            self._shapes[layer] = states[0].dtype, [(half.shape[1], half.shape[3]) for half in states]
            self.stored_parts[key] = StoredPart(slots, row_memory.view(slots.room, *new.shape[1:]))
        stored = self.stored_parts[key]
        step = stored.slots.add(start, len(new))
        seen = self._joined(step, layer, new) if start else new
        # If the window moves, the positions that stay are written again, from the device, to the front.
        sent = seen[step.new.start - step.new.stop :].clone() if step.moved else new
        stored.written = self._copier.send(sent, stored.memory[step.new])
        stored.length = start + len(new)
        if not start:
            return states
        return self._states(layer, seen.clone() if self.shared else seen)

    def hand_back(self) -> None:
        self._ring.hand_back()

    def _joined(self, step: SlotAllocation, layer: int, new: Tensor) -> Tensor:
        """Return the positions that `new` ones see, then `new`, ``[n, rows, bytes]``: in the ring's buffer."""
        past = step.past.stop - step.past.start
        seen = self._ring.borrow(layer)[: (past + len(new)) * new[0].numel()].view(-1, *new.shape[1:])
        seen[past:] = new
        return seen
