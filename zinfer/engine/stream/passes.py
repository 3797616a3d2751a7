"""Passes of the `stream` engine: which rows share a forward pass, and which forward passes share the weights.

Decode steps of all micro-batches are one forward pass where they can be joined (`zinfer.engine.stream.attention`): one
for rows that the device attends to, whose keys and values are there or come over the link, one for those that the CPU
attends to. Anything else, such as a chunk of prompts, is a forward pass of its own. All of them share one pass of the
weights (`interleave`): each is a coroutine (a greenlet) that stops before every decoder layer, without code for models.
While it stops it holds its hidden states; what a layer needs beyond them exists for one forward pass at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from zinfer.core.engine import MAX_DRAFTS, StreamOptions
from zinfer.engine import EngineError
from zinfer.engine.cache import RowCache
from zinfer.engine.decoder import Decoder, DecoderBatch, Part
from zinfer.engine.stream.attention import JOINED, NAME, Ragged, is_decode, layers_of, split
from zinfer.engine.stream.experts.pool import ExpertPool
from zinfer.engine.stream.graphs import Graphs
from zinfer.engine.stream.kv.cpu import OwnAttentionError
from zinfer.engine.stream.kv.store import HostStore
from zinfer.engine.stream.weights.products import PackedProducts
from zinfer.engine.stream.weights.ring import Fetch, PrefetchRing

MAX_STEP_TOKENS = MAX_DRAFTS + 1  # tokens of a row that a decode step takes at most; more of them are a prompt's
DEQUANTIZED_BYTES = 1 << 30  # bytes of a quantised cache that are in the model's type at a time


class StreamBatch(DecoderBatch):
    """Micro-batch whose last rows may have their KV cache in `host`."""

    host: HostStore | None = None

    @property
    def device_rows(self) -> int:
        """Number of rows with their keys and values on the device; they are the first ones."""
        return self.batch_size if self.host is None else self.host.rows.start

    @property
    def host_rows(self) -> int:
        return self.batch_size - self.device_rows

    @property
    def on_cpu(self) -> bool:
        """True if the CPU attends to the host rows."""
        return self.host is not None and self.host.on_cpu

    def rollback(self, lengths: Tensor) -> None:
        super().rollback(lengths)
        if self.host is not None:
            self.host.rollback(self.length)

    def note_kept(self, rows: Tensor) -> None:
        if self.host is not None:
            kept, on_device = rows.tolist(), self.device_rows
            first = sum(row < on_device for row in kept)
            if first == len(kept):
                self.free_host()
            else:
                self.host.keep_rows(kept[first:], first)
        super().note_kept(rows)

    def free_host(self) -> None:
        """Free the host memory; rows there are gone."""
        if self.host is not None:
            self.host.close()
            self.host = None


class SharedPasses(Decoder[StreamBatch]):
    """Decoder whose works share passes of the weights; a subclass makes its ring, graphs and micro-batches."""

    options: StreamOptions
    _ragged: Ragged
    _graphs: Graphs
    _ring: PrefetchRing | None
    _pool: ExpertPool | None  # of experts that come on demand
    _products: PackedProducts | None = None  # of layers that stay packed on the device
    _layers: nn.ModuleList

    @cached_property
    def one_pass(self) -> bool:
        # Where a token goes through layers repeatedly, or modules hold the state of a batch, each work has a pass.
        return not self._in_modules and len(DynamicCache(config=self.model.config).layers) == len(self._layers)

    @property
    def joins(self) -> bool:
        return bool(self._kinds_of_layers) and self._ragged.able

    @property
    def warming(self) -> bool:
        return self._graphs.checking

    def _rows(self, batch: StreamBatch, count: int) -> list[slice]:
        cache, host, rows = batch.cache, batch.host, batch.device_rows
        if not isinstance(cache, RowCache):
            return super()._rows(batch, count)
        step = batch.length and (count == 1 or (count <= MAX_STEP_TOKENS and batch.length >= batch.prompt_len))
        parts = [slice(0, rows)] if rows and step else self._split(slice(0, rows), count) if rows else []
        if batch.length and rows > (at_once := _rows_at_once(cache, rows)):
            at_once = min(at_once, parts[0].stop)
            parts = [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
        if host is None:
            return parts
        if not host.on_cpu or step:
            return [*parts, *host.parts]
        # Rows go to the host whole, with room for all tokens still to come, so only a few at a time.
        whole = count if batch.length else max(count, host.capacity // 4)
        return [*parts, *self._split(host.rows, whole)]

    def _run(self, parts: Sequence[Part[StreamBatch]]) -> list[Tensor]:
        groups: dict[tuple[object, ...], list[Part[StreamBatch]]] = {}
        for part in parts:
            joins = ("joined", on_cpu(part), part.token_ids.shape[1]) if self._ragged.takes(part) else (id(part),)
            groups.setdefault(joins, []).append(part)
        passes = sorted(groups.values(), key=lambda some: on_cpu(some[0]))
        logits: dict[int, Tensor] = {}
        for some, output in zip(passes, self._run_passes(passes), strict=True):
            logits |= zip(map(id, some), split(some, output), strict=True)
        return [logits[id(part)] for part in parts]

    def _run_passes(self, passes: Sequence[Sequence[Part[StreamBatch]]]) -> list[Tensor]:
        """Run a forward pass for each list of parts, which share it; return their logits."""
        graphs = [(number, self._recordable(parts, len(passes) == 1)) for number, parts in enumerate(passes)]
        results = dict[int, Tensor]()
        for number, by_layer in graphs:
            if by_layer is not None:
                logits = self._record(passes[number], by_layer)
                results[number] = logits if len(passes) == 1 else logits.clone()  # the next graph may use its memory
        others = [number for number in range(len(passes)) if number not in results]
        if others:
            results |= zip(others, self._run_eager([passes[number] for number in others]), strict=True)
        return [results[number] for number in range(len(passes))]

    def _recordable(self, parts: Sequence[Part[StreamBatch]], alone: bool) -> bool | None:
        """Tell whether each layer of a decode step has its own graph. Else all has one; None if none can be recorded. A
        step whose weights cross the link must be `alone` in its pass of them."""
        count, ring = parts[0].token_ids.shape[1], self._ring
        if not self._graphs.wanted or count > (MAX_STEP_TOKENS if self._graphs.takes_several else 1):
            return None
        if any(part.batch.length < (1 if count == 1 else part.batch.prompt_len) for part in parts):
            return None
        streamed = ring is not None and bool(ring.streamed)
        by_layer = streamed and alone and self.one_pass and all(map(self._ragged.takes, parts))
        pool, tokens = self._pool, sum(part.token_ids.numel() for part in parts)
        brought = pool is not None and not pool.computes(tokens)
        if (brought and not pool.stays(tokens)) or (streamed and (not by_layer or brought)):  # type: ignore[union-attr]
            why_not: str | None = "weights cross the link"
        elif any(batch.host_rows for batch in self.batches):
            why_not = "keys and values are in host memory"
        else:
            why_not = next(filter(None, map(self._graphs.cannot, parts)), None)
        if why_not is not None:
            self._graphs.status = why_not
            return None
        return by_layer

    def _record(self, parts: Sequence[Part[StreamBatch]], by_layer: bool) -> Tensor:
        if not by_layer:
            return self._graphs.forward(parts, partial(self._eager, parts))
        self._begin_pass(parts)
        with self._ring_pass():
            return self._graphs.forward(parts, partial(self._joined, parts), by_layer=True)

    def _eager(self, parts: Sequence[Part[StreamBatch]], _replayed: bool = False) -> Tensor:
        self._begin_pass(parts)
        with self._ring_pass():
            return self._forward_parts(parts)

    def _restart(self, index: int) -> None:
        """Have a layer's weights come anew that its call unpacks."""
        if self._products is not None:
            self._products.restart(index)

    def _ring_pass(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ring is None else self._ring.weight_pass()

    def _run_eager(self, passes: Sequence[Sequence[Part[StreamBatch]]]) -> list[Tensor]:
        """Run passes as `_run_passes` does, without graphs."""
        ring = self._ring
        if ring is None:
            return [self._forward_parts(parts) for parts in passes]
        parts = [part for some in passes for part in some]
        on_host = any(part.batch.host is not None for part in parts)
        if not (self.one_pass or on_host) or (len(passes) == 1 and not on_host):
            return [self._eager(some) for some in passes]
        hosts = [(part, host) for part in parts if (host := part.batch.host) is not None]
        fetches = [host.fetch(part.rows, part.batch.length, part.token_ids.shape[1]) for part, host in hosts]
        self._begin_pass(parts)

        def enter(number: int, layer: int) -> None:
            self._ragged.switch(self._attention_of(passes[number]))
            for batch, rows, *_ in passes[number]:
                if isinstance(batch.cache, RowCache):
                    batch.cache.window(rows, batch.length, layer)

        runs = [partial(self._forward_parts, some) for some in passes]
        try:
            return interleave(ring, runs, enter, [fetch for fetch in fetches if fetch is not None])
        finally:
            self._ragged.switch(None)

    def _begin_pass(self, parts: Sequence[Part[StreamBatch]]) -> None:
        """Have experts come as the number of the pass's tokens demands."""
        if self._pool is not None:
            tokens = sum(part.token_ids.numel() for part in parts)
            self._pool.begin(tokens >= self.plan.placement.whole_tokens, self._pool.computes(tokens))

    def _attention_of(self, parts: Sequence[Part[StreamBatch]]) -> str | None:
        """Return the name of the attention function for a pass; None is the model's own. A part alone is joined if that
        saves its mask, to which ALiBi is added once then, not in each layer, or copies of keys for heads with sinks."""
        first, ragged = parts[0], self._ragged
        if len(parts) > 1 or ((on_cpu(first) or ragged.alibi is not None or ragged.sinks) and ragged.takes(first)):
            return JOINED
        batch = first.batch
        return NAME if batch.on_cpu and batch.length and first.rows.start >= batch.device_rows else None

    def _forward_parts(self, parts: Sequence[Part[StreamBatch]]) -> Tensor:
        """Run one forward pass of parts that share it, or of one; return its logits ``[B, keep, V]``."""
        name = self._attention_of(parts)
        self._ragged.switch(name)
        if name == NAME:
            return self._on_host(parts[0])
        if name is None:
            return self._alone(parts[0])
        return self._joined(parts)

    def _on_host(self, part: Part[StreamBatch]) -> Tensor:
        """Run a part whose past the CPU attends to. The model makes its masks."""
        why_not = "it attends to other keys than those of its cache"
        try:
            logits = self._alone(part)
        except OwnAttentionError as error:
            why_not = str(error)
        else:
            cache = part.batch.cache
            if isinstance(cache, RowCache) and not any(layer.unattended for layer in cache.attention.values()):
                return logits
        name = self.plan.model.name
        raise EngineError(f"the CPU cannot attend for {name}: {why_not}; take kv_offload=none or kv_attention=gpu")

    def _joined(self, parts: Sequence[Part[StreamBatch]], replayed: bool = False) -> Tensor:
        """Run one pass, a decode step of `parts` with equal token counts; return its logits ``[B, n, V]``. If its
        layers are `replayed`, they do not attend to the caches."""
        for part in parts:
            part.batch.show(part.rows)
        caches, rows = [layers_of(part) for part in parts], [len(part.token_ids) for part in parts]
        biases = [None if replayed else self._ragged.bias_of(part, self.model.dtype) for part in parts]
        with self._ragged.cache(caches, rows, biases, on_cpu=on_cpu(parts[0]), whole=not replayed) as cache:
            positions = torch.cat([part.positions for part in parts])
            return self._ragged.run(torch.cat([part.token_ids for part in parts]), positions, parts[0].keep, cache)


def interleave(
    ring: PrefetchRing,
    passes: Sequence[Callable[[], Tensor]],
    enter: Callable[[int, int], None],
    fetches: Sequence[Fetch] = (),
) -> list[Tensor]:
    """Run several forward passes in one pass of the weights. `enter` gets the number of a forward pass and of the layer
    that it is about to compute. `fetches` are the transfers besides weights, in the order in which the forward passes
    borrow them. An exception of one forward pass ends all."""
    outputs: dict[int, Tensor] = {}

    def run(number: int) -> None:
        outputs[number] = passes[number]()

    workers = [greenlet(partial(run, number)) for number in range(len(passes))]
    numbers = {worker: number for number, worker in enumerate(workers)}

    def turn(layer: int) -> None:
        current = getcurrent()
        current.parent.switch()
        enter(numbers[current], layer)

    with ring.weight_pass(len(passes), turn, fetches):
        try:
            while len(outputs) < len(passes):
                for worker in workers:
                    worker.switch()  # up to its next layer, or to its end
        finally:
            for worker in workers:
                if worker:  # begun and not finished: free its tensors now
                    worker.throw()
    return [outputs[number] for number in range(len(passes))]


def on_cpu(part: Part[StreamBatch]) -> bool:
    """Tell whether the CPU attends to a part, a decode step."""
    host = part.batch.host
    return host is not None and host.on_cpu and is_decode(part) and part.rows == host.rows


def _rows_at_once(cache: RowCache, rows: int) -> int:
    """Return how many of `rows` on the GPU are attended to together: all, unless their keys are in 8 bits."""
    size = max((layer.dequantized_bytes for layer in cache.attention.values()), default=0)
    return max(1, DEQUANTIZED_BYTES // size) if size else rows
