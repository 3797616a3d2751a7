"""Clock of a load of requests: it lets them arrive, runs passes, and notes when each request gets its tokens.

Requests run on `zinfer.generation.scheduler.ContinuousScheduler`, as in `zinfer batch`. End tokens are ignored, so that
lengths are exact.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

from zinfer.core.case import Workload
from zinfer.core.errors import NotFiniteError
from zinfer.core.model import check_positions
from zinfer.core.progress import Progress
from zinfer.core.request import Request
from zinfer.core.requests import RequestLoad
from zinfer.engine import EngineError
from zinfer.engine.base import Engine
from zinfer.engine.server.completions import Completion
from zinfer.engine.server.engine import Server
from zinfer.generation.schedule import largest_load
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.tokenizer import Tokenizer
from zinfer.record.measurement import Status
from zinfer.record.requests import PassCounts, RequestPoint, RequestSample
from zinfer.worker.measure import Telemetry, ask, draw, synchronize
from zinfer.worker.session import Session, recorded
from zinfer.worker.tasks import MeasureRequests

WARM_UP_ROWS, WARM_UP_TOKENS = 8, 3
NAP_S = 0.5  # longest sleep between two messages of progress
SERVER_ROWS = 256  # requests at a time that a server is started for, where the load does not bound them


class _NoText:
    ends: frozenset[int] = frozenset()
    padding = 0

    def decode(self, _token_ids: Sequence[int], _before: Sequence[int] = ()) -> str:
        return ""


@dataclass
class LoadSamples:
    """Samples of a load of requests; those taken before an exception stay. Times are seconds from the start; `arrived`,
    and `runs` of a `RequestSample`, go by the number of the request."""

    stage: str = "warm-up"
    status: Status = "ok"
    pass_s: list[float] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)
    runs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    busy_s: float = 0.0
    waiting_s: float = 0.0
    waiting_tokens: int = 0
    positions: int = 0
    counts: PassCounts = field(default_factory=PassCounts)
    gpu: dict[str, Any] = field(default_factory=dict)

    def tokens(self, key: int, count: int) -> None:
        """Note that the last pass gave a request `count` tokens."""
        number, runs = len(self.pass_s) - 1, self.runs.setdefault(key, [])
        if count > 1:
            runs.append((number, -count))
        elif runs and runs[-1][1] > 0 and sum(runs[-1]) == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))

    def received(self, times: Mapping[int, Sequence[float]], began: float) -> None:
        """Note when requests got their tokens from a server. Moments take the place of passes."""
        moments: dict[float, Counter[int]] = {}
        for key, arrivals in times.items():
            for moment in arrivals:
                moments.setdefault(round(moment - began, 4), Counter())[key] += 1
        for moment in sorted(moments):
            self.pass_s.append(moment)
            for key, count in moments[moment].items():
                self.tokens(key, count)
        self.busy_s = self.pass_s[-1] if self.pass_s else 0.0

    def fields(self, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the fields of a `RequestPoint`. Requests that did not arrive are left out."""
        samples = list[RequestSample]()
        for key, (input_len, output_len) in enumerate(lengths):
            if key in self.arrived:
                times: dict[str, Any] = {"arrived_ms": self.arrived[key] * 1e3, "runs": tuple(self.runs.get(key, ()))}
                samples.append(RequestSample(input_len=input_len, output_len=output_len, **times))
        waiting = {"waiting_ms": self.waiting_s * 1e3, "waiting_tokens": self.waiting_tokens}
        passes = {"pass_ms": [seconds * 1e3 for seconds in self.pass_s], "busy_ms": self.busy_s * 1e3}
        return {"samples": samples, **passes, **waiting, "counts": self.counts, "kv_positions": self.positions}


def measure_requests(session: Session, command: MeasureRequests) -> RequestPoint:
    """Measure a load of requests on the loaded engine. An exception becomes the point's status."""
    requests, model, samples = command.requests, session.plan.model, LoadSamples()
    lengths = [(length, request.left) for length, request in zip(command.input_lens, requests, strict=True)]

    def run() -> None:
        if session.scheduler is not None:
            session.scheduler.end()
            session.scheduler = None
        input_len, output_len = max(lengths, key=sum)
        check_positions(model, input_len, output_len, f"a request of {input_len} tokens")
        empty = {number: request for number, request in enumerate(requests) if not request.prompt_ids}
        drawn = draw([command.input_lens[number] for number in empty], model.vocab_size, command.load.seed)
        for request, prompt in zip(empty.values(), drawn, strict=True):
            request.prompt_ids = prompt
        clock: Callable[..., None] = run_server_load if isinstance(session.engine, Server) else run_load
        longest_first = sorted(requests, key=lambda request: -request.left)
        ordered = longest_first if command.load.order == "longest-first" else requests
        clock(session.engine, ordered, command.load, samples, session.on_progress)

    fields = recorded(session, command.case, samples, run) | samples.fields(lengths)
    return RequestPoint(case=command.case, requests=command.load, sla=command.sla, **fields)


