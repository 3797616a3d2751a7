"""Command `zinfer serve`: from its start to its end by a signal, in this process and in processes of its own."""

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests import PATIENCE_S, children, environment, mentions, wait
from tests.command import zinfer
from zinfer.job.openai import served_name
from zinfer.job.serve.server import listen

Checkpoints = Callable[..., Path]
BODY = {"prompt": "Once upon", "max_tokens": 9, "temperature": 0}


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    content = None if body is None else json.dumps(body)
    given = {"content-type": "application/json"} | headers
    connection.request("GET" if body is None else "POST", path, content, given)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_a_server_serves_until_a_signal(folder: Path, checkpoint: Checkpoints) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    answers: list[tuple[int, Any]] = []
    health: list[tuple[int, Any]] = []
    names, named = list[Any](), list[int]()

    def client() -> None:
        def ready() -> bool:
            try:
                return ask(port, "/health")[0] == 200
            except ConnectionError:
                return False

        try:
            wait(ready)
            health.append(ask(port, "/health"))
            answers.append(ask(port, "/v1/completions", BODY))
            answers.append(ask(port, "/v1/completions", BODY, authorization="Bearer secret"))
            names.append(ask(port, "/v1/models", authorization="Bearer secret")[1])
            for name in (checkpoint("llama").name, str(checkpoint("llama")), "other"):
                named.append(ask(port, "/v1/completions", BODY | {"model": name}, authorization="Bearer secret")[0])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    words = ["serve", str(checkpoint("llama")), "--offload", "nvme", "--port", str(port), "--batch-size", "2"]
    words += ["--nvme-path", "drive", "-O", "host_weights=40%"]
    words += ["--kv-cache-size", "1MiB"]
    result = zinfer(folder, *words, ZINFER_API_KEY="secret")
    thread.join()
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "one would end this process"
    assert result.returncode == 143, result.stderr
    assert mentions(result.stderr, "listening at", f"http://127.0.0.1:{port}")
    assert mentions(result.stderr, "serving", checkpoint("llama").name, "/v1")
    assert mentions(result.stderr, "has ended")
    ((status, body),) = health
    assert (status, body["status"], body["prefix_reuse"]) == (200, "ok", "on")
    assert mentions(result.stderr, "POST /v1/completions", "401", "s")
    assert mentions(result.stderr, "POST /v1/completions", "200", "9+9 tokens")
    assert str(BODY["prompt"]) not in result.stderr
    assert answers[0][0] == 401
    status, answer = answers[1]
    assert status == 200, answer
    batch = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY})
    (folder / "prompts.jsonl").write_text(batch)
    words = ["batch", "prompts.jsonl", "-o", "out.jsonl", "-m", str(checkpoint("llama")), "--offload", "cpu"]
    assert zinfer(folder, *words).returncode == 0
    same = json.loads((folder / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"] == same["choices"]
    assert answer["usage"] == same["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["model"] == same["model"] == checkpoint("llama").name
    assert [model["id"] for model in names[0]["data"]] == [answer["model"], str(checkpoint("llama"))]
    assert named == [200, 200, 404]


def test_a_name_is_the_last_part_of_a_folder_or_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my@model").mkdir()
    monkeypatch.chdir(tmp_path / "my@model")
    names = {
        ".": "my@model",
        "bigscience/bloom-560m@main": "bloom-560m",
        "bloom-176b": "bloom-176b",
        "../my@model/": "",
    }
    assert [served_name(model) for model in names] == [name or "my@model" for name in names.values()]


def test_a_missing_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find(name))
    result = zinfer(folder, "serve", "-m", "bloom-tiny", "--load-format", "dummy")
    assert result.returncode == 5
    assert result.stderr == "Error: zinfer serve needs uvicorn: pip install 'zinfer[serve]'\n"


# Processes


class Served:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", lines: list[str]) -> None:
        self.process, self.lines = process, lines

    @property
    def port(self) -> int:
        (match,) = [re.search(r":(\d+)$", line) for line in self.lines if line.startswith("listening")][:1]
        assert match is not None
        return int(match[1])

    def said(self, word: str) -> int:
        """Number of lines on stderr with a word."""
        return sum(word in line for line in self.lines)

    def workers(self) -> list[int]:
        """Process ids of its children; that which reads prompts is none of them."""
        words = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(self.process.pid)}
        return [child for child in words if b"tokenizer_server" not in words[child]]


@contextmanager
def process(folder: Path, *words: str, until: str = "serving", files: int | None = None) -> Iterator[Served]:
    """Start a server and wait for the word `until`. `files` limits its open files."""
    command = [sys.executable, "-m", "zinfer", "serve", "--port", "0", *words]
    if files is not None:
        command = ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    lines: list[str] = []
    running = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    )

    assert running.stderr is not None
    reader = threading.Thread(target=_read, args=(running.stderr, lines))
    reader.start()
    served = Served(running, lines)
    try:
        wait(lambda: served.said(until) == 1 or running.poll() is not None)
        yield served
    finally:
        running.kill()
        running.wait()
        reader.join()
        running.stderr.close()


def _read(stream: IO[str], lines: list[str]) -> None:
    while line := stream.readline():
        lines.append(line.rstrip("\n"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(folder: Path, checkpoint: Checkpoints) -> None:
    """A request under way is answered by the next worker; SIGTERM lets one end."""
    with process(folder, "-m", str(checkpoint("llama")), "--offload", "cpu") as server:
        whole = BODY | {"ignore_eos": True}
        expected = ask(server.port, "/v1/completions", whole | {"max_tokens": 1500})[1]["choices"]
        answers: list[tuple[int, Any]] = []

        def request(max_tokens: int) -> threading.Thread:
            body = whole | {"max_tokens": max_tokens}
            thread = threading.Thread(target=lambda: answers.append(ask(server.port, "/v1/completions", body)))
            thread.start()
            return thread

        (worker,) = server.workers()
        thread = request(1500)
        time.sleep(0.5)
        os.kill(worker, signal.SIGKILL)
        thread.join()
        assert (answers[0][0], answers[0][1].get("choices")) == (200, expected), server.lines
        assert server.said("killed by SIGKILL") == 1, server.lines
        assert server.said("serving") == 2

        thread = request(1000)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[1][0] == 200
        assert server.process.wait(PATIENCE_S) == 143
        assert not server.workers()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(folder: Path, checkpoint: Checkpoints) -> None:
    with process(folder, "-m", str(checkpoint("llama")), "--offload", "cpu") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps(BODY | {"max_tokens": 1900, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().read(10)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 130
        assert time.monotonic() - began < 5
        connection.close()
