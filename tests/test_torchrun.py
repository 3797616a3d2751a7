"""Ranks that torchrun has started: the text of one process, one process that speaks, and an end of all with any."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, environment, mentions
from tests.command import probed, zinfer
from tests.test_team_ways import gone
from zinfer.spec import torchrun

Checkpoints = Callable[..., Path]
WORDS = ("--offload", "cpu", "-p", "hello", "-p", "wor", "--output-len", "8", "--json")
STARTED = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a user whose machine was probed already."""
    path = tmp_path_factory.mktemp("ranks")
    probed(path)
    return path


def command(*words: str, processes: int = 2) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*run, "-m", "zinfer", *words]


def launched(folder: Path, *words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run `zinfer` in processes of torchrun."""
    return subprocess.run(
        command(*words, processes=processes), cwd=folder, env=environment(HF_HUB_OFFLINE="1"), capture_output=True,
        text=True, timeout=3 * PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ((), 2),
        pytest.param((), 3, marks=pytest.mark.slow),
        pytest.param(("--engine", "deepspeed"), 2, marks=pytest.mark.slow),
    ],
)
def test_the_text_is_that_of_one_process(
    more: tuple[str, ...], processes: int, checkpoint: Checkpoints, folder: Path
) -> None:
    words = ("run", "-m", str(checkpoint("llama")), *WORDS)
    alone = zinfer(folder, *words)
    assert alone.returncode == 0, alone.stderr
    found = launched(folder, *words, *more, processes=processes)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == json.loads(alone.stdout), "printed once"
    assert f"gpus={processes}" in found.stderr


def test_a_refusal_is_a_line_of_rank_0(checkpoint: Checkpoints, tmp_path: Path) -> None:
    done = launched(tmp_path, "plan", "-m", "opt-30b")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert mentions(line, "torchrun is for `zinfer run`", "zinfer plan", "--gpus 2")
    other = zinfer(tmp_path, "run", "-m", str(checkpoint("llama")), *WORDS, "--gpus", "4", **STARTED)
    assert (other.returncode, other.stdout) == (2, "")
    assert "--gpus 4: torchrun started 2 processes" in other.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, "2 processes on several nodes"),
        ({"WORLD_SIZE": "-2"}, "not the numbers of torchrun"),
        ({"MASTER_PORT": "9" * 5000}, "not the numbers of torchrun"),
    ],
)
def test_what_is_no_host_of_torchrun_is_refused(wrong: dict[str, str], message: str, tmp_path: Path) -> None:
    for verb in ("run", "sweep"):
        done = zinfer(tmp_path, verb, "-m", "bloom-tiny", "-p", "x", **STARTED | wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_process_alone_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STARTED.items():
        monkeypatch.setenv(name, value)
    assert torchrun.launched() is not None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torchrun.launched() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK")  # some clusters set the others for their nodes
    assert torchrun.launched() is None


def test_ranks_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torchrun, "MEET_S", 0.2)
    done = zinfer(tmp_path, "run", "-m", "bloom-tiny", "-p", "x", **STARTED | {"MASTER_PORT": "29501"})
    assert done.returncode == 2
    assert mentions(done.stderr, "1 of torchrun's 2 processes came", "timed out")
    launch = torchrun.Launch(1, 2, 2, f"\0zinfer-nobody-{os.getpid()}")
    with pytest.raises(torchrun.TorchrunError, match="rank 0 of torchrun did not come"):
        launch.join()


def below(process: int) -> Iterator[int]:
    """Yield the processes that `process` has started, and those that these have."""
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from below(child)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_no_rank_outlives_another(victim: int, folder: Path) -> None:
    """Rank 0 is killed with its command, whose worker then ends."""
    words = ("run", "-m", "bloom-tiny", "--load-format", "dummy", "--offload", "cpu", "-p", "hello")
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "cwd": folder}
    with subprocess.Popen(
        command(*words, "--output-len", "2000"), env=environment(HF_HUB_OFFLINE="1"), **settings
    ) as run:
        assert run.stdout is not None
        assert run.stdout.read(5) == b"hello"
        time.sleep(0.5)  # in the middle of passes
        ranks = [one for one in below(run.pid) if b"zinfer\0run" in Path(f"/proc/{one}/cmdline").read_bytes()]
        numbers = [Path(f"/proc/{one}/environ").read_bytes().split(b"\0RANK=")[1][:1] for one in ranks]
        everyone = list(below(run.pid))
        os.kill(ranks[numbers.index(str(victim).encode())], signal.SIGKILL)
        assert run.wait(timeout=3 * PATIENCE_S) != 0
        assert all(gone(one) for one in everyone)
