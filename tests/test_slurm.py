"""Sweep over a real one-node Slurm whose jobs are disturbed. They are preempted, cancelled and left alone."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import PATIENCE_S, environment, wait
from tests.command import started, zinfer_process
from tests.slurm import slurm, why_not
from tests.test_batch_command import line
from tests.test_parts import SMALL
from zinfer.job.shard import Shard
from zinfer.record.store import read

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
BATCHES = 60
WORDS = [*SMALL, "--repeats", "1", "--batch-size", f"1-{BATCHES}+1", "--offload", "none,cpu", "-o", "out.jsonl",
         "--cluster", "slurm", "--slurm-arg", "time=30", "--slurm-arg", "partition=low",
         "--slurm-arg", "exclusive"]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield environment(HF_HUB_OFFLINE="1") | running


def start(folder: Path, cluster: dict[str, str], *more: str) -> "subprocess.Popen[str]":
    return started(folder, *WORDS, *more, env=cluster)


def wait_for_points(folder: Path, count: int) -> None:
    """Wait until the first job has written so many points."""
    part = Shard(1, 2).path(folder / "out.part")
    wait(lambda: part.exists() and part.read_bytes().count(b"\n") > count)


def measured(folder: Path) -> list[tuple[str, int]]:
    records = read(folder / "out.jsonl")
    assert not records.damaged
    return [(point.case.offload, point.case.workload.batch_size) for point in records.points if point.status == "ok"]


WHOLE = [(offload, batch) for offload in ("none", "cpu") for batch in range(1, BATCHES + 1)]


def test_a_preempted_array_measures_what_one_process_measures(folder: Path, cluster: dict[str, str]) -> None:
    process = start(folder, cluster)
    wait_for_points(folder, 3)
    above = ["sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(above, env=cluster, check=True, capture_output=True)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert stdout.strip() == "out.jsonl"
    assert "submitted 2 jobs" in stderr
    assert sorted(measured(folder)) == sorted(WHOLE)
    assert len(read(folder / "out.jsonl").headers) == 1
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]


def test_resume_takes_over_from_a_command_that_was_killed(folder: Path, cluster: dict[str, str]) -> None:
    process = start(folder, cluster)
    wait_for_points(folder, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    refused = zinfer_process(folder, *WORDS, env=cluster)
    assert refused.returncode == 2
    assert "--resume goes on with them" in refused.stderr
    done = zinfer_process(folder, *WORDS, "--resume", env=cluster)
    assert done.returncode == 0, done.stderr
    assert "cancelled the jobs of an earlier start" in done.stderr
    assert sorted(measured(folder)) == sorted(WHOLE)
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]


def test_what_sbatch_refuses_is_one_line(folder: Path, cluster: dict[str, str]) -> None:
    done = zinfer_process(folder, *WORDS, "--slurm-arg", "qos=gold", "--slurm-arg", "partition=none", env=cluster)
    assert done.returncode == 5
    assert "no job could be submitted" in done.stderr
    assert "invalid partition" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_the_script_of_the_page_answers_all_prompts(
    folder: Path, cluster: dict[str, str], checkpoint: Callable[..., Path]
) -> None:
    """Run the array and merge scripts of docs/cluster.md without GPUs."""
    page = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text()
    (script,) = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "#SBATCH" in block]
    assert " --gpus-per-node=1" in script
    shutil.copytree(checkpoint("llama"), folder / "my-checkpoint")
    count = 20
    (folder / "prompts.jsonl").write_text(
        "".join(line(f"p{number}", prompt="ab" * number, max_tokens=3) for number in range(1, count)) + "broken\n"
    )
    environment = cluster | {"PATH": f"{Path(sys.executable).parent}:{cluster['PATH']}"}
    command = ["bash", "-ec", script.replace(" --gpus-per-node=1", "")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merged, deadline = folder / "out.jsonl.job", time.monotonic() + PATIENCE_S
    while not merged.exists():
        output = "".join(path.read_text() for path in sorted(folder.glob("slurm-*.out")))
        assert time.monotonic() < deadline, output
        time.sleep(0.2)
    answers = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    assert [record["custom_id"] for record in answers] == [f"p{number}" for number in range(1, count)] + [None]
    assert len([*folder.glob("out-*-of-00008.jsonl")]) == 8
