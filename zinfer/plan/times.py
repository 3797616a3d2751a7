"""Seconds of a pass at every bottleneck, from bytes and bandwidths alone.

A decode step reads every weight once: t = max(bytes over the link / link, bytes in GPU memory / HBM, FLOPs / compute,
bytes out of host memory / DRAM), whatever the batch. Prefill does the same in passes of at most `PREFILL_TOKENS`.
`LIMITS` is this physics alone. An `Efficiency` makes it a prediction, of what an engine does besides and cannot
overlap: unpacking, small kernels, layers that come late, the last layer. `zinfer.analysis.calibrate` fits it.

Sources: the roofline of Williams et al. 2009 (doi:10.1145/1498765.1498785); FLOPs as in `zinfer.core.model`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from math import ceil, inf
from typing import Literal, NamedTuple

from pydantic import Field

from zinfer.core.engine import LINKED_BYTES
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.value import Frozen
from zinfer.plan.bytes import Placement, Sizes

Bound = Literal[
    "link", "hbm", "unpacking", "compute", "gather", "host memory", "cpu attention", "cpu experts", "nvme", "launch"
]


@dataclass(frozen=True)
class Rates:
    """Tuned numbers of the arithmetic of a pass."""

    # Passes of a layer's prefill over GPU memory between matrix products: over hidden values (norms, sums, heads), over
    # values in the feed-forward network (BLOOM's eager activation is nine kernels), over hidden values of each expert
    # of a token (from prefills of Mixtral and Qwen3); and bytes of a score without a fused kernel, or with ALiBi.
    hidden_passes: int = 20
    ffn_passes: Mapping[str, int] = field(default_factory=lambda: {"": 3, "eager bloom": 21, "gpt_oss": 95})
    expert_passes: int = 38
    score_bytes: Mapping[str, int] = field(default_factory=lambda: {"bloom": 4, "eager bloom": 20, "gpt_oss": 30})
    attention_factor: float = 1.5  # time of a FLOP of fused attention over a product's: prefills of 31,000 tokens
    kernel_s: float = 50e-6  # of a layer's small kernels in a decode step: steps of OPT-30B without offload
    # Seconds to launch a layer of a prefill, dense or with routed experts: prompts of 512 tokens where layers stay.
    prefill_layer_s: tuple[float, float] = (1e-3, 2e-3)
    # The CPU launches copies and kernels of each expert on demand, and waits for each router: from steps of gpt-oss-20b
    # and gpt-oss-120b on H100s; layers of other models take `Efficiency.layer_s`.
    expert_s: float = 0.33e-3
    routed_layer_s: Mapping[str, float] = field(default_factory=lambda: {"gpt_oss": 3.25e-3})
    # Shares of the cores that may attend to a KV cache in host memory, as they take bandwidth from the link, and the
    # part of the link's time in which they must be done, as the CPU also launches the next layer.
    cpu_shares: tuple[float, ...] = (0.75, 0.625, 0.5, 0.375, 0.25)
    cpu_time: float = 0.5
    # Experts on the CPU: seconds of a layer besides reading them; and the rate of codes of 4 to 6 bits over that of
    # attention, that of other types, of codes without AVX-512, and of all over that of memory: steps of gpt-oss-120b,
    # of Mixtral and DeepSeek-V3 on 16 cores, and the code alone with AVX2. FLOPs a second of a core on 4-bit codes: a
    # prototype. Cores of a machine that was not probed; and the CPU's rate over that of a copy in host memory, where
    # the former is not known.
    cpu_layer_s: float = 80e-6
    cpu_codes: float = 1.15
    cpu_floats: float = 1.0
    avx2_codes: float = 0.8
    memory_codes: float = 0.8
    core_flops: float = 40e9
    # Rate of experts that the GPU brings, unpacks and multiplies beside the CPU, over that of the link: steps of
    # gpt-oss-120b on an H200, where a kernel alone copies at 0.91 of it.
    linked_rate: float = 0.7
    assumed_cores: int = 16
    cpu_reads: float = 0.6
    assumed_reads: float = 50e9  # the same of a host that was not measured: two channels of DDR5-5600 carry 89.6 GB/s
    eight_bits: float = 0.75  # time of a core for a value in 8 bits, over one in 16: from BLOOM-176B on 64 cores
    link_keeps: float = 0.95  # link's rate while all cores attend: 0.95 measured with 16 cores, 0.92 with 64
    codes_rate: float = 0.72  # of GPU memory, where products read codes: experts of gpt-oss-120b and Mixtral
    unpacking: float = 0.4  # unpacking of coded weights, as a share of the bandwidth of GPU memory
    torch_unpacking: float = 0.455  # the same by torch's operations: DeepSpeed's steps of BLOOM-176B in int4 on an H100
    # Smallest size of coded bf16 weights: 8 bits, and the entropy of exponents, 2.5 bits for weights of a normal
    # distribution (`zinfer study codec` prints a checkpoint's); the same of FP8 codes (e4m3) with scales for blocks.
    coded_bound: float = 0.65
    fp8_bound: float = 0.81


RATES = Rates()


class Efficiency(Frozen):
    """Efficiency of an engine, its distance from the physical limits; the defaults are a good engine's."""

    link_share: float = 0.95  # share of the link's bandwidth that streamed bytes reach
    hbm_share: float = 1.0  # share of the GPU memory's bandwidth that layers reach whose weights are there
    unpack_share: float = RATES.unpacking  # rate at which coded weights are unpacked, over the GPU memory's bandwidth
    layer_s: float = 0.0  # seconds to launch one decoder layer, the minimum that a layer takes
    mfu: float = 0.6  # share of the machine's matmul rate, where compute is the bottleneck
    # The same two of models with routed experts, whose matrix products are grouped, and whose experts are one tensor in
    # a layer, which some engines fetch at once; None: equal
    expert_link_share: float | None = None
    expert_mfu: float | None = None
    expert_kernel_s: float = 0.0  # seconds of a layer's kernels besides, where they read experts from their codes
    memory: float = 1.0  # GPU bytes taken over bytes counted, besides weights and KV cache
    perfect: bool = False  # the physics alone: everything overlaps, and nothing passes between matrix products
    errors: tuple[tuple[str, float], ...] = ()  # error of the throughput in 9 of 10 cases, as a share, by `kind`
    points: int = 0  # number of measurements behind the factors

    def for_model(self, model: ModelSpec) -> "Efficiency":
        """Return the efficiency that holds for `model`, with routed experts or without."""
        link_share, mfu = self.expert_link_share or self.link_share, self.expert_mfu or self.mfu
        if not model.num_experts or (link_share, mfu) == (self.link_share, self.mfu):
            return self
        return self.model_copy(update={"link_share": link_share, "mfu": mfu})


