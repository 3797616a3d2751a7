"""Connections of `zinfer serve`: clients without a key that connect, send little, and read nothing."""

import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.inline_batch import PLAN, text
from tests.serving import ServedRows, Server, answer_on, ask, request, serving
from tests.test_serve_command import process
from zinfer.job.serve import connections

HEAD = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(PLAN, ServedRows(), key="secret") as running:
        yield running


@contextmanager
def connected(server: Server, count: int) -> Iterator[list[socket.socket]]:
    address = ("127.0.0.1", server.server.port)
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)]


def ended(connection: socket.socket) -> bool:
    """Tell whether the server closed a connection after its answer."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def status(connection: socket.socket) -> int:
    """Read an answer, all of it; return its status."""
    return int(answer_on(connection).split()[1])


def open_at(server: Server) -> int:
    return len(server.server._listener.server_state.connections)


def trickle(connection: socket.socket, content: Callable[[], bytes]) -> float:
    """Send a little repeatedly until the server closes the connection. Returns the seconds."""
    began = time.monotonic()
    with suppress(ConnectionError):
        while time.monotonic() - began < 60:
            connection.sendall(content())
            time.sleep(0.02)
    return time.monotonic() - began


def test_the_head_of_a_request_must_come_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are idle, half sent, slow, or not HTTP."""
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with connected(server, 3) as (idle, half, slow):
        half.sendall(HEAD)
        slow.sendall(HEAD + b"x: ")
        assert trickle(slow, lambda: b"y") < 30
        assert ended(idle)
        assert ended(half)
    server.wait(lambda: open_at(server) == 0)
    assert server.ask("/health")[0] == 200


def test_a_connection_is_kept_for_the_next_request_for_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.3)
    with connected(server, 2) as (kept, begun):
        for connection in (kept, begun):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status(connection) == 200
        begun.sendall(HEAD)
        assert ended(kept)
        assert ended(begun)


def test_a_body_that_was_refused_does_not_hold_its_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.3)
    with connected(server, 1) as (connection,):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert status(connection) == 401
        assert trickle(connection, lambda: b" ") < 30


def test_answers_that_nobody_reads_do_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all buffers with thousands of requests on one connection."""
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    with serving(PLAN, ServedRows(), key="secret", buffer=4096) as server:
        with server.sent({}, buffer=4096) as deaf:
            assert trickle(deaf, lambda: (HEAD + b"\r\n") * 50) < 30
        server.wait(lambda: open_at(server) == 0)


def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with a request under way stay; while all have one, others are refused."""
    monkeypatch.setattr(connections, "max_connections", lambda: 6)
    stream = {"prompt": "a3/600", "max_tokens": 600, "stream": True}
    with serving(PLAN, ServedRows(pause_s=0.01)) as server, server.sent(stream) as busy:
        assert busy.recv(20).startswith(b"HTTP/1.1 200")
        with connected(server, 40) as idle:
            assert all(map(ended, idle[:35]))
            assert server.ask("/health")[0] == 200
            assert open_at(server) <= 6
            assert busy.recv(1 << 16)
        with connected(server, 5) as others:
            for other in others:
                other.sendall(request(stream))
                assert other.recv(20).startswith(b"HTTP/1.1 200")
            assert open_at(server) == 6
            with connected(server, 1) as (late,):
                assert ended(late)
            busy.close()
            server.wait(lambda: open_at(server) == 5)
            assert server.ask("/v1/completions", {"prompt": "a3/9"})[1]["choices"][0]["text"] == text("a3/9")


def test_a_new_connection_takes_the_place_of_one_whose_body_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 6)
    with serving(PLAN, ServedRows()) as server, connected(server, 20) as slow:
        for connection in slow:
            connection.sendall(request(b'{"prompt": ', length=1000))
        assert server.ask("/v1/completions", {"prompt": "a3/9"})[1]["choices"][0]["text"] == text("a3/9")
        assert all(map(ended, slow[:14]))
        assert open_at(server) <= 6


def test_a_body_that_does_not_come_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its connection closes with the last ones, without a traceback."""
    monkeypatch.setattr("zinfer.job.serve.server.LAST_S", 0.3)
    with serving(PLAN, ServedRows()) as server, server.sent(b'{"prompt": ', length=1000) as slow:
        server.wait(lambda: open_at(server) == 1)
        assert server.ask("/health")[0] == 200
        server.server.drain()
        assert ended(slow)
        server.wait(lambda: open_at(server) == 0)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_idle_connections_take_neither_the_server_nor_its_end(folder: Path) -> None:
    """1,100 of them where the process may have 1,024 files: others are answered, nothing is written about them, and
    SIGTERM ends the server. It answers while the model is loaded, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    words = ["-m", "bloom-tiny", "--load-format", "dummy", "--offload", "cpu"]
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (1024, 1024))
    try:
        with process(folder, *words, until="listening", preexec_fn=few) as server, ExitStack() as stack:
            for _ in range(1100):
                connection = stack.enter_context(closing(socket.socket()))
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", server.port))
            for _ in range(3):
                assert ask(server.port, "/health")[0] in (200, 503)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 143
            assert time.monotonic() - began < 30
            assert len(server.lines) < 10, server.lines[:20]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
