"""KV cache in host memory: the GPU keeps as many sequences of a batch as it has room for, the host the last ones.

There are two ways to attend to it. `LinkCache` copies it over the link at every step, behind the weights of the layer
that needs it. `CpuCache` leaves it where it is and computes attention on the CPU while the link carries weights: faster
wherever host memory is read faster than the link carries, as both then run at once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from zinfer.core.progress import Progress, silent
from zinfer.engine.cache import (
    FixedLayer,
    QuantizedKV,
    QuantizedLayer,
    RowMask,
    SlotAllocation,
    WindowIndex,
    copy_slots,
)
from zinfer.engine.pinned import ALIGNMENT, PinnedArena
from zinfer.engine.stream.cpu_attention import as_host_int8, as_host_tensor, keep_freed_memory
from zinfer.engine.stream.cpu_kernel import int8_of, join_scales, library, quantize_rows, split_scales
from zinfer.engine.stream.host_work import defer_store, flush, to_host_async
from zinfer.engine.stream.weights.ring import PrefetchRing, Transfer

GROWTH = 8  # a pool that has no room grows by an eighth at least
IN_FLIGHT = 512 << 20  # bytes under way to the host at a time; they take as much device memory


class HostCopier:
    """Device-to-host copier with a CUDA stream of its own, in order; without a GPU they are done at once. All batches
    share one copier, so that no copy of an earlier batch arrives in memory that is used anew.
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
    """Byte range in one of a pool's arenas."""

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

    def allocate(self, size: int) -> Block:
        """Allocate a block of `size` bytes, its content undefined: of the smallest free range, or of a new
        arena. Raises MemoryError as `PinnedArena` does."""
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        if not (fitting := self._fitting(aligned)):
            self._grow(max(aligned, self.size // GROWTH))
            fitting = self._fitting(aligned)
        _, start, end, arena = min(fitting, key=lambda free: free[0])
        ranges = self._free[arena]
        index = ranges.index((start, end))
        ranges[index : index + 1] = [(start + aligned, end)] if start + aligned < end else []
        return Block(arena, start, size)

    def _fitting(self, size: int) -> list[tuple[int, int, int, PinnedArena]]:
        """Return the free ranges of at least `size` bytes: their size, start, end and arena."""
        return [
            (end - start, start, end, arena)
            for arena, ranges in self._free.items()
            for start, end in ranges
            if end - start >= size
        ]

    def free(self, block: Block) -> None:
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
            idle = [other for other, ranges in self._free.items() if ranges == [(0, other.size)]]
            if not idle:
                raise
            for other in idle:
                del self._free[other]
                other.close()
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

    def allocate(self, layer: int, size: int) -> Tensor:
        """Return a layer's uint8 ``[size]``. Its content stays if it was large enough before. Raises MemoryError as
        `PinnedArena` does.
        """
        block = self._blocks.get(layer)
        if block is None or block.size < size:
            if block is not None:
                self._pool.free(self._blocks.pop(layer))
            self._blocks[layer] = block = self._pool.allocate(size)
        return block.memory[:size]

    def close(self) -> None:
        """Give the blocks back. Their views must not be used afterwards."""
        for block in self._blocks.values():
            self._pool.free(block)
        self._blocks = {}


class HostCache(ABC):
    """Keys and values of a batch's `rows` in host memory. There is room for `capacity` tokens a sequence. Layers may
    differ in their heads and widths, and keys from values. `windows` has the sliding windows, in tokens, by layer
    number."""

    attends_on: str  # gpu, cpu, or "cpu, torch" without a C compiler
    rows: slice
    parts: list[slice]  # rows that go through the model together in a decode step

    def __init__(
        self,
        memory: HostMemory,
        copier: HostCopier,
        parts: list[slice],
        capacity: int,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self.rows, self.parts = slice(parts[0].start, parts[-1].stop), parts
        self.capacity, self._windows = capacity, windows or {}
        self._memory, self._copier = memory, copier

    def _slots(self, layer: int) -> WindowIndex:
        return WindowIndex(self.capacity, self._windows.get(layer))

    @abstractmethod
    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values of positions `start` on. They are ``[rows, kv_heads, n, head_dim]`` each; return all
        keys and values that these positions see.
        """

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        """Store the first positions of `rows`: keys and values, or what `FixedLayer.stored` returns of those in 8
        bits."""
        keys, values = blocks
        self.extend(layer, rows, keys, values, 0)

    @abstractmethod
    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `rows`, on the host or the device. They are ``[b, kv_heads, n, head_dim]`` each:
        the positions that the next token after `length` ones sees. In 8 bits they are as `quantize_rows` returns them.
        """

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on, of all rows."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        """Keep only `rows` (rising) of this cache. They become rows `first`, `first` + 1, .. Memory stays reserved
        until the last row is gone.
        """


class CpuCache(HostCache):
    """Host cache that the CPU attends to: `HostTensor`s ``[rows, kv_heads, room, head_dim]``, in the order in which
    attention reads them; with `in_8_bits`, in the format of `zinfer.engine.stream.cpu_kernel.quantize_rows`."""

    def __init__(
        self,
        memory: HostMemory,
        copier: HostCopier,
        rows: slice,
        capacity: int,
        device: torch.device,
        in_8_bits: bool = False,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(memory, copier, [rows], capacity, windows)
        self._device, self._in_8_bits = device, in_8_bits
        keep_freed_memory()
        self.attends_on = "cpu" if library() is not None else "cpu, torch"
        self._layers: dict[int, tuple[WindowIndex, Tensor, Tensor]] = {}  # layer -> slots, keys, values
        self._sent: list[Any] = []  # events behind copies of prompts' keys that may be under way

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        stored = self.encode(keys, values)
        if not start:
            self._send(layer, rows, stored)
            return keys, values
        seen = self.append(layer, rows, to_host_async(*stored), start)
        if self._in_8_bits:
            return as_host_int8(seen[0], self._device, keys.dtype), as_host_int8(seen[1], self._device, keys.dtype)
        return as_host_tensor(seen[0], self._device), as_host_tensor(seen[1], self._device)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are stored, on their device."""
        return (quantize_rows(keys), quantize_rows(values)) if self._in_8_bits else (keys, values)

    def append(self, layer: int, rows: slice, arrived: Sequence[Tensor], start: int) -> tuple[Tensor, Tensor]:
        """Store encoded keys and values of positions `start` on. They may be on their way to host memory. Returns all
        keys and values that these positions see, in 8 bits without scales.
        """
        slots, *stores = self._layers[layer]
        step = slots.add(start, arrived[0].shape[2])
        for event in self._sent:
            if event is not None:
                event.synchronize()
        self._sent = []
        if step.moved:  # the past moves, too
            flush()
        indices = self._row_range(rows)
        keys, values = (_stored(step, store[indices], states) for store, states in zip(stores, arrived, strict=True))
        return (int8_of(keys), int8_of(values)) if self._in_8_bits else (keys, values)

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        if self._in_8_bits:
            blocks = join_scales(*blocks[:2]), join_scales(*blocks[2:])
        self._send(layer, rows, blocks)

    def _row_range(self, rows: slice) -> slice:
        """Return `rows` of the batch as rows of this cache."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def _send(self, layer: int, rows: slice, stored: Sequence[Tensor]) -> None:
        """Send the first positions of `rows`, encoded."""
        if layer not in self._layers:
            slots = self._slots(layer)
            self._layers[layer] = slots, *self._allocate(layer, slots, stored)
        slots, *stores = self._layers[layer]
        step = slots.add(0, stored[0].shape[2])
        for store, states in zip(stores, stored, strict=True):
            # One copy of whole rows: positions beyond the prompt have no meaning yet.
            padded = pad(step.kept(states), (0, 0, 0, slots.room - step.new.stop))
            self._sent.append(self._copier.send(padded, store[self._row_range(rows)]))

    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        self._copier.finish()
        slots, *stores = self._layers[layer]
        indices = [row - self.rows.start for row in rows]
        keys, values = (store[indices][:, :, slots.held(length)] for store in stores)
        return keys, values

    def rollback(self, length: int) -> None:
        for slots, _, _ in self._layers.values():
            slots.rollback(length)

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._copier.finish()
        for layer, (slots, *stores) in self._layers.items():
            for store in stores:
                for to, row in enumerate(rows):
                    if row - self.rows.start != to:
                        store[to].copy_(store[row - self.rows.start])
            keys, values = (store[: len(rows)] for store in stores)
            self._layers[layer] = slots, keys, values
        self.rows = slice(first, first + len(rows))
        self.parts = [self.rows]

    def _allocate(self, layer: int, slots: WindowIndex, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rows = self.rows.stop - self.rows.start
        shapes = [(rows, states.shape[1], slots.room, states.shape[3]) for states in stored]
        keys, values = (prod(shape) * states.itemsize for shape, states in zip(shapes, stored, strict=True))
        begin = -(-keys // ALIGNMENT) * ALIGNMENT
        memory = self._memory.allocate(layer, begin + values)
        dtype = stored[0].dtype
        return memory[:keys].view(dtype).view(shapes[0]), memory[begin:].view(dtype).view(shapes[1])


def _stored(step: SlotAllocation, memory: Tensor, states: Tensor) -> Tensor:
    """Return all states that the new ones see; these are stored once they have arrived."""
    if step.moved:
        return step.store(memory, states)
    defer_store(memory[..., step.new, :], states)
    return step.seen(memory)


@dataclass(frozen=True)
class PartFetch:
    """`Fetch` of the keys and values of one part of a `LinkCache`: the `length` positions that are stored; each pass
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


@dataclass
class StoredPart:
    """Keys and values of one part in one layer: memory, uint8 ``[room, bytes of a position]``, for `length` tokens."""

    slots: WindowIndex
    memory: Tensor
    key_bytes: int  # of a position
    length: int = 0
    written: Any = None  # event behind the last copy

    def held(self, length: int) -> Tensor:
        """Return the positions seen after `length` tokens, as ``[n, bytes a position]``."""
        return self.memory[self.slots.held(length)]

    def transfer(self, layer: int, length: int) -> Transfer:
        return Transfer(
            layer, source=lambda: self.held(length).view(-1), ready=lambda: self.length >= length, before=self._wait
        )

    def _wait(self) -> None:
        if self.written is not None:
            self.written.wait()

    @staticmethod
    def rows_of(half: Tensor, count: int, rows: Sequence[int]) -> Tensor:
        """Return some of the `count` rows of keys or values ``[n, bytes]``: ``[n, rows, bytes of a row]``."""
        by_row: Tensor = half.unflatten(1, (count, half.shape[1] // count))
        return by_row[:, rows]


class LinkCache(HostCache):
    """Host cache that crosses the link for attention on the GPU. In a layer a part, a range of rows, is one range of
    bytes, a position after the other: ``[room, K and V of its rows]``. A pass reads it in one copy, into a buffer of
    `ring`, and adds to it in another. With `shared`, a later layer attends to the same keys, too, which the buffer no
    longer holds by then: they are copied."""

    attends_on = "gpu"

    def __init__(
        self,
        memory: HostMemory,
        copier: HostCopier,
        ring: PrefetchRing,
        parts: list[slice],
        capacity: int,
        windows: Mapping[int, int] | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(memory, copier, parts, capacity, windows)
        self._ring, self._cuda, self.shared, self._version = ring, ring.queues is not None, shared, 0
        self._parts: dict[tuple[int, int], StoredPart] = {}  # by layer and first row
        self._shapes: dict[int, tuple[torch.dtype, tuple[int, int], tuple[int, int]]] = {}  # type, heads and widths

    def fetch(self, part: slice, length: int, count: int) -> PartFetch:
        """Return the fetch for `part`'s pass of `count` new tokens. It has `length` tokens stored."""
        return PartFetch(self, part, length, count, self._version)

    def part_bytes(self, part: slice) -> int:
        """Return the bytes of the largest layer of a full part."""
        return max((stored.memory.nbytes for (_, row), stored in self._parts.items() if row == part.start), default=0)

    def transfer(self, layer: int, part: slice, length: int) -> Transfer | None:
        """Return the copy of a layer's keys and values of `length` tokens; None if the layer stores none."""
        stored = self._parts.get((layer, part.start))
        return None if stored is None else stored.transfer(layer, length)

    def stored(self, layer: int, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
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
        return torch.stack([states_of[row][0] for row in rows]), torch.stack([states_of[row][1] for row in rows])

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
                memory = self._memory.allocate(layer, begin + kept.nbytes)[begin:].view(stored.slots.room, -1)
                memory.copy_(kept)
                begins[layer] = begin + kept.nbytes
                key_bytes = stored.key_bytes // count * len(indices)
                self._parts[layer, start] = StoredPart(stored.slots, memory, key_bytes, stored.length)
        self.parts, self.rows = parts, slice(first, first + len(rows))
        self._version += 1

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        key = (layer, rows.start)
        if rows not in self.parts:
            raise ValueError(f"rows {rows.start} to {rows.stop} are not a part of the cache in host memory")
        packed = torch.cat([states.permute(2, 0, 1, 3).reshape(states.shape[2], -1) for states in (keys, values)], 1)
        new = packed.view(torch.uint8)
        if key not in self._parts:
            slots = self._slots(layer)
            size = slots.room * new.shape[1] // (rows.stop - rows.start)  # bytes of a row
            memory = self._memory.allocate(layer, size * (self.rows.stop - self.rows.start))
            row_memory = memory[size * (rows.start - self.rows.start) : size * (rows.stop - self.rows.start)]
            halves = [states.shape[1] * states.shape[3] for states in (keys, values)]
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
            return keys, values
        if self.shared and self._cuda:
            seen = seen.clone()
        count, heads, _, width = keys.shape
        values_of_rows = seen.view(packed.dtype)
        split = count * heads * width
        return (
            values_of_rows[:, :split].view(len(values_of_rows), count, heads, width).permute(1, 2, 0, 3),
            values_of_rows[:, split:].view(len(values_of_rows), *values.shape[:2], values.shape[3]).permute(1, 2, 0, 3),
        )

    def hand_back(self) -> None:
        """Free the ring's buffers with keys and values of the current layer."""
        self._ring.hand_back()

    def _joined(self, step: SlotAllocation, layer: int, new: Tensor) -> Tensor:
        """Return the positions that `new` ones see, then `new`, ``[n, bytes]``: on a GPU in the ring's buffer."""
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
    """Cache of decoder layer `index`: the batch's first rows in `device_layer`, the others in `host`."""

    def __init__(self, index: int, device_layer: FixedLayer, host: HostCache) -> None:
        super().__init__(device_layer.batch_size, device_layer.capacity, device_layer.slots.window)
        self.device_layer = device_layer
        self._index, self._host = index, host

    def window(self, rows: slice, length: int) -> None:
        self.rows, self.length = rows, length
        if rows.stop <= self.batch_size:
            self.device_layer.window(rows, length)

    def joins(self, rows: slice, on_cpu: bool = False) -> bool:
        """Tell whether part `rows` of it can share a pass with others: on the device, or in host memory, from which
        they come over the link one after the other; or with others that the CPU attends to, if these are `on_cpu`.
        """
        if on_cpu:
            return isinstance(self._host, CpuCache) and rows == self._host.rows
        if isinstance(self.device_layer, QuantizedLayer):
            return bool(rows.stop <= self.batch_size)
        if type(self.device_layer) is not FixedLayer:
            return False
        if isinstance(self._host, LinkCache):
            return not self._host.shared
        return rows == slice(0, self.batch_size)

    def hand_back(self) -> None:
        """Free the copy of keys and values that the last `update` returned."""
        if isinstance(self._host, LinkCache) and self.rows.stop > self.batch_size:
            self._host.hand_back()

    def stored(self, rows: Tensor, length: int, gaps: RowMask | None) -> list[Tensor]:
        on_device = rows < self.batch_size
        if bool(on_device.all()):
            return self.device_layer.stored(rows, length, gaps)
        halves = self._host.stored(self._index, rows[~on_device].tolist(), length)
        blocks = [half.to(rows.device) for half in halves]
        if isinstance(self.device_layer, QuantizedLayer):
            blocks = [part for half in blocks for part in split_scales(half)]
        if gaps is not None:
            every, host_gaps = torch.arange(len(blocks[0]), device=rows.device), gaps.of(~on_device)
            blocks = [copy_slots(half, every, slice(0, half.shape[2]), host_gaps) for half in blocks]
        if not bool(on_device.any()):
            return blocks
        device_blocks = self.device_layer.stored(rows[on_device], length, None if gaps is None else gaps.of(on_device))
        merged = []
        for device_block, host_block in zip(device_blocks, blocks, strict=True):
            both = host_block.new_empty((len(rows), *host_block.shape[1:]))
            both[on_device], both[~on_device] = device_block, host_block
            merged.append(both)
        return merged

    def fill(self, blocks: Sequence[Sequence[Tensor]], length: int, dtype: torch.dtype) -> None:
        whole = [_padded(parts, length) for parts in zip(*blocks, strict=True)]
        if self.batch_size:
            self.device_layer.fill([[block[: self.batch_size] for block in whole]], length, dtype)
        for part in self._host.parts:
            self._host.fill(self._index, part, [block[part] for block in whole])
        self.is_initialized, self.dtype = True, dtype
        self.window(slice(0, self.batch_size), length)
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on in the rows on the device; `HostCache.rollback` does so in the
        others."""
        if self.batch_size:
            self.device_layer.rollback(length)
        self.length = length

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only those of `rows` that are on the device; `HostCache.keep_rows` keeps the others."""
        self.device_layer.keep_rows(rows[rows < self.batch_size])
        self.batch_size = self.device_layer.batch_size

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.length
        self.length += key_states.shape[2]
        self.is_initialized, self.dtype = True, key_states.dtype
        if self.rows.stop <= self.batch_size:
            return self.device_layer.update(key_states, value_states, *args, **kwargs)
        return self._host.extend(self._index, self.rows, key_states, value_states, start)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encode keys and values of CPU-attended rows, as `CpuCache.encode` does."""
        assert isinstance(self._host, CpuCache)
        return self._host.encode(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values of CPU-attended rows. `CpuCache.append` does the same."""
        assert isinstance(self._host, CpuCache)
        start = self.length
        self.length += keys.shape[2]
        return self._host.append(self._index, self.rows, (keys, values), start)

    def store(self, keys: Tensor, values: Tensor) -> Sequence[Tensor | QuantizedKV]:
        if self.rows.stop > self.batch_size:
            return self.update(keys, values)
        self.length += keys.shape[2]
        self.is_initialized, self.dtype = True, keys.dtype
        return self.device_layer.store(keys, values)


class PartLayer(DynamicLayer):  # type: ignore[misc]
    """Layer narrowed to `rows`, for a forward pass that several parts share."""

    is_sliding = False

    def __init__(self, whole: FixedLayer, rows: slice, length: int) -> None:
        super().__init__()
        self._whole, self._rows, self._length = whole, rows, length

    def get_seq_length(self) -> int:
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.narrowed().update(key_states, value_states)

    def narrowed(self) -> FixedLayer:
        """Return the layer of the whole batch, narrowed to the rows."""
        self._whole.window(self._rows, self._length)
        return self._whole

    def attended(self) -> None:
        """Free what `update` returned."""
        if isinstance(self._whole, SplitLayer):
            self._whole.hand_back()


def _padded(blocks: Sequence[Tensor], length: int) -> Tensor:
    """Stack blocks ``[b, kv_heads, n, D]``, zero-padded in front to `length`."""
    return torch.cat([pad(block, (0, 0, length - block.shape[2], 0)) for block in blocks])
