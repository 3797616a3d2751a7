"""Sweep in jobs of submitit: the same records as of one process, whatever happens to a job."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest

from tests import PATIENCE_S, environment
from tests.command import zinfer, zinfer_process
from tests.inline import MACHINE, FakeWorker
from tests.test_cli import folder
from zinfer.commands import options
from zinfer.core.machine import Machine
from zinfer.job import cluster, sweep
from zinfer.job.cluster import Cluster, ClusterError, ClusterSweep, LoadTask, MeasureLoad, Result, minutes, parts_of
from zinfer.job.recipe import Sweep
from zinfer.job.signals import Interrupted
from zinfer.record.measurement import Measurement
from zinfer.record.store import Records, Store, read
from zinfer.worker.session import Session
from zinfer.worker.tasks import Measure, Measured

assert folder  # a fixture
pytest.importorskip("submitit")
SMALL = ["sweep", "-m", "bloom-tiny", "--load-format", "dummy", "--input-len", "8", "--output-len", "4"]
COUNTED = count()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:01", 91), ("1:30:00", 90), ("0:0:1", 1), ("2-0", 2880), ("1-2:30", 1590), ("1-0:0:30", 1441)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "1h", "0", "0:0", "-5", "1:2:3:4", "1.5", "9" * 9, "１"])
def test_a_time_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="time="):
        minutes(text)


def test_options_of_sbatch_become_parameters() -> None:
    words = ["time=1-0", "partition=gpu", "--gpus-per-node=h100:1", "exclusive", "setup=module load cuda",
             "setup=ulimit -l", "cpus-per-task=8", "licenses=a b"]  # fmt: skip
    assert cluster.slurm_parameters(words) == {
        "time": 1440, "partition": "gpu", "gpus_per_node": "h100:1", "exclusive": True,
        "setup": ["module load cuda", "ulimit -l"], "cpus_per_task": 8, "additional_parameters": {"licenses": "a b"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["partition=gpu"], "needs --slurm-arg time="),
        (["time=9", "array=0-3"], "array: zinfer sets it"),
        (["time=9", "--nodes=2"], "nodes: zinfer sets it"),
        (["time=9", "cpus-per-task=many"], "a whole number"),
        (["time=9", "=3"], "an option of sbatch"),
        (["time=9", "partition="], "an option of sbatch"),
        (["time=9", "comment=a\n#SBATCH --uid=0"], "an option of sbatch"),
        (["time=9", "parti tion=x"], "an option of sbatch"),
    ],
)
def test_options_that_sbatch_would_not_understand_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        cluster.slurm_parameters(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--slurm-arg", "time=9"], 2, "--slurm-arg is for --cluster slurm"),
        (["--cluster", "local", "--slurm-arg", "time=9"], 2, "--slurm-arg is for --cluster slurm"),
        (["--cluster", "local", "--dry-run"], 2, "--dry-run plans for this machine"),
        (["--cluster", "slurm"], 2, "needs --slurm-arg time="),
        (["--cluster", "slurm", "--slurm-arg", "time=9"], 5, "no srun"),
    ],
)
def test_mistakes_get_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    done = zinfer(folder, *SMALL, "-o", "out.jsonl", *words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert not (folder / "out.jsonl").exists()


class Inline(Cluster):
    """A cluster that runs its jobs in this process, when their results are asked for."""

    def __init__(self, folder: Path) -> None:
        self.kind, self.folder, self.tasks = "local", folder, list[LoadTask]()

    @property
    def at_once(self) -> int | None:
        return None

    def submit(self, tasks: Sequence[LoadTask]) -> list[Any]:
        self.tasks += tasks
        return [*tasks]

    def ended(self, jobs: Sequence[Any]) -> list[Any]:
        return [*reversed(jobs)]  # in any order

    def result(self, job: Any) -> Result:
        return MeasureLoad()(job)

    def cancel(self, jobs: Any) -> None:
        pass


class Quiet:
    """Stands for the watch of a job's log."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def events(self) -> sweep.Events:
        return sweep.Events()


class Stamped(FakeWorker):
    """A worker whose points differ, as measured ones do."""

    def _measure_point(self, session: Session, request: Measure) -> Measured:
        point = super()._measure_point(session, request).point
        return Measured(point=point.model_copy(update={"started_at": f"{next(COUNTED):09}"}))


PLAN = Sweep(
    model=("bloom-tiny",), engine=("stream",), offload=("none", "cpu"), batch_size="auto", input_len=(8,),
    output_len=(4, 6), load_format="dummy", rounds=3,
)  # fmt: skip


