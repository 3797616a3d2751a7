"""Worker's end of the pipe: JSON lines in, answers and progress out."""

import gc
import json
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from zinfer.system.ending import with_parent
from zinfer.worker.session import MakeEngine, Session, import_engine, load

PROGRESS_S = 0.2  # between two messages of progress


class Server:
    """Server that answers commands with a `zinfer.worker.session.Session`."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._sent_at, self._stage = 0.0, ""
        self._session = Session(self._on_progress, {"load": partial(load, find=imported)})

    def serve(self, commands: IO[str]) -> None:
        """Answer line after line until the last one; then close the engine."""
        for line in commands:
            self._send(self._session.answer(json.loads(line)))
        self._session.close()

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(message) + "\n")
            self._answers.flush()

    def _on_progress(self, stage: str, share: float) -> None:
        if stage != self._stage or share >= 1 or time.monotonic() - self._sent_at > PROGRESS_S:
            self._sent_at, self._stage = time.monotonic(), stage
            self._send({"progress": stage, "share": share})


def imported(target: str, early: bool) -> MakeEngine:
    """Import an engine. Its libraries' 360,000 objects are kept from the garbage collector, whose every run would take
    0.3 s."""
    gc.disable()
    try:
        return import_engine(target, early)
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Serve a parent on stdin and stdout, and end with it; whatever else is printed goes to stderr."""
    with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Server(answers).serve(sys.stdin)


if __name__ == "__main__":
    main()
