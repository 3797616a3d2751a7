"""The campaign's own judges: each says what is wrong of a planted fault, and nothing of a good run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PATIENCE_S, environment, mentions, wait
from tools.campaign import judge
from tools.campaign.clients import Reply
from tools.campaign.judge import DOCUMENTED
from tools.campaign.lab import Result
from tools.campaign.record import TITLES, Campaign, last, markdown, title
from tools.campaign.shim import CHANGES, COUNT, FAIL, FULL, KILL, Shim, build
from tools.campaign.subject import Ended, alive
from zinfer.record import study

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]


def ended(code: int | None = 0, stdout: str = "", stderr: str = "") -> Ended:
    return Ended(code, stdout, stderr, 1.0)


@pytest.mark.parametrize(
    ("run", "sent", "killed", "fault"),
    [
        (ended(0), [], False, None),
        (ended(5), [], False, None),
        (ended(1, stderr="Internal error"), [], False, "exit code 1"),
        (ended(8), [], False, "exit code 8"),
        (ended(None), [], False, "no end within"),
        (ended(130), [], False, "exit code 130"),
        (ended(130), [signal.SIGINT], False, None),
        (ended(143), [signal.SIGTERM], False, None),
        (ended(5), [signal.SIGTERM], False, "exit code 5"),  # it was interrupted, and says that something failed
        (ended(137), [signal.SIGKILL], False, None),
        (ended(137), [], True, None),
        (ended(137), [], False, "exit code 137"),
        (ended(139), [], True, "exit code 139"),
    ],
)
def test_exit_codes(run: Ended, sent: list[int], killed: bool, fault: str | None) -> None:
    code = judge.code(run, sent, killed)
    assert len(code) == (fault is not None)
    assert fault is None or fault in code[0]
    assert {0, 2, 3, 4, 5, 6, 7} <= DOCUMENTED


def test_an_interrupt_of_python_itself_is_told_from_one_of_zinfer() -> None:
    starting = (
        "Fatal Python error: init_import_site: Failed to import the site module\n"
        'Traceback (most recent call last):\n  File "<frozen site>", line 1, in <module>\nKeyboardInterrupt\n'
    )
    assert judge.before_zinfer(ended(1, stderr=starting), [signal.SIGINT])
    assert judge.before_zinfer(ended(130, stderr=starting), [signal.SIGINT])
    assert not judge.before_zinfer(ended(1, stderr=starting), [signal.SIGTERM])
    assert not judge.before_zinfer(ended(1, stderr="Internal error (KeyError): 'x'"), [signal.SIGINT])
    ours = starting + f'  File "{ROOT}/zinfer/cli.py", line 9, in main\nKeyboardInterrupt\n'
    assert not judge.before_zinfer(ended(130, stderr=ours), [signal.SIGINT])


def test_results_and_the_terminal_are_those_of_an_undisturbed_run() -> None:
    assert not judge.cursor("no display at all")
    assert not judge.cursor("\x1b[?25l work \x1b[?25h")
    assert judge.cursor("\x1b[?25l work \x1b[?25h more \x1b[?25l")
    assert not judge.equal({"a": ["x"]}, {"a": ["x"]}, "answers")
    assert "a: ['y']" in judge.equal({"a": ["y"]}, {"a": ["x"]}, "answers")[0]
    assert judge.equal({}, {"a": ["x"]}, "answers")
    assert judge.equal({"a": ["x", "x"]}, {"a": ["x"]}, "answers")
    wanted = {"a": "one two", "b": "three four"}  # a part of an answer is no beginning of another one
    assert not judge.replies([Reply("a", 200, "one t", fault="cut")], wanted, {200})
    assert "another text" in judge.replies([Reply("a", 200, "one f", fault="cut")], wanted, {200})[0]
    assert "another text" in judge.replies([Reply("a", 200, "one", whole=True)], wanted, {200})[0]
    assert "status 500" in judge.replies([Reply("a", 500, fault="no")], wanted, {200})[0]


def test_files_of_records_only_grow_and_others_are_old_or_new() -> None:
    assert not judge.kept(b"one\ntw", b"one\ntwo\n", "r.jsonl")  # a torn line may go
    assert judge.kept(b"one\ntwo\n", b"one\n", "r.jsonl")
    assert judge.kept(b"one\n", b"", "r.jsonl")
    assert judge.kept(b"one\n", b"eno\n", "r.jsonl")
    assert not judge.whole(b"old", (b"old", b"new"), "page")
    assert not judge.whole(None, (None, b"new"), "page")
    assert "cut" in judge.whole(b"ne", (b"old", b"new"), "page")[0]
    assert "missing" in judge.whole(None, (b"old", b"new"), "page")[0]
    assert not judge.files({"a", "r.jsonl.damaged"}, {"a"}, ("*.damaged",))
    assert "left behind: a.part" in judge.files({"a", "a.part"}, {"a"})[0]
    assert "missing: a" in judge.files(set(), {"a"})[0]
    assert not judge.processes({})
    assert "sleep 60" in judge.processes({7: "sleep 60"})[0]


def test_the_record_counts_what_was_tried(tmp_path: Path) -> None:
    results = [
        Result("kill-run", 0, struck=1),
        Result("kill-run", 1, faults=["a point is lost", "and doubled"], struck=1),
        Result("disk-full", 0, skipped="no compiler"),
    ]
    run = Campaign.of(results, seed=3, seconds=60.0)
    counts = {row.name: (row.tried, row.struck, row.held, row.skipped) for row in run.rows}
    assert counts == {"kill-run": (2, 2, 1, 0), "disk-full": (0, 0, 0, 1)}
    assert run.rows[0].faults == ("1: a point is lost", "1: and doubled")
    study.append(tmp_path / "reliability.jsonl", run)
    assert last(tmp_path / "reliability.jsonl") == run
    text = markdown(run)
    assert text.count("\n| ") == len(run.rows) + 2
    assert "| `zinfer run` killed, then started again | 2 | 2 | 1 | 1 |" in text
    assert "| **all** | 2 | 2 | 1 | 1 |" in text
    assert mentions(text, "Seed 3", "1 cases could not be tried")
    assert title("disk-full") == TITLES["disk-full"]


# A campaign of cases that end at once, and of some that start a process and never end.
ENDLESS = """
import os, subprocess, sys
from pathlib import Path
from tools.campaign import run
from tools.campaign.lab import Lab, Result
def endless(lab, number, tell):
    if number % 2:
        subprocess.run(["sleep", "600"], env={**os.environ, "HOME": str(lab.root / "home")}, start_new_session=True)
    return Result("kill-run", number, struck=1)