def here() -> Machine:
    return MACHINE


def tasks_of(plan: Sweep, output: Path, edge: int) -> Callable[[int, int, Path], LoadTask]:
    def make_task(index: int, number: int, part: Path) -> LoadTask:
        return LoadTask(
            recipe=plan.model_dump(mode="json"), index=index, number=number, results=output, part=part, nvme_path=None,
            gpus=None, machine=here, locate=options.locate, watch=Quiet, make_worker=Stamped(edge),
        )  # fmt: skip

    return make_task


def run_jobs(output: Path, inline: Inline, resume: bool = False) -> sweep.Outcome:
    with Store.open(output) as store:
        jobs = ClusterSweep(PLAN, [0, 1], tasks_of(PLAN, output, 5), inline, store, sweep.Events())
        if resume:
            jobs.collect_earlier()
        return jobs.run()


def told(records: Records) -> list[Any]:
    return [(point.case, point.status, len(point.ttft_ms)) for point in records.points]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """Provide the records of the sweep in one process."""
    path = tmp_path / "alone.jsonl"
    jobs = sweep.prepare(PLAN, MACHINE, lambda load: sweep.source_of(PLAN, load), options.locate)
    with Store.open(path) as store:
        store.append_header(sweep.header_of(PLAN, MACHINE.name, [(job.plan.case.model, job.revision) for job in jobs]))
        sweep.run(PLAN, jobs, store, make_worker=Stamped(5))
    return path


def test_jobs_write_what_one_process_writes(tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, rounds and batches, those found by doubling included, in the same order."""
    monkeypatch.setitem(cluster.POLL_S, "local", 0)
    output = tmp_path / "out.jsonl"
    inline = Inline(parts_of(output))
    outcome = run_jobs(output, inline)
    ours, theirs = read(output), read(alone)
    assert len(inline.tasks) == 2 * PLAN.rounds
    assert len(theirs.points) > 2 * 2 * PLAN.rounds
    assert told(ours) == told(theirs)
    assert [header.model_copy(update={"started_at": ""}) for header in ours.headers] == [
        header.model_copy(update={"started_at": ""}) for header in theirs.headers
    ]
    assert sweep.exit_code(PLAN, outcome.all) == 0
    again = run_jobs(output, inline, resume=True)
    assert {point.case for point in again.points} == {point.case for point in outcome.points}
    assert read(output).points == ours.points


def test_a_start_that_was_killed_at_any_line_loses_and_doubles_nothing(
    tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that takes the parts may end between any two of its writes; the parts are still there then."""
    monkeypatch.setitem(cluster.POLL_S, "local", 0)
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    output = tmp_path / "out.jsonl"
    append, left = Store.append, 0

    class Killed(BaseException):
        """Stands for the end of the process."""

    def dying(store: Store, point: Any) -> None:
        nonlocal left
        if store.path == output:
            left -= 1
            if left < 0:
                raise Killed
        append(store, point)

    monkeypatch.setattr(Store, "append", dying)
    kills = 0
    while True:
        left = 5
        try:
            run_jobs(output, Inline(parts_of(output)), resume=True)
            break
        except Killed:
            kills += 1
    assert kills > 3
    assert told(read(output)) == told(read(alone))


def test_a_job_that_fails_is_named_and_the_others_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cluster.POLL_S, "local", 0)
    output = tmp_path / "out.jsonl"
    plan, said = PLAN.model_copy(update={"rounds": 1}), list[str]()
    make_task = tasks_of(plan, output, 5)

    def one_without_a_model(index: int, number: int, part: Path) -> LoadTask:
        task = make_task(index, number, part)
        return replace(task, recipe=task.recipe | {"model": ["./gone"]}) if index == 0 else task

    with Store.open(output) as store:
        jobs = ClusterSweep(
            plan, [0, 1], one_without_a_model, Inline(parts_of(output)), store, sweep.Events(), said.append
        )  # fmt: skip
        outcome = jobs.run()
    assert len(jobs.failed) == 1
    assert "./gone" in jobs.failed[0]
    assert said == [f"load 1: {jobs.failed[0]}"]
    assert {point.case.offload for point in outcome.points} == {"cpu"}
    assert read(output).points == tuple(outcome.points)


