"""Worker's end of the socket: commands in, answers and progress out."""

import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from zinfer.system.ending import with_parent
from zinfer.worker.session import Session

PROGRESS_S = 0.2  # between two messages of progress


class Server:
    """Server that answers commands with a `zinfer.worker.session.Session`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._sent_at, self._stage = 0.0, ""
        self._session = Session(self._on_progress)

    def serve(self) -> None:
        """Answer command after command until the parent's end is closed; then close the engine."""
        with suppress(EOFError):
            while True:
                self._send(self._session.answer(self._connection.recv()))
        self._session.close()

    def _send(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def _on_progress(self, stage: str, share: float) -> None:
        if stage != self._stage or share >= 1 or time.monotonic() - self._sent_at > PROGRESS_S:
            self._sent_at, self._stage = time.monotonic(), stage
            self._send((stage, share))


def main() -> None:
    """Serve the parent on the socket at stdin; end with it."""
    with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(os.dup(0))  # which programs that are started do not have
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Server(connection).serve()


if __name__ == "__main__":
    main()
