"""Plan of a case on a machine: what fits, where it goes, and how long it takes, before anything runs.

A plan's `placement` is what the engine does. `make_plan` reads from `zinfer.core.engine` how the case's engine moves
weights and from `zinfer.plan.cost` what that costs; `Plan.at` plans another batch of the same load.

A larger batch is free until the KV cache fills the device, compute catches up with the link, or the KV reads do, so a
plan looks for the largest batch that fits.
"""

from collections.abc import Callable
from typing import Literal

from zinfer.core.case import Case, Workload, resident_bytes, spread
from zinfer.core.engine import (
    ENGINES,
    KEPT_BUFFERS,
    MOST_DRAFTS,
    PREFILL_TOKENS,
    Offload,
    Option,
    Transport,
    conflict,
    plan_options,
    read_options,
)
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import duration, gb, gib, parse_share
from zinfer.core.value import Frozen
from zinfer.plan import cost
from zinfer.plan.cost import LIMITS, Bytes, Efficiency, Placement
from zinfer.system.host import attending_cpus

LARGEST_BATCH = 1 << 20  # nobody asks for more
HOST_SHARE = 0.97  # share of host memory that a load may take before it is refused
# Share of the device's memory that a batch may take: no record shows a batch of that size out of memory, which gaps of
# the allocator and short-lived tensors of a step cause beyond it.
DEVICE_SHARE = 0.97
# Share of host memory that ``host_weights=auto`` fills: the rest is for whatever else runs there.
HELD_SHARE = 0.9
DISK_RING_LAYERS = 2  # layers from disk that host memory has room for on their way
LOSSLESS_RATIO = 0.67  # bytes of the lossless codec over those of bf16, on weights of a normal distribution
FP8_RATIO = 0.83  # the same over those of FP8 codes (e4m3)
RING_DEPTH = 6  # least number of ring buffers: they hold what arrives while a layer of a decode step computes
# Least number of ring buffers beside experts on demand: little is in flight, so that those asked for come next.
DENSE_DEPTH = 3
# With ``auto`` experts come on demand where a step at batch 1 then brings at most this share of the bytes, and an
# expert is no smaller than this on the wire: its copy and its unpacking take about 20 us of launches.
CLEARLY_FEWER, LEAST_EXPERT_BYTES = 0.75, 1 << 20
# Where all weights and a slot take at most this share of the GPU's memory, and the GPU is to keep what it has room for,
# experts stay with their layers: the rest is for KV cache and activations of all but the largest batches.
ALL_STAY_SHARE = 0.9
# Architectures whose experts transformers does not dispatch through its ExpertsInterface: they come with their layer.
WHOLE_EXPERTS = frozenset({"dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash"})
# Margin of an engine that gives free GPU memory away, for memory that a plan does not see (gaps, moments of a step).
CAUTIOUS = Efficiency(memory=1.5)
TIERS: dict[Offload, Literal["gpu", "host", "nvme"]] = {"none": "gpu", "cpu": "host", "nvme": "nvme"}


class Drafting(Frozen):
    """Drafts of a plan: `acceptance`, the chance that a draft is right if those before it were; the `drafts` of each
    row in a pass that give the most tokens a second; the tokens that a row gets from a pass then; the seconds of the
    pass, and those of drafting before it."""

    acceptance: float
    drafts: int
    tokens_a_pass: float
    pass_s: float
    drafting_s: float


