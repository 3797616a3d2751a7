"""Sweep: loads in the outer loop, batch sizes in the inner one.

Every point is on disk before the next one starts. With 352 GB of weights the load *is* the cost, so a process loads
once and measures batch after batch, smallest first. Out of memory is a result, not an accident: it is recorded, and no
larger batch of the same load is tried.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from zinfer.checkpoint.source import Source, find
from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError, ModelSpec, check_positions
from zinfer.core.request import Request
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.driver import Driver
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
from zinfer.worker.process import Client, LoadRefused, TaskFailed, Worker, WorkerDied, now, versions
from zinfer.worker.tasks import MeasureRequests

# Statuses of recorded points that --resume does not measure again.
FINAL: frozenset[Status] = frozenset(
    {"ok", "oom_gpu", "oom_host", "unsupported", "nan_output", "offload_not_effective"}
)
OUT_OF_MEMORY: frozenset[Status] = frozenset({"oom_gpu", "oom_host"})


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
SMALLEST_STEP = 1 / 32  # of the search for the best batch, as a share of the largest
Point = Measurement | RequestPoint
P = TypeVar("P", bound=Recorded)


class Outcome(NamedTuple):
    """Points of a sweep: of equal sequences, and of requests."""

    points: list[Measurement]
    requests: list[RequestPoint]

    @property
    def all(self) -> list[Point]:
        return [*self.points, *self.requests]


@dataclass(frozen=True)
class LoadJob:
    """Load that is ready to run. Its planner, its cases, and its engine."""

    planner: Planner
    cases: tuple[Case, ...]  # cases at batch 1, one for each pair of lengths
    target: str  # the engine's class, as module:Class
    revision: str = ""
    requests: tuple[tuple[RequestKey, RequestSet], ...] = ()  # loads of requests, measured after the cases

    @property
    def plan(self) -> Plan:
        """Plan of the longest case or load, with which the worker loads."""
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


def find_max_batch(limit: int, factor: int = 2, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the largest batch that runs, up to `limit`.

    `first`, or else the powers of `factor`, are timed until memory runs out. Untimed tries follow, which begin at
    `guess` and proceed in growing strides, and by bisection between what ran and what did not; the largest batch that
    runs is timed last. An answer is sent in for every batch yielded; any status but ``ok`` counts as not running.
    """
    good, bad = 0, limit + 1
    for batch in sorted(first) or (factor**power for power in count()):
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


