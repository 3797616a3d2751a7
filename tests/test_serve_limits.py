"""`zinfer serve` at its limits, with a worker without an engine: bad requests, full queues, deaths, slow readers."""

import asyncio
import json
import os
import pickle
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import PATIENCE_S
from tests.inline_batch import PLAN, prompt_ids, text
from tests.serving import NAME, ServedRows, Server, answer_on, request, serving
from zinfer.job.serve import app, connections, dispatcher
from zinfer.record.measurement import Status
from zinfer.worker.session import Session
from zinfer.worker.tasks import Answer, BatchStart, BatchStarted, BatchStep, BatchStepped, Command

SECRET = "authorization: Bearer secret"
KEY = {"authorization": "Bearer secret"}
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]
ALL = {"prompt": "a3/9"}
POISON = prompt_ids("a5/30")[0]


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(PLAN, ServedRows(), key="secret", max_waiting=8, max_bytes=4096) as running:
        yield running


WRONG: dict[str, list[Any]] = {  # prompts, by what is said of them
    "no prompt": ["no such"],
    "prompt must be": [5, [], ["a", 1], [True, False], [[1], []]],
    "token -1": [[1, -1]],
    "token 64: ids are from 0 to 63": [[1, 64]],
    "at most 8 answers": [["a3/9"] * 9],
    "surrogate": ["\ud800"],
}
BAD: list[tuple[str, Any, int, str | None, str]] = [
    (TEXTS, b"{", 400, None, "the body"),
    (TEXTS, b"\xff", 400, None, "UTF-8"),
    (TEXTS, b"[]", 400, None, "not a JSON object"),
    (TEXTS, b'{"prompt": "x", "prompt": "y"}', 400, None, "'prompt' twice"),
    (TEXTS, b'{"prompt": "x", "temperature": NaN}', 400, None, "NaN"),
    (TEXTS, b'{"prompt": "x", "temperature": 1e999}', 400, None, "too large a number"),
    (TEXTS, b"[" * 3000, 400, None, "nested"),
    (TEXTS, {}, 400, "prompt", "no prompt"),
    *((TEXTS, {"prompt": prompt}, 400, "prompt", said) for said, prompts in WRONG.items() for prompt in prompts),
    (TEXTS, ALL | {"n": 9}, 400, "n", "at most 8 answers"),
    (TEXTS, ALL | {"n": 0}, 400, "n", "whole number"),
    (TEXTS, ALL | {"max_tokens": -1}, 400, "max_tokens", "whole number"),
    *((TEXTS, ALL | {key: 1}, 400, key, "true or false") for key in ("echo", "stream", "ignore_eos")),
    (TEXTS, ALL | {"max_tokens": 10**9}, 400, "prompt", "exceed"),
    (TEXTS, ALL | {"stop": [""]}, 400, "stop", "none of them empty"),
    (TEXTS, ALL | {"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (TEXTS, ALL | {"logprobs": True}, 400, "logprobs", "whole number"),
    (TEXTS, ALL | {"stream": True, "stream_options": 1}, 400, "stream_options", "an object"),
    (TEXTS, ALL | {"model": 7}, 400, "model", "a text"),
    (CHATS, {"messages": []}, 400, "messages", "non-empty"),
    (CHATS, {"messages": TALK, "top_logprobs": 2}, 400, "top_logprobs", "logprobs only"),
    (CHATS, {"messages": TALK}, 400, "messages", "no prompt"),
    (TEXTS, ALL | {"user": "x" * 5000}, 413, None, "4,096 bytes"),
    ("/v1/embeddings", {}, 404, None, "/v1/completions"),
    ("/v1/responses", {"input": "hi"}, 404, None, "/v1/chat/completions"),
    ("/v1/models/other", None, 404, "model", "no model"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), BAD)
def test_a_bad_request_names_its_fault(
    server: Server, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    actual, answer, _ = server.ask(path, body, KEY)
    assert actual == status, answer
    error = answer["error"]
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"]
    assert server.ask(TEXTS, ALL | {"max_tokens": 2}, KEY)[1]["choices"][0]["text"] == text("a3/9", 2)


# Not its beginning, which may be empty, its end, or more than it.
PARTS = ["secret"[:end] for end in range(6)] + ["ecret", "secretx", "secret secret", "SECRET", "secret\t,"]


def test_only_the_whole_key_is_accepted(server: Server) -> None:
    wrong = [{}, {"authorization": "secret"}, {"authorization": "Basic secret"}, {"authorization": "Bearer"}]
    for headers in wrong + [{"authorization": f"Bearer {key}"} for key in PARTS]:
        for path, body in ((TEXTS, ALL), ("/v1/models", None), ("/metrics", None), ("/none", None)):
            status, answer, sent = server.ask(path, body, headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), headers
            assert sent["www-authenticate"] == "Bearer"
    assert server.ask("/health")[0] == 200
    status, answer, _ = server.ask("/v1/models", None, KEY)
    assert (status, answer["data"][0]["id"]) == (200, NAME)


def test_a_body_must_be_declared_as_json(server: Server) -> None:
    """A browser page could send any other body to this server."""
    status, answer, _ = server.ask(TEXTS, ALL, KEY | {"content-type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_without_a_length_is_limited(server: Server) -> None:
    assert server.ask(TEXTS, (b" " * 1000 for _ in range(9)), KEY)[0] == 413


def test_bodies_under_way_are_limited_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HELD", 1)
    desk = server.server.desk
    assert desk.held == 0
    padded = json.dumps(ALL).encode() + b" " * 1000
    with server.sent(b" " * 3900, SECRET, length=4000):
        server.wait(lambda: desk.held == 3900)
        status, answer, headers = server.ask(TEXTS, padded, KEY)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "5")
    server.wait(lambda: desk.held == 0)
    assert server.ask(TEXTS, padded, KEY)[0] == 200
    server.wait(lambda: desk.held == 0)


def test_a_body_that_comes_too_slowly_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.1)
    assert answer_on(server.sent(b" ", SECRET, length=4000)).startswith(b"HTTP/1.1 408")


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    worker, gate = ServedRows(), threading.Event()
    worker.before = lambda command: command is BatchStep and gate.wait(PATIENCE_S)
    with serving(PLAN, worker, rows=1, max_waiting=2) as server:
        prompts = [f"a3/{size}" for size in range(20, 32)]
        with ThreadPoolExecutor(12) as pool:
            asked = {prompt: pool.submit(server.ask, TEXTS, {"prompt": prompt}) for prompt in prompts}
            server.wait(lambda: sum(future.done() for future in asked.values()) == 10)
            answered = [prompt for prompt in prompts if not asked[prompt].done()]
            gate.set()
        for prompt, future in asked.items():
            status, answer, headers = future.result()
            if prompt in answered:
                assert answer["choices"][0]["text"] == text(prompt)
            else:
                assert (status, answer["error"]["code"]) == (429, "queue_full")
                assert int(headers["retry-after"]) > 0
        server.wait(lambda: server.metric("zinfer_requests_total") == len(prompts))
        assert server.dispatcher.unfinished == 0


def test_a_request_of_many_rows_leaves_room_in_the_queue_and_comes_to_the_worker_once() -> None:
    """Alone it may fill the queue, beside others only a sixteenth."""
    gate, steps = threading.Event(), list[BatchStep]()

    class Noting(ServedRows):
        def ask(self, command: Command[Answer]) -> Answer:
            if isinstance(command, BatchStep):
                steps.append(command)
            return super().ask(command)

        def _step(self, session: Session, request: BatchStep) -> BatchStepped:
            gate.wait(PATIENCE_S)
            return super()._step(session, request)

    many = {"prompt": ["a2000/9", "a3/9"], "n": 4, "stop": ["x" * 1000] * 16, "max_tokens": 3}
    with serving(PLAN, Noting(), rows=2, max_waiting=8) as server:
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(server.ask, TEXTS, many)]
            server.wait(lambda: steps and server.dispatcher.waiting == 8)
            answers.append(pool.submit(server.ask, TEXTS, many))
            server.wait(lambda: server.dispatcher.waiting == 16)
            answers += [pool.submit(server.ask, TEXTS, ALL) for _ in range(6)]
            server.wait(lambda: server.dispatcher.waiting == 22)
            assert server.ask(TEXTS, ALL)[0] == 429
            gate.set()
        assert [answer.result()[0] for answer in answers] == [200] * 8
    assert sum(len(step.requests) for step in steps) == 22
    sent = b"".join(map(pickle.dumps, steps))
    assert sent.count(b"x" * 1000) == 2 * 16
    assert len(sent) < 2 * 16_000 + 2 * 2000 * 3 + 22 * 400


def test_a_server_that_loads_says_so_and_one_that_cannot_ends() -> None:
    gate = threading.Event()

    class Slow(ServedRows):
        def load(self, plan: Any, early: bool = False) -> None:
            gate.wait(60)
            super().load(plan, early)

    with serving(PLAN, lambda: Slow(refused="oom_gpu"), ready=False) as server:
        server.wait(lambda: server.dispatcher._driver._worker is not None)
        status, answer, headers = server.ask(TEXTS, ALL)
        assert (status, headers["retry-after"]) == (503, "5")
        assert "being loaded" in answer["error"]["message"]
        assert server.ask("/health")[:2] == (503, {"status": "loading"})
        gate.set()
        server.wait(lambda: server.fault is not None)
    assert server.fault == "oom_gpu: no memory"


def test_an_engine_that_reuses_no_prefixes_says_so() -> None:
    class Whole(ServedRows):
        def _start(self, session: Session, request: BatchStart) -> BatchStarted:
            assert request.cache_size == 5000
            return super()._start(session, request).model_copy(update={"cannot_reuse": "it has states"})

    messages: list[str] = []
    with serving(PLAN, Whole, cache_size=5000, on_message=messages.append) as server:
        assert server.ask("/health")[1]["prefix_reuse"] == "off: it has states"
        status, answer, _ = server.ask(TEXTS, ALL)
        assert (status, answer["usage"]["prompt_tokens_details"]) == (200, {"cached_tokens": 0})
    assert messages == ["every prompt is computed whole: it has states"]
    with serving(PLAN, ServedRows) as server:
        assert "memory" in server.ask("/health")[1]["prefix_reuse"]


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    worker = ServedRows(pause_s=0.05)
    with serving(PLAN, worker) as server:
        running = [server.sent({"prompt": "a3/30", "stream": True}), server.sent({"prompt": "a3/28"})]
        server.wait(lambda: len(worker.alive) == 2)
        waiting = socket.create_connection(("127.0.0.1", server.server.port), timeout=60)
        server.server.drain()
        server.wait(lambda: server.dispatcher.state == "draining")
        waiting.sendall(request(ALL))
        refused, stream, whole = (answer_on(connection) for connection in (waiting, *running))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in refused
        assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text("a3/28")
    assert worker.closed == 2
    assert server.fault is None


def test_a_drain_has_an_end() -> None:
    worker = ServedRows(pause_s=0.05)
    with serving(PLAN, worker, drain_s=0.2) as server:
        connection = server.sent({"prompt": "a3/10000", "max_tokens": 10000})
        server.wait(lambda: len(worker.alive) == 1)
        began = time.monotonic()
        server.server.drain()
        received = answer_on(connection)
        assert received.startswith(b"HTTP/1.1 503")
        assert b"shut down" in received
        assert time.monotonic() - began < 15


class Poisoned(ServedRows):
    """A worker that fails with every batch in which one row is."""

    def _step(self, session: Session, request: BatchStep) -> BatchStepped:
        poisoned = any(row.prompt_ids[0] == POISON for row in (*request.requests, *self.alive, *self.queue))
        self.edge = 0 if poisoned else 1 << 20
        return super()._step(session, request)


@pytest.mark.parametrize("dies", [True, False])
def test_a_row_that_kills_the_worker_ends_alone(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of twenty rows fails every batch that it is in: the others are answered, whole, once."""
    monkeypatch.setattr(dispatcher, "RELOAD_S", 0.01)
    why: Status = "crashed" if dies else "oom_gpu"
    with serving(PLAN, lambda: Poisoned(dies=dies, status=why)) as server:
        prompts = [f"a{size}/{20 + size}" for size in range(1, 20) if size != 5] + ["a5/30"]
        _, answer, _ = server.ask(TEXTS, {"prompt": prompts[:10]})
        assert [choice["text"] for choice in answer["choices"]] == [text(prompt) for prompt in prompts[:10]]
        with ThreadPoolExecutor(20) as pool:
            *answers, poisoned = pool.map(lambda prompt: server.ask(TEXTS, {"prompt": prompt}), prompts)
        assert (poisoned[0], poisoned[1]["error"]["message"]) == (500, f"the worker failed: {why}")
        for prompt, (status, answer, _) in zip(prompts[:-1], answers, strict=True):
            assert (status, answer["choices"][0]["text"]) == (200, text(prompt))
        assert (server.metric("zinfer_worker_restarts_total") > 0) == dies
        assert server.ask("/health")[0] == 200


def test_a_reader_that_stops_is_left_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers fill, then nothing more is sent; others are answered; after a time its row is dropped."""
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    worker = ServedRows(steps=1)
    body = {"prompt": "a3/30000", "max_tokens": 30_000, "stream": True}
    with serving(PLAN, worker, buffer=4096) as server, server.sent(body, buffer=4096):
        server.wait(lambda: len(worker.alive) == 1)
        key = worker.alive[0].key
        for _ in range(3):
            assert server.ask(TEXTS, ALL)[1]["choices"][0]["text"] == text("a3/9")
        server.wait(lambda: key in worker.dropped)
        assert server.dispatcher.unfinished == 0


def streamed(answer: bytes) -> str:
    """Return the text of an answer's events."""
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def many(port: int, bodies: list[dict[str, Any]]) -> list[bytes]:
    """Send requests at once, each on its own connection; return the answers."""

    async def fetch(number: int, body: dict[str, Any]) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(body, "connection: close"))
        received = b"" if number % 10 == 9 else await reader.read()  # or goes away at once
        writer.close()
        return received

    return await asyncio.gather(*(fetch(*each) for each in enumerate(bodies)))


def check_load(count: int, **more: Any) -> None:
    """Send `count` requests at once, a tenth of which are abandoned. Check that each other has its own answer or a
    refusal, and that nothing is left of any."""
    worker = ServedRows(steps=8)
    with serving(PLAN, worker, **more) as server:
        prompts = [f"a{1 + number % 30}/{1 + number % 40}/{number}" for number in range(count)]
        fields = {"temperature": 0, "max_tokens": 30}
        bodies = [{"prompt": prompt, "stream": nth % 3 == 0} | fields for nth, prompt in enumerate(prompts)]
        answers = asyncio.run(many(server.server.port, bodies))
        refused = sum(answer.startswith(b"HTTP/1.1 429") for answer in answers)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if number % 10 == 9 or answer.startswith(b"HTTP/1.1 429"):
                continue
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), answer[:300]
            received = streamed(body) if number % 3 == 0 else json.loads(body)["choices"][0]["text"]
            assert received == text(prompt, 30)
        assert bool(refused) == (more.get("max_waiting", 1024) < count)
        server.wait(lambda: server.dispatcher.unfinished == 0)
        server.wait(lambda: not (worker.alive or worker.queue))
        server.wait(lambda: server.dispatcher.waiting == server.server.desk.held == 0)  # after the last byte is sent
        assert server.ask(TEXTS, ALL)[1]["choices"][0]["text"] == text("a3/9")
        loop = server.server._loop
        assert loop is not None
        server.wait(lambda: len(asyncio.all_tasks(loop)) <= 2 + len(server.server._listener.server_state.connections))


def test_many_requests_at_once_are_answered_or_refused() -> None:
    check_load(60, rows=16)


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [100_000, 64])
def test_thousands_of_connections_at_once(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", PATIENCE_S)  # the clients of this process connect, then send
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        free = hard - len(os.listdir("/proc/self/fd")) - 200
        check_load(min(10_000, free // 2), rows=256, max_waiting=waiting)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_slow_readers_get_their_whole_text() -> None:
    """Two hundred slow readers take a few bytes at a time. Memory holds no more than answers."""
    worker = ServedRows(steps=4)

    async def read(port: int, number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=256)
        body = {"prompt": f"a3/{100 + number}", "max_tokens": 300, "stream": True}
        writer.write(request(body, "connection: close"))
        received, dice = b"", random.Random(number)
        while more := await reader.read(dice.randint(1, 200)):
            received += more
            await asyncio.sleep(dice.random() * 0.01)
        writer.close()
        return received

    async def all_of_them(port: int) -> list[bytes]:
        return await asyncio.gather(*(read(port, number) for number in range(200)))

    with serving(PLAN, worker, rows=64) as server:
        for number, answer in enumerate(asyncio.run(all_of_them(server.server.port))):
            assert streamed(answer) == text(f"a3/{100 + number}", 300)
        server.wait(lambda: server.dispatcher.unfinished == 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["a3/9", NAME]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "echo",
     "logprobs", "top_logprobs", "stream_options", "user", "tools", "role", "content", "top_k", "min_p", "logit_bias",
     "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "min_tokens"]
)  # fmt: skip


@pytest.mark.slow
def test_no_body_breaks_the_server(server: Server) -> None:
    @settings(max_examples=400)
    @given(st.binary(max_size=60) | st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from([TEXTS, CHATS]))
    def check(body: Any, path: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode(errors="replace")
        status, answer, _ = server.ask(path, content, KEY)
        if status != 200:
            assert status in (400, 404, 413), answer
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["message"]

    check()
    assert server.ask(TEXTS, ALL, KEY)[1]["choices"][0]["text"] == text("a3/9")


@pytest.mark.slow
def test_no_bytes_break_the_server(server: Server) -> None:
    @settings(max_examples=200)
    @given(st.binary(min_size=1, max_size=200))
    def check(content: bytes) -> None:
        with socket.create_connection(("127.0.0.1", server.server.port)) as connection:
            connection.sendall(content + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10)
            received = connection.recv(100)
        assert received == b"" or received.startswith(b"HTTP/1.1 4")

    check()
    assert server.ask("/health")[0] == 200
