"""Ring of several GPUs of a host: each copies its part of every piece over its own link, and they gather the rest.

Every GPU (a rank) has a ring of its own, with buffers for whole pieces. Of each piece a rank copies an equal part into
that part's place in the buffer, and a gather between the ranks completes the buffer: in a queue of its own, ahead of
compute as the copies are, so that it is hidden behind the pass. So each byte crosses one link, once. All else is as in
the ring of one GPU, whatever the form of the weights: the layer is unpacked and computed from whole buffers.

The gathers of all ranks must be the same ones, in the same order. Hence what a rank does beyond `PrefetchRing`'s:

1. A trip has one gather for each piece, whatever happens in it: a trip that ends early, or in an exception, takes part
   in the gathers that are left (`_drain`), and a rank without work runs a trip without calls (`idle_trip`).
2. The pieces that are copied ahead for the next trip are always the same ones, the first of the first layer. What else
   the next trip fetches, rank by rank, never changes them.
3. Layers that stay are shared out, too: each rank keeps its part of them, as `own_parts` cuts them. Their pieces are
   gathered in their turn, but into buffers of their own (`_Aside`), so that the copies of streamed layers go on in the
   others meanwhile. So a copy may come long before its gather: gathers are issued in the order of `_to_gather`.
4. Ranks call `resize`, `keep` and `start` alike.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor

from zinfer.core.engine import KEPT_BUFFERS
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer
from zinfer.engine.stream.prefetch import Event, Fetch, PrefetchRing, Queues, Transfer
from zinfer.engine.stream.trace import mark

SAMPLED = 4  # of so many layers one is brought to measure the links: they lie in all of the memory


class Ranks(Protocol):
    """Ranks that exchange their parts; this process is number `rank` of `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole`, uint8 ``[size * n]`` on the device, with the ``[n]`` parts of all ranks, in the order of their
        numbers, in the current queue. `part` is this rank's, and may be its place in `whole`."""


