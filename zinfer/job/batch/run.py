"""Batch job: rows into batches, batches to the worker, answers to the disk, until every row has one.

The parent knows each row's tokens and nothing of a batch lives in the worker alone, so that a worker may die: its rows
are packed again, in smaller batches. `zinfer.job.batch.packing` decides which rows to pack, and for how long.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zinfer.generation.sampling import Sampling
from zinfer.job.batch import openai
from zinfer.job.batch.intake import RequestRow, needs, row_order
from zinfer.job.batch.ledger import Ledger
from zinfer.job.batch.packing import (
    MOST_ROWS,
    BatchShape,
    PlannedBatch,
    Progress,
    StepTimeModel,
    needed,
    pack,
    room_of,
    worth_packing_anew,
)
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Status
from zinfer.worker.process import Client, WorkerDied, WorkerError
from zinfer.worker.tasks import BatchRow, BatchStart, BatchStep, BatchStepped, Request

WINDOW = 8  # batches' worth of rows that may be begun at a time
TRIES = 4  # most failed batches of a row
SAVE_S = 60.0  # seconds between two saves of the tokens of unfinished rows
CHECK_S = 1.0  # seconds of decoding between two checks whether to pack anew
FATAL: frozenset[Status] = frozenset({"crashed", "timeout"})  # the worker is of no use after them


class JobFailed(RuntimeError):
    """Error of a job that cannot go on; the answers so far are on disk."""


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
    padded: int = 0  # tokens that batches had room for; `needed`: tokens that their rows needed
    needed: int = 0

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
    def waste(self) -> float:
        """Tokens that batches had room for over those that their rows needed: 1 is no waste."""
        return self.padded / self.needed if self.needed else 1.0

    @property
    def ending(self) -> float:
        """Chance that a row ends at a token by itself."""
        return self.stopped / (self.tokens + self.stopped + 1)

    @property
    def finishing(self) -> float:
        """Chance that a row ends at a token for any reason."""
        return self.ended / (self.tokens + self.ended + 1)


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
    at_most: int | None = None  # largest number of rows in a batch
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
        plan = job.plan
        self._positions = plan.model.max_position
        self._pace = StepTimeModel(plan.case, plan.model, plan.machine)
        self._planned = room_of(plan.case, plan.model, plan.machine)
        self._share = 1.0  # share of the planned rows to take; less after failed batches
        self._begun = [row for row in job.rows if row.output_ids]
        self._fresh = sorted((row for row in job.rows if not row.output_ids), key=row_order)
        self._size: int | None = None  # rows of the last batch
        self._worker, self._loaded = job.worker, False  # a worker without a load, or none, until the first batch
        self._given_up = 0  # failed batches since the last one that yielded a token
        self._saved_at = time.monotonic()
        left = sum(row.need.left for row in job.rows)
        self.standing = Standing(rows=len(job.rows), left=left)

    def run(self) -> Standing:
        active: list[RequestRow] = []
        try:
            while self._begun or self._fresh:
                active, shape = self._next()
                try:
                    self._block(active, shape)
                except WorkerError as failed:
                    self._after(failed, active, shape)
        except (Interrupted, JobFailed) as end:
            self._stop(kill=isinstance(end, Interrupted))
            self._save([*active, *self._begun])
            raise
        finally:
            self._stop()
        return self.standing

    def _room(self, length: int, reserve: int) -> int:
        """Return the number of rows that may be in a batch: at least one, since every row fits alone."""
        rows = max(1, int(self._planned(length, reserve) * self._share))
        return rows if self._job.at_most is None else min(rows, self._job.at_most)

    def _candidates(self, more: Iterable[RequestRow] = ()) -> list[RequestRow]:
        """Return the rows that the next batch may be made of, in the order of packing: those that are begun, and as
        many others as keep the number of begun ones within bounds."""
        begun = [*self._begun, *more]
        count = MOST_ROWS if self._size is None else WINDOW * self._size - len(begun)
        return sorted([*begun, *self._fresh[: max(0, count)]], key=row_order)

    def _pack(self, rows: Iterable[RequestRow]) -> PlannedBatch:
        return pack(needs(rows), self._room, self._pace, self._positions, self.standing.ending)

    def _next(self) -> tuple[list[RequestRow], BatchShape]:
        """Take the rows of the next batch out of those that wait."""
        rows = self._candidates()
        shape = self._pack(rows).shape
        taken = rows[: shape.rows]
        keys = {row.key for row in taken}
        self._begun = [row for row in self._begun if row.key not in keys]
        self._fresh = [row for row in self._fresh if row.key not in keys]
        self._size = shape.rows
        return taken, shape

    def _block(self, active: list[RequestRow], shape: BatchShape) -> None:
        """Run a batch until its reserve is used up or another one is worth more; `active` keeps those that go on, which
        wait for the next batch afterwards."""
        self.standing.padded += shape.padded
        self.standing.needed += needed(shape, needs(active))
        answer = self._ask(BatchStart(rows=[batch_row(row) for row in active], reserve=shape.reserve))
        self._pace.saw_prefill(shape, answer.seconds)
        made, unlooked = answer.steps, 0.0
        self._take(answer, active)
        while active and made < shape.reserve:
            answer = self._ask(BatchStep())
            made += answer.steps
            unlooked += answer.seconds
            self._pace.saw_step(shape, made, answer.seconds / answer.steps)
            self._take(answer, active)
            if unlooked >= CHECK_S:
                unlooked = 0.0
                if active and self._better(Progress(shape, made, needs(active)), active):
                    break
        self._begun += active
        active.clear()

    def _better(self, now: Progress, active: list[RequestRow]) -> bool:
        if now.nearly_full:
            return False
        rows = self._candidates(active)
        following = self._pack(rows)
        fresh = {row.key for row in self._fresh}
        joining = [row.need for row in rows[: following.shape.rows] if row.key in fresh]
        return worth_packing_anew(now, following, joining, self._pace, self.standing.finishing)

    def _take(self, answer: BatchStepped, active: list[RequestRow]) -> None:
        """Process the worker's answer: tokens go to their rows, rows that ended to the disk."""
        standing, by_key = self.standing, {row.key: row for row in active}
        standing.seconds += answer.seconds
        records, ended = [], set()
        for step in answer.rows:
            row = by_key[step.key]
            row.output_ids += step.tokens
            standing.tokens += len(step.tokens)
            standing.left -= len(step.tokens)
            if step.error is not None:
                records.append(openai.failure(row.request, "nan_output", step.error))
            elif step.finish_reason is not None:
                records.append(self._answered(row, step.text, step.finish_reason))
            else:
                continue
            ended.add(row.key)
            self._end(row, failed=step.error is not None)
        self._job.ledger.add(records)
        active[:] = [row for row in active if row.key not in ended]
        self._given_up = 0
        if time.monotonic() - self._saved_at > SAVE_S:
            self._save([*active, *self._begun])
        self._job.progress(standing)

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

    def _save(self, rows: Iterable[RequestRow]) -> None:
        """Put on disk the tokens that unfinished rows have got since the last time."""
        rows = list(rows)
        self._job.ledger.save((row.request.id, row.saved, row.output_ids[row.saved :]) for row in rows)
        for row in rows:
            row.saved = len(row.output_ids)
        self._saved_at = time.monotonic()

    def _after(self, failed: WorkerError, active: list[RequestRow], shape: BatchShape) -> None:
        """Try the rows of a failed batch again in batches half as large, a few times."""
        if failed.status in FATAL:
            self._stop(kill=True)
        rows = list(active)
        active.clear()
        for row in rows:
            row.tries += 1
        lost = [row for row in rows if row.tries >= TRIES]
        self._begun += [row for row in rows if row.tries < TRIES]
        message = f"a batch of {shape.rows} failed ({failed.status}: {failed})"
        if lost:
            self._given_up += 1
            if self._given_up > 1:
                self._begun += lost
                raise JobFailed(f"{message}, and so did the one before; the same command goes on")
            self._job.ledger.add(openai.failure(row.request, failed.status, str(failed)) for row in lost)
            for row in lost:
                self._end(row, failed=True)
        if shape.rows > 1:
            self._share = shape.rows // 2 / max(1, self._planned(shape.length, shape.reserve))
            message += f"; going on with batches of {shape.rows // 2}"
        self._job.say(message)

    def _ask(self, request: Request[BatchStepped]) -> BatchStepped:
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
                refused = worker.load(job.plan)
        except WorkerDied as death:
            raise JobFailed(f"loading failed ({death.status}): {death}") from None
        if refused is not None:
            raise JobFailed(f"loading failed ({refused.status}): {refused.error}")
        self._loaded = True
        return worker

    def _stop(self, kill: bool = False) -> None:
        worker, self._worker, self._loaded = self._worker, None, False
        if worker is not None:
            if kill:
                worker.kill()
            worker.close()


def batch_row(row: RequestRow) -> BatchRow:
    """Return the facts of a row that the worker needs."""
    request = row.request
    sampling = Sampling(temperature=request.temperature, top_p=request.top_p, seed=request.seed)
    return BatchRow(
        key=row.key, prompt_ids=list(row.prompt_ids), output_ids=row.output_ids, left=row.need.left, sampling=sampling,
        stop=request.stop,
    )  # fmt: skip
