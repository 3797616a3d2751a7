"""Signals during a job, acted on where no record is lost."""

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from zinfer.system import ending

SOON_S = 0.02  # in which a finaliser, and the hook that learns of its exception, have returned


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM as an exception; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.signal).name


@contextmanager
def kept(thrown: list[KeyboardInterrupt]) -> Iterator[None]:
    """Raise at the block's end a signal's exception lost within it.

    A handler that raises notes its exception in `thrown`. It may be raised within any call of a library, which may turn
    it into an error of its own (pydantic does so without a cause) or drop it (as Python does in a finaliser).
    """
    try:
        yield
    except KeyboardInterrupt as raised:
        if thrown and type(raised) is KeyboardInterrupt:  # as Ray has it, which drops the signal's number
            raise _again(thrown[-1]) from None
        raise
    except BaseException:
        if thrown:
            raise _again(thrown[-1]) from None
        raise
    if thrown:
        raise _again(thrown[-1])


def _again(thrown: KeyboardInterrupt) -> KeyboardInterrupt:
    return type(thrown)(*thrown.args)


def _send_soon(number: int) -> None:
    time.sleep(SOON_S)
    os.kill(os.getpid(), number)


class Signals:
    """Context that defers SIGINT and SIGTERM. They raise Interrupted only inside `raised`, where a worker is waited
    for. Elsewhere they wait for the next `raised`, so that no record is lost between its measurement and the disk.

    With other `numbers` only those signals are handled so. `on_signal` is called for each."""

    def __init__(self, *numbers: int, on_signal: Callable[[int], object] = lambda _number: None) -> None:
        self._numbers, self._on_signal = numbers or ending.SIGNALS, on_signal
        self.pending: int | None = None
        self._waiting = False
        self._thrown: list[KeyboardInterrupt] = []

    def __enter__(self) -> "Signals":
        self._before = {}
        with suppress(ValueError):  # not in the main thread, which alone can handle signals
            self._before = {number: signal.signal(number, self._arrived) for number in self._numbers}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        ending.handed_back()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let signals raise Interrupted within the block, also earlier ones."""
        thrown = self._thrown = []
        with kept(thrown), self._not_dropped():
            self._waiting = True
            try:
                if self.pending is not None:
                    raise Interrupted(self.pending)
                yield
            finally:
                self._waiting = False

    @contextmanager
    def _not_dropped(self) -> Iterator[None]:
        """Send a signal again if Python dropped its exception in a finaliser."""
        before = sys.unraisablehook

        def dropped(what: "sys.UnraisableHookArgs") -> None:
            if isinstance(what.exc_value, Interrupted):
                self._waiting = True
                _thread.start_new_thread(_send_soon, (what.exc_value.signal,))
            else:
                before(what)

        sys.unraisablehook = dropped
        try:
            yield
        finally:
            sys.unraisablehook = before

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        self.pending = number
        self._on_signal(number)
        if self._waiting:
            self._waiting = False  # a second signal must not prevent the record of the first
            self._thrown.append(Interrupted(number))
            raise self._thrown[-1]