run.CLASSES["kill-run"] = endless
run.prepare = lambda root, seed, names, jobs: Lab(root, seed)
run.OVERTIME_S = 0.5
minutes = float(sys.argv[2]) if len(sys.argv) > 2 else None
sys.exit(run.campaign(["kill-run"], range(6), 1, 4, minutes, Path(sys.argv[1])))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, "late"])
def test_the_record_of_a_campaign_that_is_ended_is_written(tmp_path: Path, how: signal.Signals | str) -> None:
    output, late = tmp_path / "reliability.jsonl", ["0.01"] * (how == "late")
    words, env = [sys.executable, "-c", ENDLESS, str(output), *late], environment(TMPDIR=str(tmp_path))
    process = subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, start_new_session=True)
    wait(lambda: [*alive(tmp_path).values()].count("sleep 600") >= 3)
    assert not alive(tmp_path / "other")
    if isinstance(how, signal.Signals):
        os.killpg(process.pid, how)  # as a terminal does
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (128 + how if isinstance(how, signal.Signals) else 0)
    (row,) = (run := last(output)).rows
    assert (row.tried, row.held, run.planned, run.left) == (3, 3, 6, 3)
    assert "3 of 6 planned cases did not end" in stdout
    assert all(f"--seed 1 --class kill-run --number {number}: did not end" in stdout for number in (1, 3, 5))
    assert not alive(tmp_path)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim")) or pytest.skip("no C compiler")


@pytest.fixture
def disk(library: Path, tmp_path: Path) -> Shim:
    """Provide a shim, not armed yet, beside an empty folder ``disk``."""
    (tmp_path / "disk").mkdir()
    return Shim(library, tmp_path / "page")


DISK = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
try:
    for name in range(3):
        with open(folder / str(name), "wb", buffering=0) as file:
            if file.write(b"x" * 100) < 100:
                raise OSError(28, "short")
    (folder.parent / "elsewhere").write_bytes(b"y" * 1000)
except OSError as error:
    os._exit(error.errno)
