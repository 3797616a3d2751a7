"""Worker's end of the pipe: JSON lines in, one answer each, progress in between."""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from zinfer.spec.ending import with_parent
from zinfer.worker.session import Session

BEAT_SECONDS = 0.2  # between two messages of progress


class Server:
    """Server that answers requests with a `zinfer.worker.session.Session`."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._last_beat, self._last_stage = 0.0, ""
        self._session = Session(self._beat)

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
