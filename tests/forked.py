"""Processes of zinfer, forked from one that has imported their libraries: that takes seconds of each new one.

Such a process is the real one in all else: a child of this process, with its own memory, limits and session. Tests of
its start use `executed`.
"""

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
LIBRARIES = {  # of the processes that each module starts
    "zinfer.generation.tokenizer_process": """
sys.modules["torch"] = None
import jinja2.sandbox
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
import zinfer.generation.tokenizer_server
""",
    "zinfer.worker.process": "import torch, zinfer.worker.measure, zinfer.worker.session",
    "zinfer.engine.ranks": "import zinfer.engine.team, zinfer.engine.stream.team",
}
# A process is born as a grandchild; the process that asked for it adopts it when the child between them ends.
SERVER = """
import fcntl, gc, json, os, runpy, signal, socket, sys, time
sys.path.append(sys.argv[2])
exec(sys.argv[3])
gc.freeze()
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    content, files, *_ = socket.recv_fds(asked, 1 << 20, 16)
    if not content:
        os._exit(0)
    if child := os.fork():
        os.waitpid(child, 0)
        for file in files:
            os.close(file)
        continue
    if child := os.fork():
        asked.sendall(child.to_bytes(4, "big"))
        os._exit(0)
    break
order = json.loads(content)
for _ in range(60_000):
    if os.getppid() == order["parent"]:
        break
    time.sleep(0.001)
else:
    os._exit(1)
if order["session"]:
    os.setsid()
asked.close()
for file, place in zip([fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files], order["places"]):
    os.dup2(file, place)
kept = sorted(place for place in order["places"] if place > 2)
for first, last in zip([2, *kept], [*kept, 1024]):
    os.closerange(first + 1, last)
os.chdir(order["folder"])
os.environ.clear()
os.environ.update(order["env"])
way, what, *words = order["words"]
sys.argv = [what, *words]
if way == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(what)
"""
_LOCK = threading.Lock()


@cache
def _server(libraries: str, _asking: int) -> socket.socket:
    """Start the process that forks the others of the asking process; it ends with that one."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    root = str(Path(__file__).parents[1])
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(theirs.fileno()), root, libraries],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    return ours


class Forked(subprocess.Popen[bytes]):
    """Process that is forked where `subprocess.Popen` would execute it."""

    def __init__(self, libraries: str, command: Sequence[str], *, start_new_session: bool = False, **settings: Any):
        self._libraries, self._session = libraries, start_new_session
        super().__init__(command, **settings)

    def _execute_child(
        self, args: list[str], _executable: None, _before: None, _close: bool, pass_fds: Sequence[int], _folder: None,
        env: Mapping[str, str] | None, _info: None, _flags: int, _shell: bool, *pipes: Any,
    ) -> None:  # fmt: skip
        stdin, _, _, stdout, _, stderr = pipes[:6]
        files = {0: stdin, 1: stdout, 2: stderr} | {file: file for file in pass_fds}
        files = {number: number if file == -1 else file for number, file in files.items()}
        order = {
            "words": [word for word in args[1:] if word != "-P"], "places": [*files], "folder": os.getcwd(),
            "env": dict(os.environ if env is None else env), "parent": os.getpid(), "session": self._session,
        }  # fmt: skip
        with _LOCK:
            server = _server(self._libraries, os.getpid())
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(server, [json.dumps(order).encode()], [*files.values()])
            self.pid = int.from_bytes(server.recv(4))
            while _parent(self.pid) != os.getpid() or (self._session and os.getsid(self.pid) != self.pid):
                time.sleep(0.001)  # as Popen, which returns when the process leads its session
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(autouse=True, scope="session")
def forked() -> Any:
    """Fork the processes that read prompts, and those of workers."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("zinfer.generation.tokenizer_process", "zinfer.worker.process"):
            fork(module, patch)
        yield


@pytest.fixture(scope="session")
def ranks_forked() -> Any:
    """Fork the processes of other GPUs, too, and workers with their libraries."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("zinfer.worker.process", "zinfer.engine.ranks"):
            fork(module, patch, "zinfer.engine.ranks")
        yield


def fork(module: str, patch: pytest.MonkeyPatch, like: str = "") -> None:
    """Let `module` fork the processes that it starts, as `like` does."""
    popen = partial(Forked, LIBRARIES[like or module])
    names = ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired", "run")
    constants = {name: getattr(subprocess, name) for name in names}
    patch.setattr(importlib.import_module(module), "subprocess", SimpleNamespace(Popen=popen, **constants))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute them, as a command does."""
    for module in LIBRARIES.keys() & sys.modules.keys():
        monkeypatch.setattr(sys.modules[module], "subprocess", subprocess)
