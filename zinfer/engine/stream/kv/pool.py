"""Host memory for KV caches: blocks of page-locked arenas, and copies from the device to them."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.engine.pinned import ALIGNMENT, PinnedArena
from zinfer.engine.stream.weights.queues import PASSED, Event

GROWTH = 8  # a pool that has no room grows by an eighth at least
IN_FLIGHT = 512 << 20  # bytes under way to the host at a time; they take as much device memory


class HostCopier:
    """Device-to-host copier with a CUDA stream of its own, in order; without a GPU they are done at once. All batches
    share one copier, so that no copy of an earlier batch arrives in memory that is used anew."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[int, Event]] = deque()  # bytes, event
        self._bytes = 0  # bytes under way

    def send(self, states: Tensor, target: Tensor) -> Event:
        """Copy `states` to `target`, page-locked; return the event behind the copy."""
        if self._stream is None:
            target.copy_(states)
            return PASSED
        while self._under_way and (self._bytes + states.nbytes > IN_FLIGHT or self._under_way[0][1].query()):
            size, arrived = self._under_way.popleft()
            arrived.synchronize()
            self._bytes -= size
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(states, non_blocking=True)
            states.record_stream(self._stream)
            event: Event = torch.cuda.Event()
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
        `PinnedArena` does."""
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
