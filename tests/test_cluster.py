"""Sweep in jobs of submitit: the same records as of one process, whatever happens to a job."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, environment
from tests.command import zinfer, zinfer_process
from tests.test_parts import SMALL, Stamped, measure
from zinfer.core.model import ModelError
from zinfer.job import cluster, sweep
from zinfer.job.cluster import Cluster, ClusterError, MeasureShard, folder_of, minutes, run_shards
from zinfer.job.parts import merge, parts_path
from zinfer.job.recipe import Sweep
from zinfer.job.shard import Shard, ShardError
from zinfer.job.signals import Interrupted
from zinfer.record.measurement import Measurement
from zinfer.record.store import read

pytest.importorskip("submitit")


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


def test_a_host_without_slurm_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    done = zinfer(folder, *SMALL, "-o", "out.jsonl", "--cluster", "slurm", "--slurm-arg", "time=9")
    assert done.returncode == 5, done.stderr
    assert "no srun" in done.stderr
    assert not (folder / "out.jsonl").exists()


PLAN = Sweep(
    model=("bloom-tiny",), engine=("stream",), offload=("none", "cpu"), batch_size=tuple(range(1, 7)), input_len=(8,),
    output_len=(4,), load_format="dummy",
)  # fmt: skip


def steady(output: Path, shard: Shard, signals: Any) -> None:
    measure(PLAN, output, Stamped(99, pause_s=0.05), shard, signals)


def first_fails(output: Path, shard: Shard, signals: Any) -> None:
    if shard.number == 1:
        raise ModelError("./gone is no model")
    steady(output, shard, signals)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a path of results, and jobs that get this process's settings."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path / "out.jsonl"


@pytest.mark.long
def test_a_job_that_fails_is_named_and_the_others_count(output: Path) -> None:
    messages: list[str] = []
    job, shards = MeasureShard(partial(first_fails, output)), Shard.all(2)
    failed = run_shards(Cluster("local", output), job, shards, parts_path(output), sweep.Events(), messages.append)
    assert failed == ["./gone is no model"]
    assert messages == ["shard 1/2: ./gone is no model"]
    with pytest.raises(ShardError, match="lacks 1 of 2 shards: run --shard 1/2"):
        merge(PLAN, output)
    assert {point.case.offload for point in merge(PLAN, output, whole=False).points} == {"cpu"}
    assert len(read(output).points) == 6


@pytest.mark.long
def test_a_job_that_is_preempted_goes_on(output: Path) -> None:
    """Real jobs of submitit's local executor; the first gets the signal that Slurm sends before it takes a node."""
    messages: list[int] = []
    preempted: list[int] = []
    cluster, shards, path = Cluster("local", output), Shard.all(2), parts_path(output)

    def preempt(point: Measurement, resumed: bool) -> None:
        messages.append(point.case.workload.batch_size)
        if len(messages) == 3:
            preempted.append(job_of(cluster.folder))
            os.kill(preempted[0], signal.SIGUSR2)

    failed = run_shards(cluster, MeasureShard(partial(steady, output)), shards, path, sweep.Events(point=preempt))
    logs = "".join(log.read_text() for log in sorted(cluster.folder.glob("jobs/*_log.out")))
    assert not failed, logs
    assert preempted
    assert logs.count("this job is preempted") == 1
    assert logs.count("Requeued job") == 1
    assert messages == [*range(1, 7)] * 2
    outcome = merge(PLAN, output)
    records = read(output)
    assert not records.damaged
    assert records.points == tuple(outcome.points)
    assert [point.case.workload.batch_size for point in records.points] == messages
    assert len(records.headers) == 1
    cluster.clear(shard.path(path) for shard in shards)
    assert [*output.parent.iterdir()] == [output]


@pytest.mark.long
def test_an_interrupt_keeps_what_the_jobs_have_written(output: Path) -> None:
    def interrupt(point: Measurement, resumed: bool) -> None:
        if point.case.workload.batch_size == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    job, path = MeasureShard(partial(steady, output)), parts_path(output)
    cluster = Cluster("local", output)
    with pytest.raises(Interrupted):
        run_shards(cluster, job, Shard.all(2), path, sweep.Events(point=interrupt))
    assert len(merge(PLAN, output, whole=False).points) >= 3
    wait_for_end(cluster.folder)
    assert [point.case.offload for point in read(output).points] == ["none"] * len(read(output).points)


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
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]


def job_of(folder: Path) -> int:
    """Return the process of a job whose logs are in `folder`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"submitit.core._submit" in words and str(folder / "jobs").encode() in words:
            return int(path.parent.name)
    raise AssertionError("no job runs")


def wait_for_end(folder: Path) -> None:
    """Wait until no job runs whose logs are in `folder`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            job_of(folder)
            time.sleep(0.1)
        except AssertionError:
            break


@pytest.mark.slow
def test_an_interrupt_ends_the_jobs_and_resume_goes_on(folder: Path) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1-12+1", "--cluster", "local", "-o", "out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zinfer", *words], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, env=environment(HF_HUB_OFFLINE="1"),
    )  # fmt: skip
    part, deadline = Shard(1, 2).path(folder / "out.part"), time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (part.exists() and part.read_bytes().count(b"\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "`--resume` goes on" in stderr
    assert "Traceback" not in stderr
    wait_for_end(folder_of(folder / "out.jsonl"))
    refused = zinfer_process(folder, *words)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = zinfer_process(folder, *words, "--resume")
    assert done.returncode == 0, done.stderr
    good = [point.case for point in read(folder / "out.jsonl").points if point.status == "ok"]
    assert len(good) == len(set(good)) == 24
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]
