"""Batch job: rows to the worker, answers to the disk, until every row has one.

The worker decides at every pass which rows run (`zinfer.generation.schedule`). The parent keeps its queue filled and
knows each row's tokens, so that a worker may die: its rows go to the next one, fewer at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zinfer.core.errors import ENVIRONMENT
from zinfer.generation.sampling import Sampling
from zinfer.generation.schedule import largest_load
from zinfer.job.batch import openai
from zinfer.job.batch.intake import RequestRow, needs, row_order
from zinfer.job.batch.ledger import Ledger
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Status
from zinfer.worker.process import Client, WorkerDied, WorkerError
from zinfer.worker.tasks import Answer, BatchRequest, BatchRow, BatchStart, BatchStep, BatchStepped, Request

AHEAD = 256  # rows that wait in the worker, so that it finds like ones to begin together
MANY = 16  # rows of a failed batch above which a quarter of them is tried next, not half
SAVE_S = 60.0  # seconds between two saves of the tokens of unfinished rows
FATAL: frozenset[Status] = frozenset({"crashed", "timeout"})  # the worker is of no use after them


class JobFailed(RuntimeError):
    """Error of a job that cannot go on; the answers so far are on disk. `exit_code` ends the command."""

    def __init__(self, message: str, exit_code: int = ENVIRONMENT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Standing:
    """Progress of the job. `rows` are those of this run, `ended` those of them that have an answer or an error."""

    rows: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0  # tokens made in this run
    seconds: float = 0.0  # seconds of prefill and decode
    stopped: int = 0  # rows that ended before they had all tokens they might
    left: int = 0  # tokens that unfinished rows may still have
    used: int = 0  # tokens of finished rows; `allowed`: tokens that they might have had
    allowed: int = 0
    passes: int = 0
    running: int = 0  # rows that run now; `waiting`: rows that have not begun
    waiting: int = 0
    read: int = 0  # positions of KV cache that passes have read; `padded`: those of them that were padding
    padded: int = 0
    again: int = 0  # positions that were computed again
    drafted: int = 0  # drafts that were verified; `accepted`: those of them that were right
    accepted: int = 0
    full_tokens: int = 0  # tokens made while further rows waited, and the seconds of that
    full_seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Throughput so far, in tok/s; None before any time is measured."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, if the remaining rows use as much of their limits as the finished ones did."""
        share = self.used / self.allowed if self.allowed else 1.0
        return self.left * share / self.rate if self.rate else None

    @property
    def padding(self) -> float:
        """Share of the KV cache read that is padding."""
        return self.padded / self.read if self.read else 0.0

    @property
    def ending(self) -> float:
        """Chance that a row ends at a token by itself."""
        return self.stopped / (self.tokens + self.stopped + 1)


@dataclass
class BatchJob:
    """A job to run: the load, the rows without an answer, and where answers go; `loading`, `progress` and `say` hear of
    it."""

    plan: Plan
    rows: Sequence[RequestRow]
    ledger: Ledger
    model: str  # name of the model in the answers
    make_worker: Callable[[], Client]
    worker: Client | None = None  # first worker, if there is one, without a load
    at_most: int | None = None  # largest number of rows that run at a time
    loading: Callable[[], None] = lambda: None
    progress: Callable[[Standing], None] = lambda _standing: None
    say: Callable[[str], None] = lambda _text: None

    def run(self) -> Standing:
        """Answer every row.

        Raises Interrupted on SIGINT and SIGTERM, JobFailed when no worker can be had or batches fail one after the
        other, StoreError when an answer cannot be written; no worker is left behind.
        """
        with Signals() as signals:
            return _Runner(self, signals).run()


