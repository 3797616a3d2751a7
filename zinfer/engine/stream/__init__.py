"""The `stream` engine: weights in pinned host memory, one layer of them on the GPU, a link that never waits.

Decode reads every layer once a step and a layer's copy takes far longer than its compute, so the step time is the bytes
on the wire over the link bandwidth, provided that a copy is always under way. The ring runs ahead of compute across
layers and across steps: while the head turns the last layer's output into a token, the next step's first layer comes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from zinfer.engine import EngineError
from zinfer.engine.cache import STORAGE, QuantizedLayer, RowCache, make_cache, other_layers, shares_keys
from zinfer.engine.decoder import Decoder
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.engine.pinned import PinnedArena, check_free, lay_out
from zinfer.engine.state import ModelState, by_layer
from zinfer.engine.stream import packed
from zinfer.engine.stream.interleave import interleave
from zinfer.engine.stream.kv import CpuCache, HostCache, HostMemory, LinkCache, Sender, SplitLayer
from zinfer.engine.stream.packed_layer import PackedLayer, pack, plain
from zinfer.engine.stream.prefetch import PrefetchRing
from zinfer.engine.stream.triton_check import trouble
from zinfer.plan.plan import (
    CAUTIOUS,
    CODECS,
    DEQUANTIZED_BYTES,
    KV_ATTENTIONS,
    KV_CACHE_DTYPES,
    KV_OFFLOADS,
    LOSSLESS_RATIO,
    RING_DEPTH,
    is_lossless,
    pieces_of,
    placement_of,
    resident_bytes,
    split_free_memory,
)
from zinfer.record.measurement import Effective, Span
from zinfer.spec.case import Option, Workload
from zinfer.spec.source import revision_of

CHOICES = {
    "weight_codec": CODECS,
    "kv_offload": KV_OFFLOADS,
    "kv_attention": KV_ATTENTIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}


class Stream(Decoder):
    """All weights on the device (offload `none`), or the decoder layers streamed to it from host memory (`cpu`)."""

    _arena: PinnedArena | None = None
    _ring: PrefetchRing | None = None
    _kv_memory: HostMemory | None = None  # kept for the next batch: page-locking takes long
    _host: HostCache | None = None  # of the running batch
    _kv_rows, _kv_place = 0, "gpu"  # of the last batch: sequences with their KV cache in host memory, where it is used
    _kv_threads = 0  # and how many threads of the CPU attend to it
    _streamed_per_step = _fetched_per_step = 0

    def _load(self) -> None:
        plan = self.plan
        for option, choices in CHOICES.items():
            if self.options[option] not in choices:
                raise EngineError(f"{option}={self.options[option]}: choose from {', '.join(choices)}")
        asked = self.options["kv_threads"]
        if asked != "auto" and not (isinstance(asked, int) and asked > 0):
            raise EngineError(f"kv_threads={asked}: auto, or how many of the CPU attend to the KV cache")
        eight_bits = self.options["kv_offload"] != "none" and self.options["kv_cache_dtype"] in STORAGE
        if eight_bits and (self.options["kv_cache_dtype"] != "int8" or self.options["kv_attention"] == "gpu"):
            raise EngineError("of a KV cache in host memory, 8 bits are int8 and attended to by the CPU")
        if plan.case.offload == "none" and self.options["kv_attention"] == "gpu":
            raise EngineError("kv_attention=gpu brings the cache along with streamed weights: it needs offload cpu")
        self._threads = torch.get_num_threads()
        self._sender = Sender(self.device)
        self._weights = state = ModelState(plan.model, plan.case.load_format)
        self.model, self._layers = state.model, state.layers
        self._inspect()
        for option, any_model in {"kv_offload": ("none", "auto"), "kv_cache_dtype": ("auto", "bf16")}.items():
            if self.options[option] not in any_model and (why_not := self._cannot_have(option)) is not None:
                raise EngineError(why_not)
        streamed = plan.case.offload == "cpu"
        self._lossless = streamed and is_lossless(plan.case, plan.machine)
        if self._lossless and self.device.type == "cuda" and (why := trouble()):
            raise EngineError(
                f"coded weights are unpacked by a Triton kernel, and none runs here: {why}; install a C compiler (gcc) "
                "and Python's headers (python3-dev), or take --weight-codec none, at two thirds of the speed"
            )
        resident = {
            name: torch.empty_like(entry.tensor, device=self.device)
            for name, entry in (state.outside if streamed else state.entries).items()
        }
        if streamed:
            images = self._coded_images(resident) if self._lossless else self._plain_images(resident)
            assert self._arena is not None
            self._ring = PrefetchRing(self._arena.memory, images, self._least_depth, self.device)
            for number, layer in enumerate(self._layers):
                self._ring.attach(number, layer, state.of_layer(number))
            self._ring.start()
        else:
            for name, tensor in state.load(self.device, self.progress):
                resident[name].copy_(tensor)
        for name, tensor in resident.items():
            state.entries[name].put(tensor)
        self._resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self._ready()

    def _plain_images(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Fill an arena with the layers as they are, and `resident`, by name, with what lies outside them."""
        images: list[PackedLayer] = []
        for number in range(len(self._layers)):
            images.append(plain(self._layout(number), images[-1].end if images else 0))
        self._arena = PinnedArena(images[-1].end, pin=self.device.type == "cuda", progress=self.progress)
        views = [self._arena.views(image.blocks, image.start) for image in images]
        for index, group in by_layer(self._weights, self._weights.load(self.device, self.progress)):
            target = resident if index is None else views[index]
            for name, tensor in group:
                target[name].copy_(tensor)
        return images

    def _layout(self, index: int) -> list[tuple[str, Tensor]]:
        """The entries of a layer: names within it, and tensors that tell shape and type."""
        return [(name, entry.tensor) for name, entry in self._weights.of_layer(index).items()]

    def _coded_images(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Fill an arena with packed layers, from their folder if there is one, and `resident` as `_plain_images`."""
        raw = sum(lay_out(self._layout(index))[1] for index in range(len(self._layers)))
        self._arena = PinnedArena(raw, pin=self.device.type == "cuda", grow=True)
        folder = self._packed()
        images: dict[int, PackedLayer] = {}
        if folder is None:
            check_free(round(raw * LOSSLESS_RATIO))
        else:
            images = dict(enumerate(packed.load(folder, self._weights, self._arena, self.progress)))
        loaded = self._weights.load(self.device, self.progress, layers=folder is None)
        for index, group in by_layer(self._weights, loaded):
            if index is None:
                for name, tensor in group:
                    resident[name].copy_(tensor)
            else:
                # Loans become copies; on the device, where coding is fast.
                tensors = {name: tensor.to(self.device, copy=True) for name, tensor in group}
                if index in images or tensors.keys() != self._weights.of_layer(index).keys():
                    raise EngineError(f"layer {index} is not stored in one piece: use weight_codec=none")
                images[index] = pack(tensors, self._arena)
        self._arena.seal()
        return [images[index] for index in range(len(self._layers))]

    def _packed(self) -> Path | None:
        """The folder of the checkpoint's packed layers, if there is one."""
        spec, load_format = self.plan.model, self.plan.case.load_format
        if load_format == "dummy":
            return None
        return packed.find(spec, revision_of(spec, load_format), str(self.options["packed"]))

    @property
    def _least_depth(self) -> int:
        asked = self.options["ring_depth"]
        return RING_DEPTH if asked == "auto" else int(asked)

    def cannot_keep(self) -> str | None:
        able = {"kv_offload": ("none",), "kv_cache_dtype": ("auto", "bf16")}
        for option, values in able.items():
            if self.options[option] not in values:
                return f"a KV cache with {option}={self.options[option]} is not kept"
        return super().cannot_keep()

    def prefill(
        self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0, past: Sequence[KVSnapshot] = ()
    ) -> Tensor:
        if self._ring is not None:
            self.release()
            self._ring.rewind()
            self._share_out(self._ring, token_ids.shape[0], token_ids.shape[1], reserve)
        return super().prefill(token_ids, attention_mask, reserve, past)

    def _share_out(self, ring: PrefetchRing, batch_size: int, input_len: int, output_len: int) -> None:
        """Give the GPU memory that the batch leaves free to the ring, up to a layer of buffers, and to layers that stay
        as the case says: spread evenly through the depth, so that the link never idles."""
        load = Workload(batch_size=batch_size, input_len=input_len, output_len=max(1, output_len))
        case = self.plan.case.model_copy(update={"workload": load})
        buffers, automatic = split_free_memory(case, self.plan.model, self.plan.machine, CAUTIOUS)
        if self.options["ring_depth"] != "auto":
            buffers = self._least_depth
        elif buffers >= pieces_of(self.plan.model):  # a layer, whose tensors are cut one by one
            buffers = max(buffers, *(len(image.pieces) for image in ring.images))
        sizes = [sum(block.size for block in image.blocks.values()) for image in ring.images]
        layers, raw = len(sizes), sum(sizes)
        resident = resident_bytes(case.gpu_weights, raw, automatic)
        share = case.gpu_weights is not None and case.gpu_weights.endswith("%")
        count = round(resident / raw * layers) if share else resident * layers // raw
        stay = _spread(count, layers)
        while not share and sum(sizes[index] for index in stay) > resident:  # layers need not be equal
            count -= 1
            stay = _spread(count, layers)
        ring.resize(min(buffers, ring.depth))  # what shrinks goes first
        ring.keep(stay)
        ring.resize(buffers)

    def _make_cache(self, batch_size: int, length: int, capacity: int) -> Cache | None:
        self._host = None
        storage = str(self.options["kv_cache_dtype"])
        load = Workload(batch_size=batch_size, input_len=length, output_len=max(1, capacity - length))
        case = self.plan.case.model_copy(update={"workload": load})
        setup = placement_of(case, self.plan.model, self.plan.machine, factors=CAUTIOUS)
        rows, on_cpu = round(setup.kv_host_share * batch_size), setup.kv_on_cpu
        self._all_threads()
        self._kv_rows, self._kv_place, self._kv_threads = 0, "gpu", 0
        here = batch_size - rows
        cache = None if self._own_cache else make_cache(self.model.config, batch_size, capacity, storage, here)
        if not isinstance(cache, RowCache) and rows:
            raise EngineError(f"{rows} of {batch_size} rows need host memory: {self._cannot_have('kv_offload')}")
        if rows and isinstance(cache, RowCache) and cache.attention:
            self._host = self._in_host_memory(cache, slice(here, batch_size), on_cpu, length, capacity)
            self._kv_rows, self._kv_place = rows, self._host.place
            if isinstance(self._host, CpuCache):
                asked = self.options["kv_threads"]
                automatic = max(1, round(setup.kv_cpu_share * self._threads))
                self._kv_threads = automatic if asked == "auto" else int(asked)
                # For all that the CPU computes: where teams of two sizes take turns, threads end and begin at every
                # turn.
                torch.set_num_threads(self._kv_threads)
        if self._ring is not None:
            self._ring.start()
        return cache

    def _in_host_memory(self, cache: RowCache, rows: slice, on_cpu: bool, length: int, capacity: int) -> HostCache:
        """Have `cache` keep the keys and values of `rows`, its last ones, in host memory."""
        on_cpu = on_cpu or self._ring is None
        if self._kv_memory is not None and self._kv_memory.spread != on_cpu:
            self._close_kv()
        if self._kv_memory is None:
            self._kv_memory = HostMemory(self.device.type == "cuda", on_cpu, self.progress)
        attention = cache.attention
        windows = {index: one.slots.window for index, one in attention.items() if one.slots.window is not None}
        host: HostCache
        if on_cpu or self._ring is None:
            in_8_bits = self.options["kv_cache_dtype"] in STORAGE
            host = CpuCache(self._kv_memory, self._sender, rows, capacity, self.device, in_8_bits, windows)
        else:
            parts, shared = self._split(rows, length), shares_keys(self.model.config)
            host = LinkCache(self._kv_memory, self._sender, self._ring, parts, capacity, windows, shared)
        for index, here in attention.items():
            cache.put(index, SplitLayer(index, here, host))
        return host

    def _cannot_have(self, option: str) -> str | None:
        """Why the model's cache cannot be as `option` says; None where it can."""
        name, config = self.plan.model.name, self.model.config
        if self._own_cache:
            kept = "a state of its own kind"
        elif not isinstance(trial := make_cache(config, 1, 1), RowCache):
            others = ", ".join(sorted(other_layers(trial)))
            kept = f"more than keys and values ({others})" if others else "fewer keys and values than there are layers"
        elif not trial.attention:
            kept = "a state of fixed size, and no keys and values"
        elif option == "kv_offload" and len(trial.layers) != len(self._layers):
            kept = "keys and values of several passes of a token through them"
        else:
            return None
        return f"the layers of {name} keep {kept}: {option}={self.options[option]} is not for them"

    def _rows_at_once(self, cache: RowCache, here: int) -> int:
        """How many of the `here` rows on the GPU decode together: all, unless their keys come in 8 bits."""
        layers = [getattr(layer, "here", layer) for layer in cache.attention.values()]
        size = max((layer.dequantized_bytes for layer in layers if isinstance(layer, QuantizedLayer)), default=0)
        return max(1, DEQUANTIZED_BYTES // size) if size else here

    def _parts(self, batch_size: int, length: int) -> list[slice]:
        host, cache = self._host, self._cache
        here = host.rows.start if host is not None else batch_size
        parts = super()._parts(here, length) if here else []
        decoding = length == 1 and self._length > 1  # a prompt of one token is a prompt
        if decoding and isinstance(cache, RowCache) and here > (step := self._rows_at_once(cache, here)):
            parts = [slice(start, min(start + step, here)) for start in range(0, here, step)]
        if host is None:
            return parts
        if decoding:
            return [*parts, *host.parts]
        # What leaves for the host does so in whole rows, with room for all that is to come: not many at a time.
        whole = max(length, host.capacity // 4) if isinstance(host, CpuCache) else length
        return [*parts, *self._split(host.rows, whole)]

    def _in_parts(self, parts: list[slice], length: int, work: Callable[[slice], Tensor]) -> list[Tensor]:
        ring, cache = self._ring, self._cache
        if ring is None or not isinstance(cache, RowCache) or (len(parts) == 1 and self._host is None):
            return super()._in_parts(parts, length, work)
        if len(cache.layers) != len(self._layers) and self._host is None:  # a token goes through some layers repeatedly
            return super()._in_parts(parts, length, work)

        def enter(part: int, layer: int) -> None:
            cache.window(parts[part], length, layer)

        def one(rows: slice) -> Callable[[], Tensor]:
            def run() -> Tensor:
                self._show(rows, length)
                return work(rows)

            return run

        return interleave(ring, [one(rows) for rows in parts], enter)

    def decode(self, token_ids: Tensor) -> Tensor:
        ring = self._ring
        if ring is None:
            return super().decode(token_ids)
        if isinstance(self._host, LinkCache) and not self._host.started:
            self._host.start()
        weights, others = ring.bytes_copied, ring.other_bytes_copied
        logits = super().decode(token_ids)
        self._streamed_per_step = ring.bytes_copied - weights
        self._fetched_per_step = ring.other_bytes_copied - others
        return logits

    def timeline(self, token_ids: Tensor) -> tuple[Span, ...]:
        if self._ring is None:
            return ()
        with self._ring.watched() as trace:
            self.decode(token_ids)
            return trace.spans()

    def _delivered(self) -> int:
        """Weight bytes that a step found in the slot, which were fewer on the wire if they were coded."""
        if self._ring is None or not self._streamed_per_step or not self._lossless:
            return self._streamed_per_step
        layers = [self._ring.images[index] for index in self._ring.streamed]
        return sum(block.size for image in layers for block in image.blocks.values())

    def effective(self) -> Effective:
        cache: dict[str, Option] = {
            "kv_offload": str(self.options["kv_offload"]),
            "kv_cache_dtype": str(self.options["kv_cache_dtype"]),
            "kv_attention": self._kv_place,
            "kv_host_rows": self._kv_rows,
            "kv_threads": self._kv_threads,
            "kv_bytes_per_step": self._fetched_per_step,
            "attention": str(self.model.config._attn_implementation),
        }
        if self._ring is None or self._arena is None:
            return Effective(gpu_weight_bytes=self._resident_bytes, settings=cache)
        return Effective(
            gpu_weight_bytes=self._resident_bytes + self._ring.kept_bytes,
            host_weight_bytes=self._arena.size,
            streamed_bytes_per_step=self._delivered(),
            wire_bytes_per_step=self._streamed_per_step,
            pinned_bytes=self._arena.size if self._arena.pinned else 0,
            settings={
                "ring_depth": self._ring.depth,
                "buffer_bytes": self._ring.buffer_bytes,
                "slot_bytes": self._ring.slot_bytes,
                "weight_codec": "lossless" if self._lossless else "none",
                "numa_node": self._arena.numa_node,
                "resident_layers": len(self._layers) - len(self._ring.streamed),
                **cache,
            },
        )

    def release(self) -> None:
        super().release()
        if self._host is not None:
            self._sender.finish()
        self._host = None
        self._all_threads()

    def _all_threads(self) -> None:
        if self._kv_threads:
            torch.set_num_threads(self._threads)

    def _close_kv(self) -> None:
        if self._kv_memory is not None:
            self._kv_memory.close()
            self._kv_memory = None

    def close(self) -> None:
        self.release()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._layers = nn.ModuleList()
        self.__dict__.pop("_weights", None)
        super().close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._close_kv()


def _spread(count: int, layers: int) -> list[int]:
    """The numbers of `count` layers, spread evenly over all `layers`."""
    return [index for index in range(layers) if (index + 1) * count // layers > index * count // layers]
