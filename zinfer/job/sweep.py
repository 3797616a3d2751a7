"""Sweep: loads in the outer loop, batch sizes in the inner one.

Every point is on disk before the next one starts. A process loads once and measures batch after batch, smallest first.
Out of memory is a result: it is recorded, and no larger batch of the same load is tried.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from time import monotonic
from typing import Any, NamedTuple, get_args

from zinfer.checkpoint.source import Source, find
from zinfer.core.case import Case
from zinfer.core.engine import is_server
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError, ModelSpec, check_positions
from zinfer.core.request import Request
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.driver import Driver
from zinfer.job.forecast import OUT_OF_MEMORY, Answer, Forecast, Key, Outlook, advance, batches_of
from zinfer.job.forecast import LoadJob as LoadJob
from zinfer.job.recipe import Sweep, SweepLoad
from zinfer.job.requests import RequestSet
from zinfer.job.shard import Shard
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.times import shipped
from zinfer.record.measurement import Measurement, Recorded, Status
from zinfer.record.requests import RequestKey, RequestPoint
from zinfer.record.store import Header, Store
from zinfer.worker.process import Client, TaskFailed, Worker, WorkerDied, WorkerError, now, versions
from zinfer.worker.tasks import MeasureRequests

# Statuses of recorded points that --resume does not measure again.
FINAL: frozenset[Status] = frozenset(get_args(Status)) - {"timeout", "crashed", "io_error", "cancelled"}
Point = Measurement | RequestPoint


class Outcome(NamedTuple):
    """Points of a sweep. `left` names what `Sweep.minutes` had no room for."""

    points: list[Point]
    left: tuple[str, ...] = ()


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
    """Plan the sweep's loads, or the given ones of them. `resolve` finds a load's model and weights; `locate` its
    engine, or None for an engine without that offload: such a combination is left out. `requests` come from
    `zinfer.job.requests.request_sets`. Raises ModelError if lengths exceed a model's positions, unless `positions` is
    False."""
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

        lengths_planned = [*sweep.lengths(), *(request_set.mean_lengths for request_set in requests)]
        longest_case = load.case(source.load_format, source.spec.dtype, *max(lengths_planned, key=sum))
        for chosen in _chosen(sweep, Planner(longest_case, source.spec, machine, nvme_path=nvme_path)):
            settings = {"gpu_weights": chosen.case.gpu_weights, "options": chosen.case.options}
            case = partial(load.model_copy(update=settings).case, source.load_format, source.spec.dtype)
            keys = tuple((RequestKey(case(1, 1), request_set.load), request_set) for request_set in requests)
            cases = tuple(case(*lengths) for lengths in sweep.lengths())
            jobs.append(LoadJob(chosen, cases, target, source.revision, keys))
    return jobs


def _chosen(sweep: Sweep, planner: Planner) -> Iterator[Planner]:
    """Yield the planners of a load: its own if it fits, and a faster one. The latter has a fixed share of layers that
    stay, which may leave what fits host memory. It is measured as well where neither shares nor batches were asked for,
    as a measurement decides."""
    case, fits = planner.case, planner.plan.fits
    if fits:
        yield planner
    if not fits or (case.gpu_weights == "auto" and sweep.gpu_weights == (None,) and isinstance(sweep.batch_size, str)):
        efficiency = shipped().get(case.engine)
        faster = Planner(case, planner.model, planner.machine, efficiency).searched(case.workload).case
        if not fits or faster != case:
            yield Planner(faster, planner.model, planner.machine, nvme_path=planner.nvme_path)


def recipe_of(sweep: Sweep) -> dict[str, Any]:
    """Return the settings of a sweep for its header."""
    return sweep.model_dump(mode="json", exclude={"description", "timeout_s", "minutes", "machine"})


def header_of(sweep: Sweep, machine: str, revisions: Iterable[tuple[str, str]], shard: Shard | None = None) -> Header:
    """Return the header of a start of `sweep` or of a shard. `revisions` are the models with their revisions."""
    used: dict[str, str] = {}
    for engine in dict.fromkeys(load.engine for load in sweep.loads()):
        used |= versions(engine)
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
) -> Outcome:
    """Measure the points that `done` does not hold; store each at once; return all. Raises Interrupted, StoreError."""
    runner = _Runner(sweep, jobs, done, store, events)
    with Signals() as handled:
        points = [*runner.measure(make_worker, handled)]
    return Outcome(points, tuple(dict.fromkeys(runner.left)))


def measure(sweep: Sweep, jobs: Iterable[LoadJob], store: Store, done: Iterable[Point] = ()) -> Iterator[Point]:
    """Yield the points that `run` returns as they are measured. Signals act as the caller has them."""
    yield from _Runner(sweep, jobs, done, store).measure(Worker)


def outlook(sweep: Sweep, jobs: Iterable[LoadJob], done: Iterable[Point] = ()) -> Outlook:
    """Return the points and seconds that `run` will have, whatever `Sweep.minutes`."""
    return _Runner(sweep, jobs, done).forecast.outlook()


def key_of(point: Point) -> Key:
    """Return what a point measures."""
    return point.key if isinstance(point, RequestPoint) else point.case


class _Runner:
    """Loads of a sweep in their turns. A worker is started when the first unmeasured point needs it."""

    def __init__(
        self,
        sweep: Sweep,
        jobs: Iterable[LoadJob],
        done: Iterable[Point],
        store: Store | None = None,
        events: Events | None = None,
    ) -> None:
        self.sweep, self.store, self.events, self.left = sweep, store, events or Events(), list[str]()
        self.turns = [*product(range(sweep.rounds), jobs)]  # numbers of rounds, and loads
        self.recorded: dict[Key, list[Point]] = {}  # final records of each point, in their order
        for point in done:
            if point.status in FINAL:
                self.recorded.setdefault(key_of(point), []).append(point)
        upcoming = [(job, {key for key in self.recorded if self._find(key, number)}) for number, job in self.turns]
        self.forecast = Forecast(sweep, upcoming)
        self.end = monotonic() + 60 * sweep.minutes if sweep.minutes else inf

    def _find(self, key: Key, number: int, timed: bool = True) -> Point | None:
        """Return a point's record of round `number`, or None. Failures and tries count for all rounds."""
        records = self.recorded.get(key, [])
        measured = [record for record in records if record.usable]
        if timed and number < len(measured):
            return measured[number]
        return records[-1] if records and (records[-1].status != "ok" or not timed) else None

    def measure(self, make_worker: Callable[..., Client], signals: Signals | None = None) -> Iterator[Point]:
        """Yield the points of all loads, each once it is on disk."""
        for index, (_, job) in enumerate(self.turns):
            worker = partial(
                make_worker, job.target, timeout_s=self.sweep.timeout_s, on_progress=self.events.progress,
                on_loaded=self.events.loaded, revision=job.revision,
            )  # fmt: skip
            with Driver(worker, self.events.loading, signals) as driver:
                yield from self._load(index, driver)

    def _load(self, index: int, driver: Driver) -> Iterator[Point]:
        """Measure load number `index`, cases before requests. All but its first point end in its share of time."""
        self.index, self.driver = index, driver
        self.number, self.job = self.turns[index]
        self.crashes = self.measured = 0  # measured: points that were not recorded before
        self.forecast.start(index)
        self._tell_outlook()
        self.share = monotonic() + (self.end - monotonic()) / (len(self.turns) - index)
        for case in self.job.cases:
            batches = batches_of(self.sweep, self.job.planner.at(case.workload))
            answer: Answer | None = None
            while (attempt := advance(batches, answer)) is not None:
                key = case.with_batch(attempt.batch_size)
                if self._late(key, attempt.timed):
                    several = len(self.job.cases) > 1
                    lengths = f" {case.workload.input_len}/{case.workload.output_len}" if several else ""
                    self.left.append(f"{case.label()}{lengths} from batch {attempt.batch_size}")
                    break
                yield (point := self._point(key, attempt.timed))
                answer = Answer(point.status, point.output_tok_s)
                if self._hopeless(point):
                    return
        for requests, request_set in self.job.requests:
            if self._late(requests):
                self.left.append(f"{requests.case.label()} {requests.requests.describe()}")
            else:
                yield (point := self._point(requests, request_set=request_set))
                if self._hopeless(point):
                    return

    def _tell_outlook(self) -> None:
        now = self.forecast.outlook()
        left_s = None if now.seconds_left is None else max(0.0, min(now.seconds_left, self.end - monotonic()))
        self.events.outlook(now._replace(seconds_left=left_s))

    def _late(self, key: Key, timed: bool = True) -> bool:
        if self.end == inf or self._find(key, self.number, timed) is not None:
            return False
        if not self.measured:
            return monotonic() >= self.end
        return monotonic() + self.forecast.seconds(self.index, key) > self.share

    def _hopeless(self, point: Recorded) -> bool:
        return point.stage == "load" or self.crashes > 1

    def _point(self, key: Key, timed: bool = True, request_set: RequestSet | None = None) -> Any:
        self.events.trying(key)
        began, recorded = monotonic(), self._find(key, self.number, timed)
        resumed = recorded is not None
        point: Any = recorded or self._store(key, self._measure(key, timed, request_set))
        self.measured += not resumed
        self.forecast.finish(self.index, key, monotonic() - began, resumed)
        self._tell_outlook()
        tell: Any = self.events.point if isinstance(key, Case) else self.events.requests
        tell(point, resumed)
        return point

    def _store(self, key: Key, point: Any) -> Any:
        fields: dict[str, Any] = {"model_revision": self.job.revision}
        if isinstance(key, Case) and not is_server(key.engine):
            plan = self.job.planner.at(key.workload)
            fields["predicted"] = {"gpu_bytes": plan.gpu.total, "host_bytes": plan.host.total}
            prefill_s, step_s = plan.expected()
            if step_s is not None and prefill_s is not None:
                fields["predicted"] |= {"step_ms": step_s * 1e3, "ttft_ms": prefill_s * 1e3}
        point = point.model_copy(update=fields)
        assert self.store is not None
        self.store.append(point)
        self.recorded.setdefault(key, []).append(point)
        return point

    def _measure(self, key: Any, timed: bool, request_set: RequestSet | None) -> Any:
        stage, sweep = "load", self.sweep
        if (why_not := self.job.plan.why_not) is not None:
            return self._failed(key, "unsupported", why_not, stage)
        try:
            self.driver.load(self.job.plan)
            stage = "measure"
            with self.driver.lend() as worker:
                if request_set is None:
                    point: Any = worker.measure(key, sweep.repeats if timed else 0, sweep.tolerance)
                else:
                    asked = _requests(self.job.plan.model, request_set)
                    point = worker.ask(MeasureRequests(case=key.case, load=key.requests, sla=sweep.sla, **asked))
            if point.status == "crashed":  # a CUDA context after an error cannot be used for the next point
                self.crashes += 1
                self.driver.end()
            return point
        except WorkerError as error:  # ranks end together where one is out of memory
            self.crashes += isinstance(error, WorkerDied) and error.status != "oom_gpu"
            return self._failed(key, error.status, str(error), stage)
        except Interrupted as interrupt:
            self.driver.end(kill=True)
            self._store(key, self._failed(key, "cancelled", interrupt.name, stage))
            raise

    def _failed(self, key: Key, status: Status, error: str, stage: str) -> Point:
        model = self.job.plan.model
        fields: dict[str, Any] = {
            "status": status, "machine": self.job.plan.machine.name, "error": error, "stage": stage,
            "num_layers": model.num_layers, "total_layers": model.total_layers, "started_at": now(),
            "versions": versions(self.job.plan.case.engine),
        }  # fmt: skip
        if isinstance(key, Case):
            return Measurement(**fields | {"case": key})
        return RequestPoint(**fields | {"case": key.case, "requests": key.requests, "sla": self.sweep.sla})


def _requests(spec: ModelSpec, request_set: RequestSet) -> dict[str, Any]:
    """Return the requests of a load, and the lengths of their prompts. Random prompts stay empty."""
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
    return {"requests": requests, "input_lens": input_lens}


def exit_code(sweep: Sweep, points: Iterable[Point]) -> int:
    """Return a sweep's exit code: 0 if all is ok, else 3 or 4. With ``auto``, a lack of room is ok, too."""
    points = tuple(points)
    good = sum(point.status == "ok" for point in points)
    if not good:
        return 4
    if isinstance(sweep.batch_size, str):
        too_large = (*OUT_OF_MEMORY, "unsupported")
        good += sum(isinstance(point, Measurement) and point.status in too_large for point in points)
    return 0 if good == len(points) else 3
