"""Loads of a batch job: which rows fit the machine, and which of several ways to run the model is the fastest for them.

Pure functions of lengths and of the plan's predicted seconds.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zinfer.core.case import Case, Workload
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.generation.schedule import largest_load
from zinfer.generation.tuning import TUNED
from zinfer.plan import cost
from zinfer.plan.plan import Plan, largest_batch, make_plan
from zinfer.plan.search import best_batch

INPUT, OUTPUT = 512, 256  # tokens of a typical request, for which memory is shared out


class RowDemand(NamedTuple):
    """Demand of a row: tokens that prefill has to read, and the most tokens still to come."""

    length: int
    left: int


def fits_alone(case: Case, need: RowDemand, model: ModelSpec, machine: Machine) -> bool:
    """Return True if the plan finds room for the row by itself, all of its tokens included."""
    return largest_batch(shaped(case, need), model, machine) > 0


def fitting(case: Case, needs: Sequence[RowDemand], model: ModelSpec, machine: Machine) -> list[bool]:
    """Tell for each of `needs` whether it fits alone."""
    if not needs or fits_alone(case, _envelope(needs), model, machine):
        return [True] * len(needs)
    known: dict[RowDemand, bool] = {}
    for need in needs:
        if need not in known:
            known[need] = fits_alone(case, need, model, machine)
    return [known[need] for need in needs]


def _envelope(needs: Iterable[RowDemand]) -> RowDemand:
    """Return the smallest demand that covers all of `needs`."""
    lengths, left = zip(*needs, strict=True)
    return RowDemand(max(lengths), max(left))


def best_plan(
    cases: Iterable[Case], needs: Sequence[RowDemand], model: ModelSpec, machine: Machine, nvme_path: str | None = None
) -> Plan:
    """Return the plan of the best load: the one that has room for most of `needs`, then the fastest at its best batch.
    If no load can run, return the last one's plan, with the reason. The workload is that of the longest row."""
    mean = RowDemand(*(max(1, sum(column) // len(needs)) for column in zip(*needs, strict=True)))
    ranked: list[tuple[tuple[bool, int, float], Plan]] = []
    for case in cases:
        fits = [need for need, fine in zip(needs, fitting(case, needs, model, machine), strict=True) if fine]
        typical = shaped(case, mean)
        rate = best_batch(typical, model, machine, cost.Efficiency()).output_tok_s or 0.0
        longest = max(fits or [mean], key=sum)
        plan = make_plan(shaped(case, longest), model, machine, nvme_path)
        ranked.append(((plan.fits, len(fits), rate), plan))
    best = max(rank for rank, _ in ranked)
    able = [plan for rank, plan in ranked if rank == best]
    return able[0] if best[0] else ranked[-1][1]


def typical_plan(
    cases: Sequence[Case], model: ModelSpec, machine: Machine, nvme_path: str | None, rows: int | None, waiting: int
) -> tuple[Plan, Workload | None]:
    """Return the plan of the best load for requests whose lengths are not known yet, and the largest load to reckon
    with; None, and the reason in the plan, where nothing fits. At most `rows` rows run, and `waiting` wait."""
    positions = model.max_position or INPUT + OUTPUT
    output = max(1, min(OUTPUT, positions // 3))
    typical = RowDemand(max(1, min(INPUT, positions - output)), output)
    count = min(TUNED.max_rows, rows or TUNED.max_rows, max(waiting, 256))
    plan = best_plan(cases, [typical] * count, model, machine, nvme_path)
    if not plan.fits:
        return plan, None
    longest = -(-positions // sum(typical))  # typical requests in the place of one that takes all positions
    return plan, largest_load(plan, [typical] * max(count, longest), None if rows is None else max(rows, longest))


def shaped(case: Case, need: RowDemand, rows: int = 1) -> Case:
    """Return `case` with the workload of `rows` equal rows."""
    workload = Workload(batch_size=rows, input_len=need.length, output_len=need.left)
    return case.model_copy(update={"workload": workload})
