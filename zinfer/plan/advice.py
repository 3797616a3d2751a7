"""Advice from plans: whether to stream at all, or to use another engine, and one line for a dry run.

Offload is judged at each side's own best batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from zinfer.core.model import ModelSpec
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
    # (johnmusgrave.com), llama.cpp with Mixtral in Q4_0 on an H100 55%; sums over GPUs are assumed to leave two thirds.
    on_gpu: float = 0.5
    layer_s: float = 1e-4  # kernels of a layer besides: llama.cpp with gpt-oss-120b on an H100 (184 to 207 tok/s)
    memory: float = 0.9  # share of GPU memory that vLLM takes, its default
    # Rate of llama.cpp with experts in host memory, over that at which the CPU reads it: an H100's host with 16 cores
    # reads 113 GB/s, and made 21.9 tok/s of gpt-oss-120b in MXFP4 (33 at batch 8), 10.1 of Mixtral in Q4_0 (14.2).
    cpu_experts: float = 0.37
    cpu_batch: int = 8  # largest batch for it: of Mixtral in 4 bits llama.cpp made 64.7 tok/s at 32, zinfer 72.5
    host_read: float = 80e9  # of a host that was not measured: two channels of DDR5-5600 carry 89.6 GB/s at their peak


PEERS = Peers()
HOST_NEGLIGIBLE = 4 << 30  # bytes of host memory that every host has


def advice(plans: Sequence[Plan]) -> str:
    """Advise in one sentence whether to stream. `plans` come from `Planner.best`, of one model and machine."""
    able = sorted((plan for plan in plans if plan.holds and plan.output_tok_s), key=_rate, reverse=True)
    if not able:
        return "Nothing fits; see why below." if plans else "Nothing was planned."
    staying, moving = (
        next((plan for plan in able if (plan.streamed_bytes > 0) is streams), None) for streams in (False, True)
    )
    if moving is None or staying is None:
        too_large = any(plan.case.offload == "none" and not plan.max_batch_size for plan in plans)
        stream = "Stream: without it the weights do not fit." if too_large else "Only streaming was planned:"
        by_cpu = able[0].placement.computes(able[0].case.workload.batch_size)
        fits = "Do not stream: the CPU computes experts." if by_cpu else "Do not stream: all of it fits."
        return f"{stream if moving else fits} {_words(able[0])}."
    first, second = (staying, moving) if _rate(staying) >= _rate(moving) else (moving, staying)
    verb = "Do not stream" if first is staying else "Stream"
    return f"{verb}: {_words(first)}; {_words(second)}, {_rate(second) / _rate(first):.2f} of it."


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


def peers(plans: Sequence[Plan], single: Sequence[Plan] = ()) -> Iterator[str]:
    """Yield a sentence on each faster engine. `single` plans are for one reader."""
    able = [plan for plan in plans if plan.holds and plan.output_tok_s]
    best = max(able, key=_rate, default=None)
    if best is None or not _offloads(best):
        return
    yield from _tensor_parallel(best)
    offloading = [plan for plan in (*able, *single) if _offloads(plan)]
    small = [plan for plan in offloading if plan.case.workload.batch_size <= PEERS.cpu_batch]
    single_row = best.case.with_batch(1).workload
    yield from _cpu_experts(max(small, key=_rate, default=None) or best.planner().at(single_row))


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


def _tensor_parallel(plan: Plan) -> Iterator[str]:
    """Yield the rate of tensor parallel where the GPUs hold the model."""
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


def _cpu_experts(plan: Plan) -> Iterator[str]:
    """Yield the rate of experts on the CPU, if it is higher."""
    model, machine, workload = plan.model, plan.machine, plan.case.workload
    batch_size, step_s = workload.batch_size, plan.expected()[1]
    hbm, link = machine.hbm_bandwidth, machine.h2d_bandwidth
    if model.num_experts < 2 or not machine.gpu_count or not step_s or hbm is None or link is None:
        return
    routed = model.routed_bytes * model.stored_ratio
    kv = model.kv_bytes(batch_size, workload.total_len)
    room = PEERS.memory * machine.gpu_bytes - (model.stored_bytes - routed) - kv
    on_host = 1 - room / routed  # share of the layers whose experts do not fit the GPU
    if not 0 < on_host < 1:
        return
    measured = machine.attention_bandwidth or machine.host_bandwidth
    read = measured or PEERS.host_read
    rate, ours = batch_size / cpu_experts_s(model, batch_size, on_host, read, hbm), batch_size / step_s
    if rate >= PEERS.gain * ours:
        touched = on_host * routed * model.touched_share(batch_size)
        yield (
            f"At batch {batch_size} use llama.cpp with experts on the CPU, about {figures(rate, 2)} tok/s of decode "
            f"({plan.case.label()}: {figures(ours, 2)}). The CPU reads {gb(touched)} of experts a step at "
            f"{gb(PEERS.cpu_experts * read)}/s, {PEERS.cpu_experts:.0%} of host memory's {gb(read, 0)}/s "
            f"({'measured' if measured else 'assumed'}); streaming brings {gb(plan.streamed_bytes)} at {gb(link)}/s."
        )


def cpu_experts_s(model: ModelSpec, batch_size: int, on_host: float, host_read: float, hbm: float) -> float:
    """Return the seconds of a step of llama.cpp. Experts of the share `on_host` of layers are on the CPU."""
    routed = model.routed_bytes * model.stored_ratio
    touched = routed * model.touched_share(batch_size)
    on_gpu = model.stored_bytes - routed + (1 - on_host) * touched
    return on_host * touched / (PEERS.cpu_experts * host_read) + on_gpu / (PEERS.on_gpu * hbm)


def host_unknown(plan: Plan) -> bool:
    """Tell whether a plan needs host memory of which nothing is known."""
    return plan.holds and plan.machine.host_bytes is None and plan.host.total > HOST_NEGLIGIBLE


def host_needed(plan: Plan) -> str:
    """Return the host memory of a plan, marked where it is unknown."""
    return f"{ceil(plan.host.total / TUNING.max_host_share / (1 << 30))} GiB" + "?" * host_unknown(plan)


def describe(plan: Plan) -> str:
    """Return one line for `--dry-run`: bytes by tier and the limit of the step."""
    parts = [f"gpu {gib(plan.gpu.total)}", f"host {gib(plan.host.total)}"]
    if plan.nvme.total:
        parts.append(f"nvme {gib(plan.nvme.total)}")
    if plan.step_s is not None:
        parts.append(f"step >= {duration(plan.step_s)} ({plan.bound_by})")
    return " · ".join(parts)


def _offloads(plan: Plan) -> bool:
    return bool(plan.streamed_bytes or plan.placement.cpu_tokens)


def _rate(plan: Plan) -> float:
    return plan.output_tok_s or 0.0


def _words(plan: Plan) -> str:
    return f"{plan.case.label()} gives {figures(_rate(plan))} tok/s at batch {plan.case.workload.batch_size}"
