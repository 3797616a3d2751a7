"""Ring of several GPUs of a host: each copies its part of every chunk over its own link, and they gather the rest.

Every GPU (a rank) has a ring of its own, with buffers for whole chunks. Of each chunk a rank copies an equal part into
that part's place in the buffer, and a gather between the ranks completes the buffer, in a queue of its own, ahead of
compute like the copies. So each byte crosses one link, once. All else is as in the ring of one GPU.

The gathers of all ranks must be the same ones, in the same order. Hence what a rank does beyond `PrefetchRing`'s:

1. A pass has one gather for each chunk, whatever happens in it: a pass that ends early, or in an exception, takes part
   in the gathers that are left (`_drain`), and a rank without work runs a pass without calls (`idle_pass`).
2. The chunks that are copied ahead for the next pass are always the same ones, the first of the first layer. What else
   the next pass fetches, rank by rank, never changes them.
3. Layers that stay are shared out, too: each rank keeps its part of them, as `parts_of_rank` cuts them. Their chunks
   are gathered in their turn, but into buffers of their own (`_Staging`), so that the copies of streamed layers go on
   in the others. So a copy may come long before its gather: gathers are issued in the order of `_to_gather`.
4. Ranks call `resize`, `keep` and `start` alike.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zinfer.core.engine import KEPT_BUFFERS
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.stream.trace import mark
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.queues import Event, HostQueues, Queues
from zinfer.engine.stream.weights.ring import Fetch, PrefetchRing, Transfer
from zinfer.engine.stream.weights.source import WeightSource

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

SAMPLED = 4  # every fourth layer is copied to measure the links: they lie in all of the memory


def part_bytes(size: int, ranks: int) -> int:
    """Return the bytes of a rank's part; the last parts may be shorter."""
    return -(-size // (ranks * ALIGNMENT)) * ALIGNMENT


def parts_of_rank(packed: PackedLayer, content: Tensor, rank: int, ranks: int) -> list[Tensor]:
    """Return a rank's parts of a layer's chunks; `content` are its bytes."""
    ranges = (_range_of_rank(chunk, rank, ranks) for chunk in packed.chunks)
    return [content[begin - packed.start : end - packed.start] for begin, end in ranges]


def _range_of_rank(chunk: Chunk, rank: int, ranks: int) -> tuple[int, int]:
    size = part_bytes(chunk.size, ranks)
    start = min(chunk.start + rank * size, chunk.end)
    return start, min(start + size, chunk.end)


class _Staging:
    """Buffers for chunks of layers that stay, used in order."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.arrived: list[Event] = []
        self.free: list[Event] = []
        self.issued = self.taken = self.returned = 0

    def resize(self, count: int, size: int, device: torch.device, queues: Queues) -> None:
        self.buffers = []  # first: the device may be short of memory
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self.arrived, self.free = ([queues.event() for _ in range(count)] for _ in range(2))

    @property
    def full(self) -> bool:
        return self.issued == self.returned + len(self.buffers)


class GatherRing(PrefetchRing):
    """Ring whose chunks come in parts, one over each rank's link. For the rest see `PrefetchRing`."""

    def __init__(
        self, source: WeightSource, depth: int, device: torch.device, ranks: "Group", queues: Queues | None = None
    ) -> None:
        self.passes = 0  # passes that are done, whatever their end
        self._ranks = ranks
        self._rank_parts: dict[int, list[Tensor]] = {}  # layer that stays -> its chunks' parts, on the device
        self._staging = _Staging()
        self._to_gather: deque[tuple[int, int]] = deque()  # layers and numbers of chunks whose gathers are not issued
        self._to_receive: deque[tuple[int, int]] = deque()  # chunks of this pass that are not taken yet
        self._copied: deque[tuple[Event, int]] = deque()  # behind each copy without its gather: event, its buffer
        super().__init__(source, depth, device, queues)

    @property
    def depth(self) -> int:
        return self._depth + len(self._staging.buffers)

    def resize(self, depth: int, min_bytes: int = 0) -> None:
        """Change the ring; buffers that a fetch has enlarged stay so. Where layers stay, some of the buffers are for
        them, and at least two for the others."""
        whole = max(self._whole_bytes(chunk) for packed in self.layers for chunk in packed.chunks)
        staging = max(1, min(KEPT_BUFFERS, depth // 3)) if self._resident else 0
        if changes := staging != len(self._staging.buffers):
            self._flush()
            self._staging.resize(0, 0, self._device, self.queues)
        ring = max(2, depth - staging)
        super().resize(ring, max(min_bytes, whole, self.buffer_bytes if ring == self._depth else 0))
        if changes:
            self._staging.resize(staging, whole, self._device, self.queues)

    def keep(self, layers: Iterable[int], unpacked: Iterable[int] = ()) -> None:
        """Keep this rank's part of `layers` from now on. None is kept `unpacked`."""
        if self.keeps(layers, ()):
            return
        depth = self.depth
        super().keep(layers)
        self._rank_parts = {index: parts for index, parts in self._rank_parts.items() if index in self._resident}
        self.resize(depth)

    def _copy_of(self, index: int) -> Tensor:
        """Return this rank's bytes of a layer, copied to the device."""
        parts = [self._part(index, number) for number in range(len(self.layers[index].chunks))]
        content = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=self._device)
        self._rank_parts[index] = list(content.split(list(map(len, parts))))
        for source, target in zip(parts, self._rank_parts[index], strict=True):
            target.copy_(source)
        return content

    def keep_only(self, index: int, content: Tensor) -> None:
        """Keep a layer of which `content` is this rank's part."""
        super().keep_only(index, content)
        ranks = self._ranks
        ranges = (_range_of_rank(chunk, ranks.rank, ranks.size) for chunk in self.layers[index].chunks)
        self._rank_parts[index] = list(content.split([end - begin for begin, end in ranges]))
        self.resize(self.depth)

    def start(self) -> None:
        """Begin to fill the buffers for the next pass, on all ranks."""
        if self._next is None:
            self._flush()
            self._pending, self._next = islice(self._chunk_transfers(), self._ahead), ()
            self._to_gather.extend(islice(self._chunk_numbers(), self._ahead))
            self._fill()

    @contextmanager
    def weight_pass(
        self, calls: int = 1, turn: Callable[[int], None] = lambda _layer: None, fetches: Sequence[Fetch] = ()
    ) -> Iterator[None]:
        if self._pass is None:
            self.start()
            self._enlarge(max((fetch.nbytes for fetch in fetches), default=0))
            self._to_receive.extend(self._chunk_numbers())
            self._to_gather.extend(islice(self._chunk_numbers(), self._ahead, None))
            self._to_gather.extend(islice(self._chunk_numbers(), self._ahead))
            self._pending = chain(self._transfers(tuple(fetches)), islice(self._chunk_transfers(), self._ahead))
            self._next = tuple(fetches)
        try:
            with super().weight_pass(calls, turn, fetches):
                self._fill()
                yield
        finally:
            if self._pass is None:
                self._drain()
                self._next = ()
                self.passes += 1

    def idle_pass(self) -> None:
        """Run a pass without work: take part in its gathers."""
        with self.weight_pass():
            pass

    def bring(self) -> int:
        """Copy this rank's part of every fourth layer; return its bytes. Nothing else is under way, and all ranks begin
        anew then."""
        self._flush()
        copied_bytes, sampled = 0, self.streamed[::SAMPLED]
        parts = (self._part(index, number) for index in sampled for number in range(len(self.layers[index].chunks)))
        with self.queues.copying():
            for number, part in enumerate(parts):
                self._buffers[number % self._depth][: part.numel()].copy_(part, non_blocking=True)
                copied_bytes += part.numel()
        self.queues.finish()
        return copied_bytes

    def abandon(self) -> None:
        """Wait for the device and drop chunks copied ahead."""
        self._flush()

    def drop_fetches(self) -> None:
        """Wait for the device; no fetch was issued ahead."""
        self.queues.finish()

    def close(self) -> None:
        super().close()
        self._rank_parts, self._staging = {}, _Staging()

    @property
    def _ahead(self) -> int:
        """Number of chunks that are copied before their pass begins. A CPU would wait for the other ranks' gathers."""
        waits = isinstance(self.queues, HostQueues)
        return 0 if waits or 0 in self._resident else min(self._depth, len(self.layers[0].chunks))

    def _chunk_numbers(self) -> Iterator[tuple[int, int]]:
        """Yield the layer and the number of each chunk of a pass."""
        return ((index, number) for index, packed in enumerate(self.layers) for number in range(len(packed.chunks)))

    def _flush(self) -> None:
        super()._flush()
        for under_way in (self._to_gather, self._to_receive, self._copied):
            under_way.clear()
        self._staging.issued = self._staging.taken = self._staging.returned = 0

    def _whole_bytes(self, chunk: Chunk) -> int:
        return self._ranks.size * part_bytes(chunk.size, self._ranks.size)

    def _part(self, index: int, number: int) -> Tensor:
        if index in self._rank_parts:
            return self._rank_parts[index][number]
        chunk = self.layers[index].chunks[number]
        begin, end = _range_of_rank(chunk, self._ranks.rank, self._ranks.size)
        return self._source.get(chunk)[begin - chunk.start : end - chunk.start]

    def _resident_content(self, index: int) -> Tensor | None:
        return None

    def _chunk_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers of a pass without fetches."""
        for index, packed in enumerate(self.layers):
            yield from self._of_layer(index, packed)

    def _of_layer(self, index: int, packed: PackedLayer) -> Iterator[Transfer]:
        for number, chunk in enumerate(() if index in self._resident else packed.chunks):
            yield Transfer(index, partial(self._part, index, number), chunk)

    def _transfers(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer]:
        """Yield the transfers of a pass that are not copied ahead."""
        for index, packed in enumerate(self.layers):
            yield from islice(self._of_layer(index, packed), 0 if index else self._ahead, None)
            yield from filter(None, (fetch.transfer(index) for fetch in fetches))

    def _enlarge(self, size: int) -> None:
        """Enlarge the buffers of this rank, with their content."""
        if size <= self.buffer_bytes:
            return
        self.queues.finish()
        for number, buffer in enumerate(self._buffers):
            self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._buffers[number][: buffer.numel()] = buffer
        self.buffer_bytes = size

    def _target(self, transfer: Transfer, buffer: int) -> Tensor:
        if transfer.chunk is None:
            return super()._target(transfer, buffer)
        return self._buffers[buffer][self._ranks.rank * part_bytes(transfer.chunk.size, self._ranks.size) :]

    def _complete(self, transfer: Transfer, buffer: int) -> None:
        if transfer.chunk is None:
            super()._complete(transfer, buffer)
            return
        copied = self.queues.event()
        copied.record()
        self._copied.append((copied, buffer))
        self._gather_on()

    def _gather_on(self) -> None:
        """Issue the gathers whose turn has come: of copies under way, and of layers that stay if there are buffers."""
        staging = self._staging
        while self._to_gather:
            index, number = self._to_gather[0]
            parts = self._rank_parts.get(index)
            if staging.full if parts is not None else not self._copied:
                return
            self._to_gather.popleft()
            size = self._whole_bytes(self.layers[index].chunks[number])
            with self.queues.gathering():
                if parts is None:
                    copied, buffer = self._copied.popleft()
                    copied.wait()
                    whole, arrived = self._buffers[buffer][:size], self._arrived[buffer]
                else:
                    buffer = staging.issued % len(staging.buffers)
                    if staging.issued >= len(staging.buffers):
                        staging.free[buffer].wait()  # rule 2 of `PrefetchRing`
                    whole, arrived = staging.buffers[buffer][:size], staging.arrived[buffer]
                    staging.issued += 1
                begin, part = mark(self._cuda), whole.chunk(self._ranks.size)[self._ranks.rank]
                if parts is not None:
                    part[: parts[number].numel()].copy_(parts[number], non_blocking=True)
                self._ranks.gather(whole, part)
                arrived.record()
                self.note(("gather", index, begin, mark(self._cuda), None))

    def _unpack(self, index: int) -> None:
        if index not in self._rank_parts:
            super()._unpack(index)
            return
        for chunk in self.layers[index].chunks:
            self._unpack_chunk(index, chunk, self._receive_staged())
            self._free_staged()

    def _receive(self, index: int, chunk: Chunk | None) -> Tensor:
        content = super()._receive(index, chunk)
        if chunk is not None:
            self._to_receive.popleft()
        return content

    def _receive_staged(self) -> Tensor:
        """Return the next chunk of a layer that stays."""
        self._to_receive.popleft()
        staging = self._staging
        self._gather_on()
        buffer = staging.taken % len(staging.buffers)
        staging.taken += 1
        staging.arrived[buffer].wait()  # rule 1
        return staging.buffers[buffer]

    def _free_staged(self) -> None:
        """Free the staging buffer received first, as `_free_oldest` does."""
        staging = self._staging
        staging.free[staging.returned % len(staging.buffers)].record()  # rule 2
        staging.returned += 1
        self._gather_on()
        self._fill()

    def _drain(self) -> None:
        """Take part in a pass's remaining gathers, and free its buffers."""
        while self._returned < self._taken:
            self._free_oldest()
        while self._staging.returned < self._staging.taken:
            self._free_staged()
        if len(self._in_flight) > self._issued - self._taken and self._in_flight[-1].chunk is None:
            self._in_flight.pop()  # not issued yet
        self._pending = (transfer for transfer in self._pending if transfer is not None and transfer.chunk is not None)
        while self._to_receive or any(transfer.chunk is None for transfer in self._in_flight):
            if self._to_receive and self._to_receive[0][0] in self._rank_parts:
                self._receive_staged()
                self._free_staged()
                continue
            self._fill()
            self._receive(self._in_flight[0].layer, self._in_flight[0].chunk)
            self._free_oldest()
