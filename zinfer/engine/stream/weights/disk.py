"""Layers on disk: files of packed layers, of which host memory keeps some and reads the others anew in every pass.

A pump reads the chunks of the layers that are not kept, in the order of the passes, into a ring of page-locked host
memory. It has many reads in flight and runs ahead of the copies to the device as far as the ring has places: while a
pass takes layers that host memory keeps, the pump gains time for the next layer from disk.

Two rules join it to the copies. A chunk is handed out once it has arrived whole. Its place in the ring is used again
once the event that `release` gets has passed: the device has read it then.

Every chunk is compared with its checksum when it is first read, and again after the files have changed in any way.
"""

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.progress import Progress, silent
from zinfer.engine.direct import PAGE, THREADS, DirectFile, aligned
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.read import as_bytes
from zinfer.engine.stream.trace import clock
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.queues import PASSED, Event
from zinfer.engine.stream.weights.source import WeightSource

LAYERS_AHEAD = 2  # layers that are read into host memory while one is checked
TIMED_READS = 1 << 14  # latest chunks whose times of reading are kept: more than a pass has


@dataclass
class _Read:
    """A chunk on its way from disk into the ring."""

    chunk: Chunk
    offset: int  # first byte in the ring
    before: object  # identity of the files when it began
    jobs: list[Future[None]]
    began: list[float]  # times in s at which requests began, ascending
    done: Future[None] = field(init=False)  # read and checked