def find_best_batch(limit: int, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the batch with maximal output tokens a second.

    The largest comes first, as in `find_max_batch`; it need not be the best. Then it searches around the best of those
    measured, in steps of an eighth of the largest batch, halved while both neighbours are slower.
    """
    rates: dict[int, float] = {}
    search = find_max_batch(limit, 2, first, guess)
    attempt = next(search)
    while True:
        answer = yield attempt
        if attempt.timed and answer.status == "ok" and answer.tok_s is not None:
            rates[attempt.batch_size] = answer.tok_s
        try:
            attempt = search.send(answer)
        except StopIteration:
            break
    largest = max(rates, default=0)
    step = largest // 8
    while step >= max(1, int(largest * SMALLEST_STEP)):
        best = max(rates, key=lambda batch: rates[batch])
        for batch in (best - step, best + step):
            if 0 < batch <= largest and batch not in rates:
                answer = yield Try(batch)
                rates[batch] = answer.tok_s or 0.0 if answer.status == "ok" else 0.0
        if max(rates, key=lambda batch: rates[batch]) == best:
            step //= 2


def listed(batches: Iterable[int]) -> Batches:
    """Yield batches in rising order until memory runs out."""
    for batch in sorted(batches):
        if (yield Try(batch)).status in OUT_OF_MEMORY:
            return


def batches_of(sweep: Sweep, plan: Plan) -> Batches:
    """Return the batches to try.

    The plan guesses the largest one; without a GPU it is also the limit, since running out of memory would take down
    the whole machine.
    """
    if not isinstance(sweep.batch_size, str):
        return listed(sweep.batch_size)
    limit = LARGEST_BATCH if plan.machine.gpu_count else max(1, plan.max_batch_size)
    factor, first = automatic(sweep.batch_size)
    guess = min(plan.max_batch_size, limit)
    return find_max_batch(limit, factor, first, guess) if factor else find_best_batch(limit, first, guess)


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
    """Plan the sweep's loads, or the given ones of them.

    `resolve` finds a load's model and weights; `locate` its engine, or None for an engine without that offload: such a
    combination is left out. `requests` come from `zinfer.job.requests.request_sets`.

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
        for longest in filter(None, (request_set.longest for request_set in requests)):
            subject = f"a request of {longest.input_len:,} tokens"
            check_positions(source.spec, longest.input_len, longest.output_len, subject)

        def case(lengths: tuple[int, int], load: SweepLoad = load, source: Source = source) -> Case:
            return load.case(source.load_format, source.spec.dtype, *lengths)

        cases = tuple(map(case, sweep.lengths()))
        planned = [*cases, *(case(request_set.mean_lengths) for request_set in requests)]
        longest_case = max(planned, key=lambda case: case.workload.total_len)
        planner = Planner(longest_case, source.spec, machine, nvme_path=nvme_path)
        keys = tuple((RequestKey(case((1, 1)), request_set.load), request_set) for request_set in requests)
        jobs.append(LoadJob(planner, cases, target, source.revision, keys))
    return jobs


def recipe_of(sweep: Sweep) -> dict[str, Any]:
    """Return the settings of a sweep for its header."""
    return sweep.model_dump(mode="json", exclude={"description", "timeout_s", "machine", "published"})


def header_of(sweep: Sweep, machine: str, revisions: Iterable[tuple[str, str]], shard: Shard | None = None) -> Header:
    """Return the header of a start of `sweep` or of a shard. `revisions` are the models with their revisions."""
    used: dict[str, str] = {}
    for name in sweep.engine:
        used |= versions(engine_recipe(name).engine)
    return Header(
        machine=machine,
        description=sweep.description,
        recipe=recipe_of(sweep),
        model_revision=",".join(sorted({f"{model}@{revision}" for model, revision in revisions})),
        versions=used,
        started_at=now(),
        shard=None if shard is None else str(shard),
    )


def source_of(sweep: Sweep, load: SweepLoad) -> Source:
    """Return the model and weights of a load. Raises ModelError and CheckpointError."""
    options: dict[str, Any] = {"weights": load.weights, "draft": load.draft_model}
    return find(load.model, load.dtype, load.layers, sweep.load_format, **options)


def run(
    sweep: Sweep,
    jobs: Iterable[LoadJob],
    store: Store,
    done: Iterable[Point] = (),
    events: Events | None = None,
    make_worker: Callable[..., Client] = Worker,
    signals: Signals | None = None,
) -> Outcome:
    """Measure the points that `done` does not hold, and return all.

    Each is appended to `store` at once. `signals` interrupt it, by default SIGINT and SIGTERM. Raises
    Interrupted on them, after the point under way is recorded as `cancelled`, and StoreError if a record cannot be
    written; no worker is left behind.
    """
    recorded: Known = {}
    for point in done:
        if point.status in FINAL:
            recorded.setdefault(key_of(point), []).append(point)
    events = events or Events()
    outcome = Outcome([], [])
    jobs = tuple(jobs)
    turns = [(number, job) for number in range(sweep.rounds) for job in jobs]
    upcoming = []
    for number, job in turns:
        keys = frozenset(key for key in recorded if _find(recorded, key, number))
        upcoming.append(UpcomingLoad(job.planner, job.cases, job.requests, keys))
    forecast = Forecast(sweep, upcoming)
    with signals or Signals() as handled:
        for index, (number, job) in enumerate(turns):
            forecast.start(index)
            events.outlook(forecast.outlook())

            def finished(key: Key, taken_s: float, resumed: bool, index: int = index) -> None:
                forecast.finish(index, key, taken_s, resumed)
                events.outlook(forecast.outlook())

            worker = partial(
                make_worker, job.target, timeout_s=sweep.timeout_s, on_progress=events.progress,
                on_loaded=events.loaded, revision=job.revision,
            )  # fmt: skip
            with Driver(worker, events.loading, handled) as driver:
                _Runner(sweep, job, number, store, recorded, events, driver, finished, outcome).run()
    return outcome


Known = dict[Key, list[Point]]  # final records of each point, in their order


def key_of(point: Point) -> Key:
    """Return what a point measures."""
    return point.key if isinstance(point, RequestPoint) else point.case


def _find(recorded: Known, key: Key, number: int, timed: bool = True) -> Point | None:
    """Return the record of a point in round `number`, or None.

    A failure, and a batch that is only tried, are recorded for all rounds.
    """
    records = recorded.get(key)
    if not records:
        return None
    measured = [record for record in records if record.usable]
    if timed and number < len(measured):
        return measured[number]
    return records[-1] if records[-1].status != "ok" or not timed else None


@dataclass
class _Runner:
    """One job in one round. Its worker is started when the first unmeasured point needs it."""

    sweep: Sweep
    job: LoadJob
    number: int  # of the round
    store: Store
    recorded: Known
    events: Events
    driver: Driver
    finished: Callable[[Key, float, bool], None]
    outcome: Outcome
    crashes: int = 0

    def run(self) -> None:
        """Measure cases, then loads of requests, while the load can run."""
        for case in self.job.cases:
            batches = batches_of(self.sweep, self.job.planner.at(case.workload))
            answer: Answer | None = None
            while (attempt := _advance(batches, answer)) is not None:
                point = self._case_point(case.with_batch(attempt.batch_size), attempt.timed)
                answer = Answer(point.status, point.output_tok_s)
                if self._hopeless(point):
                    return
        for key, request_set in self.job.requests:
            if self._hopeless(self._request_point(key, request_set)):
                return

    def _hopeless(self, point: Recorded) -> bool:
        return point.stage == "load" or self.crashes > 1

    def _case_point(self, case: Case, timed: bool) -> Measurement:
        repeats = self.sweep.repeats if timed else 0
        began, recorded = self._begin(case, timed)
        point = recorded or self._measure(
            case, lambda worker: worker.measure(case, repeats, self.sweep.tolerance),
            lambda fields: Measurement(**fields | {"case": case}),
        )  # fmt: skip
        self.outcome.points.append(point)
        self.events.point(point, recorded is not None)
        self.finished(case, monotonic() - began, recorded is not None)
        return point

    def _request_point(self, key: RequestKey, request_set: RequestSet) -> RequestPoint:
        asked: dict[str, Any] = {"case": key.case, "requests": request_set.load, "sla": self.sweep.sla}

        def measure(worker: Client) -> RequestPoint:
            requests, input_lens = _requests(self.job.plan.model, request_set)
            command = MeasureRequests(case=key.case, load=key.requests, input_lens=input_lens, sla=self.sweep.sla)
            return worker.measure_requests(command, requests)

        began, recorded = self._begin(key)
        point = recorded or self._measure(key, measure, lambda fields: RequestPoint(**fields | asked))
        self.outcome.requests.append(point)
        self.events.requests(point, recorded is not None)
        self.finished(key, monotonic() - began, recorded is not None)
        return point

    def _begin(self, key: Key, timed: bool = True) -> tuple[float, Any]:
        """Announce a point; return the time, and its record, if any."""
        self.events.trying(key)
        return monotonic(), _find(self.recorded, key, self.number, timed)

    def _predicted(self, case: Case) -> dict[str, float]:
        predicted = self.job.planner.at(case.workload)
        numbers: dict[str, float] = {"gpu_bytes": predicted.gpu.total, "host_bytes": predicted.host.total}
        prefill_s, step_s = predicted.expected()
        if step_s is not None and prefill_s is not None:
            numbers |= {"step_ms": step_s * 1e3, "ttft_ms": prefill_s * 1e3}
        return numbers

    def _store(self, key: Key, point: P) -> P:
        """Append a point to the store, and return it as stored."""
        fields: dict[str, Any] = {"model_revision": self.job.revision}
        if isinstance(key, Case):
            fields["predicted"] = self._predicted(key)
        point = point.model_copy(update=fields)
        self.store.append(point)  # type: ignore[arg-type]
        self.recorded.setdefault(key, []).append(point)  # type: ignore[arg-type]
        return point

    def _measure(self, key: Key, measure: Callable[[Client], P], make: Callable[[dict[str, Any]], P]) -> P:
        """Measure a point, or `make` that of a failure, and store it."""
        if (why_not := self.job.plan.why_not) is not None:
            return self._store(key, make(self._facts("unsupported", why_not, "load")))
        stage = "load"
        try:
            self.driver.load(self.job.plan)
            stage = "measure"
            with self.driver.lend() as worker:
                point = measure(worker)
            if point.status == "crashed":  # a CUDA context after an error cannot be used for the next point
                self.crashes += 1
                self.driver.end()
        except LoadRefused as refused:
            point = make({name: getattr(refused.point, name) for name in Recorded.model_fields})
        except TaskFailed as failure:
            point = make(self._facts(failure.status, str(failure), stage))
        except WorkerDied as death:
            self.crashes += death.status != "oom_gpu"  # ranks end together where one is out of memory
            point = make(self._facts(death.status, str(death), stage))
        except Interrupted as interrupt:
            self.driver.end(kill=True)
            self._store(key, make(self._facts("cancelled", interrupt.name, stage)))
            raise
        return self._store(key, point)

    def _facts(self, status: Status, error: str, stage: str) -> dict[str, Any]:
        """Return the fields of a point that failed outside of the worker."""
        model = self.job.plan.model
        return {
            "status": status,
            "machine": self.job.plan.machine.name,
            "error": error,
            "stage": stage,
            "num_layers": model.num_layers,
            "total_layers": model.total_layers,
            "started_at": now(),
        }


def _advance(batches: Batches, answer: Answer | None) -> Try | None:
    try:
        return next(batches) if answer is None else batches.send(answer)
    except StopIteration:
        return None


def _requests(spec: ModelSpec, request_set: RequestSet) -> tuple[list[Request], list[int]]:
    """Return the requests of a load, and the lengths of their prompts.

    Texts become token ids; random prompts stay empty. Raises TaskFailed for a text that has none.
    """
    texts = [request.prompt for request in request_set.requests if request.prompt is not None]
    ids: Iterator[list[int] | Refusal] = iter(())
    if texts:
        try:
            with TokenizerProcess(spec) as tokenizer:
                ids = iter(tokenizer.encode(texts))
        except ModelError as error:
            raise TaskFailed("unsupported", str(error)) from None
    requests, input_lens = [], []
    for key, request in enumerate(request_set.requests):
        prompt = [] if request.prompt is None else next(ids)
        if isinstance(prompt, Refusal):
            raise TaskFailed("unsupported", f"a request has no tokens: {prompt.message}")
        requests.append(Request(prompt, request.output_len, request.sampling, ignore_eos=True, key=key))
        input_lens.append(len(prompt) or request.input_len)
    return requests, input_lens


def exit_code(sweep: Sweep, points: Iterable[Point]) -> int:
    """Return the exit code of a sweep. 0 if every point is ok, 3 if some are not, 4 if none is.

    With ``auto``, a batch that memory or a TensorRT plan has no room for is how the largest batch is found, and counts
    as ok.
    """
    points = tuple(points)
    good = sum(point.status == "ok" for point in points)
    if not good:
        return 4
    fine = good + (sum(map(_too_large, points)) if isinstance(sweep.batch_size, str) else 0)
    return 0 if fine == len(points) else 3


def _too_large(point: Point) -> bool:
    if isinstance(point, RequestPoint):
        return False
    return point.status in OUT_OF_MEMORY or (point.status == "unsupported" and point.stage != "load")
