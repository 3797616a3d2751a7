"""Seconds of a pass at every bottleneck, from bytes and bandwidths alone.

A decode step reads every weight once: t = max(bytes over the link / link, bytes in GPU memory / HBM, FLOPs / compute,
bytes out of host memory / DRAM), whatever the batch. Prefill does the same in passes of at most `PREFILL_TOKENS`. A GPU
that unpacks weights, also resident coded ones, does so before it computes with them: these two add up. What a ring of
buffers cannot hold while resident layers compute, the link brings afterwards.
`Efficiency` holds how far an engine stays behind the physics; `zinfer.analysis.calibrate` fits it to measurements.
`LIMITS` is the physics alone, which no engine passes on the machine's peak rates (`Machine.at_peak`).

    Timing(Placement(tier="host"), model, machine).step(batch_size=32, context=528).bound_by        # "link"

Sources: the roofline of Williams et al. 2009 (doi:10.1145/1498765.1498785); FLOPs as in `zinfer.core.model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Literal, NamedTuple

from pydantic import Field

from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import counted
from zinfer.core.value import Frozen
from zinfer.plan.bytes import EAGER, Placement, Sizes

Bound = Literal["link", "hbm", "unpacking", "compute", "gather", "host memory", "cpu attention", "nvme", "launch"]


@dataclass(frozen=True)
class Rates:
    """Tuned numbers of the arithmetic of a pass."""

    # Between its matrix products a layer's prefill reads and writes GPU memory, one kernel after the other: passes over
    # a token's hidden values (two norms, two sums, heads split and merged), passes over its values within the
    # feed-forward network (a fused activation; BLOOM's is nine kernels), and bytes of each score that is kept.
    hidden_passes: int = 20
    ffn_passes: Mapping[str, int] = field(default_factory=lambda: {"": 3, "bloom": 21})
    score_bytes: int = 20
    # Cores that attend to a KV cache in host memory take bandwidth from the link: the shares of the cores to choose
    # from, and the part of the link's time in which they must be done, as the CPU also launches the next layer. Too few
    # cores make every layer late, too many cost the link a twentieth at most.
    cpu_shares: tuple[float, ...] = (0.75, 0.625, 0.5, 0.375, 0.25)
    cpu_time: float = 0.5
    link_keeps: float = 0.95  # link's rate while all cores attend: 0.95 measured with 16 cores, 0.92 with 64
    # Products that read codes of resident weights, as a share of the bandwidth of GPU memory; each further group of
    # this many tokens reads them again.
    codes_rate: float = 0.5
    codes_at_once: int = 32
    unpacking: float = 0.4  # unpacking of coded weights, as a share of the bandwidth of GPU memory
    # Unpacking by torch's operations, as the same share: from DeepSpeed's steps of all of BLOOM-176B in int4 on an
    # H100, at two batch sizes, which the GPU bounds.
    torch_unpacking: float = 0.455
    cache_bytes: int = 128 << 20  # no GPU has a larger L2 cache (B200: 126 MB); a smaller unpacked layer may stay in it
    # Smallest size of losslessly coded bf16 weights: 8 bits of sign and mantissa, and the entropy of the exponents, 2.5
    # bits for weights of a normal distribution (`zinfer study codec` prints the bound of a checkpoint); the same of FP8
    # codes (e4m3), with scales for blocks of weights.
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
    memory: float = 1.0  # GPU bytes taken over bytes counted, besides weights and KV cache
    perfect: bool = False  # the physics alone: everything overlaps, and nothing passes between matrix products
    # Error of predicted throughput in 9 of 10 cases, as a share, with offload and without; None: never measured
    error: float | None = None
    resident_error: float | None = None
    points: int = 0  # number of measurements behind the factors

    def for_model(self, model: ModelSpec) -> "Efficiency":
        """Return the efficiency that holds for `model`, with routed experts or without."""
        if not model.num_experts:
            return self
        routed = {"link_share": self.expert_link_share, "mfu": self.expert_mfu}
        return self.model_copy(update={name: value for name, value in routed.items() if value is not None})

    def describe(self) -> str:
        """Return the factors in one line."""
        rates = [f"{self.link_share:.1%} of the link"]
        if self.hbm_share < 1:
            rates.append(f"{self.hbm_share:.0%} of the GPU memory's bandwidth")
        if self.unpack_share != RATES.unpacking:
            rates.append(f"unpacking at {self.unpack_share:.0%} of the GPU memory's bandwidth")
        if self.layer_s:
            rates.append(f"{self.layer_s * 1e3:.2f} ms to launch a layer")
        routed = [] if self.expert_link_share is None else [f"{self.expert_link_share:.1%} of the link"]
        routed += [] if self.expert_mfu is None else [f"{self.expert_mfu:.0%} of the matmul rate"]
        experts = f" (with routed experts {' and '.join(routed)})" if routed else ""
        rates.append(f"{self.mfu:.0%} of the matmul rate{experts}")
        resident = "" if self.resident_error is None else f" ({self.resident_error:.0%} without offload)"
        band = "" if self.error is None else f"; throughput within {self.error:.0%}{resident} in 9 of 10 cases"
        return f"{', '.join(rates)}, working memory x {self.memory:.2f}, from {counted(self.points, 'point')}{band}"


LIMITS = Efficiency(link_share=1.0, mfu=1.0, perfect=True)


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

    def step(self, batch_size: int, context: int, ready: int = 0, drafts: int = 0) -> Times:
        """Time a decode step with `context` cached tokens on average.

        `ready` bytes are in the ring when it begins. It verifies `drafts` tokens of each sequence besides, for all of
        which the cache is read once.
        """
        placement, model, tokens = self.placement, self.model, batch_size * (1 + drafts)
        rows, kv_copies = placement.rows(batch_size), 0
        if not placement.kv_on_cpu:
            kv_copies = ceil(placement.host_rows(rows) / placement.prefill_rows(rows, max(1, context)))
        work = _Work(
            read=model.parameters_read(tokens) * model.dtype_bytes,
            flops=model.decode_flops(tokens, context),
            kv=round(model.kv_bytes(batch_size, context) * placement.kv_ratio),
            host_kv=self._sizes.host_kv(batch_size, context),
            ready=ready,
            tokens=tokens,
            kv_copies=kv_copies,
        )
        if placement.graphs and not drafts:
            return replace(self, efficiency=self.efficiency.model_copy(update={"layer_s": 0.0}))._pass(work)
        return self._pass(work)

    def prefill(self, batch_size: int, input_len: int, ready: int = 0) -> Times:
        """Time a whole prefill, of all its passes; `ready` as for `step`."""
        placement, model = self.placement, self.model
        rows = placement.rows(batch_size)
        passes = 1 if placement.blocks else ceil(rows / placement.prefill_rows(rows, input_len))
        work = _Work(
            read=model.weight_bytes,
            flops=model.prefill_flops(batch_size, input_len) // passes,
            written=self._sizes.host_kv(batch_size, input_len) // passes,
            between=_bytes_between_products(model, batch_size, input_len) // passes,
            ready=ready // passes,
        )
        times = self._pass(work)
        if times.seconds is None:
            return times
        limits = {bound: seconds * passes for bound, seconds in times.limits.items()}
        return Times(seconds=times.seconds * passes, bound_by=times.bound_by, limits=limits)

    def with_best_cores(self, batch_size: int, context: int) -> Placement:
        """Return the placement with the best share of the CPU's cores."""
        best, shortest = self.placement, self.step(batch_size, context).seconds
        for share in RATES.cpu_shares:
            fewer = replace(self, placement=self.placement.model_copy(update={"kv_cpu_share": share}))
            times = fewer.step(batch_size, context)
            in_time = times.limits.get("cpu attention", 0.0) <= RATES.cpu_time * times.limits.get("link", 0.0)
            if in_time and times.seconds is not None and shortest is not None and times.seconds < shortest:
                best, shortest = fewer.placement, times.seconds
        return best

    def attention_bytes(self, kv: float) -> float:
        """Return the bytes that attention to a KV cache reads and writes.

        A cache in 8 bits is dequantised to the model's type, which is written and read, before products multiply it.
        """
        dequantised = self.placement.kv_ratio < 1 and not self.efficiency.perfect
        return kv + 2 * kv / self.placement.kv_ratio if dequantised else kv

    def contended_rates(self, cpu: float, host_kv: int, copying: float) -> tuple[float, float]:
        """Return the seconds of CPU attention and copies that share memory.

        All cores alone attend to `cpu` of the `host_kv` bytes a second; the copies alone take `copying` seconds. The
        rate left to each was measured; otherwise the CPU has its part of the memory's bandwidth and the link nearly all
        of its own. Fewer cores take less from the link, down to where it loses nothing; but each of them waits as long
        for memory as if all attended. (The links of several GPUs count as one here.)
        """
        machine, share, link = self.machine, self.placement.kv_cpu_share, self.machine.h2d_bandwidth
        if link is None or self.placement.tier != "host":
            return host_kv / (share * cpu), copying
        part = min(1.0, (machine.host_bandwidth or inf) / (cpu + link))
        slow_cpu = min(cpu, machine.shared_attention_bandwidth or part * cpu)
        slow_link = min(link, machine.shared_h2d_bandwidth or max(part, RATES.link_keeps) * link)
        together = min(slow_cpu + slow_link, machine.host_bandwidth or inf)
        lost = cpu + link - together  # bandwidth that both lose while all cores attend
        loss = max(0.0, share * cpu + link - together) / lost if lost > 0 else 0.0
        cpu_rate, link_share = share * slow_cpu, 1 - loss * (1 - slow_link / link)
        both = min(host_kv / cpu_rate, copying / link_share)
        return both + (host_kv - cpu_rate * both) / (share * cpu), copying + (1 - link_share) * both

    def _at_coding_bound(self) -> "Timing":
        """Return the timing with coded weights of the smallest possible size."""
        placement, model = self.placement, self.model
        bound = placement.wire_ratio
        if model.stored_ratio == 1:
            bound = RATES.coded_bound
        elif placement.codec == "lossless":
            bound = model.stored_ratio - (1 - RATES.fp8_bound) * model.fp8_ratio
        ratio = min(placement.wire_ratio, bound)
        return replace(self, placement=placement.model_copy(update={"wire_ratio": ratio}))

    def _pass(self, work: _Work) -> Times:
        """Time a pass: its slowest limit, or longer where its parts cannot overlap."""
        if self.efficiency.perfect and self.placement.wire_ratio < 1:
            return self._at_coding_bound()._limited(work)
        return self._limited(work)

    def _limited(self, work: _Work) -> Times:
        placement, model, machine, sizes = self.placement, self.model, self.machine, self._sizes
        efficiency, tokens, gpus = self.efficiency.for_model(model), work.tokens, placement.gpus
        link = machine.h2d_bandwidth if placement.pinned else machine.pageable_bandwidth
        streamed, unpacked = sizes.wire(tokens), sizes.unpacked(tokens)
        weights = max(0, streamed - work.ready)
        over_link = weights + (0 if placement.kv_on_cpu else work.host_kv)
        from_disk = placement.from_disk(weights)
        from_host = weights + work.host_kv + from_disk  # what comes from disk is written to host memory first
        if machine.hbm_bandwidth is None or machine.matmul_flops is None or (over_link and link is None):
            return Times()
        # A streamed weight is written to GPU memory before it is read, by an engine with a ring as it crosses the link;
        # without a GPU it is unpacked from where it is.
        arrived: float = streamed if machine.gpu_count or not placement.ring_depth else 0
        if efficiency.perfect and model.layer_bytes > RATES.cache_bytes:  # read as they lie in memory, written whole
            arrived += unpacked * (placement.wire_ratio + 1)
        hbm, read = machine.hbm_bandwidth * efficiency.hbm_share, work.read
        if tokens is not None and sizes.reads_codes(tokens):
            rate = 1.0 if efficiency.perfect else RATES.codes_rate / ceil(tokens / RATES.codes_at_once)
            read *= 1 - sizes.resident / model.weight_bytes * (1 - placement.wire_ratio / rate)
        attended = self.attention_bytes(work.kv - (work.host_kv if placement.kv_on_cpu else 0))
        limits: dict[Bound, float] = {
            "hbm": (read + arrived + attended / gpus) / hbm,
            "compute": work.flops / gpus / (efficiency.mfu * machine.matmul_flops)
            + (0 if efficiency.perfect else work.between / gpus / machine.hbm_bandwidth),
            "launch": efficiency.layer_s * model.num_layers,
        }
        unpacking = 0.0
        if not efficiency.perfect:
            unpacking = self._unpacking_s(unpacked)
            unpacking += placement.dequantised_bytes / (RATES.torch_unpacking * machine.hbm_bandwidth)
        if unpacking:
            limits["unpacking"] = unpacking
        copying, chooses = 0.0, placement.chooses(tokens)
        if over_link and link is not None:  # each GPU brings its part of the weights over its link
            # All links together were measured with the GPUs that there are; more GPUs would have links of their own.
            measured = (machine.links_bandwidth or inf) * max(1.0, gpus / max(1, machine.gpu_count))
            links = efficiency.link_share * min(gpus * link, measured)
            copying = limits["link"] = over_link / links
            if tokens is not None and chooses and not efficiency.perfect:
                limits["link"] += self._router_wait_s(links)
        if gpus > 1 and placement.tier == "host" and machine.gather_bandwidth is not None:  # resident layers, too
            gathered = placement.wire_ratio * model.streamed_bytes + (model.other_bytes if placement.divided else 0)
            limits["gather"] = gathered * (gpus - 1) / gpus / machine.gather_bandwidth
        if work.written and machine.duplex_bandwidth is not None:
            limits["link"] = max(limits.get("link", 0.0), work.written / gpus / machine.duplex_bandwidth)
        if from_host and machine.host_bandwidth is not None:  # all links, and the CPU, read from one memory
            limits["host memory"] = from_host / machine.host_bandwidth
        cpu = machine.attention_rate(max(1, model.num_heads // max(1, model.num_kv_heads)))
        if work.host_kv and placement.kv_on_cpu and cpu is not None and efficiency.perfect:
            limits["cpu attention"] = work.host_kv / cpu
        elif work.host_kv and placement.kv_on_cpu and cpu is not None:
            # These follow each other in every layer: weights are unpacked, the GPU computes, the CPU attends.
            on_gpu = unpacking + limits["hbm"] + limits["compute"] + limits["launch"]
            # A value in 8 bits takes a core as long as one in 16, for which the rate was measured.
            values = round(work.host_kv / placement.kv_ratio)
            attending, contended = self.contended_rates(cpu, values, limits.get("link", 0.0))
            limits["cpu attention"] = attending + on_gpu
            if "link" in limits:
                limits["link"] = contended
        if placement.tier == "nvme":
            if machine.nvme_bandwidth is None:
                return Times()
            in_ring = placement.disk_ring_bytes * work.ready / max(1, placement.ring_depth * sizes.chunk)
            limits["nvme"] = max(0.0, from_disk - in_ring) / machine.nvme_bandwidth
        times = _slowest(limits)
        assert times.seconds is not None
        if placement.divided and not efficiency.perfect and "gather" in limits:
            link_limits: dict[Bound, float] = {bound: limits.get(bound, 0.0) for bound in ("link", "gather")}
            if (seconds := sum(link_limits.values())) > times.seconds:
                times = _slowest(link_limits).model_copy(update={"seconds": seconds, "limits": limits})
        # One queue of the GPU unpacks a layer into the only buffer and computes it: these never overlap.
        queue = unpacking + max(limits["hbm"], limits["compute"])
        if unpacking and queue > (times.seconds or 0.0):
            bound: Bound = max(("unpacking", "hbm", "compute"), key=lambda bound: limits[bound])
            times = Times(seconds=queue, bound_by=bound, limits=limits)
        if unpacked and unpacking and machine.gpu_count and not (chooses or placement.kv_on_cpu):
            late = queue + self._late_s(queue, unpacking, copying, over_link, work.kv_copies)
            if late > (times.seconds or 0.0):
                times = _slowest(limits).model_copy(update={"seconds": late})
        copies = max(limits.get("link", 0.0), limits.get("nvme", 0.0), limits.get("host memory", 0.0))
        if placement.overlapped or not copies:
            return times
        resident = read * sizes.resident / model.weight_bytes / hbm
        in_turn = copies + max(limits["compute"], limits["launch"], resident)
        return times.model_copy(update={"seconds": max(times.seconds or 0.0, in_turn)})

    def _router_wait_s(self, links: float) -> float:
        """Return the seconds in which the link waits for routers.

        In each layer these are its launches, the unpacking and reading of all but its experts, less the copy of these
        for a later layer.
        """
        model, placement = self.model, self.placement
        dense = model.streamed_bytes - model.routed_bytes
        copied = max(0, dense - self._sizes.resident)
        unpacking = self._unpacking_s(dense if placement.wire_ratio < 1 else copied)
        launching = self.efficiency.layer_s * model.num_layers
        before = launching + unpacking + dense / (self.machine.hbm_bandwidth or inf)
        return max(0.0, before - copied * placement.wire_ratio / links)

    def _late_s(self, on_gpu: float, unpacking: float, copying: float, over_link: int, kv_copies: int) -> float:
        """Return the seconds in which the GPU waits for late layers.

        Copies are in order, and while a layer computes its KV cache is in the ring as well, in `kv_copies` copies. So
        when a layer that streams has its turn, the other buffers hold as much of it as the link brought meanwhile, and
        no more than fits; the rest is unpacked as it comes.
        """
        placement, model, sizes = self.placement, self.model, self._sizes
        layers: float = model.num_layers
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


def _bytes_between_products(model: ModelSpec, batch_size: int, length: int) -> int:
    passes = RATES.ffn_passes.get(model.architecture, RATES.ffn_passes[""])
    ffn = passes * model.ffn_size * max(1, model.experts_per_token)
    token = (RATES.hidden_passes * model.hidden_size + ffn) * model.dtype_bytes
    scores = model.num_heads * length * RATES.score_bytes if model.architecture in EAGER else 0
    return batch_size * length * (token + scores) * model.num_layers


def _slowest(limits: dict[Bound, float]) -> Times:
    bound_by = max(limits, key=lambda bound: limits[bound])
    return Times(seconds=limits[bound_by], bound_by=bound_by, limits=limits)
