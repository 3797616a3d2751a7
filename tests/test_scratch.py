"""Scratch: what a killed process left goes at the next start, and nothing else ever does."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import PATIENCE_S, Checkpoints, children, invoke, wait
from tests.command import probed, python, started, zinfer_process
from zinfer.system import atomic, scratch

# Each makes something in the folder of its first argument, says so, and waits for its end.
WEIGHTS = """
import os, sys, time
from pathlib import Path
from zinfer.system import scratch
made = scratch.folder(Path(sys.argv[1]), "weights")
(made.path / "deep").mkdir()
(made.path / "deep" / "layer.dat").write_bytes(b"x" * 1000)
print(made.path, flush=True)
time.sleep(600)
"""
FILE = """
import sys, time
from pathlib import Path
from zinfer.system import atomic
with atomic.writing(Path(sys.argv[1]) / "good.txt") as stream:
    stream.write(b"half")
    stream.flush()
    print(next(Path(sys.argv[1]).glob("*.part")), flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path / "state" / "zinfer" / "scratch"
    scratch.cleanup()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def killed(script: str, folder: Path) -> Path:
    """Kill `script` once its path exists, and return the path."""
    process = python("-c", script, str(folder), stderr=None)
    path = Path(process.stdout.readline().strip())
    scratch.remove_abandoned()
    assert path.exists(), "removed while its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=PATIENCE_S)
    process.stdout.close()
    return path


def entry(state: Path, path: Path, name: str, **other: str) -> None:
    """Write an entry that no process holds."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    here = dict(zip(("boot", "host"), scratch._host(), strict=True))
    (state / f"{name}.scratch").write_text(json.dumps([*(here | other).values(), str(path)]))


@pytest.mark.parametrize("script", [WEIGHTS, FILE])
def test_a_killed_process_leaves_nothing_for_good(folder: Path, state: Path, script: str) -> None:
    (folder / "good.txt").write_text("good")
    path, messages = killed(script, folder), list[str]()
    assert path.exists()
    scratch.remove_abandoned(messages.append)
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("good.txt", "good")]
    (message,) = messages
    assert str(path) in message
    assert list(state.iterdir()) == []


def test_the_next_command_says_what_it_removed(folder: Path) -> None:
    path = killed(WEIGHTS, folder)
    (folder / "nothing").mkdir()
    result = invoke("export", folder / "nothing")
    assert result.exit_code == 4
    assert f"removed {path}," in result.stderr
    assert not path.exists()


def test_a_target_of_a_link_stays(folder: Path, tmp_path: Path) -> None:
    path, thesis = killed(WEIGHTS, folder), tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.txt").write_text("years of work")
    (path / "link").symlink_to(thesis)
    scratch.remove_abandoned()
    assert not path.exists()
    assert (thesis / "chapter.txt").read_text() == "years of work"


def test_an_entry_names_only_what_bears_its_name(folder: Path, state: Path) -> None:
    thesis = folder / "thesis.txt"
    thesis.write_text("years")
    for number, path in enumerate((thesis, folder, folder / "none")):
        entry(state, path, f"name{number}")
    (state / "torn.scratch").write_text("")
    scratch.remove_abandoned()
    assert thesis.read_text() == "years"
    assert not [*state.iterdir()]


@pytest.fixture
def part(folder: Path) -> Path:
    (folder / "x.abcd.part").write_text("x")
    return folder / "x.abcd.part"


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_state_folder_that_others_may_write_to_is_not_used(part: Path, state: Path, kind: str) -> None:
    entry(state, part, "abcd")
    if kind == "open":
        state.chmod(0o770)
    else:
        state.rename(state.with_name("elsewhere"))
        state.symlink_to("elsewhere")
    scratch.remove_abandoned()
    assert part.exists()
    with scratch.folder(part.parent, "weights") as made:
        assert made.path.is_dir()
    assert len(list(state.iterdir())) == 1


def test_what_another_host_left_on_a_shared_drive_stays(part: Path, state: Path) -> None:
    entry(state, part, "abcd", boot="another", host="another")
    scratch.remove_abandoned()
    assert part.exists()
    entry(state, part, "abcd", boot="another")  # of this host before it was started again
    scratch.remove_abandoned()
    assert not part.exists()


def test_a_process_that_ends_in_order_leaves_nothing(folder: Path, state: Path) -> None:
    with scratch.folder(folder, "weights") as made:
        (made.path / "layer.dat").write_text("x")
        assert made.path.stat().st_mode & 0o777 == 0o700
        assert len(list(state.iterdir())) == 1
    atomic.write(folder / "file", "x")
    scratch.folder(folder, "weights")
    scratch.cleanup()
    assert [file.name for file in folder.iterdir()] == ["file"]
    assert list(state.iterdir()) == []


def test_without_a_state_folder_everything_else_works(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    atomic.write(folder / "file", "x")
    with scratch.folder(folder, "weights") as made:
        (made.path / "layer.dat").write_text("x")
    scratch.remove_abandoned()
    assert [file.name for file in folder.iterdir()] == ["file"]


def test_a_file_goes_with_the_folder_of_another_process(folder: Path, state: Path) -> None:
    """A worker writes into a folder of its command, and is killed; the command ends in order."""
    with scratch.folder(folder, "reuse") as made:
        assert killed(FILE, made.path).is_file()
    assert not [*folder.iterdir()]
    scratch.remove_abandoned()
    assert not [*state.iterdir()]


READ_ONLY = """
import errno, sys
from pathlib import Path
from zinfer.system import atomic

def refuse(*_path, **_settings):
    raise OSError(errno.EROFS, "Read-only file system")

try:
    with atomic.writing(Path(sys.argv[1]) / "good.txt") as stream:
        Path.replace = Path.unlink = refuse
        stream.write(b"new")
except OSError as error:
    print(error)
"""


def test_half_a_file_on_a_drive_that_became_read_only_goes_at_the_next_start(folder: Path, state: Path) -> None:
    assert "Read-only" in python("-c", READ_ONLY, str(folder)).communicate(timeout=PATIENCE_S)[0]
    assert [*folder.iterdir()]
    scratch.remove_abandoned()
    assert not [*folder.iterdir(), *state.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "worker", "both"])
def test_a_killed_run_leaves_no_weights_on_the_drive(
    folder: Path, checkpoint: Checkpoints, tmp_path: Path, victim: str
) -> None:
    probed(tmp_path)
    words = ["run", "-m", str(checkpoint("llama")), "--engine", "accelerate", "--offload", "nvme"]
    words += ["--nvme-path", str(folder), "-p", "x", "--output-len", "900", "--ignore-eos"]
    process = started(tmp_path, *words)
    wait(lambda: list(folder.glob("zinfer-weights-*/index.json")))
    (worker,) = children(process.pid)
    for number in [process.pid] * (victim != "worker") + [worker] * (victim != "command"):
        os.kill(number, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (5 if victim == "worker" else -signal.SIGKILL)
    if victim != "worker":
        wait(lambda: not Path(f"/proc/{worker}").exists())
        assert f"removed {folder}" in zinfer_process(tmp_path, "export", "nothing").stderr
    assert list(folder.iterdir()) == []