LIMITS = Efficiency(link_share=1.0, mfu=1.0, perfect=True)


@cache
def shipped() -> Mapping[str, Efficiency]:
    """Return the efficiency of each engine, fitted to the records in sweeps/results."""
    text = (files("zinfer") / "catalog" / "calibration.json").read_text(encoding="utf-8")
    return {engine: Efficiency.model_validate(factors) for engine, factors in json.loads(text).items()}


def kind(placement: Placement, model: ModelSpec, machine: Machine) -> str:
    """Name the kind of a load: how right a prediction is, only records of the same kind tell."""
    stored = "fp8" if model.fp8_ratio else "quantised" if model.stored_ratio < 1 else placement.codec
    name = model.weights if model.weights != "as-released" else "uncoded" if stored == "none" else stored
    moving = "from disk" if placement.tier == "nvme" else "streamed" if Sizes(placement, model).wire() else "resident"
    return f"{name} {'experts' if model.num_experts else 'dense'}, {moving}, {machine.gpu_name}"


class Times(Frozen):
    """Seconds of a pass by bottleneck; None if a rate is unknown."""

    seconds: float | None = None
    bound_by: Bound | None = None
    limits: dict[Bound, float] = Field(default_factory=dict)


class _Work(NamedTuple):
    """Work of a pass, in bytes but for `flops`, `tokens` and `kv_copies`."""

    read: float  # weights read from GPU memory
    flops: int
    kv: int = 0  # KV cache that attention reads
    host_kv: int = 0  # part of it in host memory
    written: int = 0  # keys and values sent to the host while weights come
    between: int = 0  # GPU memory read and written between matrix products
    ready: int = 0  # weights in the ring when the pass begins; of those from disk, the host's ring in proportion
    tokens: int | None = None  # None: a long pass
    launched: bool = True  # kernel by kernel, not as a CUDA graph
    kv_copies: int = 0  # copies a layer in which the cache on the host comes


