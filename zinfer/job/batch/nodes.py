"""Batch job on the nodes of a Ray cluster: Ray Data hands requests to actors, one a node, each of which holds the
weights and runs many rows together, as the server does.

This process alone writes answers, each as it comes. When an actor is lost, the requests that it had are answered in
another pass over those that have no answer, by the nodes that are there then; Ray starts the actor again meanwhile, and
it takes part again. A request is answered once, for its answer is written once.
"""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zinfer.checkpoint.source import find
from zinfer.checkpoint.tokenizer_files import ChatTemplate
from zinfer.core.case import Case, LoadFormat, Workload
from zinfer.core.errors import ENVIRONMENT, ZinferError, one_line
from zinfer.core.machine import Machine
from zinfer.core.model import Dtype, ModelError, Weights
from zinfer.core.units import counted
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.batch.ledger import Ledger
from zinfer.job.batch.openai import BatchRequest, Fault, answer, encode, failure, refusal
from zinfer.job.batch.packing import typical_plan
from zinfer.job.batch.run import JobFailed
from zinfer.job.openai import Asked
from zinfer.job.serve.dispatcher import Dispatcher, Row, RowNews, Unavailable
from zinfer.job.signals import Signals
from zinfer.plan.plan import Plan
from zinfer.worker.process import Client
from zinfer.worker.tasks import BatchStepped

MOST_CALLS = 1000  # requests in an actor at a time: a thread each
CONNECT_S = 10.0  # within which a cluster answers
RETRY_S = 1.0  # until a request is given again to a worker that is being loaded
SHUTTING_DOWN = 503  # status of rows that a dispatcher gave up because it has no worker


class NodesError(ZinferError):
    """A cluster that cannot be reached or has nothing to run on, or a node that cannot load the model."""

    exit_code = ENVIRONMENT


@dataclass(frozen=True)
class NodeJob:
    """Settings of a job as its actors need them. Paths are relative to `folder`, which nodes should share. Without a
    `template` messages are formatted by the model's own."""

    model: str
    dtype: Dtype
    layers: int | None
    load_format: LoadFormat
    weights: Weights
    revision: str
    cases: tuple[Case, ...]
    target: str
    machine: Callable[[], Machine]
    make_worker: Callable[..., Client]
    nvme_path: str | None
    batch_size: int | None
    output_len: int
    timeout_s: float
    folder: Path
    created: int
    template: ChatTemplate | None = None

    def load(self) -> tuple[Plan, Workload]:
        """Return the plan of the model on this node, and its largest load. Raises NodesError where it does not fit,
        or if the node has other weights."""
        if self.folder.is_dir():
            os.chdir(self.folder)
        source = find(self.model, self.dtype, self.layers, self.load_format, fetch=True, weights=self.weights)
        if source.revision != self.revision:
            raise NodesError(f"{self.model} is {source.revision} on a node, {self.revision} where the job was started")
        plan, load = typical_plan(
            self.cases, source.spec, self.machine(), self.nvme_path, self.batch_size, MOST_CALLS
        )  # fmt: skip
        if load is None:
            raise NodesError(str(plan.why_not))
        return plan, load


