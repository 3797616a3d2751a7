"""Server process: the socket, the event loop, and the end in order."""

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zinfer.core.case import Workload
from zinfer.job.openai import ServerLimits
from zinfer.job.serve.app import Desk, make_app
from zinfer.job.serve.connections import Listener, config
from zinfer.job.serve.dispatcher import Dispatcher, Settings
from zinfer.job.serve.metrics import Metrics
from zinfer.job.serve.reading import Tokenizes
from zinfer.job.signals import Signals
from zinfer.plan.planner import Plan
from zinfer.system import ending
from zinfer.worker.process import Client

BACKLOG = 4096  # connections that wait to be taken in
LINES = 1000  # about requests, which wait to be written
LAST_S = 5  # seconds in which clients must have read the answers that were ready at the end
GRACE_S = 5  # seconds after those, and after the drain, in which the process ends whatever the event loop is at
SECOND_S = 2.0  # the same after a second signal


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 is any free one. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    # Who comes before the event loop runs waits for it.
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)


class Log:
    """Log of requests, written by a thread: the event loop waits for no terminal, and too many lines are left out."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: queue.Queue[str] = queue.Queue(LINES)
        self._left_out = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def add(self, line: str) -> None:
        """Have a line written."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._left_out += 1

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            left_out, self._left_out = self._left_out, 0
            with suppress(OSError, ValueError):  # nobody reads
                self._write(line if not left_out else f"({left_out:,} requests left out)\n{line}")


class HttpServer:
    """HTTP server of one model."""

    def __init__(
        self,
        plan: Plan,
        make_worker: Callable[[], Client],
        load: Workload,
        settings: Settings,
        bound: socket.socket,
        tokenizer: Tokenizes,
        *,
        on_message: Callable[[str], None] = lambda _text: None,
        on_loading: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._settings, self._socket, self._on_message = settings, bound, on_message
        self.metrics, self.desk = Metrics(), Desk()
        self.dispatcher = self.desk.dispatcher = Dispatcher(
            plan, make_worker, load, settings, self.metrics, self._post, tokenizer, on_message=on_message,
            on_loading=on_loading, on_ready=on_ready, on_end=lambda: self._from_outside(self._end),
        )  # fmt: skip
        limits = ServerLimits(plan.model.vocab_size, settings.max_waiting)
        app = make_app(self.desk, settings, limits, self.metrics, Log(log).add if log else lambda _line: None)
        self._listener = Listener(config(app), LAST_S, on_message)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.signal: int | None = None  # signal that ended it

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def run(self) -> str | None:
        """Serve until a signal, `drain`, or the worker ends it for good; return the worker's fault, if it was that."""
        with ending.within(self._settings.drain_s + LAST_S + GRACE_S, SECOND_S), Signals(on_signal=self._arrived):
            asyncio.run(self._run())
        return self.dispatcher.fault

    def drain(self) -> None:
        """Begin to end: running requests have their time, new ones are refused. A second call ends them at once.

        For any thread, and for handlers of signals.
        """
        self._from_outside(self._drain)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.dispatcher.start()
        try:
            await self._listener.serve([self._socket])
        finally:
            await asyncio.to_thread(self.dispatcher.stop)

    def _post(self, updates: Any) -> None:
        self._from_outside(self.desk.deliver, updates)

    def _from_outside(self, call: Callable[..., object], *values: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *values)

    def _arrived(self, number: int) -> None:
        self.signal = number
        self.drain()

    def _drain(self) -> None:
        if self._draining is not None:
            self._listener.should_exit = self._listener.force_exit = True
            return
        self.dispatcher.drain()
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        if self.dispatcher.unfinished:
            self._on_message(f"ending: {self.dispatcher.unfinished} rows have {self._settings.drain_s:g} s")
        until = time.monotonic() + self._settings.drain_s
        while self.dispatcher.unfinished and time.monotonic() < until and not self._listener.should_exit:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.dispatcher.stop)

    def _end(self) -> None:
        """Close socket and connections once all answers and failures are sent; the dispatcher has ended."""
        self._listener.should_exit = True
