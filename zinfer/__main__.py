"""Entry of the console script, and of ``python -m zinfer``: handles signals before anything else is imported."""

import os
import signal
import sys


def _interrupted(number: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Open the null device in place of stdin, stdout or stderr that the caller has closed.

    Else the next file that is opened gets their number, and what is meant for stderr would be written into it.
    """
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
    if os.environ.get("RANK", "0") != "0" and _follow():
        return
    from zinfer.cli import main as run
    from zinfer.spec.ending import handle_signals, with_parent

    with_parent()
    handle_signals()
    run()


def _follow() -> bool:
    """Be a rank beside rank 0, which runs the command, if torchrun has started this process; return whether it has."""
    import time

    from zinfer.spec import torchrun

    try:
        launch = torchrun.launched()
        if launch is None:
            return False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # rank 0 says so
        if launch.local != launch.size:
            time.sleep(torchrun.FIRST_S)  # rank 0 refuses this
            sys.exit(2)
        os.dup2(2, 1)
        if (joined := launch.join()) is not None:
            from zinfer.engine.team import follow

            follow(*joined)
    except torchrun.TorchrunError as error:
        sys.exit(f"Error: {error}")
    return True


if __name__ == "__main__":
    main()
