"""Processes that read prompts, forked from one that has imported `transformers`: that takes seconds of each new one.

Such a process is the real one in all else: its own memory, limits and session. Tests of its start use `subprocess`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zinfer.generation import tokenizer_process

SERVER = """
import json, os, signal, socket, sys
sys.path.append(sys.argv[2])
sys.modules["torch"] = None
import jinja2.sandbox
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from zinfer.generation.tokenizer_server import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
asked = socket.socket(fileno=int(sys.argv[1]))
while message := socket.recv_fds(asked, 1 << 20, 1):
    content, files, *_ = message
    if not content:
        break
    if os.fork():
        os.close(files[0])
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # before its parent may kill the session
    asked.sendall(os.getpid().to_bytes(4, "big"))
    os.dup2(files[0], 0)
    os.closerange(3, 1024)
    folder, variables = json.loads(content)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    try:
        main()
    finally:
        os._exit(1)
"""
_LOCK = threading.Lock()


@cache
def _server() -> socket.socket:
    """Start the process that forks the others; it ends with this one."""
    ours, theirs = socket.socketpair()
    root = str(Path(__file__).parents[1])
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(theirs.fileno()), root],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    return ours


class Forked:
    """Takes the place of `subprocess.Popen`."""

    def __init__(self, _words: Sequence[str], *, stdin: int, env: Mapping[str, str], **_settings: Any) -> None:
        with _LOCK:
            server = _server()
            socket.send_fds(server, [json.dumps([os.getcwd(), dict(env)]).encode()], [stdin])
            self.pid = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
        self.returncode: int | None = None
        self._watched = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._watched], [], [], 0)[0]:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        select.select([self._watched], [], [])
        return self.poll() or 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._watched)


@pytest.fixture(autouse=True, scope="session")
def tokenizers_forked() -> Any:
    """Fork the processes that read prompts."""
    with pytest.MonkeyPatch.context() as patch:
        fork = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
        patch.setattr(tokenizer_process, "subprocess", fork)
        yield


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute them, as a command does."""
    monkeypatch.setattr(tokenizer_process, "subprocess", subprocess)