class Plan(Frozen):
    """A case on a machine, before anything runs. Everything here is predicted; `placement` is obeyed.

    If an engine gives free GPU memory away, `placement` is a cautious one (`CAUTIOUS`): it may keep fewer layers and
    have fewer buffers than there is room for. The figures (bytes, seconds) are those of `placement`, but limits are
    those of a placement without that margin.
    """

    case: Case
    model: ModelSpec
    machine: Machine
    placement: Placement
    gpu: Bytes
    host: Bytes
    nvme: Bytes
    prefill_s: float | None = None
    step_s: float | None = None
    bound_by: str | None = None
    max_batch_size: int = 0  # largest batch by memory; 0 if not even one sequence fits
    streamed_bytes: int = 0  # bytes over all links in each pass
    resident_bytes: int = 0  # layer weights that stay on the GPU though the rest is offloaded
    error: float | None = None  # error of the throughput, as a share; None: these are limits, not predictions
    factors: Efficiency | None = None  # the engine's distance from the limits; None: the figures are the limits
    nvme_path: str | None = None  # folder for the files of offload `nvme`
    why_not: str | None = None  # reason why nothing of this load can run here; None if it can
    drafting: "Drafting | None" = None  # what drafts gain; None where they were not reckoned with

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def bounds(self) -> tuple[str, ...]:
        """Limits of the throughput by name: the step's bottleneck, and the KV cache's room if the batch is the largest
        that fits."""
        full = 0 < self.max_batch_size <= self.case.workload.batch_size
        return (*([self.bound_by] if self.bound_by else []), *(["KV capacity"] if full else []))

    @property
    def output_tok_s(self) -> float | None:
        return _output_tok_s(self.case.workload, self.prefill_s, self.step_s)

    @property
    def holds(self) -> bool:
        """True if the load can run here and this batch fits."""
        return self.fits and self.case.workload.batch_size <= self.max_batch_size

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens a second of the prefill."""
        load = self.case.workload
        return load.batch_size * load.input_len / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second of the decode steps."""
        return self.case.workload.batch_size / self.step_s if self.step_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds of the prefill, which gives the first token, and of one step for each further token."""
        return _e2e_s(self.case.workload, self.prefill_s, self.step_s)

    def expected(self) -> tuple[float | None, float | None]:
        """Return the seconds of the prefill and of an average decode step as a good engine takes them, where these
        figures are limits; None if they are not known."""
        if self.factors is not None:
            return self.prefill_s, self.step_s
        prefill, step = _times(self.placement, self.case, self.model, self.machine, Efficiency())
        return prefill.seconds, step.seconds

    def at(self, workload: Workload) -> "Plan":
        """Return the plan of the same load for another batch: same machine, same factors."""
        before = self.case.workload
        if workload == before:
            return self
        case = self.case.model_copy(update={"workload": workload})
        alike = (workload.input_len, workload.output_len) == (before.input_len, before.output_len)
        largest = self.max_batch_size if alike else None
        return make_plan(case, self.model, self.machine, self.nvme_path, self.factors, largest)

    def of_draft(self) -> "Plan | None":
        """Return the plan of the model that drafts for this one, all of it on the GPU; None if there is none."""
        if (model := self.model.draft) is None:
            return None
        own = self.case.model_dump(include={"workload", "load_format", "allow_nan"})
        own["options"] = tuple(one for one in self.case.options if one[0] == "cuda_graphs")
        case = Case(model=model.name, engine=self.case.engine, offload="none", dtype=model.dtype, **own)
        return make_plan(case, model, self.machine, largest=self.max_batch_size)

    def with_acceptance(self, acceptance: float) -> "Plan":
        """Return the plan with drafts, of which one is right with the chance `acceptance` if those before it were:
        `step_s` becomes the seconds of a token. Without known times nothing changes."""
        small, load = self.of_draft(), self.case.workload
        token_s = 0.0 if small is None else small.step_s if self.factors is None else small.expected()[1]
        setup = _reckoned(self.case, self.model, self.machine, self.factors)
        best = self
        for drafts in range(MOST_DRAFTS + 1):
            _, step = _times(setup, self.case, self.model, self.machine, self.factors, drafts)
            if step.seconds is None or token_s is None:
                return self
            tokens = sum(acceptance**place for place in range(drafts + 1))
            drafting = Drafting(
                acceptance=acceptance, drafts=drafts, tokens_a_pass=tokens, pass_s=step.seconds,
                drafting_s=drafts * token_s,
            )  # fmt: skip
            seconds = (step.seconds + drafting.drafting_s) / tokens
            if not drafts or seconds < (best.step_s or 0.0):
                fields = {"drafting": drafting, "step_s": seconds, "bound_by": step.bound_by}
                fields["streamed_bytes"] = cost.wire_bytes(setup, self.model, load.batch_size * (1 + drafts))
                best = self.model_copy(update=fields)
        return best

    def with_option(self, name: str, value: Option) -> "Plan":
        """Return the plan of the same load with another value of an engine's option."""
        options = tuple(sorted((dict(self.case.options) | {name: value}).items()))
        case = self.case.model_copy(update={"options": options})
        return make_plan(case, self.model, self.machine, self.nvme_path, self.factors)


def _e2e_s(workload: Workload, prefill_s: float | None, step_s: float | None) -> float | None:
    return None if prefill_s is None or step_s is None else prefill_s + step_s * (workload.output_len - 1)


def _output_tok_s(workload: Workload, prefill_s: float | None, step_s: float | None) -> float | None:
    seconds = _e2e_s(workload, prefill_s, step_s)
    return workload.batch_size * workload.output_len / seconds if seconds else None


