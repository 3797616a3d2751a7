"""Loads of a batch job: which rows fit, which plan is fastest.

Pure functions of lengths and of the plan's predicted seconds.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from zinfer.core.case import Case, Workload
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.generation.schedule import largest_load
from zinfer.generation.tuning import TUNED
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.times import Efficiency, shipped

INPUT, OUTPUT = 512, 256  # tokens of a typical request, for which memory is shared out


Need = tuple[int, int]  # of a row: tokens that prefill has to read, and maximum of tokens to come


def fitting(planner: Planner, needs: Sequence[Need]) -> list[bool]:
    """Tell for each of `needs` whether that row alone fits, whole."""

    @cache
    def fits(need: Need) -> bool:
        return planner.max_batch(workload_of(need)) > 0

    everything = fits((max(length for length, _ in needs), max(left for _, left in needs))) if needs else True
    return [everything or fits(need) for need in needs]


def best_plan(
    cases: Iterable[Case], needs: Sequence[Need], model: ModelSpec, machine: Machine, nvme_path: str | None = None
) -> Plan:
    """Return the best load's plan for its longest row. Most of `needs` fit, then it is fastest; or it says why not."""
    length, left = (max(1, sum(column) // len(needs)) for column in zip(*needs, strict=True))
    typical = length, left
    mean = workload_of(typical)
    ranked: list[tuple[tuple[bool, int, float], Plan]] = []
    for case in cases:
        predicted = Planner(case, model, machine, shipped().get(case.engine, Efficiency())).searched(mean, len(needs))
        planner = Planner(predicted.case, model, machine, nvme_path=nvme_path)
        fits = [need for need, fine in zip(needs, fitting(planner, needs), strict=True) if fine]
        size = predicted.best_size(mean, len(needs))
        rate = predicted.rate(mean.with_batch(size)) or 0.0
        plan = planner.at(workload_of(max(fits or [typical], key=sum)))
        ranked.append(((plan.fits, len(fits), rate), plan))
    best = max(rank for rank, _ in ranked)
    able = [plan for rank, plan in ranked if rank == best]
    return able[0] if best[0] else ranked[-1][1]


def typical_plan(
    cases: Sequence[Case], model: ModelSpec, machine: Machine, nvme_path: str | None, rows: int | None, waiting: int
) -> tuple[Plan, Workload | None]:
    """Return the best plan for unknown requests, and its largest load. Where nothing fits, that is None."""
    positions = model.max_position or INPUT + OUTPUT
    output = max(1, min(OUTPUT, positions // 3))
    typical = max(1, min(INPUT, positions - output)), output
    count = min(TUNED.max_rows, rows or TUNED.max_rows, max(waiting, 256))
    plan = best_plan(cases, [typical] * count, model, machine, nvme_path)
    if not plan.fits:
        return plan, None
    longest = -(-positions // sum(typical))  # typical requests instead of one that takes all positions
    at_most = None if rows is None else max(rows, longest)
    return plan, largest_load(plan.planner(), [typical] * max(count, longest), at_most)


def workload_of(need: Need) -> Workload:
    """Return the workload of one row."""
    return Workload(batch_size=1, input_len=need[0], output_len=need[1])
