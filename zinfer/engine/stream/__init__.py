"""The `stream` engine: weights in pinned host memory, a few slots on the GPU, a link that never waits.

Decode reads every layer once a step and a layer's copy takes far longer than its compute, so the step time is the bytes
over the link bandwidth, provided that a copy is always under way. The ring runs ahead of compute across layers and
across steps: while the head turns the last layer's output into a token, the first layers of the next step are coming.
"""

import torch
from torch import Tensor, nn

from zinfer.engine.arena import Block, HostArena, lay_out
from zinfer.engine.decoder import Decoder
from zinfer.engine.stream.ring import Ring
from zinfer.engine.weights import decoder_layers, empty_model, install, weights
from zinfer.record import Effective


class Stream(Decoder):
    """All weights on the device (offload `none`), or the decoder layers streamed to it from host memory (`cpu`)."""

    _arena: HostArena | None = None
    _ring: Ring | None = None
    _streamed_per_step = 0

    def _load(self) -> None:
        plan = self.plan
        self.model = empty_model(plan.model)
        stack_name, self._layers = decoder_layers(self.model)
        prefix = f"{stack_name}."
        streamed = plan.case.offload == "cpu"
        resident = {
            name: nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=False)
            for name, parameter in self.model.named_parameters()
            if not (streamed and name.startswith(prefix))
        }
        destination: dict[str, Tensor] = dict(resident)
        if streamed:
            destination |= self._make_ring(prefix)
        for name, tensor in weights(self.model, plan.model, plan.case.load_format, self.device, self.progress):
            destination[name].data.copy_(tensor)
        install(self.model, resident)
        if self._ring is not None:
            self._ring.start()
        self._resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self._ready()

    def _make_ring(self, prefix: str) -> dict[str, Tensor]:
        """The arena and the ring; returns the host tensors to fill, by parameter name."""
        layouts: list[tuple[dict[str, Block], int]] = [lay_out(layer.named_parameters()) for layer in self._layers]
        bases = [0]
        for _, size in layouts:
            bases.append(bases[-1] + size)
        self._arena = HostArena(bases[-1], pin=self.device.type == "cuda", progress=self.progress)
        self._ring = Ring(self._arena.memory, bases, int(self.options["ring_depth"]), self.device)
        host: dict[str, Tensor] = {}
        for index, (layer, (blocks, _)) in enumerate(zip(self._layers, layouts, strict=True)):
            views = self._arena.views(blocks, bases[index])
            host |= {f"{prefix}{index}.{name}": view for name, view in views.items()}
            self._ring.attach(index, layer, blocks)
        return host

    def prefill(self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0) -> Tensor:
        if self._ring is not None:
            self._ring.rewind()
        return super().prefill(token_ids, attention_mask, reserve)

    def decode(self, token_ids: Tensor) -> Tensor:
        before = self._ring.bytes_copied if self._ring is not None else 0
        logits = super().decode(token_ids)
        self._streamed_per_step = self._ring.bytes_copied - before if self._ring is not None else 0
        return logits

    def effective(self) -> Effective:
        if self._ring is None or self._arena is None:
            return Effective(gpu_weight_bytes=self._resident_bytes)
        return Effective(
            gpu_weight_bytes=self._resident_bytes,
            host_weight_bytes=self._arena.size,
            streamed_bytes_per_step=self._streamed_per_step,
            pinned_bytes=self._arena.size if self._arena.pinned else 0,
            settings={
                "ring_depth": self._ring.depth,
                "slot_bytes": self._ring.slot_bytes,
                "weight_codec": "none",
                "attention": self.model.config._attn_implementation,
            },
        )

    def close(self) -> None:
        super().close()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
