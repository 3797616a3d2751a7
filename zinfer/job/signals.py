"""Signals (SIGINT and SIGTERM) during a job: noticed at once, acted on at points where no record is lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from zinfer.spec import ending


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM as an exception; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name


class Signals:
    """Context that defers SIGINT and SIGTERM: they raise Interrupted only inside `raised`, where a worker is waited
    for. Elsewhere they wait for the next `raised`, so that no record is lost between its measurement and the disk."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._waiting = False

    def __enter__(self) -> "Signals":
        self._before = {}
        with suppress(ValueError):  # not in the main thread, which alone can handle signals
            self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        ending.handed_back()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let signals raise Interrupted within the ``with`` block, also one that arrived before."""
        self._waiting = True
        try:
            if self._pending is not None:
                raise Interrupted(self._pending)
            yield
        finally:
            self._waiting = False

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        self._pending = number
        if self._waiting:
            self._waiting = False  # a second signal must not prevent the record of the first
            raise Interrupted(number)
