"""What lives where, what fits, and how long a step takes at best.

Decode reads every weight once a step, so a streamed model runs at link speed: seconds per step >= streamed bytes / link
bandwidth, whatever the batch. A larger batch is therefore free until the KV cache fills the device, compute catches up
with the link, or the KV reads do.
"""

from typing import Literal

from pydantic import Field

from zinfer.frozen import Frozen
from zinfer.machine import Machine
from zinfer.model import Dtype, ModelSpec
from zinfer.units import duration, gb, gib, parse_bytes

Offload = Literal["none", "cpu", "nvme"]
LoadFormat = Literal["safetensors", "dummy"]
Option = str | int | float | bool

CONTEXT_BYTES = 600 << 20  # the CUDA context, cuBLAS workspaces and kernels, as the driver reports them
LARGEST_BATCH = 1 << 20  # nobody asks for more
PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
HOST_SHARE = 0.97  # of host memory a load may take before it is refused
# Prompt tokens in one forward pass. A pass streams every weight (2 bytes a parameter) and computes 2 FLOPs a parameter
# and token, so compute hides the link from FLOPs / bandwidth tokens on: 8,300 on an H100 behind PCIe 5, whatever the
# model. More than that at once only takes memory, which the KV cache of a larger batch has better use for.
PREFILL_TOKENS = 8192
COMPUTE_SHARE = 0.6  # of the matmul rate that prefill reaches in a transformers model


class Workload(Frozen):
    """A batch of `batch_size` prompts of `input_len` tokens, each continued by `output_len` tokens."""

    batch_size: int = Field(ge=1)
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=1)

    @property
    def total_len(self) -> int:
        return self.input_len + self.output_len


class Case(Frozen):
    """What was asked for. Hashable by value: it is a record's key."""

    model: str
    engine: str
    offload: Offload
    workload: Workload
    dtype: Dtype = "bfloat16"
    load_format: LoadFormat = "dummy"
    layers: int | None = None  # measure a slice of the model
    gpu_weights: str | None = None  # of the streamed weights, how much stays on the GPU: auto, 25%, 40GiB
    options: tuple[tuple[str, Option], ...] = ()  # the engine's settings that differ from its defaults, sorted

    @property
    def load(self) -> "Case":
        """The case without its batch size: cases with equal loads share one process and one copy of the weights."""
        return self.with_batch(1)

    def with_batch(self, batch_size: int) -> "Case":
        workload = self.workload.model_copy(update={"batch_size": batch_size})
        return self.model_copy(update={"workload": workload})

    def label(self) -> str:
        """Engine and offload in a few characters, for legends and progress lines."""
        resident = "" if self.gpu_weights is None else f" gpu-weights={self.gpu_weights}"
        options = "".join(f" {key}={value}" for key, value in self.options)
        return f"{self.engine} {self.offload}{resident}{options}"


class Bytes(Frozen):
    """Bytes on one tier, by what they are for."""

    weights: int = 0
    kv_cache: int = 0
    buffers: int = 0  # slots the streamed layers land in
    activations: int = 0
    overhead: int = 0  # rounding of pinned blocks, contexts, the process itself

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.buffers + self.activations + self.overhead


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
    nvme_path: str | None = None  # where offload `nvme` may put its files
    why_not: str | None = None  # the reason, when nothing of this load can run here

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def output_tok_s(self) -> float | None:
        if self.prefill_s is None or self.step_s is None:
            return None
        workload = self.case.workload
        seconds = self.prefill_s + self.step_s * (workload.output_len - 1)
        return workload.batch_size * workload.output_len / seconds


def pinned_block(size: int) -> int:
    """What torch's pinned-memory allocator takes for `size` bytes: the next power of two.

    Source: CachingHostAllocator.h of torch 2.11 rounds every block up to ``PowerOf2Ceil(size)``.
    """
    return 1 << max(size - 1, 0).bit_length()