"""


@pytest.mark.parametrize(
    ("mode", "at", "budget", "code", "files"),
    [
        (FULL, 0, 150, 28, {"0": 100, "1": 50}),
        (FULL, 0, 1000, 0, {"0": 100, "1": 100, "2": 100}),
        (FAIL, 3, 0, 5, {"0": 100, "1": 0}),
        (KILL, 3, 0, -9, {"0": 100, "1": 0}),
        (FAIL, 99, 0, 0, {"0": 100, "1": 100, "2": 100}),
    ],
)
def test_the_shim_strikes_where_it_is_told(
    disk: Shim, tmp_path: Path, mode: int, at: int, budget: int, code: int, files: dict[str, int]
) -> None:
    """Each file is made (an operation) and written (another one)."""
    folder = tmp_path / "disk"
    disk.arm(mode, [folder], at=at, kinds=CHANGES, budget=budget)
    words = [sys.executable, "-c", DISK, str(folder)]
    done = subprocess.run(words, env=environment(**disk.environment), timeout=PATIENCE_S, check=False)
    assert done.returncode == code
    assert (disk.hits > 0) is (code != 0)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == files


SYNCS = """
import os, sys, threading
from pathlib import Path
folder = Path(sys.argv[1])
log = os.open(folder / "old", os.O_WRONLY | os.O_APPEND)
def append(file=log, text=b"line"):
    os.write(file, text)
    os.fsync(file)
def sync_folder():
    os.fsync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
def new(name="new", sync=True):
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append(file) if sync else os.write(file, b"line")
    return file
def draft(sync=True):
    file = os.open(folder / "draft", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"half")
    os.write(1, b"")
    os.write(file, b"half")
    if sync:
        os.fsync(file)
    os.close(file)
    os.rename(folder / "draft", folder / "page")
exec(sys.argv[2])
os._exit(0)
"""


@pytest.mark.parametrize(
    ("actions", "fault"),
    [
        ("append(); append(); os.write(1, b''); os.close(log)", ""),
        ("append(); os.ftruncate(log, 2); os.fdatasync(log)", ""),
        ("new(); sync_folder()", ""),
        ("draft(); sync_folder()", ""),
        ("(folder / 'note').touch()", ""),
        ("(folder.parent / 'elsewhere').write_text('x')", ""),
        ("os.unlink(folder / 'old'); os.write(log, b'line')", ""),
        ("os.write(log, b'line'); threading.Thread(target=os.write, args=(1, b'')).start(); os.fsync(log)", ""),
        ("os.write(log, b'line')", "F/old was not synced before the end"),
        ("os.fsync(log); os.write(log, b'line')", "F/old was not synced before the end"),
        ("os.write(log, b'line'); append()", "F/old was not synced before the next lines"),
        ("os.write(log, b'line'); os.write(1, b'done'); os.fsync(log)",
         "F/old was not synced before something else was written"),
        ("os.write(log, b'line'); os.close(log)", "F/old was not synced before it was closed"),
        ("os.ftruncate(log, 0)", "F/old was not synced before the end"),
        ("new()", "F got a new name, and was not synced"),
        ("new(sync=False); sync_folder()", "F/new was not synced before the end"),
        ("draft()", "F got a new name, and was not synced"),
        ("draft(sync=False); sync_folder()", "F/draft was not synced before it was renamed"),
        ("(folder / 'note').write_text('x')", "F/note was not synced before the end"),
        ("os.write(log, b'line') if os.fork() == 0 else os.wait()", "F/old was not synced before the end"),
    ],
)  # fmt: skip
def test_the_shim_sees_what_is_not_synced(disk: Shim, tmp_path: Path, actions: str, fault: str) -> None:
    folder = tmp_path / "disk"
    (folder / "old").touch()
    disk.arm(COUNT, [folder], audit=True)
    words, env = [sys.executable, "-c", SYNCS, str(folder), actions], environment(**disk.environment)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert disk.unsynced.replace(str(folder), "F") == fault, done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_a_small_campaign(tmp_path: Path) -> None:
    """Run one case of each class and write the record."""
    output = tmp_path / "reliability.jsonl"
    words = [sys.executable, "-m", "tools.campaign", "--seed", "1", "--count", "1", "-o", str(output)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=3600, check=False)
    run = last(tmp_path / "reliability.jsonl")
    assert not [fault for row in run.rows for fault in row.faults], done.stdout
    assert done.returncode == 0, done.stdout
    assert len(run.rows) > 20
    assert sum(row.struck for row in run.rows) > len(run.rows) / 2
