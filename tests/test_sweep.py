"""Logic of a sweep: the batches to try, the points to measure again, and survival of kills."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import PATIENCE_S
from tests.inline import FakeWorker, run_inline, run_outcome
from zinfer.core.machine import Machine
from zinfer.job.forecast import Answer, Batches, Try, listed, search
from zinfer.job.recipe import RecipeError, Sweep, engine_recipe, make_sweep, parse_batches, parse_option
from zinfer.job.signals import Interrupted
from zinfer.job.sweep import exit_code, outlook, prepare, source_of
from zinfer.record.measurement import Measurement, Status
from zinfer.record.store import Record, Store, read
from zinfer.system import machines
from zinfer.worker.process import WorkerDied
from zinfer.worker.session import Session
from zinfer.worker.tasks import Measure


def drive(
    batches: Batches,
    edge: int,
    failure: Status = "oom_gpu",
    rate: Callable[[int], float] = float,
    timed_edge: int | None = None,
) -> list[Try]:
    """Return the batches tried at `rate` tokens a second. `edge` is the largest that runs, `timed_edge` when timed."""
    tried: list[Try] = []
    with suppress(StopIteration):
        attempt = next(batches)
        while True:
            tried.append(attempt)
            fine = attempt.batch_size <= (timed_edge if timed_edge is not None and attempt.timed else edge)
            rated = rate(attempt.batch_size) if fine and attempt.timed else None
            attempt = batches.send(Answer("ok" if fine else failure, rated))
    return tried


@given(st.integers(0, 3000), st.integers(1, 4000), st.lists(st.integers(1, 64)), st.integers(0, 5000))
def test_auto_finds_and_times_the_exact_edge(edge: int, limit: int, first: list[int], guess: int) -> None:
    first = sorted({1, *first} if first else [])
    tried = drive(search(limit, first, guess), edge)
    batches = [attempt.batch_size for attempt in tried]
    assert len(tried) == len(set(tried))
    assert all(1 <= batch <= limit for batch in batches)
    timed = [attempt.batch_size for attempt in tried if attempt.timed and attempt.batch_size <= edge]
    assert max(timed, default=0) == min(edge, limit)
    if edge < limit:
        assert edge + 1 in batches


def test_a_good_guess_of_the_edge_saves_attempts() -> None:
    near, far = (drive(search(1 << 20, (1, 8, 32), guess), 119) for guess in (117, 0))
    assert [attempt.batch_size for attempt in near] == [1, 8, 32, 64, 117, 118, 120, 119, 119]
    assert len(near) < len(far)
    assert [attempt.batch_size for attempt in near if attempt.timed] == [1, 8, 32, 64, 119]


def test_an_edge_that_only_one_run_reaches_is_not_the_edge() -> None:
    tried = drive(search(100, (1,), 10), edge=10, timed_edge=8)
    assert [attempt.batch_size for attempt in tried if attempt.timed] == [1, 2, 4, 8, 10, 9]


@pytest.mark.parametrize("first", [(), (1, 8), (64,)])
def test_auto_ends_when_two_doublings_gain_under_5_percent(first: tuple[int, ...]) -> None:
    """Rates as of a machine that computes: they rise to 100 at batch 16 and hardly behind it."""
    rates = {size: min(100.0, 6.25 * size) + size / 100 for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    tried = [attempt.batch_size for attempt in drive(search(1 << 20, first), 1 << 20, rate=rates.__getitem__)]
    assert tried == {(): [1, 2, 4, 8, 16, 32, 64], (1, 8): [1, 8, 16, 32, 64], (64,): [64, 128, 256]}[first]
    rising = [attempt.batch_size for attempt in drive(search(1 << 20), 100, rate=lambda size: size**0.04)]
    assert {64, 128, 100, 101} <= {*rising}, "each two gain 5.7%, up to the edge"


def test_minutes_bound_a_sweep_at_a_point_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load has its part of the time. All points that were begun are on disk."""
    clock = count()
    monkeypatch.setattr("zinfer.job.sweep.monotonic", lambda: float(next(clock)))
    sweep = Sweep(model=("fake",), offload=("none", "cpu"), batch_size=(1, 2, 4, 8, 16, 32), minutes=0.4)
    cut = run_outcome(tmp_path / "r.jsonl", sweep, FakeWorker(edge=99))
    assert tuple(cut.points) == read(tmp_path / "r.jsonl").points
    measured = [(point.case.offload, point.case.workload.batch_size) for point in cut.points]
    for offload in ("none", "cpu"):
        sizes = [size for side, size in measured if side == offload]
        assert 1 <= len(sizes) < 6
        assert f"stream {offload} from batch {2 * sizes[-1]}" in cut.left
    again = FakeWorker(edge=99)
    whole = run_outcome(tmp_path / "r.jsonl", sweep.model_copy(update={"minutes": 0}), again)
    assert (len(whole.points), whole.left) == (12, ())
    assert len(again.measured) == 12 - len(measured)