class DiskSource(WeightSource):
    """Weights in `files`, read ahead into a ring of host memory. `layers` has their places, `sums` the CRC-32 of the
    chunks of each. It takes over what is `owned`, and closes it. The ring has as many slots for chunks as `ring_bytes`
    hold, at least two; `pin` page-locks all host memory. Raises MemoryError where there is too little of it."""

    def __init__(
        self,
        files: DirectFile,
        layers: Sequence[PackedLayer],
        sums: Sequence[Sequence[int]],
        ring_bytes: int,
        pin: bool,
        owned: ExitStack | None = None,
    ) -> None:
        super().__init__(layers)
        self._files, self._pin = files, pin
        self._sums = {
            chunk.start: checksum
            for packed, checksums in zip(layers, sums, strict=True)
            for chunk, checksum in zip(packed.chunks, checksums, strict=True)
        }
        self._layer_of = {chunk.start: index for index, packed in enumerate(layers) for chunk in packed.chunks}
        self._read_times: deque[tuple[int, float, float]] = deque(maxlen=TIMED_READS)  # layer, begin, end; in s
        self._checked, self._seen = set[int](), files.identity
        self._kept: dict[int, PinnedArena] = {}  # layer -> its bytes in host memory, from a page's beginning on
        self._views: dict[int, Tensor] = {}  # start of a chunk in host memory -> its bytes
        ranges = (aligned(chunk.start, chunk.end) for packed in layers for chunk in packed.chunks)
        self._slot_bytes = max(end - begin for begin, end in ranges)
        self._ring = PinnedArena(max(2, ring_bytes // self._slot_bytes) * self._slot_bytes, pin)
        self._bytes = as_bytes(self._ring.memory)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="zinfer-disk")
        self._checkers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="zinfer-check")
        self._changed = threading.Condition()
        self._reads: deque[_Read] = deque()  # reads that were not given back
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._fault: BaseException | None = None
        self.ring_bytes, self.file_bytes = self._ring.size, sum(packed.size for packed in layers)
        self._count_kept()
        self._owned = ExitStack() if owned is None else owned.pop_all()

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "host_layers": len(self._kept),
            "disk_ring_bytes": self.ring_bytes,
            "disk_reads": "direct" if self._files.direct else "buffered: the file system refuses direct ones",
        }

    def _count_kept(self) -> None:
        self.host_layers = tuple(sorted(self._kept))
        self.host_bytes = sum(self.layers[index].size for index in self._kept)
        self.pinned_bytes = sum(arena.size for arena in (self._ring, *self._kept.values()) if arena.pinned)

    def keep(self, layers: Iterable[int], progress: Progress = silent) -> None:
        """Keep `layers`, and no others, in host memory. Nothing may be read ahead. Raises MemoryError, OSError, and
        CheckpointError for damaged layers."""
        wanted = set(layers)
        for index in self._kept.keys() - wanted:
            for chunk in self.layers[index].chunks:
                del self._views[chunk.start]
            self._kept.pop(index).close()
        missing = sorted(wanted - self._kept.keys())
        under_way: deque[tuple[int, PinnedArena, list[Future[None]]]] = deque()
        try:
            for done, index in enumerate(missing):
                under_way.append((index, *self._read_layer(index)))
                while len(under_way) > (LAYERS_AHEAD if index != missing[-1] else 0):
                    self._finish_layer(*under_way[0])
                    under_way.popleft()
                progress("reading layers into host memory", (done + 1) / len(missing))
        finally:
            for _, arena, jobs in under_way:
                _cancel(jobs)
                arena.close()
            self._count_kept()

    def _read_layer(self, index: int) -> tuple[PinnedArena, list[Future[None]]]:
        packed = self.layers[index]
        begin, end = aligned(packed.start, packed.end)
        arena = PinnedArena(end - begin, self._pin)
        return arena, self._submit(as_bytes(arena.memory), begin, packed.end, end)

    def _finish_layer(self, index: int, arena: PinnedArena, jobs: Sequence[Future[None]]) -> None:
        for job in jobs:
            job.result()
        packed = self.layers[index]
        base = aligned(packed.start, packed.end)[0]
        views = {chunk.start: arena.memory[chunk.start - base : chunk.end - base] for chunk in packed.chunks}
        list(self._pool.map(lambda chunk: self._check(chunk, as_bytes(views[chunk.start]), None), packed.chunks))
        self._kept[index] = arena
        self._views |= views

    def _submit(
        self, memory: memoryview, begin: int, need: int, end: int, began: list[float] | None = None
    ) -> list[Future[None]]:
        """Start to fill `memory` with bytes `begin` to `end`. Files may lack those behind `need`; note when requests
        `began`."""

        def read(part: memoryview, start: int, need: int) -> None:
            if began is not None:
                began.append(clock())
            self._files.read(part, start, need)

        jobs = []
        for start, stop in self._files.requests(begin, end):
            part = memory[start - begin : stop - begin]
            jobs.append(self._pool.submit(read, part, start, min(stop, need) - start))
        return jobs

    def reads(self) -> list[tuple[int, float, float]]:
        """Return layer, begin and end of the latest reads. Times are of the host's clock; reads under way end now."""
        with self._changed:
            under_way = [read for read in self._reads if read.began and not all(job.done() for job in read.jobs)]
            now = clock()
            times = [*self._read_times, *((self._layer_of[read.chunk.start], read.began[0], now) for read in under_way)]
        return sorted(times, key=lambda read: read[1])

    def _check(self, chunk: Chunk, content: memoryview, before: object) -> None:
        """Compare a chunk with its checksum, once until the files change. `before` is their identity
        before it was read, None to compare it in any case."""
        now = self._files.identity
        with self._changed:
            if now != self._seen:
                self._checked.clear()
                self._seen = now
            if before == now and chunk.start in self._checked:
                return
        if zlib.crc32(content) != self._sums[chunk.start]:
            layer = self._layer_of[chunk.start]
            raise CheckpointError(f"{self._files.path}: layer {layer} is damaged, or was changed")
        with self._changed:
            if before == now == self._seen:
                self._checked.add(chunk.start)

    def on_disk(self, chunk: Chunk) -> bool:
        return chunk.start not in self._views

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Drop chunks read ahead, and read `chunks` from now on. None of them is kept in host memory."""
        self.stop()
        # Free slots, each with the event behind its last read; None to stop.
        self._free_slots = SimpleQueue[tuple[int, Event] | None]()
        for offset in range(0, self._ring.size, self._slot_bytes):
            self._free_slots.put((offset, PASSED))
        self._thread = threading.Thread(target=self._pump, args=(iter(chunks),), name="zinfer-pump", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping = True
            self._free_slots.put(None)
            self._thread.join()
            self._thread = None
        for read in self._reads:
            _cancel(read.jobs)
        for read in self._reads:
            read.done.exception()  # checked, too
        self._reads.clear()
        self._stopping, self._fault = False, None

    def ready(self, chunk: Chunk) -> bool:
        with self._changed:
            arrived = self._reads and self._reads[0].done.done()
            return bool(arrived) or self._fault is not None or not self.on_disk(chunk)

    def get(self, chunk: Chunk) -> Tensor:
        """Wait for the next chunk, and return its bytes, uint8. They are valid until `release`. Raises OSError, and
        CheckpointError for a chunk that is cut off or damaged."""
        if not self.on_disk(chunk):
            return self._views[chunk.start]
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._fault is not None)
            if self._fault is not None:
                raise self._fault
            read = self._reads[0]
        if read.chunk.start != chunk.start:
            raise RuntimeError(f"byte {chunk.start:,} is wanted, byte {read.chunk.start:,} comes next from disk")
        read.done.result()
        return self._content(read)

    def release(self, last: Event = PASSED) -> None:
        with self._changed:
            self._free_slots.put((self._reads.popleft().offset, last))

    def _content(self, read: _Read) -> Tensor:
        start = read.offset + read.chunk.start % PAGE
        return self._ring.memory[start : start + read.chunk.size]

    def _pump(self, chunks: Iterator[Chunk]) -> None:
        """Read `chunks` into the ring, in a thread of its own."""
        try:
            for chunk in chunks:
                if (free := self._free_slots.get()) is None or self._stopping:
                    return
                offset, last = free
                last.synchronize()
                begin, end = aligned(chunk.start, chunk.end)
                began, before = list[float](), self._files.identity
                jobs = self._submit(self._bytes[offset : offset + end - begin], begin, chunk.end, end, began)
                read = _Read(chunk, offset, before, jobs, began)
                read.done = self._checkers.submit(self._finish_read, read)
                with self._changed:
                    self._reads.append(read)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._fault = error
                self._changed.notify_all()

    def _finish_read(self, read: _Read) -> None:
        for job in read.jobs:
            job.result()
        with self._changed:
            self._read_times.append((self._layer_of[read.chunk.start], read.began[0], clock()))
        self._check(read.chunk, as_bytes(self._content(read)), read.before)

    def close(self) -> None:
        """Free the memory, close the files and what is owned. Safe to call twice."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
        self._checkers.shutdown()
        self._views.clear()
        self._bytes = memoryview(b"")
        for arena in (*self._kept.values(), self._ring):
            arena.close()
        self._kept.clear()
        self._files.close()
        self._owned.close()


def write(
    put: Callable[[memoryview], object], layers: Iterable[tuple[int, PackedLayer, Tensor]]
) -> tuple[list[PackedLayer], list[list[int]]]:
    """Write packed layers by `put`, each from a whole page on; return their places and CRC-32. A layer comes as its
    number, its places from byte 0 on, and memory that begins with its bytes (uint8 ``[n]``), valid until the next one
    comes."""
    written, sums, end = dict[int, PackedLayer](), dict[int, list[int]](), 0
    for index, packed, memory in layers:
        content = as_bytes(memory)[: packed.end]
        sums[index] = [zlib.crc32(content[chunk.start : chunk.end]) for chunk in packed.chunks]
        chunks = tuple(replace(chunk, start=chunk.start + end, end=chunk.end + end) for chunk in packed.chunks)
        written[index] = replace(packed, chunks=chunks)
        put(content)
        put(memoryview(bytes(-len(content) % PAGE)))
        end += len(content) + -len(content) % PAGE
        del content, memory
    return [written[index] for index in range(len(written))], [sums[index] for index in range(len(sums))]


def _cancel(jobs: Sequence[Future[None]]) -> None:
    for job in jobs:
        job.cancel()
    for job in jobs:
        if not job.cancelled():
            job.exception()
