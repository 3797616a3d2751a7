"""Signals during a job, acted on where no record is lost."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from zinfer.system import ending


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM as an exception; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.signal).name


class Signals:
    """Context that defers SIGINT and SIGTERM. They raise Interrupted only inside `raised`, where a worker is waited
    for. Elsewhere they wait for the next `raised`, so that no record is lost between its measurement and the disk. With
    other `numbers` only those signals are handled so. `on_signal` is called for each."""

    def __init__(self, *numbers: int, on_signal: Callable[[int], object] = lambda _number: None) -> None:
        self._numbers, self._on_signal = numbers or ending.SIGNALS, on_signal
        self.pending: int | None = None
        self._waiting = False

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        with suppress(ValueError):  # not in the main thread, which alone can handle signals
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and jobs of a cluster have it
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        ending.handed_back()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let signals raise Interrupted within the block, also earlier ones. A library within may turn the exception
        into an error of its own (pydantic does so without a cause), or drop it: it is raised again at the end of the
        block."""
        try:
            self._waiting = True
            self._raise_pending()
            yield
        except BaseException:
            self._raise_pending()
            raise
        finally:
            self._waiting = False
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self.pending is not None:
            raise Interrupted(self.pending) from None

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        self.pending = number
        self._on_signal(number)
        if self._waiting:
            raise Interrupted(number)
