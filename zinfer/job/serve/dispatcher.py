"""Dispatcher: the thread that feeds the server's worker.

Rows are given to the worker's queue as they come; the thread alone talks to the worker. Prompts that are texts are read
in other threads (`zinfer.job.serve.reading`). A worker that dies is started again: rows of which no text was handed out
go on with the tokens that they have, fewer of them at a time, so that a row that is to blame ends alone.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from zinfer.core.case import Workload
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.request import EchoedPrompt, Failure, Request, TokenScore, Update
from zinfer.generation.queue import Queue
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.driver import Driver, Window
from zinfer.job.openai import Asked, Prompt, Refused, answer_limit
from zinfer.job.serve.reading import UNREAD, Ids, Reader
from zinfer.job.structure import PLAIN, Form, Parser
from zinfer.plan.planner import Plan
from zinfer.worker.process import Client, LoadFailed, WorkerError
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped

TURN_S = 0.05  # seconds between two answers of the worker, or one pass, while no text is streamed
SHARES = 16  # a request fills at most this part of the places in the queue, however many of its rows wait
RELOADS, RELOAD_S = 3, 4.0  # attempts to load a worker again, and seconds between them
LOOK_S = 1.0  # seconds between two looks at a load that goes on, while nothing is asked
RETRY_S = 5  # seconds after which a request that met a full queue, or a loading model, may come again
PATIENCE_S = 1.0  # seconds that the end of a pass is waited for when the server stops at once

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # streamed weights take their time

State = Literal["loading", "ready", "draining", "ended"]


class Settings(NamedTuple):
    """Settings of a server: the model's name in answers and other names of it, its key, and its limits. `output_len` is
    the limit of an answer to a request that names none; `drain_s` are the seconds that running requests have at the
    end; KV caches of earlier requests may take `cache_size` bytes of host memory."""

    model: str
    key: str | None = None
    rows: int | None = None
    max_waiting: int = 1024
    max_bytes: int = 16 << 20
    output_len: int = 256
    drain_s: float = 30.0
    cache_size: int = 0
    aliases: tuple[str, ...] = ()
    form: Form = PLAIN  # of answers to chats


class Metrics:
    """Counts and times of one server; the gauges are read from functions."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float], kept: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Count:
            return Count(f"zinfer_{name}", help_text, labels, registry=self.registry)

        def seconds(name: str, help_text: str) -> Histogram:
            return Histogram(f"zinfer_{name}_seconds", help_text, buckets=SECONDS, registry=self.registry)

        self.requests = counter("requests", "HTTP requests.", "path", "status")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts of ended rows.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens whose KV cache was reused.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._steps = {  # by field of `BatchStepped`
            "passes": counter("passes", "Passes of the model's weights."),
            "seconds": counter("pass_seconds", "Seconds of all passes."),
            "read": counter("kv_positions_read", "Positions of KV cache read."),
            "padded": counter("kv_positions_padded", "Positions of KV cache read that were padding."),
            "drafted": counter("drafts_verified", "Drafted tokens verified."),
            "accepted": counter("drafts_right", "Drafted tokens that were right."),
        }
        self.restarts = counter("worker_restarts", "Workers started in place of one that died.")
        self.ttft = seconds("ttft", "Time to first token.")
        self._tpot = seconds("tpot", "Time per output token after the first.")
        self._e2e = seconds("e2e", "Time to the end of a row.")
        for name, help_text, read in (
            ("kv_cache_kept_bytes", "Host memory of kept KV caches.", kept),
            ("rows_running", "Rows that run.", running),
            ("rows_waiting", "Rows without a token.", waiting),
        ):
            Gauge(f"zinfer_{name}", help_text, registry=self.registry).set_function(read)

    def ended(self, request: Request, cached: int, seconds: float, since_first: float) -> None:
        """Observe the time of an ended row, and since its first token."""
        self._e2e.observe(seconds)
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._cached_tokens.inc(cached)
        if (tokens := len(request.output_ids)) > 1:
            self._tpot.observe(since_first / (tokens - 1))

    def stepped(self, answer: BatchStepped) -> None:
        """Count the passes of an answer of the worker."""
        self._tokens.inc(sum(len(row.tokens) for row in answer.rows))
        for name, metric in self._steps.items():
            metric.inc(getattr(answer, name))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)


