"""Connections of the server: how many are open at a time, and how long each may wait for its client.

Nobody needs a key to connect. So a connection without a request under way is closed after a time, and at once where the
server has no room for another one; a client that reads nothing of its answer is left.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # seconds in which the head of the first request must have come
IDLE_S = 75.0  # seconds in which the next request must have come: longer than the minute of most proxies
STALLED_S = 60.0  # seconds in which a client must have read part of an answer
SPARE_FILES = 64  # open files of the process that are no connections: the worker's pipes, libraries, logs
MAX_CONNECTIONS = 16_384  # connections whatever the limit on files, for each takes memory: some 25 kB
AT_ONCE = 8  # connections that are taken in together, before one of them can be closed
WHOLE_DAY_S = 86_400  # uvicorn's own time for the next request, which would leave unread answers open
BACKLOG = 4096  # connections that wait to be taken in


class Connection(H11Protocol):
    """Connection of a client, aborted if slow. Beyond `limit` connections the first of `idle` is aborted."""

    def __init__(self, idle: dict["Connection", None], limit: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._idle, self._limit = idle, limit
        self._wait: asyncio.TimerHandle | None = None  # for the head of a request
        self._stall: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> bool:
        """True while a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(HEAD_S)
        if len(self.connections) > self._limit:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self._end_wait()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answers:
            self._end_wait()
            if not self.cycle.more_body:
                self._idle.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request, whose first part may be there."""
        super().on_response_complete()
        if not self.answers:
            self._await_head(HEAD_S if self.transport.is_closing() else IDLE_S)

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
        self._end_wait()
        self._idle[self] = None
        self._wait = self.loop.call_later(seconds, self.transport.abort)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None


class Listener(uvicorn.Server):
    """Server of uvicorn within the limit on open files. Signals are left to the caller."""

    def __init__(self, app: Any, last_s: float) -> None:
        connection: Any = partial(Connection, {}, max_connections())
        super().__init__(
            uvicorn.Config(
                app, http=connection, log_level="error", access_log=False, lifespan="off", server_header=False,
                ws="none", backlog=AT_ONCE, timeout_keep_alive=WHOLE_DAY_S,
            )
        )  # fmt: skip
        self._last_s = last_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: clients have `last_s` seconds to read their answers, then connections are aborted."""
        late = asyncio.get_running_loop().call_later(self._last_s, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def max_connections() -> int:
    """Raise the limit on open files as far as this user may; return the connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, soft - SPARE_FILES))
