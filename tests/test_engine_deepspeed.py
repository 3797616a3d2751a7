"""DeepSpeed as an engine, beyond the parity that test_parity.py checks: what it fetches, and what it leaves behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.test_parity import BATCHES, greedy, load, reference
from zinfer.engine import EngineError


@pytest.fixture
def bloom(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Any]:
    loaded = load("deepspeed", checkpoint("bloom"), "cpu", tmp_path)
    yield loaded
    loaded.close()


def test_a_layer_is_one_fetch_and_embeddings_none(bloom: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import partition_parameters

    names = {id(parameter): name for name, parameter in bloom._parameters.items()}
    fetches: list[list[str]] = []
    fetch = partition_parameters._no_gather_coalesced

    def spy(parameters: Any) -> Any:
        fetches.append([names[id(parameter)] for parameter in parameters])
        return fetch(parameters)

    greedy(bloom, (5, 3))  # DeepSpeed records its trace
    monkeypatch.setattr(partition_parameters, "_no_gather_coalesced", spy)
    bloom.decode(torch.zeros(2, dtype=torch.long))
    layers = [[name for name in group if ".h." in name] for group in fetches]
    assert [len({name.split(".")[2] for name in group}) for group in layers] == [1, 1, 1]
    matrices = {name for name, parameter in bloom._parameters.items() if ".h." in name and len(parameter.ds_shape) > 1}
    assert sorted(name for group in layers for name in group) == sorted(matrices)  # each once, vectors stay
    assert bloom.effective().gpu_weight_bytes > bloom.plan.model.other_bytes


def test_the_example_settings_are_those_of_the_example(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint("opt")
    loaded = load("deepspeed", directory, "cpu", tmp_path, tuned=False)
    assert torch.equal(greedy(loaded, BATCHES[0]), reference(directory)[0])
    effective = loaded.effective()
    assert effective.host_weight_bytes == loaded.plan.model.weight_bytes
    assert effective.settings["stage3_prefetch_bucket_size"] == 2 * 64 * 64
    assert effective.settings["stage3_max_live_parameters"] == 2 * 64 * 64
    assert effective.settings["stage3_param_persistence_threshold"] == 64
    loaded.close()


@pytest.mark.parametrize("fetches", [0, 2, 5, 9])
def test_a_failed_forward_pass_does_not_spoil_the_next(
    bloom: Any, fetches: int, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero import partition_parameters

    handle, left = partition_parameters.NoGatherCoalescedHandle, fetches

    def out_of_memory(parameters: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("no room for a prefetch")
        return handle(parameters)

    monkeypatch.setattr(partition_parameters, "NoGatherCoalescedHandle", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        greedy(bloom, BATCHES[0])
    monkeypatch.undo()
    for lengths, expected in zip(BATCHES, reference(checkpoint("bloom")), strict=True):
        assert torch.equal(greedy(bloom, lengths), expected)


def test_nothing_is_left_behind(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    before, linear = dict(os.environ), torch.nn.functional.linear
    loaded: Any = load("deepspeed", checkpoint("llama"), "cpu", tmp_path)
    parameters = list(loaded._parameters.values())
    greedy(loaded, (4, 2))
    loaded.close()
    loaded.close()
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert torch.nn.functional.linear is linear
    assert all(parameter.numel() == parameter.ds_tensor.numel() == 0 for parameter in parameters)
    assert capfd.readouterr().out == ""


def test_what_deepspeed_refuses_is_an_engine_error(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU runs float16")
    with pytest.raises(EngineError, match="fp16 is not supported"):
        load("deepspeed", checkpoint("llama"), "cpu", tmp_path, dtype="float16")
    assert not dist.is_initialized()


def test_nvme_says_what_it_lacks(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_args, **_kwargs: False)
    with pytest.raises(EngineError, match="libaio-dev"):
        load("deepspeed", checkpoint("llama"), "nvme", tmp_path)
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_args, **_kwargs: True)
    with pytest.raises(EngineError, match="--nvme-path"):
        load("deepspeed", checkpoint("llama"), "nvme", tmp_path / "nowhere")
    assert not dist.is_initialized()
