"""Forecast of a sweep: how many points it has, and how long it takes.

Plans give the seconds of each point as a good engine takes them. What the finished points took instead scales the rest,
so that the time left soon follows the machine, whatever the plan thought of it.
"""

from collections.abc import Iterable, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from zinfer.job.recipe import Sweep, automatic
from zinfer.plan.plan import Plan
from zinfer.spec.case import Case

START_S = 8.0  # seconds until a worker has imported its engine
LOAD_BANDWIDTH = 3e9  # bytes of weights a second: records load 2 to 20 GB/s
WARM_UP_STEPS = 2


class Outlook(NamedTuple):
    """Standing of a sweep: points done and points in all, and the seconds left; None if no time is known."""

    done: int
    points: int
    exact: bool  # False where the largest batch is still searched for
    seconds_left: float | None


class Forecast:
    """Points and seconds that a sweep has left. `loads` are the plan of each load and its cases at batch 1, `known` the
    cases with a final record, which take no time."""

    def __init__(
        self, sweep: Sweep, loads: Sequence[tuple[Plan, tuple[Case, ...]]], known: Iterable[Case] = ()
    ) -> None:
        self._exact = not isinstance(sweep.batch_size, str)
        recorded = set(known)
        self._left: list[dict[Case, float | None]] = []  # for each load: its points to come, and their seconds
        self._loads: list[float] = []  # seconds until a load is ready
        for plan, cases in loads:
            tried = [case.with_batch(size) for case in cases for size in _batches(sweep, plan, case)]
            points = {case: 0.0 if case in recorded else _seconds(sweep, plan, case) for case in tried}
            self._left.append(points if plan.fits else dict.fromkeys(tried[:1], 0.0))
            idle = not plan.fits or recorded.issuperset(tried)
            self._loads.append(0.0 if idle else START_S + plan.model.weight_bytes / LOAD_BANDWIDTH)
        self._done = 0
        self._predicted = self._taken = 0.0  # seconds of the measured points: as planned, and in truth

    def start(self, index: int) -> None:
        """Note that load number `index` runs: the loads before it are done, whatever points they did not come to."""
        for earlier in range(index):
            self._left[earlier].clear()
            self._loads[earlier] = 0.0

    def finish(self, index: int, case: Case, taken_s: float, resumed: bool) -> None:
        """Note a finished point of load `index`, which took `taken_s` seconds, the load's own included."""
        planned = self._left[index].pop(case, None)
        self._done += 1
        if not resumed and planned is not None:
            self._predicted += planned + self._loads[index]
            self._taken += taken_s
        if not resumed:
            self._loads[index] = 0.0

    def outlook(self) -> Outlook:
        """Return the standing now."""
        left = [seconds for points in self._left for seconds in points.values()]
        seconds_left = None
        if all(seconds is not None for seconds in left):
            scale = self._taken / self._predicted if self._predicted and self._taken else 1.0
            seconds_left = scale * (sum(self._loads) + sum(seconds or 0.0 for seconds in left))
        return Outlook(self._done, self._done + len(left), self._exact, seconds_left)


def _batches(sweep: Sweep, plan: Plan, case: Case) -> list[int]:
    """Return the batch sizes that are likely to be tried: those listed, or powers up to the largest that fits."""
    if not isinstance(sweep.batch_size, str):
        return list(sweep.batch_size)
    factor, first = automatic(sweep.batch_size)
    largest = max(1, plan.at(case.workload).max_batch_size)
    rising = first or takewhile(lambda size: size <= largest, (factor**power for power in count()))
    return sorted({size for size in rising if size <= largest} | {largest})


def _seconds(sweep: Sweep, plan: Plan, case: Case) -> float | None:
    """Return the seconds of one point: its warm-up and all repeats; None if the machine's figures are not known."""
    prefill_s, step_s = plan.at(case.workload).expected()
    if prefill_s is None or step_s is None:
        return None
    once = prefill_s + step_s * (case.workload.output_len - 1)
    return prefill_s + WARM_UP_STEPS * step_s + sweep.repeats * once
