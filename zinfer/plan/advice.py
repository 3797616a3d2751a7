"""Advice from plans: whether to stream at all, or to use another engine, and one line for a dry run.

Offload is judged at each side's own best batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from zinfer.core.units import duration, figures, gb, gib
from zinfer.plan.bytes import ALLOWANCES
from zinfer.plan.placement import TUNING
from zinfer.plan.planner import Plan
from zinfer.plan.times import RATES, cpu_reading_rate


@dataclass(frozen=True)
class Peers:
    """Figures of other engines, with which plans are compared."""

    gain: float = 1.25  # smallest ratio of rates that is worth a sentence
    # Share of the bandwidth and matmul rate of GPUs: vLLM 0.23 reaches 77% of the bandwidth of one A100 at one request
    # (johnmusgrave.com); sums over GPUs are assumed to leave two thirds.
    on_gpu: float = 0.5
    layer_s: float = 1e-4  # kernels of a layer besides: llama.cpp with gpt-oss-120b on an H100 (184 to 207 tok/s)
    memory: float = 0.9  # share of GPU memory that vLLM takes, its default


PEERS = Peers()
HOST_NEGLIGIBLE = 4 << 30  # bytes of host memory that every host has


def advice(plans: Sequence[Plan]) -> str:
    """Advise in one sentence whether to stream. `plans` come from `Planner.best`, of one model and machine."""
    able = [plan for plan in plans if plan.holds and plan.output_tok_s]
    able.sort(key=lambda plan: (-_rate(plan), plan.streamed_bytes > 0))
    if not able:
        return "Nothing fits; see why below." if plans else "Nothing was planned."
    first, streams = able[0], able[0].streamed_bytes > 0
    second = next((plan for plan in able if (plan.streamed_bytes > 0) is not streams), None)
    if second is not None:
        verb = "Stream" if streams else "Do not stream"
        return f"{verb}: {_words(first)}; {_words(second)}, {_rate(second) / _rate(first):.2f} of it."
    too_large = any(plan.case.offload == "none" and not plan.max_batch_size for plan in plans)
    stream = "Stream: without it the weights do not fit." if too_large else "Only streaming was planned:"
    by_cpu = first.placement.computes(first.case.workload.batch_size)
    fits = "Do not stream: the CPU computes experts." if by_cpu else "Do not stream: all of it fits."
    return f"{stream if streams else fits} {_words(first)}."


def choices(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a sentence on what each plan keeps where."""
    for plan in plans:
        placement, rows = plan.placement, plan.case.workload.batch_size
        stay, away = len(placement.resident_layers), placement.host_rows(rows)
        bare = ", without their experts" * (placement.experts == "on-demand" and not placement.expert_layers)
        kept = f"{stay} of {plan.model.num_layers} layers stay on the GPU{bare}" if plan.streamed_bytes and stay else ""
        how = "where the CPU attends to it" if placement.kv_on_cpu else "and crosses the link in every step"
        cache = f"the KV cache of {away} of {rows} sequences is in host memory, {how}" if away else ""
        if plan.holds and (kept or cache):
            yield f"{plan.case.label()}, batch {rows}: {'; '.join(filter(None, (kept, cache)))}."


def left_out(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a sentence on experts that a CPU of unknown rate computes."""
    for plan in plans:
        load, workload = plan.planner(), plan.case.workload
        if cpu_reading_rate(plan.machine) is not None or not plan.holds or "cpu" not in load.placer.other_experts:
            continue
        other = load.with_option("experts", "cpu")
        rate = other.rate(workload) if other.fits(workload) and not other.shortages(workload) else None
        if rate is not None and rate >= PEERS.gain * _rate(plan):
            yield (
                f"{plan.case.batch_label}: --experts cpu is left out, as it is not known how fast the CPU reads. At "
                f"{gb(RATES.assumed_reads, 0)}/s (assumed) it gives {figures(rate)} tok/s; `zinfer probe` measures it."
            )


def peers(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the rate of tensor parallel where the GPUs hold the model."""
    plan = max((plan for plan in plans if plan.holds and plan.output_tok_s), key=_rate, default=None)
    if plan is None or not (plan.streamed_bytes or plan.placement.cpu_tokens):
        return
    model, machine, workload = plan.model, plan.machine, plan.case.workload
    gpus, stored = max(machine.gpu_count, plan.placement.gpus), model.stored_bytes
    room = gpus * (PEERS.memory * machine.gpu_bytes - ALLOWANCES.context_bytes) - stored
    rows = min(workload.batch_size, int(room / max(1, model.kv_bytes(1, workload.total_len))))
    if gpus < 2 or rows < 1 or machine.hbm_bandwidth is None or machine.matmul_flops is None:
        return
    share, context = PEERS.on_gpu * gpus, workload.mean_context
    weights = round(stored * model.parameters_read(rows) / model.parameters)
    kv, hbm, matmul = model.kv_bytes(rows, context), share * machine.hbm_bandwidth, share * machine.matmul_flops
    step_s = max((weights + kv) / hbm, model.decode_flops(rows, context) / matmul) + PEERS.layer_s * model.num_layers
    prefill_s = max(stored / hbm, model.prefill_flops(rows, workload.input_len) / matmul)
    rate = rows * workload.output_len / (prefill_s + step_s * (workload.output_len - 1))
    if rate >= PEERS.gain * _rate(plan):
        yield (
            f"{gpus} GPUs hold all of it: use tensor parallel in vLLM, about {figures(rate, 2)} tok/s at batch {rows}. "
            f"A step reads {gb(weights)} of weights and {gb(kv)} of KV cache at {PEERS.on_gpu:.0%} of {gpus} x "
            f"{gb(machine.hbm_bandwidth, 0)}/s, a layer takes {duration(PEERS.layer_s)} more; streaming brings "
            f"{gb(plan.streamed_bytes)} over the link."
        )


def host_unknown(plan: Plan) -> bool:
    """Tell whether a plan needs host memory of which nothing is known."""
    return plan.holds and plan.machine.host_bytes is None and plan.host.total > HOST_NEGLIGIBLE


def host_needed(plan: Plan) -> str:
    """Return the host memory of a plan, marked where it is unknown."""
    return f"{ceil(plan.host.total / TUNING.max_host_share / (1 << 30))} GiB" + "?" * host_unknown(plan)


def describe(plan: Plan) -> str:
    """Return one line for `--dry-run`: bytes by tier and the limit of the step."""
    nvme = f" · nvme {gib(plan.nvme.total)}" if plan.nvme.total else ""
    step = "" if plan.step_s is None else f" · step >= {duration(plan.step_s)} ({plan.bound_by})"
    return f"gpu {gib(plan.gpu.total)} · host {gib(plan.host.total)}{nvme}{step}"


def _rate(plan: Plan) -> float:
    return plan.output_tok_s or 0.0


def _words(plan: Plan) -> str:
    return f"{plan.case.label()} gives {figures(_rate(plan))} tok/s at batch {plan.case.workload.batch_size}"
