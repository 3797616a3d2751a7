"""Connections of the server: how many are open at a time, and how long each may wait for its client.

Nobody needs a key to connect. So a connection without a request under way is closed after a time, and at once where the
server has no room for another one; a client that reads nothing of its answer is left.
"""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # seconds in which the head of a request must have come, from its first byte, or from the connection
IDLE_S = 75.0  # seconds that a connection is kept for the next request: longer than the minute of most proxies
STALLED_S = 60.0  # seconds in which a client must have read part of an answer
SPARE_FILES = 64  # open files of the process that are no connections: the worker's pipes, libraries, logs
MAX_CONNECTIONS = 16_384  # connections whatever the limit on files, for each takes memory: some 25 kB
AT_ONCE = 64  # connections that are taken in together
SHORT_S = 1.0  # seconds without new connections after the system had no file or memory for one
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(H11Protocol):
    """Connection of a client, aborted if sending or reading takes too long."""

    def __init__(self, listener: "Listener", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config=listener.config, server_state=listener.server_state, app_state={}, _loop=loop)
        self._listener = listener
        self._wait: asyncio.TimerHandle | None = None  # for the head of a request
        self._begun = False  # True once part of that head has come
        self._stall: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> bool:
        """True while a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_wait()
        self.resume_writing()
        self._unset_keepalive_if_required()
        self._listener.lost(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answers:
            self._end_wait()
            if not self.cycle.more_body:
                self._listener.idle.pop(self, None)
        elif not self._begun:
            self._begun = True
            self._limit(HEAD_S)

    def on_response_complete(self) -> None:
        """Wait for the next request, whose first part may be there."""
        super().on_response_complete()
        if not self.answers:
            self._await_head(HEAD_S if self.transport.is_closing() else IDLE_S)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: this class's timer ends the wait, also of unread answers."""

    def shutdown(self) -> None:
        """End after the current request, or at once without one."""
        if self.answers:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _await_head(self, seconds: float) -> None:
        self._begun = False
        self._listener.idle[self] = None
        self._limit(seconds)

    def _limit(self, seconds: float) -> None:
        if self._wait is not None:
            self._wait.cancel()
        self._wait = self.loop.call_later(seconds, self.transport.abort)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None


class Listener(uvicorn.Server):
    """Server of uvicorn that accepts connections within the limit on files.

    Without room for a new connection, the one waiting longest for the whole of a request is closed; while
    all have one under way, others wait in the kernel's queue. Signals are left to the caller.
    """

    def __init__(self, config: uvicorn.Config, last_s: float, on_message: Callable[[str], None]) -> None:
        super().__init__(config)
        self._last_s = last_s
        self.idle: dict[Connection, None] = {}  # without a whole request, longest wait first
        self.max_connections = max_connections()
        self._on_message, self._complained_at = on_message, -60.0
        self._room = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for bound in sockets or []:
            self._accepting = asyncio.ensure_future(self._accept(bound))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: clients have `last_s` seconds to read their answers, then connections are aborted."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        late = asyncio.get_running_loop().call_later(self._last_s, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def lost(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self.idle.pop(connection, None)
        self._room.set()

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        bound.setblocking(False)
        while True:
            await _readable(bound)
            while len(self.server_state.connections) >= self.max_connections:
                self._room.clear()
                self._drop_idle()
                await self._room.wait()
            accepted, short = list[socket.socket](), None
            try:
                while len(accepted) < min(AT_ONCE, self.max_connections - len(self.server_state.connections)):
                    accepted.append(bound.accept()[0])
            except OSError as error:  # there is no other one, or its client was gone before
                short = error if error.errno in _SHORT else None
            make = partial(Connection, self, loop)
            connected = (loop.connect_accepted_socket(make, client) for client in accepted)
            await asyncio.gather(*connected, return_exceptions=True)  # a client may be gone
            if short is not None:
                self._complain(short)
                self._drop_idle()
                await asyncio.sleep(SHORT_S)

    def _drop_idle(self) -> None:
        if self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()

    def _complain(self, error: OSError) -> None:
        if time.monotonic() - self._complained_at >= 60:
            self._complained_at = time.monotonic()
            self._on_message(f"connections wait: {error.strerror}")


async def _readable(bound: socket.socket) -> None:
    """Wait until a client connects: a `sock_accept` of asyncio that is cancelled prints a traceback."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(bound, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(bound)


def max_connections() -> int:
    """Raise the limit on open files as far as this user may; return the connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(SPARE_FILES // 4, min(MAX_CONNECTIONS, soft - SPARE_FILES))
    )


def config(app: Any) -> uvicorn.Config:
    """Return the settings of uvicorn."""
    return uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False, ws="none")
