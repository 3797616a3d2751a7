"""Weight streaming: over the link in pieces, through a ring of buffers, into the one slot that layers compute in.

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

Calls of layers that the CPU waits for, in the middle of attention, run in a second compute queue (`beside`), so that
what the GPU computes for other calls is not waited for. Two more rules hold for the slot: the second queue waits until
a layer is unpacked before it reads it, and the next layer is unpacked once the second queue has read this one.

Of a layer that stays, weights whose products a kernel computes from their codes (`packed_product`) are left out of the
slot until something reads them, in the queue that does.

A *trip* is one pass of the weights: `with ring.trip(..):` around the forward pass, or around several that share it. A
trip that ends in an exception leaves the ring to begin anew with the next one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from zinfer.engine.pinned import TensorPlace
from zinfer.engine.state import Entry
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer, unpack
from zinfer.engine.stream.packed_product import LazyWeight, PackedProducts, Parts, Product, StackedCodes, parts_of
from zinfer.engine.stream.trace import Reads, Timed, Trace, mark


class Event(Protocol):
    """A point in a queue, as `torch.cuda.Event` has it."""

    def record(self) -> None: ...  # behind all work of the current queue
    def wait(self) -> None: ...  # make the current queue wait until the point is passed
    def query(self) -> bool: ...  # tell whether the point is passed
    def synchronize(self) -> None: ...  # make the CPU wait until the point is passed


class Queues(Protocol):
    """Compute queue of a device, which is the current one, a copy queue beside it, a second compute queue, and one for
    what devices exchange."""

    def event(self) -> Event: ...
    def copying(self) -> AbstractContextManager[Any]: ...  # makes the copy queue the current one
    def beside(self) -> AbstractContextManager[Any]: ...  # makes the second compute queue the current one
    def gathering(self) -> AbstractContextManager[Any]: ...  # makes the queue between GPUs the current one
    def finish(self) -> None: ...  # makes the CPU wait for all of them


class CudaQueues:
    """The current CUDA stream, a stream of its own for copies, and one for calls that the CPU waits for: its kernels go
    first."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device, priority=-1)
        self._gathering = torch.cuda.Stream(device, priority=-1)

    def event(self) -> Event:
        return torch.cuda.Event()

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._beside)

    def gathering(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._gathering)

    def finish(self) -> None:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Transfer:
    """One copy over the link, for `layer`: `source` returns its bytes (uint8, host memory). `piece` is the piece of the
    layer's weights that it carries, None if it carries something else. It is issued once `ready` returns True; `before`
    first makes the copy queue wait for what it depends on."""

    layer: int
    source: Callable[[], Tensor]
    piece: Chunk | None = None
    ready: Callable[[], bool] = lambda: True
    before: Callable[[], None] = lambda: None


class Fetch(Protocol):
    """Data besides weights that all or some layers get in a trip, such as a KV cache; equal fetches bring the same
    bytes."""

    @property
    def nbytes(self) -> int: ...  # bytes of the largest transfer
    def transfer(self, layer: int) -> Transfer | None: ...
    def following(self) -> "Fetch": ...  # the same fetch for the next trip, one step on


