"""Rows that move between micro-batches go on as if alone. Their keys and values may lie anywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Checkpoints, Patch, passes, test_passes
from tests import test_cache_kinds as kinds
from tests.grid import covering
from tests.test_parity import load
from tests.test_passes import WAYS, alone, keep_here, sequences, small_blocks
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.cache import RowCache, RowMask, copy_slots, make_cache

kind, llama = kinds.kind, test_passes.llama  # fixtures
EIGHT_BITS = {
    "int8": ("stream", "none", {"kv_cache_dtype": "int8"}),
    "int8 by the cpu": ("stream", "cpu", {"kv_cache_dtype": "int8", "kv_offload": "cpu"}),
    "int8 auto": ("stream", "cpu", {"kv_cache_dtype": "int8", "kv_offload": "auto"}),
}
MIXED = {"kv auto by the cpu": ("stream", "cpu", {"kv_offload": "auto", "kv_attention": "cpu"}),
         "kv auto over the link": ("stream", "cpu", {"kv_offload": "auto", "kv_attention": "gpu"}),
         "int8 auto": EIGHT_BITS["int8 auto"]}  # fmt: skip
ALL: dict[str, Any] = WAYS | EIGHT_BITS | MIXED
FIRST, SECOND = (9, 5, 7), (13, 4)


class Rows:
    """Rows of several micro-batches, with next tokens and expected logits. Each row's logits are those that it has
    alone."""

    def __init__(self, engine: Engine, within: float = 1e-4) -> None:
        self.engine, self.within = engine, within
        self.tokens: dict[str, torch.Tensor] = {}
        self.expected: dict[str, list[torch.Tensor]] = {}
        self.made: dict[str, int] = {}

    def begin(self, name: str, lengths: tuple[int, ...], seed: int, steps: int, reserve: int = 2) -> MicroBatch:
        """Prefill rows and decode `steps` tokens."""
        token_ids, mask = sequences(lengths, 14, seed)
        expected = alone(self.engine, token_ids, mask)
        width = mask.shape[1]
        names = [f"{name}{row}" for row in range(len(lengths))]
        for row, each in enumerate(names):
            self.tokens[each], self.made[each] = token_ids[row, width:], 0
            self.expected[each] = [logits[row] for logits in expected]
        batch, logits = passes.prefill(self.engine, token_ids[:, :width], mask, max(steps, reserve))
        self.check(names, logits)
        for _ in range(steps):
            self.step({batch: names})
        return batch

    def step(self, batches: dict[MicroBatch, list[str]]) -> None:
        """Decode one token of every row, and compare the logits. All rows of `batches` share one pass."""
        works = []
        for batch, names in batches.items():
            assert batch.batch_size == len(names)
            tokens = [self.tokens[name][self.made[name]] for name in names]
            works.append(Work(batch, torch.stack(tokens)[:, None]))
        for names, logits in zip(batches.values(), self.engine.forward(works), strict=True):
            for name in names:
                self.made[name] += 1
            self.check(names, logits[:, -1])

    def check(self, names: list[str], logits: torch.Tensor) -> None:
        for row, name in enumerate(names):
            expected = self.expected[name][self.made[name]]
            error = float((logits[row] - expected).abs().max() / expected.abs().max())
            assert error < self.within, (name, self.made[name], error)


@pytest.mark.parametrize(("architecture", "way"), covering(["bloom", "llama"], [*ALL]))
def test_rows_are_merged_split_and_compacted(
    architecture: str, way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch, 20)
    name, offload, options = ALL[way]
    if way in MIXED:
        keep_here(monkeypatch, 2)
    engine = load(name, checkpoint(architecture), offload, tmp_path, **options)
    assert engine.cannot_move_rows() is None
    rows = Rows(engine, 0.05 if way in EIGHT_BITS else 1e-4)
    older = rows.begin("a", FIRST, 1, 2)
    two = rows.begin("b", SECOND, 2, 1)
    merged = engine.move_rows([(older, [0, 1, 2]), (two, [0, 1])], 24)
    assert engine.batches == [merged]
    assert (merged.length, merged.capacity) == (14, 24)
    names = ["a0", "a1", "a2", "b0", "b1"]
    rows.step({merged: names})
    rows.step({merged: names})
    part = engine.move_rows([(merged, [1, 4])], 24)  # the short ones: much padding goes
    assert (part.length, merged.batch_size) == (9, 3)
    rows.step({merged: ["a0", "a2", "b0"], part: ["a1", "b1"]})
    engine.retire(merged, [0])
    rows.step({part: ["a1", "b1"], merged: ["a2", "b0"]})
    third = rows.begin("c", (6,), 3, 0)
    back = engine.move_rows([(part, [1]), (merged, [1]), (third, [0])], 30)
    names = ["b1", "b0", "c0"]
    for _ in range(3):
        rows.step({back: names, part: ["a1"], merged: ["a2"]})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in kinds.ALIKE)) for name in kinds.KINDS]
)
def test_every_kind_of_layer_moves_or_says_why_not(name: str, kind: kinds.Kinds, monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    engine = load("stream", kind(name), "cpu")
    why_not = engine.cannot_move_rows()
    if why_not is not None:
        cache = None if engine._own_cache else make_cache(engine.model.config, 1, 1)  # type: ignore[attr-defined]
        assert not isinstance(cache, RowCache) or "padding" in why_not
        with pytest.raises(EngineError, match=why_not.split("(")[0]):
            engine.move_rows([], 1)
        engine.close()
        return
    rows = Rows(engine)
    older = rows.begin("a", (9, 9), 1, 3, 12)
    two = rows.begin("b", (4,), 2, 5, 12)
    merged = engine.move_rows([(two, [0]), (older, [1])], 24)
    for _ in range(4):
        rows.step({merged: ["b0", "a1"], older: ["a0"]})
    merged = engine.move_rows([(older, [0]), (merged, [0, 1])], 26)
    for _ in range(3):
        rows.step({merged: ["a0", "b0", "a1"]})


@pytest.mark.parametrize("way", ["none", "kv auto by the cpu", "kv auto over the link"])
def test_forgotten_positions_are_left_behind(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    name, offload, options = ALL[way]
    keep_here(monkeypatch, 1)
    engine = load(name, checkpoint("llama"), offload, tmp_path, **options)
    rows = Rows(engine)
    batch = rows.begin("a", FIRST, 1, 2, 12)
    drafts = torch.full((3, 3), 7)
    drafts[0] = rows.tokens["a0"][2:5]
    engine.forward([Work(batch, drafts)])
    engine.rollback(batch, torch.tensor([14, 11, 11]))
    rows.made["a0"] += 3
    rows.step({batch: ["a0", "a1", "a2"]})
    moved = engine.move_rows([(batch, [0, 1, 2])], 30)
    assert moved.length == 15
    rows.step({moved: ["a0", "a1", "a2"]})
    short = engine.move_rows([(moved, [1, 2])], 30)
    assert short.length == 11
    rows.step({moved: ["a0"], short: ["a1", "a2"]})


def test_rows_that_cannot_be_moved_are_refused(llama: Engine) -> None:
    batch, empty = Rows(llama).begin("a", FIRST, 1, 0, 4), llama.admit(torch.ones(1, 4, dtype=torch.int64), 8)
    for *sources, capacity, error, why in (
        ((batch, []), 20, ValueError, "row"),
        ((batch, [3]), 20, ValueError, "row"),
        ((batch, [0, 0]), 20, ValueError, "row"),
        ((batch, [0]), (batch, [1]), 20, ValueError, "row"),
        ((batch, [0]), 4, ValueError, "does not fit"),
        ((MicroBatch(1, 1, 1), [0]), 4, ValueError, "admitted"),
        ((empty, [0]), 8, EngineError, "are computed"),
    ):
        with pytest.raises(error, match=why):
            llama.move_rows(sources, capacity)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("size", [64, 12, 6, 5])
def test_slots_are_taken_bit_by_bit(size: int, dtype: torch.dtype) -> None:
    """Slots are copied bit by bit for any dtype and layout."""
    whole = torch.randint(-99, 99, (5, 3, 9, size + 2)).to(dtype)
    real = torch.rand(2, 8) > 0.4
    rows, held = torch.tensor([3, 1]), slice(2, 7)
    for memory in (whole[..., :size].contiguous(), whole[..., 2:], whole[:, :, 1:, :size]):
        assert torch.equal(copy_slots(memory, rows, held, None), memory[rows, :, held])
        copied = copy_slots(memory, rows, held, RowMask(real))
        for row, mask, states in zip(rows.tolist(), real[:, -5:], copied, strict=True):
            order = 2 + torch.argsort(mask.int(), stable=True)  # padding comes first
            assert torch.equal(states, memory[row][:, order])
