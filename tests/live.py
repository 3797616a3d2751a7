"""The report served by a process of its own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from tests.command import started


@contextmanager
def live(folder: Path, *words: str) -> Iterator[tuple[str, "Popen[str]"]]:
    """Run `zinfer report --serve` in `folder`; give its address and its process, which ends with the block."""
    with started(folder, "report", "--serve", "--port", "0", *words) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[4].rstrip(","), process
        finally:
            process.send_signal(signal.SIGINT)
