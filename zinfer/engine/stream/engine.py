"""Engine `stream`: loads the weights, admits rows, and runs passes. It alone knows all mechanisms."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from zinfer.core.case import Option, Workload
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Work, combined_workload, is_step
from zinfer.engine.cache import RowCache, make_cache, other_layers, shares_keys
from zinfer.engine.decoder import MovedRows
from zinfer.engine.state import Entry, ModelState
from zinfer.engine.stream import graphs
from zinfer.engine.stream.attention import Ragged
from zinfer.engine.stream.experts.cpu import CpuExperts
from zinfer.engine.stream.experts.few_experts import FewExperts
from zinfer.engine.stream.experts.modules import experts_of
from zinfer.engine.stream.experts.pool import ExpertPool
from zinfer.engine.stream.feed_forward import split_by_tokens
from zinfer.engine.stream.graphs import Graphs
from zinfer.engine.stream.kv.cpu import OwnAttentionError
from zinfer.engine.stream.kv.host import HostKV
from zinfer.engine.stream.passes import SharedPasses, StreamBatch
from zinfer.engine.stream.weights.load import Loader
from zinfer.engine.stream.weights.pack import copy_into
from zinfer.engine.stream.weights.packed_experts import Experts
from zinfer.engine.stream.weights.products import PackedProducts
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource, WeightSource
from zinfer.engine.triton_check import trouble
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective, Span

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

Entries = Mapping[str, Entry]  # by name within a layer
Moved = Sequence[tuple[StreamBatch, Tensor]]  # micro-batches, and the indices of rows that will leave them
FIRST_STEPS = 8  # of a model that drafts, before its passes are recorded: a wrong kernel is given up earlier


class Stream(SharedPasses):
    """Engine `stream`: all weights on the device (offload `none`), or the decoder layers streamed to it from host
    memory (`cpu`), or from files (`nvme`), of which host memory keeps as many as fit."""

    several: ClassVar[str] = "zinfer.engine.stream.team:StreamTeam"

    def __init__(
        self, plan: Plan, progress: Progress = silent, group: "Group | None" = None, early: bool = False
    ) -> None:
        self._group, self._early = group, early
        self._postponed: Placement | None = None  # placement of weights on the device, until all are loaded
        self.given: Placement | None = None  # placement of the work of all ranks together, if this is one of several
        self._source: WeightSource | None = None  # of the layers that are not on the device
        self._ring: PrefetchRing | None = None
        self._pool: ExpertPool | None = None  # of experts that come on demand
        self._loader: Loader | None = None  # of the layers that are not on the device
        self._per_step: tuple[int, ...] = (0, 0, 0)  # bytes of a step on the link: weights, others, weights from disk
        super().__init__(plan, progress)

    @classmethod
    def begin(cls, plan: Plan, progress: Progress = silent) -> "Stream":
        return cls(plan, progress, early=True)

    def _load(self) -> None:
        plan, options, device = self.plan, self.options, self.device
        state = ModelState(plan.model, plan.case.load_format, allow_nan=plan.case.allow_nan)
        self.model, self._layers = state.model, state.layers
        self._opened.callback(vars(self).pop, "_layers", None)
        split_by_tokens(self._layers, plan.placement.pass_tokens)
        self._inspect()
        self._ragged = Ragged(self.model, self._layers, self._accepted, self._cache_name, device)
        self._ragged.able = self._ragged.able and self._knows_padding
        recorder: graphs.CudaRecorder | str = "weights cross the link" if self._group is not None else "off"
        if self._group is None and options.cuda_graphs == "auto":
            recorder = graphs.recorder_of(device)
        routed, calls = plan.model.num_experts > 1, (self._ring_pass, self._restart)
        self._graphs = Graphs(self.model, list(self._layers), routed, self._ragged, recorder, *calls)
        kernels = options.experts_kernel == "auto"
        self._few_experts = FewExperts(self.model, device, self.progress) if kernels else None
        self._check_options()
        streamed, shared = plan.placement.tier != "gpu", shares_keys(self.model.config)
        self._kv = HostKV(plan.model, options, device, self.progress, streamed=streamed, shared=shared)
        self._opened.callback(self._kv.close)
        self._load_draft()
        resident = {
            name: torch.empty_like(entry.tensor, device=device)
            for name, entry in (state.outside if streamed else state.entries).items()
        }
        if streamed:
            self._load_streamed(state, resident)
        else:
            copy_into(resident, state.load(device, self.progress))
        for name, tensor in resident.items():
            state.entries[name].put(tensor)
        self._resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self._ready()

    def _check_options(self) -> None:
        """Raise EngineError for options that are not for this model or machine; decide on others anew."""
        options = self.options
        for option, any_model in {"kv_offload": ("none", "auto"), "kv_cache_dtype": ("auto", "bf16")}.items():
            if getattr(options, option) not in any_model and (why_not := self._cannot_have(option)) is not None:
                raise EngineError(why_not)
        if options.kv_offload == "auto" and self._cannot_have("kv_offload") is not None:
            self.plan = self.planner.with_option("kv_offload", "none").plan
        if options.draft != "none" and (why_not := self.cannot_draft()) is not None:
            raise EngineError(why_not)
        if self._group is not None and len(self._kinds_of_layers) != len(self._layers):
            name = self.plan.model.name
            raise EngineError(f"gpus={self._group.size} is not for {name}: its layers keep their cache whole")
        if self.plan.placement.codec == "lossless" and self.device.type == "cuda" and (why := trouble()):
            raise EngineError(
                f"coded weights are unpacked by a Triton kernel, and none runs here: {why}; install a C compiler (gcc) "
                "and Python's headers (python3-dev), or take --weight-codec none, at two thirds of the speed"
            )

    def _load_draft(self) -> None:
        """Load the draft model on the first device. Raises EngineError for a model that cannot draft."""
        name, plan = self.options.draft_model, self.planner.draft(self.plan.case.workload)
        if name is None or (self._group is not None and self._group.rank):
            return
        if plan is None:
            raise EngineError(f"draft={name}: a model drafts for run, batch, serve and loads of requests alone")
        self.draft = draft = Stream(plan, self.progress)
        self._opened.callback(draft.close)
        draft._graphs.wait = FIRST_STEPS
        if (why_not := draft.cannot_draft() or draft.cannot_move_rows() or draft.equal_lengths()) is not None:
            raise EngineError(f"draft={name}: {why_not}")

    def _load_streamed(self, state: ModelState, resident: dict[str, Tensor]) -> None:
        """Load the layers off the device, and other weights into `resident`; start the ring."""
        experts = self._on_demand(state)
        loader = Loader(self.plan, self.options, state, experts, self.device, self.progress, self._group, self._early)
        source, ring = self._source, self._ring = loader.load(resident)
        self._opened.callback(source.close)
        self._opened.callback(ring.close)
        self._loader, self.late = loader, loader.late
        if loader.late is not None:
            self._opened.callback(loader.late.stop)
            self._graphs.paused = True  # nothing is recorded while a thread uses the device, too
        if self.plan.placement.codec == "lossless" and self._group is None:
            self._products = PackedProducts(self.device, self.progress)
        for number, layer in enumerate(self._layers):
            ring.expect(number, layer, partial(self._attach, ring, loader, number, layer, state.of_layer(number)))
            if loader.late is None:
                ring.arrive(number)
        if source.experts and isinstance(source, MemorySource):
            tokens, auto, cpu = self.plan.placement.cpu_tokens, self.options.experts == "auto", None
            if tokens:
                linked = self.plan.placement.linked_share
                cpu = CpuExperts(self.device, tokens, fast=auto, progress=self.progress, linked=linked)
            given, loader.experts = loader.experts, {}
            self._pool = ExpertPool(source, self.device, ring, cpu, self._products, given)
            del given
            self._opened.callback(self._pool.close)
            for number, module in experts.items():
                self._pool.attach(number, module)
            self._pool.keep(())
        if self._group is None:  # the ranks of a group begin together, with a pass
            ring.start()

    def _attach(self, ring: PrefetchRing, loader: Loader, number: int, layer: nn.Module, entries: Entries) -> None:
        loader.keep(ring, number)
        attach = ring.attach if self._products is None else partial(self._products.attach, ring)
        attach(number, layer, entries)

    def finish_loading(self) -> None:
        if self._loader is None or self._ring is None or not self._loader.loading:
            return
        self._loader.finish(self._ring)
        self.give_back()  # what coding took, in a stream of its own
        self._graphs.paused = False
        if self._postponed is not None:
            self._share_out(self._postponed)

    def _on_demand(self, state: ModelState) -> dict[int, Experts]:
        """Return the routed experts that come on demand, by layer. With option ``auto`` there are none where they
        cannot, and the plan is made anew. Raises EngineError if they were asked for."""
        asked, model = self.options.experts in ("on-demand", "cpu"), self.plan.model
        if self.plan.placement.experts == "all" and not asked:
            return {}
        experts = experts_of(self._layers, state, model.num_experts > 0)
        if not isinstance(experts, str):
            return experts
        if asked:
            raise EngineError(f"the experts of {model.name} cannot come on demand: {experts}; take experts=all")
        self.plan = self.planner.with_option("experts", "all").plan
        return {}

    @property
    def loaded_bytes(self) -> int:
        read = None if self._loader is None or self._source is None else self._loader.folder_bytes(self._source)
        return super().loaded_bytes if read is None else read

    @property
    def ring(self) -> PrefetchRing | None:
        """Ring that weights come through; None if they are all on the device."""
        return self._ring

    def cannot_snapshot(self) -> str | None:
        load, storage = self.expected or self.plan.case.workload, self.options.kv_cache_dtype
        if self.options.kv_offload == "cpu" or self._placement(load).host_rows(load.batch_size):
            return f"a KV cache with kv_offload={self.options.kv_offload} is not kept"
        if storage not in ("auto", "bf16"):
            return f"a KV cache with kv_cache_dtype={storage} is not kept"
        return super().cannot_snapshot()

    def _make_batch(self, mask: Tensor, capacity: int, moved: Moved = ()) -> StreamBatch:
        rows, length = mask.shape
        if not self.batches:
            if self._pool is not None:
                self._pool.steps.clear()
            if self.expected is None:
                self._kv.begin()
        load = self.expected or combined_workload(self.batches, rows, length, capacity)
        placement = self._placement(load)
        self._graphs.make_room(rows, capacity)
        self._share_out(placement, load)
        on_host = self._host_rows(rows, capacity, load, placement, moved)
        if on_host and (why_not := self._cannot_have("kv_offload")) is not None:
            raise EngineError(f"{on_host} of {rows} rows need host memory: {why_not}")
        on_device, storage = rows - on_host, self.options.kv_cache_dtype
        cache = None
        if not self._own_cache:
            cache = make_cache(self.model.config, rows, capacity, storage, on_device)
        batch = StreamBatch(mask, capacity, cache, self._state_of(cache))
        self._graphs.reuse_memory(batch)
        if on_host and isinstance(cache, RowCache) and cache.attention:
            parts = self._split(slice(on_device, rows), length)
            batch.host = self._kv.store(cache, parts, capacity, self._ring, placement, load)
        if self._ring is not None and self._group is None:
            self._ring.start()
        return batch

    def _host_rows(self, rows: int, capacity: int, load: Workload, placement: Placement, moved: Moved) -> int:
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
        return rows - min(rows, max(0, room - used) // capacity)

    def _placement(self, load: Workload) -> Placement:
        return self.given or self.planner.placement(load)

    def _share_out(self, placement: Placement, load: Workload | None = None) -> None:
        """Allocate the ring's buffers and put layers on the GPU, by `placement`. While layers load, those that will
        stay are streamed, too, if `load` has room beside that. Raises torch.OutOfMemoryError."""
        if (ring := self._ring) is None:
            return
        if (loader := self._loader) is not None and loader.loading:
            if load is not None and loader.has_room(self.planner.tiers(load), placement):
                self._postponed = placement
                ring.resize(max(placement.ring_depth, ring.depth))
                return
            self.finish_loading()
        buffers = placement.ring_depth
        if buffers >= placement.layer_chunks:  # room for a whole layer, whose tensors are cut one by one
            # With experts on demand the next layer is there when its turn comes.
            layers = 1 if self._pool is None else 2
            staging = 0 if self._group is None else max(0, placement.ring_depth - placement.layer_chunks)
            buffers = max(buffers, *(layers * len(packed.chunks) + staging for packed in ring.layers))
        pool, products, experts = self._pool, self._products, (placement.expert_buffers, placement.cached_experts)
        ring.resize(min(buffers, ring.depth))  # shrink before anything grows
        stay = placement.resident_layers, placement.unpacked_layers
        whole = placement.expert_layers
        if not ring.keeps(*stay) or (
            pool is not None and (experts != (pool.staging, pool.cached) or not pool.keeps(whole))
        ):
            self._graphs.clear()
        if pool is not None:
            pool.resize(min(experts[0], pool.staging), min(experts[1], pool.cached))
            pool.keep(whole)
        ring.keep(*stay)
        if products is not None:
            products.prepare(ring)
        ring.hold(placement.host_layers, self.progress)
        ring.resize(buffers)
        if pool is not None:
            pool.resize(*experts)

    def apply_placement(self, placement: Placement) -> None:
        """Place weights and buffers by `placement`. It counts the work of all ranks. Raises torch.OutOfMemoryError."""
        self.given = placement
        self._share_out(placement)

    def use_threads(self, count: int) -> None:
        self._kv.use_threads(count)

    def expect(self, load: Workload | None) -> None:
        super().expect(load)
        if load is None or self._own_cache:
            return
        self._kv.begin()
        placement = self._placement(load)
        with suppress(MemoryError, torch.OutOfMemoryError):  # micro-batches will tell
            self._share_out(placement, load)
            self._kv.prepare(placement, load)

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
        while (logits := self.attempt(works)) is None:
            pass
        return logits

    def attempt(self, works: Sequence[Work[StreamBatch]]) -> list[Tensor] | None:
        """Compute a pass as `forward` does; return None where it has to be computed once more, in another way."""
        self._kv.rows = max(self._kv.rows, sum(batch.host_rows for batch in self.batches))
        pool, before, step = self._pool, self._copied(), is_step(works)
        experts = None if pool is None else pool.counts
        try:
            logits = super().forward(works)
        except OwnAttentionError:
            self._ragged.able = False  # from now on each micro-batch has a pass of its own
            return None
        self.finish_loading()
        if step:
            self._per_step = tuple(now - then for now, then in zip(self._copied(), before, strict=True))
            if pool is not None and experts is not None:
                pool.note_step(experts, sum(work.token_ids.numel() for work in works))
        return logits

    def _copied(self) -> tuple[int, int, int]:
        """Return the bytes copied since the load: of weights, of anything else, of weights from disk."""
        ring = self._ring
        return (0, 0, 0) if ring is None else (ring.bytes_copied, ring.other_bytes_copied, ring.disk_bytes)

    def _keep_rows(self, batch: StreamBatch, kept: Sequence[int]) -> None:
        self._graphs.drop(batch)
        super()._keep_rows(batch, kept)
        self._kv.restore_threads(self.batches)

    def _move(self, target: StreamBatch, moved: Sequence[MovedRows[StreamBatch]], length: int) -> None:
        for batch, *_ in moved:
            self._graphs.drop(batch)
        super()._move(target, moved, length)
        self._kv.restore_threads(self.batches)

    def _free(self, batch: StreamBatch) -> None:
        batch.free_host()
        self._kv.restore_threads(self.batches)
        self._graphs.retire(batch)
        super()._free(batch)

    def clear(self) -> None:
        super().clear()
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

    def _packed_settings(self, ring: PrefetchRing) -> dict[str, Option]:
        """Return how products with layers that stay packed were computed; nothing where none does."""
        if self.plan.model.stored_ratio == 1 or len(ring.streamed) == len(ring.layers):
            return {}
        if self._products is None:
            return {"packed_kernel": "no packed weights" if self._group is None else "several GPUs share the layers"}
        codes = self._pool is not None and self._pool.reads_codes
        return self._products.settings(set(range(len(ring.layers))).difference(ring.streamed), codes)

    def effective(self) -> Effective:
        self.finish_loading()
        mixture, few, pool = self.plan.model.num_experts > 1, self._few_experts, self._pool
        streamed, kv_bytes, read = self._per_step
        settings: dict[str, Option] = {
            "kv_offload": self.options.kv_offload,
            "kv_cache_dtype": self.options.kv_cache_dtype,
            **self._kv.settings,
            "kv_bytes_per_step": kv_bytes,
            "attention": self._ragged.implementation,
            "cuda_graphs": self._graphs.status,
            "graph_kernels": self._graphs.kernels,
        }
        if self.draft is not None:
            settings["draft_weight_bytes"] = self.draft.effective().gpu_weight_bytes
        if mixture:
            settings["experts_kernel"] = "off" if few is None else few.status or "no experts that it knows"
        if self._ring is None or self._source is None:
            return Effective(gpu_weight_bytes=self._resident_bytes, settings=settings)
        ring, source = self._ring, self._source
        delivered = wire = streamed  # bytes in the layer buffer, and those on the link: coded ones are fewer
        if streamed and self.plan.placement.codec == "lossless":
            layers = [ring.layers[index] for index in ring.streamed]
            delivered = sum(block.size for packed in layers for block in packed.blocks.values())
        kept, buffer = self._products.nbytes if self._products is not None else 0, 0
        if pool is not None:
            delivered, wire = delivered + round(pool.per_step("delivered")), wire + round(pool.per_step("wire"))
            kept, buffer = kept + pool.kept_bytes, pool.layer_buffer.nbytes
        elif mixture:
            settings["experts"] = "all"
        return Effective(
            gpu_weight_bytes=self._resident_bytes + ring.kept_bytes + kept,
            host_weight_bytes=source.host_bytes + (0 if pool is None else pool.host_bytes),
            nvme_weight_bytes=source.file_bytes,
            streamed_bytes_per_step=delivered,
            wire_bytes_per_step=wire,
            nvme_bytes_per_step=read,
            pinned_bytes=source.pinned_bytes,
            settings={
                "ring_depth": ring.depth,
                "buffer_bytes": ring.buffer_bytes,
                "slot_bytes": ring.layer_buffer.nbytes + buffer,
                "resident_layers": len(self._layers) - len(ring.streamed),
                "unpacked_layers": len(ring.unpacked),
                "weight_codec": self.plan.placement.codec,
                **source.settings,
                **({} if pool is None else pool.settings),
                **self._packed_settings(ring),
                **settings,
            },
        )
