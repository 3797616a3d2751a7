"""What lives where, what fits, and how long it takes: a case on a machine, before anything runs.

An engine's words (offload, options) become a `zinfer.plan.cost.Placement` here; the arithmetic is there. A larger batch
is free until the KV cache fills the device, compute catches up with the link, or the KV reads do, so the largest batch
that fits is what a plan looks for.
"""

from collections.abc import Callable
from typing import Literal

from zinfer.plan import cost
from zinfer.plan.cost import Bytes, Efficiency, Placement
from zinfer.spec.case import Case, Offload
from zinfer.spec.machine import Machine
from zinfer.spec.model import ModelSpec
from zinfer.spec.units import duration, gb, gib, parse_bytes
from zinfer.spec.value import Frozen

LARGEST_BATCH = 1 << 20  # nobody asks for more
HOST_SHARE = 0.97  # of host memory a load may take before it is refused
LOSSLESS_RATIO = 0.67  # bytes of the lossless codec over those of bf16, on weights of a normal distribution
CODECS = ("auto", "none", "lossless")  # of the `stream` engine's weights on the wire
KV_OFFLOADS = ("none", "cpu", "auto")
KV_ATTENTIONS = ("auto", "gpu", "cpu")
KV_CACHE_DTYPES = ("auto", "bf16", "int8", "fp8")  # auto and bf16: the model's own
DEQUANTIZED_BYTES = 1 << 30  # of a quantised cache that is in the model's type at a time
RING_DEPTH = 6  # pieces between link and slot at least: what comes while a layer of a decode step computes
# Where `stream` shares out the GPU's memory, what a plan does not see of it (gaps, moments of a step) stays free.
CAUTIOUS = Efficiency(memory=1.5)
TIERS: dict[Offload, Literal["gpu", "host", "nvme"]] = {"none": "gpu", "cpu": "host", "nvme": "nvme"}


class Plan(Frozen):
    """A case on a machine, before anything runs. Everything here is predicted."""

    case: Case
    model: ModelSpec
    machine: Machine
    gpu: Bytes
    host: Bytes
    nvme: Bytes
    prefill_s: float | None = None
    step_s: float | None = None
    bound_by: str | None = None
    max_batch_size: int = 0  # by memory; 0 when not even one sequence fits
    streamed_bytes: int = 0  # over all links, each pass
    resident_bytes: int = 0  # of the layers' weights, though the rest is offloaded
    error: float | None = None  # of the throughput, as a share; None: these are limits, not predictions
    nvme_path: str | None = None  # where offload `nvme` may put its files
    why_not: str | None = None  # the reason, when nothing of this load can run here

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def bounds(self) -> tuple[str, ...]:
        """What keeps the throughput where it is: the step's bottleneck, and the KV cache's room where the batch is the
        largest that fits."""
        full = 0 < self.max_batch_size <= self.case.workload.batch_size
        return (*([self.bound_by] if self.bound_by else []), *(["KV capacity"] if full else []))

    @property
    def output_tok_s(self) -> float | None:
        workload, seconds = self.case.workload, self.e2e_s
        return workload.batch_size * workload.output_len / seconds if seconds else None

    @property
    def e2e_s(self) -> float | None:
        """Prefill, which gives the first token, and a step for each further one."""
        if self.prefill_s is None or self.step_s is None:
            return None
        return self.prefill_s + self.step_s * (self.case.workload.output_len - 1)


def pinned_block(size: int) -> int:
    """What torch's pinned-memory allocator takes for `size` bytes: the next power of two.

    Source: CachingHostAllocator.h of torch 2.11 rounds every block up to ``PowerOf2Ceil(size)``.
    """
    return 1 << max(size - 1, 0).bit_length()


def resident_bytes(gpu_weights: str | None, streamable: int, automatic: int = 0) -> int:
    """How many of `streamable` weight bytes `gpu_weights` keeps on the GPU; `automatic` is what ``auto`` stands for.

    Raises ValueError for anything but ``auto``, a share (``25%``) and a size (``40GiB``).
    """
    if gpu_weights is None:
        return 0
    if gpu_weights == "auto":
        return min(automatic, streamable)
    if gpu_weights.endswith("%"):
        share = float(gpu_weights.removesuffix("%")) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{gpu_weights} is not a share: write 0% to 100%")
        return int(share * streamable)
    return min(parse_bytes(gpu_weights), streamable)


