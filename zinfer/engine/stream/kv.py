"""KV cache in host memory: the GPU keeps as many sequences of a batch as it has room for, the host the last ones.

There are two ways to attend to it. `LinkCache` copies it over the link at every step, behind the weights of the layer
that needs it. `CpuCache` leaves it where it is and computes attention on the CPU while the link carries weights: faster
wherever host memory is read faster than the link carries, as both then run at once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from zinfer.core.progress import Progress, silent
from zinfer.engine.cache import FixedLayer, Gaps, Narrow, QuantizedLayer, Slots, Step, taken
from zinfer.engine.pinned import ALIGNMENT, PinnedArena
from zinfer.engine.stream.cpu_attention import code, host, keep_freed_memory
from zinfer.engine.stream.cpu_kernel import coded, library, numbers_of, with_scales, without_scales
from zinfer.engine.stream.host_work import defer_store, flush, to_host_async
from zinfer.engine.stream.prefetch import PrefetchRing, Transfer

GROWTH = 8  # a pool that has no room grows by an eighth at least
IN_FLIGHT = 512 << 20  # bytes under way to the host at a time; they take as much device memory


class HostCopier:
    """Copies to the host, on a stream of their own beside compute, in order; without a GPU they are done at once.

    All batches share one sender, so that no copy of an earlier batch arrives in memory that is used anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[int, Any]] = deque()  # bytes, event
        self._bytes = 0  # bytes under way

    def send(self, states: Tensor, target: Tensor) -> Any:
        """Copy `states` to `target`, page-locked; return the event behind the copy, None if the copy is complete."""
        if self._stream is None:
            target.copy_(states)
            return None
        while self._under_way and (self._bytes + states.nbytes > IN_FLIGHT or self._under_way[0][1].query()):
            size, arrived = self._under_way.popleft()
            arrived.synchronize()
            self._bytes -= size
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(states, non_blocking=True)
            states.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record()
        self._under_way.append((states.nbytes, event))
        self._bytes += states.nbytes
        return event

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
        self._under_way.clear()
        self._bytes = 0


class Block(NamedTuple):
    """Range of bytes of one of a pool's arenas."""

    arena: PinnedArena
    start: int
    size: int

    @property
    def memory(self) -> Tensor:
        return self.arena.memory[self.start : self.start + self.size]