class _Runner:
    def __init__(self, job: BatchJob, signals: Signals) -> None:
        self._job, self._signals = job, signals
        self._waiting = sorted(job.rows, key=row_order)  # not in the worker
        self._sent: dict[int, RequestRow] = {}  # in the worker, by key
        self._started = False  # True while the worker has a batch
        self._window: int | None = None  # most rows in the worker after a failure
        self._first_failure = 0  # rows in the worker at the first failure
        self._since = 0  # rows that ended since the window was set
        self._worker, self._loaded = job.worker, False  # a worker without a load, or none, until the first batch
        self._given_up = 0  # rows given up since the last token
        self._saved_at = time.monotonic()
        left = sum(row.need.left for row in job.rows)
        self.standing = Standing(rows=len(job.rows), left=left)
        self._ahead = AHEAD

    def run(self) -> Standing:
        try:
            while self._waiting or self._sent:
                try:
                    self._step()
                except WorkerError as failed:
                    self._after(failed)
        except (Interrupted, JobFailed) as end:
            self._stop(kill=isinstance(end, Interrupted))
            self._save()
            raise
        finally:
            self._stop()
        return self.standing

    def _step(self) -> None:
        """Let the worker run, with rows to begin next in its queue."""
        if not self._started:
            self._start()
        new = self._next()
        answer = self._ask(BatchStep(requests=[batch_request(row) for row in new], ending=self.standing.ending))
        self._take(answer)

    def _start(self) -> None:
        """Begin a batch in the worker, for all rows that are left."""
        rows = [*self._waiting, *self._sent.values()]
        self._waiting, self._sent = sorted(rows, key=row_order), {}
        limits = [most for most in (self._job.at_most, self._window) if most is not None]
        load = largest_load(self._job.plan, needs(rows), min(limits) if limits else None)
        self._ask(BatchStart(load=load, rows=self._job.at_most))
        self._started = True
        self.standing.running, self.standing.waiting = 0, len(rows)
        self._ahead = AHEAD

    def _next(self) -> list[RequestRow]:
        """Take the rows that go to the worker now: its queue is kept so long that it can choose like ones."""
        count = self._ahead
        if self._window is not None:
            count = self._window - len(self._sent)
        count = max(count, 0 if self._sent else 1)
        new, self._waiting = self._waiting[:count], self._waiting[count:]
        self._sent |= {row.key: row for row in new}
        return new

    def _take(self, answer: BatchStepped) -> None:
        """Process the worker's answer: tokens go to their rows, rows that ended to the disk."""
        standing = self.standing
        standing.seconds += answer.seconds
        standing.passes += answer.passes
        standing.read += answer.read
        standing.padded += answer.padded
        standing.again += answer.again
        standing.drafted += answer.drafted
        standing.accepted += answer.accepted
        standing.running, standing.waiting = answer.running, answer.waiting + len(self._waiting)
        if standing.waiting:
            standing.full_tokens += sum(len(step.tokens) for step in answer.rows)
            standing.full_seconds += answer.seconds
        self._ahead = max(0, AHEAD - answer.waiting)
        records, ended = [], []
        for step in answer.rows:
            row = self._sent[step.key]
            row.output_ids += step.tokens
            standing.tokens += len(step.tokens)
            standing.left -= len(step.tokens)
            if step.error is not None:
                records.append(openai.failure(row.request, "nan_output", step.error))
            elif step.finish_reason is not None:
                records.append(self._answered(row, step.text, step.finish_reason))
            else:
                continue
            ended.append(row)
            self._end(row, failed=step.error is not None)
        self._job.ledger.add(records)
        for row in ended:
            del self._sent[row.key]
        if answer.rows:
            self._given_up = 0
        self._widen(len(ended))
        if time.monotonic() - self._saved_at > SAVE_S:
            self._save()
        self._job.progress(standing)

    def _widen(self, ended: int) -> None:
        """Let more rows into the worker again, up to half of those with which it failed."""
        self._since += ended
        most = self._first_failure // 2
        if self._window is None or self._since < self._window or self._window >= most:
            return
        self._window, self._since = min(2 * self._window, most), 0

    def _answered(self, row: RequestRow, text: str, finish_reason: str) -> dict[str, Any]:
        self.standing.stopped += row.need.left > 0
        self.standing.used += len(row.output_ids)
        self.standing.allowed += row.limit
        tokens = row.length, len(row.output_ids)
        job = self._job
        return openai.answer(row.request, text, finish_reason, tokens, job.model, job.ledger.created)

    def _end(self, row: RequestRow, failed: bool) -> None:
        self.standing.ended += 1
        self.standing.failed += failed
        self.standing.left -= row.need.left

    def _save(self) -> None:
        """Put on disk the tokens that unfinished rows have got since the last time."""
        rows = [row for row in (*self._sent.values(), *self._waiting) if len(row.output_ids) > row.saved]
        self._job.ledger.save((row.request.id, row.saved, row.output_ids[row.saved :]) for row in rows)
        for row in rows:
            row.saved = len(row.output_ids)
        self._saved_at = time.monotonic()

    def _after(self, failed: WorkerError) -> None:
        """Try the rows of a worker that failed again, fewer of them at a time; give up a row that fails alone."""
        if failed.status in FATAL:
            self._stop(kill=True)
        rows, self._sent, self._started = list(self._sent.values()), {}, False
        for row in rows:
            row.tries += 1
        count = len(rows)
        message = f"a batch of {count} failed ({failed.status}: {failed})"
        if count == 1:
            self._given_up += 1
            if self._given_up > 1:
                self._waiting += rows
                raise JobFailed(f"{message}, and so did the one before; the same command goes on")
            self._job.ledger.add(openai.failure(row.request, failed.status, str(failed)) for row in rows)
            for row in rows:
                self._end(row, failed=True)
        elif count:
            self._waiting = sorted([*rows, *self._waiting], key=row_order)
            self._first_failure = max(self._first_failure, count)
            self._window, self._since = max(1, count // (4 if count > MANY else 2)), 0
            message += f"; going on with batches of {self._window}"
        else:
            self._given_up += 1
            if self._given_up > 1:
                raise JobFailed(message)
        self._job.say(message)

    def _ask(self, request: Request[Answer]) -> Answer:
        """Ask the worker, which is loaded now if need be. Raises WorkerError if the batch fails, and JobFailed if the
        worker cannot load."""
        worker = self._ready()
        try:
            with self._signals.raised():
                return worker.ask(request)
        except WorkerDied:
            self._stop()
            raise

    def _ready(self) -> Client:
        """Return the worker, with its engine loaded. Raises JobFailed."""
        job, worker = self._job, self._worker
        if worker is not None and self._loaded:
            return worker
        job.loading()
        worker = self._worker = worker or job.make_worker()
        try:
            with self._signals.raised():
                worker.start(job.plan)
        except WorkerError as failed:
            raise JobFailed(failed.line, failed.exit_code) from None
        self._loaded = True
        return worker

    def _stop(self, kill: bool = False) -> None:
        worker, self._worker, self._loaded, self._started = self._worker, None, False, False
        if worker is not None:
            if kill:
                worker.kill()
            worker.close()


def batch_request(row: RequestRow) -> BatchRequest:
    """Return the facts of a row that the worker needs."""
    request = row.request
    sampling = Sampling(temperature=request.temperature, top_p=request.top_p, seed=request.seed)
    own = BatchRow(key=row.key, output_ids=row.output_ids, left=row.need.left, sampling=sampling)
    prompts = [list(row.prompt_ids)]
    return BatchRequest(key=row.key, prompts=prompts, rows=[own], stop=request.stop, chat=request.chat)
