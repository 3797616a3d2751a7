"""Batch job on a real two-node Ray that loses its parts. A task, a node, and the command itself are lost."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, environment, wait
from tests.command import interrupted, started, zinfer, zinfer_process
from tests.test_batch_command import line
from tests.test_job import texts
from zinfer.job.batch.nodes import NodesError, shares

ROWS, LONG = 40, 400
JOB = ["batch", "prompts.jsonl", "-m", "bloom-tiny", "--load-format", "dummy", "--dtype", "fp32", "--batch-size", "4"]


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


def test_an_actor_has_the_gpus_of_a_node_and_a_cluster_with_nothing_to_run_on_is_refused() -> None:
    large, small, gone = node(CPU=64, GPU=8), node(CPU=16, GPU=4), node(False, CPU=16, GPU=1)
    assert shares([node(CPU=8), large, large]) == (2, {"num_cpus": 1, "num_gpus": 8})
    assert shares([large, small, gone]) == (2, {"num_cpus": 1, "num_gpus": 4})
    assert shares([node(CPU=8), node(), node(CPU=4)]) == (2, {"num_cpus": 4})
    with pytest.raises(NodesError, match="no node with a GPU or a CPU"):
        shares([node(), node(False, CPU=4)])


def test_without_ray_one_line_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (folder / "prompts.jsonl").write_text(line("a", prompt="x", max_tokens=2))
    done = zinfer(folder, *JOB, "-o", "out.jsonl", "--ray", "auto")
    assert done.returncode == 5
    assert "pip install 'zinfer[ray]'" in done.stderr


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide a Ray of a head and two nodes. The command runs on the head, which has no CPUs."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for name, value in environment(HF_HUB_OFFLINE="1").items():
        monkeypatch.setenv(name, value)
    memory = {"object_store_memory": 100 << 20}
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    running.nodes = [running.add_node(num_cpus=2, **memory) for _ in range(2)]
    running.wait_for_nodes()
    yield running
    running.shutdown()


def start(folder: Path, cluster: Any, count: int = 0) -> "subprocess.Popen[str]":
    """Start the job and wait for `count` answers."""
    process = started(folder, *JOB, "-o", "out.jsonl", "--ray", cluster.address)
    wait(lambda: answers(folder) >= count or process.poll() is not None)
    assert not count or process.poll() is None, process.communicate()
    return process


@pytest.fixture
def whole(folder: Path) -> dict[str, str | None]:
    """Return one machine's answers to requests, one of them long."""
    sizes = [(number, number % 7 + 1, LONG if number == 7 else 60) for number in range(ROWS)]
    lines = [line(f"p{number}", prompt="ab" * size, max_tokens=most, temperature=0) for number, size, most in sizes]
    (folder / "prompts.jsonl").write_text("".join(lines))
    assert zinfer_process(folder, *JOB, "-o", "whole.jsonl").returncode == 0
    return texts(folder / "whole.jsonl")


def answers(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("out-*.jsonl"))


def tasks() -> list[int]:
    """Return the processes that answer shards."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::answer_shard" in path.read_bytes():
                result.append(int(path.parent.name))
        except OSError:
            continue
    return result


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["task", "node"])
def test_a_shard_whose_task_or_node_is_lost_is_done_again_and_no_row_twice(
    folder: Path, cluster: Any, whole: dict[str, str | None], lost: str
) -> None:
    process = start(folder, cluster, 6)
    if lost == "task":
        earlier, _ = tasks()
        os.kill(earlier, signal.SIGKILL)
    else:
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert "2 nodes of Ray: 2 shards to answer" in stderr
    assert "Traceback" not in stderr or lost == "node"
    assert texts(folder / "out.jsonl") == whole


@pytest.mark.slow
def test_a_killed_command_goes_on(folder: Path, cluster: Any, whole: dict[str, str | None]) -> None:
    process = start(folder, cluster, 6)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    second = start(folder, cluster, answers(folder) + 3)
    assert "the same command goes on" in interrupted(second, signal.SIGTERM)
    assert not (folder / "out.jsonl").exists()
    other = zinfer_process(folder, *JOB, "--output-len", "7", "-o", "out.jsonl", "--ray", cluster.address)
    assert other.returncode == 5, other.stderr
    assert "may belong to another job" in other.stderr
    for _ in range(2):  # the second has nothing to do
        last = start(folder, cluster)
        _, stderr = last.communicate(timeout=PATIENCE_S)
        assert last.returncode == 0, stderr
        assert texts(folder / "out.jsonl") == whole


@pytest.mark.slow
def test_a_cluster_or_a_model_that_cannot_be_had_is_one_line(
    folder: Path, cluster: Any, checkpoint: Callable[..., Path]
) -> None:
    from safetensors.torch import load_file, save_file

    (folder / "prompts.jsonl").write_text(line("a", prompt="x", max_tokens=2))
    absent = zinfer_process(folder, *JOB, "-o", "out.jsonl", "--ray", "127.0.0.1:1")
    assert absent.returncode == 5
    assert "no Ray cluster at 127.0.0.1:1" in absent.stderr
    large = ["batch", "prompts.jsonl", "-m", "bloom-176b", "--load-format", "dummy", "-o", "other.jsonl"]
    refused = zinfer_process(folder, *large, "--ray", cluster.address)
    assert refused.returncode == 5
    assert "of host memory" in refused.stderr
    model = Path(shutil.copytree(checkpoint("llama"), folder / "model"))
    file = next(model.glob("*.safetensors"))
    tensors = load_file(file)
    next(tensors[name] for name in sorted(tensors) if "layers" in name)[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    words = ["batch", "prompts.jsonl", "-m", "model", "-o", "none.jsonl", "--ray", cluster.address]
    damaged = zinfer_process(folder, *words)
    assert damaged.returncode == 5
    assert "holds NaN or infinity" in damaged.stderr
    for done in (absent, refused, damaged):
        assert "Traceback" not in done.stderr
