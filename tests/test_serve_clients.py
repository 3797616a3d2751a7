"""Clients of `zinfer serve` as they are: browsers, probes, load balancers, and whoever reads the log."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.inline_batch import PLAN, text
from tests.serving import NAME, ServedRows, Server, serving
from zinfer.job.serve import server as serve_server
from zinfer.worker.process import WorkerDied
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStep, BatchStepped, Facts, Load

TEXTS = "/v1/completions"
ASKED = {"prompt": "a3/9", "max_tokens": 4}
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(lines: list[str]) -> Iterator[Server]:
    with serving(PLAN, ServedRows(), key="secret", log=lines.append) as running:
        yield running


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_probe_may_ask_for_the_head_alone(server: Server, path: str) -> None:
    whole, answer, headers = server.ask(path, None, KEY)
    assert whole == 200
    actual, empty, same = server.ask(path, None, KEY, method="HEAD")
    assert (actual, empty) == (200, "")
    assert same["content-length"] == headers["content-length"] == str(len(json.dumps(answer)))


def test_a_model_answers_to_each_of_its_names() -> None:
    with serving(PLAN, ServedRows, aliases=("short", "owner/long")) as named:
        _, models, _ = named.ask("/v1/models", None)
        assert [model["id"] for model in models["data"]] == [NAME, "short", "owner/long"]
        assert named.ask("/v1/models/owner/long", None)[1]["id"] == "owner/long"
        for name in (NAME, "short", "owner/long"):
            status, answer, _ = named.ask(TEXTS, ASKED | {"model": name})
            assert (status, answer["model"]) == (200, NAME)
        status, answer, _ = named.ask(TEXTS, ASKED | {"model": "long"})
        assert (status, answer["error"]["param"]) == (404, "model")
        assert "there is 'tiny', 'short', 'owner/long'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/health", "GET, HEAD"), ("PUT", "/v1/models", "GET, HEAD"), ("GET", TEXTS, "POST"),
     ("DELETE", "/v1/models/x", "GET"), ("POST", "/metrics", "GET")],
)  # fmt: skip
def test_a_wrong_method_says_which_are_right(server: Server, method: str, path: str, allowed: str) -> None:
    actual, answer, headers = server.ask(path, b"{}", KEY, method=method)
    assert (actual, answer["error"]["code"]) == (405, "method_not_allowed")
    assert set(headers["allow"].split(", ")) == set(allowed.split(", "))


def test_a_slash_at_the_end_is_answered_and_leads_nowhere_else(server: Server) -> None:
    """A redirect would lead to the host of the client's header. The client would send its key there."""
    evil = KEY | {"host": "evil.example"}
    assert server.ask("/health/", None, {"host": "evil.example"})[0] == 200
    assert server.ask("/v1/models/", None, evil)[1]["data"][0]["id"] == NAME
    actual, answer, headers = server.ask(f"{TEXTS}/", ASKED, evil)
    assert (actual, answer["choices"][0]["text"]) == (200, text("a3/9", 4))
    for path in ("/health//x", "/v1", "//evil.example/"):
        actual, _, headers = server.ask(path, None, evil)
        assert actual == 404
        assert "location" not in headers


def test_no_page_of_another_origin_may_use_it() -> None:
    page = {"origin": "http://localhost:3000"}
    with serving(PLAN, ServedRows()) as server:
        asks = page | {"access-control-request-method": "POST"}
        actual, _, headers = server.ask(TEXTS, None, asks, method="OPTIONS")
        assert (actual, headers["allow"]) == (405, "POST")
        assert "access-control-allow-origin" not in server.ask(TEXTS, ASKED, page)[2]


def test_each_request_is_a_line_without_its_content(server: Server, lines: list[str]) -> None:
    lines.clear()
    server.ask(TEXTS, ASKED, KEY)
    server.ask(TEXTS, ASKED | {"stream": True}, KEY)
    server.ask(TEXTS, {"prompt": "secret", "no": 1}, KEY)
    server.ask("/v1/models?key=hidden", None)
    server.ask("/a%0Ab%1B%5B31m" + "x" * 300, None, KEY)
    server.wait(lambda: len(lines) == 5)
    heads = [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines]
    assert heads[:4] == [
        "POST /v1/completions 200 3+4 tokens", "POST /v1/completions 200 3+4 tokens", "POST /v1/completions 400",
        "GET /v1/models 401",
    ]  # fmt: skip
    assert all(line.isprintable() and len(line) < 150 and line.endswith(" s") for line in lines)
    assert not any(word in line for line in lines for word in ("secret", "hidden", "a3/9"))


def test_a_client_that_went_away_is_told_in_the_log(server: Server, lines: list[str]) -> None:
    lines.clear()
    with server.sent({"prompt": "a3/100000", "max_tokens": 100_000}, "authorization: Bearer secret"):
        server.wait(lambda: server.dispatcher.running == 1)
    server.wait(lambda: len(lines) == 1)
    assert lines[0].startswith(f"POST {TEXTS} 499 0+0 tokens")


def test_a_terminal_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that nobody reads are left out."""
    monkeypatch.setattr(serve_server, "LINES", 3)
    gate, shown = threading.Event(), list[str]()

    def write(line: str) -> None:
        gate.wait(60)
        shown.append(line)

    with serving(PLAN, ServedRows(), log=write) as server:
        for _ in range(20):
            assert server.ask("/health")[0] == 200
        server.wait(lambda: server.metric("zinfer_requests_total") == 20)
        gate.set()
        server.wait(lambda: len(shown) >= 3)
        server.ask("/health")
        server.wait(lambda: len(shown) >= 4)
    assert len(shown) <= 5  # one may have been on its way


def test_health_tells_of_a_worker_that_is_loaded_again() -> None:
    """At once, though no request waits for it."""
    gate, workers = threading.Event(), list[ServedRows]()

    class Dying(ServedRows):
        def _load_point(self, session: Session, request: Load) -> Facts:
            if len(workers) > 1:
                gate.wait(60)
            return super()._load_point(session, request)

        def _step(self, session: Session, request: BatchStep) -> BatchStepped:
            if len(workers) == 1:
                raise WorkerDied("crashed", "the worker ended")
            return super()._step(session, request)

    def make() -> ServedRows:
        workers.append(Dying())
        return workers[-1]

    with serving(PLAN, make) as server:
        with ThreadPoolExecutor() as pool:
            pool.submit(server.ask, TEXTS, ASKED | {"stream": True})
            server.wait(lambda: len(workers) == 2)
            assert server.ask("/health")[:2] == (503, {"status": "loading"})
            gate.set()
        server.wait(lambda: server.dispatcher.state == "ready")
        assert server.ask("/health")[1]["status"] == "ok"