class PrefetchRing:
    """Ring of buffers that streams `images`, one a decoder layer, from `source` (uint8, host memory) to `device`, in
    order.

    `depth` is the number of buffers. Without a GPU there are none, and a piece is unpacked from where it is; `queues`
    gives a ring without a GPU buffers all the same (for tests).
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
        self.bytes_copied = 0  # weight bytes
        self.other_bytes_copied = 0
        self._source, self._device, self._cuda = source, device, device.type == "cuda"
        self._queues: Queues | None = CudaQueues(device) if queues is None and self._cuda else queues
        self._slot = torch.empty(max(image.slot_bytes for image in images), dtype=torch.uint8, device=device)
        self._held_by: list[
            list[tuple[Tensor, TensorPlace]]
        ] = []  # by layer: its weights, and their places in the slot
        self._kept: dict[int, Tensor] = {}  # layer -> its bytes as in the source, on the device
        self._alone: set[int] = set()  # layers that lie nowhere else
        self.products: PackedProducts | None = None  # with weights of layers that stay, if a kernel serves some
        self._lazy: dict[int, dict[str, tuple[Chunk, ...]]] = {}  # layer -> pieces of its lazy weights, by their names
        self._coming: Iterator[Transfer] = iter(())  # transfers still to be issued
        self._flying: deque[Transfer] = deque()  # transfers issued and not taken; the last one may wait to be issued
        self._issued = self._taken = self._returned = 0
        self._buffers: list[Tensor] = []
        self._depth = self._buffer_bytes = 0
        self._timed: deque[Timed] = deque(maxlen=256)  # latest copies, and gathers
        self._trace: Trace | None = None
        self._next: tuple[Fetch, ...] | None = None  # fetches prefetched for the next trip; None: begin anew
        self._trip: _Trip | None = None
        self.holds: frozenset[int] = frozenset()  # layers that hold back the copies of others until `resume`
        self._only: int | None = None  # the layer that does so now
        self.resize(depth)

    def attach(self, index: int, layer: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Make `layer`, number `index`, find its weights and buffers in the slot whenever it is called; `entries` are
        those that its image holds, by the same names."""
        image, whole = self.images[index], self._whole(index)
        memory = self._slot if whole is None or image.coded else whole
        views = {name: block.view(memory) for name, block in image.blocks.items()}
        if self.products is not None and self.products.status == "on":
            views |= self._lazy_weights(index, self.products, entries)
        self._held_by.append([(entries[name].put(views[name]), block) for name, block in image.blocks.items()])

        def before(_module: nn.Module, _args: Any) -> None:
            self._acquire(index)

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            return self._release(index, output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _lazy_weights(self, index: int, products: PackedProducts, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """Return the weights of layer `index` that `products` serves while the layer stays, by name."""
        image, found = self.images[index], dict[str, Tensor]()
        for name, block in image.blocks.items():
            own = tuple(one for one in image.pieces if block.offset <= one.place < block.offset + block.size)
            parts = parts_of(own, block, image.start) if entries[name].is_parameter else None
            if parts is not None:
                product: Product | None = partial(self._product, index, name, products, parts)
                stacked = None
                if len(block.shape) == 3:
                    content = partial(self._whole_if_held, index)
                    product, stacked = None, StackedCodes(products, parts, block.shape[0], content)
                view, fill = block.view(self._slot), partial(self._fill_in, index, name)
                found[name] = LazyWeight(view, fill, product, stacked)
                self._lazy.setdefault(index, {})[name] = own
        return found

    @property
    def has_lazy_weights(self) -> bool:
        """True if weights of layers that stay have products of their own."""
        return any(index in self._lazy for index in self._kept)

    @property
    def on_gpu(self) -> bool:
        return self._queues is not None

    @property
    def queues(self) -> Queues | None:
        return self._queues

    @property
    def depth(self) -> int:
        """Number of ring buffers."""
        return self._depth

    @property
    def buffer_bytes(self) -> int:
        """Size of one ring buffer, in bytes."""
        return self._buffer_bytes

    @property
    def slot_bytes(self) -> int:
        return self._slot.nbytes

    @property
    def streamed(self) -> tuple[int, ...]:
        """Numbers of the layers that pass through the ring."""
        return tuple(index for index in range(len(self.images)) if index not in self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the layers that stay on the device."""
        return sum(kept.nbytes for kept in self._kept.values())

    def resize(self, depth: int, least_bytes: int = 0) -> None:
        """Change the ring to `depth` buffers, each as large as the largest piece and at least `least_bytes`; wait for
        the device if that changes anything."""
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
        """Keep `layers` on the device from now on, and stream the others, but for those that lie nowhere else; wait for
        the device if that changes anything."""
        wanted = self._alone.union(layers)
        if wanted == self._kept.keys():
            return
        self._settle()
        for index in set(self._kept) - wanted:
            del self._kept[index]
            self._show(index, self._slot)
        for index in sorted(wanted - self._kept.keys()):
            self._kept[index] = self._layer_bytes(index)
            if not self.images[index].coded:
                self._show(index, self._kept[index])

    def keep_alone(self, index: int, content: Tensor) -> None:
        """Keep layer `index`, which is not attached yet and whose bytes `content`, on the device, lie nowhere else: the
        source has none of them."""
        self._kept[index] = content
        self._alone.add(index)

    def start(self) -> None:
        """Begin to fill the buffers for a trip of weights alone; the source must be complete by now."""
        if self._next is None:
            self._begin(())

    @contextmanager
    def trip(
        self, calls: int = 1, turn: Callable[[int], None] = lambda _layer: None, fetches: Sequence[Fetch] = ()
    ) -> Iterator[None]:
        """Run one pass of the weights, in which each layer is called `calls` times in a row, in the order of the
        layers.

        `turn` gets a layer's number before each of its calls. A call that needs a fetch takes it by `borrow`, in the
        order of `fetches`. The next trip is prefetched on the guess that it repeats this one, one step on; if it does
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
            self._join(self._trip)
            self._trip = None

    def bring_layer(self, index: int) -> None:
        """Bring layer `index` into the slot, unless it stays on the device: its calls in the trip under way follow, the
        first one perhaps in the second compute queue."""
        trip = self._under_way()
        if trip.beside:
            raise RuntimeError(f"decoder layer {index} is not in the slot: it must come in the first queue")
        self._join(trip)
        self._only = index if index in self.holds else None
        self._unpack(index)
        trip.held, trip.served = index, 0
        if self._queues is not None:
            trip.unpacked = self._queues.event()
            trip.unpacked.record()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is called within the ``with`` block, parts of a trip, in the second compute queue. Each layer must
        have been brought, or called, outside of it first. The trip ends once the second queue has done its work,
        too."""
        trip = self._under_way()
        if self._queues is None:
            yield
            return
        begun = None
        if not trip.used_beside:  # inputs come from the first queue
            begun, trip.used_beside = self._queues.event(), True
            begun.record()
        with self._queues.beside():
            if begun is not None:
                begun.wait()
            if trip.unpacked is not None:  # the first queue may have filled in weights of the layer since
                trip.unpacked.wait()
            trip.beside = True
            try:
                yield
            finally:
                trip.beside = False

    def _join(self, trip: "_Trip") -> None:
        """Make the compute queue wait for what the second one has been given."""
        if trip.used_beside and self._queues is not None:
            done = self._queues.event()
            with self._queues.beside():
                done.record()
            done.wait()

    def drop_fetches(self) -> None:
        """Drop all transfers but those of weights, before memory that fetches read from is changed or freed."""
        if self._next or self._next is None:
            self._settle()

    @contextmanager
    def watched(self) -> Iterator[Trace]:
        """Trace the work done within the ``with`` block; on a GPU, the work issued within it."""
        self._trace = Trace(self._cuda, self._timed, self._reads)
        try:
            yield self._trace
        finally:
            self._trace = None

    def _reads(self) -> Reads:
        """Return the latest reads from disk, for the timeline."""
        return ()

    def borrow(self, index: int) -> Tensor:
        """Return the next fetch of layer `index`, uint8, on the device until `hand_back`, or until the layer's call
        ends."""
        trip = self._under_way()
        content = self._take(index, None)
        trip.borrowed += 1
        return content

    def hand_back(self) -> None:
        """Free the fetches that the current call has borrowed: work that is queued from now on must not read them."""
        trip = self._under_way()
        while trip.borrowed:
            trip.borrowed -= 1
            self._give_back()

    def resume(self) -> None:
        """Issue the copies that a layer of `holds` held back, so that its own urgent ones came first."""
        if self._only is not None:
            self._only = None
            if self._queues is not None:
                self._fill()

    def note(self, timed: Timed) -> None:
        """Note work that may be issued long before its step, for the timeline."""
        self._timed.append(timed)
        if self._trace is not None:
            self._trace.add(*timed)

    @contextmanager
    def aside(self, index: int, unpacks: bool = False) -> Iterator[None]:
        """Leave the time of a block out of the span of layer `index`'s computation, within its call; with `unpacks` the
        block is a span of unpacking."""
        trace = self._trace
        if trace is not None:
            trace.end("compute", index)
            if unpacks:
                trace.begin("unpack", index)
        yield
        if trace is not None:
            if unpacks:
                trace.end("unpack", index)
            trace.begin("compute", index)

    def close(self) -> None:
        if self._queues is not None:
            self._queues.finish()
        self._buffers, self._held_by, self._kept, self._lazy, self._next = [], [], {}, {}, None
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
        """Wait for the device and drop all transfers; the next trip begins anew."""
        if self._queues is not None:
            self._queues.finish()
        self._issued = self._taken = self._returned = 0
        self._flying.clear()
        self._timed.clear()
        self._coming, self._next, self._only = iter(()), None, None

    def _begin(self, fetches: tuple[Fetch, ...]) -> None:
        """Begin the transfers of a trip with `fetches`, and of those that follow it."""
        self._settle()
        if fetches:
            self.resize(self._depth, max(fetch.nbytes for fetch in fetches))
        self._coming, self._next = self._trips(fetches), fetches
        if self._queues is not None:
            self._fill()

    def _trips(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer]:
        """Yield all transfers, trip after trip, without end."""
        some = True
        while some:
            some = False
            for index, image in enumerate(self.images):
                pieces = () if index in self._kept else image.pieces
                weights = (self._transfer(index, piece) for piece in pieces)
                others = (fetch.transfer(index) for fetch in fetches)
                for transfer in (*weights, *others):
                    if transfer is not None:
                        some = True
                        yield transfer
            fetches = tuple(fetch.following() for fetch in fetches)

    def _transfer(self, index: int, piece: Chunk) -> Transfer:
        return Transfer(index, partial(self._bytes, piece), piece)

    def _bytes(self, piece: Chunk) -> Tensor:
        return self._source[piece.start : piece.end]

    def _layer_bytes(self, index: int) -> Tensor:
        """Return a copy of a layer's bytes on the device."""
        image = self.images[index]
        return self._source[image.start : image.end].to(self._device, copy=True)

    def _fill(self) -> None:
        """Issue copies into all free buffers; the device runs them as soon as the link is free."""
        while self._issued < self._returned + self._depth:  # rule 3
            if len(self._flying) == self._issued - self._taken:
                following = next(self._coming, None)
                if following is None:
                    return
                self._flying.append(following)
            if self._only not in (None, self._flying[-1].layer) or not self._flying[-1].ready():
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
            self._target(transfer, buffer)[: source.numel()].copy_(source, non_blocking=True)
            self.note(("copy", transfer.layer, begin, mark(self._cuda), None))
            self._complete(transfer, buffer)
        self._issued += 1

    def _target(self, _transfer: Transfer, buffer: int) -> Tensor:
        """Return the memory that a transfer is copied to."""
        return self._buffers[buffer]

    def _complete(self, _transfer: Transfer, buffer: int) -> None:
        """Record that a buffer holds what it should; called with the copy queue as the current one."""
        self._arrived[buffer].record()

    def _take(self, index: int, piece: Chunk | None) -> Tensor:
        """Return the next transfer's bytes on the device; it must be `piece` of layer `index` (None: a fetch)."""
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
        """Free the buffer that was taken first, as of this point in the compute queue."""
        if self._queues is not None:
            self._free[self._returned % self._depth].record()  # rule 2
            self._returned += 1
            self._fill()

    def _acquire(self, index: int) -> None:
        """Begin a call of layer `index`, which comes into the slot first unless it is there already."""
        trip = self._under_way()
        trip.turn(index)
        if trip.held != index or trip.served == trip.calls:
            self.bring_layer(index)
        trip.served += 1
        if trip.used_beside and trip.unpacked is not None:
            trip.unpacked.wait()
        if self._trace is not None:
            self._trace.begin("compute", index)

    def _release(self, index: int, output: Any) -> Any:
        """End a call of layer `index`; return its output without the parts that nobody reads."""
        trip = self._under_way()
        if self._trace is not None:
            self._trace.end("compute", index)
        self.resume()
        self.hand_back()
        trip.whole = index == len(self.images) - 1 and trip.served == trip.calls
        return _lean(output)

    def _unpack(self, index: int) -> None:
        image, kept, trip = self.images[index], self._whole(index), self._under_way()
        trip.left = {}
        if kept is None:
            for piece in image.pieces:
                self._put(index, piece, self._take(index, piece))
                self._give_back()
        elif image.coded:
            trip.left = dict(self._lazy.get(index, {}))
            left = {piece.start for pieces in trip.left.values() for piece in pieces}
            with self._unpacking(index):
                self._unpack_kept(index, [piece for piece in image.pieces if piece.start not in left])

    def _put(self, index: int, piece: Chunk, content: Tensor) -> None:
        """Unpack a piece of layer `index`, whose bytes are `content`, into the slot."""
        with self._unpacking(index):
            unpack(piece, content, self._slot)

    def _unpack_kept(self, index: int, pieces: Iterable[Chunk]) -> None:
        start, kept = self.images[index].start, self._kept[index]
        for piece in pieces:
            unpack(piece, kept[piece.start - start :], self._slot)

    def _fill_in(self, index: int, name: str) -> None:
        """Put a lazy weight of layer `index` into the slot, if that has the layer without it."""
        trip = self._trip
        if trip is None or trip.held != index or name not in trip.left:
            return
        with self.aside(index, unpacks=True):
            self._unpack_kept(index, trip.left.pop(name))
        if trip.unpacked is not None:
            trip.unpacked.record()

    def _product(
        self, index: int, name: str, products: PackedProducts, parts: Parts, states: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Return the product of `states` with a lazy weight of layer `index` from its codes; None if it is to be
        computed in the slot."""
        kept = self._whole_if_held(index)
        if kept is None:
            return None

        def plain() -> Tensor:
            self._fill_in(index, name)
            return functional.linear(states, self.images[index].blocks[name].view(self._slot), bias)

        return products.compute(parts, kept, states, bias, plain)

    def _whole_if_held(self, index: int) -> Tensor | None:
        """Return the bytes of a layer that stays on the device and computes now; None of any other."""
        return self._whole(index) if self._trip is not None and self._trip.held == index else None

    def _whole(self, index: int) -> Tensor | None:
        """Return the bytes of a layer that stays on the device; None if they come through the buffers."""
        return self._kept.get(index)

    @contextmanager
    def _unpacking(self, index: int) -> Iterator[None]:
        if self._trace is None:
            yield
            return
        self._trace.begin("unpack", index)
        yield
        self._trace.end("unpack", index)


@dataclass
class _Trip:
    """State of the trip under way, for the hooks of the layers."""

    calls: int  # calls of each layer, in a row
    turn: Callable[[int], None]
    held: int | None = None  # number of the layer in the slot
    served: int = 0  # calls of that layer so far
    borrowed: int = 0  # buffers that its current call holds
    whole: bool = False  # True after the last call of the last layer
    left: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)  # its lazy weights that are not in the slot yet
    unpacked: Event | None = None  # point from which on the rest of the layer is in the slot
    beside: bool = False  # True while the second compute queue is the current one
    used_beside: bool = False


def _lean(output: Any) -> Any:
    """Return a layer's output without attention probabilities, ``[B, heads, S, S]``. Some models return them besides
    the hidden states and then hold them while the next layer computes, or, in a pass that waits, longer; nobody reads
    them."""
    if not isinstance(output, tuple):
        return output
    return (output[0], *(None if isinstance(part, Tensor) and part.dim() == 4 else part for part in output[1:]))