def test_points_of_a_job_that_was_given_back_are_not_measured_again(tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"rounds": 1, "batch_size": (1, 2, 3, 4)})
    task = tasks_of(plan, tmp_path / "out.jsonl", 9)(1, 0, tmp_path / "part")

    class Requeued(Stamped):
        def _measure_point(self, session: Session, request: Measure) -> Measured:
            if len(self.measured) == 3:
                raise SystemExit(-1)  # as submitit does when it has given the job back
            return super()._measure_point(session, request)

    first, second = Requeued(9), Stamped(9)
    with pytest.raises(SystemExit):
        MeasureLoad()(replace(task, make_worker=first))
    assert first.measured == [1, 2, 3]
    result = MeasureLoad()(replace(task, make_worker=second))
    assert result.error is None
    assert second.measured == [4, 1, 2, 3, 4]  # the second pair of lengths is new
    assert len(result.points) == 8


def steady(*_words: Any, **_settings: Any) -> Stamped:
    return Stamped(99, pause_s=0.1)


@pytest.mark.ends
def test_a_job_that_is_preempted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real jobs of submitit's local executor; the first gets the signal that Slurm sends before it takes a node."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "out.jsonl"
    plan = PLAN.model_copy(update={"rounds": 1, "batch_size": tuple(range(1, 11)), "output_len": (4,)})
    make_task = tasks_of(plan, output, 0)

    def task_of(index: int, number: int, part: Path) -> LoadTask:
        return replace(make_task(index, number, part), machine=here, make_worker=steady)

    told: list[int] = []
    preempted: list[int] = []

    def preempt(point: Measurement, resumed: bool) -> None:
        told.append(point.case.workload.batch_size)
        if len(told) == 3:
            preempted.append(job_of(parts_of(output)))
            os.kill(preempted[0], signal.SIGUSR2)

    with Store.open(output) as store:
        jobs = ClusterSweep(
            plan, [0, 1], task_of, Cluster("local", parts_of(output)), store, sweep.Events(point=preempt)
        )  # fmt: skip
        outcome = jobs.run()
    logs = "".join(path.read_text() for path in sorted(parts_of(output).glob("jobs/*_log.out")))
    assert not jobs.failed, logs
    assert preempted
    assert logs.count("this job is preempted") == 1
    assert logs.count("Requeued job") == 1
    assert told == [*range(1, 11)] * 2
    records = read(output)
    assert not records.damaged
    assert records.points == tuple(outcome.points)
    assert [point.case.workload.batch_size for point in records.points] == told
    assert len(records.headers) == 1
    jobs.clear()
    assert not parts_of(output).exists()


@pytest.mark.slow
def test_the_command_measures_in_jobs_what_it_measures_alone(folder: Path) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1,2", "--rounds", "2"]
    for more in (["-o", "alone.jsonl"], ["-o", "out.jsonl", "--cluster", "local"]):
        done = zinfer_process(folder, *words, *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == more[1]
    ours, theirs = read(folder / "out.jsonl"), read(folder / "alone.jsonl")
    assert [point.case for point in ours.points] == [point.case for point in theirs.points]
    assert {point.status for point in ours.points} == {"ok"}
    assert [header.recipe for header in ours.headers] == [header.recipe for header in theirs.headers]
    assert not parts_of(folder / "out.jsonl").exists()


def job_of(parts: Path) -> int:
    """Return the process of a job whose files are in `parts`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"submitit.core._submit" in words and str(parts / "jobs").encode() in words:
            return int(path.parent.name)
    raise AssertionError("no job runs")


@pytest.mark.slow
def test_an_interrupt_ends_the_jobs_and_resume_goes_on(folder: Path) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1-30+1", "--cluster", "local", "-o", "out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zinfer", *words], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, env=environment(HF_HUB_OFFLINE="1"),
    )  # fmt: skip
    part, deadline = parts_of(folder / "out.jsonl") / "round-0000-load-0000.part", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (part.exists() and part.read_bytes().count(b"\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "`--resume` goes on" in stderr
    assert "Traceback" not in stderr
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            job_of(part.parent)
            time.sleep(0.1)
        except AssertionError:
            break
    refused = zinfer_process(folder, *words)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = zinfer_process(folder, *words, "--resume")
    assert done.returncode == 0, done.stderr
    good = [point.case for point in read(folder / "out.jsonl").points if point.status == "ok"]
    assert len(good) == len(set(good)) == 60
    assert not part.parent.exists()


def test_an_interrupt_keeps_what_the_jobs_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    inline = Inline(parts_of(output))

    def ended(jobs: Sequence[Any]) -> list[Any]:
        for job in jobs[:1]:
            MeasureLoad()(job)
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(inline, "ended", ended)
    with pytest.raises(Interrupted):
        run_jobs(output, inline)
    assert len(read(output).points) > 5
    assert read(output).points == read(inline.tasks[0].part).points