def is_lossless(case: Case, machine: Machine) -> bool:
    """Whether the case's weights cross the link coded. By default those of `stream` do wherever that can pay: a GPU
    decodes bf16 at a third of its memory's bandwidth or more, several times what any link brings."""
    codec = dict(case.options).get("weight_codec", "auto" if case.engine == "stream" else "none")
    pays = case.offload != "none" and case.dtype == "bfloat16" and machine.gpu_count > 0
    return codec == "lossless" or (codec == "auto" and pays)


def placement_of(
    case: Case, model: ModelSpec, machine: Machine, automatic: int = 0, depth: int = RING_DEPTH,
    factors: Efficiency | None = None,
) -> Placement:  # fmt: skip
    """How the case's engine keeps and moves weights and KV cache; `automatic` is what ``--gpu-weights auto`` stands
    for, in bytes, `depth` what `stream`'s ``ring_depth=auto`` does, `factors` how cautiously room is shared out.

    Options that any engine may be planned with: `weight_codec` (lossless), `weight_bits` (8 or 4, with a 16-bit scale
    and zero point for each 64 weights), `kv_offload` (cpu, auto), with it `kv_attention` (gpu, cpu) and
    `kv_threads` (of the CPU), `gpus`.
    """
    options = dict(case.options)
    bare = _weights_setup(case, model, machine, automatic, depth)
    offload, batch_size = options.get("kv_offload", "none"), case.workload.batch_size
    if offload == "none":
        return bare
    attention = options.get("kv_attention", "auto" if case.engine == "stream" else "gpu")
    either = [False, True] if machine.attention_bandwidth is not None else [False]
    if bare.tier == "gpu" or bare.kv_ratio < 1:  # nothing streams that it could come along with; 8 bits stay
        either = [True]
    # The cache comes first: a deeper ring and resident layers get what it leaves.
    least = _weights_setup(case, model, machine, 0, RING_DEPTH)
    if offload == "auto" and _rows_on_gpu(least, case, model, machine, factors) == batch_size:
        return bare
    ways, context = [], case.workload.input_len + case.workload.output_len // 2
    for on_cpu in either if attention == "auto" else [attention == "cpu"]:
        # While the CPU attends, what the link brings waits in the ring: a layer at most.
        pieces = pieces_of(model) if on_cpu else RING_DEPTH
        least = _weights_setup(case, model, machine, 0, pieces).model_copy(update={"kv_on_cpu": on_cpu})
        here = _rows_on_gpu(least, case, model, machine, factors) if offload == "auto" else 0
        split = {"kv_host_share": (batch_size - here) / batch_size, "kv_on_cpu": on_cpu}
        way = _weights_setup(case, model, machine, automatic, max(depth, pieces)).model_copy(update=split)
        if on_cpu and (threads := options.get("kv_threads", "auto")) != "auto":
            cores = machine.details.get("host", {}).get("cores", 0)
            share = min(1.0, threads / cores) if cores and isinstance(threads, int) and threads > 0 else 1.0
            way = way.model_copy(update={"kv_cpu_share": share})
        elif on_cpu:
            way = cost.with_cores(way, model, machine, batch_size, context, factors)
        ways.append(way)
    return min(ways, key=lambda way: cost.step(way, model, machine, batch_size, context, factors).seconds or 0.0)


def _rows_on_gpu(setup: Placement, case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None) -> int:
    """The most sequences whose KV cache the GPU has room for, beside what the others of the batch need there."""
    load = case.workload
    if not machine.gpu_count:
        return load.batch_size
    if case.engine == "stream":  # what a plan does not see must not be given away, so the engine leaves room for it
        factors = CAUTIOUS if factors is None or factors.memory < CAUTIOUS.memory else factors

    def fits(rows: int) -> bool:
        split = setup.model_copy(update={"kv_host_share": 1 - rows / load.batch_size})
        gpu, _, _ = cost.tiers(split, model, machine, load.batch_size, load.input_len, load.output_len, factors)
        return gpu.total <= machine.gpu_bytes

    # Without a row on the host, none needs buffers on its way: all may fit where one fewer does not.
    return load.batch_size if fits(load.batch_size) else _last(fits, load.batch_size - 1)


