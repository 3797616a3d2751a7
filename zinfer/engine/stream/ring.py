"""Slots on the device that the layers' weights pass through, in the order they are used, for ever.

Use `k` of the endless sequence layer 0, 1, .., n-1, 0, 1, .. takes slot `k mod depth`. Two rules order the two streams:
a copy into a slot waits until the layer that had it is computed (`free`), a layer waits until its copy has arrived
(`ready`). Both are events on the device; the CPU never waits and may run a whole step ahead.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zinfer.engine.arena import Block


class Ring:
    """`depth` slots that stream the byte ranges ``bases[i]:bases[i+1]`` of `source` to `device`, layer after layer.

    Without a GPU the copies are plain ones, made when a layer asks for its slot; everything else is the same.
    """

    def __init__(self, source: Tensor, bases: list[int], depth: int, device: torch.device) -> None:
        if depth < 2:
            raise ValueError(f"ring_depth={depth}: a ring needs 2 slots or more, one in use and one being filled")
        self.depth = depth
        self.slot_bytes = max(end - start for start, end in pairwise(bases))
        self.bytes_copied = 0
        self._source, self._bases = source, bases
        self._num_layers = len(bases) - 1
        self._slots = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._device, self._cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._ready = [torch.cuda.Event() for _ in range(depth)] if self._cuda else []
        self._free = [torch.cuda.Event() for _ in range(depth)] if self._cuda else []
        self._parameters: list[list[tuple[nn.Parameter, Block, list[Tensor]]]] = []
        self._kept: dict[int, Tensor] = {}  # layers that stay on the device, as they are in the source
        self._order = list(range(self._num_layers))  # of those that do not
        self._used = 0  # uses completed or under way: the next layer to compute is number `_used` of the sequence
        self._issued = 0  # copies issued

    def attach(self, index: int, layer: nn.Module, blocks: dict[str, Block]) -> None:
        """Let `layer`, the sequence's number `index`, find its parameters in the ring whenever it is called."""
        self._attach(index, layer, blocks, self._slots)

    def _attach(self, index: int, layer: nn.Module, blocks: Mapping[str, Block], slots: list[Tensor]) -> None:
        bound = []
        for name, block in blocks.items():
            views = [block.view(slot) for slot in slots]
            owner, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(views[0], requires_grad=False)
            layer.get_submodule(owner)._parameters[leaf] = parameter
            bound.append((parameter, block, views))
        self._parameters.append(bound)

        def before(_module: nn.Module, _args: Any) -> None:
            self._acquire(index)

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            if index not in self._kept:
                self._release()

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def start(self) -> None:
        """Begin to fill the slots; the source must be complete by now."""
        while self._order and self._issued < self._used + self.depth:
            self._copy()

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that pass through the slots."""
        return tuple(self._order)

    @property
    def kept_bytes(self) -> int:
        """Of the layers that stay on the device."""
        return sum(kept.nbytes for kept in self._kept.values())

    def keep(self, layers: Iterable[int]) -> None:
        """Hold `layers` on the device from now on, and stream the others; waits for the device where that changes."""
        wanted = set(layers)
        if wanted == self._kept.keys():
            return
        if self._cuda:
            torch.cuda.synchronize()
        self._kept = {index: kept for index, kept in self._kept.items() if index in wanted}
        for index in sorted(wanted - self._kept.keys()):
            self._kept[index] = self._source[self._bases[index] : self._bases[index + 1]].to(self._device, copy=True)
        self._order = [index for index in range(self._num_layers) if index not in wanted]
        self._used = self._issued = 0
        self.start()

    def rewind(self) -> None:
        """Make the first layer the next one, whatever an interrupted pass (out of memory, ctrl-C) left behind."""
        if not self._order or self._used % len(self._order) == 0:
            return
        if self._cuda:
            torch.cuda.synchronize()
        self._used = self._issued = 0
        self.start()

    def _copy(self) -> None:
        """Issue the sequence's next copy; on the device it runs as soon as its slot is free."""
        use = self._issued
        self._issued += 1
        slot, layer = use % self.depth, self._order[use % len(self._order)]
        start, end = self._bases[layer], self._bases[layer + 1]
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None and use >= self.depth:
                self._stream.wait_event(self._free[slot])
            self._slots[slot][: end - start].copy_(self._source[start:end], non_blocking=True)
            if self._cuda:
                self._ready[slot].record(self._stream)
        self.bytes_copied += end - start

    def _expect(self, index: int) -> None:
        following = self._order[self._used % len(self._order)]
        if index != following:
            raise RuntimeError(f"decoder layer {index} was called, layer {following} is next")

    def _acquire(self, index: int) -> None:
        if index in self._kept:
            for parameter, block, _ in self._parameters[index]:
                parameter.data = block.view(self._kept[index])
            return
        self._expect(index)
        slot = self._used % self.depth
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._ready[slot])
        for parameter, _, views in self._parameters[index]:
            parameter.data = views[slot]

    def _release(self) -> None:
        if self._cuda:
            self._free[self._used % self.depth].record()
        self._used += 1
        self._copy()

    def close(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._slots = []
        self._parameters = []
        self._kept = {}
