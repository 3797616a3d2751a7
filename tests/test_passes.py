"""One verb: prompts in chunks, decode steps, drafts verified and forgotten, rows that leave, in any mixture of works in
one pass, give the logits that each sequence has alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests import Checkpoints, Patch, passes
from tests import test_cache_kinds as kinds
from tests.grid import covering
from tests.test_parity import load, prompts
from zinfer.core.case import Offload
from zinfer.core.model import ATTEND_THEMSELVES
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.cache import RowCache, make_cache
from zinfer.plan.bytes import ALLOWANCES
from zinfer.plan.placement import Placer

kind = kinds.kind  # the fixture
WAYS: dict[str, tuple[str, Offload, dict[str, Any]]] = {
    "none": ("stream", "none", {}),
    "cpu": ("stream", "cpu", {}),
    "kv by the cpu": ("stream", "cpu", {"kv_offload": "cpu", "kv_attention": "cpu"}),
    "kv over the link": ("stream", "cpu", {"kv_offload": "cpu", "kv_attention": "gpu"}),
    "accelerate": ("accelerate", "cpu", {}),
    "deepspeed": ("deepspeed", "cpu", {}),
}
CHUNKABLE = [name for name in kinds.KINDS if name in ("mistral", "gemma2", "llama4_text", "deepseek_v3", "gemma4_text")]
STATEFUL = ["qwen3_next", "jamba", "falcon_h1", "mamba"]
FIRST, SECOND = (9, 5, 7), (13, 4)


def sequences(lengths: tuple[int, ...], more: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts, `more` tokens after each, and the prompts' mask."""
    token_ids, mask = prompts(lengths)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([token_ids, torch.randint(4, 90, (len(lengths), more), generator=generator)], 1), mask


