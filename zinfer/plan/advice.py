"""Advice from plans: whether to stream at all, and one line for a dry run.

Offload is judged at each side's own best batch.
"""

from collections.abc import Sequence

from zinfer.core.units import duration, figures, gib
from zinfer.plan.planner import Plan


def advice(plans: Sequence[Plan]) -> str:
    """Advise in one sentence whether to stream.

    `plans` come from `Planner.best`, of one model, machine and pair of lengths.
    """
    able = [plan for plan in plans if plan.holds and plan.output_tok_s]
    if not able:
        return "Nothing fits; see why below." if plans else "Nothing was planned."
    staying, moving = (
        max((plan for plan in able if (plan.streamed_bytes > 0) is streams), key=_rate, default=None)
        for streams in (False, True)
    )
    if moving is None or staying is None:
        (only,) = (plan for plan in (staying, moving) if plan)
        too_large = any(plan.case.offload == "none" and not plan.max_batch_size for plan in plans)
        stream = "Stream: without it the weights do not fit. " if too_large else "Only streaming was planned: "
        return f"{stream if only is moving else 'Do not stream: all of it fits. '}{_words(only)}."
    first, second = (staying, moving) if _rate(staying) >= _rate(moving) else (moving, staying)
    verb = "Do not stream" if first is staying else "Stream"
    return f"{verb}: {_words(first)}; {_words(second)}, {_rate(second) / _rate(first):.2f} of it."


def describe(plan: Plan) -> str:
    """Return one line for `--dry-run`: bytes by tier and the limit of the step."""
    parts = [f"gpu {gib(plan.gpu.total)}", f"host {gib(plan.host.total)}"]
    if plan.nvme.total:
        parts.append(f"nvme {gib(plan.nvme.total)}")
    if plan.step_s is not None:
        parts.append(f"step >= {duration(plan.step_s)} ({plan.bound_by})")
    return " · ".join(parts)


def _rate(plan: Plan) -> float:
    return plan.output_tok_s or 0.0


def _words(plan: Plan) -> str:
    return f"{plan.case.label()} gives {figures(_rate(plan))} tok/s at batch {plan.case.workload.batch_size}"
