"""Batch job: rows to the worker, answers to the disk.

The worker decides at every pass which rows run (`zinfer.generation.schedule`). The parent keeps its queue filled and
knows each row's tokens, so that a worker may die: its rows go to the next one, fewer at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zinfer.core.errors import ENVIRONMENT, ZinferError
from zinfer.core.request import Failure, Request, Update
from zinfer.generation.queue import Queue
from zinfer.generation.schedule import largest_load
from zinfer.job.batch import openai
from zinfer.job.batch.ledger import Ledger
from zinfer.job.driver import Driver, Window
from zinfer.job.openai import served_name
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.planner import Plan
from zinfer.worker.process import LoadFailed, WorkerError
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped

AHEAD = 256  # rows that wait in the worker, so that it finds like ones to begin together
SAVE_S = 60.0  # seconds between two saves of the tokens of unfinished rows


class JobFailed(ZinferError):
    """Error of a job that cannot go on. The answers so far are on disk."""

    exit_code = ENVIRONMENT


@dataclass
class BatchProgress:
    """Progress of the job. `rows` counts this run's rows, `ended` its rows with an answer or an error."""

    rows: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0  # tokens made in this run
    seconds: float = 0.0  # seconds of prefill and decode
    left: int = 0  # tokens that unfinished rows may still have
    used: int = 0  # tokens of finished rows; `allowed`: tokens that they might have had
    allowed: int = 0
    passes: int = 0
    running: int = 0  # rows that run now; `waiting`: rows that have not begun
    waiting: int = 0
    read: int = 0  # positions of KV cache that passes have read; `padded`: padding among them
    padded: int = 0
    drafted: int = 0  # drafts that were verified; `accepted`: right ones among them
    accepted: int = 0

    def add(self, step: BatchStepped) -> None:
        """Count passes and tokens."""
        for name in ("seconds", "passes", "read", "padded", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        tokens = sum(len(update.tokens) for update in step.rows)
        self.tokens += tokens
        self.left -= tokens

    @property
    def rate(self) -> float | None:
        """Throughput so far, in tok/s; None before any time is measured."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, if rows go on to use their limits as before."""
        share = self.used / self.allowed if self.allowed else 1.0
        return self.left * share / self.rate if self.rate else None

    @property
    def padding(self) -> float:
        """Share of the KV cache read that is padding."""
        return self.padded / self.read if self.read else 0.0


@dataclass
class BatchJob:
    """Job that answers requests into a ledger, at most `max_rows` at once; their keys number their `lines`."""

    plan: Plan
    lines: Sequence[openai.BatchLine]
    requests: Sequence[Request]
    ledger: Ledger
    driver: Driver
    max_rows: int | None = None
    on_progress: Callable[[BatchProgress], None] = lambda _progress: None
    on_message: Callable[[str], None] = lambda _text: None

    def __post_init__(self) -> None:
        requests, self._planner = self.requests, self.plan.planner()
        self._waiting = Queue(rows=requests)  # not in the worker
        self._sent: dict[int, Request] = {}  # in the worker, by key
        self._saved = {request.key: len(request.output_ids) for request in requests}  # output tokens on disk
        self._started = False  # True while the worker has a batch
        self._window = Window(lasting=True)
        self._given_up = 0  # rows given up since the last token
        self._saved_at = time.monotonic()
        self.progress = BatchProgress(rows=len(requests), left=sum(request.left for request in requests))
        self._ahead = AHEAD

    def run(self) -> BatchProgress:
        """Answer every row. Raises Interrupted, JobFailed without a worker or if batches go on failing, StoreError."""
        with Signals() as self.driver.signals, self.driver:
            try:
                while self._waiting or self._sent:
                    try:
                        self._step()
                    except LoadFailed as error:
                        raise _failed(error) from None
                    except WorkerError as error:
                        self._retry(error)
            except (Interrupted, JobFailed) as end:
                self.driver.end(kill=isinstance(end, Interrupted))
                self._save()
                raise
        return self.progress

    def _step(self) -> None:
        try:
            self.driver.load(self.plan, early=True)
        except WorkerError as error:
            raise _failed(error) from None
        if not self._started:
            self._start()
        with self.driver.lend() as worker:
            step = worker.ask(BatchStep(requests=self._next()))
        self._apply_step(step)

    def _start(self) -> None:
        self._waiting.add(self._sent.values())
        self._sent, rows = {}, [*self._waiting]
        limits = [limit for limit in (self.max_rows, self._window.limit) if limit is not None]
        load = largest_load(self._planner, [row.need for row in rows], min(limits, default=None))
        with self.driver.lend() as worker:
            worker.ask(BatchStart(load=load, rows=self.max_rows))
        self._started = True
        self.progress.running, self.progress.waiting = 0, len(rows)
        self._ahead = AHEAD

    def _next(self) -> list[Request]:
        limit = self._window.limit
        count = max(self._ahead if limit is None else limit - len(self._sent), 0 if self._sent else 1)
        new = self._waiting.front(count)
        self._waiting.remove(new)
        self._sent |= {request.key: request for request in new}
        return new

    def _apply_step(self, step: BatchStepped) -> None:
        """Process the worker's answer. Tokens go to their rows, rows that ended to the disk."""
        progress = self.progress
        progress.running, progress.waiting = step.running, step.waiting + len(self._waiting)
        progress.add(step)
        self._ahead = max(0, AHEAD - step.waiting)
        records, ended = [], []
        for update in step.rows:
            request = self._sent[update.key]
            request.add(update.tokens)
            if update.ended:
                records.append(self._record(request, update))
                ended.append(update.key)
                self._end(request, failed=update.failure is not None)
        self.ledger.add(records)
        for key in ended:
            del self._sent[key], self._saved[key]
        if step.rows:
            self._given_up = 0
        self._window.grow(len(ended))
        if time.monotonic() - self._saved_at > SAVE_S:
            self._save()
        self.on_progress(progress)

    def _record(self, request: Request, update: Update) -> dict[str, Any]:
        line = self.lines[request.key]
        if update.failure is not None:
            return openai.failed(line, update.failure)
        self.progress.used += len(request.output_ids)
        self.progress.allowed += request.limit
        tokens = len(request.prompt_ids), len(request.output_ids)
        model, created = served_name(self.plan.case.model), self.ledger.created
        reason = str(update.finish_reason)
        return openai.answer(line, update.text, reason, tokens, model, created, request.prompt_ids)

    def _end(self, request: Request, failed: bool) -> None:
        self.progress.ended += 1
        self.progress.failed += failed
        self.progress.left -= request.left

    def _save(self) -> None:
        saved = self._saved
        rows = [row for row in (*self._sent.values(), *self._waiting) if len(row.output_ids) > saved[row.key]]
        self.ledger.save((self.lines[row.key].id, saved[row.key], row.output_ids[saved[row.key] :]) for row in rows)
        saved |= {row.key: len(row.output_ids) for row in rows}
        self._saved_at = time.monotonic()

    def _retry(self, error: WorkerError) -> None:
        """Try the rows of a failed worker again, fewer at a time. Give up a row that fails alone."""
        self.driver.failed(error)
        rows, self._sent, self._started = list(self._sent.values()), {}, False
        count = len(rows)
        message = f"a batch of {count} failed ({error.status}: {error})"
        self._given_up += count < 2
        if count < 2 and self._given_up > 1:
            self._waiting.add(rows)
            raise JobFailed(f"{message}, and so did the one before; the same command goes on" if rows else message)
        if count == 1:
            self.ledger.add([openai.failed(self.lines[rows[0].key], Failure(code=error.status, message=str(error)))])
            self._end(rows[0], failed=True)
        elif count:
            self._waiting.add(rows)
            message += f"; going on with batches of {self._window.shrink(count)}"
        self.on_message(message)


def _failed(error: WorkerError) -> JobFailed:
    """Return the end of a job whose worker cannot load."""
    failed = JobFailed(error.line)
    failed.exit_code = error.exit_code
    return failed