def run_load(
    engine: Engine, requests: Sequence[Request], load: RequestLoad, samples: LoadSamples, on_progress: Progress
) -> None:
    """Run requests to their ends, and fill `samples`. In a closed loop a request arrives when the one before it ends,
    or, with ``auto``, when the pass begins in which there is room for it; in an open loop at its own time. Raises the
    errors of `ContinuousScheduler.step`, and NotFiniteError."""
    max_rows = load.in_flight if isinstance(load.in_flight, int) else None
    largest = largest_load(engine.planner, [request.need for request in requests], max_rows)

    def scheduler() -> ContinuousScheduler:
        tokenizer = cast(Tokenizer, _NoText())
        return ContinuousScheduler(engine, tokenizer, largest, max_rows, arrivals=load.in_flight != "auto")

    with Telemetry(engine, samples) as telemetry:
        on_progress("warm-up", 0.0)
        running = scheduler()  # kernels are compiled, and memory is taken
        running.add(replace(row, left=min(row.left, WARM_UP_TOKENS)) for row in requests[:WARM_UP_ROWS])
        try:
            while running.running:
                running.step()
            running.release()
        finally:
            running.end()
        synchronize(engine.device)
        samples.stage = "requests"
        telemetry.start()
        _run_timed(scheduler(), requests, load, samples, on_progress)


def _run_timed(
    running: ContinuousScheduler,
    requests: Sequence[Request],
    load: RequestLoad,
    samples: LoadSamples,
    on_progress: Progress,
) -> None:
    schedule, in_flight = running.schedule, load.in_flight
    samples.positions = schedule.limits.positions
    coming, tokens, done = deque(zip(load.arrivals(), requests, strict=True)), sum(row.left for row in requests), 0
    began = time.monotonic()
    try:
        while coming or running.running:
            start = time.monotonic() - began
            while coming:
                moment, request = coming[0]
                full = isinstance(in_flight, int) and len(running.sequences) >= in_flight
                if full or (in_flight is None and moment > start):
                    break
                coming.popleft()
                running.add([request])
                if in_flight != "auto":  # those arrive where they begin
                    samples.arrived[request.key] = moment if in_flight is None else start
            if not running.running:
                time.sleep(min(NAP_S, max(0.0, coming[0][0] - start)))
                on_progress("requests", done / tokens)
                continue
            computed = schedule.tally.computed
            touched = running.step()
            synchronize(running.engine.device)
            end = time.monotonic() - began
            if in_flight == "auto":
                for row in schedule.begun:
                    if row.key not in schedule.waiting:
                        samples.arrived.setdefault(row.key, start)
            samples.busy_s += end - start
            if schedule.tally.computed > computed:
                samples.pass_s.append(end)
            if any(request.failure is not None for request in touched):
                raise NotFiniteError
            for request in touched:
                samples.tokens(request.key, running.gained[request.key])
            gained = sum(running.gained[request.key] for request in touched)
            done += gained
            if schedule.waiting or (coming and in_flight is not None):
                samples.waiting_s += end - start
                samples.waiting_tokens += gained
            on_progress("requests", done / tokens)
        running.release()
    finally:
        counted = vars(schedule.tally) | {"checked": running.drafts.checked}
        counts = {name: counted[name] for name in PassCounts.model_fields.keys() & counted.keys()}
        samples.counts = PassCounts(**counts, drafting_ms=running.drafts.seconds * 1e3)
        running.end()


def run_server_load(
    server: Server, requests: Sequence[Request], load: RequestLoad, samples: LoadSamples, on_progress: Progress
) -> None:
    """Run requests on a server to their ends, and fill `samples`.

    A pass is a moment at which some request got a token. Raises EngineError for a number in flight that is ``auto``.
    """
    if load.in_flight == "auto":
        raise EngineError("in_flight auto is for zinfer's engines: a server decides by itself, so give a number")
    rows = load.in_flight if load.in_flight is not None else min(SERVER_ROWS, len(requests))
    longest = max(requests, key=lambda request: request.length + request.left)
    server.prepare(Workload(batch_size=rows, input_len=longest.length, output_len=longest.left))
    arrivals = load.arrivals()
    with Telemetry(server, samples) as telemetry:
        on_progress("warm-up", 0.0)
        ask(server, requests[0].prompt_ids, min(WARM_UP_TOKENS, requests[0].left))
        samples.stage = "requests"
        telemetry.start()
        began = time.monotonic()

        def run(moment: float, request: Request) -> Completion:
            if load.in_flight is None:
                time.sleep(max(0.0, began + moment - time.monotonic()))
            return ask(server, request.prompt_ids, request.left)

        # With a rate each request has a thread, which waits for its time.
        pool = ThreadPoolExecutor(rows if load.in_flight is not None else len(requests))
        try:
            jobs = [pool.submit(run, *pair) for pair in zip(arrivals, requests, strict=True)]
            for done, (job, moment, request) in enumerate(zip(jobs, arrivals, requests, strict=True)):
                on_progress("requests", done / len(jobs))
                answer = job.result()
                samples.arrived[request.key] = moment if load.in_flight is None else answer.asked - began
        finally:
            pool.shutdown(cancel_futures=True)
    samples.received({request.key: job.result().tokens for job, request in zip(jobs, requests, strict=True)}, began)
