"""Server process: the socket, the event loop, and the end in order."""

import asyncio
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from zinfer.job.serve.app import Desk, deliver, make_app
from zinfer.job.serve.connections import BACKLOG, Listener
from zinfer.job.serve.dispatcher import Dispatcher
from zinfer.job.signals import Signals

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


def logged(write: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that has a thread write lines. Where too many wait, they are dropped."""
    lines: queue.Queue[str] = queue.Queue(LINES)

    def run() -> None:
        while True:
            with suppress(OSError, ValueError):  # nobody reads
                write(lines.get())

    def add(line: str) -> None:
        with suppress(queue.Full):
            lines.put_nowait(line)

    threading.Thread(target=run, name="log", daemon=True).start()
    return add


class HttpServer:
    """HTTP server of one model."""

    def __init__(self, dispatcher: Dispatcher, bound: socket.socket, log: Callable[[str], None] | None = None) -> None:
        self.dispatcher, self.desk, self._socket = dispatcher, Desk(dispatcher), bound
        dispatcher.post = partial(self._from_outside, deliver)
        dispatcher.on_end = partial(self._from_outside, self._end)
        self._drain_s = dispatcher.settings.drain_s
        self._listener = Listener(make_app(self.desk, logged(log) if log else lambda _line: None), LAST_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.signal: int | None = None  # signal that ended it
        self._late: list[threading.Timer] = []  # each ends the process after a signal, unless the server ends in time

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def run(self) -> str | None:
        """Serve until a signal, `drain`, or the worker ends it for good; return the worker's fault, if it was that."""
        try:
            with Signals(on_signal=self._arrived):
                asyncio.run(self._run())
        finally:
            for late in self._late:
                late.cancel()
        return self.dispatcher.fault

    def drain(self) -> None:
        """End once running requests have had their time. At a second call at once; from any thread."""
        self._from_outside(self._drain)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.dispatcher.start()
        try:
            await self._listener.serve([self._socket])
        finally:
            await asyncio.to_thread(self.dispatcher.stop)

    def _from_outside(self, call: Callable[..., object], *values: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *values)

    def _arrived(self, number: int) -> None:
        seconds = self._drain_s + LAST_S + GRACE_S if self.signal is None else SECOND_S
        late = threading.Timer(seconds, os._exit, (128 + number,))
        late.daemon = True
        late.start()
        self._late.append(late)
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
            self.dispatcher.on_message(f"ending: {self.dispatcher.unfinished} rows have {self._drain_s:g} s")
        until = time.monotonic() + self._drain_s
        while self.dispatcher.unfinished and time.monotonic() < until and not self._listener.should_exit:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.dispatcher.stop)

    def _end(self) -> None:
        """Close socket and connections once all answers and failures are sent; the dispatcher has ended."""
        self._listener.should_exit = True
