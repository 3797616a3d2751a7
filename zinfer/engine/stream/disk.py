"""Layers on disk: files of packed layers, of which host memory keeps some and reads the others anew in every pass.

A pump reads the pieces of the layers that are not kept, in the order of the passes, into a ring of page-locked host
memory. It has many reads in flight and runs ahead of the copies to the device as far as the ring has room: a quick
stretch of a pass, of layers that host memory keeps, gives it time for the next layer from disk.

Two rules join it to the copies. A piece is handed out once it has arrived whole, and its place in the ring is used
again once `release` has said what the device reads it for, and that is done.

Every piece is compared with its checksum when it is first read, and again after the files have changed in any way.
"""

import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.progress import Progress, silent
from zinfer.engine.direct import PAGE, THREADS, StripedFile, StripedWriter, aligned
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.read import as_bytes
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer
from zinfer.engine.stream.prefetch import Event, Fetch, PrefetchRing, Queues, Transfer
from zinfer.engine.stream.trace import Reads, clock

LAYERS_AHEAD = 2  # layers that are read into host memory while one is checked
KNOWN_READS = 1 << 14  # latest pieces whose times of reading are known: more than a pass has


@dataclass
class _Read:
    """A piece on its way from disk, in `size` bytes of the ring from `place` on."""

    piece: Chunk
    place: int
    size: int
    jobs: list[Future[None]]
    left: int  # requests that have not ended
    began: list[float]  # times in s at which requests began, ascending
    done: Future[None] = field(default_factory=Future)
    free: bool = False  # handed out and given back
    last: Event | None = None  # point in the copy queue behind the last read of the ring; None: at once


