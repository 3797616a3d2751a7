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
        return self.store.part_bytes(self.part)

    def transfer(self, layer: int) -> Transfer | None:
        stored = self.store.stored_part(layer, self.part)
        if stored is None:
            return None
        return Transfer(
            layer,
            source=lambda: stored.held(self.length).view(-1),
            ready=lambda: stored.length >= self.length,
            before=lambda: stored.written.wait(),
        )

    def following(self) -> "PartFetch":
        return replace(self, length=self.length + self.count)


@dataclass
class StoredPart:
    """Keys and values of one part in one layer: memory, uint8 ``[room, bytes of a position]``, for `length` tokens."""

    slots: WindowIndex
    memory: Tensor
    key_bytes: int  # of a position
    length: int = 0
    written: Event = PASSED  # behind the last copy

    def held(self, length: int) -> Tensor:
        """Return the positions seen after `length` tokens, as ``[n, bytes a position]``."""
        return self.memory[self.slots.held(length)]

    @staticmethod
    def rows_of(half: Tensor, count: int, rows: Sequence[int]) -> Tensor:
        """Return some of the `count` rows of keys or values ``[n, bytes]``: ``[n, rows, bytes of a row]``."""
        by_row: Tensor = half.unflatten(1, (count, half.shape[1] // count))
        return by_row[:, rows]


class LinkStore(HostStore):
    """Host store that crosses the link for attention on the GPU. In a layer a part, a range of rows, is one range of
    bytes, a position after the other: ``[room, K and V of its rows]``. A pass reads it in one copy, into a buffer of
    `ring`, and adds to it in another. With `shared`, a later layer attends to the same keys, too, which the buffer no
    longer holds by then: they are copied."""

    attends_on, on_cpu = "gpu", False

    def __init__(self, room: HostRoom, ring: PrefetchRing, parts: list[slice], shared: bool) -> None:
        super().__init__(room, parts)
        self._ring, self.shared, self._version = ring, shared, 0
        self._parts: dict[tuple[int, int], StoredPart] = {}  # by layer and first row
        self._shapes: dict[int, tuple[torch.dtype, tuple[int, int], tuple[int, int]]] = {}  # type, heads and widths

    def fetch(self, part: slice, length: int, count: int) -> PartFetch | None:
        return PartFetch(self, part, length, count, self._version) if length and part in self.parts else None

    def drop_fetches(self) -> None:
        self._ring.drop_fetches()

    def part_bytes(self, part: slice) -> int:
        """Return the bytes of the largest layer of a full part."""
        return max((stored.memory.nbytes for (_, row), stored in self._parts.items() if row == part.start), default=0)

    def stored_part(self, layer: int, part: slice) -> StoredPart | None:
        """Return a part in a layer; None if the layer stores none."""
        return self._parts.get((layer, part.start))

    def stored(self, layer: int, rows: Sequence[int], length: int) -> list[Tensor]:
        self._copier.finish()
        dtype, *shapes = self._shapes[layer]
        states_of: dict[int, tuple[Tensor, Tensor]] = {}
        for part in self.parts:
            indices = [row - part.start for row in rows if part.start <= row < part.stop]
            if not indices:
                continue
            stored = self._parts[layer, part.start]
            held = stored.held(length)
            keys, values = (
                stored.rows_of(half, part.stop - part.start, indices)
                .view(dtype)
                .view(len(held), len(indices), *shape)
                .permute(1, 2, 0, 3)
                for half, shape in zip((held[:, : stored.key_bytes], held[:, stored.key_bytes :]), shapes, strict=True)
            )
            states_of |= {part.start + index: (keys[number], values[number]) for number, index in enumerate(indices)}
        return [torch.stack([states_of[row][half] for row in rows]) for half in (0, 1)]

    def rollback(self, length: int) -> None:
        for stored in self._parts.values():
            stored.slots.rollback(length)
            stored.length = length

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._copier.finish()
        self._ring.drop_fetches()
        old, parts, begins = self._parts, list[slice](), dict[int, int]()
        self._parts = {}
        for part in self.parts:
            indices = [row - part.start for row in rows if part.start <= row < part.stop]
            if not indices:
                continue
            start, count = parts[-1].stop if parts else first, part.stop - part.start
            parts.append(slice(start, start + len(indices)))
            for (layer, row), stored in old.items():
                if row != part.start:
                    continue
                halves = stored.memory[:, : stored.key_bytes], stored.memory[:, stored.key_bytes :]
                kept = torch.cat([stored.rows_of(half, count, indices).flatten(1) for half in halves], 1)
                begin = begins.get(layer, 0)
                memory = self._memory(layer, begin + kept.nbytes)[begin:].view(stored.slots.room, -1)
                memory.copy_(kept)
                begins[layer] = begin + kept.nbytes
                key_bytes = stored.key_bytes // count * len(indices)
                self._parts[layer, start] = StoredPart(stored.slots, memory, key_bytes, stored.length)
        self.parts, self.rows = parts, slice(first, first + len(rows))
        self._version += 1

    def append(self, layer: int, rows: slice, states: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
        key, (keys, values) = (layer, rows.start), states
        packed = torch.cat([half.permute(2, 0, 1, 3).reshape(half.shape[2], -1) for half in states], 1)
        new = packed.view(torch.uint8)
        if key not in self._parts:
            slots = self._slots(layer)
            size = slots.room * new.shape[1] // (rows.stop - rows.start)  # bytes of a row
            memory = self._memory(layer, size * (self.rows.stop - self.rows.start))
            row_memory = memory[size * (rows.start - self.rows.start) : size * (rows.stop - self.rows.start)]
            halves = [half.shape[1] * half.shape[3] for half in states]
            self._shapes[layer] = keys.dtype, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
            key_bytes = new.shape[1] * halves[0] // sum(halves)
            self._parts[key] = StoredPart(slots, row_memory.view(slots.room, -1), key_bytes)
        stored = self._parts[key]
        step = stored.slots.add(start, new.shape[0])
        seen = self._joined(step, layer, new) if start else new
        # If the window moves, the positions that stay are written again, from the device, to the front.
        sent = step.kept(seen).clone() if step.moved else new
        stored.written = self._copier.send(sent, stored.memory[step.new])
        stored.length = start + new.shape[0]
        if not start:
            return states
        if self.shared:
            seen = seen.clone()
        count, heads, _, width = keys.shape
        values_of_rows = seen.view(packed.dtype)
        split = count * heads * width
        return (
            values_of_rows[:, :split].view(len(values_of_rows), count, heads, width).permute(1, 2, 0, 3),
            values_of_rows[:, split:].view(len(values_of_rows), *values.shape[:2], values.shape[3]).permute(1, 2, 0, 3),
        )

    def hand_back(self) -> None:
        self._ring.hand_back()

    def _joined(self, step: SlotAllocation, layer: int, new: Tensor) -> Tensor:
        """Return the positions that `new` ones see, then `new`, ``[n, bytes]``: in the ring's buffer."""
        held = self._ring.borrow(layer)
        past = step.past.stop - step.past.start
        seen = held[: (past + new.shape[0]) * new.shape[1]].view(-1, new.shape[1])
        seen[past:] = new
        return seen
