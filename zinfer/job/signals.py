"""SIGINT and SIGTERM while something is measured or answered: heard at once, acted upon where nothing is lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM; `signal` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name


class Signals:
    """While it is entered: the exception Interrupted inside `raised`, where a worker is waited for, held back until the
    next such wait everywhere else, so that no record is lost between its measurement and the disk."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._waiting = False

    def __enter__(self) -> "Signals":
        self._before = {}
        with suppress(ValueError):  # not in the main thread: signals are somebody else's
            self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
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
            self._waiting = False  # a second signal does not cut off the record of the first
            raise Interrupted(number)
