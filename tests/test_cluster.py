"""Sweep in jobs: the same records as of one process, whatever happens to a job."""

import os
from pathlib import Path

import pytest

from tests import environment, wait
from tests.command import interrupted, started, zinfer, zinfer_process
from tests.test_parts import SMALL
from zinfer.job.parts import Cluster, ClusterError
from zinfer.job.shard import Shard
from zinfer.record.store import read

# Stand-ins for Slurm's commands: the jobs of the array run here, one after the other; the first fails if asked.
COMMANDS = {
    "sbatch": """#!/bin/bash
echo $$; exec > array.log 2>&1
for word in "$@"; do case "$word" in --array=1-*) count="${word#--array=1-}";; esac; done
for SLURM_ARRAY_TASK_ID in $(seq 1 "$count"); do
    export SLURM_ARRAY_TASK_ID
    [ "$SLURM_ARRAY_TASK_ID" = "$FAILS" ] || bash "${@: -1}"
done
""",
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scancel": '#!/bin/bash\nkill -KILL -- "-$2"\n',
}


@pytest.mark.parametrize("word", ["array=0-3", "--open-mode=truncate", "=3", "partition=", "parti tion=x",
                                  "comment=a\n#SBATCH --uid=0"])  # fmt: skip
def test_options_that_are_not_for_the_user_are_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--slurm-arg") as caught:
        Cluster(tmp_path / "out.jsonl", ["time=9", word])
    assert "\n" not in str(caught.value)


def test_a_host_without_slurm_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    done = zinfer(folder, *SMALL, "-o", "out.jsonl", "--cluster", "slurm", "--slurm-arg", "time=9")
    assert done.returncode == 5, done.stderr
    assert "no sbatch" in done.stderr


@pytest.fixture
def cluster(folder: Path) -> dict[str, str]:
    """Provide the environment of a machine from which jobs are submitted."""
    (folder / "bin").mkdir()
    for name, script in COMMANDS.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    return environment(HF_HUB_OFFLINE="1", PATH=f"{folder / 'bin'}:{os.environ['PATH']}")


@pytest.mark.slow
def test_the_command_measures_in_jobs_what_it_measures_alone(folder: Path, cluster: dict[str, str]) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1,2", "--rounds", "2"]
    for more in (["-o", "alone.jsonl"], ["-o", "out.jsonl", "--cluster", "slurm", "--slurm-arg", "setup=touch made"]):
        done = zinfer_process(folder, *words, *more, env=cluster)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == more[1]
    ours, theirs = read(folder / "out.jsonl"), read(folder / "alone.jsonl")
    assert sorted(repr(point.case) for point in ours.points) == sorted(repr(point.case) for point in theirs.points)
    assert {point.status for point in ours.points} == {"ok"}
    assert [header.recipe for header in ours.headers] == [header.recipe for header in theirs.headers]
    assert (folder / "made").exists()
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]


@pytest.mark.slow
def test_a_job_that_fails_is_named_and_resume_goes_on(folder: Path, cluster: dict[str, str]) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1,2", "--cluster", "slurm", "-o", "out.jsonl"]
    failed = zinfer_process(folder, *words, env=cluster | {"FAILS": "1"})
    assert failed.returncode == 3, failed.stderr
    assert "shards 1/2 did not end, --resume goes on" in failed.stderr
    assert [point.case.offload for point in read(folder / "out.jsonl").points] == ["cpu"] * 2
    done = zinfer_process(folder, *words, "--resume", env=cluster)
    assert done.returncode == 0, done.stderr
    assert len(read(folder / "out.jsonl").points) == 4


@pytest.mark.slow
def test_an_interrupt_ends_the_jobs_and_resume_goes_on(folder: Path, cluster: dict[str, str]) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1-12+1", "--cluster", "slurm", "-o", "out.jsonl"]
    process, part = started(folder, *words, env=cluster), Shard(1, 2).path(folder / "out.part")
    wait(lambda: part.exists() and part.read_bytes().count(b"\n") > 3)
    assert "`--resume` goes on" in interrupted(process)
    refused = zinfer_process(folder, *words, env=cluster)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = zinfer_process(folder, *words, "--resume", env=cluster)
    assert done.returncode == 0, done.stderr
    good = [point.case for point in read(folder / "out.jsonl").points if point.status == "ok"]
    assert len(good) == len(set(good)) == 24
    assert not [*folder.glob("out*.part"), *folder.glob("*.cluster")]
