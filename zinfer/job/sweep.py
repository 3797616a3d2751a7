"""Sweep: loads in the outer loop, batch sizes in the inner one, every point on disk before the next one starts.

With 352 GB of weights the load *is* the cost, so a process loads once and measures batch after batch, smallest first.
Out of memory is a result, not an accident: it is recorded, and no larger batch of the same load is tried.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from time import monotonic
from typing import Any

from zinfer.job.forecast import Forecast, Outlook
from zinfer.job.recipe import Sweep, SweepLoad, automatic
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.plan import LARGEST_BATCH, Plan, make_plan
from zinfer.record.measurement import Measurement, Status
from zinfer.record.store import Store
from zinfer.spec.case import Case
from zinfer.spec.machine import Machine
from zinfer.spec.model import check_positions
from zinfer.spec.source import Source
from zinfer.worker.process import Worker, WorkerDied, now

# Statuses of recorded points that --resume does not measure again; points with others get another try.
FINAL: frozenset[Status] = frozenset(
    {"ok", "oom_gpu", "oom_host", "unsupported", "nan_output", "offload_not_effective"}
)
OUT_OF_MEMORY: frozenset[Status] = frozenset({"oom_gpu", "oom_host"})


@dataclass(frozen=True)
class Try:
    """A batch to run: timed, or only to see whether it fits (prefill and two steps, no samples)."""

    batch_size: int
    timed: bool = True


Batches = Generator[Try, Status, None]


@dataclass(frozen=True)
class LoadJob:
    """One load, ready to run: its plan at batch 1, its cases, and its engine."""

    plan: Plan
    cases: tuple[Case, ...]  # cases at batch 1, one for each pair of lengths
    target: str  # the engine's class, as module:Class
    revision: str = ""


@dataclass
class Events:
    """Callbacks for the observer of a sweep."""

    point: Callable[[Measurement, bool], None] = lambda _point, _resumed: None  # True for a point from a record
    loading: Callable[[Plan], None] = lambda _plan: None
    loaded: Callable[[int, float], None] = lambda _size, _seconds: None
    progress: Callable[[str, float], None] = lambda _what, _share: None
    outlook: Callable[[Outlook], None] = lambda _outlook: None  # at the start and after each point
    trying: Callable[[Case], None] = lambda _case: None


def to_the_edge(limit: int, factor: int = 2, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the largest batch that runs: `first`, or else 1, 2, 4, .., until memory runs out or `limit`; then
    untimed tries, and the largest batch that runs, timed, last.

    The untimed tries begin at `guess` and proceed in growing strides, and by bisection between what ran and what did
    not. A status is sent in for every batch yielded; anything but ``ok`` counts as not running.
    """
    good, bad = 0, limit + 1
    rising = iter(sorted(first)) if first else takewhile(lambda batch: batch <= limit, _powers(factor))
    for batch in rising:
        if batch > limit or (yield Try(batch)) != "ok":
            bad = min(bad, batch)
            break
        good = batch
    largest_timed = good
    batch, stride = (guess, 1) if guess > good else (2 * good, good)
    while good and bad - good > 1:
        if not good < batch < bad:
            batch = (good + bad) // 2
        if (yield Try(batch, timed=False)) == "ok":
            good, batch = batch, batch + stride
        else:
            bad, batch = batch, batch - stride
        stride *= 2
    while good > largest_timed and (yield Try(good)) != "ok":  # a timed batch may need a little more memory than a try
        good -= 1


def _powers(factor: int) -> Iterator[int]:
    return (factor**power for power in count())


def listed(batches: Iterable[int]) -> Batches:
    """Yield the given batches in rising order, up to the first that runs out of memory."""
    for batch in sorted(batches):
        if (yield Try(batch)) in OUT_OF_MEMORY:
            return


def batches_of(sweep: Sweep, plan: Plan) -> Batches:
    """Return the batches to try. The plan guesses the largest one; without a GPU it is also the limit, since running
    out of memory would take down the whole machine."""
    if not isinstance(sweep.batch_size, str):
        return listed(sweep.batch_size)
    limit = LARGEST_BATCH if plan.machine.gpu_count else max(1, plan.max_batch_size)
    factor, first = automatic(sweep.batch_size)
    return to_the_edge(limit, factor, first, guess=min(plan.max_batch_size, limit))


def prepare(
    sweep: Sweep,
    machine: Machine,
    resolve: Callable[[SweepLoad], Source],
    locate: Callable[[SweepLoad], str | None],
    nvme_path: str | None = None,
    positions: bool = True,
) -> list[LoadJob]:
    """Plan the sweep's loads. `resolve` finds a load's model and weights; `locate` its engine, or None for an engine
    without that offload: such a combination is left out.

    Raises ModelError if lengths exceed a model's positions, unless `positions` is False.
    """
    jobs = []
    for load in sweep.loads():
        target = locate(load)
        if target is None:
            continue
        source = resolve(load)
        for lengths in sweep.lengths() if positions else ():
            check_positions(source.spec, *lengths)
        cases = tuple(load.case(source.load_format, source.spec.dtype, *lengths) for lengths in sweep.lengths())
        longest = max(cases, key=lambda case: case.workload.total_len)
        plan = make_plan(longest, source.spec, machine, nvme_path)
        jobs.append(LoadJob(plan, cases, target, source.revision))
    return jobs


