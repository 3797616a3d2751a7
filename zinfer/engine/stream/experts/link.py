"""Experts over the link: a share of those that a few tokens chose, computed by the device beside the CPU.

While the CPU computes the experts of a decode step (`zinfer.engine.stream.experts.cpu`), the link is idle. So the
device divides the chosen experts, copies its own out of pinned memory into slots, unpacks these to the first places of
the layer buffer, and multiplies them there (`zinfer.engine.stream.experts.few_experts`). Both take about as long, and
no host waits: a CUDA graph holds all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zinfer.core.case import Option
from zinfer.core.engine import LINKED_BYTES
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gib
from zinfer.engine.stream.experts import few_experts
from zinfer.engine.stream.weights.chunk import Chunk, Repeat
from zinfer.engine.stream.weights.packed_experts import PackedExperts
from zinfer.engine.stream.weights.products import CheckedKernel
from zinfer.engine.triton_check import cannot_run


class Split(NamedTuple):
    """Chosen experts, divided: those that the link brings, the slot of each choice, and choices of the CPU."""

    experts: Tensor
    places: Tensor
    others: Tensor


@dataclass(frozen=True)
class _Layer:
    module: nn.Module
    source: Tensor  # bytes of all experts, in pinned memory
    count: int
    size: int  # bytes of an expert that are copied
    chunks: Sequence[tuple[Chunk, int, Repeat]]  # of an expert, and where in it they begin
    buffer: Tensor  # layer buffer, of which the module's weights are views

    @property
    def stride(self) -> int:
        return self.chunks[0][2].packed


class LinkExperts(CheckedKernel):
    """A `share` of the experts of calls, which `device` computes itself. `status` is ``on``, or why it computes none.
    Calls have to follow each other on the device: they share its slots."""

    status: str

    def __init__(self, device: torch.device, share: float, progress: Progress = silent) -> None:
        super().__init__((cannot_run(device) or "on") if share else "off", "the CPU's experts alone", progress)
        self.share, self._device = share, device
        self._layers: dict[int, _Layer] = {}
        self._slots = torch.empty(0, dtype=torch.uint8)
        with torch.inference_mode(False):
            self._done = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda" and self.status == "on")

    @property
    def done(self) -> tuple[int, int]:
        """Counts since the load: experts that came, choices that the CPU computed beside them."""
        return int(self._done[0]), int(self._done[1])

    def attach(
        self, number: int, packed: PackedExperts, module: nn.Module, memory: Tensor, buffer: Tensor, pairs: int
    ) -> None:
        """Read experts of layer `number` out of `memory`. Calls have up to `pairs` choices; the module's weights are
        views of `buffer`. `status` says why if that cannot be."""
        if self.status != "on":
            return
        if not packed.repeats:
            self.status = "experts of a layer are not stored alike"
            return
        if self._device.type == "cuda" and not memory.is_pinned():
            self.status = "experts are not in pinned memory"
            return
        first, count, stride = packed.experts[0], len(packed.experts), packed.repeats[0].packed
        if stride > LINKED_BYTES:
            self.status = f"an expert is larger than {gib(LINKED_BYTES, 2)}"
            return
        from zinfer.engine.stream.experts.link_kernel import UNIT

        size = -(-first.size // UNIT) * UNIT
        source = memory[packed.start :][: (count - 1) * stride + size]
        steps = zip(first.chunks, packed.repeats, strict=True)
        chunks = [(chunk, chunk.start - first.start, step) for chunk, step in steps]
        self._layers[number] = own = _Layer(module, source, count, size, chunks, buffer)
        if (room := self._count(own, pairs) * stride) > self._slots.numel():
            with torch.inference_mode(False):
                self._slots = torch.zeros(room, dtype=torch.uint8, device=self._device)

    def slots(self, layer: int, pairs: int) -> int:
        """Return the maximum of experts of a layer that come. A call has `pairs` choices."""
        return self._count(self._layers[layer], pairs) if self.status == "on" and layer in self._layers else 0

    def _count(self, layer: _Layer, pairs: int) -> int:
        return min(int(self.share * min(pairs, layer.count) + 0.5), LINKED_BYTES // layer.stride)

    def split(self, layer: int, chosen: Tensor) -> Split:
        """Divide the choices ``[tokens, k]`` of a layer."""
        from zinfer.engine.stream.experts.link_kernel import split

        own = self._layers[layer]
        return Split(*split(chosen, own.count, self.slots(layer, chosen.numel()), self.share, self._done))

    def compute(self, layer: int, chosen: Split, states: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the link's experts, ``[tokens, H]``. Takes hidden states ``[tokens, H]`` and the weights of
        all choices, ``[tokens, k]``."""
        from zinfer.engine.stream.experts.link_kernel import fill

        own, count = self._layers[layer], len(chosen.experts)
        fill(own.source, chosen.experts, self._slots, own.size, own.stride)
        for chunk, start, step in own.chunks:
            chunk.unpack(self._slots[start:], own.buffer, step._replace(times=count))
        return few_experts.compute(own.module, states, chosen.places, weights)

    @property
    def settings(self) -> dict[str, Option]:
        """Way in which experts are divided, for the record."""
        return {"cpu_expert_link": self.status, "linked_share": self.share if self.status == "on" else 0.0}

    def close(self) -> None:
        """Forget all experts."""
        self._layers, self._slots = {}, torch.empty(0, dtype=torch.uint8)
        self.status = "closed"
