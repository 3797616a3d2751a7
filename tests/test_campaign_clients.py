"""Clients of the campaign, and the judge of their answers: they see each fault of a small server, and no other."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests import PATIENCE_S
from tools.campaign import judge
from tools.campaign.clients import GREEDY, NUISANCES, WITHOUT_REQUEST, Crowd, Greedy, Load, Reply, ask, status_of

WANTED = {"a": "one two", "b": "three four"}


@contextmanager
def server(fault: str = "", idle_s: float | None = None) -> Iterator[int]:
    """Serve `WANTED` with a fault, and close silent connections. Yield the port."""

    class Handler(BaseHTTPRequestHandler):
        timeout = idle_s

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompt = str(body.get("prompt"))
            text = WANTED.get("b" if fault == "another text" and prompt == "a" else prompt, "")
            if fault == "refuses":
                self.send_error(503)
            elif fault == "hangs":
                time.sleep(2)
            elif body.get("stream"):
                self.send_response(200)
                self.end_headers()
                sent = [text[:4], text[4:]] if fault != "cuts" else [text[:4]]
                lines = [f"data: {json.dumps({'choices': [{'text': part}]})}\n\n" for part in sent]
                if fault == "fails late":
                    lines[1] = f"data: {json.dumps({'error': {'message': 'no worker'}})}\n\n"
                self.wfile.write("".join([*lines, *["data: [DONE]\n\n"] * (fault != "cuts")]).encode())
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"choices": [{"text": text}]}).encode())

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_words: object) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 64

        def handle_error(self, *_about: object) -> None: ...

    with Quiet(("127.0.0.1", 0), Handler) as made:
        thread = Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made.server_port
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("fault", "streams", "alone", "disturbed"),
    [
        ("", (False, True), None, None),
        ("another text", (False, True), "another text after 'a': 'three four' is not 'one two' (2", "another text"),
        ("refuses", (False, True), "status 503", None),
        ("cuts", (True,), "the stream was cut", None),
        ("fails late", (True,), "no worker", None),
        ("hangs", (False, True), "no answer within 0 s", "no answer within 0 s"),
    ],
)
def test_answers_are_the_text_of_their_prompt(
    fault: str, streams: tuple[bool, ...], alone: str | None, disturbed: str | None
) -> None:
    """A server that nobody disturbs answers in whole; one that is may refuse, or cut a stream, and never changes it."""
    with server(fault) as port:
        seconds = 0.3 if fault == "hangs" else PATIENCE_S
        faults_of = [ask(port, prompt, stream, seconds) for prompt in WANTED for stream in streams]
    for replies, allowed in ((alone, None), (disturbed, {0, 200, 503})):
        faults = judge.replies(faults_of, WANTED, allowed)
        assert bool(faults) is (replies is not None), faults
        assert replies is None or any(replies in fault for fault in faults)


def test_a_part_of_an_answer_is_no_beginning_of_another_one() -> None:
    assert not judge.replies([Reply("a", 200, "one t", fault="cut")], WANTED, {200})
    assert "another text" in judge.replies([Reply("a", 200, "one f", fault="cut")], WANTED, {200})[0]
    assert "another text" in judge.replies([Reply("a", 200, "one", whole=True)], WANTED, {200})[0]
    assert "status 500" in judge.replies([Reply("a", 500, fault="no")], WANTED, {200})[0]


def test_a_load_asks_until_it_is_stopped() -> None:
    with server() as port:
        load = Load(port, [*WANTED], 3, random.Random(1))
        while len({reply.prompt for reply in load.replies}) < 2 or len(load.replies) < 9:
            time.sleep(0.01)
        replies = load.stop()
        assert not judge.replies(replies, WANTED)
        assert len(load.replies) == len(replies)
        assert (status_of(port, "/health"), status_of(port, "/else")) == (200, 404)
    assert ask(port, "a", False).status == status_of(port, "/health") == 0


@pytest.mark.parametrize("closes", [True, False])
def test_connections_that_are_not_closed_are_seen(closes: bool) -> None:
    """All kinds are opened; those without a request are closed by a server that has a time for them."""
    dice = random.Random(2)
    with server(idle_s=0.5 if closes else None) as port:
        crowd = Crowd()
        try:
            for kind in (*NUISANCES, "idle", "idle"):
                crowd.add(port, kind, dice)
            assert {*crowd.held.values()} == {*NUISANCES}
            deadline = time.monotonic() + (PATIENCE_S if closes else 1.5)
            while crowd.open(["idle"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert crowd.open(["idle"]) == (0 if closes else 3)
            assert {"idle", "half a head"} <= {*WITHOUT_REQUEST}
        finally:
            crowd.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", GREEDY)
def test_a_greedy_client_sends_costly_requests_until_it_is_stopped(kind: str) -> None:
    with server() as port:
        greedy = Greedy(port, kind, 2, random.Random(3))
        deadline = time.monotonic() + PATIENCE_S
        while len(greedy.statuses) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        greedy.stop()
        assert {*greedy.statuses} == {200}
    assert len(json.dumps(GREEDY[kind](random.Random(3)))) < 16 << 20  # larger ones are refused unread


@pytest.mark.torch
def test_changed_weights_have_their_old_sizes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from tools.campaign.weights import change
    from zinfer.checkpoint.headers import Checkpoint

    revisions = {Checkpoint.open(checkpoint("llama", 32)).revision}
    for seed in range(12):
        folder = shutil.copytree(checkpoint("llama", 32), tmp_path / str(seed))
        before = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}
        what = change(folder, random.Random(seed))
        after = {name: ((folder / name).stat().st_size, (folder / name).stat().st_mtime_ns) for name in before}
        assert {path.name for path in folder.iterdir()} == {*before}
        assert [(name, size) for name, (size, _) in after.items()] == [
            (name, size) for name, (size, _) in before.items()
        ]
        assert (after == before) is ("old times" in what)
        revisions.add(Checkpoint.open(folder).revision)
    assert len(revisions) == 13