def test_a_model_larger_than_host_memory_keeps_a_share_on_the_gpu() -> None:
    """Without the option; a share that is given stays as it is."""
    small = machines.load("h100-80gb").model_copy(update={"host_bytes": 64 << 30})
    for budgets in ((None,), ("0%",)):
        sweep = Sweep(model=("llama-3.1-70b",), offload=("cpu",), batch_size=(1,), gpu_weights=budgets)
        (job,) = prepare(sweep, small, partial(source_of, sweep), lambda load: load.engine)
        assert job.plan.fits is (budgets == (None,))
        assert {case.gpu_weights for case in job.cases} == {job.plan.case.gpu_weights}
        assert (job.plan.case.gpu_weights == "0%") is (budgets == ("0%",))


def test_a_small_model_on_a_small_machine_takes_minutes(tmp_path: Path) -> None:
    """The rates of two cores: memory would hold thousands of rows, whose prefill takes minutes."""
    rates: dict[str, Any] = {"h2d_bandwidth": 5.6e9, "hbm_bandwidth": 11.1e9, "matmul_flops": 2.8e10}
    machine = Machine(name="cpu", source="measured", host_bytes=20 << 30, **rates)
    sweep = Sweep(model=("bloom-tiny",), engine=("stream", "peer"), batch_size="1,8,auto")
    jobs = prepare(sweep, machine, lambda load: source_of(sweep, load), lambda load: load.engine)
    assert jobs[0].plan.max_batch_size > 1000
    expected = outlook(sweep, jobs)
    assert expected.points <= 20
    assert expected.seconds_left is not None
    assert expected.seconds_left < 900


def test_the_peer_is_what_a_user_would_pick_for_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(model=("m",), engine=("stream", "peer"))
    for spec, offloaded in (("a spec", "deepspeed"), (None, "accelerate")):
        monkeypatch.setattr("zinfer.job.recipe.find_spec", lambda _name, spec=spec: spec)
        loads = [(load.engine, load.offload) for load in sweep.loads()]
        assert loads == [("stream", "none"), ("stream", "cpu"), ("accelerate", "none"), (offloaded, "cpu")]


def test_listed_stops_at_out_of_memory_and_only_there() -> None:
    assert drive(listed([8, 1, 4]), 4) == [Try(1), Try(4), Try(8)]
    assert drive(listed([1, 2, 4, 8, 16]), 2) == [Try(1), Try(2), Try(4)]
    assert drive(listed([1, 2, 4]), 1, "nan_output") == [Try(1), Try(2), Try(4)]


def test_batch_ranges_and_option_values_are_read_as_a_person_means_them() -> None:
    assert parse_batches("1,2,4") == (1, 2, 4)
    assert parse_batches("1-64*2") == (1, 2, 4, 8, 16, 32, 64)
    assert parse_batches("8-32+8") == (8, 16, 24, 32)
    assert parse_batches("3,1-5*3") == (1, 3)
    assert parse_batches("1,8,auto") == "1,8,auto"
    assert [parse_option(text) for text in ("true", "3", "0.5", "fast", "1e400")] == [True, 3, 0.5, "fast", "1e400"]


BAD_RANGES = (
    "", "autos", "0", "a", "1-8", "1-8*1", "1-8+0", "0-8*2", "-1", "1;2", "auto,1", "1,auto*4", "best,1", "best"
)  # fmt: skip


@pytest.mark.parametrize("text", BAD_RANGES)
def test_bad_batch_ranges_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--batch-size"):
        parse_batches(text)


def test_unknown_recipe_keys_list_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"r\.toml: unknown key 'batchsize'; the keys are .*batch_size"):
        make_sweep({"model": "bloom-tiny", "batchsize": 3}, "r.toml")
    with pytest.raises(RecipeError, match="offload"):
        make_sweep({"model": "bloom-tiny", "offload": "gpu"}, "r.toml")
    with pytest.raises(RecipeError, match="no engine 'warp'"):
        engine_recipe("warp")


def test_axes_multiply_in_load_order() -> None:
    axes: dict[str, Any] = {
        "model": ("a", "b"),
        "offload": ("none", "cpu"),
        "options": {"kv_attention": ("cpu", "gpu")},
    }
    loads = [(load.model, load.offload, dict(load.options)["kv_attention"]) for load in Sweep(**axes).loads()]
    assert loads == [*product("ab", ("none", "cpu"), ("cpu", "gpu"))]


def test_out_of_memory_is_recorded_once_and_ends_the_load(tmp_path: Path) -> None:
    worker = FakeWorker(edge=5)
    points = run_inline(tmp_path / "r.jsonl", Sweep(model=("fake",), batch_size=(1, 4, 8, 16)), worker)
    ends = [(offload, *end) for offload in ("none", "cpu") for end in ((1, "ok"), (4, "ok"), (8, "oom_gpu"))]
    assert [(p.case.offload, p.case.workload.batch_size, p.status) for p in points] == ends
    assert worker.loads == 2


