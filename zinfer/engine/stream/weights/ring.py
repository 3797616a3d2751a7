"""Prefetch ring: chunks of weights cross the link into a ring of buffers, and are unpacked into the layer buffer.

Two queues of the device take part. The copy queue fills the ring with the chunks of layer 0, 1, .., n-1, 0, 1, .. for
ever, and with whatever else a layer needs (of a KV cache, say) behind them. The compute queue unpacks the chunks of a
layer into the layer buffer when the layer's turn comes, and computes. The CPU never waits and may run a whole pass
ahead. The parameters never move: they are views of the layer buffer.

Three rules keep the two queues apart; `tests/test_ring.py` proves each on queues that record who waited for whom.

1. Nothing is read before it has arrived: the copy queue records `arrived[b]` behind each copy into buffer b, and the
   compute queue waits for it before it reads.
2. Nothing is overwritten before it was read: the compute queue records `free[b]` behind its last read of buffer b, and
   the copy queue waits for it before it writes b again.
3. A copy into buffer b is issued only once `free[b]` has been recorded, since waiting for an event that nobody has
   recorded yet is no wait at all.

A *pass* reads each layer once: ``with ring.weight_pass(..):`` around the forward pass, or around several that share the
weights. A pass that ends in an exception leaves the ring to begin anew with the next one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zinfer.core.progress import Progress, silent
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.state import Entry
from zinfer.engine.stream.trace import Timed, Trace, mark
from zinfer.engine.stream.weights.chunk import Chunk, LayerMemory, PackedLayer, pack
from zinfer.engine.stream.weights.queues import CudaQueues, HostQueues, Queues
from zinfer.engine.stream.weights.source import WeightSource
from zinfer.record.measurement import Lane


@dataclass(frozen=True)
class Transfer:
    """One copy over the link, for `layer`. `source` returns its bytes (uint8, host memory); `chunk` is the chunk of the
    weights that it carries, None if it carries something else. It is issued once `ready` returns True; `before` first
    makes the copy queue wait for its needs."""

    layer: int
    source: Callable[[], Tensor]
    chunk: Chunk | None = None
    ready: Callable[[], bool] = lambda: True
    before: Callable[[], None] = lambda: None


class Fetch(Protocol):
    """Data besides weights that layers get in a pass. Equal fetches bring the same bytes."""

    @property
    def nbytes(self) -> int: ...  # bytes of the largest transfer
    def transfer(self, layer: int) -> Transfer | None: ...
    def following(self) -> "Fetch": ...  # the same fetch for the next pass, one step on


class PrefetchRing:
    """Ring of buffers that streams packed layers to the device, in order. They are those of `source`; `depth` is the
    number of buffers, and `queues` are given by tests alone."""

    def __init__(self, source: WeightSource, depth: int, device: torch.device, queues: Queues | None = None) -> None:
        self._late = source.late
        self.layers = list(source.layers) if self._late is None else self._late
        self._expected = dict[int, Callable[[], None]]()  # by layer that may still be loading: what attaches it
        self.bytes_copied = 0  # weight bytes
        self.disk_bytes = 0  # those of them that came from disk
        self.other_bytes_copied = 0
        self._source, self._device, self._cuda = source, device, device.type == "cuda"
        self.queues: Queues = queues or (CudaQueues(device) if self._cuda else HostQueues())
        size = source.late_bytes or max(packed.unpacked_bytes for packed in self.layers)
        self.layer_buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._attached: dict[int, list[Tensor]] = {}  # weights of each layer, in the order of its blocks
        self._resident: dict[int, Tensor] = {}  # layer -> its bytes as in the source, on the device
        self._held: dict[int, PackedLayer] = {}  # resident layers without what `shed` left out
        self._only_resident: set[int] = set()  # layers that are in no source
        self.unpacked: frozenset[int] = frozenset()  # resident layers whose bytes are those of the layer buffer
        self._unpackers: dict[int, Callable[[], None]] = {}  # layer -> what unpacks it where it stays, if given
        self._pending: Iterator[Transfer | None] = iter(())  # transfers still to be issued
        self._in_flight: deque[Transfer] = deque()  # transfers issued and not taken; the last one may wait to be issued
        self._issued = self._taken = self._returned = 0
        self._buffers: list[Tensor] = []
        self._depth = self.buffer_bytes = 0  # number of buffers, and the size of each
        self._timed: deque[Timed] = deque(maxlen=256)  # latest copies, and gathers
        self._trace: Trace | None = None
        self._next: tuple[Fetch, ...] | None = None  # fetches prefetched for the next pass; None: begin anew
        self._pass: _Pass | None = None
        self.holds: frozenset[int] = frozenset()  # layers that hold back the copies of others until `resume`
        self._only: int | None = None  # the layer that does so now
        self.resize(depth)

    def attach(
        self,
        index: int,
        layer: nn.Module,
        entries: Mapping[str, Entry],
        weights: Mapping[str, Tensor] | None = None,
        unpack: Callable[[], None] | None = None,
    ) -> None:
        """Make the weights of `layer`, number `index`, views of the layer buffer. Hooks bring the layer there when it
        is called. `entries` go by the names in its packed layer. The layer gets `weights` instead of views; `unpack`
        brings it when it stays, by `unpack_now`."""
        packed, views = self.layers[index], self._views(index) | dict(weights or {})
        if unpack is not None:
            self._unpackers[index] = unpack
        self._attached[index] = [entries[name].put(views[name]) for name in packed.blocks]
        if index not in self._expected:
            self._hook(index, layer)

    def expect(self, index: int, layer: nn.Module, attach: Callable[[], None]) -> None:
        """Have `attach` called, for `layer`, once it is loaded. Its first call waits for that."""
        self._expected[index] = attach
        self._hook(index, layer)

    def arrive(self, index: int) -> None:
        """Wait until a layer is loaded and attached. Raises what the load raises."""
        if index in self._expected:
            _ = self.layers[index]  # waits
            with torch.inference_mode(False):  # a pass runs in that mode, and parameters outlive it
                self._expected[index]()
            del self._expected[index]

    def loaded(self) -> None:
        """Take note that no layer is late any more. Buffers get the size of the largest chunk."""
        self._late = None
        self._source.count_bytes()
        self.resize(self._depth)

    def _hook(self, index: int, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda _module, _args: self._begin_call(index))
        layer.register_forward_hook(lambda _module, _args, output: self._end_call(index, output))

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def streamed(self) -> tuple[int, ...]:
        """Numbers of the layers that pass through the ring."""
        return tuple(index for index in range(len(self.layers)) if index not in self._resident)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the layers that stay on the device."""
        return sum(content.nbytes for content in self._resident.values())

    def resize(self, depth: int, min_bytes: int = 0) -> None:
        """Change the number of buffers, and their size to the largest chunk. They have at least `min_bytes`. Waits for
        the device if that changes anything."""
        size = max(min_bytes, *self._chunk_bytes())
        if (depth, size) == (self._depth, self.buffer_bytes):
            return
        self._flush()
        del self._buffers[depth if size == self.buffer_bytes else 0 :]
        self._depth, self.buffer_bytes = 0, size  # until all of them are there: the device may be short of memory
        self._buffers += [
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(depth - len(self._buffers))
        ]
        self._arrived, self._free = ([self.queues.event() for _ in range(depth)] for _ in range(2))
        self._depth = depth

    def _chunk_bytes(self) -> Iterator[int]:
        """Yield the sizes of chunks; while layers load, those of the loaded ones as if uncoded, for room for others."""
        if (late := self._late) is None:
            return (chunk.size for packed in self.layers for chunk in packed.chunks)
        layers = (late[index] for index in range(len(late)) if late.loaded(index))
        return (max(chunk.size, chunk.unpacked_bytes) for packed in layers for chunk in packed.chunks)

    def keeps(self, layers: Iterable[int], unpacked: Iterable[int]) -> bool:
        """Tell whether `keep` changes nothing."""
        return self._wanted(layers, unpacked) == (set(self._resident), self.unpacked)

    def _wanted(self, layers: Iterable[int], unpacked: Iterable[int]) -> tuple[set[int], frozenset[int]]:
        wanted = self._only_resident.union(layers)
        able = (index for index in unpacked if index in wanted and self.layers[index].coded)
        return wanted, frozenset(index for index in able if index not in self._held)  # its other bytes are elsewhere

    def keep(self, layers: Iterable[int], unpacked: Iterable[int] = ()) -> None:
        """Keep `layers` on the device from now on, and stream the others. Those without a source stay, too. Coded ones
        are kept `unpacked`, or each pass unpacks them. Waits for the device if that changes anything."""
        wanted, plain = self._wanted(layers, unpacked)
        if wanted == self._resident.keys() and plain == self.unpacked:
            return
        self._flush()
        for index in (self._resident.keys() - wanted) | (self.unpacked - plain):
            if index in self._only_resident:
                self._pack_again(index)
            else:
                del self._resident[index]
                self._held.pop(index, None)
            self.unpacked -= {index}
            self._point(index)
        for index in sorted(wanted - self._resident.keys()):
            self._resident[index] = self._copy_of(index)
            self._point(index)
        for index in sorted(plain - self.unpacked):
            content = torch.empty(self.layers[index].unpacked_bytes, dtype=torch.uint8, device=self._device)
            self.unpack_resident(index, self.layers[index].chunks, content)
            self._resident[index] = content
            self.unpacked |= {index}
            self._point(index)

    def _pack_again(self, index: int) -> None:
        """Code an unpacked layer that is in no source."""
        memory, content = LayerMemory(self._device), self._resident[index]
        packed = pack({name: block.view(content) for name, block in self.layers[index].blocks.items()}, memory)
        self.layers[index], self._resident[index] = packed, memory.whole()

    def shed(self, index: int, names: Iterable[str]) -> None:
        """Free the bytes of the weights `names` of a layer that stays. Who needs them has them elsewhere."""
        packed, content = self.held(index), self._resident[index]
        gone = {chunk.start for name in names for chunk in packed.chunks_of(packed.blocks[name])}
        if not gone:
            return
        memory, chunks = LayerMemory(self._device), list[Chunk]()
        for chunk in packed.chunks:
            if chunk.start not in gone:
                start = memory.used
                memory.allocate(-(-chunk.size // ALIGNMENT) * ALIGNMENT)[: chunk.size].copy_(
                    self.bytes_of(index, chunk)
                )
                chunks.append(replace(chunk, start=start, end=start + chunk.size))
        self._resident[index] = memory.whole() if chunks else content[:0].clone()
        self._held[index] = PackedLayer(tuple(chunks), packed.blocks, packed.unpacked_bytes)
        self._point(index)

    def held(self, index: int) -> PackedLayer:
        """Return the chunks that the device holds of a layer that stays."""
        return self._held.get(index, self.layers[index])

    def bytes_of(self, index: int, chunk: Chunk) -> Tensor:
        """Return a chunk of `held`, on the device."""
        start = chunk.start - self.held(index).start
        return self._resident[index][start : start + chunk.size]

    def keep_only(self, index: int, content: Tensor) -> None:
        """Keep a layer, not attached yet, whose bytes are in no source."""
        self._resident[index] = content
        self._only_resident.add(index)

    def hold(self, layers: Iterable[int], progress: Progress = silent) -> None:
        """Keep `layers`, and no others, in host memory. Waits for the device if that changes anything."""
        if set(layers) != set(self._source.host_layers):
            self._flush()
            self._source.keep(layers, progress)

    def start(self) -> None:
        """Begin to fill the buffers for a pass of weights alone."""
        if self._next is None:
            self._begin(())

    @contextmanager
    def weight_pass(
        self, calls: int = 1, turn: Callable[[int], None] = lambda _layer: None, fetches: Sequence[Fetch] = ()
    ) -> Iterator[None]:
        """Run one pass: each layer is called `calls` times in a row. `turn` gets a layer's number before each of its
        calls. A call takes its fetches by `borrow`, in the order of `fetches`. The next pass is prefetched on the guess
        that it repeats this one, one step on; if it does not, it waits for the device and begins anew."""
        wanted = tuple(fetches)
        if self._pass is not None:
            raise RuntimeError("a pass is under way: forward passes that share the weights share a pass")
        if self._next is None or self._next != wanted:
            self._begin(wanted)
        self._pass, self._next = _Pass(calls, turn), None
        try:
            yield
            if self._pass.complete:
                self._next = tuple(fetch.following() for fetch in wanted)
        finally:
            self._pass = None

    def drop_fetches(self) -> None:
        """Drop prefetched fetches before the memory that they read changes."""
        if self._next or self._next is None:
            self._flush()

    @contextmanager
    def watched(self) -> Iterator[Trace]:
        """Trace the work done (on a GPU: issued) within the ``with`` block."""
        self._trace = Trace(self._cuda, self._timed, self._source.reads)
        try:
            yield self._trace
        finally:
            self._trace = None

    def borrow(self, index: int) -> Tensor:
        """Return the next fetch of a layer, uint8, on the device. It is valid until `hand_back`, or the end of the
        layer's call."""
        now = self._under_way()
        content = self._receive(index, None)
        now.borrowed += 1
        return content

    def hand_back(self) -> None:
        """Free the fetches that the current call has borrowed. Work that is queued from now on must not read them."""
        now = self._under_way()
        while now.borrowed:
            now.borrowed -= 1
            self._free_oldest()

    def resume(self) -> None:
        """Issue the copies that a layer of `holds` held back."""
        if self._only is not None:
            self._only = None
            self._fill()

    def note(self, timed: Timed) -> None:
        """Note work for the timeline, perhaps issued long before its step."""
        self._timed.append(timed)
        if self._trace is not None:
            self._trace.add(*timed)

    @contextmanager
    def untimed(self, index: int, unpacks: bool = False) -> Iterator[None]:
        """Leave a block out of the span of a layer's computation. With `unpacks` it is a span of unpacking."""
        if self._trace is not None:
            self._trace.end("compute", index)
        with self._span("unpack", index) if unpacks else nullcontext():
            yield
        if self._trace is not None:
            self._trace.begin("compute", index)

    @contextmanager
    def _span(self, lane: Lane, index: int) -> Iterator[None]:
        if self._trace is not None:
            self._trace.begin(lane, index)
        yield
        if self._trace is not None:
            self._trace.end(lane, index)

    def close(self) -> None:
        self.queues.finish()
        self._source.stop()
        self._buffers, self._attached, self._resident, self._unpackers, self._next = [], {}, {}, {}, None
        self._expected = {}
        self._pending = iter(())
        self._in_flight.clear()
        self.layer_buffer = torch.empty(0, dtype=torch.uint8)
        del self._source

    def _under_way(self) -> "_Pass":
        if self._pass is None:
            raise RuntimeError("a decoder layer was called outside of a pass of the weights")
        return self._pass

    def _point(self, index: int) -> None:
        for tensor, view in zip(self._attached[index], self._views(index).values(), strict=True):
            tensor.data = view

    def _views(self, index: int) -> dict[str, Tensor]:
        """Return a layer's weights while it computes: in the layer buffer, unless a resident layer holds them so."""
        packed, resident = self.layers[index], self._resident_content(index)
        if resident is None:
            return {name: block.view(self.layer_buffer) for name, block in packed.blocks.items()}
        if index in self.unpacked:
            return {name: block.view(resident) for name, block in packed.blocks.items()}
        shifts = self.held(index).in_place
        return {
            name: block.view(resident, shifts[name]) if name in shifts else block.view(self.layer_buffer)
            for name, block in packed.blocks.items()
        }

    def _flush(self) -> None:
        """Wait for the device and drop all transfers."""
        self.queues.finish()
        self._source.stop()
        self._issued = self._taken = self._returned = 0
        self._in_flight.clear()
        self._timed.clear()
        self._pending, self._next, self._only = iter(()), None, None

    def _begin(self, fetches: tuple[Fetch, ...]) -> None:
        self._flush()
        if fetches:
            self.resize(self._depth, max(fetch.nbytes for fetch in fetches))
        self._pending = self._all_transfers(fetches)
        loaded = (index for index in self.streamed if index not in self._expected)  # late ones are never on disk
        streamed = (chunk for index in loaded for chunk in self.layers[index].chunks)
        if on_disk := [chunk for chunk in streamed if self._source.on_disk(chunk)]:
            self._source.begin(cycle(on_disk))
        self._fill()
        self._next = fetches  # unless its first chunks fail

    def _all_transfers(self, fetches: tuple[Fetch, ...]) -> Iterator[Transfer | None]:
        """Yield all transfers, pass after pass, without end. None comes while the next layer is not loaded."""
        progressed = True
        while progressed:
            progressed = False
            for index in range(len(self.layers)):
                while index in self._expected and self._late is not None and not self._late.loaded(index):
                    yield None
                self.arrive(index)
                chunks = () if index in self._resident else self.layers[index].chunks
                weights = (self._transfer(index, chunk) for chunk in chunks)
                others = (fetch.transfer(index) for fetch in fetches)
                for transfer in (*weights, *others):
                    if transfer is not None:
                        progressed = True
                        yield transfer
            fetches = tuple(fetch.following() for fetch in fetches)

    def _transfer(self, index: int, chunk: Chunk) -> Transfer:
        return Transfer(index, partial(self._source.get, chunk), chunk, partial(self._source.ready, chunk))

    def _copy_of(self, index: int) -> Tensor:
        packed, source = self.layers[index], self._source
        content = torch.empty(packed.size, dtype=torch.uint8, device=self._device)
        if on_disk := [chunk for chunk in packed.chunks if source.on_disk(chunk)]:
            source.begin(on_disk)
        for chunk in packed.chunks:
            content[chunk.start - packed.start : chunk.end - packed.start].copy_(source.get(chunk))
            if on_disk:
                source.release()
        return content

    def _fill(self) -> None:
        while self._issued < self._returned + self._depth:  # rule 3
            if len(self._in_flight) == self._issued - self._taken:
                following = next(self._pending, None)
                if following is None:
                    return
                self._in_flight.append(following)
            if self._only not in (None, self._in_flight[-1].layer) or not self._in_flight[-1].ready():
                return
            self._copy(self._in_flight[-1])

    def _copy(self, transfer: Transfer) -> None:
        buffer = self._issued % self._depth
        with self.queues.copying():
            if self._issued >= self._depth:
                self._free[buffer].wait()  # rule 2
            transfer.before()
            source = transfer.source()
            begin = mark(self._cuda)
            if self._late is not None and source.numel() > self._buffers[buffer].numel():
                self._outgrow(buffer, source.numel())
            self._target(transfer, buffer)[: source.numel()].copy_(source, non_blocking=True)
            self.note(("copy", transfer.layer, begin, mark(self._cuda), None))
            self._complete(transfer, buffer)
        self._issued += 1

    def _outgrow(self, buffer: int, size: int) -> None:
        """Have a free buffer hold a late layer's `size` bytes. Waits for the device; `resize` makes all alike again."""
        self.queues.finish()
        self._buffers[buffer] = torch.empty(size, dtype=torch.uint8, device=self._device)

    def _target(self, _transfer: Transfer, buffer: int) -> Tensor:
        return self._buffers[buffer]

    def _complete(self, transfer: Transfer, buffer: int) -> None:
        """Record in the copy queue that a buffer holds its bytes."""
        self._arrived[buffer].record()
        if transfer.chunk is not None and self._source.on_disk(transfer.chunk):
            copied = self.queues.event()
            copied.record()
            self._source.release(copied)

    def _receive(self, index: int, chunk: Chunk | None) -> Tensor:
        """Return the next transfer's bytes on the device. It must be `chunk` of layer `index` (None: a fetch)."""
        self._fill()
        if self._taken == self._issued and self._in_flight and (late := self._in_flight[0]).chunk is not None:
            late.source()  # waits for the disk
            self._fill()
        following = self._in_flight[0] if self._taken < self._issued else None
        if following is None or following.layer != index or (following.chunk is None) != (chunk is None):
            other = "nothing" if following is None else f"layer {following.layer}"
            raise RuntimeError(f"decoder layer {index} was called, {other} is next")
        self._in_flight.popleft()
        if chunk is None:
            self.other_bytes_copied += following.source().numel()
        else:
            self.bytes_copied += chunk.size
            self.disk_bytes += chunk.size if self._source.on_disk(chunk) else 0
        number, self._taken = self._taken % self._depth, self._taken + 1
        self._arrived[number].wait()  # rule 1
        return self._buffers[number]

    def _free_oldest(self) -> None:
        """Free the buffer received first, behind all compute queued so far."""
        self._free[self._returned % self._depth].record()  # rule 2
        self._returned += 1
        self._fill()

    def _begin_call(self, index: int) -> None:
        self.arrive(index)
        now = self._under_way()
        now.turn(index)
        if now.layer != index or now.calls_done == now.calls:
            self._only = index if index in self.holds else None
            self._unpack(index)
            now.layer, now.calls_done = index, 0
        now.calls_done += 1
        if self._trace is not None:
            self._trace.begin("compute", index)

    def _end_call(self, index: int, output: Any) -> Any:
        now = self._under_way()
        if self._trace is not None:
            self._trace.end("compute", index)
        self.resume()
        self.hand_back()
        now.complete = index == len(self.layers) - 1 and now.calls_done == now.calls
        return _without_attention(output)

    def _unpack(self, index: int) -> None:
        packed, resident = self.layers[index], self._resident_content(index)
        if resident is None:
            for chunk in packed.chunks:
                self._unpack_chunk(index, chunk, self._receive(index, chunk))
                self._free_oldest()
        elif packed.coded and index not in self.unpacked:
            with self._span("unpack", index):
                self._unpackers.get(index, partial(self.unpack_resident, index, packed.chunks_to_unpack))()

    def _unpack_chunk(self, index: int, chunk: Chunk, content: Tensor) -> None:
        with self._span("unpack", index):
            chunk.unpack(content, self.layer_buffer)

    def unpack_resident(self, index: int, chunks: Iterable[Chunk], memory: Tensor | None = None) -> None:
        """Unpack `chunks` of a layer that stays. They go to the layer buffer, or to `memory`."""
        for chunk in chunks:
            chunk.unpack(self.bytes_of(index, chunk), self.layer_buffer if memory is None else memory)

    def unpack_now(self, index: int, chunks: Iterable[Chunk], unpack: Callable[[], None] = lambda: None) -> None:
        """Unpack `chunks` of layer `index`, which stays, and call `unpack`. It is being brought, or computes."""
        now = self._under_way()
        if now.layer != index:  # it is brought now
            self.unpack_resident(index, chunks)
            return
        with self.untimed(index, unpacks=True):
            self.unpack_resident(index, chunks)
            unpack()

    def computes_resident(self, index: int) -> bool:
        """Tell whether a layer computes now, and stays."""
        return self._pass is not None and self._pass.layer == index and index in self._resident

    def _resident_content(self, index: int) -> Tensor | None:
        return self._resident.get(index)


@dataclass
class _Pass:
    """State of the pass under way, for the hooks of the layers."""

    calls: int  # calls of each layer, in a row
    turn: Callable[[int], None]
    layer: int | None = None  # number of the layer in the layer buffer
    calls_done: int = 0  # of that layer
    borrowed: int = 0  # buffers that its current call holds
    complete: bool = False  # True after the last call of the last layer


def _without_attention(output: Any) -> Any:
    """Return a layer's output without attention probabilities ``[B, heads, S, S]``."""
    if not isinstance(output, tuple):
        return output
    return (output[0], *(None if isinstance(part, Tensor) and part.dim() == 4 else part for part in output[1:]))
