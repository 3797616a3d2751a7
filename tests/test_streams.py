"""Standard streams as callers leave them: closed, full, or without a reader. Nothing else may suffer from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import PATIENCE_S, environment
from tests.command import probed
from tests.grid import covering
from tests.test_cli import TINY
from zinfer.record.store import read

pytestmark = pytest.mark.long
WORDS = {0: ["plan", "--list", "models"], 2: ["frobnicate"], 4: ["best"]}
BOTH = ("", "2>&1")


def shell(folder: Path, command: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `command` in a shell, in which "$@" is zinfer with `words`."""
    run = ["sh", "-c", command, "sh", sys.executable, "-m", "zinfer", *words]
    return subprocess.run(
        run, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize(
    ("streams", "code"),
    covering(["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", ">&- 2>/dev/full"], [*WORDS]),
)
def test_a_stream_that_is_closed_or_full_changes_no_exit_code(tmp_path: Path, streams: str, code: int) -> None:
    done = shell(tmp_path, f'exec "$@" {streams}', WORDS[code])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Internal" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["plan", "--list", "models"]])
def test_text_for_a_full_device_is_an_error(tmp_path: Path, words: list[str]) -> None:
    done = shell(tmp_path, 'exec "$@" >/dev/full', words)
    assert done.returncode == 5
    assert done.stderr == "Error: the output: No space left on device\n"
    assert shell(tmp_path, 'exec "$@" >/dev/full 2>&1', words).returncode == 5


RUN = "run -m bloom-tiny --load-format dummy -p x"


@pytest.mark.parametrize(
    ("words", "both"),
    [
        *((words, both) for words in ("--help", "plan --list models") for both in BOTH),
        ("plan -m bloom-tiny --machine h200", "2>&1"),
        pytest.param(RUN, "2>&1", marks=pytest.mark.torch),
    ],
)
def test_a_reader_that_has_gone_ends_a_command_in_peace(tmp_path: Path, words: str, both: str) -> None:
    """As `zinfer plan --list models | head -1` does; the shell writes the exit code to a third stream."""
    probed(tmp_path)
    done = shell(tmp_path, f'{{ "$@" {both} 3>&-; echo $? >&3; }} 3>&2 | true', words.split())
    assert done.stderr.splitlines()[-1] == "0", done.stderr


@pytest.mark.torch
def test_records_are_whole_without_streams(tmp_path: Path) -> None:
    """With stderr closed the next open file gets its number. That file is the records."""
    probed(tmp_path)
    words = ["sweep", *TINY, "--offload", "none", "--batch-size", "1,2", "-o", "r.jsonl"]
    done = shell(tmp_path, 'exec "$@" <&- >&- 2>&-', words)
    assert done.returncode == 0, done.stderr
    records = read(tmp_path / "r.jsonl")
    assert [point.status for point in records.points] == ["ok"] * 2
    assert not records.damaged
