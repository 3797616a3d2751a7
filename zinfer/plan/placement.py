"""Placements: where the weights and the KV cache of a load go, as its engine does it.

With the KV cache on the GPU and the batch free, a byte holds more as cache than as a resident weight, so the batch
comes first. With the batch given, residency W/(W-R) is all gain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import inf
from typing import Any, Literal

from zinfer.core.case import Case, Workload, resident_bytes, spread
from zinfer.core.engine import ENGINES, KEPT_BUFFERS, LINKED_BYTES, PREFILL_TOKENS, Offload, plan_options, read_options
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import parse_share
from zinfer.plan.bytes import ALLOWANCES, EAGER, Placement, Sizes, Tiers, block_tokens, largest_chunk, whole_tokens
from zinfer.plan.search import largest, peak
from zinfer.plan.times import RATES, Efficiency, Timing, linked_share, may_compute_experts, shipped


@dataclass(frozen=True)
class Tuning:
    """Tuned numbers of a placement."""

    max_host_share: float = 0.97  # of host memory, that a load may take before it is refused
    max_device_share: float = 0.97  # of the device's, that a batch may take: no record of this size is out of memory
    ring_depth: int = 6  # minimum ring buffers: they hold what arrives while a layer of a decode step computes
    dense_depth: int = 3  # the same where experts come on demand: little is in flight, so that they come next
    disk_ring_layers: int = 2  # layers from disk that host memory has room for on their way
    lossless_ratio: float = 0.67  # bytes of the lossless codec over bf16, on weights of a normal distribution
    fp8_ratio: float = 0.83  # bytes of the lossless codec over FP8 codes (e4m3)
    host_share: float = 0.9  # of host memory, filled by ``host_weights=auto``: the rest is for all else that runs there
    # With ``auto`` experts come on demand where a step at batch 1 then brings at most this share of the bytes, and an
    # expert has at least this many bytes on the wire: its copy and its unpacking take about 20 us of launches.
    fewer_share: float = 0.75
    min_expert_bytes: int = 1 << 20
    max_cpu_tokens: int = 32  # of a pass whose experts the CPU computes: beyond, experts have too many tokens each
    min_cpu_tokens: int = 8  # the same where it was asked for
    all_stay_share: float = 0.9  # of the GPU's memory, within which all experts stay: the rest is for KV cache
    unpacked_share: float = 0.6  # of the GPU's memory, within which models in FP8 are unpacked once, as they load
    assumed_host: float = 4.0  # unknown host memory over the GPU's, as far as a KV cache is concerned
    # Shares to try of what can stay with all KV cache in host memory, then how far beside the best one.
    reserved: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    finer: tuple[float, ...] = (0.125, 0.0625)
    unpacked_margin: int = 2 << 30  # that unpacked layers leave free: for graphs, and to code a layer again (1.2 GB)
    hidden: float = 1.002  # step over the shortest one, up to which unpacking counts as hidden behind the link
    counted_on: float = 0.5  # share of the rate of unpacking by which that is judged


TUNING = Tuning()
# Architectures whose experts transformers does not dispatch through its ExpertsInterface: they come with their layer.
WHOLE_EXPERTS = frozenset({"dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash"})
# Margin of an engine that gives free GPU memory away, for memory that a plan does not see (gaps, moments of a step).
CAUTIOUS = Efficiency(memory=1.5)
TIERS: dict[Offload, Literal["gpu", "host", "nvme"]] = {"none": "gpu", "cpu": "host", "nvme": "nvme"}
MEMOISED = 1024  # workloads of a load whose results are kept


class Placer:
    """Placements of one load for any workload; `efficiency` sets the margin that is left, and chooses between ways."""

    def __init__(self, case: Case, model: ModelSpec, machine: Machine, efficiency: Efficiency | None = None) -> None:
        self.model, self.machine, self.efficiency = model, machine, efficiency
        self.options = plan_options(case.engine, case.options)
        if self.options.kv_offload == "auto" and not model.attends_by_name:
            self.options = self.options.model_copy(update={"kv_offload": "none"})
        self.transport = read_options(case.engine, case.options).transport()
        self.case = self._with_codes(case)
        self.choose = lru_cache(MEMOISED)(self._choose)
        self.bare = lru_cache(MEMOISED)(self._bare)
        self._weights = lru_cache(MEMOISED)(self._place_weights)
        self._rows = lru_cache(MEMOISED)(self._rows_on_gpu)

    @cached_property
    def margin(self) -> Efficiency | None:
        """Efficiency that counts memory: `CAUTIOUS` if the engine gives free GPU memory away, unless it is larger."""
        smaller = self.efficiency is None or self.efficiency.memory < CAUTIOUS.memory
        return CAUTIOUS if smaller and self.transport.shares_memory else self.efficiency

    def tiers(self, placement: Placement, workload: Workload, efficiency: Efficiency | None = None) -> Tiers:
        """Count the bytes by tier, with the working memory of `efficiency`."""
        factor = (efficiency or self.efficiency or Efficiency()).memory
        return Sizes(placement, self.model).tiers(workload, self.machine, factor, self.case.load_format != "dummy")

    def device_bytes(self, tiers: Tiers) -> int:
        """Return the bytes on the device; without a GPU it is the host."""
        return tiers.gpu.total + (0 if self.machine.gpu_count else tiers.host.total)

    @cached_property
    def _good(self) -> Efficiency:
        """Efficiency that placements are chosen by, also where figures are limits."""
        given = self.efficiency
        fitted = given is not None and not given.perfect and given != CAUTIOUS
        good = given if given and fitted else shipped().get(self.case.engine, Efficiency())
        return good.for_model(self.model)

    def _timing(self, placement: Placement, efficiency: Efficiency | None = None) -> Timing:
        return Timing(placement, self.model, self.machine, efficiency or self._good)

    def _with_codes(self, case: Case) -> Case:
        """Return the case as it is placed: released codes stay on the GPU where products read them."""
        coded = self.transport.coded_at_rest and self.model.stored_ratio < 1 and self.machine.gpu_count > 0
        coded = coded and self.options.gpus == 1 and self.options.weight_codec != "none"
        room = TUNING.unpacked_share * self.machine.gpu_bytes
        if case.offload != "none" or not coded or (self.model.fp8_ratio and self.model.weight_bytes <= room):
            return case
        return case.model_copy(update={"offload": "cpu", "gpu_weights": "100%"})

    def _choose(self, workload: Workload) -> Placement:
        """Place a workload as is fastest, with coded resident layers kept unpacked."""
        ways = [self._with_unpacked(placement, workload) for placement in self._fastest(workload)]
        return min(ways, key=lambda way: self._seconds(way, workload)) if len(ways) > 1 else ways[0]

    def _with_unpacked(self, placement: Placement, workload: Workload) -> Placement:
        """Return the placement with unpacked layers, of which fewer may stay."""
        able = placement.codec == "lossless" and self.model.stored_ratio == 1 and placement.experts == "all"
        if not (placement.resident_layers and able and self.machine.gpu_count) or placement.gpus > 1:
            return placement
        limits = self.efficiency is None or self.efficiency.perfect  # for them unpacking costs nothing
        if placement.tier != "host" or placement.moved or limits:
            return self._hidden(placement, workload)
        graphs = placement.graphs and self.model.attends_by_name

        @cache
        def fewer(count: int) -> tuple[Placement, float]:
            stay = spread(count, self.model.num_layers)
            update = {"resident_layers": stay, "resident_bytes": _sum(self._layer_sizes, stay), "graphs": graphs}
            other = placement.model_copy(update=update)
            return other, -self._step_s(_unpacking(other, self._most_unpacked(other, workload)), workload)

        whole = self._step_s(_unpacking(placement, self._most_unpacked(placement, workload)), workload)
        count = peak(lambda count: fewer(count)[1], 1, len(placement.resident_layers))
        return self._hidden(fewer(count)[0] if -fewer(count)[1] < whole else placement, workload)

    def _most_unpacked(self, placement: Placement, workload: Workload) -> int:
        """Return how many resident layers there is room to keep unpacked."""
        sizes = [self._layer_sizes[index] for index in placement.resident_layers]
        room = self._free(placement, workload) - TUNING.unpacked_margin
        return max(0, min(len(sizes), int(room // max(1.0, (1 - placement.kept_ratio) * max(sizes)))))

    def _hidden(self, placement: Placement, workload: Workload) -> Placement:
        """Return the placement with the fewest unpacked layers for the shortest step."""
        limit = self._most_unpacked(placement, workload)
        careful = self._good.model_copy(update={"unpack_share": TUNING.counted_on * self._good.unpack_share})

        def way(fewer: int) -> Placement:
            return _unpacking(placement, limit - fewer)

        enough = TUNING.hidden * self._step_s(way(0), workload, careful)
        return way(largest(lambda fewer: self._step_s(way(fewer), workload, careful) <= enough, limit))

    def _step_s(self, placement: Placement, workload: Workload, efficiency: Efficiency | None = None) -> float:
        """Return the seconds of a step; infinite where no rate is known."""
        timing = self._timing(placement, efficiency)
        return timing.step(workload.batch_size, workload.mean_context).seconds or inf

    def _fastest(self, workload: Workload) -> list[Placement]:
        """Place a workload with layers that stay coded. With ``auto`` there are other ways, one of them by a search."""
        simple = self._filled(workload, 0)
        both = self.case.gpu_weights == "auto" and self.options.kv_place == "auto"
        if not both or not self.machine.gpu_count or simple.tier == "gpu" or not self._splits_kv:
            return [simple]
        away = self._all_rows_away._filled(workload, 0)
        if not (room := Sizes(away, self.model).resident):
            return [simple]

        @cache
        def reserving(share: float) -> Placement:
            return self._filled(workload, round(share * room)) if share else simple

        @cache
        def judge(share: float) -> float:
            able = not share or self._holds(reserving(share), workload)
            return self._seconds(reserving(share), workload) if able else inf

        best = min(TUNING.reserved, key=judge)
        for step in TUNING.finer:
            best = min((best, max(0.0, best - step), min(1.0, best + step)), key=judge)
        return [simple, *[reserving(best)] * (best > 0), *[away] * self._holds(away, workload)]

    def _holds(self, placement: Placement, workload: Workload) -> bool:
        return self._free(placement, workload) >= 0 and self.host_fits(self.tiers(placement, workload))

    @cached_property
    def _all_rows_away(self) -> "Placer":
        """Placer of the same load with all KV cache in host memory."""
        options = tuple(sorted((dict(self.case.options) | {"kv_offload": "cpu"}).items()))
        case = self.case.model_copy(update={"options": options})
        return Placer(case, self.model, self.machine, self.efficiency)

    def _seconds(self, placement: Placement, workload: Workload) -> float:
        """Return the seconds of a batch; infinite where no rate is known."""
        prefill = self._timing(placement).prefill(workload.batch_size, workload.input_len).seconds
        return inf if prefill is None else prefill + self._step_s(placement, workload) * (workload.output_len - 1)

    def host_fits(self, tiers: Tiers) -> bool:
        """True if host memory holds its part of the KV cache."""
        there = self.machine.host_bytes
        room = TUNING.max_host_share * (TUNING.assumed_host * self.machine.gpu_bytes if there is None else there)
        return not tiers.host.kv_cache or tiers.host.total <= room

    def _free(self, placement: Placement, workload: Workload) -> int:
        return self.machine.device_bytes - self.device_bytes(self.tiers(placement, workload))

    @cached_property
    def _splits_kv(self) -> bool:
        """True if the cache holds keys and values alone."""
        return all(layer.kv_width and not layer.state for layer in self.model.layers)

    def _filled(self, workload: Workload, reserved: int) -> Placement:
        """Place `reserved` resident bytes, then the KV cache, buffers and further layers."""
        depth, kept = self.split_free_memory(workload, reserved)
        placement = self.bare(workload, kept, depth, reserved)
        if not placement.moved:
            placement, bare = self._stay(placement, False), placement
            whole = self._stay(bare, True) if placement.cpu_tokens else placement
            if whole.expert_layers:
                placement = min((whole, placement), key=lambda way: self._step_s(way, workload))
        return self._hold(placement, workload) if placement.disk_ring_bytes else placement

    def _stay(self, placement: Placement, whole: bool) -> Placement:
        """Choose the layers that stay, and experts. These are those of `whole` layers, or any."""
        layers = self._resident_layers(placement)
        dense = _sum(self._streamed_sizes(placement), layers)
        rest = max(0, Sizes(placement, self.model).resident - dense)
        update: dict[str, Any] = {"resident_layers": layers} | ({"resident_bytes": dense} if placement.moved else {})
        if placement.experts == "on-demand" and whole and not self.model.fp8_ratio:  # codes that the GPU reads, too
            sizes = [layer.expert_parameters * self.model.dtype_bytes for layer in self.model.layers]
            mixtures = [index for index, size in enumerate(sizes) if size]
            stay = _spread_within(mixtures, sizes, rest)
            update |= {"expert_layers": stay, "resident_bytes": dense + _sum(sizes, stay)}
        elif placement.experts == "on-demand":
            update["cached_experts"] = min(self.model.routed_bytes, rest) // self.model.expert_bytes
        return placement.model_copy(update=update)

    def _bare(
        self, workload: Workload, automatic: int = 0, depth: int = TUNING.ring_depth, reserved: int = 0
    ) -> Placement:
        """Place `depth` buffers and `automatic` resident bytes, `reserved` before the KV cache."""
        options, machine, batch_size = self.options, self.machine, workload.batch_size
        on_gpu, kv_place = self._weights(automatic, depth), options.kv_place
        if kv_place == "none" or (kv_place == "auto" and not self._splits_kv):
            return on_gpu
        known = machine.attention_bandwidth is not None
        cpu_choices = [False, True] if known else [False]
        if on_gpu.tier == "gpu" or on_gpu.kv_ratio < 1:  # no weights stream with the cache; 8 bits stay on the host
            cpu_choices = [True]
        if kv_place == "auto" and cpu_choices == [True] and not known and options.kv_attention != "cpu":
            return on_gpu
        # The cache comes first: a deeper ring and resident layers get the memory that it leaves.
        smallest = self._weights(reserved, TUNING.ring_depth)
        room = TUNING.max_device_share * machine.gpu_bytes
        given = self.efficiency  # as the largest batch is counted, or rows that just do not fit would end the search
        counted = given if given is not None and given.memory < CAUTIOUS.memory else Efficiency()
        all_fit = not reserved and self.tiers(smallest, workload, counted).gpu.total <= room
        if kv_place == "auto" and (all_fit or self._rows(smallest, workload) == batch_size):
            return on_gpu
        ways, context = [], workload.mean_context
        for on_cpu in cpu_choices if options.kv_attention == "auto" else [options.kv_attention == "cpu"]:
            # While the CPU attends, the weights that arrive wait in the ring: a layer at most.
            chunks = max(TUNING.ring_depth, on_gpu.layer_chunks) if on_cpu else TUNING.ring_depth
            smallest = self._weights(reserved, chunks).model_copy(update={"kv_on_cpu": on_cpu})
            rows = self._rows(smallest, workload) if kv_place == "auto" else 0
            split = {"kv_host_share": (batch_size - rows) / batch_size, "kv_on_cpu": on_cpu, "graphs": False}
            way = self._weights(automatic, max(depth, chunks)).model_copy(update=split)
            ways.append(self._timing(way).with_best_cores(batch_size, context) if on_cpu else way)
        return min(ways, key=lambda way: self._step_s(way, workload)) if len(ways) > 1 else ways[0]

    def _rows_on_gpu(self, placement: Placement, workload: Workload) -> int:
        """Return the maximum rows whose KV cache fits the GPU."""
        if not self.machine.gpu_count:
            return workload.batch_size
        batch_size, room = workload.batch_size, self.machine.gpu_bytes

        def lacking(rows: int) -> int:
            split = placement.model_copy(update={"kv_host_share": 1 - rows / batch_size})
            return self.tiers(split, workload, self.margin).gpu.total - room

        # Without a row on the host no buffers are needed for its way: all rows may fit where one fewer does not.
        if lacking(batch_size) <= 0:
            return batch_size
        if (short := lacking(0)) > 0 or batch_size == 1:
            return 0
        step = max(1, (lacking(batch_size - 1) - short) // (batch_size - 1))  # of each row, but for rounding
        rows = min(batch_size - 1, -short // step)
        while rows and lacking(rows) > 0:
            rows -= 1
        return rows

    @cached_property
    def _coded(self) -> bool:
        """True if weights cross the link coded or quantised: a GPU decodes several times what any link brings."""
        smaller = self.case.dtype == "bfloat16" or self.model.stored_ratio < 1
        pays = self.case.offload != "none" and smaller and self.machine.gpu_count > 0
        codec = self.options.weight_codec
        return codec == "lossless" or (codec == "auto" and pays)

    @cached_property
    def _base(self) -> Placement:
        """Placement without residency and buffers."""
        case, model, options, transport = self.case, self.model, self.options, self.transport
        wire_ratio = TUNING.lossless_ratio if case.dtype == "bfloat16" else 1.0
        if model.stored_ratio < 1:
            coded_fp8 = model.fp8_ratio if model.dtype_bytes == 2 else 0.0  # a GPU decodes to 16 bits
            wire_ratio = model.stored_ratio - coded_fp8 * (1 - TUNING.fp8_ratio)
        kind = ENGINES.get(case.engine)
        native_format = kind and kind.native_formats.get(case.weights)
        native_ratio = native_format and native_format * 2 / model.dtype_bytes
        wire_ratio = native_ratio or (wire_ratio if self._coded else 1.0)
        if options.experts == "cpu" and self._chooses and self._coded:  # which reads experts as released
            wire_ratio += (model.stored_ratio - wire_ratio) * model.routed_bytes / model.streamed_bytes
        # DeepSpeed unpacks float16 by an extension of its own.
        traffic = kind.unpack_traffic.get(case.weights, 0) if kind and model.dtype != "float16" else 0
        quantised = model.stored_ratio < 1 and not model.fp8_ratio and self._coded
        one_gpu = self.machine.gpu_count > 0 and options.gpus == 1
        return Placement(
            tier=TIERS[case.offload],
            moved=transport.placed_once,
            gpus=options.gpus,
            codec="lossless" if self._coded and case.offload != "none" else "none",
            wire_ratio=wire_ratio,
            kept_ratio=wire_ratio if transport.coded_at_rest or native_ratio else 1.0,
            form_ratio=model.form_ratio if transport.from_codes and quantised and one_gpu else 1.0,
            layer_chunks=-(-model.layer_bytes // largest_chunk(model, model.layer_bytes, options.gpus)),
            kv_ratio=(1 + 4 / max(1, model.head_dim)) / model.dtype_bytes if options.kv_quantized else 1.0,
            overlapped=transport.overlapped,
            eager=model.architecture in EAGER - transport.fuses,
            blocks=transport.blocks,
            pass_tokens=block_tokens(model) if transport.blocks else PREFILL_TOKENS,
            pinned=options.pin_memory,
            dequantised_bytes=round(traffic * model.streamed_bytes / model.dtype_bytes),
            from_codes=transport.from_codes and quantised and one_gpu,
        )

    def _place_weights(self, automatic: int, depth: int) -> Placement:
        """Place the weights, with the KV cache on the GPU."""
        case, model, options, transport, base = self.case, self.model, self.options, self.transport, self._base
        kept = resident_bytes(case.gpu_weights, model.streamed_bytes, automatic)
        update: dict[str, Any] = {"resident_bytes": kept}
        one_gpu = self.machine.gpu_count > 0 and options.gpus == 1
        if transport.graphs and one_gpu and options.kv_offload != "cpu" and not options.kv_quantized:
            update["graphs"] = case.offload == "none" or kept == model.streamed_bytes or model.attends_by_name
        divided = transport.divided and options.gpus > 1
        whole = 2.0 + 1 / options.gpus if divided else 1.0  # a gather takes its part, and all parts besides the layer
        if transport.fetch_unit == "chunks" and self._experts_on_demand:
            update |= self._expert_buffers(depth) | {"cpu_tokens": self._cpu_tokens, "expert_ratio": model.expert_ratio}
            update["linked_share"] = self._linked_share
            update["graphs"] = bool(update.get("graphs") and self._cpu_tokens)  # else the CPU gets to know each choice
        elif transport.fetch_unit == "chunks":
            ring = depth * Sizes(base, model).chunk if self.machine.gpu_count else 0
            update |= {"layer_buffers": 1 + ring / model.layer_bytes, "ring_depth": depth}
            update["kv_buffers"] = depth if self.machine.gpu_count else 1
        elif transport.fetch_unit == "layer":
            update |= {"layer_buffers": whole, "divided": divided}
        elif transport.fetch_unit == "matrix":
            matrix = model.hidden_size * max(model.ffn_size, model.hidden_size) * model.dtype_bytes
            matrix = max(matrix, model.expert_parameters * model.dtype_bytes)  # one module holds a layer's experts
            update["layer_buffers"] = matrix / model.layer_bytes
        if transport.fetch_unit == "chunks" and base.tier == "nvme":
            largest_layer = round(max(model.layer_parameters) * model.dtype_bytes * base.wire_ratio)
            update["disk_ring_bytes"] = max(1, TUNING.disk_ring_layers * largest_layer)
            update["held_bytes"] = parse_share(options.host_weights, model.streamed_bytes)
        if transport.outside_passes:
            update["layer_buffers"] = max(whole, model.other_bytes / model.layer_bytes)
            update |= {"resident_others": False, "also_streamed": transport.outside_passes * model.other_bytes}
        fixed = update.get("experts") != "on-demand" or (update["cpu_tokens"] and not self.model.fp8_ratio)
        if transport.leaves_host and case.offload == "cpu" and fixed:
            update["moved"] = case.gpu_weights not in {None, "auto"}
        placement = base.model_copy(update=update)
        return self._stay(placement, True) if placement.moved else placement

    @property
    def _chooses(self) -> bool:
        """True if experts that routers choose can cross the link alone."""
        one_link = self.options.gpus == 1 and self.case.offload == "cpu"
        return bool(one_link and self.model.num_experts > 1 and self.model.expert_bytes)

    @property
    def other_experts(self) -> list[str]:
        """Ways of experts besides that of ``auto``."""
        if self.options.experts != "auto" or not self._chooses:
            return []
        on_demand, on_cpu = self._experts_on_demand, bool(self._cpu_tokens)
        wanted = {"all": on_demand, "on-demand": on_cpu or not on_demand, "cpu": not on_cpu}
        return [way for way, differs in wanted.items() if differs]

    @cached_property
    def _cpu_tokens(self) -> int:
        """Maximum tokens of a pass whose experts the CPU computes; 0 if the link brings them sooner."""
        # Experts that do not lie in host memory as released take fewer bytes on the link, coded.
        model, machine, asked = self.model, self.machine, self.options.experts == "cpu"
        released = model.stored_ratio < 1 and not model.fp8_ratio and machine.gpu_count and self._coded
        if self.options.experts not in ("auto", "cpu") or not self._experts_on_demand or not (asked or released):
            return 0
        if not may_compute_experts(machine, model):
            return TUNING.min_cpu_tokens if asked else 0
        update = {"experts": "on-demand", "expert_ratio": model.expert_ratio, "cpu_tokens": TUNING.max_cpu_tokens}
        timing, limit = self._timing(self._base.model_copy(update=update)), TUNING.max_cpu_tokens

        def faster(tokens: int) -> bool:
            cpu, link = timing.cpu_experts_s(tokens), machine.h2d_bandwidth
            whole = tokens >= self._whole_tokens
            each = 0.0 if whole else RATES.expert_s  # seconds to launch an expert's copy
            touched = model.routed_bytes * (1.0 if whole else model.touched_share(tokens))
            over_link = touched * self._base.wire_ratio / link + each * touched / model.expert_bytes if link else inf
            return 0 < cpu < over_link

        cpu_tokens = next((tokens for tokens in range(limit, 0, -1) if faster(tokens)), 0)
        return max(cpu_tokens, TUNING.min_cpu_tokens) if asked else cpu_tokens

    @cached_property
    def _linked_share(self) -> float:
        """Share of experts that the link brings beside the CPU."""
        if not self._cpu_tokens:
            return 0.0
        if (asked := self.options.link_experts) == "auto":
            return linked_share(self.machine, self.model) if self.machine.gpu_count else 0.0
        return float(asked.removesuffix("%")) / 100

    @cached_property
    def _whole_tokens(self) -> int:
        """Minimum tokens of a pass that brings all experts: it touches nearly all, or launching each takes longer."""
        link, share = self.machine.h2d_bandwidth, ALLOWANCES.whole_share
        if self.machine.gpu_count and link and self.options.experts != "on-demand":
            copy_s = self.model.expert_bytes * self._base.wire_ratio / link
            share = min(share, copy_s / RATES.expert_s)  # the CPU launches while copies are under way
        return whole_tokens(self.model, share)

    @cached_property
    def _experts_on_demand(self) -> bool:
        """True if only experts that routers choose cross the link."""
        options, model, wire_ratio = self.options, self.model, self._base.wire_ratio
        if options.experts != "auto" or not self._chooses:
            return options.experts != "all" and self._chooses
        packed = getattr(read_options(self.case.engine, self.case.options), "packed", "auto") != "auto"
        step = model.streamed_bytes - model.routed_bytes * (1 - model.touched_share(1))
        fewer = step <= TUNING.fewer_share * model.streamed_bytes
        fewer = fewer and model.expert_bytes * wire_ratio >= TUNING.min_expert_bytes
        if not fewer or packed or model.architecture in WHOLE_EXPERTS:
            return False
        # Where the GPU has room for all layers as products read them in place (quantised in their codes, others kept
        # unpacked), none has to come. Codes in FP8 are decoded first, so that fewer are better.
        quantised = model.stored_ratio < 1 and not model.fp8_ratio
        readable = wire_ratio == 1 or model.stored_ratio == 1 or (quantised and self.transport.from_codes)
        if not (self.machine.gpu_count and readable and self.case.gpu_weights in ("auto", "100%")):
            return True
        in_place = wire_ratio if quantised else 1.0
        needed = model.streamed_bytes * in_place + model.layer_bytes + model.other_bytes
        return needed > TUNING.all_stay_share * self.machine.gpu_bytes

    def _expert_buffers(self, count: int) -> dict[str, Any]:
        """Return the fields of experts on demand, with `count` buffers or more."""
        base, model = self._base.model_copy(update={"experts": "on-demand"}), self.model
        has_gpu = self.machine.gpu_count > 0
        expert = max(1, round(model.expert_bytes * base.wire_ratio))
        chunk = largest_chunk(model, model.dense_layer_bytes, base.gpus)
        ring = -(-TUNING.ring_depth * round(chunk * base.wire_ratio) // expert)
        count = max(2, min(model.num_experts, max(count, ring)))
        chunks = max(1, -(-model.dense_layer_bytes // chunk))
        depth = max(TUNING.dense_depth, 2 * chunks)  # the next layer comes while the router of this one chooses
        linked = min(LINKED_BYTES, round(self._linked_share * model.num_experts) * expert)
        buffers = depth * Sizes(base, model).chunk + count * expert + linked if has_gpu else 0
        layer = model.dense_layer_bytes + model.expert_bytes * model.num_experts
        return {
            "experts": "on-demand",
            "whole_tokens": self._whole_tokens,
            "layer_experts": model.num_experts,
            "layer_chunks": chunks,
            "expert_buffers": count,
            "ring_depth": depth,
            "kv_buffers": depth if has_gpu else 1,
            "layer_buffers": (layer + buffers) / model.layer_bytes,
        }

    def split_free_memory(self, workload: Workload, reserved: int = 0) -> tuple[int, int]:
        """Return the ring buffers, or those for experts, and resident bytes."""
        placement, model = self.bare(workload, reserved, TUNING.ring_depth, reserved), self.model
        if not self.machine.gpu_count:  # weights that come from the same memory cannot stay in a faster one
            return placement.expert_buffers or max(TUNING.ring_depth, placement.kv_buffers), 0
        free, factor = self._free(placement, workload) * placement.gpus, (self.efficiency or Efficiency()).memory
        if placement.experts == "on-demand":
            expert = max(1, round(factor * model.expert_bytes * placement.wire_ratio))
            routed, others = (ratio * placement.form_ratio for ratio in Sizes(placement, model).at_rest)
            dense, missing = self._streamed_sizes(placement), placement.layer_experts - placement.expert_buffers
            # Beside the CPU the link brings experts in each step: dense layers that stay leave it to them.
            first = _fitting(dense, others, free)[0] * others if placement.linked_share else 0
            more = max(0, min(missing, int(free - first) // expert))
            kept, free, all_fit = _fitting(dense, others, free - more * expert)
            if all_fit:
                room = int(free / (model.expert_bytes * routed))
                kept += min(model.routed_bytes // model.expert_bytes, room) * model.expert_bytes
            return placement.expert_buffers + more, reserved + kept
        depth = max(TUNING.ring_depth, placement.kv_buffers)
        rows = placement.rows(workload.batch_size)
        buffer = Sizes(placement, model).ring_buffer(rows, workload.input_len, workload.total_len)
        buffer = round(factor * placement.gpus * buffer)  # each GPU has whole ones
        wanted = placement.layer_chunks + (KEPT_BUFFERS if placement.gpus > 1 else 0)
        more = max(0, min(wanted - depth, free // buffer))
        free -= more * buffer if placement.ring_depth else 0
        kept, *_ = _fitting(self._layer_sizes, placement.kept_ratio * placement.form_ratio, free)
        return depth + more, reserved + kept

    @cached_property
    def _layer_sizes(self) -> list[int]:
        return [parameters * self.model.dtype_bytes for parameters in self.model.layer_parameters]

    def _streamed_sizes(self, placement: Placement) -> list[int]:
        """Return the bytes of each layer that stay or stream together: all but experts on demand."""
        if placement.experts != "on-demand":
            return self._layer_sizes
        return [(layer.parameters - layer.expert_parameters) * self.model.dtype_bytes for layer in self.model.layers]

    def _resident_layers(self, placement: Placement) -> tuple[int, ...]:
        """Return the whole layers that stay: the first ones, or spread over the depth, as the engine does it."""
        if placement.tier == "gpu" or not placement.resident_bytes:
            return ()
        layer_bytes = self._streamed_sizes(placement)
        layers, share = len(layer_bytes), self.case.gpu_weights

        def choose(count: int) -> tuple[int, ...]:
            return tuple(range(min(count, layers)) if self.transport.placed_once else spread(count, layers))

        if placement.experts == "all" and share is not None and share.endswith("%"):
            return choose(round(placement.resident_bytes / sum(layer_bytes) * layers))
        count = min(layers, int(placement.resident_bytes * layers // sum(layer_bytes)))
        while _sum(layer_bytes, choose(count)) > placement.resident_bytes:  # they need not be equal
            count -= 1
        return choose(count)

    def _hold(self, placement: Placement, workload: Workload) -> Placement:
        """Choose the layers from disk that host memory keeps: spread, so that the disk has time for the others."""
        layer_bytes = self._layer_sizes
        rest = [index for index in range(len(layer_bytes)) if index not in placement.resident_layers]
        gpu, host, _ = self.tiers(placement, workload)
        used = host.total + (0 if self.machine.gpu_count else gpu.total)
        free = max(0, round(TUNING.host_share * (self.machine.host_bytes or 0)) - used) / placement.kept_ratio
        budget = parse_share(self.options.host_weights, sum(layer_bytes), int(free))
        held = _spread_within(rest, layer_bytes, budget)
        if self.options.host_weights.endswith("%"):
            held = _chosen(rest, min(len(rest), round(budget / max(1, sum(layer_bytes)) * len(layer_bytes))))
        return placement.model_copy(update={"host_layers": held, "held_bytes": _sum(layer_bytes, held)})


def _unpacking(placement: Placement, count: int) -> Placement:
    """Return the placement with `count` of its resident layers unpacked."""
    return placement.model_copy(update={"unpacked_layers": _chosen(placement.resident_layers, count)})


def _chosen(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` of the layers, spread evenly."""
    return tuple(layers[index] for index in spread(count, len(layers)))


def _spread_within(layers: Sequence[int], sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Return as many of the layers as `room` bytes hold, spread evenly."""
    return _chosen(layers, largest(lambda count: _sum(sizes, _chosen(layers, count)) <= room, len(layers)))


def _sum(sizes: Sequence[int], layers: Iterable[int]) -> int:
    return sum(sizes[index] for index in layers)


def _fitting(layer_bytes: Sequence[int], ratio: float, free: int) -> tuple[int, int, bool]:
    """Return the bytes that fit, the rest, and whether all fit."""
    kept = 0
    for size in layer_bytes:
        free -= max(1, round(size * ratio))
        if free < 0:
            return kept, free, False
        kept += size
    return kept, free, True
