"""A KV cache in host memory: the same tokens, read once a step, beside the weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.test_parity import BATCHES, greedy, load, reference
from zinfer.engine import EngineError


@pytest.mark.parametrize("architecture", ["bloom", "opt", "llama", "gpt_neox", "falcon-old", "qwen2", "mixtral"])
@pytest.mark.parametrize("rows_at_once", [1, 2, 8])
def test_tokens_are_those_of_transformers(
    architecture: str,
    rows_at_once: int,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(architecture)
    monkeypatch.setattr("zinfer.cost.BLOCK_VALUES", 1)
    monkeypatch.setattr("zinfer.cost.BLOCK_TOKENS", 9 * rows_at_once)
    engine = load("stream", directory, "cpu", tmp_path, kv_offload="cpu")
    for lengths, expected in zip(BATCHES, reference(directory), strict=True):
        assert torch.equal(greedy(engine, lengths), expected)
    engine.close()


@pytest.mark.parametrize("here", [0, 1, 2, 3])
@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_some_sequences_here_and_some_there(
    architecture: str, here: int, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(architecture)
    monkeypatch.setattr("zinfer.engine.stream.largest_batch", lambda *_: here)
    engine = load("stream", directory, "cpu", tmp_path, kv_offload="auto")
    for lengths, expected in zip(BATCHES, reference(directory), strict=True):
        assert torch.equal(greedy(engine, lengths), expected)
        told = engine.effective()
        there = max(0, len(lengths) - here)
        assert told.settings["kv_host_rows"] == there
        read = max(lengths) + 10  # by the last step
        assert told.settings["kv_bytes_per_step"] == engine.plan.model.kv_bytes(there, read)
        assert told.streamed_bytes_per_step >= 0.95 * engine.plan.model.streamed_bytes
    engine.close()


def test_a_case_that_is_no_choice_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="kv_offload=disk: choose from none, cpu, auto"):
        load("stream", checkpoint("llama"), "cpu", tmp_path, kv_offload="disk")
