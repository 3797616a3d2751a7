"""The way of the weights: over the link in pieces, through a ring of buffers, into the one slot that layers compute in.

Two streams of the device take part. The copy stream fills the ring with the pieces of layer 0, 1, .., n-1, 0, 1, .. for
ever, and with whatever else a layer needs (of a KV cache, say) behind them; it waits only for a free buffer. The
compute stream unpacks the pieces of a layer into the slot when the layer's turn comes, which takes a few per cent of
the time the link needs for them, and computes. Events order the two; the CPU never waits and may run a whole step
ahead. So the link never rests, as long as the ring holds what it brings while a layer computes, and the parameters
never move: they are views of the slot.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from zinfer.engine.pinned import Block
from zinfer.engine.state import Entry
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer, unpack
from zinfer.engine.stream.trace import Mark, Trace, mark


def _lean(output: Any) -> Any:
    """A layer's output without attention probabilities, ``[B, heads, S, S]``, which some models return besides the
    hidden states and then hold while the next layer computes, or, in a pass that waits, longer. Nobody reads them."""
    if not isinstance(output, tuple):
        return output
    return (output[0], *(None if isinstance(part, Tensor) and part.dim() == 4 else part for part in output[1:]))


@dataclass(frozen=True)
class Transfer:
    """What crosses the link in one copy for `layer`: `source` gives it (uint8, host memory), a piece of its weights or
    not. The copy is issued when `ready` says so, and after what `before` has the copy stream wait for.
    """

    layer: int
    source: Callable[[], Tensor]
    piece: Chunk | None = None
    ready: Callable[[], bool] = lambda: True
    before: Callable[[], None] = lambda: None


class PrefetchRing:
    """Streams `images`, a decoder layer each, out of `source` (uint8, host memory) to `device`, layer after layer.

    `depth` is the number of buffers. Without a GPU there are none: a piece is unpacked from where it is. `turn`, if
    set, is called with a layer's number before the layer has its weights; `more`, if set, with the number of a pass
    since the last `rewind` and of a layer, for what that layer will `borrow` in that pass.
    """

    def __init__(self, source: Tensor, images: list[PackedLayer], depth: int, device: torch.device) -> None:
        if depth < 2:
            raise ValueError(f"ring_depth={depth}: a ring needs 2 buffers or more, one in use and one being filled")
        self.images = images
        self.bytes_copied = 0
        self.stays = 1  # calls of a layer in a row, which its weights serve
        self.trace: Trace | None = None
        self.turn: Any = None
        self.more: Callable[[int, int], Iterable[Transfer]] | None = None
        self.other_bytes_copied = 0  # that were no weights
        self._source, self._device, self._cuda = source, device, device.type == "cuda"
        self._slot = torch.empty(max(image.slot_bytes for image in images), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._held_by: list[list[tuple[Tensor, Block]]] = []  # a layer: its weights, and where they are in the slot
        self._kept: dict[int, Tensor] = {}  # layers that stay on the device, as they are in the source
        self._loads: Iterator[Transfer] = iter(())  # all that is still to be issued
        self._flying: deque[Transfer] = (
            deque()
        )  # issued and not taken; the last ones may wait for their turn to be issued
        self._issued = self._taken = self._returned = 0
        self._held: int | None = None  # the layer in the slot
        self._calls = 0  # of it, so far
        self._borrowed = False
        self._buffers: list[Tensor] = []
        self._depth = self._buffer_bytes = 0
        self._copies: deque[tuple[int, Mark, Mark]] = deque(maxlen=256)  # the last ones: layer, begin, end
        self.resize(depth)

    def attach(self, index: int, layer: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Let `layer`, number `index`, find its weights and buffers in the slot whenever it is called; `entries` are
        those that its image holds, by the same names."""
        blocks = self.images[index].blocks
        self._held_by.append([(entries[name].put(block.view(self._slot)), block) for name, block in blocks.items()])

        def before(_module: nn.Module, _args: Any) -> None:
            if self.turn is not None:
                self.turn(index)
            self._acquire(index)

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self.trace is not None:
                self.trace.end("compute", index)
            if self._borrowed:
                self._borrowed = False
                self._give_back()
            return _lean(output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    @property
    def on_gpu(self) -> bool:
        return self._cuda

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def buffer_bytes(self) -> int:
        """Of one buffer."""
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
        """Of the layers that stay on the device."""
        return sum(kept.nbytes for kept in self._kept.values())

    def resize(self, depth: int, least_bytes: int = 0) -> None:
        """Have `depth` buffers from now on, each of the largest piece's size and of `least_bytes`; waits for the device
        where that changes."""
        size = max(least_bytes, *(piece.size for image in self.images for piece in image.pieces))
        if (depth, size) == (self._depth, self._buffer_bytes):
            return
        self._settle()
        if self._cuda:
            del self._buffers[depth if size == self._buffer_bytes else 0 :]
            self._depth, self._buffer_bytes = 0, size  # until all of them are there: the device may be short of memory
            self._buffers += [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(depth - len(self._buffers))
            ]
            self._arrived = [torch.cuda.Event() for _ in range(depth)]
            self._free = [torch.cuda.Event() for _ in range(depth)]
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

    def rewind(self) -> None:
        """Make the first layer the next one, whatever an interrupted pass (out of memory, ctrl-C) left behind, and the
        slot's content worth nothing. Nothing but weights is fetched from now on."""
        whole = sum(len(self.images[index].pieces) for index in self.streamed)
        if self.more is not None or self._borrowed or (whole and self._taken % whole) or self._taken != self._returned:
            self._settle()
        self.more, self.turn, self.trace = None, None, None
        self._held, self._calls, self.stays = None, 0, 1

    def fetch(self, more: Callable[[int, int], Iterable[Transfer]]) -> None:
        """Have the layers fetch what `more` says, from a first pass on that begins now; until the next `rewind`."""
        self.more = more
        self._settle()

    def start(self) -> None:
        """Begin to fill the buffers; the source must be complete by now."""
        if self._cuda:
            self._fill()

    @contextmanager
    def watched(self) -> Iterator[Trace]:
        """A trace of what happens meanwhile, on the device that is of what is issued meanwhile."""
        self.trace = Trace(self._cuda, self._copies)
        try:
            yield self.trace
        finally:
            self.trace = None

    def _show(self, index: int, memory: Tensor) -> None:
        for tensor, block in self._held_by[index]:
            tensor.data = block.view(memory)

    def _settle(self) -> None:
        """Let the device finish, and begin with the first layer again."""
        if self._cuda:
            torch.cuda.synchronize()
        self._issued = self._taken = self._returned = 0
        self._held, self._borrowed = None, False
        self._flying.clear()
        self._copies.clear()
        self._loads = self._passes()

    def _passes(self) -> Iterator[Transfer]:
        """What crosses the link, pass after pass."""
        for number in count():
            for index, image in enumerate(self.images):
                if index not in self._kept:
                    for piece in image.pieces:
                        yield Transfer(index, partial(self._bytes, piece), piece)
                if self.more is not None:
                    yield from self.more(number, index)
            if self.more is None and not self.streamed:
                return  # all is on the device

    def _bytes(self, piece: Chunk) -> Tensor:
        return self._source[piece.start : piece.end]

    def _fill(self) -> None:
        """Issue the copies that there are buffers for; on the device they run as soon as these are free."""
        while self._issued < self._returned + self._depth:
            if len(self._flying) == self._issued - self._taken:
                following = next(self._loads, None)
                if following is None:
                    return
                self._flying.append(following)
            if not self._flying[-1].ready():
                return
            self._copy(self._flying[-1])

    def _copy(self, load: Transfer) -> None:
        buffer = self._issued % self._depth
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._issued >= self._depth:
                self._free[buffer].wait()
            load.before()
            source = load.source()
            begin = mark(self._cuda)
            self._buffers[buffer][: source.numel()].copy_(source, non_blocking=True)
            self._arrived[buffer].record()
            copy = (load.layer, begin, mark(self._cuda))
        self._copies.append(copy)
        if self.trace is not None:
            self.trace.add("copy", *copy)
        self._issued += 1

    def _take(self, index: int, piece: Chunk | None) -> Tensor:
        """The next load, which has to be that `piece` of layer `index` (None: no weights), where the device has it."""
        if self._cuda:
            self._fill()
        elif not self._flying:
            self._flying.extend(islice(self._loads, 1))
        ready = self._flying and (not self._cuda or self._taken < self._issued)
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
        if not self._cuda:
            return following.source()
        self._arrived[number].wait()
        return self._buffers[number]

    def _give_back(self) -> None:
        """What was taken last is used up when the device gets here."""
        if self._cuda:
            self._free[self._returned % self._depth].record()
            self._returned += 1
            self._fill()

    def borrow(self, index: int) -> Tensor:
        """The next load of layer `index`, no piece of its weights, until the layer's call ends."""
        self._borrowed = True
        return self._take(index, None)

    def _acquire(self, index: int) -> None:
        """Have layer `index` in the slot, unless it is there or on the device for this call anyway."""
        if self._held == index and self._calls < self.stays:
            self._calls += 1
        else:
            self._unpack(index)
            self._held, self._calls = index, 1
        if self.trace is not None:
            self.trace.begin("compute", index)

    def _unpack(self, index: int) -> None:
        image, kept = self.images[index], self._kept.get(index)
        if kept is None:
            self._receive(index)
        elif image.coded:
            with self._decoding(index):
                for piece in image.pieces:
                    unpack(piece, kept[piece.start - image.start :], self._slot)

    def _receive(self, index: int) -> None:
        for piece in self.images[index].pieces:
            content = self._take(index, piece)
            with self._decoding(index):
                unpack(piece, content, self._slot)
            self._give_back()

    @contextmanager
    def _decoding(self, index: int) -> Iterator[None]:
        if self.trace is None:
            yield
            return
        self.trace.begin("decode", index)
        yield
        self.trace.end("decode", index)

    def close(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._buffers, self._held_by, self._kept, self.more = [], [], {}, None
        self._loads = iter(())
        self._flying.clear()
        self._source = self._slot = torch.empty(0, dtype=torch.uint8)
