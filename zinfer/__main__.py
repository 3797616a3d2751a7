"""Entry point; handles signals before other imports."""

import os
import signal
import sys


def _interrupted(number: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Open the null device for a closed standard stream: the next file would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> None:
    """Run the command line. A signal ends it with one line, also while it is being imported."""
    _open_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)
    from zinfer.cli import main as run
    from zinfer.system.ending import handle_signals, with_parent

    with_parent()
    handle_signals()
    run()


if __name__ == "__main__":
    main()