class DiskLayers:
    """Packed layers in `files`, where `images` has their places; `sums` are the CRC-32 of the pieces of each.

    `ring_bytes` is the size of the ring, at least that of two pieces; `pin` page-locks all host memory. Raises
    MemoryError where there is too little of it.
    """

    def __init__(
        self,
        files: StripedFile,
        images: Sequence[PackedLayer],
        sums: Sequence[Sequence[int]],
        ring_bytes: int,
        pin: bool,
    ) -> None:
        self.images = images
        self._files, self._pin = files, pin
        self._sums = {
            piece.start: checksum
            for image, own in zip(images, sums, strict=True)
            for piece, checksum in zip(image.pieces, own, strict=True)
        }
        self._layer_of = {piece.start: index for index, image in enumerate(images) for piece in image.pieces}
        self._read_times: deque[tuple[int, float, float]] = deque(maxlen=KNOWN_READS)  # layer, begin, end; in s
        if any(piece.size <= 0 for image in images for piece in image.pieces):
            raise CheckpointError(f"{files.name(0)} lists an empty piece: pack it again")
        self._checked, self._seen = set[int](), files.identity
        self._kept: dict[int, PinnedArena] = {}  # layer -> its bytes in host memory, from a page's beginning on
        self._views: dict[int, Tensor] = {}  # start of a piece in host memory -> its bytes
        largest = max(_room(piece) for image in images for piece in image.pieces)
        self._ring = PinnedArena(max(ring_bytes + -ring_bytes % PAGE, 2 * largest), pin)
        self._bytes = as_bytes(self._ring.memory)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="zinfer-disk")
        self._changed = threading.Condition()
        self._reads: deque[_Read] = deque()  # reads that hold a place in the ring
        self._given = 0  # number of them that are given back
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._fault: BaseException | None = None

    @property
    def direct(self) -> bool:
        """True if reads go past the page cache."""
        return self._files.direct

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that host memory keeps."""
        return tuple(sorted(self._kept))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the layers that host memory keeps."""
        return sum(self.images[index].end - self.images[index].start for index in self._kept)

    @property
    def file_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(image.end - image.start for image in self.images)

    @property
    def ring_bytes(self) -> int:
        return self._ring.size

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of host memory."""
        return sum(arena.size for arena in (self._ring, *self._kept.values()) if arena.pinned)

    def keep(self, layers: Iterable[int], progress: Progress = silent) -> None:
        """Keep `layers`, and no others, in host memory; reads those that are not there. Nothing may be read ahead.

        Raises MemoryError, OSError, and CheckpointError for damaged layers.
        """
        wanted = set(layers)
        for index in self._kept.keys() - wanted:
            for piece in self.images[index].pieces:
                del self._views[piece.start]
            self._kept.pop(index).close()
        missing = sorted(wanted - self._kept.keys())
        under_way: deque[tuple[int, PinnedArena, list[Future[None]]]] = deque()
        try:
            for done, index in enumerate(missing):
                under_way.append((index, *self._read_layer(index)))
                while len(under_way) > (LAYERS_AHEAD if index != missing[-1] else 0):
                    self._take_layer(*under_way[0])
                    under_way.popleft()
                progress("reading layers into host memory", (done + 1) / len(missing))
        finally:
            for _, arena, jobs in under_way:
                _cancel(jobs)
                arena.close()

    def _read_layer(self, index: int) -> tuple[PinnedArena, list[Future[None]]]:
        image = self.images[index]
        begin, end = aligned(image.start, image.end)
        arena = PinnedArena(end - begin, self._pin)
        return arena, self._submit(as_bytes(arena.memory), begin, image.end, end)

    def _take_layer(self, index: int, arena: PinnedArena, jobs: Sequence[Future[None]]) -> None:
        for job in jobs:
            job.result()
        image = self.images[index]
        base = aligned(image.start, image.end)[0]
        views = {piece.start: arena.memory[piece.start - base : piece.end - base] for piece in image.pieces}
        list(self._pool.map(lambda piece: self._check(piece, as_bytes(views[piece.start])), image.pieces))
        self._kept[index] = arena
        self._views |= views

    def _submit(
        self, memory: memoryview, begin: int, need: int, end: int, began: list[float] | None = None
    ) -> list[Future[None]]:
        """Start to fill `memory` with the bytes from `begin` to `end`; the files may lack those behind `need`. The time
        at which each request begins is appended to `began`."""

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
        """Return layer, begin and end, by the host's clock, of the latest reads of pieces for passes; those under way
        end now."""
        with self._changed:
            under_way = [read for read in self._reads if read.left and read.began]
            now = clock()
            known = [*self._read_times, *((self._layer_of[one.piece.start], one.began[0], now) for one in under_way)]
        return sorted(known, key=lambda one: one[1])

    def _check(self, piece: Chunk, content: memoryview) -> None:
        """Compare a piece with its checksum unless that was done since the files were last changed."""
        now = self._files.identity
        with self._changed:
            if now != self._seen:
                self._checked.clear()
                self._seen = now
            if piece.start in self._checked:
                return
        if zlib.crc32(content) != self._sums[piece.start]:
            layer = self._layer_of[piece.start]
            raise CheckpointError(f"{self._files.name(piece.start)}: layer {layer} is damaged, or was changed")
        with self._changed:
            if now == self._seen:
                self._checked.add(piece.start)

    def in_memory(self, piece: Chunk) -> bool:
        """Tell whether host memory keeps a piece."""
        return piece.start in self._views

    def begin(self, pieces: Iterable[Chunk]) -> None:
        """Drop what was read ahead, and read `pieces`, in order, from now on; none of them is kept in host memory."""
        self.stop()
        self._thread = threading.Thread(target=self._pump, args=(iter(pieces),), name="zinfer-pump", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more, and drop what was read ahead; the device must have read what was handed out."""
        if self._thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None
        for read in self._reads:
            _cancel(read.jobs)
        for read in self._reads:
            read.done.exception()  # checked, too
        self._reads.clear()
        self._given, self._stopping, self._fault = 0, False, None

    def ready(self, piece: Chunk) -> bool:
        """Tell whether `source` returns at once."""
        with self._changed:
            arrived = len(self._reads) > self._given and self._reads[self._given].done.done()
            return arrived or self._fault is not None or self.in_memory(piece)

    def source(self, piece: Chunk) -> Tensor:
        """Return the bytes of the next piece, uint8 in host memory, once they are there; valid until `release`.

        Raises OSError, and CheckpointError for a piece that is cut off or damaged.
        """
        if self.in_memory(piece):
            return self._views[piece.start]
        with self._changed:
            self._changed.wait_for(lambda: len(self._reads) > self._given or self._fault is not None)
            if self._fault is not None:
                raise self._fault
            read = self._reads[self._given]
        if read.piece.start != piece.start:
            raise RuntimeError(f"byte {piece.start:,} is wanted, byte {read.piece.start:,} comes next from disk")
        read.done.result()
        return self._content(read)

    def release(self, last: Event | None = None) -> None:
        """Give the piece back that was handed out last, once the point `last` of a queue is passed (None: now)."""
        with self._changed:
            read = self._reads[self._given]
            read.last, read.free = last, True
            self._given += 1
            self._changed.notify_all()

    def _content(self, read: _Read) -> Tensor:
        start = read.place + read.piece.start % PAGE
        return self._ring.memory[start : start + read.piece.size]

    def _pump(self, pieces: Iterator[Chunk]) -> None:
        """Read `pieces` into the ring as it gets room; runs in a thread of its own."""
        try:
            for piece in pieces:
                begin, end = aligned(piece.start, piece.end)
                place = self._place(end - begin)
                if place is None:
                    return
                began: list[float] = []
                jobs = self._submit(self._bytes[place : place + end - begin], begin, piece.end, end, began)
                read = _Read(piece, place, end - begin, jobs, len(jobs), began)
                with self._changed:
                    self._reads.append(read)
                    self._changed.notify_all()
                for job in read.jobs:
                    job.add_done_callback(partial(self._arrived, read))
        except BaseException as error:
            with self._changed:
                self._fault = error
                self._changed.notify_all()

    def _arrived(self, read: _Read, job: Future[None]) -> None:
        """Note the end of a request; the last one of a piece checks the piece, in the thread that read it."""
        with self._changed:
            read.left -= 1
            last = read.left == 0
            if last and read.began:
                self._read_times.append((self._layer_of[read.piece.start], read.began[0], clock()))
        if not last:
            return
        faults = [fault for one in read.jobs if not one.cancelled() and (fault := one.exception()) is not None]
        try:
            if not faults and not any(one.cancelled() for one in read.jobs):
                self._check(read.piece, as_bytes(self._content(read)))
        except BaseException as error:
            faults.append(error)
        if faults:
            read.done.set_exception(faults[0])
        else:
            read.done.set_result(None)

    def _place(self, size: int) -> int | None:
        """Return where in the ring the next `size` bytes go, once there is room; None if the pump is to stop."""
        while True:
            with self._changed:
                while self._reads and self._reads[0].free and self._reads[0].last is None:
                    self._reads.popleft()
                    self._given -= 1
                place = self._gap(size)
                if place is None and not self._stopping:
                    self._changed.wait_for(lambda: self._stopping or self._reads[0].free)
                if self._stopping or place is not None:
                    return None if self._stopping else place
                oldest = self._reads[0]
                event = oldest.last
            if event is not None:
                event.synchronize()
                oldest.last = None

    def _gap(self, size: int) -> int | None:
        """Return a place for `size` bytes behind the latest read in the ring; None if there is no room yet."""
        if not self._reads:
            return 0
        first, latest = self._reads[0].place, self._reads[-1]
        head = latest.place + latest.size
        if latest.place < first:
            return head if head + size <= first else None
        if head + size <= self._ring.size:
            return head
        return 0 if size <= first else None

    def close(self) -> None:
        """Free the memory and close the files. Safe to call twice."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
        self._views.clear()
        self._bytes = memoryview(b"")
        for arena in (*self._kept.values(), self._ring):
            arena.close()
        self._kept.clear()
        self._files.close()


def write(
    paths: Sequence[Path], layers: Iterable[tuple[int, PackedLayer, Tensor]]
) -> tuple[list[PackedLayer], list[list[int]]]:
    """Write packed layers into new files; return their places there, and the CRC-32 of the pieces of each.

    A layer comes as its number, its places from byte 0 on, and memory that begins with its bytes (uint8 ``[n]``), valid
    until the next one comes. Raises CheckpointError where a drive is full.
    """
    images, sums, end = dict[int, PackedLayer](), dict[int, list[int]](), 0
    with StripedWriter(paths) as writer:
        for index, image, memory in layers:
            content = as_bytes(memory)[: image.end]
            sums[index] = [zlib.crc32(content[piece.start : piece.end]) for piece in image.pieces]
            pieces = tuple(replace(piece, start=piece.start + end, end=piece.end + end) for piece in image.pieces)
            images[index] = replace(image, pieces=pieces)
            writer.write(content)
            writer.write(memoryview(bytes(-len(content) % PAGE)))  # layers begin at whole pages
            end += len(content) + -len(content) % PAGE
            del content, memory
        writer.flush()
    return [images[index] for index in range(len(images))], [sums[index] for index in range(len(sums))]


def _room(piece: Chunk) -> int:
    """Return the bytes of the whole pages that a piece lies in."""
    begin, end = aligned(piece.start, piece.end)
    return end - begin


def _cancel(jobs: Sequence[Future[None]]) -> None:
    """Cancel reads, and wait for those under way."""
    for job in jobs:
        job.cancel()
    for job in jobs:
        if not job.cancelled():
            job.exception()


class DiskRing(PrefetchRing):
    """Ring whose pieces come from `disk`; for the rest see `PrefetchRing`."""

    def __init__(self, disk: DiskLayers, depth: int, device: torch.device, queues: Queues | None = None) -> None:
        self.disk = disk
        self.disk_bytes = 0  # weight bytes that came from disk
        self._handed = False  # without buffers: the piece that was taken last is still in the host's ring
        super().__init__(torch.empty(0, dtype=torch.uint8), list(disk.images), depth, device, queues)

    def hold(self, layers: Iterable[int], progress: Progress = silent) -> None:
        """Keep `layers` in host memory from now on, and no others; wait for the device if that changes anything."""
        if set(layers) != set(self.disk.layers):
            self._settle()
            self.disk.keep(layers, progress)

    def close(self) -> None:
        super().close()
        self.disk.close()

    def _reads(self) -> Reads:
        return self.disk.reads()

    def _settle(self) -> None:
        super()._settle()
        self.disk.stop()
        self._handed = False

    def _layer_bytes(self, index: int) -> Tensor:
        image = self.images[index]
        found = torch.empty(image.end - image.start, dtype=torch.uint8, device=self._device)
        apart = [piece for piece in image.pieces if not self.disk.in_memory(piece)]
        if apart:
            self.disk.begin(apart)
        for piece in image.pieces:
            found[piece.start - image.start : piece.end - image.start].copy_(self.disk.source(piece))
            if apart:
                self.disk.release()
        return found

    def _trips(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer]:
        order = [
            piece
            for index, image in enumerate(self.images)
            for piece in image.pieces
            if index not in self._kept and not self.disk.in_memory(piece)
        ]
        if order:
            self.disk.begin(cycle(order))
        return super()._trips(fetches)

    def _transfer(self, index: int, piece: Chunk) -> Transfer:
        return Transfer(index, partial(self._bytes, piece), piece, partial(self.disk.ready, piece))

    def _bytes(self, piece: Chunk) -> Tensor:
        try:
            return self.disk.source(piece)
        except BaseException:
            self._next = None  # the next trip begins anew
            raise

    def _complete(self, transfer: Transfer, buffer: int) -> None:
        super()._complete(transfer, buffer)
        if transfer.piece is not None and not self.disk.in_memory(transfer.piece):
            assert self._queues is not None
            copied = self._queues.event()
            copied.record()
            self.disk.release(copied)

    def _take(self, index: int, piece: Chunk | None) -> Tensor:
        from_disk = piece is not None and not self.disk.in_memory(piece)
        if self._queues is not None:
            self._fill()
            if self._taken == self._issued and self._flying and (late := self._flying[0].piece) is not None:
                self._bytes(late)  # it comes late from disk
                self._fill()
        elif self._handed:  # it has been unpacked by now
            self.disk.release()
            self._handed = False
        content = super()._take(index, piece)
        if from_disk:
            self.disk_bytes += 0 if piece is None else piece.size
            self._handed = self._queues is None
        return content
