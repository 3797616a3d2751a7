"""The way of the weights: over the link in pieces, through a ring of buffers, into the one slot that layers compute in.

Two queues of the device take part. The copy queue fills the ring with the pieces of layer 0, 1, .., n-1, 0, 1, .. for
ever, and with whatever else a layer needs (of a KV cache, say) behind them. The compute queue unpacks the pieces of a
layer into the slot when the layer's turn comes, which takes a few per cent of the time the link needs for them, and
computes. The CPU never waits and may run a whole pass ahead. So the link never rests, as long as the ring holds what it
brings while a layer computes, and the parameters never move: they are views of the slot.

Three rules keep the two queues apart; `tests/test_ring.py` proves each on queues that record who waited for whom.

1. Nothing is read before it has arrived: the copy queue records `arrived[b]` behind each copy into buffer b, and the
   compute queue waits for it before it reads.
2. Nothing is overwritten before it was read: the compute queue records `free[b]` behind its last read of buffer b, and
   the copy queue waits for it before it writes b again.
3. A copy into buffer b is issued only once `free[b]` has been recorded, since waiting for an event that nobody has
   recorded yet is no wait at all.

A *trip* is one pass of the weights: `with ring.trip(..):` around the forward pass, or around several that share it. A
trip that ends in an exception leaves the ring to begin anew with the next one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zinfer.engine.pinned import Block
from zinfer.engine.state import Entry
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer, unpack
from zinfer.engine.stream.trace import Mark, Trace, mark


class Event(Protocol):
    """A point in a queue, as `torch.cuda.Event` has it."""

    def record(self) -> None: ...  # behind all that the current queue has been given
    def wait(self) -> None: ...  # let the current queue go on only when the point is passed


class Queues(Protocol):
    """A device's compute queue, which is the current one, and a copy queue beside it."""

    def event(self) -> Event: ...
    def copying(self) -> AbstractContextManager[Any]: ...  # makes the copy queue the current one
    def finish(self) -> None: ...  # has the CPU wait for both


