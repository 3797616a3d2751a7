"""Ranks of `stream` with weights and KV caches of all kinds: the logits of one rank; no process outlives another."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import PATIENCE_S, Checkpoints, Patch, alive, children, passes, quantized, wait
from tests.checkpoints import save_checkpoint
from tests.test_parity import BATCHES, OUTPUT_LEN, check_tokens, load, plan_of, prompts
from zinfer.core.case import Case
from zinfer.core.engine import ENGINES, OptionError, resolve_options
from zinfer.engine import EngineError
from zinfer.engine.base import Engine
from zinfer.engine.ranks import Leader
from zinfer.engine.stream.team import StreamMember
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights import codec
from zinfer.worker.process import Worker, WorkerDied

pytestmark = pytest.mark.usefixtures("ranks_forked")


def one_by_one(engine: Engine, token_ids: Tensor, mask: Tensor, ways: Sequence[int]) -> list[Tensor]:
    """Return the logits of prefill and decode steps, ``[B, V]`` each. A pass takes `ways` rows at a time."""
    logits_of: list[list[Tensor]] = []
    for rows in torch.arange(len(token_ids)).split(list(ways)):
        batch, logits = passes.prefill(engine, token_ids[rows], mask[rows], OUTPUT_LEN)
        logits_of.append(steps := [logits])
        while len(steps) < OUTPUT_LEN:
            steps.append(passes.decode(engine, batch, steps[-1].argmax(-1)))
        engine.retire(batch)
    return [torch.cat(parts) for parts in zip(*logits_of, strict=True)]


def check_alike(team: Engine, single: Engine, rounding: float = 0.0) -> None:
    """Compare a team of two's logits with one rank's. The one rank computes the same rows together. They are the very
    same, or differ by a share `rounding` of the largest."""
    token_ids, mask = prompts(BATCHES[0])
    both = one_by_one(team, token_ids, mask, [3])
    for mine, theirs in zip(both, one_by_one(single, token_ids, mask, [2, 1]), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=rounding * float(theirs.abs().max()))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "coded, part stays": ("llama", {"weight_codec": "lossless", "gpu_weights": "50%"}),
    "fp8, kv over the link": ("fp8", {"weight_codec": "lossless", "kv_offload": "cpu", "kv_attention": "gpu"}),
    "plain, kv by the cpu": ("bloom", {"device_rows": 1, "kv_offload": "cpu", "kv_attention": "cpu"}),
    "int8 kv, part stays": ("llama", {"kv_cache_dtype": "int8", "gpu_weights": "70%"}),
}


SLOW = ("plain, kv by the cpu", "int8 kv, part stays")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_logits_are_those_of_one_rank(way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 3 * codec.BLOCK * 2)
    name, options = WAYS[way]
    folder = quantized.fp8(save_checkpoint("llama", tmp_path)) if name == "fp8" else checkpoint(name, 128)
    by_cpu = options.get("kv_attention") == "cpu"
    options = {"dtype": "float32" if by_cpu else "bfloat16"} | options
    single = load("stream", folder, "cpu", **options)
    team = load("stream", folder, "cpu", **options, gpus=2)
    # The CPU adds up in another order than torch, and which rows it attends to depends on the rank.
    check_alike(team, single, 1e-4 * by_cpu)
    alone, shared = single.effective(), team.effective()
    same = ("streamed_bytes_per_step", "wire_bytes_per_step", "host_weight_bytes")
    assert [getattr(alone, name) for name in same] == [getattr(shared, name) for name in same]
    assert alone.settings["weight_codec"] == shared.settings["weight_codec"] == options.get("weight_codec", "none")
    kept = 2 if "gpu_weights" in options else 0
    assert alone.settings["resident_layers"] == shared.settings["resident_layers"] == kept
    assert shared.settings["kv_attention"] == options.get("kv_attention", "gpu")
    assert shared.settings["kv_host_rows"] == (3 - options.get("device_rows", 0) if "kv_attention" in options else 0)


@pytest.mark.slow
def test_four_ranks(checkpoint: Checkpoints) -> None:
    team = load("stream", checkpoint("llama"), "cpu", gpus=4)
    check_tokens(team, checkpoint("llama"))


def followers(process: int) -> list[int]:
    """Return the processes of other ranks below `process`."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(process)}
    return [child for child, command in commands.items() if b"zinfer.engine.team" in command]


def worker_of(directory: Path, engine: str = "stream", output_len: int = 4) -> tuple[Worker, Case]:
    """Return a worker that has loaded a team of two."""
    plan = plan_of(directory, engine, sizes=(3, 9, output_len), load_format="dummy", gpus=2)
    worker = Worker(ENGINES[engine].target, timeout_s=PATIENCE_S)
    worker.load(plan)
    return worker, plan.case


def test_a_rank_that_is_killed_ends_the_worker(checkpoint: Checkpoints) -> None:
    worker, case = worker_of(checkpoint("llama"))
    point = worker.measure(case, 1, 0.02)
    assert (point.status, point.error) == ("ok", None)
    assert point.links_bandwidth == point.all_links_bandwidth != point.link_bandwidth
    assert 0 < (point.link_share or 0) < 1
    (other,) = followers(worker._process.pid)
    os.kill(other, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"killed by SIGKILL.*the process of GPU 1 ended"):
        worker.measure(case, 1, 0.02)
    worker.close()
    wait(lambda: not alive(other))


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_rank(checkpoint: Checkpoints) -> None:
    worker, _ = worker_of(checkpoint("llama"))
    (other,) = followers(worker._process.pid)
    os.kill(worker._process.pid, signal.SIGKILL)
    wait(lambda: not alive(other))
    worker.kill()


def test_what_several_gpus_cannot_do_is_refused(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    with pytest.raises(OptionError, match="engine accelerate has no option 'gpus'"):
        resolve_options("accelerate", {"gpus": 2})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = plan_of(checkpoint("llama"), load_format="dummy", gpus=2)
    with pytest.raises(EngineError, match="gpus=2: this host has 1"):
        Leader(plan, StreamMember)