def prefill_rows(batch_size: int, input_len: int) -> int:
    """How many sequences of a batch are prefilled in one forward pass."""
    return min(batch_size, max(1, PREFILL_TOKENS // input_len))


def _activations(model: ModelSpec, batch_size: int, length: int) -> int:
    """Peak of one layer's prefill: hidden states, the widest intermediate twice, and eager attention scores for ALiBi
    models, for which transformers has no fused kernel (scores in the weights' type, softmax in float32)."""
    rows = prefill_rows(batch_size, length)
    tokens = rows * length
    wide = 2 * max(model.ffn_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    flat = tokens * (4 * model.hidden_size + wide) * model.dtype_bytes
    eager = model.architecture == "bloom"
    scores = rows * model.num_heads * length**2 * (model.dtype_bytes * 2 + 4) if eager else 0
    return flat + scores + batch_size * model.vocab_size * (model.dtype_bytes + 4)


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


def _weights(case: Case, model: ModelSpec) -> tuple[Bytes, Bytes, Bytes]:
    """Weight placement of an engine: bytes on the device, on the host and on NVMe, whatever the batch."""
    streamed, other, layer = model.streamed_bytes, model.other_bytes, model.layer_bytes
    if case.offload == "none":
        return Bytes(weights=model.weight_bytes), Bytes(), Bytes()
    # Every engine keeps what stands outside the layers on the device.
    kept = resident_bytes(case.gpu_weights, streamed)
    on_host, resident = Bytes(weights=streamed), Bytes(weights=other + kept, buffers=2 * layer)
    if case.engine == "deepspeed" and case.offload == "cpu":  # each tensor is a pinned block of its own
        rounding = pinned_block(layer // 3) * 3 * model.num_layers - streamed
        on_host = on_host.model_copy(update={"overhead": max(rounding, 0)})
    elif case.engine == "accelerate":  # one layer at a time, nothing ahead
        resident = Bytes(weights=other, buffers=layer)
    if case.offload == "nvme":
        return resident, Bytes(buffers=2 * layer), on_host
    return resident, on_host, Bytes()


def _tiers(case: Case, model: ModelSpec, machine: Machine) -> tuple[Bytes, Bytes, Bytes]:
    """Bytes on the device, the host and NVMe at the case's batch size. Without a GPU, the host has to carry the
    device's bytes as well; they are listed apart all the same."""
    workload = case.workload
    gpu, host, nvme = _weights(case, model)
    gpu = gpu.model_copy(
        update={
            "kv_cache": model.kv_bytes(workload.batch_size, workload.total_len),
            "activations": _activations(model, workload.batch_size, workload.input_len),
            "overhead": CONTEXT_BYTES if machine.gpu_count else 0,
        }
    )
    return gpu, host.model_copy(update={"overhead": host.overhead + PROCESS_BYTES}), nvme


def make_plan(case: Case, model: ModelSpec, machine: Machine, nvme_path: str | None = None) -> Plan:
    """Bytes by tier, the best step time the links allow, and whether the load can run on `machine` at all.

    `model` is the spec already sliced to `case.layers`.
    """
    gpu, host, nvme = _tiers(case, model, machine)
    prefill_s, step_s, bound_by = _times(case, model, machine)
    shortages = _shortages(case, model, machine)
    return Plan(
        case=case,
        model=model,
        machine=machine,
        gpu=gpu,
        host=host,
        nvme=nvme,
        prefill_s=prefill_s,
        step_s=step_s,
        bound_by=bound_by,
        max_batch_size=_largest_batch(case, model, machine),
        nvme_path=nvme_path,
        why_not=_why_not(case, model, machine, shortages) if shortages else None,
    )


def _largest_batch(case: Case, model: ModelSpec, machine: Machine) -> int:
    """The largest batch whose bytes the device holds, 0 if none."""

    def fits(batch_size: int) -> bool:
        gpu, host, _ = _tiers(case.with_batch(batch_size), model, machine)
        return gpu.total + (0 if machine.gpu_count else host.total) <= machine.device_bytes

    low, high = 0, 1
    while fits(high) and high < LARGEST_BATCH:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _times(case: Case, model: ModelSpec, machine: Machine) -> tuple[float | None, float | None, str | None]:
    """Seconds of a prefill and of a decode step at the physical limit, and which limit the step meets."""
    workload = case.workload
    link = machine.nvme_bandwidth if case.offload == "nvme" else machine.h2d_bandwidth
    hbm, flops = machine.hbm_bandwidth, machine.matmul_flops
    if hbm is None or flops is None or (case.offload != "none" and link is None):
        return None, None, None
    streamed = 0
    if case.offload != "none":
        streamed = model.streamed_bytes - resident_bytes(case.gpu_weights, model.streamed_bytes)
    context = workload.input_len + workload.output_len // 2
    limits = {
        "link": streamed / link if link else 0.0,
        "hbm": (model.weight_bytes + model.kv_bytes(workload.batch_size, context)) / hbm,
        "compute": model.decode_flops(workload.batch_size, context) / (COMPUTE_SHARE * flops),
    }
    bound_by = max(limits, key=lambda name: limits[name])
    compute = model.prefill_flops(workload.batch_size, workload.input_len) / (COMPUTE_SHARE * flops)
    return max(limits["link"], compute, model.weight_bytes / hbm), limits[bound_by], bound_by


def _shortages(case: Case, model: ModelSpec, machine: Machine) -> list[str]:
    """What keeps the load from running even at batch 1: what is needed where, and how much there is."""
    gpu, host, nvme = (tier.total for tier in _tiers(case.with_batch(1), model, machine))
    short = []
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
    low, high = 0, model.num_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if not _shortages(case, model.slice(middle), machine) else (low, middle)
    return low


def describe(plan: Plan) -> str:
    """One line for `--dry-run`: what lies where and the limit of the step."""
    parts = [f"gpu {gib(plan.gpu.total)}", f"host {gib(plan.host.total)}"]
    if plan.nvme.total:
        parts.append(f"nvme {gib(plan.nvme.total)}")
    if plan.step_s is not None:
        parts.append(f"step >= {duration(plan.step_s)} ({plan.bound_by})")
    return " · ".join(parts)
