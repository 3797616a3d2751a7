"""Dispatcher: the thread that drives the server's worker, from the arrival of a request's rows to their last token.

Rows are given to the worker's queue as they come; the worker begins them, at every pass, in the order that
`zinfer.generation.schedule.fair_order` gives: requests share the memory, however many rows each has. The thread alone
talks to the worker and sleeps while there is no row. Prompts that are texts are read beside it
(`zinfer.job.serve.reading`): their rows come when they have token ids. A worker that dies is started again: rows of
which no text was handed out go on with the tokens that they have, fewer of them at a time, so that a row that is to
blame ends alone.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from zinfer.core.case import Workload
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelError
from zinfer.generation.sampling import Sampling
from zinfer.generation.schedule import fair_order
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job.batch.run import FATAL, MANY
from zinfer.job.openai import Asked, Prompt, Refused, answer_limit
from zinfer.job.serve.reading import UNREAD, Ids, Reader, Tokenizes
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Status
from zinfer.worker.process import Client, WorkerDied, WorkerError
from zinfer.worker.tasks import (
    Answer,
    BatchRequest,
    BatchRow,
    BatchStart,
    BatchStep,
    BatchStepped,
    EchoedPrompt,
    Request,
    RowStep,
    TokenScore,
)

TURN_S = 0.05  # seconds between two answers of the worker, or one pass, while no text is streamed
SHARES = 16  # a request fills one in so many of the places in the queue at most, however many of its rows wait
RELOADS, RELOAD_S = 3, 2.0  # attempts to load a worker again, and seconds after the first that failed
PATIENCE_S = 1.0  # seconds that the end of a pass is waited for when the server stops at once

TRIED: list[Any] = ["hi", [{"role": "user", "content": "hi"}]]  # prompts that tell whether texts and chats are served
# What a client is told of a worker that failed; the terminal alone gets its last words.
FAILED: dict[Status, str] = {
    "crashed": "it ended", "timeout": "it did not answer in time", "oom_gpu": "GPU memory ran out",
    "oom_host": "host memory ran out",
}  # fmt: skip

State = Literal["loading", "ready", "draining", "ended"]


class Unavailable(Exception):
    """A server that takes no requests now; `retry` tells whether it will again."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class QueueFull(Exception):
    """More rows that wait than the server permits."""


class Failure(NamedTuple):
    """Reason why a row has no answer: an HTTP status, OpenAI's error code, one line, and the parameter at fault."""

    status: int
    code: str
    message: str
    param: str | None = None


class RowNews(NamedTuple):
    """New text and tokens of a row, to be added to those before; its end, or its failure."""

    text: str = ""
    tokens: int = 0
    scores: Sequence[TokenScore] = ()
    prompt: EchoedPrompt | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class Row:
    """An answer under way: one of a request's prompts, and the tokens made so far. Rows belong to the dispatcher from
    `Dispatcher.submit` on."""

    prompt: Prompt
    asked: Asked
    seed: str
    client: str = ""  # who sent it; prompts of clients are read in turn
    key: int = -1
    request: int = -1  # number of its request, and of its prompt among those of the request
    place: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    limit: int = 0
    output_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    echoed: EchoedPrompt | None = None
    cached: int = 0  # tokens of the prompt whose KV cache was reused
    tries: int = 0  # failures of the worker with it
    told: bool = False  # True once some of its text was handed out
    came: float = 0.0  # time of arrival
    began: float = 0.0  # time of its first token

    @property
    def left(self) -> int:
        """Tokens that the worker may still add: one at least, which does not count if none was asked for."""
        return max(1, self.limit) - len(self.output_ids)

    def for_worker(self, prompt: int) -> BatchRow:
        """Return the facts that the worker needs of the row alone; `prompt` is the number of its prompt there."""
        asked = self.asked
        sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=self.seed)
        return BatchRow(key=self.key, prompt=prompt, output_ids=self.output_ids, left=self.left, sampling=sampling)


