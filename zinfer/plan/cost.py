"""Cost of a pass: bytes on every tier and seconds at every bottleneck, from shapes and bandwidths alone.

A decode step reads every weight once: t = max(bytes over the link / link, bytes in GPU memory / HBM, FLOPs / compute,
bytes out of host memory / DRAM), whatever the batch. Prefill does the same in passes of at most `PREFILL_TOKENS`. A GPU
that unpacks weights, also coded ones that stay there, does so before it computes with them: these two add up. What a
ring of buffers cannot hold while layers that stay compute, the link brings afterwards.
`Efficiency` holds how far an engine stays behind the physics; `zinfer.analysis.calibrate` fits it to measurements.
`LIMITS` is the physics alone, which no engine passes on the machine's peak rates (`Machine.at_peak`).

    setup = Placement(tier="host")
    step(setup, spec, machine, batch_size=32, context=528).bound_by        # "link"

Sources: the roofline of Williams et al. 2009 (doi:10.1145/1498765.1498785); FLOPs as in `zinfer.core.model`; offload
and residency as in FlexGen (arXiv:2303.06865), section 4.3, without its CPU-compute terms.
"""

from math import ceil, inf, log
from typing import Literal

from pydantic import Field

from zinfer.core.engine import CHUNK_BYTES, CODED_PAIRS, CODED_TOKENS, PREFILL_TOKENS, chunk_factor
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import counted
from zinfer.core.value import Frozen

# Positions of a draft model's KV cache: over tokens, for rows on their way from one micro-batch to another; and besides
# them, until the gaps of what was forgotten are closed up.
DRAFT_MOVES, DRAFT_ROOM = 1.25, 256
Bound = Literal["link", "hbm", "unpacking", "compute", "gather", "host memory", "cpu attention", "nvme", "launch"]

CONTEXT_BYTES = 600 << 20  # the CUDA context, cuBLAS workspaces and kernels, as the driver reports them
PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# If prompts pass a layer in blocks, the weights cross once anyway, and a pass only has to be long enough for the matrix
# products: as many tokens as have this many hidden values (2,048 of BLOOM-176B), and at least this many tokens.
BLOCK_VALUES, BLOCK_TOKENS = 2048 * 14336, 2048
# Between its matrix products a layer's prefill reads and writes GPU memory, one kernel after the other. These
# count the passes over a token's hidden values (two norms, two sums, heads split and merged) and over its values within
# the feed-forward network (a fused activation; BLOOM's is nine kernels), and the bytes for each score that is kept.
HIDDEN_PASSES, FFN_PASSES, FFN_PASSES_OF, SCORE_BYTES = 20, 3, {"bloom": 21}, 20
EAGER = ("bloom",)  # ALiBi: transformers has no fused kernel for it
# Cores that attend to a KV cache in host memory take bandwidth from the link. These are the shares of the cores to
# choose from, and the part of the link's time in which they must be done. The rest is for what the CPU does before and
# after attention, when it also launches the unpacking of the next layer; too few cores make every layer late, too many
# cost the link a twentieth at most.
CPU_SHARES, CPU_TIME = (0.75, 0.625, 0.5, 0.375, 0.25), 0.5
LINK_KEEPS = 0.95  # share of the link's rate left while all cores attend: 0.95 seen beside 16 cores, 0.92 beside 64
# Rate at which products of up to so many tokens read codes of weights that stay on the GPU, as a share of the bandwidth
# of GPU memory; more tokens read them again.
CODES_RATE, CODES_AT_ONCE = 0.5, 32
UNPACKING = 0.4  # rate at which coded weights are unpacked, as a share of the bandwidth of GPU memory
# Rate at which torch's operations read and write while they unpack weights, as a share of the same: from DeepSpeed's
# steps of all of BLOOM-176B in int4 on an H100, at two batch sizes, which the GPU bounds.
TORCH_RATE = 0.455
CACHE_BYTES = 128 << 20  # no GPU has a larger L2 cache (B200: 126 MB); an unpacked layer that fits need not leave it
# A pass whose tokens touch at least this share of the experts, if all are alike, brings all of them without waiting for
# the router's choice.
WHOLE_SHARE = 0.9
# Least size of losslessly coded bf16 weights: 8 bits of sign and mantissa, and the entropy of the exponents, which is
# 2.5 bits for weights of a normal distribution (`zinfer study codec` prints the bound of a checkpoint).
CODED_BOUND = 0.65
FP8_BOUND = 0.81  # the same of FP8 codes (e4m3): the entropy of codes with scales for blocks of such weights


class Bytes(Frozen):
    """Bytes on one tier, by their use."""

    weights: int = 0
    kv_cache: int = 0
    buffers: int = 0  # slots that streamed layers, or a streamed KV cache, arrive in
    activations: int = 0
    overhead: int = 0  # contexts, the process itself

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.buffers + self.activations + self.overhead


