"""Ends of a process: at a signal, with its parent, and together with all that it started.

A command that is interrupted says so in one line, removes what it owns (`zinfer.system.scratch`) and ends with 128 and
the signal's number, within three seconds: a Python handler waits for the end of a call into C, so a thread sees to it.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from zinfer.system import scratch

PARENT = "ZINFER_PARENT"  # environment variable: the process to end with
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 1.0  # for a call into C to return, and again for what has to be done last
RECENT_S = 2.0  # after a context put the handler back, in which a signal may have been its
NO_GPU_MEMORY, NO_HOST_MEMORY = MEMORY_CODES = (101, 102)  # exit codes of a process that cannot go on without memory
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Waits for the end of its standard input, that is of the process that holds the other end; then ends the whole group.
KEEPER = 'trap "" INT TERM HUP; read -r _; kill -KILL 0'
SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # and an empty line, in place of a progress display

_callbacks: list[Callable[[], object]] = []
_ending = False
_handed_back = -RECENT_S


def at_end(callback: Callable[[], object]) -> Callable[[], None]:
    """Call `callback` when a signal ends this process; return a function that cancels this."""
    _callbacks.append(callback)

    def cancel() -> None:
        with suppress(ValueError):
            _callbacks.remove(callback)

    return cancel


def handle_signals() -> None:
    """End this process in order at SIGINT and SIGTERM. One that was started with these ignored goes on.

    For the main thread of a command; a context that handles a signal itself (`zinfer.job.signals`) replaces this for
    its time.
    """
    atexit.register(_ignore_signals)  # the first one is called last
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _arrived)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _ignore_signals() -> None:
    """Ignore signals, which would change the exit code, while Python ends."""
    for number in SIGNALS:
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)


def handed_back() -> None:
    """Note that a context has put the handler back: a signal that it handled does not end the process."""
    global _handed_back
    _handed_back = time.monotonic()


def interruption(error: BaseException | None) -> int | None:
    """Return the signal that `error` or its cause stands for, or None. Unnamed, it is SIGINT."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        if isinstance(cause, KeyboardInterrupt):
            return int(getattr(cause, "signal", signal.SIGINT))
        seen.add(id(cause))
        waiting += [*getattr(cause, "exceptions", ()), cause.__context__, cause.__cause__]
    return None


def _arrived(number: int, _frame: FrameType | None) -> None:
    _end(number)


def _watch(reader: int) -> None:
    """Wait for signals; end the process where the main thread does not come to do so in time."""
    while True:
        number = os.read(reader, 1)[0]
        taken = signal.getsignal(number) is not _arrived or time.monotonic() - _handed_back < RECENT_S
        if number not in SIGNALS or taken:  # a context may have had it: this thread may be late
            continue
        time.sleep(PATIENCE_S)
        if not _ending:
            threading.Thread(target=_end, args=(number,), daemon=True).start()
        time.sleep(PATIENCE_S)
        os._exit(128 + number)


def _end(number: int) -> None:
    """Run the callbacks, remove scratch, and exit; a second signal exits at once."""
    global _ending
    if not _ending:
        _ending = True
        if threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # a write to stdout may be under way
                sys.stdout.flush()
        with suppress(OSError):
            os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"interrupted\n")
        for callback in reversed(_callbacks):
            with suppress(Exception):
                callback()
        with suppress(Exception):
            scratch.cleanup()
    os._exit(128 + number)


def with_parent() -> None:
    """End this process with the parent that `PARENT` names, and its group."""
    parent = os.environ.pop(PARENT, "")
    if not parent.isdigit():
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)  # the parent was gone before the request took effect
    if os.getpgrp() == os.getpid():
        _keep()


def _keep() -> None:
    """Start a shell that ends this process's group: children do not inherit `with_parent`'s request."""
    import subprocess

    reader, writer = os.pipe()  # closed in programs that are started
    with suppress(OSError):
        subprocess.Popen(
            ["/bin/sh", "-c", KEEPER], stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
    os.close(reader)
    os.register_at_fork(after_in_child=lambda: os.close(writer))
