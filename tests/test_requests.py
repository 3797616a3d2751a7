"""Loads of requests: how they are drawn and arrive, how the worker measures them, and what their records say."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from subprocess import CompletedProcess
from typing import Any

import pytest
from click.testing import CliRunner

from tests import Spy
from tests.command import probed, zinfer
from tests.fakes import TARGET, FakeEngine
from tests.inline import MACHINE, SPEC
from tests.inline_worker import InlineWorker
from tests.results import case, plain
from zinfer.analysis.reproduce import case_commands
from zinfer.analysis.requests import goodput
from zinfer.analysis.sla import Sla, check
from zinfer.checkpoint.source import Source
from zinfer.cli import cli
from zinfer.core.machine import Machine
from zinfer.core.request import GREEDY, Request
from zinfer.core.requests import LengthDistribution, Lengths, RequestLoad
from zinfer.job.recipe import RecipeError, Sweep, make_sweep
from zinfer.job.requests import request_sets
from zinfer.job.signals import Interrupted
from zinfer.job.sweep import Events, exit_code, prepare, run
from zinfer.plan.planner import make_plan
from zinfer.record.export import request_table
from zinfer.record.jsonl import finite, seal
from zinfer.record.measurement import Measurement
from zinfer.record.requests import METRICS, RequestKey, RequestPoint, RequestSample
from zinfer.record.store import Header, Records, Store, read
from zinfer.system.documents import DocumentError
from zinfer.worker import requests as clock_of_requests
from zinfer.worker.process import WorkerDied
from zinfer.worker.session import Session, facts_of
from zinfer.worker.tasks import Answer, Command, Facts, Load, MeasureRequests

SOURCE = "lognormal:20,6,max_input_len=50,max_output_len=12,sigma=0.5"


@pytest.fixture(autouse=True)
def _swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip what takes most of the time without a model: to collect garbage, and to judge a million rows."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    monkeypatch.setattr("zinfer.plan.search.LARGEST_BATCH", 1 << 8)


def load(**fields: Any) -> RequestLoad:
    return RequestLoad.model_validate({"source": SOURCE, "requests": 30} | fields)


def rows(asked: RequestLoad) -> list[Lengths]:
    return LengthDistribution.parse(asked.source).draw(asked.requests, asked.seed)


def measure(worker: InlineWorker, asked: RequestLoad) -> RequestPoint:
    """Measure random requests."""
    lengths = rows(asked)
    requests = [Request([], it.output_len, GREEDY, ignore_eos=True, key=key) for key, it in enumerate(lengths)]
    input_lens = [length.input_len for length in lengths]
    command = MeasureRequests(case=worker.session.plan.case, load=asked, requests=requests, input_lens=input_lens)
    return worker.ask(command)


class Time:
    """Fake clock on which a pass takes a second. It records the sleeps."""

    def __init__(self, engine: Any) -> None:
        self.now, self.slept = 100.0, list[float]()
        forward = engine.forward

        def timed(work: Sequence[Any]) -> Any:
            self.now += 1.0
            return forward(work)

        engine.forward = timed

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(seconds, 1e-6)  # a real clock moves on by itself


def worker_of(**options: Any) -> InlineWorker:
    """Load the engine without a model."""
    fields: dict[str, Any] = {"model": "fake", "layers": None, "input_len": 20, "output_len": 6}
    asked = case(engine=TARGET, options=tuple(sorted(options.items())), **fields)
    return InlineWorker.around(FakeEngine(make_plan(asked, SPEC, MACHINE)))


def timed(asked: RequestLoad, **options: Any) -> tuple[RequestPoint, Time]:
    """Measure a load without a model; return the clock that the engine had of its own, too."""
    worker = worker_of(**options)
    fake = Time(worker.session.engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock_of_requests, "time", fake)
        return measure(worker, asked), fake


def measured(asked: RequestLoad, **options: Any) -> RequestPoint:
    return timed(asked, **options)[0]


def lengths_of(point: RequestPoint) -> list[tuple[int, int]]:
    assert point.status == "ok", point.error
    return [(sample.input_len, sample.tokens) for sample in point.samples]


@pytest.mark.parametrize("in_flight", [4, 7, "auto"])
def test_a_closed_loop_keeps_its_requests_in_flight(in_flight: Any) -> None:
    point = measured(load(in_flight=in_flight))
    assert lengths_of(point) == rows(point.requests)
    assert sum(request.output_len for request in rows(point.requests)) == point.output_tokens
    if in_flight == "auto":
        return
    for number, end in enumerate(point.pass_ms):
        start = point.pass_ms[number - 1] if number else 0.0
        flying = [sample for sample in point.samples if sample.arrived_ms <= start and sample.passes[-1] >= number]
        left = [sample for sample in point.samples if sample.arrived_ms > start]
        assert len(flying) == in_flight or (not left and len(flying) < in_flight), end


def test_the_longest_come_first_if_asked() -> None:
    """The load then ends with short answers, and takes fewer passes."""
    given, point = (measured(load(in_flight=4, seed=5, order=order)) for order in ("given", "longest-first"))
    begun = sorted(point.samples, key=lambda sample: (sample.arrived_ms, sample.runs[0][0]))
    lengths = [sample.output_len for sample in begun]
    assert sorted(lengths[:4]) == sorted(lengths)[-4:]
    assert lengths_of(point) == lengths_of(given), "by their numbers"
    assert len(point.pass_ms) < len(given.pass_ms)
    assert point.requests.loop == "4 in flight, the longest first"


def test_an_open_loop_lets_requests_arrive_at_their_times() -> None:
    asked = load(request_rate=0.25, seed=3)
    point, fake = timed(asked)
    assert point.status == "ok", point.error
    assert [sample.arrived_ms / 1e3 for sample in point.samples] == pytest.approx(asked.arrivals(), abs=1e-6)
    assert fake.slept, "nothing ran while nothing had come"
    assert point.busy_ms == pytest.approx(1000 * len(point.pass_ms))
    assert point.wall_ms > point.busy_ms
    assert all(sample.passes[0] * 1000 <= point.wall_ms for sample in point.samples)
    # a request that arrives within a pass waits for its end: its TTFT counts from its arrival, not from the next pass
    assert any(value % 1000 > 1 for value in point.of("ttft_ms"))


def test_arrivals_have_the_rate_and_follow_the_seed() -> None:
    many = load(requests=20_000, request_rate=2.0)
    times = many.arrivals()
    intervals = [end - start for start, end in pairwise([0.0, *times])]
    assert mean(intervals) == pytest.approx(0.5, rel=0.02)
    assert mean((gap - 0.5) ** 2 for gap in intervals) == pytest.approx(0.25, rel=0.05), (
        "a Poisson process: variance 1/r^2"
    )
    assert times == sorted(times) == many.arrivals()
    assert times != many.model_copy(update={"seed": 1}).arrivals()
    assert load(request_rate="inf").arrivals() == [0.0] * 30


@pytest.mark.parametrize(
    "loop", [{"in_flight": 4}, {"request_rate": 0.25, "seed": 3}, {"request_rate": "inf"}], ids=str
)
def test_statistics_are_those_of_the_samples(loop: dict[str, Any]) -> None:
    point = measured(load(**loop))
    ends = point.pass_ms
    by_hand: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": [], "itl_ms": [], "e2e_ms": []}
    for sample in point.samples:
        times = [ends[number] for number in sample.passes]
        by_hand["ttft_ms"].append(times[0] - sample.arrived_ms)
        by_hand["e2e_ms"].append(times[-1] - sample.arrived_ms)
        by_hand["itl_ms"] += [end - before for before, end in pairwise(times)]
        if len(times) > 1:
            by_hand["tpot_ms"].append((times[-1] - times[0]) / (len(times) - 1))
    for metric in METRICS:
        values, summary = sorted(by_hand[metric]), point.summary(metric)
        assert sorted(point.of(metric)) == values
        assert summary is not None
        assert summary.mean == pytest.approx(mean(values))
        for percent, value in ((50, summary.p50), (90, summary.p90), (99, summary.p99)):
            below = sum(other <= value for other in values)
            assert value in values
            assert below >= percent / 100 * len(values) > below - sum(other == value for other in values)
    assert point.output_tok_s == pytest.approx(point.output_tokens / (ends[-1] / 1e3))
    assert point.request_s == pytest.approx(30 / (ends[-1] / 1e3))
    assert (point.waiting_ms > 0) is (loop != {"request_rate": "inf"})
    assert point.waiting_ms <= point.busy_ms
    assert point.waiting_tokens <= point.output_tokens


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"fail": "oom_gpu"}, "oom_gpu"), ({"fail": "oom_host", "stage": "prefill"}, "oom_host"),
        ({"fail": "nan"}, "nan_output"), ({"fail": "error"}, "crashed"), ({"fail": "idle"}, "offload_not_effective"),
    ],
)  # fmt: skip
def test_a_failure_is_the_status_of_the_point(options: dict[str, Any], status: str) -> None:
    point = measured(load(in_flight=4), **options)
    assert point.error
    assert (point.status, point.usable, point.output_tok_s) == (status, False, None)


def test_memory_that_falls_short_once_is_a_retry() -> None:
    point = measured(load(in_flight=8), fail="oom_gpu", at_batch=6, stage="decode")
    assert point.status == "ok"
    assert point.counts.retries


def test_a_request_that_the_model_has_no_positions_for_is_unsupported() -> None:
    worker = worker_of()
    engine = worker.session.engine
    engine.plan = engine.plan.model_copy(update={"model": SPEC.model_copy(update={"max_position": 30})})
    point = measure(worker, load(in_flight=2))
    assert point.status == "unsupported"
    assert "30 positions" in str(point.error)


def test_lengths_are_drawn_by_seed_within_their_limits() -> None:
    chats = LengthDistribution.parse("lognormal:245,106, max_input_len=1500, max_output_len=400,sigma=0.8")
    drawn = chats.draw(8000, 0)
    assert drawn == chats.draw(8000, 0) != chats.draw(8000, 1)
    for values, middle, limit in (([a for a, _ in drawn], 245, 1500), ([b for _, b in drawn], 106, 400)):
        assert mean(values) == pytest.approx(middle, rel=0.04)
        assert 1 <= min(values) <= max(values) == limit
    assert LengthDistribution.parse(chats.describe()) == chats
    assert set(LengthDistribution.parse("fixed:32,8").draw(9, 0)) == {(32, 8)}


@pytest.mark.parametrize(
    "text",
    ["", "lognormal", "lognormal:", "lognormal:5", "lognormal:0,1", "lognormal:-5,1", "lognormal:nan,1", "normal:5,1",
     "fixed:5,1,sigma=1", "lognormal:5,1,sigma=-1", "lognormal:5,1,sigma=1e9", "lognormal:5,1,sigma=9",
     "uniform:5,1", "lognormal:5,1,max=4", "lognormal:5,1,sigma=1,sigma=2", "lognormal:5,1,7",
     "lognormal:99999999999,1", "lognormal:5,1," + "x" * 10_000],
)  # fmt: skip
def test_wrong_distributions_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"lognormal|lengths are") as refused:
        LengthDistribution.parse(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pass_ms": [*range(5000, 5900), 1.0]}, "ascend"), ({"pass_ms": [1.0]}, "there are 1"),
        ({"samples": []}, "0 of 30"),
        ({"busy_ms": 1e9}, "busy_ms"), ({"counts": {"padded": 5, "read": 1}}, "padding"),
        ({"pass_ms": [1e300 * n for n in range(1, 900)]}, "pass_ms"), ({"waiting_tokens": 10**6}, "waiting_tokens"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_are_left_out(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(seal("requests", finite(measured(load(in_flight=4)).model_dump()) | fields) + b"\n")
    records = read(path)
    assert records.requests == ()
    assert reason in records.damaged[0].reason


def test_samples_are_rows() -> None:
    sample = RequestSample(input_len=3, output_len=99, arrived_ms=1.5, runs=((0, 3), (4, 1)))
    assert RequestSample.model_validate(sample.model_dump()) == sample
    assert list(sample.passes) == [0, 1, 2, 4]
    for wrong in ([1], [1, 2, 3, 4], [1, 2, -0.5, -1, 2], [1, 2, 3, 5, 2, 6, 1], [1, 2, float("nan")], ["a", 2, 3]):
        with pytest.raises(ValueError, match="RequestSample"):
            RequestSample.model_validate(wrong)


# Sweeps


class Quick(InlineWorker):
    """A worker whose engine without a model is there at once."""

    def __init__(self, _target: str, **settings: Any) -> None:
        super().__init__(instead={Load: self._load_here}, **settings)

    def _load_here(self, session: Session, request: Load) -> Facts:
        session.engine, session.facts = FakeEngine(request.plan), facts_of(request.plan)
        return Facts(load_s=0.1, load_bytes=1)


def swept(path: Path, sweep: Sweep, worker: Any = Quick, **seen: Any) -> Records:
    """Run or resume a sweep without a model, with records in `path`; return its points."""
    done = read(path) if path.is_file() else Records()
    sets = request_sets(sweep)
    jobs = prepare(sweep, MACHINE, lambda _load: Source(SPEC, "dummy", "r1"), lambda _load: TARGET, requests=sets)
    with Store(path) as store:
        store.append(Header(machine="test"))
        every = run(sweep, jobs, store, (*done.points, *done.requests), Events(**seen), worker).points
    requests = tuple(point for point in every if isinstance(point, RequestPoint))
    return Records(tuple(point for point in every if isinstance(point, Measurement)), requests=requests)


def small(**fields: Any) -> Sweep:
    asked = {"model": "fake", "offload": "cpu", "request_lengths": SOURCE, "num_requests": 12}
    return make_sweep(asked | fields, "here")


def test_each_load_is_a_point_that_is_resumed(tmp_path: Path) -> None:
    path, sweep = tmp_path / "r.jsonl", small(in_flight=[2, "auto"], request_rate=["inf"], sla="ttft:p99:<=:1h")
    outcome = swept(path, sweep)
    assert [point.requests.loop for point in outcome.requests] == ["2 in flight", "auto in flight", "all at once"]
    assert [point.status for point in outcome.requests] == ["ok"] * 3
    assert outcome.points == (), "no equal batch was asked for"
    assert (read(path).requests, read(path).damaged) == (outcome.requests, ())
    assert all(point.model_revision == "r1" and point.sla == ("ttft:p99:<=:1h",) for point in outcome.requests)
    seen = list[bool]()
    again = swept(path, sweep, requests=lambda _point, resumed: seen.append(resumed))
    assert again.requests == outcome.requests
    assert seen == [True] * 3
    assert len(read(path).requests) == 3
    more = swept(path, small(in_flight=[2, 3]))
    assert [point.requests.in_flight for point in more.requests] == [2, 3]
    assert len(read(path).requests) == 4, "only the new load was measured"
    assert exit_code(sweep, outcome.requests) == 0


def test_equal_batches_and_requests_take_turns_with_the_model_loaded_anew(tmp_path: Path) -> None:
    order, loads = list[str](), list[Quick]()

    def worker(*args: Any, **more: Any) -> Quick:
        loads.append(Quick(*args, **more))
        return loads[-1]

    path = tmp_path / "r.jsonl"
    sweep = small(batch_size=[2, 4], input_len=20, output_len=6, rounds=3, repeats=1)
    seen: dict[str, Any] = {
        "point": lambda point, _resumed: order.append(f"batch {point.case.workload.batch_size}"),
        "requests": lambda point, _resumed: order.append(point.requests.loop),
    }
    outcome, records = swept(path, sweep, worker, **seen), read(path)
    assert order == ["batch 2", "batch 4", "auto in flight"] * 3
    assert len(loads) == 3
    assert (outcome.points, outcome.requests) == (records.points, records.requests)
    assert (len(records.points), len(records.requests)) == (6, 3)
    assert {point.case.workload.output_len for point in records.points} == {6}
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]))  # cut after the second round's first point
    again = swept(path, sweep, worker, **seen)
    assert (len(again.points), len(again.requests)) == (6, 3)
    assert len(loads) == 5, "the first round was not loaded again"
    assert again.requests == read(path).requests, "each round has its own record"
    assert again.points == read(path).points


def test_failures_are_records_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    class Dies(Quick):
        def ask(self, command: Command[Answer]) -> Answer:
            if isinstance(command, MeasureRequests) and command.load.in_flight == 2:
                raise WorkerDied("timeout", "no answer for 1 s")
            return super().ask(command)

    sweep = small(in_flight=[2, 3])
    outcome = swept(path, sweep, Dies)
    assert [point.status for point in outcome.requests] == ["timeout", "ok"]
    assert exit_code(sweep, outcome.requests) == 3
    assert [point.status for point in swept(path, sweep).requests] == ["ok", "ok"], "a timeout gets another try"

    class Interrupts(Quick):
        def ask(self, command: Command[Answer]) -> Answer:
            if isinstance(command, MeasureRequests):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
                raise AssertionError(command)
            return super().ask(command)

    with pytest.raises(Interrupted):
        swept(path, small(in_flight=[5]), Interrupts)
    kept = read(path)
    assert kept.damaged == ()
    assert [point.status for point in kept.requests] == ["timeout", "ok", "ok", "cancelled"]


def test_a_load_that_is_refused_is_the_status_of_its_first_point(tmp_path: Path) -> None:
    def refuse(_session: Any, _request: Load) -> Facts:
        raise MemoryError("no memory")

    worker = partial(InlineWorker, instead={Load: refuse})
    (point,) = swept(tmp_path / "r.jsonl", small(in_flight=[2, 3]), worker).requests
    assert (point.status, point.stage, point.requests.in_flight) == ("oom_host", "load", 2)


def of_file(file: Path, **fields: Any) -> Sweep:
    return small(**{"request_lengths": (), "requests": str(file), "num_requests": None} | fields)


OPENAI = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "%s", "max_tokens": %d}}\n'


def test_requests_of_a_file_have_its_texts_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(OPENAI % (number, "012" * (number + 1), number + 2) for number in range(4)))
    (point,) = swept(tmp_path / "r.jsonl", of_file(file, num_requests=3)).requests
    assert lengths_of(point) == [(3, 2), (6, 3), (9, 4)], "a byte is a token"
    assert point.requests.source.startswith("mine.jsonl ")
    assert str(tmp_path) not in point.model_dump_json()
    file.write_text('{"input_len": 7, "output_len": 2}\n\n{"input_len": 5, "output_len": 3}\n')
    (point,) = swept(tmp_path / "r.jsonl", of_file(file)).requests
    assert lengths_of(point) == [(7, 2), (5, 3)]


def test_requests_of_a_file_are_sampled_as_they_ask(tmp_path: Path, spy: Spy) -> None:
    file, asked = tmp_path / "mine.jsonl", OPENAI.replace("%d", '%d, "temperature": %s, "top_p": 0.9, "seed": 7')
    file.write_text(asked % ("a", "012", 2, "0") + asked % ("b", "012", 2, "0.5") + OPENAI % ("c", "012", 2))
    ran = spy(clock_of_requests, "run_load")
    swept(tmp_path / "r.jsonl", of_file(file))
    samplings = [request.sampling for request in ran.mock_calls[0].args[1]]
    assert [(it.temperature, it.top_p) for it in samplings] == [(0, 0.9), (0.5, 0.9), (1, 1)], "OpenAI's default is 1"
    assert [it.seed for it in samplings[:2]] == ["7", "7"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "0 requests"), ("no json", "line 1"), ('{"input_len": 0, "output_len": 1}', "input_len"),
        ('{"input_len": 5}', "output_len"), ('{"input_len": 5, "output_len": 1.5}', "output_len"),
        ('{"input_len": 5, "output_len": NaN}', "line 1"), ('{"input_len": 5, "output_len": 1, "x": 1}', "x"),
        ('{"input_len": 5, "output_len": 1}\n[]', "line 2"), (OPENAI % ("a", "b", 0), "max_tokens"),
        (OPENAI % ("a", "b", 1) * 2, "custom_id"),
        (OPENAI.replace(', "max_tokens": %d', "") % ("a", "b"), "max_tokens"),
    ],
)  # fmt: skip
def test_damaged_files_of_requests_are_refused_in_one_line(content: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(DocumentError, match=fault) as refused:
        request_sets(of_file(file))
    assert "mine.jsonl" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"request_lengths": "normal:1,2"}, "lognormal"), ({"in_flight": 0}, "in flight"),
        ({"in_flight": "all"}, "auto"),
        ({"request_rate": -1.0}, "rate"), ({"request_rate": "fast"}, "inf"), ({"request_rate": float("nan")}, "rate"),
        ({"num_requests": 10**9}, "num_requests"), ({"num_requests": 0}, "num_requests"),
        ({"request_lengths": (), "num_requests": None, "in_flight": 3}, "in_flight is for loads of requests only"),
        ({"request_lengths": (), "num_requests": None, "request_order": "longest-first"}, "request_order is for"),
        ({"request_lengths": (), "num_requests": None, "seed": 3}, "seed is for loads of requests only"),
        ({"batch_size": 0}, "batch sizes"),
        ({"request_lengths": (), "num_requests": None, "batch_size": ()}, "batch"),
    ],
)  # fmt: skip
def test_wrong_settings_of_requests_are_refused_in_one_line(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault) as refused:
        small(**fields)
    assert "\n" not in str(refused.value)


# Commands

LOCAL = Machine(name="test", source="measured", host_bytes=8 << 30)


def invoke(*words: object) -> CompletedProcess[str]:
    return zinfer(Path.cwd(), *map(str, words))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record loads of requests, and one equal batch."""
    path = tmp_path_factory.mktemp("recorded") / "r.jsonl"
    swept(path, small(in_flight=[2, "auto"], sla="ttft:p99:<=:1ms", rounds=2))
    swept(path, small(in_flight=[2], batch_size=[4], input_len=20, output_len=6, repeats=1, rounds=2))
    return path


