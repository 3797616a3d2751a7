"""Several ranks of DeepSpeed: the same tokens as one, whatever rows each has, and an end of all where one fails."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Checkpoints, alive, wait
from tests.test_continuous import begin, run, sequences, small
from tests.test_continuous import greedy as alone
from tests.test_parity import BATCHES, check_tokens, greedy, load, reference
from tests.test_team_ways import followers, worker_of
from zinfer.engine.base import Engine
from zinfer.plan import placement
from zinfer.system.host import peak_bytes
from zinfer.worker.process import WorkerDied

pytestmark = pytest.mark.usefixtures("ranks_forked")


@pytest.fixture(scope="module")
def team(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # Nine prompt tokens at a time: the rank of two rows prefills them one after the other, the one of one in one pass.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "PREFILL_TOKENS", 9)
        loaded = load("deepspeed", checkpoint("bloom"), "cpu", tmp_path_factory.mktemp("none"), gpus=2)
    yield loaded
    loaded.close()
    assert not torch.distributed.is_initialized()


def test_tokens_are_those_of_transformers(team: Engine, checkpoint: Checkpoints) -> None:
    for lengths, expected in zip(BATCHES, reference(checkpoint("bloom")), strict=True):
        assert torch.equal(greedy(team, lengths), expected)
        team.clear()
    spec, effective = team.plan.model, team.effective()
    assert effective.settings["gpus"] == 2
    assert effective.host_weight_bytes == spec.streamed_bytes, "one copy"
    assert effective.streamed_bytes_per_step == pytest.approx(spec.streamed_bytes, rel=0.05), "the matrices, each once"
    assert team.host_memory() > peak_bytes() + (64 << 20), "that of the second process, too"
    vectors = effective.host_weight_bytes - effective.streamed_bytes_per_step
    assert effective.gpu_weight_bytes == pytest.approx(spec.other_bytes + 2 * vectors, rel=0.02), "parts, vectors twice"


def test_ranks_with_fewer_rows_or_none_take_part(team: Engine, checkpoint: Checkpoints) -> None:
    prompt = [5, 9, 11, 30]
    alike = alone(team, prompt, 6)
    rows = sequences(7, 3)
    limits = [row.left for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        running = begin(team)
        outputs = run(running, [rows[:3], rows[3:4], rows[4:]])
        running.end()
    single = load("stream", checkpoint("bloom"), "none", Path())
    assert alone(single, prompt, 6) == alike
    for output, limit in zip(outputs, limits, strict=True):
        assert (output.failure, output.output_ids) == (None, alone(single, output.prompt_ids, limit)), output.key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("llama", {"tuned": False}), ("opt", {})])
def test_four_ranks(name: str, more: dict[str, Any], checkpoint: Checkpoints) -> None:
    loaded = load("deepspeed", checkpoint(name), "cpu", gpus=4, **more)
    check_tokens(loaded, checkpoint(name))


@pytest.mark.slow
def test_ranks_load_after_a_single_one_in_the_same_process(checkpoint: Checkpoints) -> None:
    for gpus in (1, 2):
        loaded = load("deepspeed", checkpoint("llama"), "cpu", gpus=gpus)
        assert torch.equal(greedy(loaded, BATCHES[0]), reference(checkpoint("llama"))[0])
        loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_out_of_memory_ends_all_with_that_status(rank: int, checkpoint: Checkpoints) -> None:
    """The other rank waits for it in the middle of a pass."""
    worker, case = worker_of(checkpoint("llama"), "deepspeed", 400_000)  # a KV cache of hundreds of MB in each rank
    (other,) = followers(worker._process.pid)
    short = (worker._process.pid, other)[rank]
    used = int(Path(f"/proc/{short}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(short, resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    with pytest.raises(WorkerDied, match=f"^GPU {rank}: .*allocate memory") as died:
        worker.measure(case, 0, 0.02)
    assert died.value.status == "oom_host"
    worker.close()
    wait(lambda: not alive(other))