def run(
    sweep: Sweep,
    jobs: Iterable[LoadJob],
    store: Store,
    done: Iterable[Measurement] = (),
    events: Events | None = None,
    make_worker: Callable[..., Any] = Worker,
) -> list[Measurement]:
    """Measure the points that `done` does not hold, append each to `store` at once, and return all points of the sweep.

    Raises Interrupted on SIGINT and SIGTERM, after the point under way is recorded as `cancelled`, and StoreError if a
    record cannot be written; no worker is left behind in either case.
    """
    known = {point.case: point for point in done if point.status in FINAL}
    events = events or Events()
    points: list[Measurement] = []
    jobs = tuple(jobs)
    forecast = Forecast(sweep, [(job.plan, job.cases) for job in jobs], known)
    with Signals() as signals:
        for index, job in enumerate(jobs):
            forecast.start(index)
            events.outlook(forecast.outlook())

            def finished(case: Case, taken_s: float, resumed: bool, index: int = index) -> None:
                forecast.finish(index, case, taken_s, resumed)
                events.outlook(forecast.outlook())

            points += _Runner(sweep, job, store, known, events, make_worker, signals, finished).run()
    return points


class _Runner:
    """One job and its worker, which is started when the first unmeasured point needs it."""

    def __init__(
        self,
        sweep: Sweep,
        job: LoadJob,
        store: Store,
        known: dict[Case, Measurement],
        events: Events,
        make_worker: Callable[..., Any],
        signals: Signals,
        finished: Callable[[Case, float, bool], None],
    ) -> None:
        self._sweep, self._job, self._store, self._known, self._events = sweep, job, store, known, events
        self._make_worker, self._signals, self._finished = make_worker, signals, finished
        self._worker: Any = None
        self._crashes = 0

    def run(self) -> list[Measurement]:
        points: list[Measurement] = []
        try:
            for case in self._job.cases:
                batches = batches_of(self._sweep, self._job.plan.at(case.workload))
                status: Status | None = None
                while (attempt := _advance(batches, status)) is not None:
                    repeats = self._sweep.repeats if attempt.timed else 0
                    tried, began = case.with_batch(attempt.batch_size), monotonic()
                    self._events.trying(tried)
                    point, resumed = self._point(tried, repeats)
                    status = point.status
                    points.append(point)
                    self._events.point(point, resumed)
                    self._finished(tried, monotonic() - began, resumed)
                    if point.stage == "load" or self._crashes > 1:
                        return points  # nothing of this load can be measured
        finally:
            self._stop()
        return points

    def _point(self, case: Case, repeats: int) -> tuple[Measurement, bool]:
        known = self._known.get(case)
        if known is not None and (known.usable or known.status != "ok" or not repeats):
            return known, True
        point = self._measure(case, repeats)
        predicted = self._job.plan.at(case.workload)
        numbers: dict[str, float] = {"gpu_bytes": predicted.gpu.total, "host_bytes": predicted.host.total}
        prefill_s, step_s = predicted.expected()
        if step_s is not None and prefill_s is not None:
            numbers |= {"step_ms": step_s * 1e3, "ttft_ms": prefill_s * 1e3}
        point = point.model_copy(update={"predicted": numbers, "model_revision": self._job.revision})
        self._store.append(point)
        self._known[case] = point
        return point, False

    def _measure(self, case: Case, repeats: int) -> Measurement:
        why_not = self._job.plan.why_not
        if why_not is not None:
            return self._failed(case, "unsupported", why_not, "load")
        stage = "load"
        try:
            if self._worker is None:
                self._events.loading(self._job.plan)
                self._worker = self._make_worker(
                    self._job.target,
                    timeout_s=self._sweep.timeout_s,
                    notice=self._events.progress,
                    loaded=self._events.loaded,
                )
                with self._signals.raised():
                    refused: Measurement | None = self._worker.load(self._job.plan)
                if refused is not None:
                    self._stop()
                    return refused.model_copy(update={"case": case})
            stage = "measure"
            with self._signals.raised():
                point: Measurement = self._worker.measure(case, repeats, self._sweep.tolerance)
            if point.status == "crashed":  # a CUDA context after an error cannot be used for the next point
                self._crashes += 1
                self._stop()
            return point
        except WorkerDied as death:
            self._crashes += 1
            self._stop()
            return self._failed(case, death.status, str(death), stage)
        except Interrupted as interrupt:
            self._stop(kill=True)
            self._store.append(self._failed(case, "cancelled", interrupt.name, stage))
            raise

    def _failed(self, case: Case, status: Status, error: str, stage: str) -> Measurement:
        model = self._job.plan.model
        return Measurement(
            case=case,
            status=status,
            machine=self._job.plan.machine.name,
            error=error,
            stage=stage,
            num_layers=model.num_layers,
            total_layers=model.total_layers,
            started_at=now(),
        )

    def _stop(self, kill: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if kill:
                worker.kill()
            worker.close()


def _advance(batches: Batches, status: Status | None) -> Try | None:
    try:
        return next(batches) if status is None else batches.send(status)
    except StopIteration:
        return None


def exit_code(sweep: Sweep, points: Iterable[Measurement]) -> int:
    """Return the exit code of a sweep: 0 if every point is ok, 3 if some are not, 4 if none is. With ``auto``, a batch
    that memory or a TensorRT plan has no room for is how the largest batch is found, and counts as ok."""
    points = tuple(points)
    good = sum(point.status == "ok" for point in points)
    if not good:
        return 4
    fine = good + (sum(map(_edge, points)) if isinstance(sweep.batch_size, str) else 0)
    return 0 if fine == len(points) else 3


def _edge(point: Measurement) -> bool:
    """Return True if the load ran and the batch was too large for it."""
    return point.status in OUT_OF_MEMORY or (point.status == "unsupported" and point.stage != "load")