def share(size: int, ranks: int) -> int:
    """Return the bytes of a rank's part of a piece of `size` bytes: the last parts may be shorter, or empty."""
    return -(-size // (ranks * ALIGNMENT)) * ALIGNMENT


def own_parts(image: PackedLayer, content: Tensor, rank: int, ranks: int) -> list[Tensor]:
    """Return a rank's parts of the pieces of a layer whose bytes, from its first piece on, are `content`."""
    places = (_own_bytes(piece, rank, ranks) for piece in image.pieces)
    return [content[begin - image.start : end - image.start] for begin, end in places]


def _own_bytes(piece: Chunk, rank: int, ranks: int) -> tuple[int, int]:
    """Return where a rank's part of a piece begins and ends."""
    size = share(piece.size, ranks)
    start = min(piece.start + rank * size, piece.end)
    return start, min(start + size, piece.end)


class _Aside:
    """Buffers for pieces of layers that stay, which are gathered, taken and given back in the same order."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.arrived: list[Event] = []
        self.free: list[Event] = []
        self.issued = self.taken = self.returned = 0

    def resize(self, count: int, size: int, device: torch.device, queues: Queues) -> None:
        """Have `count` buffers of `size` bytes; nothing may be under way."""
        self.buffers = []  # first: the device may be short of memory
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self.arrived, self.free = ([queues.event() for _ in range(count)] for _ in range(2))

    @property
    def full(self) -> bool:
        return self.issued == self.returned + len(self.buffers)


class GatherRing(PrefetchRing):
    """Ring whose pieces come in parts, one over the link of each of `ranks`; for the rest see `PrefetchRing`."""

    def __init__(
        self,
        source: Tensor,
        images: list[PackedLayer],
        depth: int,
        device: torch.device,
        ranks: Ranks,
        queues: Queues | None = None,
    ) -> None:
        self.trips = 0  # trips that are done, whatever their end
        self._ranks = ranks
        self._own: dict[int, list[Tensor]] = {}  # layer that stays -> this rank's parts of its pieces, on the device
        self._aside = _Aside()
        self._to_gather: deque[tuple[int, int]] = deque()  # layers and numbers of pieces whose gathers are not issued
        self._to_take: deque[tuple[int, int]] = deque()  # those of the trip under way that are not taken yet
        self._copied: deque[tuple[Event, int]] = deque()  # behind each copy without its gather: event, its buffer
        super().__init__(source, images, depth, device, queues)

    @property
    def depth(self) -> int:
        return self._depth + len(self._aside.buffers)

    def resize(self, depth: int, least_bytes: int = 0) -> None:
        """Change the ring as `PrefetchRing` does; buffers that a fetch of this rank needed wider stay so. Where layers
        stay, some of the buffers are for them, and at least two for the others."""
        whole = max(self._whole_bytes(piece) for image in self.images for piece in image.pieces)
        aside = max(1, min(KEPT_BUFFERS, depth // 3)) if self._kept and self._queues is not None else 0
        if aside != len(self._aside.buffers) and self._queues is not None:
            self._settle()
            self._aside.resize(0, 0, self._device, self._queues)
        ring = max(2, depth - aside)
        super().resize(ring, max(least_bytes, whole, self._buffer_bytes if ring == self._depth else 0))
        if aside != len(self._aside.buffers) and self._queues is not None:
            self._aside.resize(aside, whole, self._device, self._queues)

    def keep(self, layers: Iterable[int]) -> None:
        """Keep `layers` on the devices from now on, each its part, and stream the others, but for those that lie
        nowhere else; wait for the device if that changes anything."""
        wanted = self._alone.union(layers)
        if wanted == self._kept.keys():
            return
        self._settle()
        depth = self.depth
        for index in set(self._kept) - wanted:
            del self._kept[index], self._own[index]
        for index in sorted(wanted - self._kept.keys()):
            parts = [self._part(index, number) for number in range(len(self.images[index].pieces))]
            self._divide(index, torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=self._device))
            for part, own in zip(parts, self._own[index], strict=True):
                own.copy_(part)
        self.resize(depth)

    def keep_alone(self, index: int, content: Tensor) -> None:
        """Keep layer `index` as `PrefetchRing` does; `content` are this rank's parts of its pieces, in their order."""
        super().keep_alone(index, content)
        self._divide(index, content)
        self.resize(self.depth)

    def _divide(self, index: int, content: Tensor) -> None:
        """Have `content` be this rank's parts of the pieces of a layer that stays."""
        ranks = self._ranks
        places = (_own_bytes(piece, ranks.rank, ranks.size) for piece in self.images[index].pieces)
        sizes = [end - begin for begin, end in places]
        self._kept[index], self._own[index] = content, list(content.split(sizes))

    def start(self) -> None:
        """Begin to fill the buffers for the next trip; the source must be complete by now, on all ranks."""
        if self._next is None:
            self._settle()
            self._coming, self._next = islice(self._pieces(), self._ahead), ()
            self._to_gather.extend(islice(self._places(), self._ahead))
            if self._queues is not None:
                self._fill()

    @contextmanager
    def trip(
        self, calls: int = 1, turn: Callable[[int], None] = lambda _layer: None, fetches: Sequence[Fetch] = ()
    ) -> Iterator[None]:
        if self._trip is None:
            self.start()
            self._widen(max((fetch.nbytes for fetch in fetches), default=0))
            self._to_take.extend(self._places())
            self._to_gather.extend(islice(self._places(), self._ahead, None))
            self._to_gather.extend(islice(self._places(), self._ahead))
            self._coming = chain(self._transfers(tuple(fetches)), islice(self._pieces(), self._ahead))
            self._next = tuple(fetches)
        try:
            with super().trip(calls, turn, fetches):
                if self._queues is not None:
                    self._fill()
                yield
        finally:
            if self._trip is None:
                self._drain()
                self._next = ()
                self.trips += 1

    def idle_trip(self) -> None:
        """Run a trip without work: take part in its gathers."""
        with self.trip():
            pass

    def bring(self) -> int:
        """Copy this rank's part of every fourth layer over its link, with nothing else under way, and wait for it;
        return its bytes. All ranks begin anew then."""
        self._settle()
        brought, queues = 0, self._queues
        sampled = self.streamed[::SAMPLED]
        parts = (self._part(index, number) for index in sampled for number in range(len(self.images[index].pieces)))
        with nullcontext() if queues is None else queues.copying():
            for number, part in enumerate(parts):
                if self._buffers:
                    target = self._buffers[number % self._depth]
                    target[: part.numel()].copy_(part, non_blocking=True)
                else:
                    part.clone()
                brought += part.numel()
        if queues is not None:
            queues.finish()
        return brought

    def abandon(self) -> None:
        """Wait for the device and drop what was copied ahead: all ranks begin anew then."""
        self._settle()

    def drop_fetches(self) -> None:
        """Wait for the device, before memory that fetches read from is changed or freed; none is fetched ahead."""
        if self._queues is not None:
            self._queues.finish()

    def close(self) -> None:
        super().close()
        self._own, self._aside = {}, _Aside()

    @property
    def _ahead(self) -> int:
        """Number of pieces that are copied before their trip begins."""
        return 0 if self._queues is None or 0 in self._kept else min(self._depth, len(self.images[0].pieces))

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield the layer and the number of each piece of a trip."""
        return ((index, number) for index, image in enumerate(self.images) for number in range(len(image.pieces)))

    def _settle(self) -> None:
        super()._settle()
        for under_way in (self._to_gather, self._to_take, self._copied):
            under_way.clear()
        self._aside.issued = self._aside.taken = self._aside.returned = 0

    def _whole_bytes(self, piece: Chunk) -> int:
        return self._ranks.size * share(piece.size, self._ranks.size)

    def _part(self, index: int, number: int) -> Tensor:
        """Return this rank's part of piece `number` of a layer: on the device where it stays, else in the source."""
        stays = self._own.get(index)
        if stays is not None:
            return stays[number]
        begin, end = _own_bytes(self.images[index].pieces[number], self._ranks.rank, self._ranks.size)
        return self._source[begin:end]

    def _whole(self, index: int) -> Tensor | None:
        return None

    def _pieces(self) -> Iterator[Transfer]:
        """Yield the transfers of a trip without fetches."""
        for index, image in enumerate(self.images):
            yield from self._of_layer(index, image)

    def _of_layer(self, index: int, image: PackedLayer) -> Iterator[Transfer]:
        for number, piece in enumerate(() if index in self._kept else image.pieces):
            yield Transfer(index, partial(self._part, index, number), piece)

    def _transfers(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer]:
        """Yield the transfers of a trip that are not copied ahead."""
        for index, image in enumerate(self.images):
            yield from islice(self._of_layer(index, image), 0 if index else self._ahead, None)
            yield from filter(None, (fetch.transfer(index) for fetch in fetches))

    def _widen(self, size: int) -> None:
        """Make the buffers of this rank at least `size` bytes, with what they hold."""
        if size <= self._buffer_bytes:
            return
        if self._queues is not None:
            self._queues.finish()
            for number, narrow in enumerate(self._buffers):
                wide = torch.empty(size, dtype=torch.uint8, device=self._device)
                wide[: narrow.numel()] = narrow
                self._buffers[number] = wide
        self._buffer_bytes = size

    def _target(self, transfer: Transfer, buffer: int) -> Tensor:
        if transfer.piece is None:
            return super()._target(transfer, buffer)
        return self._buffers[buffer][self._ranks.rank * share(transfer.piece.size, self._ranks.size) :]

    def _complete(self, transfer: Transfer, buffer: int) -> None:
        if transfer.piece is None or self._queues is None:
            super()._complete(transfer, buffer)
            return
        copied = self._queues.event()
        copied.record()
        self._copied.append((copied, buffer))
        self._gather_on()

    def _gather_on(self) -> None:
        """Issue the gathers whose turn has come: those of copies that were issued, and of layers that stay as far as
        there are buffers."""
        aside = self._aside
        while self._to_gather and self._queues is not None:
            index, number = self._to_gather[0]
            stays = self._own.get(index)
            if aside.full if stays is not None else not self._copied:
                return
            self._to_gather.popleft()
            size = self._whole_bytes(self.images[index].pieces[number])
            with self._queues.gathering():
                if stays is None:
                    copied, buffer = self._copied.popleft()
                    copied.wait()
                    whole, arrived = self._buffers[buffer][:size], self._arrived[buffer]
                else:
                    buffer = aside.issued % len(aside.buffers)
                    if aside.issued >= len(aside.buffers):
                        aside.free[buffer].wait()  # rule 2 of `PrefetchRing`
                    whole, arrived = aside.buffers[buffer][:size], aside.arrived[buffer]
                    aside.issued += 1
                begin, part = mark(self._cuda), whole.chunk(self._ranks.size)[self._ranks.rank]
                if stays is not None:
                    part[: stays[number].numel()].copy_(stays[number], non_blocking=True)
                self._ranks.gather(whole, part)
                arrived.record()
                self.note(("gather", index, begin, mark(self._cuda), None))

    def _unpack(self, index: int) -> None:
        if index not in self._own:
            super()._unpack(index)
            return
        self._under_way().left = {}
        for piece in self.images[index].pieces:
            self._put(index, piece, self._take_aside(index))
            self._give_back_aside()

    def _take(self, index: int, piece: Chunk | None) -> Tensor:
        content = super()._take(index, piece)
        if piece is None:
            return content
        self._to_take.popleft()
        return content if self._queues is not None else self._gathered(index, piece, content)

    def _take_aside(self, index: int) -> Tensor:
        """Return the next piece, of layer `index`, which stays, on the device until `_give_back_aside`."""
        number = self._to_take.popleft()[1]
        if self._queues is None:
            return self._gathered(index, self.images[index].pieces[number], self._own[index][number])
        aside = self._aside
        self._gather_on()
        buffer = aside.taken % len(aside.buffers)
        aside.taken += 1
        aside.arrived[buffer].wait()  # rule 1
        return aside.buffers[buffer]

    def _give_back_aside(self) -> None:
        """Free the buffer of a layer that stays that was taken first, as of this point in the compute queue."""
        if self._queues is None:
            return
        aside = self._aside
        aside.free[aside.returned % len(aside.buffers)].record()  # rule 2
        aside.returned += 1
        self._gather_on()
        self._fill()

    def _gathered(self, index: int, piece: Chunk, own: Tensor) -> Tensor:
        """Gather a piece without queues, and return it; `own` is this rank's part."""
        part = torch.zeros(share(piece.size, self._ranks.size), dtype=torch.uint8)
        part[: own.numel()] = own
        whole, begin = torch.empty(self._whole_bytes(piece), dtype=torch.uint8), mark(False)
        self._ranks.gather(whole, part)
        self.note(("gather", index, begin, mark(False), None))
        return whole

    def _drain(self) -> None:
        """Take part in the gathers that are left of a trip, and free its buffers: all of it is done after one that
        ended well."""
        if self._queues is not None:
            while self._returned < self._taken:
                self._give_back()
            while self._aside.returned < self._aside.taken:
                self._give_back_aside()
            if len(self._flying) > self._issued - self._taken and self._flying[-1].piece is None:
                self._flying.pop()  # not issued yet
        self._coming = (transfer for transfer in self._coming if transfer.piece is not None)
        while self._to_take or any(transfer.piece is None for transfer in self._flying):
            if self._to_take and self._to_take[0][0] in self._own:
                self._take_aside(self._to_take[0][0])
                self._give_back_aside()
                continue
            if self._queues is not None:
                self._fill()
            elif not self._flying:
                self._flying.append(next(self._coming))
            self._take(self._flying[0].layer, self._flying[0].piece)
            self._give_back()
