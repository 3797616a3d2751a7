"""Leases: what a killed process left goes at the next start, and nothing else ever does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import PATIENCE_S, environment
from zinfer.cli import cli
from zinfer.system import atomic, lease

# Each makes something in the folder of its first argument, says so, and waits for its end.
WEIGHTS = """
import os, sys, time
from pathlib import Path
from zinfer.system import lease
own = lease.folder(Path(sys.argv[1]), "weights", ("*.dat",))
(own.path / "deep").mkdir()
(own.path / "deep" / "layer.dat").write_bytes(b"x" * 1000)
(own.path / "layer.dat").write_bytes(b"x" * 1000)
print(own.path, flush=True)
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
    lease.end()
    yield tmp_path / "state" / "zinfer" / "leases"
    lease.end()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def killed(script: str, place: Path, number: int = signal.SIGKILL) -> Path:
    """Run `script` until it has made its path, kill it, and return the path."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(place)], stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.exists()
    lease.sweep()
    assert path.exists(), "swept while its process lives"
    process.send_signal(number)
    process.wait(timeout=PATIENCE_S)
    process.stdout.close()
    return path


TORN = """
import os, sys, time
from pathlib import Path
from zinfer.system import lease
def torn(self, text):
    with self.open("w") as file:
        file.write(text[:{kept}])
    print(self.parent, flush=True)
    time.sleep(600)
Path.write_text = torn
lease.folder(Path(sys.argv[1]), "weights", ("*.dat",))
"""


@pytest.mark.parametrize("script", [WEIGHTS, FILE, *(TORN.replace("{kept}", kept) for kept in ("0", "3", "32"))])
def test_a_killed_process_leaves_nothing_for_good(place: Path, state: Path, script: str) -> None:
    (place / "good.txt").write_text("good")
    path = killed(script, place)
    assert path.exists()
    told: list[str] = []
    lease.sweep(told.append)
    assert [file.name for file in place.iterdir()] == ["good.txt"]
    assert (place / "good.txt").read_text() == "good"
    assert len(told) == 1
    assert str(path) in told[0]
    assert list(state.iterdir()) == []


def test_the_next_command_says_what_it_removed(place: Path) -> None:
    path = killed(WEIGHTS, place)
    result = CliRunner().invoke(cli, ["export", str(place / "nothing")])
    assert result.exit_code == 4
    assert f"removed {path} (" in result.stderr
    assert not path.exists()


def test_files_of_others_in_an_owned_folder_stay(place: Path, state: Path, tmp_path: Path) -> None:
    path, thesis = killed(WEIGHTS, place), tmp_path / "thesis.dat"
    thesis.write_text("years of work")
    (path / "notes.txt").write_text("mine")
    (path / "link.dat").symlink_to(thesis)
    (path / "far").symlink_to(tmp_path)
    told: list[str] = []
    lease.sweep(told.append)
    lease.sweep(told.append)
    assert sorted(file.name for file in path.iterdir()) == [".zinfer", "far", "link.dat", "notes.txt"]
    assert thesis.exists()
    assert len(told) == 1
    assert "these stay" in told[0]
    assert list(state.iterdir()) == []


def test_links_go_where_they_are_announced_and_targets_stay(place: Path, state: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.dat"
    thesis.write_text("years of work")
    path = killed(WEIGHTS.replace('("*.dat",)', '("*.dat", "*.txt@")'), place)
    (path / "link.txt").symlink_to(thesis)
    lease.sweep()
    assert not path.exists()
    assert thesis.read_text() == "years of work"


def forged(state: Path, *paths: Path, token: str = "ab" * 16, host: str | None = None) -> Path:
    """Write a lease that nobody holds."""
    folder = state / "@".join((token, host or os.uname().nodename, host or lease._boot()))
    folder.mkdir(parents=True, mode=0o700)
    state.chmod(0o700)
    (folder / lease.LOCK).touch()
    for number, path in enumerate(paths):
        (folder / str(number)).symlink_to(path)
    return folder


def test_a_forged_lease_deletes_no_file_of_the_user(place: Path, state: Path) -> None:
    thesis, work = place / "thesis.txt", place / "work"
    thesis.write_text("years")
    work.mkdir()
    (work / "data.dat").write_text("years")
    (work / lease.MARK).write_text("*")
    marked = place / ("zinfer-weights-0-" + "ab" * 16)  # the right name, but without the mark
    marked.mkdir()
    (marked / "data.dat").write_text("years")
    linked = place / ("zinfer-weights-1-" + "ab" * 16)
    linked.symlink_to(work)
    part = place / f"x.0.{'ab' * 16}.part"
    part.symlink_to(thesis)
    forged(state, work, marked, linked, place, thesis, part, Path("thesis.txt"), place / ".." / "place" / "thesis.txt")
    lease.sweep()
    assert thesis.read_text() == (work / "data.dat").read_text() == (marked / "data.dat").read_text() == "years"


@pytest.mark.parametrize("fault", ["", "open state", "open folder", "link", "another host"])
def test_a_lease_that_is_not_of_this_user_and_host_is_not_read(place: Path, state: Path, fault: str) -> None:
    part = place / f"x.0.{'ab' * 16}.part"
    part.write_text("x")
    folder = forged(state, part, host="elsewhere" if fault == "another host" else None)
    if fault.startswith("open"):
        (state if fault == "open state" else folder).chmod(0o770)
    elif fault == "link":
        folder.rename(place / "moved")
        folder.symlink_to(place / "moved")
    lease.sweep()
    assert part.exists() == bool(fault)
    state.chmod(0o700)


def test_a_drive_that_is_not_mounted_keeps_its_lease(place: Path, state: Path) -> None:
    path = killed(WEIGHTS, place)
    place.rename(place.with_name("away"))
    lease.sweep()
    assert len(list(state.iterdir())) == 1
    place.with_name("away").rename(place)
    lease.sweep()
    assert not path.exists()


def test_the_mark_goes_last(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while a folder is removed leaves one that the next start knows."""
    own = lease.folder(place, "tokenizer", ("*",))
    for name in ("a.json", "z.json"):
        (own.path / name).write_text("x")
    removed: list[str] = []
    unlink = os.unlink

    def noted(path: str, *, dir_fd: int | None = None) -> None:
        removed.append(Path(path).name)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", noted)
    own.cleanup()
    *files, mark, _link = removed
    assert sorted(files) == ["a.json", "z.json"]
    assert mark == lease.MARK
    assert not own.path.exists()