def alone(engine: Engine, token_ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Logits ``[B, V]`` after the prompt and after each token behind it: a prefill, then a token at a time."""
    length = mask.shape[1]
    batch, logits = passes.prefill(engine, token_ids[:, :length], mask, token_ids.shape[1] - length)
    steps = [logits]
    steps += [passes.decode(engine, batch, token) for token in token_ids[:, length:].unbind(1)]
    engine.retire(batch)
    assert all(kept is not batch for kept in engine.batches)
    return steps


def close(actual: Tensor, expected: Tensor) -> bool:
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < 1e-4, error
    return actual.shape == expected.shape


@pytest.fixture
def llama(checkpoint: Checkpoints) -> Engine:
    return load("stream", checkpoint("llama"), "cpu")


def small_blocks(patch: Patch, tokens: int = 9) -> None:
    patch.setattr("zinfer.plan.bytes.ALLOWANCES", replace(ALLOWANCES, block_values=1, block_tokens=tokens))


def keep_here(patch: Patch, device_rows: int) -> None:
    patch.setattr(Placer, "_rows_on_gpu", lambda _self, _placement, workload: min(device_rows, workload.batch_size))


@pytest.mark.parametrize(("way", "architecture"), covering([*WAYS], ["llama", "bloom"]))
def test_a_mixture_of_works_gives_each_its_logits(
    architecture: str, way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Mix a chunked prompt with rows that decode or verify drafts."""
    small_blocks(monkeypatch)
    name, offload, options = WAYS[way]
    engine = load(name, checkpoint(architecture), offload, tmp_path, **options)
    first, first_mask = sequences(FIRST, 8, 1)
    second, second_mask = sequences(SECOND, 4, 2)
    expected = [alone(engine, first, first_mask), alone(engine, second, second_mask)]
    old, _ = passes.prefill(engine, first[:, :9], first_mask, 8)
    two = engine.admit(second_mask, second.shape[1])
    for mine, yours in [(1, 5), (3, 6), (1, 2), (2, 1), (1, 3)]:  # tokens of the one and of the other
        works = [
            Work(old, first[:, old.length : old.length + mine], keep=mine),
            Work(two, second[:, two.length : two.length + yours]),
        ]
        logits = engine.forward(works)
        for index in range(mine):
            assert close(logits[0][:, index], expected[0][old.length - 9 - mine + 1 + index]), (old.length, index)
        if two.length >= 13:
            assert close(logits[1][:, -1], expected[1][two.length - 13])
    assert (old.length, two.length) == (17, 17)
    engine.retire(two)
    engine.retire(old)
    assert all(close(*pair) for pair in zip(alone(engine, first, first_mask), expected[0], strict=True))


@pytest.mark.parametrize(("name", "way"), covering(CHUNKABLE, ["cpu", "kv by the cpu", "kv over the link"]))
def test_windows_see_the_same_in_chunks(
    name: str, way: str, kind: kinds.Kinds, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    if not isinstance(make_cache(AutoConfig.from_pretrained(kind(name)), 1, 1), RowCache):
        pytest.skip("the cache that this transformers makes for it is not ours")
    _, offload, options = WAYS[way]
    if options and name in ATTEND_THEMSELVES:
        pytest.skip("it computes attention itself: its KV cache stays on the GPU")
    engine = load("stream", kind(name), offload, tmp_path, **options)
    token_ids, mask = sequences((13, 5, 9), 8, 3)
    expected = alone(engine, token_ids, mask)
    batch = engine.admit(mask, token_ids.shape[1])
    for count in (4, 9, 1, 3, 1, 3):
        (logits,) = engine.forward([Work(batch, token_ids[:, batch.length : batch.length + count])])
        if batch.length >= 13:
            assert close(logits[:, -1], expected[batch.length - 13])


@pytest.mark.parametrize("name", STATEFUL)
def test_states_take_prompts_as_a_whole(name: str, kind: kinds.Kinds) -> None:
    """Chunks of prompts are refused for models with states. The states would differ from the whole prompt's. Steps
    share a pass."""
    engine = load("stream", kind(name), "cpu")
    token_ids, mask = sequences((13, 5, 9), 4, 3)
    expected = alone(engine, token_ids, mask)
    batch = engine.admit(mask, token_ids.shape[1])
    assert engine.cannot_chunk() is not None
    with pytest.raises(EngineError, match="take a prompt as a whole"):
        engine.forward([Work(batch, token_ids[:, :7])])
    engine.retire(batch)
    old, _ = passes.prefill(engine, token_ids[:, :13], mask, 4)
    two = engine.admit(mask, 20)
    logits = engine.forward([Work(old, token_ids[:, 13:14]), Work(two, token_ids[:, :13])])
    assert close(logits[0][:, 0], expected[1])
    assert close(logits[1][:, 0], expected[0])
    for step in (1, 2, 3):
        logits = engine.forward([Work(two, token_ids[:, two.length, None]), Work(old, token_ids[:, old.length, None])])
        assert close(logits[1][:, 0], expected[step + 1])
        assert close(logits[0][:, 0], expected[step])
    with pytest.raises(EngineError, match="take a prompt as a whole"):
        engine.forward([Work(two, token_ids[:, 13:15])])
    with pytest.raises(EngineError, match="cannot forget single positions"):
        engine.rollback(two, torch.tensor([13, 13, 13]))


@pytest.mark.parametrize(("way", "kept"), covering([*WAYS], [(2, 2, 2), (1, 3, 0), (0, 0, 3)]))
def test_rejected_drafts_leave_nothing_behind(
    way: str, kept: tuple[int, ...], checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each row keeps some of three drafted tokens; then it goes on with tokens of its own."""
    small_blocks(monkeypatch)
    name, offload, options = WAYS[way]
    engine = load(name, checkpoint("llama"), offload, tmp_path, **options)
    token_ids, mask = sequences(FIRST, 12, 1)
    drafts = torch.randint(4, 90, (3, 3), generator=torch.Generator().manual_seed(8))
    expected = alone(engine, token_ids, mask)
    batch, _ = passes.prefill(engine, token_ids[:, :9], mask, 20)
    engine.forward([Work(batch, token_ids[:, 9:10])])
    wanted = torch.tensor(kept)
    accepted = torch.where(torch.arange(3) < wanted[:, None], token_ids[:, 10:13], drafts)
    logits = engine.forward([Work(batch, accepted, keep=3)])[0]
    for row, many in enumerate(kept):
        for index in range(many):
            assert close(logits[row, index], expected[2 + index][row])
    engine.rollback(batch, 10 + wanted)
    assert batch.length == 10 + max(kept)
    for step in range(4):
        token = torch.stack([token_ids[row, 10 + many + step] for row, many in enumerate(kept)])
        logits = passes.decode(engine, batch, token)
        for row, many in enumerate(kept):
            assert close(logits[row], expected[2 + many + step][row]), (row, step)


@pytest.mark.parametrize(("way", "gone", "device_rows"), covering([*WAYS], [(0,), (1, 3), (0, 1, 2), (2, 4)], [0, 2]))
def test_rows_that_leave_do_not_disturb_the_others(
    way: str, device_rows: int, gone: tuple[int, ...], checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    name, offload, options = WAYS[way]
    if "kv_offload" in options:
        keep_here(monkeypatch, device_rows)
        options = options | {"kv_offload": "auto"}
    elif device_rows:
        pytest.skip("all rows are on the device anyway")
    small_blocks(monkeypatch, 18)
    engine = load(name, checkpoint("bloom"), offload, tmp_path, **options)
    token_ids, mask = sequences((9, 5, 7, 3, 8), 6, 4)
    expected = alone(engine, token_ids, mask)
    batch, _ = passes.prefill(engine, token_ids[:, :9], mask, 6)
    passes.decode(engine, batch, token_ids[:, 9])
    engine.retire(batch, gone)
    rows = [row for row in range(5) if row not in gone]
    assert batch.batch_size == len(rows)
    for step in range(10, 14):
        logits = passes.decode(engine, batch, token_ids[rows, step])
        assert close(logits, expected[step - 8][rows])
    engine.retire(batch, rows[:1] and [0])
    logits = passes.decode(engine, batch, token_ids[rows[1:], 14])
    assert close(logits, expected[6][rows[1:]])
    engine.retire(batch, range(len(rows) - 1))
    assert all(kept is not batch for kept in engine.batches)


@pytest.mark.parametrize(
    ("name", "kv_offload"),
    [("gemma2", None), ("qwen3_next", None), ("falcon_h1", None), ("int8", "none"), ("int8", "cpu")],
)
def test_rows_of_windows_states_and_8_bits_leave_too(
    name: str, kv_offload: str | None, kind: kinds.Kinds, checkpoint: Checkpoints
) -> None:
    how: dict[str, Any] = {"kv_cache_dtype": "int8", "kv_offload": kv_offload} if name == "int8" else {}
    engine = load("stream", checkpoint("llama") if how else kind(name), "cpu", **how)
    token_ids, mask = sequences((13, 5, 9), 4, 3)
    expected = alone(engine, token_ids, mask)
    for gone in (0, 1):
        batch, _ = passes.prefill(engine, token_ids[:, :13], mask, 4)
        engine.retire(batch, [gone])
        rows = [row for row in range(3) if row != gone]
        for step in range(13, 17):
            logits, wanted = passes.decode(engine, batch, token_ids[rows, step]), expected[step - 12][rows]
            assert torch.allclose(logits, wanted, atol=(2e-3 if how else 1e-4) * float(wanted.abs().max()), rtol=0)
        engine.retire(batch)


@pytest.mark.parametrize("way", ["cpu", "kv over the link"])
def test_works_share_a_pass_of_the_weights(way: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    name, offload, options = WAYS[way]
    engine: Any = load(name, checkpoint("llama"), offload, tmp_path, **options)
    token_ids, mask = sequences(FIRST, 4, 1)
    one, two, three = (engine.admit(mask, 13) for _ in range(3))
    ring = engine._ring
    before, whole = ring.bytes_copied, sum(chunk.size for layer in ring.layers for chunk in layer.chunks)
    engine.forward([Work(one, token_ids[:, :9]), Work(two, token_ids[:, :4])])
    assert ring.bytes_copied - before == whole
    engine.forward([Work(one, token_ids[:, 9:10]), Work(two, token_ids[:, 4:9]), Work(three, token_ids[:, :9])])
    assert ring.bytes_copied - before == 2 * whole


def test_memory_of_the_next_batch_is_what_the_others_leave(checkpoint: Checkpoints) -> None:
    """A running micro-batch keeps its host memory. It is the next one's when the batch is retired."""
    engine: Any = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu", kv_attention="cpu")
    token_ids, mask = sequences(FIRST, 4, 1)
    old, _ = passes.prefill(engine, token_ids[:, :9], mask, 4)
    two, _ = passes.prefill(engine, token_ids[:, :9], mask, 4)
    pool = engine._kv.pool

    def places(batch: Any) -> set[tuple[int, int]]:
        return {(id(block.arena), block.start) for block in batch.host._blocks.values()}

    left, size, taken = places(two), pool.size, pool.size - pool.unused
    assert not places(old) & left
    engine.retire(two)
    assert pool.size - pool.unused == taken // 2
    three, _ = passes.prefill(engine, token_ids[:, :9], mask, 4)
    assert (places(three), pool.size) == (left, size)
    engine.retire(old)
    engine.retire(three)
    assert pool.unused == pool.size == size


def test_work_that_makes_no_sense_is_refused(llama: Engine) -> None:
    token_ids, mask = sequences(FIRST, 4, 1)
    batch = llama.admit(mask, 13)
    three = Work(batch, token_ids[:, :3])
    for works, error, message in (
        ([three, three], ValueError, "each of them once"),
        ([Work(MicroBatch(3, 9, 13), token_ids[:, :3])], ValueError, "admitted"),
        ([Work(batch, token_ids[:2, :3])], ValueError, "for a batch of 3"),
        ([Work(batch, token_ids[:, :3], keep=4)], ValueError, "logits of 4"),
        ([Work(batch, token_ids[:, :14].repeat(1, 2))], IndexError, "holds 13 tokens"),
    ):
        with pytest.raises(error, match=message):
            llama.forward(works)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        llama.rollback(batch, torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match="does not fit a KV cache of 8"):
        llama.admit(mask, 8)
    llama.retire(batch)
    llama.retire(batch)
    with pytest.raises(ValueError, match="admitted"):
        llama.forward([three])


def test_a_second_rollback_frees_the_gaps_of_the_first(llama: Engine) -> None:
    token_ids, mask = sequences(FIRST, 12, 1)
    expected = alone(llama, token_ids, mask)
    batch, _ = passes.prefill(llama, token_ids[:, :9], mask, 20)
    llama.forward([Work(batch, token_ids[:, 9:14])])
    llama.rollback(batch, torch.tensor([14, 10, 12]))  # gaps in two rows
    passes.decode(llama, batch, token_ids[:, 14])
    llama.rollback(batch, torch.tensor([10, 10, 10]))  # and back to where all rows agree
    for step in range(10, 16):
        assert close(passes.decode(llama, batch, token_ids[:, step]), expected[step - 8])