class Placement(Frozen):
    """Place of weights, KV cache and buffers, and how they move: all that an engine does, and nothing else."""

    tier: Literal["gpu", "host", "nvme"] = "gpu"  # tier of the weights that are not resident
    gpus: int = Field(default=1, ge=1)  # GPUs, each with its own link, and with its part of resident layers and of rows
    resident_bytes: int = 0  # bytes of layers that stay, on all GPUs together, besides the weights outside the layers
    resident_layers: tuple[int, ...] = ()  # numbers of whole layers that stay; spread so that the link never idles
    moved: bool = False  # layers that stay lie nowhere else: not in host memory, nor on disk
    held_bytes: int = 0  # bytes of layers that host memory keeps, if the weights are on disk
    host_layers: tuple[int, ...] = ()  # numbers of these layers, spread among those that are read from disk
    disk_ring_bytes: int = 0  # host memory that layers from disk arrive in, as they lie there; 0: two layers decoded
    codec: Literal["none", "lossless"] = "none"  # code of streamed weights on the wire
    kept_ratio: float = 1.0  # bytes of a streamed weight at rest over those of the model's dtype: 1 unless coded
    wire_ratio: float = 1.0  # bytes that cross the link over those of the model's dtype: lossless 0.67, int4 0.26
    slots: float = 2.0  # layers' worth of GPU memory that streamed weights pass through
    kv_host_share: float = 0.0  # share of the sequences with their KV cache in host memory, read at every step
    kv_on_cpu: bool = False  # the CPU attends to that cache, so that it never crosses the link
    kv_cpu_share: float = Field(default=1.0, gt=0, le=1)  # share of the CPU's cores, and of their rate, that attends
    buffers: int = 0  # ring buffers that a KV cache on the link adds to; 0: it takes two whole layers' worth
    ring_depth: int = 0  # buffers between link and slot; 0 without a ring
    layer_chunks: int = 1  # pieces that a layer crosses the link in, besides experts on demand
    experts: Literal["all", "on-demand"] = "all"  # routed experts that cross the link in a step
    whole_tokens: int = 0  # tokens in a pass from which on it brings all experts, since it needs nearly all
    layer_experts: int = 0  # routed experts of a layer that come on demand; 0 if all come with their layer
    expert_buffers: int = 0  # buffers between link and slot for single experts
    cached_experts: int = 0  # buffers beside these, for experts that stay
    kv_ratio: float = 1.0  # bytes of the KV cache over those in the model's type
    resident_others: bool = True  # embeddings, head and final norm stay on the GPU
    # Each of several GPUs keeps its part of them only, and gathers them when it needs them; a part of a layer is copied
    # when the layer before is complete.
    divided: bool = False
    also_streamed: int = 0  # bytes that a pass fetches besides the layers
    overlapped: bool = True  # copies run beside compute
    blocks: bool = False  # prefill passes go through the layers side by side, and the weights cross once for all
    pass_tokens: int = PREFILL_TOKENS  # prompt tokens in one forward pass at most, if they are several sequences'
    dequantised_bytes: int = 0  # GPU memory that a pass reads and writes where torch's operations unpack weights
    from_codes: bool = False  # quantised layers that stay are multiplied from their codes in passes of few tokens
    graphs: bool = False  # decode steps are launched as CUDA graphs: a layer's launch costs nothing
    pinned: bool = True  # weights in host memory are page-locked

    def rows(self, batch_size: int) -> int:
        """Return how many sequences of a batch are one GPU's, that with most."""
        return -(-batch_size // self.gpus)

    def prefill_rows(self, batch_size: int, input_len: int) -> int:
        """Return how many of the `batch_size` sequences of one GPU are prefilled in one forward pass."""
        return min(batch_size, max(1, self.pass_tokens // input_len))

    @property
    def holds_layer(self) -> bool:
        """True if the buffers between link and slot hold a whole layer."""
        return self.ring_depth >= self.layer_chunks and self.expert_buffers >= self.layer_experts

    def host_rows(self, batch_size: int) -> int:
        """Return how many sequences of the batch have their KV cache in host memory: its last ones."""
        return round(self.kv_host_share * batch_size)


class Efficiency(Frozen):
    """Efficiency factors of an engine, its distance from the physical limits; the defaults are a good engine's."""

    link_share: float = 0.95  # share of the link's bandwidth that streamed bytes reach
    hbm_share: float = 1.0  # share of the GPU memory's bandwidth that layers reach whose weights are there
    unpack_share: float = UNPACKING  # rate at which coded weights are unpacked, over the GPU memory's bandwidth
    layer_s: float = 0.0  # seconds to launch one decoder layer, the least that a layer takes
    mfu: float = 0.6  # share of the machine's matmul rate, where compute is the bottleneck
    # The same two of models with routed experts, whose matrix products are grouped, and whose experts are one tensor in
    # a layer, which some engines fetch at once; None: equal
    expert_link_share: float | None = None
    expert_mfu: float | None = None
    memory: float = 1.0  # GPU bytes taken over bytes counted, besides weights and KV cache
    perfect: bool = False  # the physics alone: everything overlaps, and nothing passes between matrix products
    # Error of predicted throughput in 9 of 10 cases, as a share, with offload and without; None: never measured
    error: float | None = None
    error_here: float | None = None
    points: int = 0  # number of measurements behind the factors

    def of(self, model: ModelSpec) -> "Efficiency":
        """Return the factors as they hold for `model`, with routed experts or without."""
        if not model.num_experts:
            return self
        own = {"link_share": self.expert_link_share, "mfu": self.expert_mfu}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})

    def describe(self) -> str:
        """Return the factors in one line."""
        hbm = f", {self.hbm_share:.0%} of the GPU memory's bandwidth" if self.hbm_share < 1 else ""
        if self.unpack_share != UNPACKING:
            hbm += f", unpacking at {self.unpack_share:.0%} of the GPU memory's bandwidth"
        launch = f"{hbm}, {self.layer_s * 1e3:.2f} ms to launch a layer" if self.layer_s else hbm
        here = "" if self.error_here is None else f" ({self.error_here:.0%} without offload)"
        band = "" if self.error is None else f"; throughput within {self.error:.0%}{here} in 9 of 10 cases"
        link = "" if self.expert_link_share is None else f"{self.expert_link_share:.1%} of the link"
        mfu = "" if self.expert_mfu is None else f"{self.expert_mfu:.0%} of the matmul rate"
        routed = f" (with routed experts {' and '.join(filter(None, (link, mfu)))})" if link or mfu else ""
        return (
            f"{self.link_share:.1%} of the link{launch}, {self.mfu:.0%} of the matmul rate{routed}, working memory "
            f"x {self.memory:.2f}, from {counted(self.points, 'point')}{band}"
        )


LIMITS = Efficiency(link_share=1.0, mfu=1.0, perfect=True)


class Times(Frozen):
    """Seconds of a pass, None if the machine's figures are not known, and the bottleneck that sets them."""

    seconds: float | None = None
    bound_by: Bound | None = None
    limits: dict[Bound, float] = Field(default_factory=dict)


def wire_bytes(setup: Placement, model: ModelSpec, tokens: int | None = None) -> int:
    """Return the weight bytes that one pass of `tokens` tokens moves over the links, by default a long one.

    With experts on demand these are the experts that the tokens touch, less those that stay on the GPU: as many as the
    cache meets of what a step needs. A long pass brings all experts.
    """
    if setup.tier == "gpu":
        return 0
    left = max(0, model.streamed_bytes - setup.resident_bytes)
    if tokens is not None and chooses(setup, tokens):
        left += _needed_experts(setup, model, tokens) - min(left, model.routed_bytes)
    return round((left + setup.also_streamed) * setup.wire_ratio)


def unpacked_bytes(setup: Placement, model: ModelSpec, tokens: int | None = None) -> int:
    """Return the weight bytes, as the model computes with them, that a pass of `tokens` tokens, by default a long one,
    unpacks into the slot that layers compute in; 0 for engines without a ring.

    Whatever comes through the ring is unpacked, or copied if it is not coded. Coded weights that stay on the GPU stay
    coded: each pass unpacks them anew, as it does experts of the cache, and the parts of layers that several GPUs
    share. Uncoded layers that stay are computed where they are; so are quantised ones in a pass of few tokens.
    """
    if setup.tier == "gpu" or not setup.ring_depth:
        return 0
    experts = 0
    if setup.experts == "on-demand":
        touched = model.touched_share(tokens) if tokens is not None and chooses(setup, tokens) else 1.0
        experts = round(model.routed_bytes * touched)
    layers = model.streamed_bytes - (model.routed_bytes if setup.experts == "on-demand" else 0)
    unpacked = setup.wire_ratio < 1 and not reads_codes(setup, model, tokens)
    in_place = 0 if unpacked or setup.gpus > 1 else min(setup.resident_bytes, layers)
    return layers - in_place + experts


def reads_codes(setup: Placement, model: ModelSpec, tokens: int | None) -> bool:
    """Tell whether a pass of `tokens` tokens, None for a long one, multiplies quantised layers that stay on the GPU
    from their codes."""
    if not setup.from_codes or tokens is None or setup.experts == "on-demand":
        return False
    pairs = tokens * model.experts_per_token if model.num_experts else 0
    return tokens <= CODED_TOKENS and pairs <= CODED_PAIRS * model.num_experts


def chooses(setup: Placement, tokens: int) -> bool:
    """Tell whether a pass of `tokens` tokens brings only the routed experts that its routers choose."""
    return setup.experts == "on-demand" and tokens < setup.whole_tokens


def cached_share(setup: Placement, model: ModelSpec) -> float:
    """Return the share of the routed experts that the GPU has room for, after all that every pass needs."""
    left = max(0, model.streamed_bytes - setup.resident_bytes)
    return 1 - min(left, model.routed_bytes) / max(1, model.routed_bytes)


def _needed_experts(setup: Placement, model: ModelSpec, tokens: int) -> int:
    """Return the bytes of the routed experts that a pass touches and that are not on the GPU."""
    hits = model.hits("lfu", cached_share(setup, model), tokens)
    return round(model.routed_bytes * model.touched_share(tokens) * (1 - hits))


def disk_bytes(setup: Placement, wire: int) -> int:
    """Return how many of the `wire` bytes that a pass moves over the links come from disk in it."""
    return max(0, wire - round(setup.held_bytes * setup.wire_ratio)) if setup.tier == "nvme" else 0


def whole_tokens(model: ModelSpec) -> int:
    """Return the least number of tokens in a pass that are expected to touch `WHOLE_SHARE` of the experts."""
    missed = 1 - model.touched_share(1)
    return 1 if missed <= 0 else max(1, ceil(log(1 - WHOLE_SHARE) / log(missed)))


def block_tokens(model: ModelSpec) -> int:
    """Return the prompt tokens of one forward pass where prompts go through each layer in blocks."""
    return min(PREFILL_TOKENS, max(BLOCK_TOKENS, BLOCK_VALUES // model.hidden_size))


def step(
    setup: Placement,
    model: ModelSpec,
    machine: Machine,
    batch_size: int,
    context: int,
    factors: Efficiency | None = None,
    ready: int = 0,
    drafts: int = 0,
) -> Times:
    """Time one decode step of `batch_size` sequences with `context` tokens in their KV cache, on average; `ready` are
    the bytes that need not cross the link, since the ring holds them when the step begins. It verifies `drafts` tokens
    of each sequence besides, for all of which the cache is read once."""
    factors = factors or Efficiency()
    if setup.graphs and not drafts:
        factors = factors.model_copy(update={"layer_s": 0.0})
    tokens = batch_size * (1 + drafts)
    kv = round(model.kv_bytes(batch_size, context) * setup.kv_ratio)
    hosted = hosted_bytes(setup, model, batch_size, context)
    active = model.parameters_read(tokens) * model.dtype_bytes
    flops = model.decode_flops(tokens, context)
    own = setup.rows(batch_size)
    parts = 0 if setup.kv_on_cpu else ceil(setup.host_rows(own) / setup.prefill_rows(own, max(1, context)))
    return _pass(setup, model, machine, factors, kv, hosted, active, flops, ready=ready, tokens=tokens, parts=parts)


def prefill(
    setup: Placement,
    model: ModelSpec,
    machine: Machine,
    batch_size: int,
    input_len: int,
    factors: Efficiency | None = None,
    ready: int = 0,
) -> Times:
    """Time the whole prefill of `batch_size` prompts of `input_len` tokens, in as many passes as it takes; `ready` as
    for `step`."""
    factors = factors or Efficiency()
    own = setup.rows(batch_size)
    passes = 1 if setup.blocks else ceil(own / setup.prefill_rows(own, input_len))
    flops = model.prefill_flops(batch_size, input_len) // passes
    written = hosted_bytes(setup, model, batch_size, input_len) // passes
    passed = _passed_bytes(model, batch_size, input_len) // passes
    one = _pass(setup, model, machine, factors, 0, 0, model.weight_bytes, flops, written, passed, ready // passes)
    if one.seconds is None:
        return one
    scaled = {bound: seconds * passes for bound, seconds in one.limits.items()}
    return Times(seconds=one.seconds * passes, bound_by=one.bound_by, limits=scaled)


def _pass(
    setup: Placement,
    model: ModelSpec,
    machine: Machine,
    factors: Efficiency,
    kv: int,
    hosted: int,
    read: float,
    flops: int,
    written: int = 0,
    passed: int = 0,
    ready: int = 0,
    tokens: int | None = None,
    parts: int = 0,
) -> Times:
    """Time a pass of `tokens` tokens (None: a long one) that reads `read` bytes of weights and `kv` bytes of cache,
    `hosted` of them in host memory, computes `flops`, reads and writes `passed` bytes of GPU memory in between, and
    sends `written` bytes of keys and values to the host while weights come, `ready` of which are there already; of
    those from disk, the host's ring holds more in proportion. The cache on the host comes in `parts` copies a layer.
    """
    factors = factors.of(model)
    link = machine.h2d_bandwidth if setup.pinned else machine.pageable_bandwidth
    if factors.perfect and setup.wire_ratio < 1:
        least = setup.wire_ratio
        if model.stored_ratio == 1:
            least = CODED_BOUND
        elif setup.codec == "lossless":
            least = model.stored_ratio - (1 - FP8_BOUND) * model.fp8_ratio
        setup = setup.model_copy(update={"wire_ratio": min(setup.wire_ratio, least)})
    weights = max(0, wire_bytes(setup, model, tokens) - ready)
    over_link = weights + (0 if setup.kv_on_cpu else hosted)
    from_disk = disk_bytes(setup, weights)
    from_host = weights + hosted + from_disk  # what comes from disk is written to host memory first
    if machine.hbm_bandwidth is None or machine.matmul_flops is None or (over_link and link is None):
        return Times()
    share = setup.gpus  # each brings its part of the weights over its link, and computes its rows with all of them
    streamed, unpacked = wire_bytes(setup, model, tokens), unpacked_bytes(setup, model, tokens)
    # A streamed weight is written to GPU memory before it is read, by an engine with a ring as it crosses the link;
    # without a GPU it is unpacked from where it is.
    in_ring = streamed if machine.gpu_count else 0
    arrived: float = in_ring if setup.ring_depth else streamed
    if factors.perfect and model.layer_bytes > CACHE_BYTES:  # read as they lie in memory, and written whole
        arrived += unpacked * (setup.wire_ratio + 1)
    hbm = machine.hbm_bandwidth * factors.hbm_share
    if tokens is not None and reads_codes(setup, model, tokens):
        rate = 1.0 if factors.perfect else CODES_RATE / ceil(tokens / CODES_AT_ONCE)
        read *= 1 - min(setup.resident_bytes, model.streamed_bytes) / model.weight_bytes * (1 - setup.wire_ratio / rate)
    attended = attention_bytes(setup, kv - (hosted if setup.kv_on_cpu else 0), factors)
    limits: dict[Bound, float] = {
        "hbm": (read + arrived + attended / share) / hbm,
        "compute": flops / share / (factors.mfu * machine.matmul_flops)
        + (0 if factors.perfect else passed / share / machine.hbm_bandwidth),
        "launch": factors.layer_s * model.num_layers,
    }
    unpacking = 0.0
    if not factors.perfect:
        unpacking = _unpacking(setup, machine, factors, unpacked)
        unpacking += setup.dequantised_bytes / (TORCH_RATE * machine.hbm_bandwidth)
    if unpacking:
        limits["unpacking"] = unpacking
    brought, choice = 0.0, tokens is not None and chooses(setup, tokens)
    if over_link and link is not None:
        # All links together were measured with the GPUs that there are; more GPUs would have links of their own.
        links = min(share * link, (machine.links_bandwidth or inf) * max(1.0, share / max(1, machine.gpu_count)))
        brought = limits["link"] = over_link / (factors.link_share * links)
        if tokens is not None and choice and not factors.perfect:
            limits["link"] += _awaiting_choice(setup, model, machine, factors, tokens, factors.link_share * links)
    if share > 1 and setup.tier == "host" and machine.gather_bandwidth is not None:  # layers that stay are parts, too
        gathered = setup.wire_ratio * model.streamed_bytes + (model.other_bytes if setup.divided else 0)
        limits["gather"] = gathered * (share - 1) / share / machine.gather_bandwidth
    if written and machine.duplex_bandwidth is not None:
        limits["link"] = max(limits.get("link", 0.0), written / share / machine.duplex_bandwidth)
    if from_host and machine.host_bandwidth is not None:  # all links, and the CPU, read from one memory
        limits["host memory"] = from_host / machine.host_bandwidth
    cpu = machine.attention_rate(max(1, model.num_heads // max(1, model.num_kv_heads)))
    if hosted and setup.kv_on_cpu and cpu is not None and factors.perfect:
        limits["cpu attention"] = hosted / cpu
    elif hosted and setup.kv_on_cpu and cpu is not None:
        # These follow each other in every layer: weights are unpacked, the GPU computes, the CPU attends.
        on_gpu = unpacking + limits["hbm"] + limits["compute"] + limits["launch"]
        # A value in 8 bits takes a core as long as one in 16, for which the rate was measured.
        values = round(hosted / setup.kv_ratio)
        attending, copying = contended_rates(setup, machine, cpu, values, limits.get("link", 0.0))
        limits["cpu attention"] = attending + on_gpu
        if "link" in limits:
            limits["link"] = copying
    if setup.tier == "nvme":
        if machine.nvme_bandwidth is None:
            return Times()
        there = setup.disk_ring_bytes * ready / max(1, setup.ring_depth * chunk_bytes(setup, model))
        limits["nvme"] = max(0.0, from_disk - there) / machine.nvme_bandwidth
    found = _slowest(limits)
    if setup.divided and not factors.perfect and found.seconds is not None and "gather" in limits:
        fetched: dict[Bound, float] = {bound: limits.get(bound, 0.0) for bound in ("link", "gather")}
        if (seconds := sum(fetched.values())) > found.seconds:
            found = _slowest(fetched).model_copy(update={"seconds": seconds, "limits": limits})
    # One queue of the GPU unpacks a layer into the only slot and computes it: these never overlap.
    in_queue = unpacking + max(limits["hbm"], limits["compute"])
    if unpacking and found.seconds is not None and in_queue > found.seconds:
        bound: Bound = max(("unpacking", "hbm", "compute"), key=lambda one: limits[one])
        found = Times(seconds=in_queue, bound_by=bound, limits=limits)
    if unpacked and unpacking and found.seconds is not None and machine.gpu_count and not (choice or setup.kv_on_cpu):
        late = in_queue + _late(setup, model, in_queue, unpacking, brought, over_link, parts)
        if late > found.seconds:
            found = _slowest(limits).model_copy(update={"seconds": late})
    moved = max(limits.get("link", 0.0), limits.get("nvme", 0.0), limits.get("host memory", 0.0))
    if setup.overlapped or found.seconds is None or not moved:
        return found
    stay = read * min(setup.resident_bytes, model.streamed_bytes) / model.weight_bytes / hbm
    in_turn = moved + max(limits["compute"], limits["launch"], stay)
    return found.model_copy(update={"seconds": max(found.seconds, in_turn)})


def attention_bytes(setup: Placement, kv: float, factors: Efficiency) -> float:
    """Return the bytes of GPU memory that attention to `kv` bytes of the KV cache reads and writes: numbers of 8 bits
    are widened to the model's type, which is written and read, before products multiply them."""
    widened = setup.kv_ratio < 1 and not factors.perfect
    return kv + 2 * kv / setup.kv_ratio if widened else kv


def _awaiting_choice(
    setup: Placement, model: ModelSpec, machine: Machine, factors: Efficiency, tokens: int, link: float
) -> float:
    """Return the seconds of a pass in which the link idles, since it has brought what is sure to be needed and the
    routers have not chosen yet: in each layer its launches, the unpacking and reading of all but its experts, less the
    copy of these for a later layer. Right guesses of experts that are missing use the time."""
    dense, kept = model.streamed_bytes - model.routed_bytes, min(setup.resident_bytes, model.streamed_bytes)
    copied = max(0, dense - kept)
    unpacking = _unpacking(setup, machine, factors, dense if setup.wire_ratio < 1 else copied)
    before = factors.layer_s * model.num_layers + unpacking + dense / (machine.hbm_bandwidth or inf)
    idle = max(0.0, before - copied * setup.wire_ratio / link)
    return idle - min(model.right_guesses * idle, _needed_experts(setup, model, tokens) * setup.wire_ratio / link)


def _late(
    setup: Placement, model: ModelSpec, on_gpu: float, unpacking: float, brought: float, over_link: int, parts: int
) -> float:
    """Return the seconds of a pass in which the GPU, busy for `on_gpu` seconds, waits for layers that the link could
    not bring ahead: `brought` seconds of it, for `over_link` bytes, `parts` copies of the KV cache in each layer.

    Copies are in order, and while a layer computes its KV cache is in the ring as well. So when a layer that streams
    has its turn, the other buffers hold as much of it as the link brought meanwhile, and no more than fits; the rest is
    unpacked as it comes.
    """
    layers: float = model.num_layers
    if setup.experts == "all":
        layers *= 1 - min(setup.resident_bytes, model.streamed_bytes) / model.streamed_bytes
    if not layers or not over_link:
        return 0.0
    held = max(1, setup.ring_depth - parts) * chunk_bytes(setup, model)
    held += round(setup.expert_buffers * model.expert_bytes * setup.wire_ratio)
    ahead = brought / over_link * held * setup.gpus + unpacking / model.num_layers
    weights = min(over_link, wire_bytes(setup, model))
    each = brought / over_link * (weights / layers + (over_link - weights) / model.num_layers)
    return layers * (each - min(each, ahead, on_gpu / layers))


def _unpacking(setup: Placement, machine: Machine, factors: Efficiency, unpacked: int) -> float:
    """Return the seconds in which the GPU unpacks so many bytes; what is not coded is copied: read and written."""
    share = factors.unpack_share if setup.wire_ratio < 1 else 1 / 2
    return unpacked / (share * (machine.hbm_bandwidth or inf))


def contended_rates(setup: Placement, machine: Machine, cpu: float, hosted: int, copying: float) -> tuple[float, float]:
    """Return the seconds that the CPU attends to `hosted` bytes of the KV cache (all cores to `cpu` of them a second),
    and the seconds of the link for a copy that alone takes it `copying` seconds. While both run they share one memory.

    The rate left to each was measured; otherwise the CPU has its part of the memory's bandwidth and the link nearly all
    of its own. Fewer cores take less from the link, down to where it loses nothing; but each of them waits as long for
    memory as if all attended. (The links of several GPUs count as one here.)
    """
    own, link = setup.kv_cpu_share * cpu, machine.h2d_bandwidth
    if link is None or setup.tier != "host":
        return hosted / own, copying
    part = min(1.0, (machine.host_bandwidth or inf) / (cpu + link))
    slow_cpu = min(cpu, machine.shared_attention_bandwidth or part * cpu)
    slow_link = min(link, machine.shared_h2d_bandwidth or max(part, LINK_KEEPS) * link)
    together = min(slow_cpu + slow_link, machine.host_bandwidth or inf)
    lost = cpu + link - together  # bandwidth that both lose while all cores attend
    loss = max(0.0, own + link - together) / lost if lost > 0 else 0.0
    cpu_rate, link_share = setup.kv_cpu_share * slow_cpu, 1 - loss * (1 - slow_link / link)
    both = min(hosted / cpu_rate, copying / link_share)
    return both + (hosted - cpu_rate * both) / own, copying + (1 - link_share) * both


def with_cores(
    setup: Placement,
    model: ModelSpec,
    machine: Machine,
    batch_size: int,
    context: int,
    factors: Efficiency | None = None,
) -> Placement:
    """Return `setup`, whose KV cache the CPU attends to, with the share of its cores that makes a step the shortest."""
    best, shortest = setup, step(setup, model, machine, batch_size, context, factors).seconds
    for share in CPU_SHARES:
        fewer = setup.model_copy(update={"kv_cpu_share": share})
        times = step(fewer, model, machine, batch_size, context, factors)
        in_time = times.limits.get("cpu attention", 0.0) <= CPU_TIME * times.limits.get("link", 0.0)
        if in_time and times.seconds is not None and shortest is not None and times.seconds < shortest:
            best, shortest = fewer, times.seconds
    return best


def _passed_bytes(model: ModelSpec, batch_size: int, length: int) -> int:
    """Return the bytes of GPU memory that a prefill reads and writes between its matrix products."""
    ffn = FFN_PASSES_OF.get(model.architecture, FFN_PASSES) * model.ffn_size * max(1, model.experts_per_token)
    token = (HIDDEN_PASSES * model.hidden_size + ffn) * model.dtype_bytes
    scores = model.num_heads * length * SCORE_BYTES if model.architecture in EAGER else 0
    return batch_size * length * (token + scores) * model.num_layers


def _slowest(limits: dict[Bound, float]) -> Times:
    bound_by = max(limits, key=lambda bound: limits[bound])
    return Times(seconds=limits[bound_by], bound_by=bound_by, limits=limits)


def tiers(
    setup: Placement, model: ModelSpec, machine: Machine, batch_size: int, input_len: int, output_len: int,
    factors: Efficiency | None = None,
) -> tuple[Bytes, Bytes, Bytes]:  # fmt: skip
    """Count bytes on one GPU (of several the one with most rows), on the host and on NVMe. Without a GPU the host
    carries the device's bytes as well; they are listed apart all the same."""
    factors = factors or Efficiency()
    stored, others = model.streamed_bytes, model.other_bytes
    offloaded = stored if setup.tier != "gpu" else 0
    resident = stored if setup.tier == "gpu" else min(setup.resident_bytes, stored)
    comes = offloaded > resident or (offloaded and setup.ring_depth)  # slot and ring are there even if all layers stay
    slots = round(setup.slots * model.layer_bytes) if comes else 0
    hosted = hosted_bytes(setup, model, batch_size, input_len + output_len)
    rows = setup.rows(batch_size)
    own = round(model.kv_bytes(rows, input_len + output_len) * setup.kv_ratio)
    if hosted and not setup.kv_on_cpu:
        slots += _kv_buffers(setup, model, rows, input_len, input_len + output_len)
    working = activations(setup, model, rows, input_len)
    if model.draft is not None:  # all of it is on the GPU, or on the first one
        others += model.draft.weight_bytes
        working += activations(setup, model.draft, batch_size, input_len)
    extra = round((factors.memory - 1) * (slots + working))
    beside = others if setup.resident_others else 0
    if setup.divided:  # a part, and a copy of the whole while it is used
        slots, beside = slots + beside, beside // setup.gpus
    gpu = Bytes(
        weights=round(resident * setup.kept_ratio) // setup.gpus + beside,
        kv_cache=own
        - hosted_bytes(setup, model, rows, input_len + output_len)
        + draft_kv_bytes(model, batch_size, input_len + output_len),
        buffers=slots,
        activations=working + extra,
        overhead=CONTEXT_BYTES if machine.gpu_count else 0,
    )
    away = offloaded - (resident if setup.moved else 0)
    on_host = {"host": away, "nvme": min(setup.held_bytes, away)}.get(setup.tier, 0)
    host = Bytes(
        weights=round(on_host * setup.kept_ratio) + (0 if setup.resident_others else others),
        kv_cache=hosted,
        buffers=setup.disk_ring_bytes or 2 * model.layer_bytes if setup.tier == "nvme" else 0,
        overhead=PROCESS_BYTES * setup.gpus,
    )
    at_rest = setup.kept_ratio if setup.disk_ring_bytes else 1.0
    return gpu, host, Bytes(weights=round(away * at_rest) if setup.tier == "nvme" else 0)


def hosted_bytes(setup: Placement, model: ModelSpec, batch_size: int, length: int) -> int:
    """Return the bytes of the KV cache that are in host memory: the keys of indexers stay on the device."""
    moved = model.kv_bytes(batch_size, length) - model.index_bytes(batch_size, length)
    return round(round(moved * setup.kv_ratio) * setup.kv_host_share)


def draft_kv_bytes(model: ModelSpec, batch_size: int, length: int) -> int:
    """Return the KV cache, in bytes, of the model that drafts for `model`, gaps included; 0 if none does."""
    return 0 if model.draft is None else model.draft.kv_bytes(batch_size, round(DRAFT_MOVES * length) + DRAFT_ROOM)


def _kv_buffers(setup: Placement, model: ModelSpec, batch_size: int, input_len: int, length: int) -> int:
    """Return the GPU bytes that a KV cache on its way over the link takes, besides the buffers of the weights."""
    if not setup.buffers:
        return 2 * round(model.largest_kv_layer_bytes(batch_size, length) * setup.kv_ratio * setup.kv_host_share)
    return setup.buffers * (buffer_bytes(setup, model, batch_size, input_len, length) - chunk_bytes(setup, model))


def chunk_bytes(setup: Placement, model: ModelSpec) -> int:
    """Return the bytes of a layer that cross the link at a time and wait in one ring buffer."""
    size = model.dense_layer_bytes if setup.experts == "on-demand" else model.layer_bytes
    return round(min(largest_chunk(model, size, setup.gpus), size) * setup.wire_ratio)


def largest_chunk(model: ModelSpec, layer_bytes: int, gpus: int) -> int:
    """Return the most bytes that `gpus` together copy over their links at a time, unpacked, of a layer that has
    `layer_bytes`."""
    return CHUNK_BYTES * chunk_factor(8 * model.dtype_bytes * model.stored_ratio, layer_bytes, gpus)


def buffer_bytes(setup: Placement, model: ModelSpec, batch_size: int, input_len: int, length: int) -> int:
    """Return the size of one ring buffer, in bytes; it also takes the KV cache, of `length` tokens, of sequences
    prefilled together."""
    piece = chunk_bytes(setup, model)
    if not setup.kv_host_share or setup.kv_on_cpu:
        return piece
    rows = setup.prefill_rows(batch_size, input_len)
    return max(piece, round(model.largest_kv_layer_bytes(rows, length) * setup.kv_ratio))


def activations(setup: Placement, model: ModelSpec, batch_size: int, length: int) -> int:
    """Return the peak bytes of one layer's prefill: hidden states, the widest intermediate twice (and a gate), for each
    expert of a token where experts are routed, and eager attention scores for ALiBi models, for which transformers has
    no fused kernel (three times in the weights' type, softmax in float32). Passes side by side keep their hidden states
    each."""
    rows = setup.prefill_rows(batch_size, length)
    tokens = rows * length
    ffn = model.ffn_matrices * model.ffn_size
    if model.num_experts:  # grouped: a row for each expert of a token, and a gate apart from what it is applied to
        ffn = model.experts_per_token * (ffn + model.ffn_size + model.hidden_size)
    wide = max(ffn, 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    flat = tokens * (4 * model.hidden_size + wide) * model.dtype_bytes
    eager = model.architecture in EAGER
    scores = rows * model.num_heads * length**2 * (model.dtype_bytes * 3 + 4) if eager else 0
    waiting = (batch_size - rows) * length * model.hidden_size * model.dtype_bytes if setup.blocks else 0
    return flat + scores + waiting + batch_size * model.vocab_size * (model.dtype_bytes + 4)
