"""Results taken away under a run: noticed at the next line, and no line is lost."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.inline import FakeWorker, run_inline
from tests.inline_batch import InlineRows, line
from tests.inline_batch import run_inline as run_batch
from zinfer.job.recipe import Sweep
from zinfer.job.sweep import Events
from zinfer.record.jsonl import AppendLog, TakenAwayError
from zinfer.record.store import read


def replace(path: Path) -> None:
    path.with_name("other").write_text("other\n")
    path.with_name("other").replace(path)


def add(path: Path) -> None:
    with path.open("a") as file:
        file.write("somebody else\n")


WAYS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "replaced": replace,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "added to": add,
    "moved": lambda path: path.parent.rename(path.parent.with_name("moved")),
}
SHORTENED = {"cut", "emptied"}


@pytest.mark.parametrize("way", WAYS)
def test_every_line_that_nobody_cut_is_saved(tmp_path: Path, way: str) -> None:
    path = tmp_path / "folder" / "file"
    with AppendLog(path) as lines:
        lines.append_lines(b"before")
    wanted = [b"before", *(b"line %d" % number for number in range(20)), b"last"]
    with AppendLog(path) as lines:
        lines.append_lines(*wanted[1:11])
        lines.append_lines(*wanted[11:21])
        lines.check()
        WAYS[way](path)
        with pytest.raises(TakenAwayError, match=r"file was .*file\.saved;") as caught:
            lines.append_lines(b"last")
        assert caught.value.exit_code == 6
        with pytest.raises(TakenAwayError, match=r"file\.saved-2"):
            lines.check()
    saved = path.with_name("file.saved").read_bytes().splitlines()
    if way in SHORTENED:
        assert saved[-1] == b"last"
        assert all(line in wanted for line in saved[:-2])
    else:
        assert saved == wanted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [2, 8])
def test_a_sweep_stops_and_resumes_from_what_was_saved(tmp_path: Path, way: str, at: int) -> None:
    path = tmp_path / "folder" / "r.jsonl"
    sweep = Sweep(model=("fake",), engine=("stream",), offload=("cpu",), batch_size=tuple(range(1, 9)))
    worker = FakeWorker(edge=99)

    def took(point: object, resumed: bool) -> None:
        if len(worker.measured) == at and not resumed:
            WAYS[way](path)

    with pytest.raises(TakenAwayError):
        run_inline(path, sweep, worker, Events(point=took))
    assert worker.measured == list(range(1, min(at + 1, 8) + 1)), "a sweep went on without its file"
    saved = path.with_name("r.jsonl.saved")
    kept = [point.case.workload.batch_size for point in read(saved).points]
    assert kept == worker.measured or (way in SHORTENED and set(kept) < set(worker.measured))
    saved.replace(path)
    run_inline(path, sweep, worker)
    assert sorted(point.case.workload.batch_size for point in read(path).points) == list(range(1, 9))


@pytest.mark.parametrize("way", ["deleted", "replaced", "emptied"])
def test_a_batch_job_stops_and_loses_no_answer(tmp_path: Path, way: str) -> None:
    path, worker = tmp_path / "folder" / "out.jsonl", InlineRows()
    lines = [line(f"a{10 * size}/{size}") for size in range(1, 13)]

    def took(_command: object) -> None:
        if path.stat().st_size and not worker.closed and len(worker.sizes) > 2:
            worker.before = lambda _command: None
            WAYS[way](path)

    worker.before = took
    with pytest.raises(TakenAwayError):
        run_batch(path, lines, worker, max_rows=3)
    saved = path.with_name("out.jsonl.saved")
    saved.replace(path)
    before = path.read_bytes()
    assert before
    run_batch(path, lines, InlineRows(), max_rows=3)
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes().splitlines()) == 12
