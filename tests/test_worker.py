"""Real worker processes with an engine that fails: each failure becomes its status, and the next point runs."""

import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from tests import PATIENCE_S, Checkpoints, Patch, alive, wait
from tests.fakes import TARGET, FakeEngine
from tests.inline import MACHINE, SPEC
from tests.inline_worker import InlineWorker
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.source import find
from zinfer.core.case import Case, Option, Workload
from zinfer.core.errors import environment_error
from zinfer.core.model import ModelError
from zinfer.core.progress import Progress, silent
from zinfer.core.request import Request, Sampling
from zinfer.engine import EngineError
from zinfer.plan.planner import Plan, make_plan
from zinfer.record.measurement import Effective, Measurement, Span
from zinfer.record.study import Position
from zinfer.system.documents import DocumentError
from zinfer.worker import tasks
from zinfer.worker.process import TaskFailed, Worker, WorkerDied
from zinfer.worker.session import Session, import_engine, not_as_asked
from zinfer.worker.tasks import BatchStart, BatchStep, Command, PrefixReuse


def case(batch_size: int = 1, offload: Any = "cpu", **options: Option) -> Case:
    workload = Workload(batch_size=batch_size, input_len=4, output_len=3)
    return Case(model="fake", engine=TARGET, offload=offload, workload=workload, options=tuple(sorted(options.items())))


def start(asked: Case) -> InlineWorker:
    """Load the fake engine without a process: for what does not end one."""
    worker = InlineWorker(TARGET)
    worker.load(make_plan(asked, SPEC, MACHINE))
    return worker


def measured(asked: Case, repeats: int = 1, tolerance: float = 0.02) -> Measurement:
    return start(asked).measure(asked, repeats=repeats, tolerance=tolerance)


def spawn(asked: Case) -> Worker:
    """Load the fake engine in a process of its own."""
    worker = Worker(TARGET, timeout_s=PATIENCE_S)
    worker.load(make_plan(asked, SPEC, MACHINE))
    return worker


@pytest.mark.usefixtures("executed")
def test_a_point_holds_every_sample() -> None:
    notices, loads = list[str](), list[tuple[int, float]]()
    heard: dict[str, Any] = {"on_progress": lambda what, _share: notices.append(what)}
    worker = Worker(TARGET, timeout_s=PATIENCE_S, on_loaded=lambda *load: loads.append(load), **heard)
    worker.load(make_plan(case(), SPEC, MACHINE))
    point = worker.measure(case(2), repeats=3, tolerance=1e-9)
    worker.close()
    assert (point.status, point.case, len(point.ttft_ms)) == ("ok", case(2), 3)
    assert [len(steps) for steps in point.step_ms] == [2] * 3
    assert point.effective is not None
    assert point.effective.streamed_bytes_per_step == 1000
    assert (point.link_bandwidth or 0) > 0
    assert point.timeline == (Span(lane="copy", layer=0, start_ms=-0.5, end_ms=1.235),)
    assert {"python", "torch", "zinfer"} <= point.versions.keys()
    assert (point.host_peak_bytes or 0) > 1 << 27
    assert "starting" in notices
    assert loads == [(point.load_bytes, point.load_s)] == [(SPEC.weight_bytes, point.load_s)]


@pytest.mark.parametrize("name", ["FakeEngine", "Missing"])
def test_garbage_is_looked_for_only_among_what_came_after_the_libraries(name: str) -> None:
    gc.unfreeze()
    library = [FakeEngine]
    make = partial(import_engine, f"tests.fakes:{name}", early=False)
    try:
        with pytest.raises(AttributeError) if name == "Missing" else nullcontext():
            assert make()(make_plan(case(), SPEC, MACHINE), silent).plan.case == case()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert library not in gc.get_objects()
    finally:
        gc.unfreeze()


def test_repeats_end_when_the_spread_is_small() -> None:
    assert 2 <= len(measured(case(step_ms=5.0), repeats=50, tolerance=100.0).ttft_ms) < 50


@pytest.mark.parametrize(
    ("fail", "status"),
    [
        ("oom_gpu", "oom_gpu"),
        ("nan", "nan_output"),
        ("error", "crashed"),
        *(pytest.param(status, status, marks=pytest.mark.slow) for status in ("oom_host", "io_error")),
    ],
)
def test_what_the_engine_raises_becomes_a_status_and_the_worker_lives(fail: str, status: str) -> None:
    asked = case(4, fail=fail, at_batch=4)
    worker = start(asked)
    failed = worker.measure(asked, repeats=2, tolerance=0.02)
    assert failed.status == status
    assert failed.error is None or "\n" not in failed.error
    assert worker.measure(case(2, fail=fail, at_batch=4), repeats=1, tolerance=0.02).status == "ok"


@pytest.mark.parametrize("fail", ["oom_gpu", "error"])
def test_a_trace_that_fails_costs_no_sample(fail: str) -> None:
    point = measured(case(4, fail=fail, stage="timeline"), repeats=2, tolerance=1e-9)
    assert (point.status, point.error, len(point.ttft_ms), point.timeline) == ("ok", None, 2, ())


