"""Driver: the owner of a worker's life.

A worker is started when it is first needed, and again after a death. What is measured or generated, and what becomes of
the rows of a worker that failed, is the caller's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from zinfer.job.signals import Signals
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Status
from zinfer.worker.process import Client, LoadFailed, WorkerDied, WorkerError

MANY = 16  # rows of a failed batch above which a quarter of them is tried next, not half
FATAL: frozenset[Status] = frozenset({"crashed", "timeout"})  # the worker is of no use after them


@dataclass(eq=False)
class Driver:
    """Owner of a worker: starts, loads, lends, restarts and ends it. `on_loading` is called before each load; `signals`
    raise Interrupted only while the worker is waited for."""

    make_worker: Callable[[], Client]
    on_loading: Callable[[Plan], object] = lambda _plan: None
    signals: Signals | None = None
    loaded: bool = field(default=False, init=False)
    _worker: Client | None = field(default=None, init=False)

    def start(self) -> Client:
        """Start the process, if there is none, without a load."""
        if self._worker is None:
            self._worker = self.make_worker()
        return self._worker

    def load(self, plan: Plan, early: bool = False) -> None:
        """Load `plan`'s engine unless one is loaded. With `early` begin it only. Raises LoadFailed, WorkerDied."""
        if self.loaded:
            return
        self.on_loading(plan)
        worker = self.start()
        try:
            with self._interruptible():
                worker.load(plan, early)
        except WorkerError:
            self.end()
            raise
        self.loaded = True

    @contextmanager
    def lend(self) -> Iterator[Client]:
        """Lend the loaded worker, in whose calls signals are raised. It is ended if it dies, or its load fails."""
        assert self._worker is not None
        try:
            with self._interruptible():
                yield self._worker
        except (WorkerDied, LoadFailed):
            self.end()
            raise

    def failed(self, error: WorkerError) -> bool:
        """End the worker if it is of no use after `error`. Return whether it is gone."""
        if error.status in FATAL:
            self.end(kill=True)
        return not self.loaded

    def kill(self) -> None:
        """Kill the process, from any thread. A call that waits for it fails."""
        if (worker := self._worker) is not None:
            worker.kill()

    def end(self, kill: bool = False) -> None:
        """End the worker, in order or at once. Safe to call twice."""
        worker, self._worker, self.loaded = self._worker, None, False
        if worker is not None:
            if kill:
                worker.kill()
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End the worker: in order, or at once after another's exception."""
        self.end(kill=error is not None and not isinstance(error, WorkerError))

    def _interruptible(self) -> AbstractContextManager[None]:
        return nullcontext() if self.signals is None else self.signals.raised()


class Window:
    """Limit of the rows in a worker. None until one fails, then fewer, and more again as rows end. With `lasting` it
    never exceeds half of the rows with which a worker failed; otherwise it goes once it is large."""

    def __init__(self, lasting: bool = False) -> None:
        self._lasting, self._failed, self._ended = lasting, 0, 0
        self.limit: int | None = None

    def shrink(self, rows: int) -> int:
        """Take note of a failure with `rows` rows; return the new limit."""
        self._failed = max(self._failed, rows)
        self.limit, self._ended = max(1, rows // (4 if rows > MANY else 2)), 0
        return self.limit

    def grow(self, ended: int) -> None:
        """Take note of rows that ended. The limit doubles after that many."""
        self._ended += ended
        if self.limit is None or self._ended < self.limit:
            return
        self._ended = 0
        if self._lasting:
            self.limit = max(self.limit, min(2 * self.limit, self._failed // 2))
        else:
            self.limit = 2 * self.limit if self.limit < MANY else None