class HostPool:
    """Host memory for the KV caches of all micro-batches, page-locked if `pin`: blocks of a few arenas. Freed blocks
    are kept for the next ones, since page-locking takes long. With `spread` it lies on all NUMA nodes, for data that
    all CPUs read."""

    def __init__(self, pin: bool, spread: bool = False, progress: Progress = silent) -> None:
        self.spread, self._pin, self._progress = spread, pin, progress
        self._free: dict[PinnedArena, list[tuple[int, int]]] = {}  # by arena: free ranges (start, end), rising

    @property
    def size(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.size for arena in self._free)

    @property
    def unused(self) -> int:
        """Bytes that no block has."""
        return sum(end - start for ranges in self._free.values() for start, end in ranges)

    def reserve(self, size: int) -> None:
        """Make the arenas `size` bytes together, if they are less: one arena, if no block is taken. Raises MemoryError
        as `PinnedArena` does."""
        if self.unused == self.size < size:
            self.close()
        if size > self.size:
            self._grow(size - self.size)

    def take(self, size: int) -> Block:
        """Take a block of `size` bytes, its content undefined: of the smallest free range that holds it, or of a new
        arena. Raises MemoryError as `PinnedArena` does."""
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if not any(end - start >= taken for ranges in self._free.values() for start, end in ranges):
            self._grow(max(taken, self.size // GROWTH))
        arena, (start, end) = min(
            ((arena, free) for arena, ranges in self._free.items() for free in ranges if free[1] - free[0] >= taken),
            key=lambda one: one[1][1] - one[1][0],
        )
        ranges = self._free[arena]
        place = ranges.index((start, end))
        ranges[place : place + 1] = [(start + taken, end)] if start + taken < end else []
        return Block(arena, start, size)

    def give_back(self, block: Block) -> None:
        """Free a block."""
        end = block.start - (-block.size // ALIGNMENT) * ALIGNMENT
        merged: list[tuple[int, int]] = []
        for free in sorted([*self._free[block.arena], (block.start, end)]):
            if merged and merged[-1][1] == free[0]:
                merged[-1] = merged[-1][0], free[1]
            else:
                merged.append(free)
        self._free[block.arena] = merged

    def close(self) -> None:
        """Free all memory. Blocks must not be used afterwards."""
        for arena in self._free:
            arena.close()
        self._free = {}

    def _grow(self, size: int) -> None:
        """Add an arena; where memory falls short, arenas that nobody uses make room for it."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        try:
            arena = PinnedArena(size, self._pin, self._progress, spread=self.spread)
        except MemoryError:
            idle = [one for one, ranges in self._free.items() if ranges == [(0, one.size)]]
            if not idle:
                raise
            for one in idle:
                del self._free[one]
                one.close()
            arena = PinnedArena(size, self._pin, self._progress, spread=self.spread)
        self._free[arena] = [(0, size)]


class HostMemory:
    """Host memory of one micro-batch: a block of `pool` for each layer."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._blocks: dict[int, Block] = {}

    @property
    def size(self) -> int:
        """Bytes for all layers."""
        return sum(block.size for block in self._blocks.values())

    def take(self, layer: int, size: int) -> Tensor:
        """Return the memory of a layer, uint8 ``[size]``, its content undefined unless it was taken before and is large
        enough. Raises MemoryError as `PinnedArena` does."""
        block = self._blocks.get(layer)
        if block is None or block.size < size:
            if block is not None:
                self._pool.give_back(self._blocks.pop(layer))
            self._blocks[layer] = block = self._pool.take(size)
        return block.memory[:size]

    def close(self) -> None:
        """Give the blocks back. Their views must not be used afterwards."""
        for block in self._blocks.values():
            self._pool.give_back(block)
        self._blocks = {}


class HostCache(ABC):
    """Keys and values of the `rows` of a batch in `memory`, for up to `capacity` tokens a sequence. Layers may differ
    in their heads and widths, and keys from values. `windows` has the sliding windows, in tokens, by layer number."""

    place: str  # device that attends: gpu, cpu, or "cpu, torch" without a C compiler
    rows: slice
    parts: list[slice]  # rows that go through the model together in a decode step

    def __init__(
        self,
        memory: HostMemory,
        sender: HostCopier,
        parts: list[slice],
        capacity: int,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self.rows, self.parts = slice(parts[0].start, parts[-1].stop), parts
        self.capacity, self._windows = capacity, windows or {}
        self._memory, self._sender = memory, sender

    def _slots(self, layer: int) -> Slots:
        return Slots(self.capacity, self._windows.get(layer))

    @abstractmethod
    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values, ``[rows, kv_heads, n, head_dim]`` each, of positions `start` on; return all keys and
        values that these positions see."""

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        """Store the first positions of `rows`: keys and values, or what `FixedLayer.stored` returns of those in 8
        bits."""
        keys, values = blocks
        self.extend(layer, rows, keys, values, 0)

    @abstractmethod
    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `rows` of the batch, ``[b, kv_heads, n, head_dim]`` each, on the host or the
        device: the positions that the next token after `length` ones sees. In 8 bits they are as `coded` has them."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on, of all rows."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        """Keep `rows` of the batch only (rising, all of them rows of this cache), as rows `first`, `first` + 1, ..

        Memory stays taken until the last row is gone."""


class CpuCache(HostCache):
    """Host cache that the CPU attends to: `HostTensor` tensors in the order that attention reads them, ``[rows, kv_heads,
    room, head_dim]``; with `in_8_bits`, in the format of `zinfer.engine.stream.cpu_kernel.coded`."""

    def __init__(
        self,
        memory: HostMemory,
        sender: HostCopier,
        rows: slice,
        capacity: int,
        device: torch.device,
        in_8_bits: bool = False,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(memory, sender, [rows], capacity, windows)
        self._device, self._in_8_bits = device, in_8_bits
        keep_freed_memory()
        self.place = "cpu" if library() is not None else "cpu, torch"
        self._places: dict[int, tuple[Slots, Tensor, Tensor]] = {}  # layer -> slots, keys, values
        self._sent: list[Any] = []  # events behind copies of prompts' keys that may be under way

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        stored = self.form(keys, values)
        if not start:
            self._send(layer, rows, stored)
            return keys, values
        seen = self.add(layer, rows, to_host_async(*stored), start)
        if self._in_8_bits:
            return code(seen[0], self._device, keys.dtype), code(seen[1], self._device, keys.dtype)
        return host(seen[0], self._device), host(seen[1], self._device)

    def form(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in the form in which they are stored, on their device."""
        return (coded(keys), coded(values)) if self._in_8_bits else (keys, values)

    def add(self, layer: int, rows: slice, arrived: Sequence[Tensor], start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values of positions `start` on, behind earlier ones, as `form` has them, in host memory or on
        their way there (`to_host_async`); return all keys and values that these positions see, in 8 bits without scales."""
        slots, *places = self._places[layer]
        step = slots.add(start, arrived[0].shape[2])
        for event in self._sent:
            if event is not None:
                event.synchronize()
        self._sent = []
        if step.moved:  # the past moves, too
            flush()
        own = self._own(rows)
        keys, values = (_stored(step, place[own], states) for place, states in zip(places, arrived, strict=True))
        return (numbers_of(keys), numbers_of(values)) if self._in_8_bits else (keys, values)

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        if self._in_8_bits:
            blocks = with_scales(*blocks[:2]), with_scales(*blocks[2:])
        self._send(layer, rows, blocks)

    def _own(self, rows: slice) -> slice:
        """Return `rows` of the batch as rows of this cache."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def _send(self, layer: int, rows: slice, stored: Sequence[Tensor]) -> None:
        """Send the first positions of `rows`, in the form in which they are stored."""
        if layer not in self._places:
            slots = self._slots(layer)
            self._places[layer] = slots, *self._take(layer, slots, stored)
        slots, *places = self._places[layer]
        step = slots.add(0, stored[0].shape[2])
        for place, states in zip(places, stored, strict=True):
            # One copy of whole rows: positions beyond the prompt have no meaning yet.
            wide = pad(step.kept(states), (0, 0, 0, slots.room - step.new.stop))
            self._sent.append(self._sender.send(wide, place[self._own(rows)]))

    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        self._sender.finish()
        slots, *places = self._places[layer]
        own = [row - self.rows.start for row in rows]
        keys, values = (place[own][:, :, slots.held(length)] for place in places)
        return keys, values

    def rollback(self, length: int) -> None:
        for slots, _, _ in self._places.values():
            slots.back(length)

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._sender.finish()
        for layer, (slots, *places) in self._places.items():
            for place in places:
                for to, row in enumerate(rows):
                    if row - self.rows.start != to:
                        place[to].copy_(place[row - self.rows.start])
            keys, values = (place[: len(rows)] for place in places)
            self._places[layer] = slots, keys, values
        self.rows = slice(first, first + len(rows))
        self.parts = [self.rows]

    def _take(self, layer: int, slots: Slots, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rows = self.rows.stop - self.rows.start
        shapes = [(rows, states.shape[1], slots.room, states.shape[3]) for states in stored]
        keys, values = (prod(shape) * states.itemsize for shape, states in zip(shapes, stored, strict=True))
        begin = -(-keys // ALIGNMENT) * ALIGNMENT
        memory = self._memory.take(layer, begin + values)
        dtype = stored[0].dtype
        return memory[:keys].view(dtype).view(shapes[0]), memory[begin:].view(dtype).view(shapes[1])


def _stored(step: Step, memory: Tensor, states: Tensor) -> Tensor:
    """Return all states that the new ones see; these are stored once they have arrived."""
    if step.moved:
        return step.store(memory, states)
    defer_store(memory[..., step.new, :], states)
    return step.seen(memory)


@dataclass(frozen=True)
class PartFetch:
    """`Fetch` of the keys and values of one part of a `LinkCache`: the `length` positions that are stored; each trip
    adds `count` tokens to them."""

    cache: "LinkCache"
    part: slice  # rows
    length: int
    count: int
    version: int  # version of the cache's rows

    @property
    def nbytes(self) -> int:
        return self.cache.part_bytes(self.part)

    def transfer(self, layer: int) -> Transfer | None:
        return self.cache.transfer(layer, self.part, self.length)

    def following(self) -> "PartFetch":
        return replace(self, length=self.length + self.count)


class LinkCache(HostCache):
    """Host cache that crosses the link for attention on the GPU, in `parts`, each a range of rows.

    In a layer a part is one range of bytes, a position after the other: ``[room, K and V of its rows]``. A pass reads
    it in one copy, into a buffer of `ring`, and adds to it in another. With `shared`, a later layer attends to the same
    keys, too, which the buffer no longer holds by then: they are copied.
    """

    place = "gpu"

    def __init__(
        self,
        memory: HostMemory,
        sender: HostCopier,
        ring: PrefetchRing,
        parts: list[slice],
        capacity: int,
        windows: Mapping[int, int] | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(memory, sender, parts, capacity, windows)
        self._ring, self._cuda, self.shared, self._version = ring, ring.on_gpu, shared, 0
        # By layer and first row of a part: slots, memory (uint8 [room, bytes of a position]) and bytes of a position's
        # keys; the number of stored tokens; the event behind the last copy.
        self._places: dict[tuple[int, int], tuple[Slots, Tensor, int]] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        self._forms: dict[int, tuple[torch.dtype, tuple[int, int], tuple[int, int]]] = {}  # type, heads and widths
        self._written: dict[tuple[int, int], Any] = {}

    def fetch(self, part: slice, length: int, count: int) -> PartFetch:
        """Return the fetch for a pass over the rows of `part`, which have `length` tokens stored and add `count`
        tokens."""
        return PartFetch(self, part, length, count, self._version)

    def part_bytes(self, part: slice) -> int:
        """Return the bytes of the largest layer's keys and values of a part when the cache is full."""
        return max((place.nbytes for (_, row), (_, place, _) in self._places.items() if row == part.start), default=0)

    def transfer(self, layer: int, part: slice, length: int) -> Transfer | None:
        """Return the copy of a layer's keys and values of `length` tokens; None if the layer stores none."""
        key = (layer, part.start)
        if key not in self._places:
            return None
        return Transfer(
            layer,
            source=partial(self._stored, key, length),
            ready=partial(self._reaches, key, length),
            before=partial(self._wait, key),
        )

    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        self._sender.finish()
        dtype, *forms = self._forms[layer]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part in self.parts:
            own = [row for row in rows if part.start <= row < part.stop]
            if not own:
                continue
            slots, place, keys = self._places[layer, part.start]
            held, count = place[slots.held(length)], part.stop - part.start
            halves = (held[:, :keys], held[:, keys:])
            states = [
                half.unflatten(1, (count, half.shape[1] // count))[:, [row - part.start for row in own]]
                .view(dtype)
                .view(len(held), len(own), *form)
                .permute(1, 2, 0, 3)
                for half, form in zip(halves, forms, strict=True)
            ]
            found |= {row: (states[0][place], states[1][place]) for place, row in enumerate(own)}
        return torch.stack([found[row][0] for row in rows]), torch.stack([found[row][1] for row in rows])

    def rollback(self, length: int) -> None:
        for key, (slots, _, _) in self._places.items():
            slots.back(length)
            self._lengths[key] = length

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._sender.finish()
        self._ring.drop_fetches()
        kept = [[row - part.start for row in rows if part.start <= row < part.stop] for part in self.parts]
        places, lengths, parts, begins = dict(self._places), dict(self._lengths), list[slice](), dict[int, int]()
        self._places, self._lengths, self._written = {}, {}, {}
        for part, own in zip(self.parts, kept, strict=True):
            if not own:
                continue
            start = parts[-1].stop if parts else first
            parts.append(slice(start, start + len(own)))
            for (layer, row), (slots, place, keys) in places.items():
                if row != part.start:
                    continue
                count = part.stop - part.start
                halves = (place[:, :keys], place[:, keys:])
                each = [half.unflatten(1, (count, half.shape[1] // count))[:, own].flatten(1) for half in halves]
                held = torch.cat(each, 1)
                begin = begins.get(layer, 0)
                target = self._memory.take(layer, begin + held.nbytes)[begin:].view(slots.room, -1)
                target.copy_(held)
                begins[layer] = begin + held.nbytes
                key = (layer, start)
                self._places[key] = slots, target, keys // count * len(own)
                self._lengths[key] = lengths[layer, row]
        self.parts, self.rows = parts, slice(first, first + len(rows))
        self._version += 1

    def _stored(self, key: tuple[int, int], length: int) -> Tensor:
        slots, place, _ = self._places[key]
        return place[slots.held(length)].view(-1)

    def _reaches(self, key: tuple[int, int], length: int) -> bool:
        return self._lengths.get(key, 0) >= length

    def _wait(self, key: tuple[int, int]) -> None:
        if self._written.get(key) is not None:
            self._written[key].wait()

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        key = (layer, rows.start)
        if rows not in self.parts:
            raise ValueError(f"rows {rows.start} to {rows.stop} are not a part of the cache in host memory")
        packed = torch.cat([states.permute(2, 0, 1, 3).reshape(states.shape[2], -1) for states in (keys, values)], 1)
        new = packed.view(torch.uint8)
        if key not in self._places:
            slots = self._slots(layer)
            size = slots.room * new.shape[1] // (rows.stop - rows.start)  # bytes of a row
            memory = self._memory.take(layer, size * (self.rows.stop - self.rows.start))
            own = memory[size * (rows.start - self.rows.start) : size * (rows.stop - self.rows.start)]
            halves = [states.shape[1] * states.shape[3] for states in (keys, values)]
            self._forms[layer] = keys.dtype, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
            self._places[key] = slots, own.view(slots.room, -1), new.shape[1] * halves[0] // sum(halves)
        slots, place, _ = self._places[key]
        step = slots.add(start, new.shape[0])
        seen = self._joined(step, layer, place, new) if start else new
        # If the window moves, the positions that stay are written again, from the device, to the front.
        sent = step.kept(seen).clone() if step.moved else new
        self._written[key] = self._sender.send(sent, place[step.new])
        self._lengths[key] = start + new.shape[0]
        if not start:
            return keys, values
        if self.shared and self._cuda:
            seen = seen.clone()
        count, heads, _, width = keys.shape
        wide = seen.view(packed.dtype)
        split = count * heads * width
        return (
            wide[:, :split].view(len(wide), count, heads, width).permute(1, 2, 0, 3),
            wide[:, split:].view(len(wide), *values.shape[:2], values.shape[3]).permute(1, 2, 0, 3),
        )

    def hand_back(self) -> None:
        """Free the buffers of the ring that hold keys and values of the current layer."""
        self._ring.hand_back()

    def _joined(self, step: Step, layer: int, place: Tensor, new: Tensor) -> Tensor:
        """Return the positions that those of `new` see, followed by `new`, ``[n, bytes]``: on a GPU, in the ring's
        buffer."""
        held = self._ring.borrow(layer)
        past = step.past.stop - step.past.start
        if not self._cuda:
            return torch.cat([held.view(past, new.shape[1]), new])
        if (past + new.shape[0]) * new.shape[1] > held.numel():
            raise ValueError(f"{new.shape[0]} positions at once behind {past} are more than a buffer of the link holds")
        seen = held[: (past + new.shape[0]) * new.shape[1]].view(-1, new.shape[1])
        seen[past:] = new
        return seen


class SplitLayer(FixedLayer):
    """Cache of decoder layer `index`: the batch's first sequences in `here`, the others in `host`."""

    def __init__(self, index: int, here: FixedLayer, host: HostCache) -> None:
        super().__init__(here.batch_size, here.capacity, here.slots.window)
        self.here = here
        self._index, self._host = index, host

    def window(self, rows: slice, length: int) -> None:
        self.rows, self.length = rows, length
        if rows.stop <= self.batch_size:
            self.here.window(rows, length)

    def joins(self, rows: slice, on_cpu: bool = False) -> bool:
        """Tell whether a part of it, `rows`, can share a forward pass with others: on the device, or in host memory,
        from which they come over the link one after the other; or with others that the CPU attends to, if these are
        `on_cpu`."""
        if on_cpu:
            return isinstance(self._host, CpuCache) and rows == self._host.rows
        if isinstance(self.here, QuantizedLayer):
            return bool(rows.stop <= self.batch_size)
        if type(self.here) is not FixedLayer:
            return False
        if isinstance(self._host, LinkCache):
            return not self._host.shared
        return rows == slice(0, self.batch_size)

    def hand_back(self) -> None:
        """Free the copy of keys and values that the last `update` returned."""
        if isinstance(self._host, LinkCache) and self.rows.stop > self.batch_size:
            self._host.hand_back()

    def stored(self, rows: Tensor, length: int, gaps: Gaps | None) -> list[Tensor]:
        here = rows < self.batch_size
        if bool(here.all()):
            return self.here.stored(rows, length, gaps)
        there = self._host.stored(self._index, rows[~here].tolist(), length)
        blocks = [half.to(rows.device) for half in there]
        if isinstance(self.here, QuantizedLayer):
            blocks = [part for half in blocks for part in without_scales(half)]
        if gaps is not None:
            every, of_there = torch.arange(len(blocks[0]), device=rows.device), gaps.of(~here)
            blocks = [taken(half, every, slice(0, half.shape[2]), of_there) for half in blocks]
        if not bool(here.any()):
            return blocks
        mine_of = self.here.stored(rows[here], length, None if gaps is None else gaps.of(here))
        found = []
        for mine, others in zip(mine_of, blocks, strict=True):
            both = others.new_empty((len(rows), *others.shape[1:]))
            both[here], both[~here] = mine, others
            found.append(both)
        return found

    def fill(self, blocks: Sequence[Sequence[Tensor]], length: int, dtype: torch.dtype) -> None:
        whole = [_padded(parts, length) for parts in zip(*blocks, strict=True)]
        if self.batch_size:
            self.here.fill([[one[: self.batch_size] for one in whole]], length, dtype)
        for part in self._host.parts:
            self._host.fill(self._index, part, [one[part] for one in whole])
        self.is_initialized, self.dtype = True, dtype
        self.window(slice(0, self.batch_size), length)
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on in the rows on the device; `HostCache.rollback` does so in the
        others."""
        if self.batch_size:
            self.here.rollback(length)
        self.length = length

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only those of `rows` that are on the device; `HostCache.keep_rows` keeps the others."""
        self.here.keep_rows(rows[rows < self.batch_size])
        self.batch_size = self.here.batch_size

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.length
        self.length += key_states.shape[2]
        self.is_initialized, self.dtype = True, key_states.dtype
        if self.rows.stop <= self.batch_size:
            return self.here.update(key_states, value_states, *args, **kwargs)
        return self._host.extend(self._index, self.rows, key_states, value_states, start)

    def form(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return `CpuCache.form` of keys and values of rows that the CPU attends to."""
        assert isinstance(self._host, CpuCache)
        return self._host.form(keys, values)

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of such rows, behind a prompt, as `CpuCache.add` does."""
        assert isinstance(self._host, CpuCache)
        start = self.length
        self.length += keys.shape[2]
        return self._host.add(self._index, self.rows, (keys, values), start)

    def store(self, keys: Tensor, values: Tensor) -> Sequence[Tensor | Narrow]:
        if self.rows.stop > self.batch_size:
            return self.update(keys, values)
        self.length += keys.shape[2]
        self.is_initialized, self.dtype = True, keys.dtype
        return self.here.store(keys, values)


class PartLayer(DynamicLayer):  # type: ignore[misc]
    """Layer of `rows` of a batch, at position `length`, in a forward pass that several parts share."""

    is_sliding = False

    def __init__(self, whole: FixedLayer, rows: slice, length: int) -> None:
        super().__init__()
        self._whole, self._rows, self._length = whole, rows, length

    def get_seq_length(self) -> int:
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self._whole.window(self._rows, self._length)
        return self._whole.update(key_states, value_states)

    def form(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return `CpuCache.form` of keys and values of rows that the CPU attends to."""
        assert isinstance(self._whole, SplitLayer)
        return self._whole.form(keys, values)

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of such rows, behind a prompt, as `CpuCache.add` does."""
        assert isinstance(self._whole, SplitLayer)
        self._whole.window(self._rows, self._length)
        return self._whole.add(keys, values)

    def attended(self) -> None:
        """Free what `update` returned."""
        if isinstance(self._whole, SplitLayer):
            self._whole.hand_back()


def _padded(blocks: Sequence[Tensor], length: int) -> Tensor:
    """Return blocks ``[b, kv_heads, n, D]`` one below the other, each padded with zeros in front to `length`."""
    return torch.cat([pad(block, (0, 0, length - block.shape[2], 0)) for block in blocks])
