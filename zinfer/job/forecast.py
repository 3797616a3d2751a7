"""Forecast of a sweep: how many points it has, and how long it takes.

Plans give the seconds of each point as a good engine takes them. What the finished points took instead scales the rest,
so that the time left soon follows the machine, whatever the plan thought of it.
"""

from collections.abc import Sequence
from itertools import count, takewhile
from typing import NamedTuple

from zinfer.core.case import Case, Workload
from zinfer.job.recipe import Sweep, automatic
from zinfer.job.requests import RequestSet
from zinfer.plan.plan import Plan
from zinfer.record.requests import RequestKey

START_S = 8.0  # seconds until a worker has imported its engine
LOAD_BANDWIDTH = 3e9  # bytes of weights a second: records load 2 to 20 GB/s
WARM_UP_STEPS = 2


class Outlook(NamedTuple):
    """Standing of a sweep: points done and points in all, and the seconds left; None if no time is known."""

    done: int
    points: int
    exact: bool  # False where the largest batch is still searched for
    seconds_left: float | None


Key = Case | RequestKey  # of a point


class Ahead(NamedTuple):
    """A load that is ahead: its plan, its cases at batch 1 and its loads of requests, and the keys of points with a
    final record, which take no time."""

    plan: Plan
    cases: tuple[Case, ...]
    requests: tuple[tuple[RequestKey, RequestSet], ...] = ()
    known: frozenset[Key] = frozenset()


class Forecast:
    """Points and seconds that a sweep has left."""

    def __init__(self, sweep: Sweep, loads: Sequence[Ahead]) -> None:
        self._exact = not isinstance(sweep.batch_size, str)
        self._left: list[dict[Key, float | None]] = []  # for each load: its points to come, and their seconds
        self._loads: list[float] = []  # seconds until a load is ready
        for plan, cases, requests, recorded in loads:
            points: dict[Key, float | None] = {
                case.with_batch(size): _seconds(sweep, plan, case.with_batch(size))
                for case in cases
                for size in _batches(sweep, plan, case)
            }
            points |= {key: _request_seconds(plan, own) for key, own in requests}
            points |= dict.fromkeys(recorded.intersection(points), 0.0)
            tried = list(points)
            self._left.append(points if plan.fits else dict.fromkeys(tried[:1], 0.0))
            idle = not plan.fits or recorded.issuperset(tried)
            self._loads.append(0.0 if idle else START_S + plan.model.stored_bytes / LOAD_BANDWIDTH)
        self._done = 0
        self._predicted = self._taken = 0.0  # seconds of the measured points: as planned, and in truth

    def start(self, index: int) -> None:
        """Note that load number `index` runs: the loads before it are done, whatever points they did not come to."""
        for earlier in range(index):
            self._left[earlier].clear()
            self._loads[earlier] = 0.0

    def finish(self, index: int, case: Key, taken_s: float, resumed: bool) -> None:
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
    factor = factor or 2
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


def _request_seconds(plan: Plan, own: RequestSet) -> float | None:
    """Return the seconds of a load of requests: those of equal rows of the mean lengths, as many at a time as are in
    flight; an open loop lasts until its last request has come."""
    input_len, output_len = own.mean_lengths
    one = plan.at(Workload(batch_size=1, input_len=input_len, output_len=output_len))
    asked, count = own.load.in_flight, len(own.requests)
    rows = max(1, min(count, one.max_batch_size, asked if isinstance(asked, int) else count))
    prefill_s, step_s = plan.at(Workload(batch_size=rows, input_len=input_len, output_len=output_len)).expected()
    if prefill_s is None or step_s is None:
        return None
    rate = own.load.request_rate
    least = count / rate if isinstance(rate, float) else 0.0
    return max(least, count / rows * (prefill_s + step_s * (output_len - 1)))
