"""The way of the weights: over the link in pieces, through a ring of buffers, into the one slot that layers compute in.

Two streams of the device take part. The copy stream fills the ring with the pieces of layer 0, 1, .., n-1, 0, 1, .. for
ever; it waits only for a free buffer. The compute stream unpacks the pieces of a layer into the slot when the layer's
turn comes, which takes a few per cent of the time the link needs for them, and computes. Events order the two; the CPU
never waits and may run a whole step ahead. So the link never rests, as long as the ring holds what it brings while a
layer computes, and the parameters never move: they are views of the slot.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zinfer.engine.arena import Block
from zinfer.engine.stream.image import Image, Piece, unpack
from zinfer.engine.stream.trace import Mark, Trace, mark


def _lean(output: Any) -> Any:
    """A layer's output without attention probabilities, ``[B, heads, S, S]``, which some models return besides the
    hidden states and then hold while the next layer computes, or, in a pass that waits, longer. Nobody reads them."""
    if not isinstance(output, tuple):
        return output
    return (output[0], *(None if isinstance(part, Tensor) and part.dim() == 4 else part for part in output[1:]))


class Ring:
    """Streams `images`, a decoder layer each, out of `source` (uint8, host memory) to `device`, layer after layer.

    `depth` is the number of buffers. Without a GPU there are none: a piece is unpacked from where it is. `turn`, if
    set, is called with a layer's number before the layer has its weights.
    """

    def __init__(self, source: Tensor, images: list[Image], depth: int, device: torch.device) -> None:
        if depth < 2:
            raise ValueError(f"ring_depth={depth}: a ring needs 2 buffers or more, one in use and one being filled")
        self.images = images
        self.bytes_copied = 0
        self.stays = 1  # calls of a layer in a row, which its weights serve
        self.trace: Trace | None = None
        self.turn: Any = None
        self._source, self._device, self._cuda = source, device, device.type == "cuda"
        self._slot = torch.empty(max(image.slot_bytes for image in images), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._parameters: list[list[tuple[nn.Parameter, Block]]] = []
        self._kept: dict[int, Tensor] = {}  # layers that stay on the device, as they are in the source
        self._sequence: list[Piece] = []
        self._layer: list[int] = []  # of each piece in the sequence
        self._first: dict[int, int] = {}  # layer: number of its first piece
        self._held: int | None = None  # the layer in the slot
        self._calls = 0  # of it, so far
        self._buffers: list[Tensor] = []
        self._depth = 0
        self._copies: deque[tuple[int, Mark, Mark]] = deque(maxlen=256)  # the last ones: layer, begin, end
        self.resize(depth)
        self._arrange()

    def attach(self, index: int, layer: nn.Module) -> None:
        """Let `layer`, number `index`, find its weights in the slot whenever it is called."""
        bound = []
        for name, block in self.images[index].blocks.items():
            owner, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(block.view(self._slot), requires_grad=False)
            layer.get_submodule(owner)._parameters[leaf] = parameter
            bound.append((parameter, block))
        self._parameters.append(bound)

        def before(_module: nn.Module, _args: Any) -> None:
            if self.turn is not None:
                self.turn(index)
            self._acquire(index)

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self.trace is not None:
                self.trace.end("compute", index)
            return _lean(output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def buffer_bytes(self) -> int:
        """Of one buffer: the largest piece."""
        return max(piece.size for image in self.images for piece in image.pieces)

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

    def resize(self, depth: int) -> None:
        """Have `depth` buffers from now on; waits for the device where that changes."""
        if depth == self._depth:
            return
        self._depth = depth
        self._settle()
        if self._cuda:
            size = self.buffer_bytes
            del self._buffers[depth:]
            self._buffers += [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(depth - len(self._buffers))
            ]
            self._ready = [torch.cuda.Event() for _ in range(depth)]
            self._free = [torch.cuda.Event() for _ in range(depth)]

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
        self._arrange()

    def rewind(self) -> None:
        """Make the first layer the next one, whatever an interrupted pass (out of memory, ctrl-C) left behind, and the
        slot's content worth nothing."""
        if self._sequence and self._taken % len(self._sequence):
            self._settle()
        self._held, self._calls, self.stays, self.turn, self.trace = None, 0, 1, None, None

    def start(self) -> None:
        """Begin to fill the buffers; the source must be complete by now."""
        while self._cuda and self._sequence and self._issued < self._taken + self._depth:
            self._copy()

    @contextmanager
    def watched(self) -> Iterator[Trace]:
        """A trace of what happens meanwhile, on the device that is of what is issued meanwhile."""
        self.trace = Trace(self._cuda, self._copies)
        try:
            yield self.trace
        finally:
            self.trace = None

    def _show(self, index: int, memory: Tensor) -> None:
        for parameter, block in self._parameters[index]:
            parameter.data = block.view(memory)

    def _arrange(self) -> None:
        self._sequence, self._layer, self._first = [], [], {}
        for index in self.streamed:
            self._first[index] = len(self._sequence)
            self._sequence += self.images[index].pieces
            self._layer += [index] * len(self.images[index].pieces)

    def _settle(self) -> None:
        """Let the device finish, and begin the sequence anew."""
        if self._cuda:
            torch.cuda.synchronize()
        self._taken = self._issued = 0  # pieces
        self._held = None
        self._copies.clear()

    def _copy(self) -> None:
        """Issue the sequence's next copy; on the device it runs as soon as its buffer is free."""
        number = self._issued % len(self._sequence)
        buffer, piece = self._issued % self._depth, self._sequence[number]
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._issued >= self._depth:
                self._free[buffer].wait()
            begin = mark(self._cuda)
            self._buffers[buffer][: piece.size].copy_(self._source[piece.start : piece.end], non_blocking=True)
            self._ready[buffer].record()
            copy = (self._layer[number], begin, mark(self._cuda))
        self._copies.append(copy)
        if self.trace is not None:
            self.trace.add("copy", *copy)
        self._issued += 1
        self.bytes_copied += piece.size

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
        number = self._taken % len(self._sequence)
        if self._first[index] != number:
            raise RuntimeError(f"decoder layer {index} was called, layer {self._layer[number]} is next")
        for piece in self.images[index].pieces:
            if self._cuda:
                buffer = self._taken % self._depth
                self._ready[buffer].wait()
                with self._decoding(index):
                    unpack(piece, self._buffers[buffer], self._slot)
                self._free[buffer].record()
                self._copy()
            else:
                with self._decoding(index):
                    unpack(piece, self._source[piece.start : piece.end], self._slot)
                self.bytes_copied += piece.size
            self._taken += 1

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
        self._buffers, self._parameters, self._kept = [], [], {}
        self._slot = torch.empty(0, dtype=torch.uint8)
