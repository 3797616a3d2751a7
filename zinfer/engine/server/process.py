"""Process of a server: its port, its log, its memory, and its end."""

import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from zinfer.core.progress import Progress
from zinfer.engine import EngineError

SAMPLE_S = 0.5  # between two readings of memory
POLL_S = 0.2  # between two questions whether it is ready
END_S = 15.0  # for the keeper to end it
LOG_LINES = 5  # of the log in an error
KEY = "ZINFER_SERVER_KEY"  # environment variable: the key that a server asks for


class ServerDied(RuntimeError):
    """Server that ended, or does not answer any more."""


class Address(NamedTuple):
    """Address of a server."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        """Return the address in ``http://host:port``. Raises EngineError."""
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
                raise ValueError
            return cls(parts.hostname, parts.port or 80)
        except ValueError:
            raise EngineError(f"url={url[:80]}: write http://HOST:PORT") from None

    def connection(self, timeout_s: float | None = None) -> http.client.HTTPConnection:
        """Return a connection, not opened yet."""
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises OSError and HTTPException."""
        with closing(self.connection(timeout_s)) as connection:
            connection.request("GET", path, headers=headers())
            answer = connection.getresponse()
            return answer.status, answer.read()


def headers() -> dict[str, str]:
    key = os.environ.get(KEY)
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def free_port() -> socket.socket:
    """Keep a free port of this machine from others. They may bind it, but only if they name it."""
    kept = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # a server sets the one or the other
        kept.setsockopt(socket.SOL_SOCKET, option, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


class ServerProcess:
    """Command that serves, with all that it starts. It ends with this process, however that ends."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "zinfer.engine.server.keeper", *words],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._name = os.path.basename(words[0])
        self.pid = self._keeper.pid  # of the process above the server

    @property
    def alive(self) -> bool:
        return self._keeper.poll() is None

    def died(self, what: str = "ended") -> ServerDied:
        """Return the error of a server that is gone. It has the end of its log."""
        with suppress(subprocess.TimeoutExpired):  # the log is whole once it has ended
            self._keeper.wait(1.0)
        code = self._keeper.poll()
        how = what if code is None else f"ended with exit code {code}"
        return ServerDied(f"{self._name} {how}; its log ends: {self.tail() or 'nothing was logged'}")

    def tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 8192))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self._log.read().decode(errors="replace")).splitlines()
        return " | ".join(line.strip()[:200] for line in lines[-40:] if line.strip())[-200 * LOG_LINES :]

    def close(self) -> None:
        """End the server. Safe to call twice."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(END_S)
        self._keeper.kill()
        self._keeper.wait()
        self._log.close()


def wait_ready(
    address: Address, path: str, seconds: float, server: ServerProcess | None, on_progress: Progress
) -> None:
    """Wait until `path` answers with status 200. Raises ServerDied for one that ends, EngineError after `seconds`."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        on_progress("starting", waited / seconds)
        with suppress(OSError, http.client.HTTPException):
            if address.get(path)[0] == 200:
                return
        if server is not None and not server.alive:
            raise server.died()
        time.sleep(POLL_S)
    log = f"; its log ends: {server.tail()}" if server is not None else ""
    raise EngineError(f"the server was not ready after {seconds:g} s (-O ready_s=..){log}")


class MemoryWatch:
    """Peak memory of all that a process started, sampled.

    Memory of the host is what they hold in RAM, files that they map included. Memory of the GPUs is what was taken
    since this watch began: other programs should not begin or end meanwhile.
    """

    def __init__(self) -> None:
        self.pid: int | None = None  # the process that is watched
        self._handles = list[Any]()
        self._nvml: Any = None
        with suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._nvml, self._handles = pynvml, [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        self._before = self._used()
        self.host_peak = self.gpu_peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.host_peak = self.gpu_peak = 0
        self._read()

    @property
    def gpu(self) -> tuple[int, int] | None:
        """Peak bytes taken on all GPUs, and bytes in use; None without a GPU."""
        return (self.gpu_peak, self._used()) if self._handles else None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._read()

    def _read(self) -> None:
        self.gpu_peak = max(self.gpu_peak, self._used() - self._before)
        size = 0
        with suppress(psutil.NoSuchProcess):  # all processes below the keeper
            for process in psutil.Process(self.pid).children(recursive=True) if self.pid is not None else ():
                with suppress(psutil.NoSuchProcess):
                    size += process.memory_info().rss
        self.host_peak = max(self.host_peak, size)

    def _used(self) -> int:
        with suppress(Exception):
            used: int = sum(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
            return used
        return 0