@pytest.mark.parametrize(
    ("gpu_weights", "resident", "streamed", "shortfall", "words"),
    [
        (None, 0, 100, None, "None"),
        (None, 0, 0, None, "no weight is streamed"),
        ("auto", 100, 0, None, "None"),
        ("50%", 50, 50, None, "None"),
        ("50%", 100, 0, None, "no weight is streamed"),
        ("100%", 100, 0, None, "None"),
        ("50%", 50, 50, "the library took more", "the library took more"),
    ],
)
def test_effective_placement_is_compared_with_the_request(
    gpu_weights: str | None, resident: int, streamed: int, shortfall: str | None, words: str
) -> None:
    weights: dict[str, Any] = {
        "gpu_weight_bytes": resident,
        "host_weight_bytes": 100,
        "streamed_bytes_per_step": streamed,
    }
    asked = case().model_copy(update={"gpu_weights": gpu_weights})
    reason = not_as_asked(asked, Effective(**weights, shortfall=shortfall))
    assert (reason is None) == (words == "None")
    assert words in str(reason)


def test_offload_that_streams_nothing_is_not_ok() -> None:
    assert measured(case(fail="idle")).status == "offload_not_effective"


@pytest.mark.parametrize(
    ("fail", "message", "stage"),
    [
        ("SIGKILL", "SIGKILL", "load"),
        pytest.param("SIGSEGV", "SIGSEGV", "decode", marks=pytest.mark.slow),
        pytest.param("SIGKILL", "SIGKILL", "decode", marks=pytest.mark.slow),
        pytest.param("exit", "exit code 7", "load", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_reported_with_its_cause(fail: str, message: str, stage: str) -> None:
    asked = case(fail=fail, stage=stage)
    with pytest.raises(WorkerDied, match=message) as death:
        spawn(asked).measure(asked, repeats=1, tolerance=0.02)
    assert death.value.status == "crashed"


@pytest.mark.parametrize(("at_its_end", "status"), [(0, "crashed"), (1, "oom_host")])
def test_a_worker_is_not_blamed_for_memory_that_others_lacked(at_its_end: int, status: str, monkeypatch: Patch) -> None:
    """The OOM killer struck before the worker's last answer. It may have struck at its end, too."""
    counts = [0]
    monkeypatch.setattr("zinfer.system.host.oom_kills", lambda: counts[0])
    worker = Worker(TARGET, timeout_s=PATIENCE_S)
    counts[0] = 3
    worker.load(make_plan(case(), SPEC, MACHINE))
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    counts[0] += at_its_end
    with pytest.raises(WorkerDied) as death:
        worker.measure(case(), repeats=1, tolerance=0.02)
    assert death.value.status == status
    worker.close()


@pytest.mark.parametrize(
    ("error", "status", "exit_code", "line"),
    [
        (CheckpointError("a lacks b"), "io_error", 2, "a lacks b"),
        (environment_error(CheckpointError("a cannot be read")), "io_error", 5, "io_error: a cannot be read"),
        (DocumentError("a is damaged"), "io_error", 2, "a is damaged"),
        (environment_error(DocumentError("a cannot be read")), "io_error", 5, "io_error: a cannot be read"),
        (ModelError("no tokenizer"), "unsupported", 2, "no tokenizer"),
        (EngineError("cannot chunk"), "unsupported", 5, "unsupported: cannot chunk"),
        (OSError(5, "Input/output error", "a"), "io_error", 5, "io_error: OSError: [Errno 5] Input/output error: 'a'"),
        (KeyError("x"), "crashed", 1, "crashed: KeyError: 'x'"),
        (MemoryError("2 GB of host memory are needed"), "oom_host", 5,
         "oom_host: MemoryError: 2 GB of host memory are needed"),
        (torch.OutOfMemoryError("x"), "oom_gpu", 5, "oom_gpu: OutOfMemoryError: x"),
        (MemoryError(), "oom_host", 5, "oom_host: host memory ran out (MemoryError)"),
        (ImportError("libx.so: failed to map segment from shared object"), "oom_host", 5,
         "oom_host: host memory ran out (ImportError: libx.so: failed to map segment from shared object)"),
        (OSError(12, "Cannot allocate memory"), "oom_host", 5,
         "oom_host: host memory ran out (OSError: [Errno 12] Cannot allocate memory)"),
    ],
)  # fmt: skip
def test_a_failure_ends_a_command_with_the_code_of_its_kind(
    error: Exception, status: str, exit_code: int, line: str
) -> None:
    """The files' fault exits 2, this machine's 5, and ours 1. They do so while it loads, and later."""

    def fail(*_: object) -> Any:
        raise error

    worker = InlineWorker(fail, instead={PrefixReuse: fail})
    for ask in (lambda: worker.ask(PrefixReuse(context=9, new_tokens=2, repeats=1)), lambda: worker.load(PLAN)):
        with pytest.raises(TaskFailed) as failed:
            ask()
        assert (failed.value.status, failed.value.exit_code) == (status, exit_code)
        assert failed.value.line == line


def test_a_hang_ends_at_the_timeout() -> None:
    asked = case(fail="hang")
    worker = spawn(asked)
    worker._timeout = 1.0
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="no answer within 1 s") as death:
        worker.measure(asked, repeats=1, tolerance=0.02)
    assert death.value.status == "timeout"
    assert time.monotonic() - began < PATIENCE_S
    assert worker._process.poll() is not None
    worker.close()


@pytest.mark.parametrize("when", ["before", "meanwhile", "never"])
def test_no_other_weights_are_loaded_than_those_of_the_start(
    when: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A replacing worker would resume its rows on other weights."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    source = find(str(folder), None, None, "safetensors")

    def change() -> None:
        shard = min(folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-4] + b"abc?")

    def make(plan: Plan, progress: Progress) -> FakeEngine:
        if when == "meanwhile":
            change()
        return FakeEngine(plan, progress)

    if when == "before":
        change()
    asked = case().model_copy(update={"load_format": "safetensors"})
    with nullcontext() if when == "never" else pytest.raises(TaskFailed) as refused:
        InlineWorker(make, revision=source.revision).load(make_plan(asked, source.spec, MACHINE))
    if refused is not None:
        assert refused.value.status == "io_error"
        assert str(refused.value) == f"{folder} does not hold the weights of the start any more: start anew"


def test_a_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    pid = os.fork()
    if pid == 0:
        worker = spawn(case())
        pid_file.write_text(str(worker._process.pid))
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    wait(lambda: not alive(int(pid_file.read_text())))


def test_nothing_of_a_failed_attempt_stays_in_memory() -> None:
    """Leftovers would make a bisection's next batch exhaust memory early."""
    held: list[weakref.ref[torch.Tensor]] = []

    class Hungry(FakeEngine):
        def step(self, _name: str, _rows: int) -> torch.Tensor:
            scores = torch.zeros(8)
            held.append(weakref.ref(scores))
            raise torch.OutOfMemoryError("out of memory")

    worker = InlineWorker.around(Hungry(PLAN))
    gc.disable()
    try:
        point = worker.measure(case(), repeats=1, tolerance=0.02)
        assert held[0]() is None
        worker.ask(BatchStart(load=Workload(batch_size=1, input_len=1, output_len=1)))
        with pytest.raises(TaskFailed, match="out of memory") as failed:
            worker.ask(BatchStep(requests=[Request([1], 1)]))
        assert failed.value.status == "oom_gpu"
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()
    assert point.status == "oom_gpu"


def test_one_output_token_still_shows_what_a_step_streams() -> None:
    point = measured(case().model_copy(update={"workload": Workload(batch_size=1, input_len=4, output_len=1)}))
    assert (point.status, point.step_ms) == ("ok", ((),))


PLAN = make_plan(case(), SPEC, MACHINE)


@pytest.mark.parametrize("command", [kind for base in Command.__subclasses__() for kind in base.__subclasses__()])
def test_each_command_has_a_function(command: type[Command[Any]]) -> None:
    assert callable(resolve_name(command.task))


def test_commands_and_answers_travel_as_they_are() -> None:
    """Functions get the command sent, callers get the answer given."""
    logits = tasks.LogitsRecorded(tokens=[[4]], file="f", dtype="float32", shape=(1, 1, 8))
    command = tasks.LogitsCompare(prompts=[[1]], first=0, logits=logits)
    answer = [[Position(0.1, 0.0, 1.0, 2.0, float("inf"))]]
    got: list[Command[Any]] = []

    def function(_session: Session, command: Command[Any]) -> object:
        got.append(command)
        return answer

    assert InlineWorker(instead={tasks.LogitsCompare: function}).ask(command) == answer
    assert got == [command]


@dataclass(eq=False, kw_only=True)
class Own(Request):
    """Request with more than the worker gets."""

    answered: threading.Event = field(default_factory=threading.Event)


def test_requests_travel_whole_and_answers_to_one_prompt_carry_it_once() -> None:
    prompt = [*range(10_000)]
    requests = [Own(array("i", [7]), 9, output_ids=[4] * 3, key=1000)]
    stop = ("x" * 1000,) * 16
    requests += [Own(prompt, 9, Sampling(seed=str(key)), stop, key=key) for key in range(100)]
    message = pickle.dumps(BatchStep(requests=requests))
    assert len(message) < 120_000
    got = pickle.loads(message).requests
    assert [type(request) for request in got] == [Request] * 101
    assert [vars(request) | {"answered": asked.answered} for request, asked in zip(got, requests, strict=True)] == [
        vars(request) | {"prompt_ids": list(request.prompt_ids)} for request in requests
    ]
    assert got[1].prompt_ids is got[2].prompt_ids
    assert got[1].output_ids is not got[2].output_ids


def test_commands_need_no_torch() -> None:
    script = (
        "import pickle, sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from zinfer.worker import process, session, tasks\n"
        "from zinfer.core.request import Request\n"
        "pickle.dumps(tasks.BatchStep(requests=[Request([1], 1)]))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)
