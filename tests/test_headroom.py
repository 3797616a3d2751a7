"""Extra rows that fit on the device, learned from past passes. A plan has room for fewer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.opened import engines_closed
from tests.test_parity import load
from tests.test_passes import keep_here
from zinfer.core.case import Workload
from zinfer.engine.base import Work
from zinfer.engine.stream import headroom
from zinfer.engine.stream.headroom import MemoryHeadroom, prefetch_distance
from zinfer.generation import passes

assert engines_closed  # a fixture of all tests
Patch = pytest.MonkeyPatch
CAPACITY = 8  # positions of each row
LOAD = Workload(batch_size=6, input_len=4, output_len=4)


@pytest.fixture
def seasoned(monkeypatch: Patch) -> None:
    monkeypatch.setattr(headroom, "MIN_PASSES", 2)


def admitted(engine: Any, rows: int) -> Any:
    ids = torch.arange(4, 4 + 4 * rows).reshape(rows, 4)
    return passes.prefill(engine, ids, torch.ones_like(ids), CAPACITY - 4)[0]


@pytest.mark.usefixtures("seasoned")
def test_rows_go_to_the_device_once_passes_have_shown_that_there_is_room(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    keep_here(monkeypatch, 2)
    engine: Any = load("stream", checkpoint("llama"), "cpu", tmp_path, kv_offload="auto", kv_attention="cpu")
    row = engine.plan.model.kv_bytes(1, CAPACITY)
    monkeypatch.setattr(MemoryHeadroom, "unused_bytes", lambda _: 2 * row + row // 2)
    engine.expect(LOAD)
    first, second = admitted(engine, 1), admitted(engine, 2)
    assert (first.host_rows, second.host_rows) == (0, 1)  # as planned: nothing is known yet
    third = engine.admit(torch.ones(1, 4, dtype=torch.int64), CAPACITY)
    assert third.host_rows == 0
    waiting = engine.admit(torch.ones(2, 4, dtype=torch.int64), CAPACITY)
    assert waiting.host_rows == 1  # what the third row will take is promised
    asked = torch.arange(4, 8)[None]
    logits = [engine.forward([Work(batch, asked.expand(batch.batch_size, -1))])[0] for batch in (third, waiting)]
    assert torch.allclose(logits[0].expand(2, -1, -1), logits[1], atol=1e-5)
    for batch in (third, waiting):
        engine.retire(batch)
    monkeypatch.setattr(MemoryHeadroom, "unused_bytes", lambda _: 0)
    again = admitted(engine, 3)
    assert again.host_rows == 1  # what was given is kept
    engine.expect(None)
    engine.clear()
    engine.expect(LOAD)
    assert admitted(engine, 3).host_rows == 1


@pytest.mark.usefixtures("seasoned")
def test_no_room_is_given_after_memory_fell_short(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    keep_here(monkeypatch, 1)
    engine: Any = load("stream", checkpoint("llama"), "cpu", tmp_path, kv_offload="auto", kv_attention="cpu")
    monkeypatch.setattr(MemoryHeadroom, "unused_bytes", lambda _: 1 << 30)
    engine.expect(LOAD)
    batch = admitted(engine, 1)
    for token in (5, 6):
        engine.forward([Work(batch, torch.tensor([[token]]))])
    assert admitted(engine, 2).host_rows == 0

    def short(*_args: Any, **_options: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_run", short)
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward([Work(batch, torch.tensor([[7]]))])
    for rows in (2, 1):  # though rows that got room still have it
        assert admitted(engine, rows).host_rows == rows
        assert engine._headroom.positions == 0


@pytest.mark.usefixtures("seasoned")
def test_the_ring_gets_what_no_pass_has_needed_where_layers_stay(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    options: dict[str, Any] = {"gpu_weights": "34%", "kv_offload": "cpu", "kv_attention": "cpu"}
    engine: Any = load("stream", checkpoint("llama"), "cpu", tmp_path, **options)
    ring, tokens = engine.ring, torch.tensor([[5], [6], [7]])
    assert len(ring.streamed) == 2
    monkeypatch.setattr("zinfer.engine.stream.prefetch_distance", lambda _streamed, _count: 12.0)  # each is a piece
    monkeypatch.setattr(MemoryHeadroom, "unused_bytes", lambda _: 3 * ring.buffer_bytes)

    def steps(count: int) -> list[torch.Tensor]:
        batch = admitted(engine, 3)
        logits = [engine.forward([Work(batch, tokens)])[0] for _ in range(count)]
        engine.retire(batch)
        return logits

    alone = steps(3)  # equal rows: what their passes need is not the most that a later batch needs
    planned = ring.depth
    engine.expect(LOAD)
    first = steps(2)
    assert ring.depth == planned + 3
    monkeypatch.setattr(MemoryHeadroom, "unused_bytes", lambda _: 1 << 30)
    assert torch.allclose(torch.cat(first + steps(1)), torch.cat([alone[0], alone[1], alone[0]]), atol=1e-4)
    assert ring.depth == planned + 3  # once, and a batch that begins does not take it back
    engine._headroom.note_shortage()
    steps(3)
    assert ring.depth == planned
    engine.expect(None)
    engine.expect(LOAD)
    steps(2)
    assert ring.depth == 12
    engine.expect(LOAD)
    assert ring.depth == planned


@pytest.mark.parametrize(
    ("streamed", "count", "layers"),
    [
        (range(4), 4, 1.0),
        ((), 4, 1.0),
        ((0, 1, 2), 4, 1.5),  # one of four stays: its time and that of the one before
        (range(1, 10), 10, 1.8),
        ((0, 2), 4, 1.0),
        ((0, 3), 5, 1.2),  # two stay behind one
        ((1, 2, 3, 4), 8, 2.0),  # half of them in a row
    ],
)
def test_the_ring_holds_what_comes_while_layers_that_stay_compute(
    streamed: Sequence[int], count: int, layers: float
) -> None:
    assert prefetch_distance(streamed, count) == pytest.approx(layers)


def test_without_a_gpu_no_memory_is_unused() -> None:
    assert MemoryHeadroom(torch.device("cpu")).unused_bytes() == 0
