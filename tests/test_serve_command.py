"""Command `zinfer serve`: from its start to its end by a signal, in this process and in processes of its own."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, Checkpoints, children, mentions, wait
from tests.command import python, zinfer
from tests.serving import ask, request
from zinfer.job.openai import served_name
from zinfer.job.serve.server import listen

BODY = {"prompt": "Once upon", "max_tokens": 9, "temperature": 0}


def test_a_server_serves_until_a_signal(folder: Path, checkpoint: Checkpoints) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    directory, key = checkpoint("llama"), {"authorization": "Bearer secret"}
    answers: list[tuple[int, Any]] = []

    def ready() -> bool:
        with suppress(ConnectionError):
            return ask(port, "/health")[0] == 200
        return False

    def client() -> None:
        bodies = [BODY, *(BODY | {"model": name} for name in (directory.name, str(directory), "other"))]
        try:
            wait(ready)
            answers.extend([ask(port, "/health")[:2], ask(port, "/v1/models", None, key)[:2]])
            answers.append(ask(port, "/v1/completions", BODY)[:2])
            answers.extend(ask(port, "/v1/completions", body, key)[:2] for body in bodies)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    words = ["serve", str(directory), "--offload", "nvme", "--port", str(port), "--batch-size", "2"]
    words += ["--nvme-path", "drive", "-O", "host_weights=40%", "--kv-cache-size", "1MiB"]
    result = zinfer(folder, *words, ZINFER_API_KEY="secret")
    thread.join()
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "one would end this process"
    assert result.returncode == 143, result.stderr
    assert mentions(result.stderr, "listening at", f"http://127.0.0.1:{port}")
    assert mentions(result.stderr, "serving", directory.name, "/v1")
    assert mentions(result.stderr, "has ended")
    assert mentions(result.stderr, "POST /v1/completions", "401", "s")
    assert mentions(result.stderr, "POST /v1/completions", "200", "9+9 tokens")
    assert str(BODY["prompt"]) not in result.stderr
    assert [status for status, _ in answers] == [200, 200, 401, 200, 200, 200, 404]
    health, names, _, answer, *_ = (content for _, content in answers)
    assert (health["status"], health["prefix_reuse"]) == ("ok", "on")
    batch = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY})
    (folder / "prompts.jsonl").write_text(batch)
    words = ["batch", "prompts.jsonl", "-o", "out.jsonl", "-m", str(directory), "--offload", "cpu"]
    assert zinfer(folder, *words).returncode == 0
    same = json.loads((folder / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"] == same["choices"]
    assert answer["usage"] == same["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["model"] == same["model"] == directory.name
    assert [model["id"] for model in names["data"]] == [directory.name, str(directory)]


def test_a_name_is_the_last_part_of_a_folder_or_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my@model").mkdir()
    monkeypatch.chdir(tmp_path / "my@model")
    models = (".", "../my@model/", "bigscience/bloom-560m@main", "bloom-176b")
    assert [*map(served_name, models)] == ["my@model", "my@model", "bloom-560m", "bloom-176b"]


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
        return next(int(line.rpartition(":")[2]) for line in self.lines if line.startswith("listening"))

    def said(self, word: str) -> int:
        """Number of lines on stderr with a word."""
        return sum(word in line for line in self.lines)

    def workers(self) -> list[int]:
        """Process ids of its children; that which reads prompts is none of them."""
        words = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(self.process.pid)}
        return [child for child in words if b"tokenizer_server" not in words[child]]


@contextmanager
def process(folder: Path, *words: str, until: str = "serving", **settings: Any) -> Iterator[Served]:
    """Start a server and wait for the word `until`; `settings` are those of subprocess.Popen."""
    settings |= {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": None}
    running, lines = python("-m", "zinfer", "serve", "--port", "0", *words, **settings), list[str]()
    reader = threading.Thread(target=lambda: lines.extend(map(str.rstrip, running.stderr)))
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


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(folder: Path, checkpoint: Checkpoints) -> None:
    """A request under way is answered by the next worker; SIGTERM lets one end."""
    words = ["-m", str(checkpoint("llama")), "--offload", "cpu"]
    with process(folder, *words) as server, ThreadPoolExecutor() as pool:
        asking: Any = partial(pool.submit, ask, server.port, "/v1/completions")
        whole = BODY | {"ignore_eos": True, "max_tokens": 1500}
        expected = asking(whole).result()[1]["choices"]
        (worker,) = server.workers()
        asked = asking(whole)
        time.sleep(0.5)
        os.kill(worker, signal.SIGKILL)
        status, answer, _ = asked.result()
        assert (status, answer.get("choices")) == (200, expected), server.lines
        assert server.said("killed by SIGKILL") == 1, server.lines
        assert server.said("serving") == 2

        asked = asking(whole | {"max_tokens": 1000})
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert asked.result()[0] == 200
        assert server.process.wait(PATIENCE_S) == 143
        assert not server.workers()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(folder: Path, checkpoint: Checkpoints) -> None:
    words = ["-m", str(checkpoint("llama")), "--offload", "cpu"]
    with process(folder, *words) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request(BODY | {"max_tokens": 1900, "stream": True}))
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 130
        assert time.monotonic() - began < 5