def test_a_drive_that_is_away_when_its_process_ends_keeps_its_lease(place: Path, state: Path) -> None:
    script = WEIGHTS.replace("time.sleep(600)", "os.rename(sys.argv[1], sys.argv[1] + '-away'); own.cleanup()")
    command = [sys.executable, "-c", script, str(place)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert len(list(state.iterdir())) == 1
    place.with_name("place-away").rename(place)
    assert Path(done.stdout.strip()).is_dir()
    lease.sweep()
    assert list(place.iterdir()) == []
    assert list(state.iterdir()) == []


def test_a_process_that_ends_in_order_leaves_neither_files_nor_a_lease(place: Path, state: Path) -> None:
    with lease.folder(place, "weights", ("*.dat",)) as own:
        (own.path / "layer.dat").write_text("x")
        assert own.path.stat().st_mode & 0o777 == 0o700
    atomic.write(place / "file", "x")
    assert [file.name for file in place.iterdir()] == ["file"]
    (held,) = state.iterdir()
    assert [one.name for one in held.iterdir()] == [lease.LOCK], "a lease names only what is owned"
    lease.end()
    assert list(state.iterdir()) == []


def test_without_a_folder_for_leases_everything_else_works(place: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    atomic.write(place / "file", "x")
    with lease.folder(place, "weights", ("*.dat",)) as own:
        (own.path / "layer.dat").write_text("x")
    lease.sweep()
    assert [file.name for file in place.iterdir()] == ["file"]


def test_a_written_file_keeps_its_permissions_and_a_link_its_target(place: Path) -> None:
    (place / "file").write_text("old")
    (place / "file").chmod(0o640)
    (place / "link").symlink_to("file")
    atomic.write(place / "link", "new")
    assert (place / "link").is_symlink()
    assert (place / "file").read_text() == "new"
    assert (place / "file").stat().st_mode & 0o777 == 0o640
    for name in ("long" * 63, "é" * 127):
        atomic.write(place / name, "x")
        assert (place / name).read_text() == "x"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "worker", "both"])
def test_a_killed_run_leaves_no_weights_on_the_drive(
    place: Path, checkpoint: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    from tests.command import zinfer_process as zinfer
    from zinfer.core.machine import Machine
    from zinfer.system.host import slug

    machine = Machine(name=slug(), source="measured", host_bytes=20 << 30, h2d_bandwidth=8e9, hbm_bandwidth=16e9)
    file = tmp_path / "sweeps" / "results" / slug() / "machine.json"
    file.parent.mkdir(parents=True)
    file.write_text(machine.model_dump_json())
    words = ["run", "-m", str(checkpoint("llama")), "--engine", "accelerate", "--offload", "nvme"]
    words += ["--nvme-path", str(place), "-p", "x", "--output-len", "900", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zinfer", *words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(place.glob("zinfer-weights-*/index.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    for number in [process.pid] * (victim != "worker") + [int(children[0])] * (victim != "command"):
        os.kill(number, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (5 if victim == "worker" else -signal.SIGKILL)
    if victim != "worker":
        while Path(f"/proc/{children[0]}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert f"removed {place}" in zinfer(tmp_path, "export", "nothing").stderr
    assert list(place.iterdir()) == []
