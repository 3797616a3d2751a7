"""Batch sizes of a sweep, and its forecast: how many points it has, and how long it takes.

Batches are listed, or searched for, up to the plateau or to the edge of memory.

Plans give the seconds of each point; what the finished points took instead scales the rest.
"""

from collections.abc import Generator, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

from zinfer.core.case import Case, Workload
from zinfer.job.recipe import Sweep, automatic
from zinfer.job.requests import RequestSet
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.search import LARGEST_BATCH
from zinfer.record.measurement import Status
from zinfer.record.requests import RequestKey

OUT_OF_MEMORY: frozenset[Status] = frozenset({"oom_gpu", "oom_host"})
PLATEAU = 0.05  # gain of two doublings together, over the best before, from which on a larger batch is tried


@dataclass(frozen=True)
class Try:
    """Batch to run: timed, or only to see whether it fits."""

    batch_size: int
    timed: bool = True


class Answer(NamedTuple):
    """Status of a try, and its output tokens a second if measured."""

    status: Status
    tok_s: float | None = None


Batches = Generator[Try, Answer, None]


def search(limit: int, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the batch with the most output tokens a second. `first` are timed, then doubles, until two of them
    gain less than `PLATEAU`, or memory ends. There untimed tries begin at `guess`, proceed in growing strides, then by
    bisection, and the largest batch that runs is timed. An answer is sent in for every batch yielded; any status but
    ``ok`` counts as not running."""
    listed_first = sorted(first)
    start = 2 * listed_first[-1] if listed_first else 1
    rates: dict[int, float] = {}
    good, bad, level = 0, limit + 1, False
    for batch in chain(listed_first, (start * 2**power for power in count())):
        if batch > limit or batch > guess > good >= start // 2:
            break
        answer = yield Try(batch)
        if answer.status != "ok":
            bad = batch
            break
        good = batch
        if answer.tok_s is not None:
            rates[batch] = answer.tok_s
        before = [rate for timed, rate in rates.items() if timed * 4 <= max(rates)]
        level = bool(before) and batch * 2 >= start and max(rates.values()) < (1 + PLATEAU) * max(before)
        if level:
            break
    largest_timed = good
    batch, stride = (guess, 1) if guess > good else (2 * good, good)
    while good and bad - good > 1 and not level:
        if not good < batch < bad:
            batch = (good + bad) // 2
        if (yield Try(batch, timed=False)).status == "ok":
            good, batch = batch, batch + stride
        else:
            bad, batch = batch, batch - stride
        stride *= 2
    while good > largest_timed and (yield Try(good)).status != "ok":
        good -= 1  # timed, it needs a little more memory


def listed(batches: Iterable[int]) -> Batches:
    """Yield batches in rising order until memory runs out."""
    for batch in sorted(batches):
        if (yield Try(batch)).status in OUT_OF_MEMORY:
            return


def batches_of(sweep: Sweep, plan: Plan) -> Batches:
    """Return the batches to try. Without a GPU none is larger than planned: the host would run out of memory."""
    if not isinstance(sweep.batch_size, str):
        return listed(sweep.batch_size)
    limit = LARGEST_BATCH if plan.machine.gpu_count else max(1, plan.max_batch_size)
    return search(limit, automatic(sweep.batch_size), min(plan.max_batch_size, limit))


def advance(batches: Batches, answer: Answer | None) -> Try | None:
    """Return the next try after an answer, None before the first; None at the end."""
    try:
        return next(batches) if answer is None else batches.send(answer)
    except StopIteration:
        return None


# Forecast


@dataclass(frozen=True)
class Overheads:
    """Tuned numbers of what a point takes besides its repeats."""

    start_s: float = 8.0  # seconds until a worker has imported its engine
    load_bandwidth: float = 3e9  # bytes of weights a second: records load 2 to 20 GB/s
    warm_up_steps: int = 2


OVERHEADS = Overheads()
Key = Case | RequestKey  # of a point


class Outlook(NamedTuple):
    """Points done and in all, and seconds left, None if unknown."""

    done: int
    points: int
    exact: bool  # False where the largest batch is still searched for
    seconds_left: float | None


@dataclass(frozen=True)
class LoadJob:
    """Load that is ready to run: its planner, its cases, and its engine."""

    planner: Planner
    cases: tuple[Case, ...]  # cases at batch 1, one for each pair of lengths
    target: str  # the engine's class, as module:Class
    revision: str = ""
    requests: tuple[tuple[RequestKey, RequestSet], ...] = ()  # loads of requests, measured after the cases

    @property
    def plan(self) -> Plan:
        """Plan of the longest case or load, with which the worker loads."""
        return self.planner.plan


class Forecast:
    """Points and seconds that a sweep has left. Each load has points with a final record, which take no time."""

    def __init__(self, sweep: Sweep, loads: Sequence[tuple[LoadJob, Set[Key]]]) -> None:
        self._exact = not isinstance(sweep.batch_size, str)
        self._left: list[dict[Key, float | None]] = []  # for each load: its points to come, and their seconds
        self._loads: list[float] = []  # seconds until a load is ready
        for job, recorded in loads:
            planner, points = job.planner, dict[Key, float | None]()
            for case in job.cases:
                sized = map(case.with_batch, likely_batches(sweep, planner, case.workload))
                points |= {key: _seconds(sweep, planner, key.workload) for key in sized}
            points |= {key: _request_seconds(planner, request_set) for key, request_set in job.requests}
            points |= dict.fromkeys(recorded & points.keys(), 0.0)
            fits, idle = planner.plan.fits, points.keys() <= recorded
            self._left.append(points if fits else dict.fromkeys(list(points)[:1], 0.0))
            load_s = OVERHEADS.start_s + planner.model.stored_bytes / OVERHEADS.load_bandwidth
            self._loads.append(0.0 if idle or not fits else load_s)
        self._done = 0
        self._predicted = self._measured = 0.0  # seconds of the measured points: as planned, and in truth

    def start(self, index: int) -> None:
        """Note that load number `index` runs: points that the loads before it did not reach are gone."""
        for earlier in range(index):
            self._left[earlier].clear()
            self._loads[earlier] = 0.0

    def finish(self, index: int, key: Key, taken_s: float, resumed: bool) -> None:
        """Note a finished point; `taken_s` includes its load if it came first."""
        planned = self._left[index].pop(key, None)
        self._done += 1
        if resumed:
            return
        if planned is not None:
            self._predicted += planned + self._loads[index]
            self._measured += taken_s
        self._loads[index] = 0.0

    def outlook(self) -> Outlook:
        """Return the points and the seconds as they are now."""
        left = [seconds for points in self._left for seconds in points.values()]
        seconds_left = self._scale * (sum(self._loads) + sum(seconds or 0.0 for seconds in left))
        return Outlook(self._done, self._done + len(left), self._exact, None if None in left else seconds_left)

    def seconds(self, index: int, key: Key) -> float:
        """Return the seconds of a point to come; 0 if unknown."""
        return self._scale * (self._left[index].get(key) or 0.0)

    @property
    def _scale(self) -> float:
        return self._measured / self._predicted if self._predicted and self._measured else 1.0


def likely_batches(sweep: Sweep, planner: Planner, workload: Workload) -> list[int]:
    """Return the batch sizes that a sweep is likely to time."""
    if not isinstance(sweep.batch_size, str):
        return list(sweep.batch_size)
    batches, answer, sizes = batches_of(sweep, planner.at(workload)), None, list[int]()
    while (attempt := advance(batches, answer)) is not None:
        sized = workload.with_batch(attempt.batch_size)
        fits = attempt.batch_size <= max(1, planner.max_batch(workload))
        answer = Answer("ok" if fits else "oom_gpu", planner.rate(sized) if attempt.timed and fits else None)
        if attempt.timed and fits:
            sizes.append(attempt.batch_size)
    return sizes


def _seconds(sweep: Sweep, planner: Planner, workload: Workload) -> float | None:
    """Return the seconds of a point with warm-up and all repeats; None if the machine's figures are not known."""
    prefill_s, step_s = planner.at(workload).expected()
    if prefill_s is None or step_s is None:
        return None
    once = prefill_s + step_s * (workload.output_len - 1)
    return prefill_s + OVERHEADS.warm_up_steps * step_s + sweep.repeats * once


def _request_seconds(planner: Planner, requests: RequestSet) -> float | None:
    """Return the seconds of a load of requests. It is taken as equal rows of the mean lengths, one each in flight."""
    input_len, output_len = requests.mean_lengths
    single = Workload(batch_size=1, input_len=input_len, output_len=output_len)
    in_flight, total = requests.load.in_flight, len(requests.requests)
    rows = max(1, min(total, planner.max_batch(single), in_flight if isinstance(in_flight, int) else total))
    prefill_s, step_s = planner.at(single.with_batch(rows)).expected()
    if prefill_s is None or step_s is None:
        return None
    rate = requests.load.request_rate
    arriving_s = total / rate if isinstance(rate, float) else 0.0
    return max(arriving_s, total / rows * (prefill_s + step_s * (output_len - 1)))
