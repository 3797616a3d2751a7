"""Progress: a clock that never stops, points done of all, the time left, and stages that last on a plain stderr."""

import io
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests import results
from tests.inline import MACHINE, FakeWorker, prepared, run_inline
from zinfer.commands.out import PlainConsole
from zinfer.commands.watch import LINE_S, Watch
from zinfer.job.forecast import Forecast, Outlook
from zinfer.job.recipe import Sweep
from zinfer.job.sweep import Events
from zinfer.plan.planner import Planner
from zinfer.worker.server import Server


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


def plain(clock: Time | None = None) -> Watch:
    """Return a watch without a terminal."""
    watch = Watch(clock) if clock else Watch()
    watch.console = PlainConsole(file=sys.stderr, soft_wrap=True)
    return watch


def test_the_clock_goes_on_after_a_finished_stage(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=99)
    monkeypatch.setattr("zinfer.commands.watch.PlainConsole", lambda **_: console)
    watch = Watch(clock)
    watch.progress("loading weights", 1.0)
    for taken in ("0:01:05", "0:02:10", "0:03:15"):
        clock.now += 65
        watch.progress("prefill", 0.0)
        assert watch._bar is not None
        with watch._bar.console.capture() as caught:
            watch._bar.console.print(watch._bar.get_renderable())
        assert taken in caught.get()


def test_a_point_is_printed_with_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    measured = results.point(results.case(8), predicted={"ttft_ms": 1234.0, "step_ms": 1310.0, "host_bytes": 1e9})
    watch = Watch()
    for point in (measured, measured.model_copy(update={"predicted": {}})):
        watch.point(point, resumed=False)
    planned, bare = capsys.readouterr().err.splitlines()
    assert planned.removeprefix(bare).split() == ["(planned", "1.23", "s,", "1.31", "s)"]


def test_a_stage_tells_the_time_it_has_left(clock: Time) -> None:
    watch = Watch(clock)
    watch.progress("loading weights", 0.0)
    clock.now += 30
    watch.progress("loading weights", 0.25)
    assert watch.times() == "0:00:30, about 1 min 30 s left"
    clock.now += 1
    watch.progress("generating", 0.0)
    assert watch.times() == "0:00:31"


def test_a_long_stage_is_a_line_where_there_is_no_terminal(clock: Time, capsys: pytest.CaptureFixture[str]) -> None:
    watch, stage = plain(clock), "compiling DeepSpeed's file I/O"
    for seconds, told in ((0, False), (LINE_S, True), (1, False)):
        clock.now += seconds
        watch.progress(stage, 0.0)
        error = capsys.readouterr().err
        assert stage in error if told else error == ""


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_machine_without_a_gpu_has_no_link(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    watch = plain()
    (job,) = prepared(Sweep(model=("fake",), offload=("cpu",), batch_size=(1,)))
    machine = MACHINE if gpus else MACHINE.model_copy(update={"gpu_count": 0, "gpu_bytes": 0})
    watch.loading(job.plan.model_copy(update={"machine": machine}))
    watch.point(results.point(results.case(1)), resumed=False)
    assert capsys.readouterr().err.count("  link ") == gpus


def test_every_stage_of_a_worker_reaches_the_parent() -> None:
    parent, worker = Pipe()
    server = Server(worker)
    for stage, share in (("starting", 0.0), ("compiling", 0.0), ("compiling", 0.1), ("loading weights", 0.0)):
        server._on_progress(stage, share)
    worker.close()
    assert [parent.recv()[0] for _ in range(3)] == ["starting", "compiling", "loading weights"]
    with pytest.raises(EOFError):
        parent.recv()


def test_a_sweep_reports_its_points_of_all_and_the_time_left(tmp_path: Path) -> None:
    seen: list[Outlook] = []
    sweep = Sweep(model=("fake",), offload=("cpu",), batch_size=(1, 2, 4, 8, 16))
    run_inline(tmp_path / "r.jsonl", sweep, FakeWorker(edge=4, pause_s=0.01), Events(outlook=seen.append))
    assert [(progress.done, progress.points) for progress in seen] == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]
    assert all(progress.exact for progress in seen)
    resumed: list[Outlook] = []
    run_inline(tmp_path / "r.jsonl", sweep, FakeWorker(edge=4), Events(outlook=resumed.append))
    assert [progress.done for progress in resumed] == [0, 1, 2, 3, 4]


def test_time_left_is_scaled_by_what_points_took() -> None:
    rates = {"h2d_bandwidth": 1e3, "hbm_bandwidth": 1e6, "matmul_flops": 1e9}
    sweep = Sweep(model=("fake",), offload=("cpu",), batch_size=(1, 2, 4))
    (job,) = prepared(sweep)
    job = replace(job, planner=Planner(job.plan.case, job.plan.model, MACHINE.model_copy(update=rates)))
    forecast = Forecast(sweep, [(job, set())])
    before = forecast.outlook().seconds_left
    assert before is not None
    forecast.start(0)
    forecast.finish(0, job.cases[0].with_batch(1), taken_s=4 * before, resumed=False)
    after = forecast.outlook()
    assert (after.done, after.points) == (1, 3)
    assert (after.seconds_left or 0) > 2 * before
    measured = frozenset(job.cases[0].with_batch(size) for size in (1, 2, 4))
    assert Forecast(sweep, [(job, measured)]).outlook().seconds_left == 0


def test_auto_counts_about_as_many_points_as_it_tries(tmp_path: Path) -> None:
    sweep = Sweep(model=("fake",), offload=("cpu",), batch_size="1,8,auto", input_len=(10_000_000,))
    (job,) = prepared(sweep)
    outlook = Forecast(sweep, [(job, set())]).outlook()
    assert not outlook.exact
    largest = job.planner.max_batch(job.cases[0].workload)
    points = run_inline(tmp_path / "r.jsonl", sweep, FakeWorker(edge=largest))
    assert outlook.points == sum(point.usable for point in points)