def test_requests_have_tables_of_their_own_in_the_report(recorded: Path, tmp_path: Path) -> None:
    done = invoke("report", recorded, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    text = plain((tmp_path / "page.html").read_text())
    for loop in ("2", "auto"):
        (section,) = text.split(f", {loop} in flight, ")[1:2]
        lines = section.partition("###")[0].splitlines()
        assert sum(line.startswith("| stream cpu |") for line in lines) == 5, "1 and 4 rows"
        assert sum("| TTFT |" in line for line in lines) == 1
        assert sum("ttft p99 <= 1 ms" in line for line in lines) == 1


def test_equal_batches_and_requests_are_never_mixed(recorded: Path, tmp_path: Path) -> None:
    records = read(recorded)
    best, *loads = json.loads(invoke("best", recorded, "--json").stdout)
    assert best["best"]["batch_size"] == 4
    assert best["best"]["prefill_tok_s"] > 0
    assert [load["requests"]["in_flight"] for load in loads] == [2, "auto"], "groups of their own"
    rows = json.loads(invoke("export", recorded, "--format", "json").stdout)
    assert {row["batch_size"] for row in rows} == {4}
    rows = json.loads(invoke("export", recorded, "--requests", "--format", "json").stdout)
    for row, point in zip(rows, records.requests, strict=True):
        summary = point.summary("e2e_ms")
        assert summary is not None
        assert (row["e2e_ms_p99"], row["output_tok_s"]) == (summary.p99, point.output_tok_s)
        assert (row["goodput_request_s"], row["passes"]) == (goodput(point), len(point.pass_ms))
    (cells,) = request_table([("a", Records(requests=records.requests[:1]))], goodput)
    assert all(isinstance(cell, str | int | float | None) for cell in cells.values())
    alone = tmp_path / "alone.jsonl"
    swept(alone, small(in_flight=[2]))
    for words in (("compare", alone, alone), ("export", alone), ("plot", alone)):
        done = invoke(*words)
        assert done.returncode == 4, done.stderr
        assert "requests" in done.stderr
    assert invoke("report", alone, "-o", tmp_path / "alone.html").returncode == 0
    assert invoke("export", alone, "--requests").returncode == 0


def test_best_ranks_configurations_of_the_same_requests(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    swept(path, small(in_flight=[2], rounds=2))
    swept(path, small(request_rate=[5.0]))
    with Store(path) as store:
        *closed_loop, open_loop = read(path).requests
        first, second = sorted(closed_loop, key=lambda point: point.output_tok_s or 0, reverse=True)
        quick = tuple(ms / 2 for ms in first.pass_ms)
        arrived = tuple(sample.model_copy(update={"arrived_ms": sample.arrived_ms / 2}) for sample in first.samples)
        drafted = first.case.model_copy(update={"options": (("draft", "ngram"),)})
        lossy = first.case.model_copy(update={"options": (("kv_cache_dtype", "int8"),)})
        faster = {"pass_ms": quick, "samples": arrived, "busy_ms": first.busy_ms / 2, "waiting_ms": 0.0}
        store.append(first.model_copy(update={"case": drafted, **faster}))
        store.append(first.model_copy(update={"case": lossy, **faster}))
        store.append(open_loop.model_copy(update={"case": drafted, "status": "crashed"}))
    closed, open_group = json.loads(invoke("best", path, "--json").stdout)
    assert [load["options"] for load in closed["by_load"]] == [{"draft": "ngram"}, {}, {"kv_cache_dtype": "int8"}]
    assert [load["loads"] for load in closed["by_load"]] == [1, 2, 1]
    rates = [point.output_tok_s or 0 for point in (first, second)]
    assert closed["best"]["output_tok_s"] == pytest.approx(2 * rates[0], rel=0.01), "times in microseconds"
    averaged = closed["by_load"][1]
    assert averaged["output_tok_s"] == pytest.approx(mean(rates))
    assert averaged["tpot_ms"]["mean"] == closed_loop[-1].tpot_ms
    assert open_group["requests"]["request_rate"] == 5
    assert "zinfer serve" in open_group["best"]["use_command"]
    done = invoke("best", path)
    assert re.search(r"Best of .*: .*draft=ngram, .* tok/s, 1 load\n", done.stdout)
    assert "crashed." in done.stdout
    done = invoke("best", path, "--sla", "ttft:max:<=:1000s", "--gpu-hour-usd", "2", "--json")
    decision = json.loads(done.stdout)[0]["decision"]
    assert decision["point"]["options"] == {"draft": "ngram"}
    assert decision["lossy"]["options"] == {"kv_cache_dtype": "int8"}
    assert decision["point"]["usd_per_mtok"] > 0
    assert invoke("best", path, "--sla", "output_tok_s:mean:>=:999999999").returncode == 4


@pytest.mark.parametrize(
    "asked",
    [
        load(in_flight=4, source="lognormal:245,106,max_output_len=400,sigma=0.8", requests=40, seed=3),
        load(in_flight=4, source="fixed:20,6", requests=7, order="longest-first"),
        load(in_flight="auto", source="fixed:20,6", requests=7),
        load(request_rate=0.5, source="lognormal:20,6,sigma=0.5", requests=9),
        load(request_rate="inf", source="my requests.jsonl 05451a7d3614", requests=2),
    ],
    ids=lambda asked: asked.loop,
)
def test_the_printed_commands_are_of_the_same_load(
    asked: RequestLoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    probed(tmp_path)
    Path("my requests.jsonl").write_text('{"input_len": 3, "output_len": 2}\n' * 5)
    key = RequestKey(case(1, layers=None, options=(("draft", "ngram"),)), asked)
    words = shlex.split(case_commands(*key)[0])
    assert words[:2] == ["zinfer", "sweep"]
    seen = list[RequestLoad]()

    def sets(sweep: Sweep) -> None:
        (request_set,) = request_sets(sweep)
        (load,) = sweep.loads()
        assert dict(load.options) == {"draft": "ngram"}
        seen.append(request_set.load)
        raise RecipeError("enough")

    monkeypatch.setattr("zinfer.job.requests.request_sets", sets)
    assert "enough" in str(CliRunner().invoke(cli, words[1:]).exception)
    assert seen[0].model_copy(update={"source": asked.source}) == asked
    assert seen[0].source.rpartition(" ")[0] == asked.source.rpartition(" ")[0]
    use = shlex.split(case_commands(*key)[1])
    assert use[1] == ("serve" if asked.request_rate else "batch")
    assert "draft=ngram" in use
    assert ("--batch-size" in use) == (asked.in_flight == 4)


def test_goodput_counts_the_requests_that_keep_every_level() -> None:
    point = measured(load(request_rate=0.7, seed=2))
    ttft, e2e = point.of("ttft_ms"), point.of("e2e_ms")
    bounds = {"ttft": sorted(ttft)[20] / 1e3, "e2e": sorted(e2e)[15] / 1e3}
    both = sum(
        first / 1e3 <= bounds["ttft"] and other / 1e3 <= bounds["e2e"] for first, other in zip(ttft, e2e, strict=True)
    )
    how = {"statistic": "p99", "at_most": True}
    levels = [Sla.model_validate({"metric": metric, "bound": bound} | how) for metric, bound in bounds.items()]
    assert 0 < both < 30
    texts = tuple(f"{level.metric}:p99:<=:{level.bound + 1e-7:.9f}s" for level in levels)  # never rounded down
    assert goodput(point.model_copy(update={"sla": texts})) == pytest.approx(both / (point.wall_ms / 1e3))
    assert goodput(point) is None, "no level was asked for"
    actual = {result.sla.metric: result.actual for result in check(point, levels)}
    assert actual == {"ttft": pytest.approx(max(ttft) / 1e3), "e2e": pytest.approx(max(e2e) / 1e3)}


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--requests", "missing.jsonl"], "missing.jsonl"), (["--in-flight", "3"], "requests"),
        (["--request-lengths", "fixed:9,9", "--sla", "ttft:p99"], "service level"),
        (["--request-lengths", "fixed:9,9", "--sla", "decode_tok_s:mean:>=:1"], "user_tok_s"),
        (["--request-lengths", "fixed:9,9", "--input-len", "9"], "batch_size"),
        (["--request-lengths", "fixed:9000,9", "--offload", "cpu"], "positions"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(
    words: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: MACHINE)
    done = invoke("sweep", "--model", "bloom-tiny", *words)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert fault in line
    assert not list(tmp_path.glob("sweeps/results/**/*.jsonl"))


def test_a_command_measures_requests_on_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: LOCAL)
    words = ["sweep", "--model", "bloom-tiny", "--layers", "2", "--offload", "cpu", "-o", "r.jsonl"]
    words += ["--request-lengths", "lognormal:12,4,max_output_len=7"]
    words += ["--num-requests", "9", "--in-flight", "3", "--request-rate", "inf"]
    done = invoke(*words)
    assert done.returncode == 0, done.stderr
    points = read(Path("r.jsonl")).requests
    assert len(points) == 2
    for point in points:
        assert lengths_of(point) == LengthDistribution.parse(point.requests.source).draw(9, 0)
        assert point.link_busy
    assert "TTFT p99" in done.stderr
    assert invoke(*words, "--resume").stderr.count("[recorded]") == 2
    plans = invoke(*words, "--dry-run")
    assert "9 requests of lognormal:12,4" in plans.stdout


def test_a_plan_of_requests_has_their_mean_lengths(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('model = "bloom-tiny"\nrequest_lengths = "fixed:30,9"\nnum_requests = 4\n')
    done = invoke("plan", recipe, "--machine", "h200")
    assert done.returncode == 0, done.stderr
    assert "30 in / 9 out" in done.stdout
