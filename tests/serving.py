"""Server in this process, on the loopback, with an engine-less worker."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests import PATIENCE_S, wait
from tests.inline_batch import InlineRows, InlineTokenizer
from zinfer.core.case import Workload
from zinfer.core.request import Request, Update
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.serve.dispatcher import Dispatcher, Settings
from zinfer.job.serve.server import HttpServer, listen
from zinfer.plan.planner import Plan
from zinfer.worker.process import Client
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStart, BatchStarted, BatchStep, BatchStepped

NAME = "tiny"
LOAD = Workload(batch_size=8, input_len=60, output_len=40)


class Server:
    """Server in a thread, and a plain client of it."""

    def __init__(self, server: HttpServer) -> None:
        self.server, self.dispatcher = server, server.dispatcher
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.fault = self.server.run()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"

    def start(self) -> None:
        self._thread.start()

    def sent(self, body: Any, *headers: str, length: int | None = None, buffer: int | None = None) -> socket.socket:
        """Send a `request` and read nothing; `buffer` bytes of its answer find room."""
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.server.port))
        connection.sendall(request(body, *headers, length=length))
        return connection

    def ask(self, path: str, *request: Any, **settings: Any) -> tuple[int, Any, dict[str, str]]:
        return ask(self.server.port, path, *request, **settings)

    def wait(self, fact: Callable[[], object]) -> None:
        wait(fact, 60.0)

    def metric(self, name: str) -> float:
        lines = self.dispatcher.metrics.text().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def end(self) -> None:
        self.server.drain()
        self._thread.join(60)
        assert not self._thread.is_alive()


def ask(
    port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Return an answer's status, body and headers. The body is parsed if it is JSON. That of the request may be bytes,
    or an iterator of them, which come in chunks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    content = json.dumps(body).encode() if isinstance(body, dict | list) else body
    given = {"content-type": "application/json"} | (headers or {})
    connection.request(method or ("GET" if content is None else "POST"), path, content, given)
    response = connection.getresponse()
    text = response.read()
    fields = {name.lower(): value for name, value in response.getheaders()}
    connection.close()
    parsed = text and "json" in fields.get("content-type", "")
    return response.status, json.loads(text) if parsed else text.decode(), fields


def request(body: Any, *headers: str, length: int | None = None) -> bytes:
    """Return the bytes of a request for a completion; its body may be shorter than the `length` that it states."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*head, f"content-length: {length or len(content)}", "", ""]).encode() + content


def answer_on(connection: socket.socket) -> bytes:
    """Read all bytes of an answer. They end with its body or with the connection."""
    received = b""
    while more := connection.recv(1 << 16):
        received += more
        head, end, rest = received.partition(b"\r\n\r\n")
        if b"chunked" in head:
            if rest.endswith(b"0\r\n\r\n"):
                break
        elif end and len(rest) >= int(head.lower().partition(b"content-length: ")[2].split()[0]):
            break
    return received


@contextmanager
def serving(
    plan: Plan,
    make_worker: Callable[[], Client],
    load: Workload = LOAD,
    *,
    ready: bool = True,
    buffer: int | None = None,
    on_message: Callable[[str], None] = lambda _text: None,
    log: Callable[[str], None] | None = None,
    tokenizer: TokenizerProcess | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve a plan's model until the end of the context; wait until it is `ready`. The kernel holds `buffer`
    bytes of an answer; `on_message` gets the server's lines, `log` those about requests. The `tokenizer` is the
    model's, or that of an `InlineRows`."""
    if tokenizer is None:
        tokenizer = InlineTokenizer() if plan.model.directory is None else TokenizerProcess(plan.model)
    made = Settings(NAME, drain_s=20.0)._replace(**settings)
    with listen("127.0.0.1", 0) as bound:
        if buffer is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        server = Server(
            HttpServer(Dispatcher(plan, make_worker, load, made, tokenizer, on_message=on_message), bound, log)
        )
        server.start()
        try:
            if ready:
                server.wait(lambda: server.dispatcher.state != "loading")
            yield server
        finally:
            server.end()


class ServedRows(InlineRows):
    """A worker without an engine whose rows are streamed and dropped, too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.dropped: set[int] = set()
        self._shown: dict[int, str] = {}

    def _start(self, session: Session, request: BatchStart) -> BatchStarted:
        assert request.arrivals
        self._shown = {}
        return super()._start(session, request)

    def _step(self, session: Session, request: BatchStep) -> BatchStepped:
        taken = {row.key for row in (*self.alive, *self.queue)}
        assert set(request.drop) <= taken, "dropped rows are in the worker"
        self.dropped |= set(request.drop)
        self.alive, self.queue = (
            [row for row in rows if row.key not in request.drop] for rows in (self.alive, self.queue)
        )
        keys = [(row.owner, row.key) for row in request.requests]
        assert sorted(keys, key=lambda key: key[0]) == sorted(keys), "rows of a request come in their order"
        rows = {row.key: row for row in (*self.alive, *self.queue, *request.requests)}
        answer = super()._step(session, request)
        return answer.model_copy(update={"rows": [self._with_delta(rows[row.key], row) for row in answer.rows]})

    def _with_delta(self, row: Request, update: Update) -> Update:
        if not row.stream:
            return update
        text = " ".join(map(str, row.output_ids))
        delta, self._shown[row.key] = text[len(self._shown.get(row.key, "")) :], text
        return replace(update, delta=delta)
