"""Keeper of a server: ``python -m zinfer.engine.server.keeper COMMAND ..`` ends it with all that it started.

It waits for the end of its standard input, that is of the process that started it, however that ended, or of the
command. Processes that leave the command's group or session become its own children, so none is missed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
PATIENCE_S = 5.0  # for the command to end in order


def end_all(server: "subprocess.Popen[bytes]") -> None:
    """End the command, then kill whatever is left below this process."""
    with suppress(OSError):
        server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(PATIENCE_S)
    this = psutil.Process()
    while below := [process for process in this.children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]:
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=1.0)


def main() -> None:
    """Run the command in the arguments. The exit code is the command's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_before_the_command, start_new_session=True
        )
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")

    def watch() -> None:
        os.read(0, 1)  # nothing is ever written: it returns at the end
        end_all(server)

    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    end_all(server)
    raise SystemExit(code if code >= 0 else 128 - code)


def _before_the_command() -> None:
    """Handle signals as usual, and end with this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
