"""Search for the best batch, and advice whether to stream at all: plans compared with each other.

A larger batch is free until something else than the link sets the step. So a batch is searched for, and offload is
judged at each side's own best batch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import figures
from zinfer.plan.cost import Efficiency
from zinfer.plan.plan import Plan, largest_batch, make_plan, output_rate

NEARLY = 0.9  # share of the best throughput of powers of two from which on a better batch is searched beside one


def best_batch(case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None = None) -> Plan:
    """Plan `case` at the batch size with the highest predicted throughput, the smallest of equals: among 1, 2,
    4, .. and the largest that fits, and the peaks beside those that are nearly the best. If nothing fits, or no time
    is known, plan batch 1."""

    @cache
    def rank(size: int) -> tuple[float, int]:
        return output_rate(case.with_batch(size), model, machine, factors), -size

    def peak(low: int, high: int) -> int:
        while high - low > 2:
            left, right = low + (high - low) // 3, high - (high - low) // 3
            low, high = (left, high) if rank(left) < rank(right) else (low, right)
        return max(range(low, high + 1), key=rank)

    largest = largest_batch(case, model, machine, factors)
    sizes = sorted({1 << power for power in range(largest.bit_length())} | {largest} - {0}) or [1]
    promising = NEARLY * max(rank(size) for size in sizes)[0]
    between = (
        peak(sizes[max(index - 1, 0)], sizes[min(index + 1, len(sizes) - 1)])
        for index, size in enumerate(sizes)
        if rank(size)[0] >= promising
    )
    best = max(*sizes, *between, key=rank)
    return make_plan(case.with_batch(best), model, machine, factors=factors, largest=largest)


def batches_within(
    case: Case, model: ModelSpec, machine: Machine, factors: Efficiency | None, kept: Callable[[Plan], bool]
) -> list[Plan]:
    """Plan `case` at 1, 2, 4, .. up to the largest batch that fits, at the best one, and at the edges between batches
    that are `kept` and those that are not."""
    best = best_batch(case, model, machine, factors)
    largest = best.max_batch_size
    found: dict[int, Plan] = {best.case.workload.batch_size: best}

    def plan(size: int) -> Plan:
        if size not in found:
            found[size] = make_plan(case.with_batch(size), model, machine, factors=factors, largest=largest)
        return found[size]

    sizes = sorted({1 << power for power in range(largest.bit_length())} | {largest} - {0})
    for low, high in pairwise(sizes):
        lower = kept(plan(low))
        if lower == kept(plan(high)):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if kept(plan(middle)) == lower else (low, middle)
    return [found[size] for size in sorted(found)]


def advice(plans: Sequence[Plan]) -> str:
    """Advise in one sentence whether to stream, from the `best_batch` plans of one model, machine and pair of
    lengths."""
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


def _rate(plan: Plan) -> float:
    return plan.output_tok_s or 0.0


def _words(plan: Plan) -> str:
    return f"{plan.case.label()} gives {figures(_rate(plan))} tok/s at batch {plan.case.workload.batch_size}"