class RowActor:
    """Actor of a node: a worker with the weights, and a call in a thread of its own for each request."""

    def __init__(self, job: NodeJob) -> None:
        """Load the weights. Raises NodesError."""
        plan, load = job.load()
        tokenizer = TokenizerProcess(plan.model, job.template)
        try:
            _ = tokenizer.facts  # before the weights, which take minutes
        except ModelError as error:
            raise NodesError(str(error)) from None
        self._job, self._model = job, plan.case.model
        self._answers: dict[Row, Future[RowNews]] = {}
        self._ready, self._over = threading.Event(), threading.Event()

        def make_worker() -> Client:
            return job.make_worker(job.target, timeout_s=job.timeout_s, revision=job.revision)

        self._dispatcher = Dispatcher(
            plan, make_worker, load, _Unmetered(), self._post, tokenizer, at_most=job.batch_size,
            most_waiting=2 * MOST_CALLS, output_len=job.output_len, say=print, ready=self._ready.set, ended=self._end,
        )  # fmt: skip
        self._dispatcher.start()
        while not self._ready.wait(0.05):
            if self._over.is_set():
                raise NodesError(f"no worker can be had: {self._dispatcher.fault}")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the requests of a block, in lines of JSON."""
        return {"answer": [self._answer(request_of(line)) for line in batch["request"]]}

    def _answer(self, request: BatchRequest) -> bytes:
        asked = Asked(
            request.chat, (request.prompt,), request.output_len, request.temperature, request.top_p, request.stop,
            request.seed,
        )  # fmt: skip
        row = Row(request.prompt, asked, request.seed)
        coming = self._answers[row] = Future()
        while True:
            try:
                self._dispatcher.submit([row])
                break
            except Unavailable as refused:
                if not refused.retry:
                    raise
                time.sleep(RETRY_S)
        news = coming.result()
        if news.failure is None:
            assert news.finish_reason is not None
            tokens, created = (news.prompt_tokens, news.tokens), self._job.created
            return encode(answer(request, news.text, news.finish_reason, tokens, self._model, created))
        status, code, message, param = news.failure
        if status == SHUTTING_DOWN:
            raise NodesError(message)
        if status == 400:
            return encode(refusal(Fault(request.id, request.custom_id, code, message, param)))
        return encode(failure(request, code, message))

    def _post(self, news: list[tuple[Row, RowNews]]) -> None:
        for row, one in news:
            self._answers.pop(row).set_result(one)

    def _end(self) -> None:
        """End this process once the worker that it had cannot be replaced: Ray starts another one."""
        self._over.set()
        if self._ready.is_set():
            os._exit(1)


class _Unmetered:
    """Meter that keeps nothing."""

    def first_token(self, seconds: float) -> None: ...
    def ended(self, row: Row, seconds: float, since_first: float) -> None: ...
    def stepped(self, answer: BatchStepped) -> None: ...
    def restarted(self) -> None: ...


def line_of(request: BatchRequest) -> bytes:
    """Return a request as a line of JSON, which `request_of` reads."""
    return json.dumps(request._asdict()).encode()


def request_of(line: bytes) -> BatchRequest:
    fields = json.loads(line)
    return BatchRequest(**fields | {"stop": tuple(fields["stop"])})


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray puts its own in place, which exits with code 15 and says nothing."""
    before, told = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        told = True
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)
    if told:
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def connected(address: str, debug: bool = False) -> Iterator[Any]:
    """Connect to the Ray cluster at `address` (``auto``, ``host:port``, or ``local`` for one of this machine alone) and
    yield the module. Raises NodesError."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise NodesError("--ray needs Ray Data: pip install 'zinfer[ray]'") from None
    try:
        if found := re.fullmatch(r"\[?([^/]+?)\]?:([0-9]{1,5})", address):  # Ray itself would try for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_S).close()
        with _own_sigterm():
            ray.init(address=address, log_to_driver=debug, logging_level="INFO" if debug else "ERROR")
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise NodesError(f"no Ray cluster at {address}: {one_line(error)[:300]}") from None
    if not debug:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield ray
    finally:
        ray.shutdown()


def shares(nodes: Sequence[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the number of actors, and the resources of each: all GPUs of a node, those of the smallest one; without
    any GPU, all CPUs. Raises NodesError if there is nothing to run on."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for kind in ("GPU", "CPU"):
        able = [resources[kind] for resources in alive if resources.get(kind, 0) >= 1]
        if able:
            own = {f"num_{kind.lower()}s": min(able)}
            return len(able), {"num_cpus": 1} | own
    raise NodesError("the Ray cluster has no node with a GPU or a CPU to spare")


def answer_on_nodes(
    job: NodeJob,
    requests: Sequence[BatchRequest],
    ledger: Ledger,
    address: str,
    debug: bool = False,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
    say: Callable[[str], None] = lambda _text: None,
) -> None:
    """Answer requests on the nodes of a Ray cluster; each answer is on disk as it comes.

    Raises Interrupted on SIGINT and SIGTERM, NodesError if the cluster or the model on a node cannot be had, JobFailed
    if a pass answers nothing, StoreError if an answer cannot be written.
    """
    with connected(address, debug) as ray, Signals() as signals:
        waiting = sorted(requests, key=lambda request: -(request.output_len or job.output_len))
        total, done = len(waiting), 0
        while waiting:
            before = done
            for record in _pass(ray, job, waiting, signals, say):
                if record["id"] not in ledger.done:
                    ledger.add([record])
                    done += 1
                progress(f"{done:,} of {total:,} rows", done / total)
            waiting = [request for request in waiting if request.id not in ledger.done]
            if waiting and done == before:
                raise JobFailed(
                    f"{len(waiting):,} requests have no answer, and no node answers; the same command goes on"
                )
            if waiting:
                say(f"a node was lost: {len(waiting):,} of its requests are answered again")


def _pass(
    ray: Any, job: NodeJob, requests: Sequence[BatchRequest], signals: Signals, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield the answers to `requests` as they come; those of lost actors are missing."""
    count, own = shares(ray.nodes())
    spread = {"scheduling_strategy": "SPREAD"} | own
    with signals.raised():
        try:
            calls = ray.get(ray.remote(**spread)(_calls).remote(job))
        except ray.exceptions.RayError as error:
            raise NodesError(_cause(error)) from None
    calls = min(calls, -(-len(requests) // count))  # a few requests are shared out evenly, too
    each = " and ".join(f"{value:g} {key.removeprefix('num_').upper()[:3]}" for key, value in own.items())
    say(f"{counted(count, 'node')} of Ray, {each} each: up to {calls:,} rows on one")
    context = ray.data.DataContext.get_current()
    context.max_errored_blocks = -1  # of lost actors, for the next pass
    context.enable_progress_bars = False
    blocks = ray.data.from_items([{"request": line_of(one)} for one in requests], override_num_blocks=len(requests))
    answers = blocks.map_batches(
        RowActor,
        fn_constructor_args=(job,),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(
            size=count, max_tasks_in_flight_per_actor=calls, enable_true_multi_threading=True
        ),
        max_concurrency=calls,
        max_restarts=-1,
        max_task_retries=0,
        **spread,
    )
    coming = iter(answers.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0))
    while True:
        with signals.raised():
            try:
                batch = next(coming, None)
            except ray.exceptions.RayError as error:
                raise NodesError(_cause(error)) from None
        if batch is None:
            return
        for line in batch["answer"]:
            yield json.loads(line)


def _calls(job: NodeJob) -> int:
    """Return how many requests an actor is given at a time: as many as run, and some that wait."""
    _, load = job.load()
    return min(MOST_CALLS, load.batch_size + max(2, load.batch_size // 4))


def _cause(error: Exception) -> str:
    """Return one line about an error of a node: its cause, if Ray knows it."""
    with suppress(Exception):
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            return one_line(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1].rpartition(f"{NodesError.__name__}: ")[2] if lines else type(error).__name__
    return f"a node failed: {reason[:300]}"
