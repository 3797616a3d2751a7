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
    are kept for the next ones, since page-locking takes long."""

    def __init__(self, pin: bool, progress: Progress = silent) -> None:
        self._pin, self._progress = pin, progress
        self._arenas: list[PinnedArena] = []
        self._free: list[Block] = []  # what no block has of them; no two of these touch

    @property
    def size(self) -> int:
        return sum(arena.size for arena in self._arenas)

    @property
    def unused(self) -> int:
        return sum(block.size for block in self._free)

    def reserve(self, size: int) -> None:
        """Make the arenas `size` bytes together, if they are less: one arena, if no block is taken. Raises MemoryError
        as `PinnedArena` does."""
        if self.unused == self.size < size:
            self.close()
        if size > self.size:
            self._grow(_aligned(size - self.size))

    def allocate(self, size: int) -> Block:
        """Allocate a block of `size` bytes, its content undefined: of the smallest free range, or of a new
        arena. Raises MemoryError as `PinnedArena` does."""
        taken = _aligned(size)
        if not any(block.size >= taken for block in self._free):
            self._grow(max(taken, _aligned(self.size // GROWTH)))
        arena, start, room = min((block for block in self._free if block.size >= taken), key=lambda block: block.size)
        self._free.remove(Block(arena, start, room))
        if room > taken:
            self._free.append(Block(arena, start + taken, room - taken))
        return Block(arena, start, size)

    def free(self, block: Block) -> None:
        start, end = block.start, block.start + _aligned(block.size)
        for other in [other for other in self._free if other.arena is block.arena]:
            if other.start == end or other.start + other.size == start:
                self._free.remove(other)
                start, end = min(start, other.start), max(end, other.start + other.size)
        self._free.append(Block(block.arena, start, end - start))

    def close(self) -> None:
        """Free all memory. Blocks must not be used afterwards."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self._free = [], []

    def _grow(self, size: int) -> None:
        """Add an arena; where memory falls short, arenas that nobody uses make room for it."""
        try:
            arena = PinnedArena(size, self._pin, self._progress)
        except MemoryError:
            idle = [block for block in self._free if block.size == block.arena.size]
            if not idle:
                raise
            for block in idle:
                self._free.remove(block)
                self._arenas.remove(block.arena)
                block.arena.close()
            arena = PinnedArena(size, self._pin, self._progress)
        self._arenas.append(arena)
        self._free.append(Block(arena, 0, size))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
