"""The `stream` engine: weights in pinned host memory, a few slots on the GPU, a link that never waits.

Decode reads every layer once a step and a layer's copy takes far longer than its compute, so the step time is the bytes
over the link bandwidth, provided that a copy is always under way. The ring runs ahead of compute across layers and
across steps: while the head turns the last layer's output into a token, the first layers of the next step are coming.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from zinfer.cost import Factors
from zinfer.engine import EngineError
from zinfer.engine.arena import Block, HostArena, lay_out
from zinfer.engine.decoder import Decoder
from zinfer.engine.stream import packed
from zinfer.engine.stream.ring import Ring
from zinfer.engine.stream.wire import CodedRing, by_layer, pack
from zinfer.engine.weights import decoder_layers, empty_model, install, weights
from zinfer.plan import Workload, automatic_residency, resident_bytes
from zinfer.record import Effective
from zinfer.source import revision_of

# What a plan does not see of the GPU's memory (gaps, moments of a step) must not be given to resident layers.
CAUTIOUS = Factors(memory=1.5)


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
        lossless = self._lossless()
        resident = {
            name: nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=False)
            for name, parameter in self.model.named_parameters()
            if not (streamed and name.startswith(prefix))
        }
        destination: dict[str, Tensor] = dict(resident)
        if streamed and not lossless:
            destination |= self._make_ring(prefix)
        loaded = weights(self.model, plan.model, plan.case.load_format, self.device, self.progress)
        if streamed and lossless:
            self._make_coded_ring(prefix, destination, loaded)
        else:
            for name, tensor in loaded:
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

    def _lossless(self) -> bool:
        codecs = ("none", "lossless")
        if self.options["weight_codec"] not in codecs:
            raise EngineError(f"weight_codec={self.options['weight_codec']}: choose from {', '.join(codecs)}")
        return bool(self.options["weight_codec"] == "lossless")

    def _make_coded_ring(
        self, prefix: str, destination: dict[str, Tensor], loaded: Iterator[tuple[str, Tensor]]
    ) -> None:
        """The arena and the ring of packed layers; takes all of `loaded`, which has a layer's tensors side by side."""
        raw = sum(lay_out(layer.named_parameters())[1] for layer in self._layers)
        self._arena = HostArena(raw, pin=self.device.type == "cuda", grow=True)
        folder = self._packed()
        images = dict(enumerate(packed.load(folder, self._arena, self.progress))) if folder is not None else {}
        wanted = len(destination) if images else -1  # with the layers at hand, only what lies outside them is read
        for index, group in by_layer(prefix, loaded):
            if index is None:
                for name, tensor in group:
                    destination[name].data.copy_(tensor)
                    wanted -= 1
            elif index not in images:
                # Loans become copies; on the device, where coding is fast.
                tensors = {name: tensor.to(self.device, copy=True) for name, tensor in group}
                if {name for name, _ in self._layers[index].named_parameters()} - set(tensors):
                    raise EngineError(f"layer {index} is not stored in one piece: use weight_codec=none")
                images[index] = pack(tensors, self._arena)
            if not wanted:
                break
        self._arena.seal()
        ordered = [images[index] for index in range(len(self._layers))]
        ring = CodedRing(self._arena.memory, ordered, int(self.options["ring_depth"]), self.device)
        for index, layer in enumerate(self._layers):
            ring.bind(index, layer)
        self._ring = ring

    def _packed(self) -> Path | None:
        """The folder of the checkpoint's packed layers, if there is one."""
        spec, load_format = self.plan.model, self.plan.case.load_format
        if load_format == "dummy":
            return None
        return packed.find(spec, revision_of(spec, load_format), str(self.options["packed"]))

    def prefill(self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0) -> Tensor:
        if self._ring is not None:
            self.release()
            self._ring.rewind()
            self._ring.keep(self._residents(token_ids.shape[0], token_ids.shape[1], reserve))
        return super().prefill(token_ids, attention_mask, reserve)

    def _residents(self, batch_size: int, input_len: int, output_len: int) -> list[int]:
        """The layers that stay on the GPU, as many as the case says, spread evenly so that the link never idles."""
        case, depth = self.plan.case, len(self._layers)
        if case.gpu_weights is None:
            return []
        assert self._ring is not None
        model, automatic = self.plan.model, 0
        if case.gpu_weights == "auto":
            load = Workload(batch_size=batch_size, input_len=input_len, output_len=max(1, output_len))
            automatic = automatic_residency(
                case.model_copy(update={"workload": load}), model, self.plan.machine, CAUTIOUS
            )
        if case.gpu_weights.endswith("%"):
            count = round(resident_bytes(case.gpu_weights, depth * 100) / 100)
        else:
            count = min(depth, resident_bytes(case.gpu_weights, 1 << 62, automatic) // self._ring.slot_bytes)
        return [index for index in range(depth) if (index + 1) * count // depth > index * count // depth]

    def decode(self, token_ids: Tensor) -> Tensor:
        before = self._ring.bytes_copied if self._ring is not None else 0
        logits = super().decode(token_ids)
        self._streamed_per_step = self._ring.bytes_copied - before if self._ring is not None else 0
        return logits

    def _delivered(self) -> int:
        """Weight bytes that a step found in its slots, which were fewer on the wire if they were coded."""
        if not isinstance(self._ring, CodedRing) or not self._streamed_per_step:
            return self._streamed_per_step
        layers = [self._layers[index] for index in self._ring.streamed]
        return sum(parameter.nbytes for layer in layers for parameter in layer.parameters())

    def effective(self) -> Effective:
        if self._ring is None or self._arena is None:
            return Effective(gpu_weight_bytes=self._resident_bytes)
        return Effective(
            gpu_weight_bytes=self._resident_bytes + self._ring.kept_bytes,
            host_weight_bytes=self._arena.size,
            streamed_bytes_per_step=self._delivered(),
            wire_bytes_per_step=self._streamed_per_step,
            pinned_bytes=self._arena.size if self._arena.pinned else 0,
            settings={
                "ring_depth": self._ring.depth,
                "slot_bytes": self._ring.slot_bytes,
                "weight_codec": self.options["weight_codec"],
                "resident_layers": len(self._layers) - len(self._ring.streamed),
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
