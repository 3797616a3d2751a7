"""Signals as exceptions: they come out of the block that lets them in, whatever a library makes of them."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import pytest
from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

import zinfer.cli as command_line
from zinfer.commands.run import Stop
from zinfer.core.errors import ZinferError
from zinfer.job.accuracy import AccuracyStudy
from zinfer.job.signals import Interrupted, Signals
from zinfer.system.ending import interruption
from zinfer.worker.process import TaskFailed

NUMBERS = [signal.SIGINT, signal.SIGTERM]


class Written(BaseModel):
    """Model whose serialiser is interrupted by `number`."""

    number: int

    @model_serializer(mode="wrap")
    def _write(self, fields: SerializerFunctionWrapHandler) -> object:
        os.kill(os.getpid(), self.number)
        return fields(self)


def swallowed(number: int) -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), number)


def replaced(number: int) -> None:
    try:
        os.kill(os.getpid(), number)
    except BaseException:
        raise ValueError("a library's own") from None


def unnumbered(number: int) -> None:
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None


def as_json(number: int) -> None:
    Written(number=number).model_dump_json()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("library", [as_json, swallowed, replaced, unnumbered])
def test_a_signal_that_a_library_wraps_or_drops_is_an_interrupt(library: Callable[[int], None], number: int) -> None:
    with Signals() as signals, pytest.raises(Interrupted) as caught:  # noqa: PT012
        with signals.raised():
            library(number)
        pytest.fail("the block ended as if nothing had come")
    assert caught.value.signal == number


def test_other_errors_are_not_interrupts() -> None:
    with Signals() as signals:
        with pytest.raises(ValueError, match="its own"), signals.raised():
            raise ValueError("its own")
        with signals.raised():
            pass


@pytest.mark.parametrize("library", [as_json, swallowed, replaced])
def test_the_second_ctrl_c_in_an_answer_is_not_lost(library: Callable[[int], None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Stop() as stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        library(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (Interrupted(15), ["kill", "close"]),
        (ValueError("a library's own"), ["kill", "close"]),  # which may stand for a signal
        (TaskFailed("oom_host", "no memory"), ["close"]),
    ],
)
def test_the_worker_of_a_study_is_not_waited_for(error: BaseException, calls: list[str]) -> None:
    client, nothing = Mock(), Mock()
    with pytest.raises(type(error)), AccuracyStudy(nothing, (), "", 1, lambda: client)._worker(nothing):
        raise error
    assert [name for name, *_ in client.method_calls if name != "load"] == calls


def chained(cause: BaseException, error: BaseException, how: str = "__cause__") -> BaseException:
    setattr(error, how, cause)
    return error


in_context = partial(chained, how="__context__")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (chained(Interrupted(15), RuntimeError("wrapped")), 143),
        (chained(chained(KeyboardInterrupt(), ValueError()), RuntimeError("twice")), 130),
        (in_context(Interrupted(2), TypeError("while it was handled")), 130),
        (BaseExceptionGroup("of tasks", [ValueError(), chained(Interrupted(15), ValueError())]), 143),
        (Interrupted(15), 143),  # click turns it into Abort
        (RuntimeError("Interrupted: 15"), 1),  # a text alone says nothing
        (in_context(Interrupted(15), ZinferError("the disk is full")), 2),  # an error of its own that must be told
    ],
)
def test_an_error_that_a_signal_led_to_ends_as_interrupted(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(command_line.cli, "invoke", fails)
    monkeypatch.setattr("sys.argv", ["zinfer", "plan", "--list", "models"])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == code
    assert ("interrupted\n" in capfd.readouterr().err) is (code > 128)


def test_a_chain_that_bites_its_tail_is_no_interrupt() -> None:
    first, second = ValueError(), RuntimeError()
    first.__context__, second.__context__ = second, first
    assert interruption(first) is None
    assert interruption(None) is None