def queue_full() -> Refused:
    """Return the refusal of a request for which there is no room."""
    return Refused("queue_full", "too many requests wait: come again later", status=429, retry_s=RETRY_S)


@dataclass(eq=False, kw_only=True)
class Answer(Request):
    """One answer to a request of HTTP: the worker's request, its prompt, and what the event loop has not sent yet.
    Fields up to `began` belong to the dispatcher from `Dispatcher.submit` on, those from `text` on to the event
    loop."""

    prompt: Prompt
    asked: Asked
    client: str = ""  # who sent it; prompts of clients are read in turn
    changed: asyncio.Event  # of its request: set where the event loop has something to send
    cached: int = 0  # tokens of the prompt whose KV cache was reused
    tries: int = 0  # failures of the worker with it
    streamed: bool = False  # True once some of its text was handed out
    came: float = 0.0  # time of arrival
    began: float = 0.0  # time of its first token

    text: str = ""
    parser: Parser | None = None  # of a streamed chat
    scores: list[TokenScore] = field(default_factory=list)
    echoed: EchoedPrompt | None = None
    tokens: int = 0
    finish_reason: str | None = None
    failure: Failure | None = None
    offset: int = 0  # characters of tokens with log-probabilities that were sent
    begun: bool = False  # True once something of it was sent
    sent: bool = False  # True once its end was sent

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def take(self, update: Update) -> None:
        """Take an update: of a stream the new text, else the whole at the end."""
        self.text += update.delta if self.stream else update.text
        self.scores += update.scores
        self.echoed = update.prompt or self.echoed
        self.tokens += len(update.tokens)
        self.finish_reason, self.failure = update.finish_reason, update.failure


Post = Callable[[list[tuple[Answer, Update]]], None]