def transport_of(case: Case) -> Transport:
    """Return how the case's engine moves weights."""
    return read_options(case.engine, case.options).transport()


def is_lossless(case: Case, model: ModelSpec, machine: Machine) -> bool:
    """Tell whether the case's weights cross the link coded, or quantised as they are released (FP8 is both). With
    ``auto`` they do wherever that pays: a GPU decodes bf16 at a third of its memory's bandwidth or more, several times
    what any link brings."""
    codec = plan_options(case.engine, case.options).weight_codec
    smaller = case.dtype == "bfloat16" or model.stored_ratio < 1
    pays = case.offload != "none" and smaller and machine.gpu_count > 0
    return codec == "lossless" or (codec == "auto" and pays)


def experts_on_demand(case: Case, model: ModelSpec, machine: Machine, wire_ratio: float) -> bool:
    """Tell whether only those routed experts cross the link that the router chose. This holds for every batch of a
    load, since the layout of its weights in host memory does."""
    options = plan_options(case.engine, case.options)
    experts = options.experts
    if experts == "all" or options.gpus > 1 or case.offload != "cpu" or model.num_experts < 2 or not model.expert_bytes:
        return False
    if experts == "on-demand":
        return True
    packed = getattr(read_options(case.engine, case.options), "packed", "auto") != "auto"
    step = model.streamed_bytes - model.routed_bytes * (1 - model.touched_share(1))
    fewer = step <= CLEARLY_FEWER * model.streamed_bytes and model.expert_bytes * wire_ratio >= LEAST_EXPERT_BYTES
    if not fewer or packed or model.architecture in WHOLE_EXPERTS:
        return False
    return not _all_stay(case, model, machine, wire_ratio)


def _all_stay(case: Case, model: ModelSpec, machine: Machine, wire_ratio: float) -> bool:
    """Tell whether the GPU has room for all layers, and products read their experts where they lie: none has to come,
    and no router is waited for. Experts that are coded losslessly are decoded first, so that fewer are better."""
    quantised = model.stored_ratio < 1 and not model.fp8_ratio
    readable = wire_ratio == 1 or (quantised and transport_of(case).from_codes)
    if not (machine.gpu_count and readable and case.gpu_weights in ("auto", "100%")):
        return False
    needed = model.streamed_bytes * wire_ratio + model.layer_bytes + model.other_bytes
    return needed <= ALL_STAY_SHARE * machine.gpu_bytes


def placement_of(
    case: Case, model: ModelSpec, machine: Machine, automatic: int = 0, depth: int = RING_DEPTH,
    factors: Efficiency | None = None,
) -> Placement:  # fmt: skip
    """Place the weights and KV cache of a case as its engine does. `automatic` is the value of ``--gpu-weights auto``,
    in bytes, `depth` the number of ring buffers, `factors` the caution with which room is given away.

    `zinfer.core.engine.PlanOptions` are the options that count, whatever the engine.
    """
    options = plan_options(case.engine, case.options)
    bare, batch_size = _weights_placement(case, model, machine, automatic, depth), case.workload.batch_size
    if options.kv_offload == "none":
        return bare
    either = [False, True] if machine.attention_bandwidth is not None else [False]
    if bare.tier == "gpu" or bare.kv_ratio < 1:  # no weights stream that the cache could come along with; 8 bits stay
        either = [True]
    # The cache comes first: a deeper ring and resident layers get the memory that it leaves.
    least = _weights_placement(case, model, machine, 0, RING_DEPTH)
    if options.kv_offload == "auto" and _rows_on_gpu(least, case, model, machine, factors) == batch_size:
        return bare
    ways, context = [], case.workload.input_len + case.workload.output_len // 2
    for on_cpu in either if options.kv_attention == "auto" else [options.kv_attention == "cpu"]:
        # While the CPU attends, the weights that arrive wait in the ring: a layer at most.
        pieces = bare.layer_chunks if on_cpu else RING_DEPTH
        least = _weights_placement(case, model, machine, 0, pieces).model_copy(update={"kv_on_cpu": on_cpu})
        here = _rows_on_gpu(least, case, model, machine, factors) if options.kv_offload == "auto" else 0
        split = {"kv_host_share": (batch_size - here) / batch_size, "kv_on_cpu": on_cpu}
        way = _weights_placement(case, model, machine, automatic, max(depth, pieces)).model_copy(update=split)
        if on_cpu and options.kv_threads != "auto":
            cores = machine.details.get("host", {}).get("cores", 0)
            share = min(1.0, options.kv_threads / attending_cpus(cores)) if cores else 1.0
            way = way.model_copy(update={"kv_cpu_share": share})
        elif on_cpu:
            way = cost.with_cores(way, model, machine, batch_size, context, factors)
        ways.append(way)
    return min(ways, key=lambda way: cost.step(way, model, machine, batch_size, context, factors).seconds or 0.0)