def for_worker(rows: Iterable[Row]) -> list[BatchRequest]:
    """Return the facts that the worker needs of rows, by request: what those of one have in common comes once."""
    found = []
    for (key, echo), own in _grouped(rows, lambda row: (row.request, row.asked.echo and row.echoed is None)).items():
        asked, prompts = own[0].asked, _grouped(own, lambda row: row.place)
        found.append(BatchRequest(
            key=key, prompts=[same[0].prompt_ids for same in prompts.values()],
            rows=[row.for_worker(number) for number, same in enumerate(prompts.values()) for row in same],
            stop=asked.stop, ignore_eos=asked.ignore_eos, chat=asked.chat, stream=asked.stream,
            logprobs=asked.logprobs, echo=echo,
        ))  # fmt: skip
    return found


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


class Meter(Protocol):
    """Receiver of what a dispatcher measures: seconds, tokens, rows, passes."""

    def first_token(self, seconds: float) -> None: ...
    def ended(self, row: Row, seconds: float, since_first: float) -> None: ...
    def stepped(self, answer: BatchStepped) -> None: ...
    def restarted(self) -> None: ...


Post = Callable[[list[tuple[Row, RowNews]]], None]


class Dispatcher:
    """Queue of rows, and the thread that has a worker answer them.

    `load` is the largest load to reckon with; at most `at_most` rows run at a time, and `most_waiting` wait for their
    first token. KV caches of earlier rows may take `cache_size` bytes of host memory, and are reused. `post` receives
    the news of rows, from the thread. `tokenizer`, which is closed at the end, reads prompts.
    """

    def __init__(
        self,
        plan: Plan,
        make_worker: Callable[[], Client],
        load: Workload,
        meter: Meter,
        post: Post,
        tokenizer: Tokenizes,
        *,
        at_most: int | None = None,
        most_waiting: int = 1024,
        output_len: int = 256,
        cache_size: int = 0,
        say: Callable[[str], None] = lambda _text: None,
        loading: Callable[[], None] = lambda: None,
        ready: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.most_waiting = plan, most_waiting
        self.state: State = "loading"
        self.fault: str | None = None  # reason why it has ended by itself
        self.exit_code = ENVIRONMENT  # of a command that ends for it
        self._make_worker, self._load, self._meter, self._post = make_worker, load, meter, post
        self._at_most, self._output_len, self._cache_size = at_most, output_len, cache_size
        self.cannot_reuse: str | None = None if cache_size else "KV caches have no memory of the host"
        self.cannot_complete: str | None = None  # reason why no text can be continued
        self.cannot_chat: str | None = None
        self._say, self._loading, self._on_ready, self._on_end = say, loading, ready, ended
        self._changed = threading.Condition()  # guards the next six
        self._inbox: list[tuple[Row, Ids]] = []  # rows whose prompts were read
        self._dropped: set[int] = set()
        self._unfinished: dict[int, Row] = {}  # by key
        self._unbegun: set[int] = set()  # keys of those of them without a token
        self._next_key = 0
        self._stopping = False
        self._waiting: list[Row] = []  # not in the worker, in the order of arrival
        self._sent: dict[int, Row] = {}  # in the worker, by key
        self._window: int | None = None  # most rows in the worker after a failure
        self._since = 0  # rows that ended since the window was set
        self._tokens = self._stopped = 0  # tokens made; rows that ended before they had all tokens they might
        self._worker: Client | None = None
        self._tokenizer = tokenizer
        self._reader = Reader(tokenizer, self._read, self._wanted)
        self._positions = 0
        self.kept_bytes = 0  # host memory of kept KV caches
        self._cannot_score: str | None = None
        self.running = 0  # rows that run in the worker
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

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
        return len(self._unbegun)

    def submit(self, rows: Sequence[Row]) -> None:
        """Let the rows of a request wait for their turn. Raises Unavailable while the worker loads and when the server
        ends, QueueFull when too many rows wait, of which one request's count for a sixteenth of the queue at most."""
        with self._changed:
            if self.state == "loading":
                raise Unavailable("the model is being loaded", retry=True)
            if self.state != "ready":
                raise Unavailable("the server is shutting down", retry=False)
            share = max(1, self.most_waiting // SHARES)
            waiting = Counter(self._unfinished[key].request for key in self._unbegun)
            if sum(min(count, share) for count in (*waiting.values(), len(rows))) > self.most_waiting:
                raise QueueFull
            request = self._next_key
            for number, row in enumerate(rows):
                row.key, row.came = self._next_key, time.monotonic()
                row.request, row.place = request, number // row.asked.n
                self._next_key += 1
                self._unfinished[row.key] = row
                self._unbegun.add(row.key)
            self._inbox += [(row, row.prompt) for row in rows if _is_ids(row.prompt)]  # type: ignore[misc]
            self._changed.notify()
        texts = [row for row in rows if not _is_ids(row.prompt)]
        prompts = [list(own) for _, own in groupby(texts, lambda row: id(row.prompt))]  # each is read once
        self._reader.add([(own[0].prompt, own) for own in prompts], rows[0].client)

    def _wanted(self, rows: Sequence[Row]) -> bool:
        """Tell whether somebody waits for any of `rows`, which have one prompt."""
        return any(row.key in self._unfinished for row in rows)

    def _read(self, found: list[tuple[Sequence[Row], Ids]]) -> None:
        """Take the token ids of prompts; called by the reader's threads."""
        with self._changed:
            self._inbox += [(row, ids) for rows, ids in found for row in rows]
            self._changed.notify()

    def drop(self, rows: Iterable[Row]) -> None:
        """Forget rows whose answers nobody waits for; their room is free at the next pass."""
        with self._changed:
            gone = {row.key for row in rows} & self._unfinished.keys()
            for key in gone:
                del self._unfinished[key]
                self._unbegun.discard(key)
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
        if self._thread.is_alive() and (worker := self._worker) is not None:
            worker.kill()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            self._restart(first=True)
            while self._turn():
                pass
        except _EndedError:
            pass
        except BaseException as error:  # a fault of this module: no request may wait for ever
            self.fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self.state = "ended"
                rows = list(self._unfinished.values())
            failure = Failure(503, "server_shutting_down", "the server has shut down")
            self._tell([(row, RowNews(failure=failure)) for row in rows])
            self._reader.close()
            self._close()
            self._on_end()

    def _turn(self) -> bool:
        """Wait for rows, take them in, and have the worker run for a turn. Return False at the end."""
        with self._changed:
            while not (self._inbox or self._sent or self._waiting or self._stopping) and self._worker is not None:
                self._dropped.clear()
                self._changed.wait()
            if self._stopping:
                return False
            read = [(row, ids) for row, ids in self._inbox if row.key in self._unfinished]
            dropped, self._inbox, self._dropped = self._dropped, [], set()
        self._waiting = [row for row in self._waiting if row.key not in dropped]
        drop = [key for key in dropped if self._sent.pop(key, None) is not None]
        try:
            if self._worker is None:
                self._restart()
            self._take_in(read)
            new = self._next()
            if new or drop or self._sent:
                self._sent |= {row.key: row for row in new}
                streams = any(row.asked.stream for row in self._sent.values())
                ending = self._stopped / (self._tokens + self._stopped + 1)
                step = BatchStep(
                    requests=for_worker(new), drop=drop, ending=ending, answer_s=0.0 if streams else TURN_S
                )
                self._take(self._ask(step))
        except WorkerError as failed:
            self._after(failed)
        return True

    def _take_in(self, read: list[tuple[Row, Ids]]) -> None:
        """Let rows whose prompts were read wait for the worker; those that cannot be served fail."""
        refused = []
        for row, ids in read:
            if (failure := self._accept(row, ids)) is None:
                self._waiting.append(row)
            else:
                refused.append((row, RowNews(failure=failure)))
        self._tell(refused)

    def _accept(self, row: Row, ids: Ids) -> Failure | None:
        """Give a row its token ids and its limit; return the reason if it cannot be served."""
        asked, subject = row.asked, "messages" if row.asked.chat else "prompt"
        if isinstance(ids, Refusal):
            return Failure(500 if ids.code == UNREAD else 400, ids.code, ids.message, subject)
        if asked.echo and asked.logprobs is not None and self._cannot_score is not None:
            return Failure(400, "unsupported_parameter", f"echo with logprobs: {self._cannot_score}", "echo")
        try:
            row.limit = answer_limit(asked.output_len, len(ids), self.plan.model.max_position, self._output_len)
        except Refused as refused:
            return Failure(400, refused.code, str(refused), subject)
        if len(ids) + row.limit > self._positions:
            why = f"the prompt's {len(ids)} tokens and {row.limit} of the answer exceed the memory for "
            return Failure(400, "context_length_exceeded", f"{why}{self._positions} of them", subject)
        row.prompt_ids = ids
        if not asked.echo:
            row.prompt = ids
        return None

    def _next(self) -> list[Row]:
        """Take the rows that go to the worker now, which shares the memory out among requests: all, unless it failed
        with as many."""
        new = self._waiting
        if self._window is not None:
            held = Counter(row.request for row in self._sent.values())
            new = fair_order(new, held)[: max(self._window - len(self._sent), 0)]
        self._waiting = _without(self._waiting, new)
        return new

    def _take(self, answer: BatchStepped) -> None:
        """Process the worker's answer: tokens go to their rows, news to the server."""
        self.running, self.kept_bytes = answer.running, answer.kept_bytes
        self._meter.stepped(answer)
        news: list[tuple[Row, RowNews]] = []
        now, ended = time.monotonic(), 0
        for step in answer.rows:
            row = self._sent[step.key]
            if not row.began:
                row.began = now
                self._meter.first_token(now - row.came)
                with self._changed:
                    self._unbegun.discard(row.key)
            over = step.finish_reason is not None or step.error is not None
            ended += over
            found = self._news(row, step)
            self._tokens += len(step.tokens)
            self._stopped += over and len(row.output_ids) < row.limit
            if over:
                del self._sent[row.key]
                self._meter.ended(row, now - row.came, now - row.began)
            if over or row.asked.stream:
                news.append((row, found))
        self._tell(news)
        self._since += ended
        if self._window is not None and self._since >= self._window:
            self._window, self._since = 2 * self._window if self._window < MANY else None, 0

    def _news(self, row: Row, step: RowStep) -> RowNews:
        """Add new tokens to a row; return what is to be told about it: of a stream the new part, else the whole."""
        asked, stream = row.asked, row.asked.stream
        row.output_ids += step.tokens
        row.cached = row.cached or step.cached
        row.echoed = step.prompt or row.echoed
        if step.error is not None:
            return RowNews(failure=Failure(500, "nan_output", step.error))
        count, text, scores = len(step.tokens), step.piece if stream else step.text, step.scores
        prompt = step.prompt
        if not stream:
            row.scores += step.scores
            count, scores, prompt = len(row.output_ids), row.scores, row.echoed
        if asked.output_len == 0:
            count, text, scores = 0, "", []
        row.told = row.told or (stream and bool(text))
        reason: Literal["stop", "length"] | None = "length" if asked.output_len == 0 else step.finish_reason
        return RowNews(text, count, scores, prompt, len(row.prompt_ids), row.cached, reason)

    def _tell(self, news: list[tuple[Row, RowNews]]) -> None:
        """Hand out news; rows that ended or failed are over."""
        if not news:
            return
        with self._changed:
            for row, one in news:
                if one.finish_reason is not None or one.failure is not None:
                    self._unfinished.pop(row.key, None)
                    self._unbegun.discard(row.key)
        self._post(news)

    def _after(self, failed: WorkerError) -> None:
        """Go on after a worker, or its batch, failed: rows whose text was handed out fail, the others are tried again,
        fewer of them at a time. A row that fails alone is given up, but not at the first death of a worker, which may
        have had another cause."""
        died = isinstance(failed, WorkerDied) or failed.status in FATAL
        if died:
            self._close(kill=True)
        rows, self._sent, self.running = list(self._sent.values()), {}, 0
        if rows:
            self._window, self._since = max(1, len(rows) // (4 if len(rows) > MANY else 2)), 0
        guilty = rows if len(rows) == 1 and (rows[0].tries or not died) else []
        for row in rows:
            row.tries += 1
        lost = {row.key: row for row in rows if row in guilty or row.told}
        self._waiting = _without(sorted([*rows, *self._waiting], key=lambda row: row.key), lost.values())
        failure = Failure(500, failed.status, f"the worker failed: {FAILED.get(failed.status, failed.status)}")
        self._tell([(row, RowNews(failure=failure)) for row in lost.values()])
        again = len(rows) - sum(row.key in lost for row in rows)
        self._say(f"the worker failed ({failed.status}: {failed}); {len(lost)} rows ended, {again} are tried again")
        if self._worker is not None:
            try:
                self._begin()
            except WorkerError:
                self._close(kill=True)

    def _restart(self, first: bool = False) -> None:
        """Load a worker; raises _EndedError if none can be had, or the server stops meanwhile."""
        with self._changed:
            if self.state == "ready":
                self.state = "loading"
        if not first:
            self._meter.restarted()
        for attempt in range(1 if first else RELOADS):
            if attempt:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, RELOAD_S * 2 ** (attempt - 1))
            if self._stopping:
                raise _EndedError
            self._loading()
            try:
                worker = self._worker = self._make_worker()
                worker.start(self.plan)
                self._begin()
                self._try_prompts()
                with self._changed:
                    if self.state == "loading":
                        self.state = "ready"
                self._on_ready()
                return
            except WorkerError as error:
                self.fault, self.exit_code = error.line, error.exit_code
            self._close(kill=True)
            if not self._stopping:
                self._say(self.fault)
        raise _EndedError

    def _begin(self) -> None:
        size = self._cache_size
        started = self._ask(BatchStart(load=self._load, rows=self._at_most, arrivals=True, cache_size=size))
        self._positions, self._cannot_score, self.kept_bytes = started.positions, started.cannot_score, 0
        self._tokenizer.most = min(started.positions, self.plan.model.max_position or started.positions)
        if size and started.cannot_reuse != self.cannot_reuse:
            self.cannot_reuse = started.cannot_reuse
            self._say(f"every prompt is computed whole: {self.cannot_reuse}")
        self.fault = None

    def _try_prompts(self) -> None:
        """Find out whether texts and chats can become token ids: some models have no chat template, or a broken one."""
        self.cannot_complete, self.cannot_chat = map(self._why_not, TRIED)

    def _why_not(self, prompt: Prompt) -> str | None:
        try:
            found = self._tokenizer.encode_alone(prompt)
        except ModelError as error:
            return str(error)
        return found.message if isinstance(found, Refusal) else None

    def _ask(self, request: Request[Answer]) -> Answer:
        assert self._worker is not None
        return self._worker.ask(request)

    def _close(self, kill: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if kill or self._stopping:
                worker.kill()
            worker.close()


class _EndedError(Exception):
    """The end of the thread: no worker can be had, or none is wanted any more."""


def _without(rows: Iterable[Row], gone: Iterable[Row]) -> list[Row]:
    keys = {row.key for row in gone}
    return [row for row in rows if row.key not in keys]


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], int)
