"""Sweep: loads in the outer loop, batch sizes in the inner one, every point on disk before the next one starts.

With 352 GB of weights the load *is* the cost, so a process loads once and measures batch after batch, smallest first.
Out of memory is a result, not an accident: it is recorded, and no larger batch of the same load is tried.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from zinfer.checkpoint.source import Source, find
from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError, ModelSpec, check_positions
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.forecast import Forecast, Key, Outlook, UpcomingLoad
from zinfer.job.recipe import Sweep, SweepLoad, automatic, engine_recipe
from zinfer.job.requests import RequestSet
from zinfer.job.shard import Shard
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.search import LARGEST_BATCH
from zinfer.record.measurement import Measurement, Recorded, Status
from zinfer.record.requests import RequestKey, RequestPoint
from zinfer.record.store import Header, Store
from zinfer.worker.process import TaskFailed, Worker, WorkerDied, now, versions
from zinfer.worker.tasks import MeasureRequests, RequestRow

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


class Answer(NamedTuple):
    """Outcome of a try: its status, and the output tokens a second if they were measured."""

    status: Status
    tok_s: float | None = None


Batches = Generator[Try, Answer, None]
NEAR = 32  # the best batch is searched for in steps down to this part of the largest
Point = Measurement | RequestPoint
P = TypeVar("P", bound=Recorded)


class Outcome(NamedTuple):
    """Points of a sweep, of equal sequences and of requests, those from a record included."""

    points: list[Measurement]
    requests: list[RequestPoint]

    @property
    def all(self) -> list[Point]:
        return [*self.points, *self.requests]


@dataclass(frozen=True)
class LoadJob:
    """One load, ready to run: its planner, its cases, and its engine."""

    planner: Planner
    cases: tuple[Case, ...]  # cases at batch 1, one for each pair of lengths
    target: str  # the engine's class, as module:Class
    revision: str = ""
    requests: tuple[tuple[RequestKey, RequestSet], ...] = ()  # loads of requests, measured after the cases

    @property
    def plan(self) -> Plan:
        """Plan of the longest case or load of requests, with which the worker loads."""
        return self.planner.plan


@dataclass
class Events:
    """Callbacks for the observer of a sweep."""

    point: Callable[[Measurement, bool], None] = lambda _point, _resumed: None  # True for a point from a record
    loading: Callable[[Plan], None] = lambda _plan: None
    loaded: Callable[[int, float], None] = lambda _size, _seconds: None
    progress: Callable[[str, float], None] = lambda _what, _share: None
    outlook: Callable[[Outlook], None] = lambda _outlook: None  # at the start and after each point
    trying: Callable[[Case | RequestKey], None] = lambda _key: None
    requests: Callable[[RequestPoint, bool], None] = lambda _point, _resumed: None  # as `point`


def to_the_edge(limit: int, factor: int = 2, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the largest batch that runs: `first`, or else 1, 2, 4, .., until memory runs out or `limit`; then
    untimed tries, and the largest batch that runs, timed, last.

    The untimed tries begin at `guess` and proceed in growing strides, and by bisection between what ran and what did
    not. An answer is sent in for every batch yielded; any status but ``ok`` counts as not running.
    """
    good, bad = 0, limit + 1
    rising = iter(sorted(first)) if first else takewhile(lambda batch: batch <= limit, _powers(factor))
    for batch in rising:
        if batch > limit or (yield Try(batch)).status != "ok":
            bad = min(bad, batch)
            break
        good = batch
    largest_timed = good
    batch, stride = (guess, 1) if guess > good else (2 * good, good)
    while good and bad - good > 1:
        if not good < batch < bad:
            batch = (good + bad) // 2
        if (yield Try(batch, timed=False)).status == "ok":
            good, batch = batch, batch + stride
        else:
            bad, batch = batch, batch - stride
        stride *= 2
    while good > largest_timed and (yield Try(good)).status != "ok":  # timed, it may need a little more memory
        good -= 1