@dataclass(eq=False)
class Dispatcher:
    """Queue of rows, and the thread that has a worker answer them. `load` is the largest load to reckon with.
    `tokenizer`, which is closed at the end, reads prompts. The server sets `post`, which receives the updates of rows,
    and `on_end`; both are called from the thread."""

    plan: Plan
    make_worker: Callable[[], Client]
    load: Workload
    settings: Settings
    tokenizer: TokenizerProcess
    on_message: Callable[[str], None] = lambda _text: None
    on_loading: Callable[[], None] = lambda: None
    on_ready: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None
    post: Post = lambda _updates: None

    def __post_init__(self) -> None:
        self.state: State = "loading"
        self.fault: str | None = None  # reason why it has ended by itself
        self.exit_code = ENVIRONMENT  # of a command that ends for it
        self.cannot_reuse: str | None = None if self.settings.cache_size else "KV caches have no memory of the host"
        self._changed = threading.Condition()  # guards the next five
        self._inbox: list[tuple[Answer, Ids]] = []  # rows whose prompts were read
        self._dropped: set[int] = set()
        self._unfinished: dict[int, Answer] = {}  # by key
        self._next_key = 0
        self._stopping = False
        self._waiting = Queue[Answer](fair=True)  # not in the worker
        self._sent: dict[int, Answer] = {}  # in the worker, by key
        self._window = Window()
        self._driver = Driver(self.make_worker, lambda _plan: self.on_loading())
        self._reader = Reader(self.tokenizer, self._read, lambda rows: any(row.key in self._unfinished for row in rows))
        self._positions, self._loading = 0, False  # the latter while the worker's weights are still being loaded
        self.kept_bytes = 0  # host memory of kept KV caches
        self.running = 0  # rows that run in the worker
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self.metrics = Metrics(lambda: self.running, lambda: self.waiting, lambda: self.kept_bytes)

    # Called by the server

    def start(self) -> None:
        """Start the thread, which loads the worker."""
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Number of rows that have neither an answer nor a failure."""
        return len(self._unfinished)

    @property
    def waiting(self) -> int:
        """Number of rows without a token."""
        return sum(not row.began for row in list(self._unfinished.values()))

    def submit(self, rows: Sequence[Answer]) -> None:
        """Let a request's rows wait for their turn. Raises Refused while loading, ending, or if too many wait."""
        with self._changed:
            if self.state == "loading":
                raise Refused("unavailable", "the model is being loaded", status=503, retry_s=RETRY_S)
            if self.state != "ready":
                raise Refused("unavailable", "the server is shutting down", status=503)
            share = max(1, self.settings.max_waiting // SHARES)
            waiting = Counter(row.owner for row in self._unfinished.values() if not row.began)
            if sum(min(count, share) for count in (*waiting.values(), len(rows))) > self.settings.max_waiting:
                raise queue_full()
            owner = self._next_key
            for row in rows:
                row.key, row.owner, row.came = self._next_key, owner, time.monotonic()
                self._next_key += 1
                self._unfinished[row.key] = row
            self._inbox += [(row, row.prompt) for row in rows if isinstance(row.prompt, list)]
            self._changed.notify()
        texts = [row for row in rows if not isinstance(row.prompt, list)]
        prompts = [list(same) for _, same in groupby(texts, lambda row: id(row.prompt))]  # each is read once
        self._reader.add([(same[0].prompt, same) for same in prompts], rows[0].client)

    def _read(self, rows: Sequence[Answer], ids: Ids) -> None:
        with self._changed:
            self._inbox += [(row, ids) for row in rows]
            self._changed.notify()

    def drop(self, rows: Iterable[Answer]) -> None:
        """Discard rows whose answers nobody waits for. Their room is free at the next pass."""
        with self._changed:
            gone = {row.key for row in rows} & self._unfinished.keys()
            for key in gone:
                del self._unfinished[key]
            self._dropped |= gone
            self._changed.notify()

    def drain(self) -> None:
        """Take no more rows."""
        with self._changed:
            if self.state != "ended":
                self.state = "draining"

    def stop(self) -> None:
        """End the worker and the thread; rows that have no answer fail. Returns when it has ended."""
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=PATIENCE_S)
        if self._thread.is_alive():
            self._driver.kill()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            more = self._restart(first=True)
            while more:
                more = self._turn()
        except BaseException as error:  # a fault of this module: no request may wait for ever
            self.fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self.state = "ended"
                rows = list(self._unfinished.values())
            self._fail(rows, Failure(code="server_shutting_down", message="the server has shut down", status=503))
            self._reader.close()
            self._driver.end(kill=self._stopping)
            self.on_end()

    def _turn(self) -> bool:
        """Take in rows, and have the worker run for a turn. Return False at the end."""
        with self._changed:
            while not (self._inbox or self._sent or self._waiting or self._stopping) and self._driver.loaded:
                self._dropped.clear()
                if not self._changed.wait(timeout=LOOK_S if self._loading else None):
                    break  # to see how the load goes on
            if self._stopping:
                return False
            read = [(row, ids) for row, ids in self._inbox if row.key in self._unfinished]
            dropped, self._inbox, self._dropped = self._dropped, [], set()
        self._waiting.remove([row for key in dropped if (row := self._waiting.get(key)) is not None])
        drop = [key for key in dropped if self._sent.pop(key, None) is not None]
        try:
            if not self._driver.loaded and not self._restart():
                return False
            for row, ids in read:
                try:
                    self._accept(row, ids)
                except Refused as refused:
                    refused.param = refused.param or row.asked.subject
                    self._fail([row], refused.failure)
            new = self._next()
            if new or drop or self._sent or self._loading:
                self._sent |= {row.key: row for row in new}
                answer_s = 0.0 if any(row.stream for row in self._sent.values()) else TURN_S
                with self._driver.lend() as worker:
                    step = worker.ask(BatchStep(requests=new, drop=drop, answer_s=answer_s))
                self._apply_step(step)
        except LoadFailed as error:  # another load would, too
            self.fault, self.exit_code = error.line, error.exit_code
            self.on_message(self.fault)
            return False
        except WorkerError as error:
            self._retry(error)
        return True

    def _accept(self, row: Answer, ids: Ids) -> None:
        """Let a row wait, with its token ids and limit. Raises Refused if it cannot be served."""
        asked = row.asked
        if isinstance(ids, Refusal):
            raise Refused(ids.code, ids.message, status=500 if ids.code == UNREAD else 400)
        limit = answer_limit(asked.output_len, len(ids), self.plan.model.max_position, self.settings.output_len)
        if len(ids) + limit > self._positions:
            why = f"the prompt's {len(ids)} tokens and {limit} of the answer exceed the memory for "
            raise Refused("context_length_exceeded", f"{why}{self._positions} of them")
        row.prompt_ids, row.left = ids, max(1, limit)
        if not asked.echo:
            row.prompt = ids
        self._waiting.add([row])

    def _next(self) -> list[Answer]:
        """Take the rows that go to the worker now. All, unless it failed with as many."""
        rows = [*self._waiting]
        if self._window.limit is not None:
            self._waiting.hold(Counter(row.owner for row in self._sent.values()))
            rows = self._waiting.front(max(self._window.limit - len(self._sent), 0))
        self._waiting.remove(rows)
        return rows

    def _apply_step(self, step: BatchStepped) -> None:
        self.running, self.kept_bytes = step.running, step.kept_bytes
        self._loading = self._loading and step.loaded is None
        self.metrics.stepped(step)
        updates: list[tuple[Answer, Update]] = []
        now, ended = time.monotonic(), 0
        for update in step.rows:
            row = self._sent[update.key]
            if not row.began:
                row.began = now
                self.metrics.ttft.observe(now - row.came)
            row.add(update.tokens)
            row.echo = row.echo and update.prompt is None  # it comes once
            row.cached = row.cached or update.cached
            if update.ended:
                ended += 1
                del self._sent[row.key]
                self.metrics.ended(row, row.cached, now - row.came, now - row.began)
            if row.asked.output_len == 0 and update.failure is None:  # the prompt alone was asked for
                update = Update(key=row.key, prompt=update.prompt, finish_reason="length", cached=update.cached)
            row.streamed = row.streamed or bool(update.delta)
            updates.append((row, update))
        self._send(updates)
        self._window.grow(ended)

    def _fail(self, rows: Iterable[Answer], failure: Failure) -> None:
        self._send([(row, Update(key=row.key, failure=failure)) for row in rows])

    def _send(self, updates: list[tuple[Answer, Update]]) -> None:
        """Hand out updates; rows that ended or failed are over."""
        if not updates:
            return
        with self._changed:
            for row, update in updates:
                if update.ended:
                    self._unfinished.pop(row.key, None)
        self.post(updates)

    def _retry(self, error: WorkerError) -> None:
        """Try rows of a failed worker again, fewer at a time. Rows whose text was handed out fail. One that fails alone
        is given up, but not at the first death of a worker, which may have had another cause."""
        died = self._driver.failed(error)
        rows, self._sent, self.running = list(self._sent.values()), {}, 0
        if rows:
            self._window.shrink(len(rows))
        guilty = rows if len(rows) == 1 and (rows[0].tries or not died) else []
        for row in rows:
            row.tries += 1
        lost = [row for row in rows if row in guilty or row.streamed]
        self._waiting.add(row for row in rows if row not in lost)
        self._fail(lost, Failure(code=error.status, message=f"the worker failed: {error.status}"))
        again = len(rows) - len(lost)
        self.on_message(f"the worker failed ({error.status}: {error}); {len(lost)} rows ended, {again} are tried again")
        if not died:
            try:
                self._begin()
            except WorkerError:
                self._driver.end(kill=True)

    def _restart(self, first: bool = False) -> bool:
        """Load a worker. Return False if there is none, or the server stops."""
        with self._changed:
            if self.state == "ready":
                self.state = "loading"
        if not first:
            self.metrics.restarts.inc()
        for attempt in range(1 if first else RELOADS):
            if attempt:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, RELOAD_S)
            if self._stopping:
                return False
            try:
                self._driver.load(self.plan, early=True)
                self._begin()
                with self._changed:
                    if self.state == "loading":
                        self.state = "ready"
                self.on_ready()
                return True
            except WorkerError as error:
                self.fault, self.exit_code = error.line, error.exit_code
            self._driver.end(kill=True)
            if not self._stopping:
                self.on_message(self.fault)
        return False

    def _begin(self) -> None:
        size = self.settings.cache_size
        with self._driver.lend() as worker:
            started = worker.ask(BatchStart(load=self.load, rows=self.settings.rows, arrivals=True, cache_size=size))
        self._loading = started.loading
        self._positions, self.kept_bytes = started.positions, 0
        self.tokenizer.max_tokens = min(started.positions, self.plan.model.max_position or started.positions)
        if size and started.cannot_reuse != self.cannot_reuse:
            self.cannot_reuse = started.cannot_reuse
            self.on_message(f"every prompt is computed whole: {self.cannot_reuse}")
        self.fault = None