@dataclass(frozen=True)
class Timing:
    """Seconds of passes of a model in a placement on a machine."""

    placement: Placement
    model: ModelSpec
    machine: Machine
    efficiency: Efficiency = field(default_factory=Efficiency)

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.placement, self.model)

    @cached_property
    def _factors(self) -> Efficiency:
        return self.efficiency.for_model(self.model)

    def step(self, batch_size: int, context: int, ready: int = 0, drafts: int = 0) -> Times:
        """Time a decode step, with `context` cached tokens on average. `ready` bytes are in the ring."""
        placement, model, tokens = self.placement, self.model, batch_size * (1 + drafts)
        rows = placement.rows(batch_size)
        kv_copies = ceil(placement.host_rows(rows) / placement.prefill_rows(rows, max(1, context)))
        work = _Work(
            read=model.parameters_read(tokens) * model.dtype_bytes,
            flops=model.decode_flops(tokens, context),
            kv=round(model.kv_bytes(batch_size, context) * placement.kv_ratio),
            host_kv=self._sizes.host_kv(batch_size, context),
            ready=ready,
            tokens=tokens,
            launched=not placement.graphs or drafts > 0 or 0 < placement.cpu_tokens < tokens,
            kv_copies=0 if placement.kv_on_cpu else kv_copies,
        )
        return self._pass(work)

    def prefill(self, batch_size: int, input_len: int, ready: int = 0) -> Times:
        """Time a whole prefill, of all its passes; `ready` as for `step`."""
        placement, model = self.placement, self.model
        rows = placement.rows(batch_size)
        passes = 1 if placement.blocks else ceil(rows / placement.prefill_rows(rows, input_len))
        flops = model.prefill_flops(batch_size, input_len)
        if not self.efficiency.perfect and not (placement.eager or model.architecture == "gpt_oss"):
            flops += round((RATES.attention_factor - 1) * model.prefill_attention_flops(batch_size, input_len))
        work = _Work(
            read=model.weight_bytes,
            flops=flops // passes,
            written=self._sizes.host_kv(batch_size, input_len) // passes,
            between=_bytes_between_products(model, batch_size, input_len, placement.eager) // passes,
            ready=ready // passes,
        )
        seconds, bound_by, limits = (times := self._pass(work)).seconds, times.bound_by, times.limits
        limits = {bound: each * passes for bound, each in limits.items()}
        return Times(seconds=seconds and seconds * passes, bound_by=bound_by, limits=limits)

    def with_best_cores(self, batch_size: int, context: int) -> Placement:
        """Return the placement with the best share of the CPU's cores."""
        best, shortest = self.placement, self.step(batch_size, context).seconds
        for share in RATES.cpu_shares:
            fewer = replace(self, placement=self.placement.model_copy(update={"kv_cpu_share": share}))
            times = fewer.step(batch_size, context)
            if times.limits.get("cpu attention", 0.0) > RATES.cpu_time * times.limits.get("link", 0.0):
                break  # fewer cores take longer still
            if times.seconds is not None and shortest is not None and times.seconds < shortest:
                best, shortest = fewer.placement, times.seconds
        return best

    def cpu_experts_s(self, tokens: int | None) -> float:
        """Return the seconds in which the CPU computes a pass's experts; 0 if the GPU does."""
        machine, model, touched = self.machine, self.model, self._sizes.touched(tokens)
        if not touched or tokens is None:
            return 0.0
        rate = _codes_rate(machine, model)
        cores = machine.details.get("host", {}).get("cores") or RATES.assumed_cores
        pairs = tokens * model.experts_per_token / model.num_experts
        away = model.routed_bytes - self._sizes.resident_experts
        flops = 2 * away / model.dtype_bytes * pairs / (cores * RATES.core_flops)
        layers = sum(layer.expert_parameters > 0 for layer in model.layers) - len(self.placement.expert_layers)
        stored, linked = touched * self.placement.expert_ratio, self._linked_share(tokens)
        on_cpu = (1 - linked) * max(stored / rate, flops)
        on_link = linked * stored / (RATES.linked_rate * machine.h2d_bandwidth) if machine.h2d_bandwidth else 0.0
        return layers * RATES.cpu_layer_s + max(on_cpu, on_link)

    def _linked_share(self, tokens: int) -> float:
        """Return the share of a pass's experts that the link brings."""
        model, placement = self.model, self.placement
        experts = model.num_experts * model.touched_share(tokens)
        most = LINKED_BYTES // max(1, round(model.expert_bytes * placement.expert_ratio))
        return min(int(placement.linked_share * experts + 0.5), most) / experts

    def attention_bytes(self, kv: float) -> float:
        """Return the bytes that attention to a KV cache moves: one in 8 bits is dequantised first."""
        narrow = self.placement.kv_ratio < 1 and not self.efficiency.perfect
        return kv + 2 * kv / self.placement.kv_ratio if narrow else kv

    def contended_rates(self, cpu: float, host_kv: int, copying: float) -> tuple[float, float]:
        """Return the seconds of CPU attention and copies that share memory.

        All cores alone attend to `cpu` of the `host_kv` bytes a second; the copies alone take `copying` seconds. The
        rates left were measured; otherwise the CPU has its part of the memory's bandwidth and the link nearly all of
        its own. Fewer cores take less from the link, but each waits as long for memory as if all attended.
        """
        machine, share, link = self.machine, self.placement.kv_cpu_share, self.machine.h2d_bandwidth
        if link is None or self.placement.tier != "host":
            return host_kv / (share * cpu), copying
        part = min(1.0, (machine.host_bandwidth or inf) / (cpu + link))
        slow_cpu = min(cpu, machine.shared_attention_bandwidth or part * cpu)
        slow_link = min(link, machine.shared_h2d_bandwidth or max(part, RATES.link_keeps) * link)
        combined = min(slow_cpu + slow_link, machine.host_bandwidth or inf)
        lost = cpu + link - combined  # bandwidth that both lose while all cores attend
        loss = max(0.0, share * cpu + link - combined) / lost if lost > 0 else 0.0
        cpu_rate, link_share = share * slow_cpu, 1 - loss * (1 - slow_link / link)
        both = min(host_kv / cpu_rate, copying / link_share)
        return both + (host_kv - cpu_rate * both) / (share * cpu), copying + (1 - link_share) * both

    def _at_coding_bound(self) -> "Timing":
        """Return the timing with coded weights of the smallest possible size."""
        placement, model = self.placement, self.model
        bound = RATES.coded_bound if model.stored_ratio == 1 else placement.wire_ratio
        if model.stored_ratio != 1 and placement.codec == "lossless":
            bound = model.stored_ratio - (1 - RATES.fp8_bound) * model.fp8_ratio
        smallest = {"wire_ratio": min(placement.wire_ratio, bound)}
        return replace(self, placement=placement.model_copy(update=smallest))

    def _pass(self, work: _Work) -> Times:
        """Time a pass: its slowest limit, or as an engine runs it."""
        if not self.efficiency.perfect:
            return self._predicted(work)
        timing = self._at_coding_bound() if self.placement.wire_ratio < 1 else self
        limits = timing._limits(work)
        bound_by = max(limits, key=lambda bound: limits[bound], default=None)
        return Times(seconds=limits[bound_by], bound_by=bound_by, limits=limits) if bound_by else Times()

    def _over_link(self, work: _Work) -> int:
        """Return the bytes that a pass brings over the links."""
        weights = max(0, self._sizes.wire(work.tokens) - work.ready)
        return weights + (0 if self.placement.kv_on_cpu else work.host_kv)

    def _links(self) -> float | None:
        """Return the rate of all links; None if it is not known."""
        placement, machine = self.placement, self.machine
        link = machine.h2d_bandwidth if placement.pinned else machine.pageable_bandwidth
        if link is None:
            return None
        # All links together were measured with the GPUs that there are; more GPUs would have links of their own.
        measured = (machine.links_bandwidth or inf) * max(1.0, placement.gpus / max(1, machine.gpu_count))
        return self._factors.link_share * min(placement.gpus * link, measured)

    def _weights_read(self, work: _Work) -> float:
        """Return the bytes of weights that are read from GPU memory; a limit reads them as they are stored."""
        placement, model, sizes = self.placement, self.model, self._sizes
        embedding = model.vocab_size * model.hidden_size * model.dtype_bytes  # a look-up, unless it is the head, too
        read = work.read - (embedding if model.other_bytes >= 2 * embedding else 0) - sizes.touched(work.tokens)
        if self.efficiency.perfect:
            return read * (1 - model.streamed_bytes / model.weight_bytes * (1 - placement.wire_ratio))
        rate = self.efficiency.hbm_share / RATES.codes_rate  # which is the kernels' own
        if sizes.reads_codes:
            return read * (1 - sizes.stays / model.weight_bytes * (1 - rate * placement.wire_ratio))
        if sizes.code_layers:
            touched = sizes.resident_experts * (1.0 if work.tokens is None else model.touched_share(work.tokens))
            read -= touched * (1 - rate * placement.expert_ratio)
        return read

    def _limits(self, work: _Work) -> dict[Bound, float]:
        """Return the seconds at links, memories, disk and matrix products; none if a rate is unknown."""
        placement, model, machine, gpus = self.placement, self.model, self.machine, self.placement.gpus
        efficiency, links, over_link = self._factors, self._links(), self._over_link(work)
        if machine.hbm_bandwidth is None or machine.matmul_flops is None or (over_link and links is None):
            return {}
        # A streamed weight is written to GPU memory before it is read; without a GPU it is read from where it is.
        streamed = self._sizes.wire(work.tokens)
        arrived = streamed if machine.gpu_count or not placement.ring_depth else 0
        attended = self.attention_bytes(work.kv - (work.host_kv if placement.kv_on_cpu else 0))
        hbm = machine.hbm_bandwidth * efficiency.hbm_share
        limits: dict[Bound, float] = {
            "hbm": (self._weights_read(work) + arrived + attended / gpus) / hbm,
            "compute": work.flops / gpus / (efficiency.mfu * machine.matmul_flops),
        }
        if over_link and links is not None:  # each GPU brings its part of the weights over its link
            limits["link"] = over_link / links
        if work.written and machine.duplex_bandwidth is not None:
            limits["link"] = max(limits.get("link", 0.0), work.written / gpus / machine.duplex_bandwidth)
        if gpus > 1 and placement.tier == "host" and machine.gather_bandwidth is not None:  # resident layers, too
            gathered = placement.wire_ratio * model.streamed_bytes + (model.other_bytes if placement.divided else 0)
            limits["gather"] = gathered * (gpus - 1) / gpus / machine.gather_bandwidth
        weights = max(0, streamed - work.ready)
        from_disk = placement.from_disk(weights)
        from_host = weights + work.host_kv + from_disk  # what comes from disk is written to host memory first
        from_host += round(self._sizes.touched(work.tokens) * placement.expert_ratio)
        if from_host and machine.host_bandwidth is not None:  # all links, and the CPU, read from one memory
            limits["host memory"] = from_host / machine.host_bandwidth
        if placement.tier == "nvme":
            if machine.nvme_bandwidth is None:
                return {}
            in_ring = placement.disk_ring_bytes * work.ready / max(1, placement.ring_depth * self._sizes.chunk)
            limits["nvme"] = max(0.0, from_disk - in_ring) / machine.nvme_bandwidth
        return limits

    def _predicted(self, work: _Work) -> Times:
        """Time a pass as an engine runs it: not all overlaps."""
        placement, model, machine, sizes = self.placement, self.model, self.machine, self._sizes
        efficiency, tokens, limits = self._factors, work.tokens, self._limits(work)
        if not limits:
            return Times()
        hbm, links = machine.hbm_bandwidth or inf, self._links() or inf
        unpacked, over_link = sizes.unpacked(tokens), self._over_link(work)
        limits["compute"] += work.between / placement.gpus / hbm
        kernels = 0.0  # of a step: small ones, which no bytes explain
        if tokens is not None and machine.gpu_count:
            kernels = model.num_layers * RATES.kernel_s + sizes.code_layers * self.efficiency.expert_kernel_s
        limits["launch"] = max(efficiency.layer_s * model.num_layers if work.launched else 0.0, kernels)
        if tokens is None and machine.gpu_count and placement.ring_depth:  # prefills are in no graph
            limits["launch"] = model.num_layers * RATES.prefill_layer_s[bool(model.num_experts)]
        unpacking = self._unpacking_s(unpacked) + placement.dequantised_bytes / (RATES.torch_unpacking * hbm)
        if unpacking:
            limits["unpacking"] = unpacking
        copying, chooses = over_link / links, placement.chooses(tokens)
        if tokens is not None and chooses:
            each = RATES.expert_s if machine.gpu_count else 0.0
            brought = model.routed_bytes * model.touched_share(tokens) / model.expert_bytes
            if tokens == 1 and placement.codec == "lossless" and model.stored_ratio == 1 and sizes.cached_share == 1:
                brought = model.num_layers  # a layer's experts are unpacked together where all of them stay
            limits["launch"] = max(kernels, self._routed_layers_s + each * brought)
            if "link" in limits:  # the last expert of a layer is unpacked when its copy is done
                limits["link"] += self._router_wait_s(links) + each * model.num_layers
        # One queue of the GPU unpacks a layer into the only buffer, then computes it. Grouped products of experts read
        # their weights before they are busy.
        computing = limits["hbm"] + limits["compute"] if model.num_experts else max(limits["hbm"], limits["compute"])
        queue = unpacking + computing + kernels
        if cpu_experts := self.cpu_experts_s(tokens):  # the GPU waits for them in each layer
            limits["cpu experts"] = cpu_experts
            queue += cpu_experts
        cpu = machine.attention_rate(max(1, model.num_heads // max(1, model.num_kv_heads)))
        if work.host_kv and placement.kv_on_cpu and cpu is not None:
            # These follow each other in every layer: weights are unpacked, the GPU computes, the CPU attends.
            # The rate was measured for values in 16 bits.
            in_16_bits = work.host_kv / placement.kv_ratio * (RATES.eight_bits if placement.kv_ratio < 1 else 1.0)
            attending, contended = self.contended_rates(cpu, round(in_16_bits), limits.get("link", 0.0))
            on_gpu = unpacking + limits["hbm"] + limits["compute"] + limits["launch"]
            limits["cpu attention"] = attending + on_gpu
            if "link" in limits:
                limits["link"] = contended
        bound: Bound = max(limits, key=lambda name: limits[name])
        slowest, seconds, link, gather = bound, limits[bound], limits.get("link", 0.0), limits.get("gather", 0.0)
        if placement.divided and gather and link + gather > seconds:
            seconds, bound = link + gather, "gather" if gather > link else "link"
        if queue > seconds:
            parts: tuple[Bound, ...] = ("hbm", "compute", "unpacking", "launch", "cpu experts")
            seconds, bound = queue, max(parts, key=lambda name: limits.get(name, 0.0))
        if unpacked and unpacking and machine.gpu_count and not (chooses or placement.kv_on_cpu):
            late = queue + self._late_s(queue, unpacking, copying, over_link, work.kv_copies)
            seconds, bound = (late, slowest) if late > seconds else (seconds, bound)
        copies = max(limits.get("link", 0.0), limits.get("nvme", 0.0), limits.get("host memory", 0.0))
        if copies and not placement.overlapped:
            resident = self._weights_read(work) * sizes.stays / model.weight_bytes / (hbm * efficiency.hbm_share)
            seconds = max(seconds, copies + max(limits["compute"], limits["launch"], resident))
        elif copies and tokens is None:  # a prefill waits for its first layer, or computes the last one after all
            seconds = max(seconds, max(copies, queue) + min(copies, queue) / model.num_layers)
        return Times(seconds=seconds, bound_by=bound, limits=limits)

    @property
    def _routed_layers_s(self) -> float:
        """Seconds to launch all layers of a step, besides experts on demand."""
        layer_s = RATES.routed_layer_s.get(self.model.architecture, 0.0) if self.machine.gpu_count else 0.0
        return self.model.num_layers * max(self.efficiency.layer_s, layer_s)

    def _router_wait_s(self, links: float) -> float:
        """Return the seconds in which the link waits for routers."""
        model, placement = self.model, self.placement
        dense = model.streamed_bytes - model.routed_bytes
        copied = max(0, dense - self._sizes.resident)
        unpacking = self._unpacking_s(dense if placement.wire_ratio < 1 else copied)
        before = self._routed_layers_s + unpacking + dense / (self.machine.hbm_bandwidth or inf)
        return max(0.0, before - copied * placement.wire_ratio / links)

    def _late_s(self, on_gpu: float, unpacking: float, copying: float, over_link: int, kv_copies: int) -> float:
        """Return the seconds in which the GPU waits for late layers.

        While a layer computes its KV cache is in the ring as well, in `kv_copies` copies. When a layer that streams has
        its turn, the other buffers hold what the link brought meanwhile and fits; the rest is unpacked as it comes.
        """
        placement, model, sizes = self.placement, self.model, self._sizes
        layers: float = model.num_layers - len(placement.expert_layers)
        if placement.experts == "all":
            layers *= 1 - sizes.resident / model.streamed_bytes
        if not layers or not over_link:
            return 0.0
        held = max(1, placement.ring_depth - kv_copies) * sizes.chunk
        held += round(placement.expert_buffers * model.expert_bytes * placement.wire_ratio)
        ahead = copying / over_link * held * placement.gpus + unpacking / model.num_layers
        weights = min(over_link, sizes.wire())
        each = copying / over_link * (weights / layers + (over_link - weights) / model.num_layers)
        return layers * (each - min(each, ahead, on_gpu / layers))

    def _unpacking_s(self, unpacked: int) -> float:
        """Return the seconds in which the GPU unpacks bytes; uncoded ones are copied: read and written."""
        share = self.efficiency.unpack_share if self.placement.wire_ratio < 1 else 1 / 2
        return unpacked / (share * (self.machine.hbm_bandwidth or inf))


def cpu_reading_rate(machine: Machine) -> float | None:
    """Return the rate at which CPUs read host memory; None if unknown."""
    copied = machine.host_bandwidth and RATES.cpu_reads * machine.host_bandwidth
    return machine.attention_rate(1) or copied


def linked_share(machine: Machine, model: ModelSpec) -> float:
    """Return the share of experts for the link beside the CPU. Both take as long."""
    link = RATES.linked_rate * (machine.h2d_bandwidth or 0.0)
    return link / (link + _codes_rate(machine, model))


def may_compute_experts(machine: Machine, model: ModelSpec) -> bool:
    """Tell whether plans trust a CPU with experts unasked: its rate is known, and no lack of vectors."""
    fast = _has_avx512(machine) or (_has_codes(model) and machine.details["host"].get("avx2"))
    return cpu_reading_rate(machine) is not None and bool(fast)


def _has_avx512(machine: Machine) -> bool:
    """Tell whether the CPU has AVX-512, or whether that is not known."""
    return machine.details.get("host", {}).get("avx512") is not False


def _has_codes(model: ModelSpec) -> bool:
    """Tell whether the experts are codes of fewer than 8 bits."""
    return model.expert_ratio < 1 / 2


def _codes_rate(machine: Machine, model: ModelSpec) -> float:
    """Return the bytes of experts that CPUs multiply in a second."""
    share = RATES.cpu_codes if _has_codes(model) else RATES.cpu_floats
    share = share if _has_avx512(machine) else RATES.avx2_codes
    rate = share * (cpu_reading_rate(machine) or RATES.assumed_reads)
    return min(rate, RATES.memory_codes * (machine.host_bandwidth or inf))


def _bytes_between_products(model: ModelSpec, batch_size: int, length: int, eager: bool) -> int:
    kernels = "eager " * eager + model.architecture
    passes = RATES.ffn_passes.get(kernels, RATES.ffn_passes[""])
    ffn = passes * model.ffn_size * max(1, model.experts_per_token)
    hidden = RATES.hidden_passes + (RATES.expert_passes * model.experts_per_token if model.num_experts else 0)
    token = (hidden * model.hidden_size + ffn) * model.dtype_bytes
    scores = model.num_heads * length * RATES.score_bytes.get(kernels, 0)
    return batch_size * length * (token + scores) * model.num_layers
