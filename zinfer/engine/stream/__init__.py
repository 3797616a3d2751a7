"""The `stream` engine: weights in pinned host memory, one layer of them on the GPU, a link that never waits.

Decode reads every layer once a step and a layer's copy takes far longer than its compute, so the step time is the bytes
on the wire over the link bandwidth, provided that a copy is always under way. The ring runs ahead of compute across
layers and across steps: while the head turns the last layer's output into a token, the next step's first layer comes.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from zinfer.core.case import Option, Workload
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import MicroBatch, Work, is_step
from zinfer.engine.cache import (
    STORAGE,
    DequantizeKV,
    RowCache,
    dequantize_kv,
    make_cache,
    other_layers,
    shares_keys,
)
from zinfer.engine.decoder import MovedRows
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.state import ModelState
from zinfer.engine.stream import graphs
from zinfer.engine.stream.attention import Ragged
from zinfer.engine.stream.experts.few_experts import FewExperts
from zinfer.engine.stream.experts.modules import find_experts
from zinfer.engine.stream.experts.pool import ExpertCounts, ExpertPool
from zinfer.engine.stream.feed_forward import split_by_tokens
from zinfer.engine.stream.graphs import Graphs
from zinfer.engine.stream.headroom import MemoryHeadroom, prefetch_distance
from zinfer.engine.stream.kv.cpu import CpuStore
from zinfer.engine.stream.kv.cpu_kernel import library
from zinfer.engine.stream.kv.link import LinkStore
from zinfer.engine.stream.kv.pool import HostCopier, HostMemory, HostPool
from zinfer.engine.stream.kv.store import HostStore, SplitLayer
from zinfer.engine.stream.passes import SharedPasses, StreamBatch
from zinfer.engine.stream.weights.load import Loader
from zinfer.engine.stream.weights.pack import copy_into
from zinfer.engine.stream.weights.packed_experts import Experts
from zinfer.engine.stream.weights.products import PackedProducts
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource, WeightSource
from zinfer.engine.triton_check import cannot_run, trouble
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective, Span
from zinfer.system.host import attending_cpus

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

FIRST_STEPS = 8  # of a model that drafts, before its passes are recorded: a wrong kernel is given up earlier


class Stream(SharedPasses):
    """Engine `stream`: all weights on the device (offload `none`), or the decoder layers streamed to it from host
    memory (`cpu`), or from files (`nvme`), of which host memory keeps as many as fit."""

    several: ClassVar[str] = "zinfer.engine.stream.team:StreamTeam"

    def __init__(self, plan: Plan, progress: Progress = silent, group: "Group | None" = None) -> None:
        self._group = group
        self.given: Placement | None = None  # placement of the work of all ranks together, if this is one of several
        self._source: WeightSource | None = None  # of the layers that are not on the device
        self._folder_bytes: int | None = None  # read from a folder of packed layers, if there is one
        self._ring: PrefetchRing | None = None
        self._products: PackedProducts | None = None  # of layers that stay packed on the device
        self._pool: ExpertPool | None = None  # of experts that come on demand
        self._kv_pool: HostPool | None = None  # for keys and values of all micro-batches
        self._streamed_per_step = self._fetched_per_step = self._read_per_step = 0
        self._reset_kv_use()
        super().__init__(plan, progress)

    def _load(self) -> None:
        plan = self.plan
        self._threads = torch.get_num_threads()
        self._copier, self._headroom = HostCopier(self.device), MemoryHeadroom(self.device)
        state = ModelState(plan.model, plan.case.load_format, allow_nan=plan.case.allow_nan)
        self.model, self._layers = state.model, state.layers
        split_by_tokens(self._layers, plan.placement.pass_tokens)
        self._inspect()
        self._ragged = Ragged(self.model, self._layers, self._accepted, self.device)
        self._ragged.able = self._ragged.able and not self._counts_padding
        recorded = self.options.cuda_graphs == "auto" and self._group is None
        recorder = graphs.recorder_of(self.device) if recorded else None
        routed, inputs = plan.model.num_experts > 1, (self._cache_name, self._accepted)
        self._graphs = Graphs(self.model, list(self._layers), routed, self._ragged, inputs, recorder, self._ring_pass)
        self._few_experts = FewExperts(self.model, self.device) if self.options.experts_kernel == "auto" else None
        self._widen = _widen_on(self.device) if self.options.kv_cache_dtype in STORAGE else dequantize_kv
        for option, any_model in {"kv_offload": ("none", "auto"), "kv_cache_dtype": ("auto", "bf16")}.items():
            if getattr(self.options, option) not in any_model and (why_not := self._cannot_have(option)) is not None:
                raise EngineError(why_not)
        if self.options.kv_offload == "auto" and self._cannot_have("kv_offload") is not None:
            self.plan = plan = self.planner.with_option("kv_offload", "none").plan
        if self.options.draft != "none" and (why_not := self.cannot_draft()) is not None:
            raise EngineError(why_not)
        self._load_draft()
        streamed = plan.placement.tier != "gpu"
        self._experts = self._on_demand(state)
        # Counts of experts of the latest decode steps since nothing ran: a step differs from the next one.
        self._expert_steps: deque[ExpertCounts] = deque(maxlen=256)
        if plan.placement.codec == "lossless" and self.device.type == "cuda" and (why := trouble()):
            raise EngineError(
                f"coded weights are unpacked by a Triton kernel, and none runs here: {why}; install a C compiler (gcc) "
                "and Python's headers (python3-dev), or take --weight-codec none, at two thirds of the speed"
            )
        resident = {
            name: torch.empty_like(entry.tensor, device=self.device)
            for name, entry in (state.outside if streamed else state.entries).items()
        }
        if streamed:
            if self._group is not None:
                self._check_layerwise(self._group)
            loader = Loader(self.plan, self.options, state, self._experts, self.device, self.progress, self._group)
            self._source, self._ring, self._folder_bytes = loader.load(resident)
            self._attach(self._source, self._ring, state)
        else:
            copy_into(resident, state.load(self.device, self.progress))
        for name, tensor in resident.items():
            state.entries[name].put(tensor)
        self._resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self._ready(self._layers[0])

    def _attach(self, source: WeightSource, ring: PrefetchRing, state: ModelState) -> None:
        """Connect layers and on-demand experts to the ring, and start it."""
        if self.plan.placement.codec == "lossless" and self._group is None:
            self._products = PackedProducts(self.device)
        attach = ring.attach if self._products is None else partial(self._products.attach, ring)
        for number, layer in enumerate(self._layers):
            attach(number, layer, state.of_layer(number))
        if source.experts and isinstance(source, MemorySource):
            self._pool = ExpertPool(source, self.device, ring)
            for number, experts in self._experts.items():
                self._pool.attach(number, experts)
        if self._group is None:
            ring.start()

    def _check_layerwise(self, group: "Group") -> None:
        """Raise EngineError for a model that cannot run layer by layer."""
        trial = None if self._own_cache else make_cache(self.model.config, 1, 1)
        if not isinstance(trial, RowCache) or len(trial.layers) != len(self._layers):
            name = self.plan.model.name
            raise EngineError(f"gpus={group.size} is not for {name}: its layers keep their cache whole")

    def _load_draft(self) -> None:
        """Load the draft model on the first device. Raises EngineError for a model that cannot draft."""
        name, plan = self.options.draft_model, self.planner.draft(self.plan.case.workload)
        if name is None or (self._group is not None and self._group.rank):
            return
        if plan is None:
            raise EngineError(f"draft={name}: a model drafts for run, batch, serve and loads of requests alone")
        self.draft = Stream(plan, self.progress)
        self.draft._graphs.wait = FIRST_STEPS
        if (
            why_not := self.draft.cannot_draft() or self.draft.cannot_move_rows() or self.draft.equal_lengths()
        ) is not None:
            raise EngineError(f"draft={name}: {why_not}")

    def _on_demand(self, state: ModelState) -> dict[int, Experts]:
        """Return the routed experts that come on demand, by layer. With option ``auto`` there are none where they
        cannot, and the plan is made anew. Raises EngineError if they were asked for."""
        asked = self.options.experts == "on-demand"
        if self.plan.placement.experts == "all" and not asked:
            return {}
        layers = {index: find_experts(layer, state.of_layer(index)) for index, layer in enumerate(self._layers)}
        reasons = [reason for reason in layers.values() if isinstance(reason, str)]
        if not any(layers.values()) and not self.plan.model.num_experts:
            reasons = ["it has none"]
        elif not any(layers.values()):
            reasons = ["they do not go through the ExpertsInterface of transformers"]
        if reasons and asked:
            name = self.plan.model.name
            raise EngineError(f"the experts of {name} cannot come on demand: {reasons[0]}; take experts=all")
        if reasons:
            self.plan = self.planner.with_option("experts", "all").plan
            return {}
        return {index: experts for index, experts in layers.items() if isinstance(experts, Experts)}

    @property
    def loaded_bytes(self) -> int:
        return super().loaded_bytes if self._folder_bytes is None else self._folder_bytes

    def cannot_snapshot(self) -> str | None:
        load, storage = self.expected or self.plan.case.workload, self.options.kv_cache_dtype
        if self.options.kv_offload == "cpu" or self._placement(load).host_rows(load.batch_size):
            return f"a KV cache with kv_offload={self.options.kv_offload} is not kept"
        if storage not in ("auto", "bf16"):
            return f"a KV cache with kv_cache_dtype={storage} is not kept"
        return super().cannot_snapshot()

    def _make_batch(self, mask: Tensor, capacity: int, moved: Sequence[tuple[StreamBatch, Tensor]] = ()) -> StreamBatch:
        rows, length = mask.shape
        if not self.batches:
            self._expert_steps.clear()
            if self.expected is None:
                self._reset_kv_use()
        load = self.expected or together(self.batches, rows, length, capacity)
        placement = self._placement(load)
        self._graphs.make_room(rows, capacity)
        if self._ring is not None:
            self._share_out(self._ring, placement)
        on_host = self._host_rows(rows, capacity, load, placement, moved)
        on_device, storage = rows - on_host, self.options.kv_cache_dtype
        cache = None
        if not self._own_cache:
            cache = make_cache(self.model.config, rows, capacity, storage, on_device, self._widen)
        batch = StreamBatch(mask, capacity, cache, self._state_of(cache))
        if on_host and (why_not := self._cannot_have("kv_offload")) is not None:
            raise EngineError(f"{on_host} of {rows} rows need host memory: {why_not}")
        self._graphs.reuse_memory(batch)
        if on_host and isinstance(cache, RowCache) and cache.attention:
            self._to_host_memory(batch, cache, slice(on_device, rows), placement, load)
            assert batch.host is not None
            self._kv_device = batch.host.attends_on
            if batch.on_cpu:
                self._kv_threads = max(1, round(placement.kv_cpu_share * attending_cpus(self._threads)))
                # The number holds for all work of the CPU: teams of two sizes in turn end and start threads each time.
                torch.set_num_threads(self._kv_threads)
        if self._ring is not None and self._group is None:  # the ranks of a group begin together, with a pass
            self._ring.start()
        return batch

    def _host_rows(
        self,
        rows: int,
        capacity: int,
        load: Workload,
        placement: Placement,
        moved: Sequence[tuple[StreamBatch, Tensor]],
    ) -> int:
        """Return how many of `rows` become host rows. Each has room for `capacity` tokens; `moved` rows leave room."""
        if self.expected is None:
            missing: int = placement.host_rows(load.batch_size) - sum(batch.host_rows for batch in self.batches)
            return min(rows, max(0, missing))
        room = (load.batch_size - placement.host_rows(load.batch_size)) * load.total_len
        if room == load.batch_size * load.total_len:
            return 0
        used: int = sum(batch.device_rows * batch.capacity for batch in self.batches)
        for batch, indices in moved:
            used -= int((indices < batch.device_rows).sum()) * batch.capacity
        on_device: int = min(rows, max(0, room + self._headroom.positions - used) // capacity)
        if on_device < rows and self._group is None:
            each = self.plan.model.kv_bytes(1, capacity) * placement.kv_ratio / capacity
            promised = sum(batch.device_rows * batch.capacity for batch in self.batches if not batch.length)
            promised += on_device * capacity
            more = self._headroom.rows(rows - on_device, round(each * capacity), round(each * promised))
            on_device += more
            if more:
                self._headroom.positions = max(self._headroom.positions, used + on_device * capacity - room)
        return rows - on_device

    def _placement(self, load: Workload) -> Placement:
        """Return the placement for `load`, or the one given for all ranks."""
        return self.given or self.planner.placement(load)

    @property
    def _on_disk(self) -> bool:
        return self._source is not None and self._source.file_bytes > 0

    def _holds_two_layers(self, ring: PrefetchRing) -> bool:
        """Tell whether the GPU has room for a ring of two layers. Between passes of requests rows move, and the link
        goes on meanwhile.
        """
        load = self.expected
        if load is None or self.given is not None or self._on_disk:
            return False
        if self.planner.placement(load).host_rows(load.batch_size):  # what else crosses the link is guessed
            return False
        room = self.plan.machine.device_bytes - self.planner.tiers(load).gpu.total
        return room > self.plan.model.layer_bytes

    def _share_out(self, ring: PrefetchRing, placement: Placement) -> None:
        """Allocate the ring's buffers and put layers on the GPU, by `placement`."""
        buffers = max(placement.ring_depth, self._headroom.ring_depth)
        if buffers >= placement.layer_chunks:  # room for a whole layer, whose tensors are cut one by one
            # With experts on demand the next layer is there when its turn comes.
            layers = 2 if self._pool is not None or self._holds_two_layers(ring) else 1
            staging = 0 if self._group is None else max(0, placement.ring_depth - placement.layer_chunks)
            buffers = max(buffers, *(layers * len(packed.chunks) + staging for packed in ring.layers))
        pool, experts = self._pool, (placement.expert_buffers, placement.cached_experts)
        ring.resize(min(buffers, ring.depth))  # shrink before anything grows
        unpacked = frozenset(index for index in placement.unpacked_layers if ring.layers[index].coded)
        stay = frozenset(placement.resident_layers), unpacked
        moved = stay != (frozenset(range(len(ring.layers))).difference(ring.streamed), ring.unpacked)
        if moved or (pool is not None and experts != (pool.staging, pool.cached)):
            self._graphs.clear()
        if pool is not None:
            pool.resize(min(experts[0], pool.staging), min(experts[1], pool.cached))
        ring.keep(*stay)
        ring.hold(placement.host_layers, self.progress)
        ring.resize(buffers)
        if pool is not None:
            pool.resize(*experts)

    def _to_host_memory(
        self, batch: StreamBatch, cache: RowCache, rows: slice, placement: Placement, load: Workload
    ) -> None:
        """Move the KV cache of `batch`'s last `rows` to host memory."""
        on_cpu = placement.kv_on_cpu or self._ring is None
        batch.memory = memory = HostMemory(self._host_pool(placement, load))
        attention = cache.attention
        windows = {index: layer.slots.window for index, layer in attention.items() if layer.slots.window is not None}
        host: HostStore
        if on_cpu or self._ring is None:
            in_8_bits = self.options.kv_cache_dtype in STORAGE
            host = CpuStore(memory, self._copier, rows, batch.capacity, in_8_bits, windows)
        else:
            parts, shared = self._split(rows, batch.prompt_len), shares_keys(self.model.config)
            host = LinkStore(memory, self._copier, self._ring, parts, batch.capacity, windows, shared)
        for index, on_device in attention.items():
            cache.put(index, SplitLayer(index, on_device, host))
        batch.host = host

    def _host_pool(self, placement: Placement, load: Workload) -> HostPool:
        """Return the host KV pool, with room for `load`."""
        on_cpu = placement.kv_on_cpu or self._ring is None
        pool = self._kv_pool
        if pool is None or (pool.spread != on_cpu and pool.unused == pool.size):
            self._close_kv_pool()  # memory made for the other device that attends is of no use
            self._kv_pool = pool = HostPool(self.device.type == "cuda", on_cpu, self.progress)
        model, rows = self.plan.model, placement.host_rows(load.batch_size)
        size = model.kv_bytes(rows, load.total_len) - model.index_bytes(rows, load.total_len)
        pool.reserve(int(size * placement.kv_ratio) + 2 * ALIGNMENT * len(self._layers))
        return pool

    def place(self, placement: Placement) -> None:
        """Place weights and buffers by `placement`. It counts the work of all ranks. Raises torch.OutOfMemoryError."""
        self.given = placement
        if self._ring is not None:
            self._share_out(self._ring, placement)

    def use_threads(self, count: int) -> None:
        """Use no more than `count` threads of the CPU."""
        self._threads = count
        torch.set_num_threads(count)

    def expect(self, load: Workload | None) -> None:
        super().expect(load)
        self._headroom.begin()
        if load is None or self._own_cache:
            return
        self._reset_kv_use()
        placement = self._placement(load)
        with suppress(MemoryError, torch.OutOfMemoryError):  # micro-batches will tell
            if self._ring is not None:
                self._share_out(self._ring, placement)
            if placement.host_rows(load.batch_size):  # what takes seconds is done before any row waits for it
                self._host_pool(placement, load)
                if placement.kv_on_cpu or self._ring is None:
                    library()

    def _reset_kv_use(self) -> None:
        """Start to count anew: most rows at a time with their KV cache in host memory, who attends, CPU threads."""
        self._kv_rows, self._kv_device, self._kv_threads = 0, "gpu", 0

    def _cannot_have(self, option: str) -> str | None:
        """Return the reason why the model's cache cannot be as `option` says; None if it can."""
        name, config = self.plan.model.name, self.model.config
        says = f"{option}={getattr(self.options, option)} is not for"
        if self._own_cache:
            kept = "a state of its own kind"
        elif not isinstance(trial := make_cache(config, 1, 1), RowCache):
            others = ", ".join(sorted(kind.__name__ for kind in other_layers(trial)))
            kept = f"more than keys and values ({others})" if others else "fewer keys and values than there are layers"
        elif not trial.attention:
            kept = "a state of fixed size, and no keys and values"
        elif option == "kv_offload" and len(trial.layers) != len(self._layers):
            kept = "keys and values of several passes of a token through them"
        elif option == "kv_offload" and not (self._ragged.by_name and self.plan.model.attends_by_name):
            return f"{name} computes attention itself, so that its KV cache stays on the GPU: {says} it"
        else:
            return None
        return f"the layers of {name} keep {kept}: {says} them"

    def forward(self, works: Sequence[Work[StreamBatch]]) -> list[Tensor]:
        while True:
            try:
                logits = self.attempt(works)
            except torch.OutOfMemoryError:
                self._headroom.note_shortage()
                raise
            if logits is not None:
                self._headroom.note_pass()
                self._deepen_ring()
                return logits

    def _deepen_ring(self) -> None:
        """Add spare-memory ring buffers, where the CPU attends and some layers stay."""
        ring, headroom = self._ring, self._headroom
        if self.expected is None or headroom.ring_depth or not headroom.known:
            return
        if ring is None or self._on_disk or self._group is not None or self._pool is not None:
            return
        if not any(batch.on_cpu for batch in self.batches):
            return
        layers = prefetch_distance(ring.streamed, len(ring.layers))
        wanted = ceil(layers * max(len(packed.chunks) for packed in ring.layers))
        before = ring.depth
        try:
            ring.resize(headroom.deepen(before, wanted, ring.buffer_bytes))  # the next pass begins anew
        except torch.OutOfMemoryError:
            headroom.note_shortage()
            ring.resize(before)

    @property
    def ring(self) -> PrefetchRing | None:
        """Ring that weights come through; None if they are all on the device."""
        return self._ring

    def _forward(self, works: Sequence[Work[StreamBatch]]) -> list[Tensor]:
        self._kv_rows = max(self._kv_rows, sum(batch.host_rows for batch in self.batches))
        ring = self._ring
        if ring is None:
            return super().forward(works)
        weights, others, from_disk, step = ring.bytes_copied, ring.other_bytes_copied, ring.disk_bytes, is_step(works)
        experts = ExpertCounts() if self._pool is None else self._pool.counts
        logits = super().forward(works)
        if step:
            if self._pool is not None:
                tokens = sum(work.token_ids.numel() for work in works)
                self._expert_steps.append(self._pool.counts_of_step(experts, tokens))
            self._streamed_per_step = ring.bytes_copied - weights
            self._fetched_per_step = ring.other_bytes_copied - others
            self._read_per_step = ring.disk_bytes - from_disk
        return logits

    def rollback(self, batch: StreamBatch, lengths: Tensor) -> None:
        super().rollback(batch, lengths)
        if batch.host is not None:
            batch.host.rollback(batch.length)

    def _keep_rows(self, batch: StreamBatch, kept: Sequence[int]) -> None:
        self._graphs.drop(batch)
        self._keep_host_rows(batch, kept, batch.device_rows)
        super()._keep_rows(batch, kept)

    def _move(self, target: StreamBatch, moved: Sequence[MovedRows[StreamBatch]], length: int) -> None:
        sources = [(batch, batch.others(rows).tolist()) for batch, rows, _ in moved]
        kept = [(batch, rows, batch.device_rows) for batch, rows in sources]
        for batch, *_ in kept:
            self._graphs.drop(batch)
        super()._move(target, moved, length)
        for batch, rows, on_device in kept:
            if rows:
                self._keep_host_rows(batch, rows, on_device)

    def _keep_host_rows(self, batch: StreamBatch, kept: Sequence[int], on_device: int) -> None:
        """Keep rows in host memory; the first `on_device` rows of the micro-batch were on the device."""
        first = sum(row < on_device for row in kept)
        if batch.host is not None and first == len(kept):
            self._free_host(batch)
        elif batch.host is not None:
            batch.host.keep_rows(kept[first:], first)

    def _free(self, batch: StreamBatch) -> None:
        self._free_host(batch)
        self._graphs.retire(batch)
        super()._free(batch)

    def _free_host(self, batch: StreamBatch) -> None:
        """Free the host memory of a micro-batch."""
        if batch.memory is None:
            return
        self._copier.finish()
        if batch.host is not None:
            batch.host.drop_fetches()
        batch.memory.close()
        batch.host = batch.memory = None
        if not any(other.on_cpu for other in self.batches):
            torch.set_num_threads(self._threads)

    def clear(self) -> None:
        super().clear()
        if hasattr(self, "_graphs"):  # a load may fail before
            self._graphs.clear()

    def timeline(self, works: Sequence[Work[StreamBatch]]) -> tuple[Span, ...]:
        if self._ring is None:
            return ()
        self._graphs.paused = True  # a replay shows no layers
        try:
            with self._ring.watched() as trace:
                self.forward(works)
                return trace.spans()
        finally:
            self._graphs.paused = False

    def _delivered(self) -> int:
        """Return a step's weight bytes as they are in the layer buffer; coded ones were fewer on the wire."""
        experts = round(self._experts_per_step("delivered"))
        if self._ring is None or not self._streamed_per_step or self.plan.placement.codec != "lossless":
            return self._streamed_per_step + experts
        layers = [self._ring.layers[index] for index in self._ring.streamed]
        return sum(block.size for packed in layers for block in packed.blocks.values()) + experts

    def _experts_per_step(self, name: str) -> float:
        """Return an expert count's mean over the latest decode steps."""
        steps = self._expert_steps
        return sum(getattr(step, name) for step in steps) / len(steps) if steps else 0.0

    def _expert_settings(self) -> dict[str, Option]:
        """Return how routed experts came, and their counts in a decode step; nothing for a model without them."""
        pool = self._pool
        if pool is None:
            return {"experts": "all"} if self.plan.model.num_experts > 1 and self._ring is not None else {}
        names = ("fetched", "hits", "misses")
        counts = {name: round(self._experts_per_step(name), 3) for name in names}
        return {
            "experts": "on-demand",
            "expert_buffers": pool.staging,
            "expert_buffer_bytes": pool.buffer_bytes,
            "expert_cache": "lfu",
            "cached_experts": pool.cached,
            **{f"experts_{name}_per_step": count for name, count in counts.items()},
        }

    def _packed_settings(self) -> dict[str, Option]:
        """Return how products with layers that stay packed were computed; nothing where none does."""
        ring = self._ring
        if ring is None or self.plan.model.stored_ratio == 1 or len(ring.streamed) == len(ring.layers):
            return {}
        if self._products is None:
            return {"packed_kernel": "no packed weights" if self._group is None else "several GPUs share the layers"}
        staying = set(range(len(ring.layers))).difference(ring.streamed)
        served = self._products.status != "on" or self._products.serves(staying)
        return {"packed_kernel": self._products.status if served else "no weights that it reads"}

    def effective(self) -> Effective:
        cache: dict[str, Option] = {
            "kv_offload": self.options.kv_offload,
            "kv_cache_dtype": self.options.kv_cache_dtype,
            "kv_attention": self._kv_device,
            "kv_host_rows": self._kv_rows,
            "kv_threads": self._kv_threads,
            "kv_bytes_per_step": self._fetched_per_step,
            "attention": "sdpa" if self._ragged.alibi is not None else str(self.model.config._attn_implementation),
            "cuda_graphs": "off" if self.options.cuda_graphs == "off" else self._graphs.status,
            "graph_kernels": self._graphs.kernels,
        }
        if self.draft is not None:
            cache["draft_weight_bytes"] = self.draft.effective().gpu_weight_bytes
        if self.plan.model.num_experts > 1:
            few = self._few_experts
            cache["experts_kernel"] = "off" if few is None else few.status or "no experts that it knows"
        source, pool = self._source, self._pool
        if self._ring is None or source is None:
            return Effective(gpu_weight_bytes=self._resident_bytes, settings=cache)
        experts = 0 if pool is None else pool.kept_bytes
        return Effective(
            gpu_weight_bytes=self._resident_bytes + self._ring.kept_bytes + experts,
            host_weight_bytes=source.host_bytes,
            nvme_weight_bytes=source.file_bytes,
            streamed_bytes_per_step=self._delivered(),
            wire_bytes_per_step=self._streamed_per_step + round(self._experts_per_step("wire")),
            nvme_bytes_per_step=self._read_per_step,
            pinned_bytes=source.pinned_bytes,
            settings={
                "ring_depth": self._ring.depth,
                "buffer_bytes": self._ring.buffer_bytes,
                "slot_bytes": self._ring.layer_buffer.nbytes + (0 if pool is None else pool.layer_buffer.nbytes),
                "resident_layers": len(self._layers) - len(self._ring.streamed),
                "unpacked_layers": len(self._ring.unpacked),
                "weight_codec": self.plan.placement.codec,
                **source.settings,
                **self._expert_settings(),
                **self._packed_settings(),
                **cache,
            },
        )

    def _close_kv_pool(self) -> None:
        if self._kv_pool is not None:
            self._kv_pool.close()
            self._kv_pool = None

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
            self.draft = None
        self.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._layers, self._experts = nn.ModuleList(), {}
        super().close()
        if self._source is not None:
            self._source.close()
            self._source = None
        self._close_kv_pool()


def together(batches: Sequence[MicroBatch], rows: int, length: int, capacity: int) -> Workload:
    """Return the workload of all micro-batches and new rows, as if one."""
    lengths = [length, *(batch.prompt_len for batch in batches)]
    capacities = [capacity, *(batch.capacity for batch in batches)]
    size = rows + sum(batch.batch_size for batch in batches)
    return Workload(batch_size=size, input_len=max(lengths), output_len=max(1, max(capacities) - max(lengths)))


def _widen_on(device: torch.device) -> DequantizeKV:
    """Return the function that dequantises an 8-bit KV cache on a device: zinfer's kernel, or PyTorch's."""
    if cannot_run(device) is not None:
        return dequantize_kv
    from zinfer.engine.stream.widen_kernel import widen

    return widen