def _last(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that `fits`, as all smaller ones do; 0 if none does."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weights_setup(case: Case, model: ModelSpec, machine: Machine, automatic: int, depth: int) -> Placement:
    """`placement_of` with the KV cache on the GPU."""
    options = dict(case.options)
    bits = float(options.get("weight_bits", 16))
    ratio = 1.0 if bits >= 16 else (bits + 32 / 64) / (8 * model.dtype_bytes)
    lossless = is_lossless(case, machine) and ratio == 1.0 and case.dtype == "bfloat16"  # other types go as they are
    common = Placement(
        tier=TIERS[case.offload],
        gpus=int(options.get("gpus", 1)),
        weight_ratio=ratio,
        wire_ratio=LOSSLESS_RATIO if lossless else 1.0,
        kv_ratio=kv_ratio(case, model),
        pinned=bool(options.get("pin_memory", True)),
    )
    streamable = cost.layers_stored(common, model)
    update: dict[str, object] = {"resident_bytes": resident_bytes(case.gpu_weights, streamable, automatic)}
    if case.engine == "stream":
        asked = options.get("ring_depth", "auto")
        pieces = depth if asked == "auto" else int(asked)
        buffers = pieces * cost.piece_bytes(common, model) if machine.gpu_count else 0
        update |= {"slots": 1 + buffers / model.layer_bytes, "blocks": True, "kept_ratio": common.wire_ratio}
        update["buffers"] = pieces if machine.gpu_count else 1
    elif case.engine == "deepspeed":  # fetched a layer at a time; each tensor is a pinned block of its own
        layers = (parameters * model.dtype_bytes for parameters in model.layer_parameters)
        rounded = sum(pinned_block(size // 3) * 3 for size in layers) - model.streamed_bytes
        update |= {"slots": 1.0, "host_rounding": max(rounded, 0)}
        if options.get("tuned") is False:  # embeddings are offloaded too; a tied one is fetched for both of its uses
            slots = max(1.0, model.other_bytes / model.layer_bytes)
            update |= {"resident_others": False, "also_streamed": 2 * model.other_bytes, "slots": slots}
    elif case.engine == "accelerate":  # one matrix at a time, nothing ahead
        matrix = model.hidden_size * max(model.ffn_size, model.hidden_size) * model.dtype_bytes
        update |= {"slots": matrix / model.layer_bytes, "overlapped": False}
    return common.model_copy(update=update)


def kv_ratio(case: Case, model: ModelSpec) -> float:
    """Bytes of the case's KV cache over those in the model's type; 8 bits come with a 32-bit scale a head and token."""
    quantized = dict(case.options).get("kv_cache_dtype") in ("int8", "fp8")
    return (1 + 4 / max(1, model.head_dim)) / model.dtype_bytes if quantized else 1.0


def pieces_of(model: ModelSpec) -> int:
    """How many pieces a layer crosses the link in."""
    return -(-model.layer_bytes // cost.PIECE_BYTES)


def _tiers(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None) -> tuple[Bytes, Bytes, Bytes]:
    """Bytes on the device, the host and NVMe at the case's batch size, with nothing resident that need not be."""
    load = case.workload
    setup = placement_of(case, model, machine, factors=factors)
    return cost.tiers(setup, model, machine, load.batch_size, load.input_len, load.output_len, factors)


def split_free_memory(
    case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None
) -> tuple[int, int]:
    """What the GPU memory that the case leaves free is good for: the pieces in `stream`'s ring, and the bytes of whole
    layers that ``--gpu-weights auto`` keeps.

    With the KV cache on the GPU and the batch free, a byte holds more as cache than as a resident weight, so the batch
    comes first. A ring that holds a layer hides its copy behind a long prefill. With the batch given, residency W/(W-R)
    is all gain.
    """
    gpu, host, _ = _tiers(case, model, machine, factors)
    setup, load = placement_of(case, model, machine, factors=factors), case.workload
    free = (machine.device_bytes - gpu.total - (0 if machine.gpu_count else host.total)) * setup.gpus
    depth = max(RING_DEPTH, setup.buffers)
    buffer = cost.buffer_bytes(setup, model, load.batch_size, load.input_len, load.total_len)
    more = max(0, min(pieces_of(model) - depth, free // buffer)) if machine.gpu_count else 0
    if case.engine == "stream" and dict(case.options).get("ring_depth", "auto") == "auto":
        free -= more * buffer
    kept = 0
    for size in (parameters * model.dtype_bytes * setup.weight_ratio for parameters in model.layer_parameters):
        free -= max(1, round(size * setup.kept_ratio))
        if free < 0:
            break
        kept += round(size)
    return depth + more, kept


def make_plan(
    case: Case, model: ModelSpec, machine: Machine, nvme_path: str | None = None, factors: Efficiency | None = None,
    largest: int | None = None,
) -> Plan:  # fmt: skip
    """Bytes by tier, the times that `factors` (without them: the physical limits) predict, and whether the load can
    run on `machine` at all. `model` is the spec already sliced to `case.layers`, `largest` the largest batch, if known.
    """
    load = case.workload
    limits = factors or Efficiency(link_share=1.0)
    depth, automatic = split_free_memory(case, model, machine, factors)
    setup = placement_of(case, model, machine, automatic, depth, factors)
    gpu, host, nvme = cost.tiers(setup, model, machine, load.batch_size, load.input_len, load.output_len, factors)
    step = cost.step(setup, model, machine, load.batch_size, load.input_len + load.output_len // 2, limits)
    prefill = cost.prefill(setup, model, machine, load.batch_size, load.input_len, limits)
    shortages = _shortages(case, model, machine, factors)
    return Plan(
        case=case,
        model=model,
        machine=machine,
        gpu=gpu,
        host=host,
        nvme=nvme,
        prefill_s=prefill.seconds,
        step_s=step.seconds,
        bound_by=step.bound_by,
        max_batch_size=largest_batch(case, model, machine, factors) if largest is None else largest,
        streamed_bytes=cost.wire_bytes(setup, model),
        resident_bytes=min(setup.resident_bytes, cost.layers_stored(setup, model)),
        error=factors.error if factors else None,
        nvme_path=nvme_path,
        why_not=_why_not(case, model, machine, shortages) if shortages else None,
    )


def largest_batch(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> int:
    """The largest batch whose bytes the device holds (and the host, where it has part of the cache), 0 if none. A host
    whose memory is not known gets none of the cache."""

    def fits(batch_size: int) -> bool:
        gpu, host, _ = _tiers(case.with_batch(batch_size), model, machine, factors)
        if host.kv_cache and host.total > HOST_SHARE * (machine.host_bytes or 0):
            return False
        return gpu.total + (0 if machine.gpu_count else host.total) <= machine.device_bytes

    high = 1
    while fits(high) and high < LARGEST_BATCH:
        high *= 2
    return _last(fits, high - 1)


def _shortages(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> list[str]:
    """What keeps the load from running even at batch 1: what is needed where, and how much there is."""
    tiers = _tiers(case.with_batch(1), model, machine, factors)
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
    """The refusal: what is short, and what would work instead."""
    choices: list[Offload] = ["none", "cpu"]
    others = {offload: case.model_copy(update={"offload": offload}) for offload in choices}
    ways = [f"--offload {offload}" for offload, other in others.items() if not _shortages(other, model, machine)]
    if not ways:
        for offload in sorted(choices, key=lambda choice: choice != case.offload):
            layers = _layers_that_fit(others[offload], model, machine)
            if layers:
                ways.append(f"--offload {offload} --layers {layers}, a slice of the {model.total_layers} layers")
                break
    disk = case.model_copy(update={"offload": "nvme", "engine": "accelerate"})
    if case.offload != "nvme" and not _shortages(disk, model, machine):
        ways.append(f"--engine accelerate --offload nvme --nvme-path DIR, with {gb(model.weight_bytes)} free there")
    ways.append(f"`zinfer plan --model {case.model} --machine gh200-96gb` to see what another machine would do")
    sliced = f" ({model.num_layers} of {model.total_layers} layers)" if model.num_layers < model.total_layers else ""
    return (
        f"{case.model}{sliced} with {case.engine}, offload {case.offload}, needs {' and '.join(shortages)}. "
        f"What would work: {'; '.join(ways)}."
    )


def _layers_that_fit(case: Case, model: ModelSpec, machine: Machine) -> int:
    """The largest slice of the model that could run at batch 1, 0 if none; what a load needs grows with its layers."""
    return _last(lambda layers: not _shortages(case, model.slice(layers), machine), model.num_layers - 1)


def describe(plan: Plan) -> str:
    """One line for `--dry-run`: what lies where and the limit of the step."""
    parts = [f"gpu {gib(plan.gpu.total)}", f"host {gib(plan.host.total)}"]
    if plan.nvme.total:
        parts.append(f"nvme {gib(plan.nvme.total)}")
    if plan.step_s is not None:
        parts.append(f"step >= {duration(plan.step_s)} ({plan.bound_by})")
    return " · ".join(parts)
