"""Worker's end of the pipe: JSON lines in, one answer each, progress in between."""

import gc
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zinfer.system.ending import with_parent
from zinfer.worker.session import Session, load_with
from zinfer.worker.tasks import Load, Loaded

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

BEAT_SECONDS = 0.2  # between two messages of progress


class Server:
    """Server that answers requests with a `zinfer.worker.session.Session`."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._last_beat, self._last_stage = 0.0, ""
        self._session = Session(self._beat, {"load": load})

    def serve(self, requests: IO[str]) -> None:
        """Answer line after line until the last one; then close the engine."""
        for line in requests:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None  # the session says that it is no request
            self._say(self._session.answer(message))
        self._session.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(message) + "\n")
            self._answers.flush()

    def _beat(self, what: str, share: float) -> None:
        if what != self._last_stage or share >= 1 or time.monotonic() - self._last_beat > BEAT_SECONDS:
            self._last_beat, self._last_stage = time.monotonic(), what
            self._say({"progress": what, "share": share})


def load(session: Session, request: Load) -> Loaded:
    """Import the engine class at the request's target, and load it."""
    return load_with(session, request, lambda: imported(request.target).start)


def imported(target: str) -> "type[Engine]":
    """Import and return the engine class at ``module:Class``; the garbage collector never looks at the libraries again.

    They are 360,000 objects for the whole life of this process: looking at them again and again during the import and
    at the end takes a quarter of the time of both, and each collection before a point takes 0.3 s.
    """
    gc.disable()
    try:
        from zinfer.engine import base

        return base.load(target)
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Serve a parent on stdin and stdout; anything else that is printed goes to stderr. Ends with the parent, and is
    the first to be killed when host memory runs out."""
    with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Server(answers).serve(sys.stdin)


if __name__ == "__main__":
    main()