def to_the_best(limit: int, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the batch with the most output tokens a second: first the largest, as `to_the_edge` does, which need
    not be the best; then around the best of those measured, in steps of an eighth of the largest batch, halved as long
    as both neighbours are slower."""
    rates: dict[int, float] = {}
    edge = to_the_edge(limit, 2, first, guess)
    attempt = next(edge)
    while True:
        answer = yield attempt
        if attempt.timed and answer.status == "ok" and answer.tok_s is not None:
            rates[attempt.batch_size] = answer.tok_s
        try:
            attempt = edge.send(answer)
        except StopIteration:
            break
    largest = max(rates, default=0)
    step = largest // 8
    while step >= max(1, largest // NEAR):
        best = max(rates, key=lambda batch: rates[batch])
        for batch in (best - step, best + step):
            if 0 < batch <= largest and batch not in rates:
                answer = yield Try(batch)
                rates[batch] = answer.tok_s or 0.0 if answer.status == "ok" else 0.0
        if max(rates, key=lambda batch: rates[batch]) == best:
            step //= 2


def _powers(factor: int) -> Iterator[int]:
    return (factor**power for power in count())


def listed(batches: Iterable[int]) -> Batches:
    """Yield the given batches in rising order, up to the first that runs out of memory."""
    for batch in sorted(batches):
        if (yield Try(batch)).status in OUT_OF_MEMORY:
            return


def batches_of(sweep: Sweep, plan: Plan) -> Batches:
    """Return the batches to try. The plan guesses the largest one; without a GPU it is also the limit, since running
    out of memory would take down the whole machine."""
    if not isinstance(sweep.batch_size, str):
        return listed(sweep.batch_size)
    limit = LARGEST_BATCH if plan.machine.gpu_count else max(1, plan.max_batch_size)
    factor, first = automatic(sweep.batch_size)
    guess = min(plan.max_batch_size, limit)
    return to_the_edge(limit, factor, first, guess) if factor else to_the_best(limit, first, guess)


def prepare(
    sweep: Sweep,
    machine: Machine,
    resolve: Callable[[SweepLoad], Source],
    locate: Callable[[SweepLoad], str | None],
    nvme_path: str | None = None,
    positions: bool = True,
    requests: Sequence[RequestSet] = (),
    loads: Iterable[SweepLoad] | None = None,
) -> list[LoadJob]:
    """Plan the sweep's loads, or these of them. `resolve` finds a load's model and weights; `locate` its engine, or
    None for an engine without that offload: such a combination is left out. `requests` are those of
    `zinfer.job.requests.request_sets`.

    Raises ModelError if lengths exceed a model's positions, unless `positions` is False.
    """
    jobs = []
    for load in sweep.loads() if loads is None else loads:
        target = locate(load)
        if target is None:
            continue
        source = resolve(load)
        for lengths in sweep.lengths() if positions else ():
            check_positions(source.spec, *lengths)
        for longest in filter(None, (one.longest for one in requests)):
            lengths = longest.input_len, longest.output_len
            check_positions(source.spec, *lengths, f"a request of {longest.input_len:,} tokens")

        def case(lengths: tuple[int, int], load: SweepLoad = load, source: Source = source) -> Case:
            return load.case(source.load_format, source.spec.dtype, *lengths)

        cases = tuple(map(case, sweep.lengths()))
        planned = [*cases, *(case(one.mean_lengths) for one in requests)]
        longest_case = max(planned, key=lambda case: case.workload.total_len)
        planner = Planner(longest_case, source.spec, machine, nvme_path=nvme_path)
        keys = tuple((RequestKey(case((1, 1)), one.load), one) for one in requests)
        jobs.append(LoadJob(planner, cases, target, source.revision, keys))
    return jobs


def recipe_of(sweep: Sweep) -> dict[str, Any]:
    """Return the settings of a sweep as its header has them."""
    return sweep.model_dump(mode="json", exclude={"description", "timeout_s", "machine", "published"})


def header_of(sweep: Sweep, machine: str, revisions: Iterable[tuple[str, str]], shard: Shard | None = None) -> Header:
    """Return the header of a start of `sweep` or of a shard; `revisions` are the models with their revisions."""
    found: dict[str, str] = {}
    for name in sweep.engine:
        found |= versions(engine_recipe(name).engine)
    return Header(
        machine=machine,
        description=sweep.description,
        recipe=recipe_of(sweep),
        model_revision=",".join(sorted({f"{model}@{revision}" for model, revision in revisions})),
        versions=found,
        started_at=now(),
        shard=None if shard is None else str(shard),
    )


def source_of(sweep: Sweep, load: SweepLoad) -> Source:
    """Return the model and weights of a load. Raises ModelError and CheckpointError."""
    return find(
        load.model, load.dtype, load.layers, sweep.load_format, weights=load.weights, draft=load.draft_model
    )  # fmt: skip


def run(
    sweep: Sweep,
    jobs: Iterable[LoadJob],
    store: Store,
    done: Iterable[Point] = (),
    events: Events | None = None,
    make_worker: Callable[..., Any] = Worker,
    signals: Signals | None = None,
) -> Outcome:
    """Measure the points that `done` does not hold, append each to `store` at once, and return all points of the sweep.
    `signals` are those that interrupt it, by default SIGINT and SIGTERM.

    Raises Interrupted on SIGINT and SIGTERM, after the point under way is recorded as `cancelled`, and StoreError if a
    record cannot be written; no worker is left behind in either case.
    """
    known: Known = {}
    for point in done:
        if point.status in FINAL:
            known.setdefault(key_of(point), []).append(point)
    events = events or Events()
    outcome = Outcome([], [])
    jobs = tuple(jobs)
    turns = [(number, job) for number in range(sweep.rounds) for job in jobs]
    upcoming = []
    for number, job in turns:
        recorded = frozenset(key for key in known if _recorded(known, key, number))
        upcoming.append(UpcomingLoad(job.planner, job.cases, job.requests, recorded))
    forecast = Forecast(sweep, upcoming)
    with signals or Signals() as handled:
        for index, (number, job) in enumerate(turns):
            forecast.start(index)
            events.outlook(forecast.outlook())

            def finished(key: Key, taken_s: float, resumed: bool, index: int = index) -> None:
                forecast.finish(index, key, taken_s, resumed)
                events.outlook(forecast.outlook())

            runner = _Runner(sweep, job, number, store, known, events, make_worker, handled, finished)
            found = runner.run()
            outcome.points.extend(found.points)
            outcome.requests.extend(found.requests)
    return outcome


Known = dict[Key, list[Point]]  # final records of each point, in their order


def key_of(point: Point) -> Key:
    """Return what a point measures."""
    return point.key if isinstance(point, RequestPoint) else point.case


def _recorded(known: Known, key: Key, number: int, timed: bool = True) -> Point | None:
    """Return the record of a point in round `number`, None if it is still to be measured; a failure, and a batch that
    is only tried, are recorded for all rounds."""
    records = known.get(key)
    if not records:
        return None
    measured = [record for record in records if record.usable]
    if timed and number < len(measured):
        return measured[number]
    return records[-1] if records[-1].status != "ok" or not timed else None


class _Runner:
    """One job in one round and its worker, which is started when the first unmeasured point needs it."""

    def __init__(
        self,
        sweep: Sweep,
        job: LoadJob,
        number: int,
        store: Store,
        known: Known,
        events: Events,
        make_worker: Callable[..., Any],
        signals: Signals,
        finished: Callable[[Key, float, bool], None],
    ) -> None:
        self._sweep, self._job, self._store, self._known, self._events = sweep, job, store, known, events
        self._number, self._make_worker, self._signals, self._finished = number, make_worker, signals, finished
        self._worker: Any = None
        self._crashes = 0

    def run(self) -> Outcome:
        """Measure the cases, then the loads of requests."""
        outcome = Outcome([], [])
        try:
            for case in self._job.cases:
                batches = batches_of(self._sweep, self._job.planner.at(case.workload))
                answer: Answer | None = None
                while (attempt := _advance(batches, answer)) is not None:
                    repeats = self._sweep.repeats if attempt.timed else 0
                    tried, began = case.with_batch(attempt.batch_size), monotonic()
                    self._events.trying(tried)
                    point, resumed = self._point(tried, repeats)
                    answer = Answer(point.status, point.output_tok_s)
                    outcome.points.append(point)
                    self._events.point(point, resumed)
                    self._finished(tried, monotonic() - began, resumed)
                    if self._hopeless(point):
                        return outcome
            for key, own in self._job.requests:
                began = monotonic()
                self._events.trying(key)
                served, resumed = self._request_point(key, own)
                outcome.requests.append(served)
                self._events.requests(served, resumed)
                self._finished(key, monotonic() - began, resumed)
                if self._hopeless(served):
                    break
        except SystemExit:  # a job of a cluster that has to go (`zinfer.job.cluster`): its time is short
            self._stop(kill=True)
            raise
        finally:
            self._stop()
        return outcome

    def _hopeless(self, point: Recorded) -> bool:
        """Tell whether nothing more of this load can be measured."""
        return point.stage == "load" or self._crashes > 1

    def _point(self, case: Case, repeats: int) -> tuple[Measurement, bool]:
        known = _recorded(self._known, case, self._number, timed=repeats > 0)
        if isinstance(known, Measurement):
            return known, True
        point = self._measure(
            lambda worker: worker.measure(case, repeats, self._sweep.tolerance),
            lambda fields: Measurement(case=case, **fields),
            lambda refused: refused.model_copy(update={"case": case}),
        )
        predicted = self._job.planner.at(case.workload)
        numbers: dict[str, float] = {"gpu_bytes": predicted.gpu.total, "host_bytes": predicted.host.total}
        prefill_s, step_s = predicted.expected()
        if step_s is not None and prefill_s is not None:
            numbers |= {"step_ms": step_s * 1e3, "ttft_ms": prefill_s * 1e3}
        return self._keep(point.model_copy(update={"predicted": numbers})), False

    def _request_point(self, key: RequestKey, own: RequestSet) -> tuple[RequestPoint, bool]:
        known = _recorded(self._known, key, self._number)
        if isinstance(known, RequestPoint):
            return known, True
        asked: dict[str, Any] = {"case": key.case, "requests": own.load, "sla": self._sweep.sla}

        def refused(point: Measurement) -> RequestPoint:
            return RequestPoint(**{name: getattr(point, name) for name in Recorded.model_fields} | asked)

        point = self._measure(
            lambda worker: worker.measure_requests(
                MeasureRequests(
                    case=key.case, load=own.load, rows=_rows(self._job.plan.model, own), sla=self._sweep.sla
                )
            ),
            lambda fields: RequestPoint(**asked, **fields),
            refused,
        )
        return self._keep(point), False

    def _keep(self, point: Any) -> Any:
        """Append a point to the store, and return it as it is there."""
        point = point.model_copy(update={"model_revision": self._job.revision})
        self._store.append(point)
        self._known.setdefault(key_of(point), []).append(point)
        return point

    def _measure(
        self, ask: Callable[[Any], P], failed: Callable[[dict[str, Any]], P], refusal: Callable[[Measurement], P]
    ) -> P:
        """Return the point that the worker measures, loaded first if need be; of a failure, one made of its facts, and
        of a refused load, one made of its point."""
        why_not = self._job.plan.why_not
        if why_not is not None:
            return failed(self._facts("unsupported", why_not, "load"))
        stage = "load"
        try:
            if self._worker is None:
                self._events.loading(self._job.plan)
                self._worker = self._make_worker(
                    self._job.target,
                    timeout_s=self._sweep.timeout_s,
                    notice=self._events.progress,
                    loaded=self._events.loaded,
                    revision=self._job.revision,
                )
                with self._signals.raised():
                    refused: Measurement | None = self._worker.load(self._job.plan)
                if refused is not None:
                    self._stop()
                    return refusal(refused)
            stage = "measure"
            with self._signals.raised():
                point = ask(self._worker)
            if point.status == "crashed":  # a CUDA context after an error cannot be used for the next point
                self._crashes += 1
                self._stop()
            return point
        except TaskFailed as failure:
            return failed(self._facts(failure.status, str(failure), stage))
        except WorkerDied as death:
            self._crashes += death.status != "oom_gpu"  # ranks end together where one is out of memory
            self._stop()
            return failed(self._facts(death.status, str(death), stage))
        except Interrupted as interrupt:
            self._stop(kill=True)
            self._keep(failed(self._facts("cancelled", interrupt.name, stage)))
            raise

    def _facts(self, status: Status, error: str, stage: str) -> dict[str, Any]:
        """Return the fields of a point that failed outside of the worker."""
        model = self._job.plan.model
        return {
            "status": status,
            "machine": self._job.plan.machine.name,
            "error": error,
            "stage": stage,
            "num_layers": model.num_layers,
            "total_layers": model.total_layers,
            "started_at": now(),
        }

    def _stop(self, kill: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if kill:
                worker.kill()
            worker.close()


def _advance(batches: Batches, answer: Answer | None) -> Try | None:
    try:
        return next(batches) if answer is None else batches.send(answer)
    except StopIteration:
        return None


def _rows(spec: ModelSpec, own: RequestSet) -> list[RequestRow]:
    """Return the requests of a load for the worker, with the token ids of their texts. Raises TaskFailed for a text
    that has none."""
    texts = [one.prompt for one in own.requests if one.prompt is not None]
    ids: Iterator[list[int] | Refusal] = iter(())
    if texts:
        try:
            with TokenizerProcess(spec) as tokenizer:
                ids = iter(tokenizer.encode(texts))
        except ModelError as error:
            raise TaskFailed("unsupported", str(error)) from None
    rows = []
    for one in own.requests:
        found = None if one.prompt is None else next(ids)
        if isinstance(found, Refusal):
            raise TaskFailed("unsupported", f"a request has no tokens: {found.message}")
        length = one.input_len if found is None else len(found)
        rows.append(RequestRow(input_len=length, output_len=one.output_len, prompt_ids=found, sampling=one.sampling))
    return rows


def exit_code(sweep: Sweep, points: Iterable[Point]) -> int:
    """Return the exit code of a sweep: 0 if every point is ok, 3 if some are not, 4 if none is. With ``auto``, a batch
    that memory or a TensorRT plan has no room for is how the largest batch is found, and counts as ok."""
    points = tuple(points)
    good = sum(point.status == "ok" for point in points)
    if not good:
        return 4
    fine = good + (sum(map(_edge, points)) if isinstance(sweep.batch_size, str) else 0)
    return 0 if fine == len(points) else 3


def _edge(point: Point) -> bool:
    """Return True if the load ran and the batch was too large for it."""
    if isinstance(point, RequestPoint):
        return False
    return point.status in OUT_OF_MEMORY or (point.status == "unsupported" and point.stage != "load")
