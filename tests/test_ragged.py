"""Ragged decode steps: rows of several micro-batches in one forward pass get the logits that each gets alone."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import Checkpoints, Patch, passes
from tests import test_cache_kinds as kinds
from tests.test_parity import load
from tests.test_passes import close, keep_here
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.stream import attention
from zinfer.engine.stream.kv import cpu_kernel

kind = kinds.kind  # the fixture
LENGTHS = ((5, 3), (9, 9), (12,), (1, 7, 4))  # of the prompts of each micro-batch: with padding, and without


def batches(engine: Engine) -> list[MicroBatch]:
    """Return prefilled micro-batches."""
    torch.manual_seed(1)
    result = []
    for lengths in LENGTHS:
        width = max(lengths)
        ids = torch.randint(4, 90, (len(lengths), width))
        mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
        result.append(passes.prefill(engine, ids, mask, 12)[0])
    return result


def check(engine: Engine, joins: bool | None, passes_of: Collection[int] = (8,)) -> None:
    """Decode micro-batches together and each alone; `joins` tells whether rows go through the model together, in
    forward passes of so many rows, None where that depends on the version of `transformers`."""
    sizes = list[int]()

    def seen(_module: Any, arguments: Any, options: dict[str, Any]) -> None:
        sizes.append(len(options["input_ids"] if "input_ids" in options else arguments[0]))

    engine.model.register_forward_pre_hook(seen, with_kwargs=True)  # type: ignore[attr-defined]
    tokens = torch.randint(4, 90, (10, sum(map(len, LENGTHS))))
    alone = list[list[Tensor]]()
    given = tokens.split([len(lengths) for lengths in LENGTHS], dim=1)
    for batch, ids in zip(batches(engine), given, strict=True):
        alone.append([passes.decode(engine, batch, step) for step in ids])
        engine.retire(batch)
    running = batches(engine)
    sizes.clear()
    for step in range(10):
        works = [Work(batch, ids[step][:, None]) for batch, ids in zip(running, given, strict=True)]
        for actual, expected in zip(engine.forward(works), alone, strict=True):
            assert close(actual[:, -1], expected[step])
    assert joins in (None, set(sizes) == set(passes_of)), sizes
    engine.clear()


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        *(("llama", "cpu"), ("opt", "none"), ("bloom", "cpu")),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("llama", "none"), ("mixtral", "cpu"))),
    ],
)
def test_rows_of_all_micro_batches_share_a_pass(
    name: str, offload: Any, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    engine = load("stream", checkpoint(name), offload, tmp_path)
    check(engine, joins=True)


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_rows_on_the_device_join_those_of_others_though_the_cpu_attends_to_the_rest(
    name: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """The second micro-batch has one device row and one host row. The rows that the CPU attends to share another
    pass."""
    calls: list[int] = []
    attend = cpu_kernel.attend

    def counted(queries: Tensor, blocks: Any, *others: Any) -> Tensor:
        calls.append(len(blocks))
        return attend(queries, blocks, *others)

    monkeypatch.setattr("zinfer.engine.stream.kv.cpu.attend", counted)
    keep_here(monkeypatch, 3)
    engine = load("stream", checkpoint(name), "cpu", kv_offload="auto", kv_attention="cpu")
    assert [batch.host_rows for batch in batches(engine)] == [0, 1, 1, 3]
    engine.clear()
    calls.clear()
    check(engine, joins=True, passes_of={3, 5})
    assert (3 in calls) is (cpu_kernel.library() is not None)  # all three with host rows at once


@pytest.mark.parametrize(
    ("name", "joins"),
    [
        *(("mistral", True), ("gemma3_text", True), ("gpt_oss", True), ("deepseek_v3", None)),
        ("llama4_text", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("gemma2", "qwen3_next", "gemma4_text")),
    ],
)
def test_layers_of_other_kinds_join_or_not(
    name: str, joins: bool | None, kind: kinds.Kinds, monkeypatch: Patch
) -> None:
    """Windows move while rows decode; layers that have more than keys and values, or a mask of their own, do not
    join. DeepSeek-V3 stores what keys and values are made of, in late versions of `transformers`."""
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    engine = load("stream", kind(name), "cpu")
    check(engine, joins=joins)


def odd(change: str, **option: Any) -> Any:
    """Return attention with unknown arguments, or left out in a layer."""
    real = attention.attention

    def changed(module: Any, query: Tensor, key: Tensor, value: Tensor, given: Any, **options: Any) -> Any:
        if change == "skips" and module.layer_idx == 1:
            return query.transpose(1, 2), None
        key = key * 1 if change == "keys" else key
        given = torch.zeros(len(query), 1, 1, 1) if change == "mask" else given
        return real(module, query, key, value, given, **options | (option if change == "option" else {}))

    return changed


@pytest.mark.parametrize("change", ["keys", "mask", "option", "skips"])
def test_a_model_that_attends_in_its_own_way_is_found_out(
    change: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """Its rows are recomputed per micro-batch, and never batched together again."""
    engine = load("stream", checkpoint("llama"), "cpu")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.JOINED, odd(change, softcap=30.0))
    check(engine, joins=False)
    assert engine._ragged.able is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["keys", "option", "skips"])
def test_host_rows_that_the_cpu_cannot_attend_to_are_refused(
    change: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """A chunk of a prompt whose first part is in host memory: there is no other way to compute it."""
    engine = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu", kv_attention="cpu")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, odd(change, unheard_of=1))
    ids = torch.randint(4, 90, (2, 9))
    batch = engine.admit(torch.ones_like(ids), 12)
    engine.forward([Work(batch, ids[:, :4])])
    with pytest.raises(EngineError, match=r"the CPU cannot attend for .*; take kv_offload=none"):
        engine.forward([Work(batch, ids[:, 4:])])
