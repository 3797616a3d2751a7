"""The console script `zinfer`, in this process or its own."""

import gc
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests import PATIENCE_S, environment
from tests.inline_worker import InlineWorker
from zinfer.cli import main
from zinfer.core.machine import Machine
from zinfer.system.host import slug


def probed(folder: Path) -> None:
    """Describe this machine in `folder` as if it had been probed. A probe takes 20 s."""
    path = folder / "sweeps" / "results" / slug() / "machine.json"
    if path.exists():
        return
    machine = Machine(name=slug(), source="measured", host_bytes=20 << 30, h2d_bandwidth=8e9, hbm_bandwidth=16e9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(machine.model_dump_json())


def zinfer(folder: Path, *words: str, stdin: str = "", **settings: str) -> CompletedProcess[str]:
    """Run `zinfer` and its workers in this process, in `folder`.

    For what a process of its own would show no better: torch is imported once for all tests.
    """
    probed(folder)
    gc.collect(1)
    gc.freeze()  # what was imported since: a worker collects garbage before each point
    printed, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, chdir(folder), redirect_stdout(printed), redirect_stderr(errors):
        patch.setattr("zinfer.worker.process.Worker", InlineWorker)
        patch.setattr("zinfer.plan.search.LARGEST_BATCH", 1 << 10)  # a tiny model has room for a million rows
        patch.setattr(sys, "argv", ["zinfer", *words])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setenv("ZINFER_DEBUG", os.environ.get("ZINFER_DEBUG", ""))  # --debug sets it
        with pytest.raises(SystemExit) as end:
            main()
    code = end.value.code or 0
    assert isinstance(code, int)
    for stream in (printed, errors):
        stream.seek(0)
    return CompletedProcess(["zinfer", *words], code, printed.read(), errors.read())


def ran(folder: Path, *words: str, code: int = 0, says: str = "") -> CompletedProcess[str]:
    """Run `zinfer` in this process; it ends with `code`, and `says` something on stderr."""
    done = zinfer(folder, *words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    return done


def zinfer_process(folder: Path, *words: str, **settings: Any) -> CompletedProcess[str]:
    """Run `zinfer` in a process of its own in `folder`; `settings` are those of subprocess.run."""
    probed(folder)
    command = [sys.executable, "-m", "zinfer", *words]
    usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": environment(HF_HUB_OFFLINE="1")}
    usual |= {"cwd": folder, "capture_output": True, "text": True, "timeout": PATIENCE_S, "check": False}
    done: CompletedProcess[str] = subprocess.run(command, **usual | settings)
    return done


def started(folder: Path, *words: str, **settings: Any) -> "subprocess.Popen[str]":
    """Start `zinfer` in a process of its own in `folder`; `settings` are those of subprocess.Popen."""
    process: subprocess.Popen[str] = python("-m", "zinfer", *words, cwd=folder, **settings)
    return process


def python(*words: str, **settings: Any) -> Any:
    """Start Python with `words`: text comes from its pipes; `settings` are those of subprocess.Popen."""
    usual: dict[str, Any] = {"env": environment(HF_HUB_OFFLINE="1"), "text": True}
    usual |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], **usual | settings)


def interrupted(process: "subprocess.Popen[str]", number: int = signal.SIGINT) -> str:
    """Send a signal to a command, which ends with its code; return its messages."""
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    return str(stderr)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Limit each file of this process to `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # Python would leave cut files of modules that are imported now
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = False
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
