"""Entry of the console script, and of ``python -m zinfer``: handles signals before anything else is imported."""

import os
import signal


def _interrupted(number: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line. A signal ends it with one line, also while it is being imported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)
    from zinfer.cli import main as run
    from zinfer.spec.ending import handle_signals, with_parent

    with_parent()
    handle_signals()
    run()


if __name__ == "__main__":
    main()