def _rows_on_gpu(setup: Placement, case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None) -> int:
    """Return the largest number of sequences whose KV cache the GPU has room for, beside what the whole batch needs
    there."""
    load = case.workload
    if not machine.gpu_count:
        return load.batch_size
    factors = _cautious(case, factors)

    def fits(rows: int) -> bool:
        split = setup.model_copy(update={"kv_host_share": 1 - rows / load.batch_size})
        gpu, _, _ = cost.tiers(split, model, machine, load.batch_size, load.input_len, load.output_len, factors)
        return gpu.total <= machine.gpu_bytes

    # Without a row on the host no buffers are needed for its way: all rows may fit where one fewer does not.
    return load.batch_size if fits(load.batch_size) else _last(fits, load.batch_size - 1)


def _cautious(case: Case, factors: Efficiency | None) -> Efficiency | None:
    """Return `factors`, or `CAUTIOUS` ones if `factors` leave less margin and the engine gives free GPU memory away."""
    if transport_of(case).shares_memory and (factors is None or factors.memory < CAUTIOUS.memory):
        return CAUTIOUS
    return factors


def _last(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that `fits`, as all smaller ones do; 0 if none does."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weights_placement(case: Case, model: ModelSpec, machine: Machine, automatic: int, depth: int) -> Placement:
    """Place a case as `placement_of` does, with the KV cache on the GPU."""
    options, transport = plan_options(case.engine, case.options), transport_of(case)
    coded = is_lossless(case, model, machine)
    wire = LOSSLESS_RATIO if case.dtype == "bfloat16" else 1.0
    if model.stored_ratio < 1:
        coded_fp8 = model.fp8_ratio if model.dtype_bytes == 2 else 0.0  # a GPU decodes to 16 bits
        wire = model.stored_ratio - coded_fp8 * (1 - FP8_RATIO)
    kind = ENGINES.get(case.engine)
    own = kind.own_formats.get(case.weights) if kind else None
    own = own and own * 2 / model.dtype_bytes
    # DeepSpeed unpacks float16 by an extension of its own.
    traffic = kind.own_traffic.get(case.weights, 0) if kind and model.dtype != "float16" else 0
    common = Placement(
        tier=TIERS[case.offload],
        moved=transport.placed_once,
        gpus=options.gpus,
        codec="lossless" if coded and case.offload != "none" else "none",
        wire_ratio=own or (wire if coded else 1.0),
        layer_chunks=-(-model.layer_bytes // cost.largest_chunk(model, model.layer_bytes, options.gpus)),
        kv_ratio=(1 + 4 / max(1, model.head_dim)) / model.dtype_bytes if options.kv_in_8_bits else 1.0,
        overlapped=transport.overlapped,
        blocks=transport.blocks,
        pass_tokens=cost.block_tokens(model) if transport.blocks else PREFILL_TOKENS,
        pinned=options.pin_memory,
        dequantised_bytes=round(traffic * model.streamed_bytes / model.dtype_bytes),
    )
    update: dict[str, object] = {"resident_bytes": resident_bytes(case.gpu_weights, model.streamed_bytes, automatic)}
    if (
        transport.graphs
        and machine.gpu_count
        and options.gpus == 1
        and options.kv_offload == "none"
        and not options.kv_in_8_bits
    ):
        update["graphs"] = case.offload == "none" or update["resident_bytes"] == model.streamed_bytes
    if transport.coded_at_rest or own:
        update["kept_ratio"] = common.wire_ratio
    quantised = model.stored_ratio < 1 and not model.fp8_ratio and coded
    update["from_codes"] = transport.from_codes and quantised and machine.gpu_count > 0 and options.gpus == 1
    divided = transport.divided and options.gpus > 1
    whole = 2.0 + 1 / options.gpus if divided else 1.0  # a gather takes its part, and all parts besides the layer
    if transport.fetched == "pieces" and experts_on_demand(case, model, machine, common.wire_ratio):
        update |= _expert_buffers(common, model, machine, depth) | {"graphs": False}  # the CPU gets to know each choice
    elif transport.fetched == "pieces":
        buffers = depth * cost.chunk_bytes(common, model) if machine.gpu_count else 0
        update |= {"slots": 1 + buffers / model.layer_bytes, "ring_depth": depth}
        update["buffers"] = depth if machine.gpu_count else 1
    elif transport.fetched == "layer":
        update |= {"slots": whole, "divided": divided}
    elif transport.fetched == "matrix":
        matrix = model.hidden_size * max(model.ffn_size, model.hidden_size) * model.dtype_bytes
        matrix = max(matrix, model.expert_parameters * model.dtype_bytes)  # one module holds all experts of a layer
        update["slots"] = matrix / model.layer_bytes
    if transport.fetched == "pieces" and common.tier == "nvme":
        largest = round(max(model.layer_parameters) * model.dtype_bytes * common.wire_ratio)
        update["disk_ring_bytes"] = max(1, DISK_RING_LAYERS * largest)
        update["held_bytes"] = parse_share(options.host_weights, model.streamed_bytes)
    if trips := transport.outside_trips:
        slots = max(whole, model.other_bytes / model.layer_bytes)
        update |= {"resident_others": False, "also_streamed": trips * model.other_bytes, "slots": slots}
    found = common.model_copy(update=update)
    if transport.leaves_host and case.offload == "cpu" and found.experts == "all":
        found = found.model_copy(update={"moved": case.gpu_weights not in {None, "auto"}})
    if found.moved:
        first, sizes = _resident_layers(found, case, model), _streamed_sizes(found, model)
        stay = {"resident_layers": first, "resident_bytes": sum(sizes[index] for index in first)}
        found = found.model_copy(update=stay)
    return found


def _expert_buffers(common: Placement, model: ModelSpec, machine: Machine, count: int) -> dict[str, object]:
    """Return the fields of a placement with experts on demand: a slot for a layer, a short ring for all but experts,
    and `count` buffers for experts, or as many as hold what the ring of whole layers holds at least."""
    common = common.model_copy(update={"experts": "on-demand"})
    piece, expert = cost.chunk_bytes(common, model), max(1, round(model.expert_bytes * common.wire_ratio))
    largest = cost.largest_chunk(model, model.dense_layer_bytes, common.gpus)
    least = -(-RING_DEPTH * round(largest * common.wire_ratio) // expert)
    count = max(2, min(model.num_experts, max(count, least)))
    pieces = max(1, -(-model.dense_layer_bytes // largest))
    depth = max(DENSE_DEPTH, 2 * pieces)  # a layer computes, and the next one comes while the router chooses
    buffers = depth * piece + count * expert if machine.gpu_count else 0
    layer = model.dense_layer_bytes + model.expert_bytes * model.num_experts
    routers = model.num_layers * model.num_experts * model.hidden_size * model.dtype_bytes  # they stay, for guesses
    return {
        "experts": "on-demand",
        "whole_tokens": cost.whole_tokens(model),
        "layer_experts": model.num_experts,
        "layer_chunks": pieces,
        "expert_buffers": count,
        "ring_depth": depth,
        "buffers": depth if machine.gpu_count else 1,
        "slots": (layer + buffers + routers) / model.layer_bytes,
    }


def _tiers(
    setup: Placement, case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None
) -> tuple[Bytes, Bytes, Bytes]:
    load = case.workload
    return cost.tiers(setup, model, machine, load.batch_size, load.input_len, load.output_len, factors)


def split_free_memory(
    case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None
) -> tuple[int, int]:
    """Give away the GPU memory that the case leaves free: the number of ring buffers, and the bytes of whole layers
    that ``--gpu-weights auto`` keeps.

    With the KV cache on the GPU and the batch free, a byte holds more as cache than as a resident weight, so the batch
    comes first. A ring that holds a layer hides its copy behind a long prefill; several GPUs get buffers besides, for
    layers that stay. With the batch given, residency W/(W-R) is all gain.
    """
    setup, load = placement_of(case, model, machine, factors=factors), case.workload
    gpu, host, _ = _tiers(setup, case, model, machine, factors)
    free = (machine.device_bytes - gpu.total - (0 if machine.gpu_count else host.total)) * setup.gpus
    if setup.experts == "on-demand":
        return _split_for_experts(setup, model, machine, free)
    depth = max(RING_DEPTH, setup.buffers)
    own = setup.rows(load.batch_size)
    buffer = cost.buffer_bytes(setup, model, own, load.input_len, load.total_len)
    buffer *= setup.gpus  # each GPU has whole ones
    wanted = setup.layer_chunks + (KEPT_BUFFERS if setup.gpus > 1 else 0)
    more = max(0, min(wanted - depth, free // buffer)) if machine.gpu_count else 0
    if setup.ring_depth:
        free -= more * buffer
    kept = 0
    for size in (parameters * model.dtype_bytes for parameters in model.layer_parameters):
        free -= max(1, round(size * setup.kept_ratio))
        if free < 0:
            break
        kept += size
    return depth + more, kept


def _split_for_experts(setup: Placement, model: ModelSpec, machine: Machine, free: int) -> tuple[int, int]:
    """Split `free` bytes as `split_free_memory` does, with experts on demand: first buffers for experts, up to a
    layer's, then all but experts of whole layers, which every pass needs, then experts."""
    expert = max(1, round(model.expert_bytes * setup.wire_ratio))
    more = max(0, min(setup.layer_experts - setup.expert_buffers, free // expert)) if machine.gpu_count else 0
    free, kept = free - more * expert, 0
    for size in _streamed_sizes(setup, model):
        free -= max(1, round(size * setup.kept_ratio))
        if free < 0:
            return setup.expert_buffers + more, kept
        kept += size
    stay = min(model.routed_bytes // model.expert_bytes, int(free / (model.expert_bytes * setup.kept_ratio)))
    return setup.expert_buffers + more, kept + stay * model.expert_bytes


def _streamed_sizes(setup: Placement, model: ModelSpec) -> list[int]:
    """Return the bytes of each layer that stay, or stream, as one: all of them but experts on demand."""
    apart = setup.experts == "on-demand"
    return [
        (layer.parameters - (layer.expert_parameters if apart else 0)) * model.dtype_bytes for layer in model.layers
    ]


def place(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> Placement:
    """Place a case and give away the GPU memory that it leaves free: to the ring, up to a layer of buffers, and to
    layers that stay, as `case.gpu_weights` says. `factors` set the margin that is left."""
    depth, automatic = split_free_memory(case, model, machine, factors)
    setup = placement_of(case, model, machine, automatic, depth, factors)
    layers, cached = setup.resident_layers or _resident_layers(setup, case, model), 0
    if setup.experts == "on-demand":
        sizes = _streamed_sizes(setup, model)
        rest = min(setup.resident_bytes, model.streamed_bytes) - sum(sizes[index] for index in layers)
        cached = min(model.routed_bytes, max(0, rest)) // model.expert_bytes
    setup = setup.model_copy(update={"resident_layers": layers, "cached_experts": cached})
    return _hold(setup, case, model, machine, factors) if setup.disk_ring_bytes else setup


def _hold(setup: Placement, case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None) -> Placement:
    """Choose the layers from disk that host memory keeps, of those that do not stay on the GPU: as many as option
    ``host_weights`` says, spread evenly, so that the disk has time for the others."""
    wanted = plan_options(case.engine, case.options).host_weights
    sizes = [parameters * model.dtype_bytes for parameters in model.layer_parameters]
    rest = [index for index in range(len(sizes)) if index not in setup.resident_layers]
    gpu, host, _ = _tiers(setup, case, model, machine, factors)
    used = host.total + (0 if machine.gpu_count else gpu.total)
    free = max(0, round(HELD_SHARE * (machine.host_bytes or 0)) - used) / setup.kept_ratio
    budget = parse_share(wanted, sum(sizes), int(free))

    def chosen(count: int) -> list[int]:
        return [rest[place] for place in spread(count, len(rest))]

    count = _last(lambda count: sum(sizes[index] for index in chosen(count)) <= budget, len(rest))
    if wanted.endswith("%"):
        count = min(len(rest), round(budget / max(1, sum(sizes)) * len(sizes)))
    held = chosen(count)
    return setup.model_copy(update={"host_layers": tuple(held), "held_bytes": sum(sizes[index] for index in held)})


def _resident_layers(setup: Placement, case: Case, model: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of the layers that stay: as many whole ones as `resident_bytes` has room for, a share rounded
    to the nearest, evenly spread over the depth, or the first ones, as the engine has it."""
    if setup.tier == "gpu" or not setup.resident_bytes:
        return ()
    sizes = _streamed_sizes(setup, model)
    layers, total = len(sizes), sum(sizes)

    def chosen(count: int) -> tuple[int, ...]:
        return tuple(range(count)) if transport_of(case).placed_once else spread(count, layers)

    if setup.experts == "all" and case.gpu_weights is not None and case.gpu_weights.endswith("%"):
        return chosen(round(setup.resident_bytes / total * layers))
    count = min(layers, int(setup.resident_bytes * layers // total))
    while sum(sizes[index] for index in chosen(count)) > setup.resident_bytes:  # layers need not be equal
        count -= 1
    return chosen(count)


def _reckoned(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None) -> Placement:
    """Return the placement whose figures a plan gives: the one that is obeyed; for limits, the one without a margin."""
    return place(case, model, machine, None if factors is None else _cautious(case, factors))


def make_plan(
    case: Case, model: ModelSpec, machine: Machine, nvme_path: str | None = None, factors: Efficiency | None = None,
    largest: int | None = None,
) -> Plan:  # fmt: skip
    """Plan a case: its placement, bytes by tier, the times that `factors` (without them: the physical limits) predict,
    and whether the load can run on `machine` at all. `model` is the spec already sliced to `case.layers`, `largest` the
    largest batch, if known.
    """
    setup, cautious = _reckoned(case, model, machine, factors), _cautious(case, factors)
    gpu, host, nvme = _tiers(setup, case, model, machine, factors)
    prefill, step = _times(setup, case, model, machine, factors)
    why_not = conflict(case.engine, case.options, case.offload, case.weights, case.gpu_weights)
    if why_not is None and (shortages := _shortages(case, model, machine, factors)):
        why_not = _why_not(case, model, machine, shortages)
    return Plan(
        case=case,
        model=model,
        machine=machine,
        placement=place(case, model, machine, cautious) if factors is None else setup,
        gpu=gpu,
        host=host,
        nvme=nvme,
        prefill_s=prefill.seconds,
        step_s=step.seconds,
        bound_by=step.bound_by,
        max_batch_size=largest_batch(case, model, machine, factors) if largest is None else largest,
        streamed_bytes=cost.wire_bytes(setup, model, case.workload.batch_size),
        resident_bytes=min(setup.resident_bytes, model.streamed_bytes),
        error=None if factors is None else factors.error_here if case.offload == "none" else factors.error,
        factors=factors,
        nvme_path=nvme_path,
        why_not=why_not,
    )


def _times(
    setup: Placement, case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None, drafts: int = 0
) -> tuple[cost.Times, cost.Times]:
    """Return the seconds of the prefill and of an average decode step with so many drafts of each row; without factors
    their lower bounds."""
    load, ready, first = case.workload, 0, 0
    context = load.input_len + load.output_len // 2
    if factors is None:
        # The ring may be full when a batch begins, and again when its prefill ends.
        factors, machine = LIMITS, machine.at_peak()
        first = setup.ring_depth * cost.chunk_bytes(setup, model)
        ready = first // max(1, load.output_len - 1)
    return (
        cost.prefill(setup, model, machine, load.batch_size, load.input_len, factors, first),
        cost.step(setup, model, machine, load.batch_size, context, factors, ready, drafts),
    )


def estimate(
    case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None
) -> tuple[float | None, Bytes]:
    """Return `Plan.output_tok_s` and `Plan.gpu` of a case without the rest of its plan, such as its largest batch."""
    setup = _reckoned(case, model, machine, factors)
    prefill, step = _times(setup, case, model, machine, factors)
    rate = _output_tok_s(case.workload, prefill.seconds, step.seconds)
    return rate, _tiers(setup, case, model, machine, factors)[0]


def output_rate(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> float:
    """Return `Plan.output_tok_s` of a case without the rest of its plan; 0 if it is not known."""
    prefill, step = _times(_reckoned(case, model, machine, factors), case, model, machine, factors)
    return _output_tok_s(case.workload, prefill.seconds, step.seconds) or 0.0


def largest_batch(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> int:
    """Find the largest batch whose bytes `DEVICE_SHARE` of the device's memory holds, or all of it with `CAUTIOUS`
    factors (and the host, where it has part of the cache), 0 if none. A host whose memory is not known gets none of the
    cache."""
    room = machine.device_bytes * (1.0 if factors and factors.memory >= CAUTIOUS.memory else DEVICE_SHARE)
    moves = plan_options(case.engine, case.options).kv_offload != "none"  # the placement depends on the batch
    setup = placement_of(case, model, machine, factors=factors)

    def fits(batch_size: int) -> bool:
        one = case.with_batch(batch_size)
        own = placement_of(one, model, machine, factors=factors) if moves else setup
        gpu, host, _ = _tiers(own, one, model, machine, factors)
        if host.kv_cache and host.total > HOST_SHARE * (machine.host_bytes or 0):
            return False
        return gpu.total + (0 if machine.gpu_count else host.total) <= room

    high = 1
    while fits(high) and high < LARGEST_BATCH:
        high *= 2
    return _last(fits, high - 1)


def _shortages(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> list[str]:
    """List the memory that the load lacks even at batch 1: the bytes needed on each tier, and those there are."""
    one = case.with_batch(1)
    tiers = _tiers(placement_of(one, model, machine, factors=factors), one, model, machine, factors)
    gpu, host, nvme = (tier.total for tier in tiers)
    short = []
    if machine.host_bytes is None and tiers[1].kv_cache:
        known = f"of which {machine.name} tells nothing; --set host_bytes=512GiB would"
        short.append(f"room for the KV cache in host memory ({known})")
    if not machine.gpu_count:
        gpu, host = 0, host + gpu
    elif gpu > machine.gpu_bytes:
        short.append(f"{gb(gpu)} of GPU memory ({machine.name} has {gb(machine.gpu_bytes)})")
    if machine.host_bytes is not None and host > HOST_SHARE * machine.host_bytes:
        short.append(f"{gb(host)} of host memory ({machine.name} has {gb(machine.host_bytes)})")
    if machine.nvme_bytes is not None and nvme > machine.nvme_bytes:
        short.append(f"{gb(nvme)} of disk at --nvme-path ({gb(machine.nvme_bytes)} are free)")
    return short


def _why_not(case: Case, model: ModelSpec, machine: Machine, shortages: list[str]) -> str:
    """Return the refusal in one line: the memory that is short, and settings that would work instead."""
    choices: list[Offload] = ["none", "cpu"]
    others = {offload: case.model_copy(update={"offload": offload}) for offload in choices}
    ways = [f"--offload {offload}" for offload, other in others.items() if not _shortages(other, model, machine)]
    if not ways and (share := _share_that_fits(others["cpu"], model, machine)) is not None:
        ways.append(f"--offload cpu --gpu-weights {share}%")
    if not ways:
        for offload in sorted(choices, key=lambda choice: choice != case.offload):
            layers = _layers_that_fit(others[offload], model, machine)
            if layers:
                ways.append(f"--offload {offload} --layers {layers}, a slice of the {model.total_layers} layers")
                break
    name = next(name for name, kind in ENGINES.items() if "nvme" in kind.offloads and "nvme" not in kind.builds)
    disk = case.model_copy(update={"offload": "nvme", "engine": name})
    if case.offload != "nvme" and not _shortages(disk, model, machine):
        ways.append(f"--engine {name} --offload nvme --nvme-path DIR, with {gb(model.weight_bytes)} free there")
    ways.append(f"`zinfer plan --model {case.model} --machine gh200-96gb` to see what another machine would do")
    sliced = f" ({model.num_layers} of {model.total_layers} layers)" if model.num_layers < model.total_layers else ""
    return (
        f"{case.model}{sliced} with {case.engine}, offload {case.offload}, needs {' and '.join(shortages)}. "
        f"What would work: {'; '.join(ways)}."
    )


def _share_that_fits(case: Case, model: ModelSpec, machine: Machine) -> int | None:
    """Return the smallest share of the layers, in steps of 5%, that the GPU must keep for the rest to fit into host
    memory at batch 1; None if no share does, or layers that stay do not leave host memory."""
    if not transport_of(case).leaves_host:
        return None
    shares = range(5, 100, 5)
    kept = (case.model_copy(update={"gpu_weights": f"{share}%"}) for share in shares)
    return next((share for share, one in zip(shares, kept, strict=True) if not _shortages(one, model, machine)), None)


def _layers_that_fit(case: Case, model: ModelSpec, machine: Machine) -> int:
    """Return the number of layers of the largest slice that could run at batch 1, 0 if none; a load needs more the more
    layers it has."""
    return _last(lambda layers: not _shortages(case, model.slice(layers), machine), model.num_layers - 1)


def describe(plan: Plan) -> str:
    """Return one line for `--dry-run`: bytes by tier and the limit of the step."""
    parts = [f"gpu {gib(plan.gpu.total)}", f"host {gib(plan.host.total)}"]
    if plan.nvme.total:
        parts.append(f"nvme {gib(plan.nvme.total)}")
    if plan.step_s is not None:
        parts.append(f"step >= {duration(plan.step_s)} ({plan.bound_by})")
    return " · ".join(parts)