@pytest.mark.parametrize(
    ("worker", "edge", "status"),
    [
        (FakeWorker(edge=37), 37, "oom_gpu"),
        (FakeWorker(edge=999, fails=dict.fromkeys(range(6, 200), "unsupported")), 5, "unsupported"),
    ],
)
def test_auto_reports_the_edge_of_memory_or_of_the_engine(
    tmp_path: Path, worker: FakeWorker, edge: int, status: Status
) -> None:
    """A TensorRT plan answers `unsupported` beyond its own largest batch."""
    auto = Sweep(model=("fake",), offload=("cpu",))
    points = run_inline(tmp_path / "r.jsonl", auto, worker)
    good, bad = ([p.case.workload.batch_size for p in points if p.status == end] for end in ("ok", status))
    assert (max(good), min(bad)) == (edge, edge + 1)
    assert [p.case.workload.batch_size for p in points if p.usable] == [2**n for n in range(6) if 2**n <= edge] + [edge]
    assert exit_code(auto, points) == 0
    assert exit_code(auto.model_copy(update={"batch_size": (1, 8)}), points) == 3


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    sweep = Sweep(model=("fake",), offload=("cpu",), batch_size=(1, 2, 4))
    first = run_inline(path, sweep, FakeWorker(edge=100, fails={2: "crashed"}))
    assert [p.status for p in first] == ["ok", "crashed", "ok"]
    assert exit_code(sweep, first) == 3
    again = FakeWorker(edge=100)
    second = run_inline(path, sweep, again)
    assert again.measured == [2]
    assert [p.status for p in second] == ["ok", "ok", "ok"]
    assert exit_code(sweep, second) == 0
    third = FakeWorker(edge=100)
    run_inline(path, sweep, third)
    assert (third.loads, third.measured) == (0, [])


def test_workers_that_end_for_want_of_memory_leave_the_smaller_batches_to_others(tmp_path: Path) -> None:
    """Ranks that exchange parts end together; any other end counts, and the second one ends the load."""

    class Ends(FakeWorker):
        def _measure_point(self, session: Session, request: Measure) -> Measurement:
            if (batch := request.case.workload.batch_size) > self.edge:
                raise WorkerDied(self.fails.get(batch, "oom_gpu"), "GPU 1: out of memory")
            return super()._measure_point(session, request)

    sweep = Sweep(model=("fake",), offload=("cpu",), batch_size=(2, 8), input_len=(8, 16, 32))
    worker = Ends(edge=4)
    points = run_inline(tmp_path / "r.jsonl", sweep, worker)
    assert [point.status for point in points] == ["ok", "oom_gpu"] * 3
    assert worker.loads == 3
    points = run_inline(tmp_path / "s.jsonl", sweep, Ends(edge=4, fails={8: "crashed"}))
    assert [point.status for point in points] == ["ok", "crashed"] * 2


def test_a_failed_load_is_reported_once_and_the_next_runs(tmp_path: Path) -> None:
    sweep = Sweep(model=("fake",), offload=("none", "cpu"), batch_size=(1, 2))
    points = run_inline(tmp_path / "r.jsonl", sweep, FakeWorker(edge=9, refuse_offload="none"))
    ends = [("none", "unsupported", "load"), ("cpu", "ok", None), ("cpu", "ok", None)]
    assert [(p.case.offload, p.status, p.stage) for p in points] == ends
    assert exit_code(sweep, points) == 3
    assert exit_code(sweep, points[:1]) == 4
    auto = sweep.model_copy(update={"batch_size": "1,8,auto"})
    assert (exit_code(auto, points), exit_code(auto, points[:1])) == (0, 4), "that it does not fit is an answer"


@pytest.mark.long
@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of a sweep that is resumed each time; a point that was reported as stored must be on
    disk."""
    seed = str(random.Random(7).randrange(1 << 30))
    command = [sys.executable, "-m", "tests.inline", str(tmp_path), str(kills), seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    finished, points = map(int, done.stdout.split())
    assert finished >= kills // 30
    assert points > 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_points_is_held_back_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    append = Store.append

    def interrupted(store: Store, record: Record) -> None:
        if isinstance(record, Measurement) and record.case.workload.batch_size == 2:
            os.kill(os.getpid(), number)
        append(store, record)

    monkeypatch.setattr(Store, "append", interrupted)
    worker = FakeWorker(edge=9)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as interrupt:
        run_inline(tmp_path / "r.jsonl", Sweep(model=("fake",), batch_size=(1, 2, 4, 8)), worker)
    assert interrupt.value.signal == number
    points = read(tmp_path / "r.jsonl").points
    assert [(p.case.workload.batch_size, p.status) for p in points] == [(1, "ok"), (2, "ok"), (4, "cancelled")]
    assert worker.measured == [1, 2]
    assert signal.getsignal(number) is before