class CudaQueues:
    """The current CUDA stream, and a stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def event(self) -> Event:
        return torch.cuda.Event()

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Transfer:
    """One copy over the link, for `layer`: `source` gives its bytes (uint8, host memory). `piece` is the piece of the
    layer's weights that it carries, None if it carries something else. It is issued when `ready` says so, after what
    `before` has the copy queue wait for.
    """

    layer: int
    source: Callable[[], Tensor]
    piece: Chunk | None = None
    ready: Callable[[], bool] = lambda: True
    before: Callable[[], None] = lambda: None


class Fetch(Protocol):
    """Something besides weights that every layer, or some, get in a trip; equal ones bring the same bytes."""

    @property
    def nbytes(self) -> int: ...  # the largest transfer
    def transfer(self, layer: int) -> Transfer | None: ...
    def following(self) -> "Fetch": ...  # what the next trip will bring, if it does the like


class PrefetchRing:
    """Streams `images`, a decoder layer each, out of `source` (uint8, host memory) to `device`, layer after layer.

    `depth` is the number of buffers. Without a GPU there are none: a piece is unpacked from where it is; `queues` has
    them all the same (for tests).
    """

    def __init__(
        self,
        source: Tensor,
        images: list[PackedLayer],
        depth: int,
        device: torch.device,
        queues: Queues | None = None,
    ) -> None:
        if depth < 2:
            raise ValueError(f"{depth} ring buffers: a ring needs two or more, one in use and one being filled")
        self.images = images
        self.bytes_copied = 0  # of weights
        self.other_bytes_copied = 0
        self._source, self._device, self._cuda = source, device, device.type == "cuda"
        self._queues: Queues | None = CudaQueues(device) if queues is None and self._cuda else queues
        self._slot = torch.empty(max(image.slot_bytes for image in images), dtype=torch.uint8, device=device)
        self._held_by: list[list[tuple[Tensor, Block]]] = []  # a layer: its weights, and where they are in the slot
        self._kept: dict[int, Tensor] = {}  # layers that stay on the device, as they are in the source
        self._coming: Iterator[Transfer] = iter(())  # all that is still to be issued
        self._flying: deque[Transfer] = deque()  # issued and not taken; the last one may wait to be issued
        self._issued = self._taken = self._returned = 0
        self._buffers: list[Tensor] = []
        self._depth = self._buffer_bytes = 0
        self._copies: deque[tuple[int, Mark, Mark]] = deque(maxlen=256)  # the last ones: layer, begin, end
        self._trace: Trace | None = None
        self._next: tuple[Fetch, ...] | None = None  # the next trip's fetches as prefetched; None: begin anew
        self._trip: _Trip | None = None
        self.resize(depth)

    def attach(self, index: int, layer: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Let `layer`, number `index`, find its weights and buffers in the slot whenever it is called; `entries` are
        those that its image holds, by the same names."""
        blocks = self.images[index].blocks
        self._held_by.append([(entries[name].put(block.view(self._slot)), block) for name, block in blocks.items()])

        def before(_module: nn.Module, _args: Any) -> None:
            self._acquire(index)

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            return self._release(index, output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    @property
    def on_gpu(self) -> bool:
        return self._queues is not None

    @property
    def depth(self) -> int:
        """Number of ring buffers."""
        return self._depth

    @property
    def buffer_bytes(self) -> int:
        """Size of one ring buffer."""
        return self._buffer_bytes

    @property
    def slot_bytes(self) -> int:
        return self._slot.nbytes

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that pass through the ring."""
        return tuple(index for index in range(len(self.images)) if index not in self._kept)

    @property
    def kept_bytes(self) -> int:
        """Size of the layers that stay on the device."""
        return sum(kept.nbytes for kept in self._kept.values())

    def resize(self, depth: int, least_bytes: int = 0) -> None:
        """Have `depth` buffers from now on, each of the largest piece's size and at least `least_bytes`; waits for the
        device where that changes anything."""
        size = max(least_bytes, *(piece.size for image in self.images for piece in image.pieces))
        if (depth, size) == (self._depth, self._buffer_bytes):
            return
        self._settle()
        if self._queues is not None:
            del self._buffers[depth if size == self._buffer_bytes else 0 :]
            self._depth, self._buffer_bytes = 0, size  # until all of them are there: the device may be short of memory
            self._buffers += [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(depth - len(self._buffers))
            ]
            self._arrived = [self._queues.event() for _ in range(depth)]
            self._free = [self._queues.event() for _ in range(depth)]
        self._depth, self._buffer_bytes = depth, size

    def keep(self, layers: Iterable[int]) -> None:
        """Hold `layers` on the device from now on, and stream the others; waits for the device where that changes."""
        wanted = set(layers)
        if wanted == self._kept.keys():
            return
        self._settle()
        for index in set(self._kept) - wanted:
            del self._kept[index]
            self._show(index, self._slot)
        for index in sorted(wanted - self._kept.keys()):
            image = self.images[index]
            self._kept[index] = self._source[image.start : image.end].to(self._device, copy=True)
            if not image.coded:
                self._show(index, self._kept[index])

    def start(self) -> None:
        """Begin to fill the buffers for a trip of weights alone; the source must be complete by now."""
        if self._next is None:
            self._begin(())

    @contextmanager
    def trip(
        self, calls: int = 1, turn: Callable[[int], None] = lambda _layer: None, fetches: Sequence[Fetch] = ()
    ) -> Iterator[None]:
        """One pass of the weights, in which each layer's serve `calls` calls in a row; the layers are called in order.

        `turn` is told a layer's number before each of its calls. A call that needs a fetch takes it by `borrow`, in the
        order of `fetches`. The next trip is prefetched on the guess that it does the like, one step on; where it does
        not, it waits for the device and begins anew.
        """
        wanted = tuple(fetches)
        if self._trip is not None:
            raise RuntimeError("a trip is under way: forward passes that share the weights share a trip")
        if self._next is None or self._next != wanted:
            self._begin(wanted)
        self._trip, self._next = _Trip(calls, turn), None
        try:
            yield
            if self._trip.whole:
                self._next = tuple(fetch.following() for fetch in wanted)
        finally:
            self._trip = None

    def drop_fetches(self) -> None:
        """Have nothing but weights on its way, before memory that fetches read from is changed or freed."""
        if self._next or self._next is None:
            self._settle()

    @contextmanager
    def watched(self) -> Iterator[Trace]:
        """Trace what happens meanwhile; on a GPU, what is issued meanwhile."""
        self._trace = Trace(self._cuda, self._copies)
        try:
            yield self._trace
        finally:
            self._trace = None

    def borrow(self, index: int) -> Tensor:
        """The next fetch of layer `index`, uint8, on the device until the layer's call ends."""
        trip = self._under_way()
        content = self._take(index, None)
        trip.borrowed += 1
        return content

    def close(self) -> None:
        if self._queues is not None:
            self._queues.finish()
        self._buffers, self._held_by, self._kept, self._next = [], [], {}, None
        self._coming = iter(())
        self._flying.clear()
        self._source = self._slot = torch.empty(0, dtype=torch.uint8)

    def _under_way(self) -> "_Trip":
        if self._trip is None:
            raise RuntimeError("a decoder layer was called outside of a trip of the weights")
        return self._trip

    def _show(self, index: int, memory: Tensor) -> None:
        for tensor, block in self._held_by[index]:
            tensor.data = block.view(memory)

    def _settle(self) -> None:
        """Let the device finish; nothing is on its way any more, and the next trip begins anew."""
        if self._queues is not None:
            self._queues.finish()
        self._issued = self._taken = self._returned = 0
        self._flying.clear()
        self._copies.clear()
        self._coming, self._next = iter(()), None

    def _begin(self, fetches: tuple[Fetch, ...]) -> None:
        """Begin to bring a trip with `fetches`, and those that follow it."""
        self._settle()
        if fetches:
            self.resize(self._depth, max(fetch.nbytes for fetch in fetches))
        self._coming, self._next = self._trips(fetches), fetches
        if self._queues is not None:
            self._fill()

    def _trips(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer]:
        """All that crosses the link, trip after trip."""
        some = True
        while some:
            some = False
            for index, image in enumerate(self.images):
                pieces = () if index in self._kept else image.pieces
                weights = (Transfer(index, partial(self._bytes, piece), piece) for piece in pieces)
                others = (fetch.transfer(index) for fetch in fetches)
                for transfer in (*weights, *others):
                    if transfer is not None:
                        some = True
                        yield transfer
            fetches = tuple(fetch.following() for fetch in fetches)

    def _bytes(self, piece: Chunk) -> Tensor:
        return self._source[piece.start : piece.end]

    def _fill(self) -> None:
        """Issue the copies that there are free buffers for; on the device they run as soon as the link gets there."""
        while self._issued < self._returned + self._depth:  # rule 3
            if len(self._flying) == self._issued - self._taken:
                following = next(self._coming, None)
                if following is None:
                    return
                self._flying.append(following)
            if not self._flying[-1].ready():
                return
            self._copy(self._flying[-1])

    def _copy(self, transfer: Transfer) -> None:
        assert self._queues is not None
        buffer = self._issued % self._depth
        with self._queues.copying():
            if self._issued >= self._depth:
                self._free[buffer].wait()  # rule 2
            transfer.before()
            source = transfer.source()
            begin = mark(self._cuda)
            self._buffers[buffer][: source.numel()].copy_(source, non_blocking=True)
            self._arrived[buffer].record()
            copy = (transfer.layer, begin, mark(self._cuda))
        self._copies.append(copy)
        if self._trace is not None:
            self._trace.add("copy", *copy)
        self._issued += 1

    def _take(self, index: int, piece: Chunk | None) -> Tensor:
        """The next transfer, which has to be that `piece` of layer `index` (None: a fetch), where the device has it."""
        if self._queues is not None:
            self._fill()
        elif not self._flying:
            self._flying.extend(transfer for transfer in (next(self._coming, None),) if transfer is not None)
        ready = self._flying and (self._queues is None or self._taken < self._issued)
        following = self._flying[0] if ready else None
        if following is None or following.layer != index or (following.piece is None) != (piece is None):
            other = "nothing" if following is None else f"layer {following.layer}"
            raise RuntimeError(f"decoder layer {index} was called, {other} is next")
        self._flying.popleft()
        if piece is None:
            self.other_bytes_copied += following.source().numel()
        else:
            self.bytes_copied += piece.size
        number, self._taken = self._taken % self._depth, self._taken + 1
        if self._queues is None:
            return following.source()
        self._arrived[number].wait()  # rule 1
        return self._buffers[number]

    def _give_back(self) -> None:
        """The buffer that was taken first is used up when the device gets here."""
        if self._queues is not None:
            self._free[self._returned % self._depth].record()  # rule 2
            self._returned += 1
            self._fill()

    def _acquire(self, index: int) -> None:
        """Have layer `index` in the slot, unless it is there or on the device for this call anyway."""
        trip = self._under_way()
        trip.turn(index)
        if trip.held == index and trip.served < trip.calls:
            trip.served += 1
        else:
            self._unpack(index)
            trip.held, trip.served = index, 1
        if self._trace is not None:
            self._trace.begin("compute", index)

    def _release(self, index: int, output: Any) -> Any:
        """End a call of layer `index`; its output, without what nobody reads."""
        trip = self._under_way()
        if self._trace is not None:
            self._trace.end("compute", index)
        while trip.borrowed:
            trip.borrowed -= 1
            self._give_back()
        trip.whole = index == len(self.images) - 1 and trip.served == trip.calls
        return _lean(output)

    def _unpack(self, index: int) -> None:
        image, kept = self.images[index], self._kept.get(index)
        if kept is None:
            for piece in image.pieces:
                content = self._take(index, piece)
                with self._unpacking(index):
                    unpack(piece, content, self._slot)
                self._give_back()
        elif image.coded:
            with self._unpacking(index):
                for piece in image.pieces:
                    unpack(piece, kept[piece.start - image.start :], self._slot)

    @contextmanager
    def _unpacking(self, index: int) -> Iterator[None]:
        if self._trace is None:
            yield
            return
        self._trace.begin("decode", index)
        yield
        self._trace.end("decode", index)


@dataclass
class _Trip:
    """The trip under way: what the hooks of the layers need to know."""

    calls: int  # of each layer, in a row
    turn: Callable[[int], None]
    held: int | None = None  # the layer in the slot
    served: int = 0  # calls of it so far
    borrowed: int = 0  # buffers that its call holds
    whole: bool = False  # whether the last layer has had its last call


def _lean(output: Any) -> Any:
    """A layer's output without attention probabilities, ``[B, heads, S, S]``, which some models return besides the
    hidden states and then hold while the next layer computes, or, in a pass that waits, longer. Nobody reads them."""
    if not isinstance(output, tuple):
        return output
    return (output[0], *(None if isinstance(part, Tensor) and part.dim() == 4 else part for part in output[1:]))
