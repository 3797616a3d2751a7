"""Decisions of the streamed engine, with fakes of its stores: rows, buffers, and what a failed load leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import Checkpoints, Patch
from tests.fake_stores import LAYER, FakePool, FakeStream, fake_stream
from tests.test_parity import MACHINE, load
from zinfer.core.case import Offload, Workload
from zinfer.engine.base import Work
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream import headroom
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.headroom import MemoryHeadroom, prefetch_distance
from zinfer.engine.stream.kv.cpu import OwnAttentionError
from zinfer.engine.stream.weights.ring import PrefetchRing

CAPACITY = 8  # positions of each row
LAST = "model.layers.2.mlp.down_proj.weight"
LOAD = Workload(batch_size=6, input_len=4, output_len=4)


@pytest.fixture
def engine(checkpoint: Checkpoints, monkeypatch: Patch) -> FakeStream:
    """Provide an engine with room for two rows of `LOAD`. Its need is known after two passes."""
    monkeypatch.setattr(headroom, "MIN_PASSES", 2)
    made = fake_stream(checkpoint("llama"))
    made.given = made.plan.placement.model_copy(update={"kv_host_share": 4 / 6, "kv_on_cpu": True})
    return made


def admit(engine: FakeStream, rows: int) -> Any:
    return engine.admit(torch.ones(rows, 4, dtype=torch.int64), CAPACITY)


def compute(engine: FakeStream, *batches: Any) -> None:
    """Compute the prompts, or else the next token, of micro-batches."""
    counts = [1 if batch.length else 4 for batch in batches]
    engine.forward(
        [
            Work(batch, torch.ones(batch.batch_size, count, dtype=torch.int64))
            for batch, count in zip(batches, counts, strict=True)
        ]
    )


def computed(engine: FakeStream, rows: int) -> Any:
    batch = admit(engine, rows)
    compute(engine, batch)
    return batch


def unused(patch: Patch, size: int) -> None:
    patch.setattr(MemoryHeadroom, "unused_bytes", lambda _: size)


def test_rows_go_to_the_device_once_passes_have_shown_that_there_is_room(
    engine: FakeStream, monkeypatch: Patch
) -> None:
    row = engine.plan.model.kv_bytes(1, CAPACITY)
    unused(monkeypatch, 2 * row + row // 2)
    engine.expect(LOAD)
    first, second = computed(engine, 1), computed(engine, 2)
    assert (first.host_rows, second.host_rows) == (0, 1)  # as planned: nothing is known yet
    third = admit(engine, 1)
    assert third.host_rows == 0
    waiting = admit(engine, 2)
    assert waiting.host_rows == 1  # what the third row will take is promised
    compute(engine, third, waiting)
    assert engine.effective().settings["kv_host_rows"] == 2
    for batch in (third, waiting):
        engine.retire(batch)
    unused(monkeypatch, 0)
    assert computed(engine, 3).host_rows == 1  # what was given is kept
    engine.expect(None)
    engine.clear()
    engine.expect(LOAD)
    assert computed(engine, 3).host_rows == 1


def test_without_a_load_as_many_rows_are_on_the_host_as_planned(engine: FakeStream) -> None:
    first = computed(engine, 3)
    assert first.host_rows == 2
    host = first.host
    engine.rollback(first, torch.full((3,), 2))
    assert host.length == 2
    engine.retire(first, [0, 1])
    assert (first.batch_size, first.host_rows, host.closed) == (1, 1, False)
    second = computed(engine, 3)
    assert second.host_rows == 2  # of four rows, two thirds
    stored = second.host
    engine.retire(second, [1, 2])
    assert stored.closed
    assert second.host is None
    engine.clear()
    assert host.closed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), OwnAttentionError("another way")])
def test_no_room_is_given_after_memory_fell_short(engine: FakeStream, error: Exception, monkeypatch: Patch) -> None:
    """A model that attends in its own way runs the pass again."""
    unused(monkeypatch, 1 << 30)
    engine.expect(LOAD)
    batch = computed(engine, 2)
    compute(engine, batch)
    compute(engine, batch)
    assert computed(engine, 2).host_rows == 0
    run, failures = engine.run, [error]

    def short(part: Any) -> Any:
        if failures:
            raise failures.pop()
        return run(part)

    engine.run = short
    if isinstance(error, OwnAttentionError):
        compute(engine, batch)
        assert not engine.joins
        return
    with pytest.raises(torch.OutOfMemoryError):
        compute(engine, batch)
    for rows in (2, 1):  # though rows that got room still have it
        assert admit(engine, rows).host_rows == rows
        assert engine._headroom.positions == 0


def test_the_ring_gets_what_no_pass_has_needed_where_layers_stay(engine: FakeStream, monkeypatch: Patch) -> None:
    assert engine.given is not None
    engine.given = engine.given.model_copy(update={"resident_layers": (1,), "ring_depth": 2, "layer_chunks": 9})
    ring: Any = engine.ring
    monkeypatch.setattr("zinfer.engine.stream.engine.prefetch_distance", lambda _streamed, _count: 12.0)
    unused(monkeypatch, 3 * LAYER)

    def steps(count: int) -> int:
        batch = computed(engine, 3)
        for _ in range(count):
            compute(engine, batch)
        engine.retire(batch)
        return int(ring.depth)

    assert steps(3) == 2  # of equal rows: their passes may need less than those of a later batch
    assert ring.streamed == (0, 2)
    engine.expect(LOAD)
    assert steps(2) == 2 + 3
    unused(monkeypatch, 1 << 30)
    assert steps(1) == 2 + 3  # once, and a batch that begins does not take it back
    engine._headroom.note_shortage()
    assert steps(3) == 2
    engine.expect(LOAD)
    assert steps(2) == 12
    with monkeypatch.context() as patch:
        patch.setattr(
            PrefetchRing, "resize", lambda ring, depth, *_: _no_room() if depth > 2 else setattr(ring, "_depth", 2)
        )
        engine.expect(LOAD)
        assert steps(2) == 2  # the device was short after all
    assert not engine._headroom.measured


def _no_room() -> None:
    raise torch.OutOfMemoryError("no room")


def test_buffers_shrink_before_others_grow(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    events, resize = list[str](), PrefetchRing.resize

    def noted(ring: PrefetchRing, depth: int, *rest: Any) -> None:
        events.append(f"ring {depth}")
        resize(ring, depth, *rest)

    engine: Any = fake_stream(checkpoint("llama"), pool=FakePool(events))
    monkeypatch.setattr(PrefetchRing, "resize", noted)
    sizes = ({"ring_depth": 6, "expert_buffers": 3, "cached_experts": 4}, {"ring_depth": 3, "expert_buffers": 9})
    for size in sizes:
        engine.apply_placement(
            engine.plan.placement.model_copy(update={"layer_chunks": 99, "cached_experts": 0, **size})
        )
    assert events == [
        "ring 2", "experts 2 0", "ring 6", "experts 3 4", "ring 3", "experts 3 0", "ring 3", "experts 9 0",
    ]  # fmt: skip
    computed(engine, 1)
    effective = engine.effective()
    assert effective.gpu_weight_bytes == engine._resident_bytes + 7
    assert (effective.host_weight_bytes, effective.wire_bytes_per_step) == (3 * LAYER, 11)
    assert effective.settings["slot_bytes"] == LAYER + 5
    assert effective.settings["experts"] == "on-demand"


@pytest.mark.parametrize(("gpu_bytes", "resident"), [(3 << 30, 3), (1 << 29, 0)])
def test_resident_layers_change_with_the_batch(gpu_bytes: int, resident: int, checkpoint: Checkpoints) -> None:
    machine = MACHINE.model_copy(update={"gpu_count": 1, "gpu_bytes": gpu_bytes})
    engine = fake_stream(checkpoint("llama", hidden_size=256), machine=machine, gpu_weights="auto")
    for batch_size, expected in ((1, resident), (1 << 14, 0), (1, resident)):
        workload = Workload(batch_size=batch_size, input_len=64, output_len=8)
        engine.apply_placement(engine.planner.placement(workload))
        assert engine.effective().settings["resident_layers"] == expected


@pytest.mark.parametrize("moment", ["a weight is NaN", "host memory is too small"])
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_a_load_that_fails_leaves_no_memory_and_no_file(
    offload: Offload, moment: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The last layer has NaN, or memory falls short after it."""
    directory, folder = tmp_path / "m", tmp_path / "scratch"
    folder.mkdir()
    directory.mkdir()
    for file in checkpoint("llama").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    opened = list[PinnedArena]()

    class Noted(PinnedArena):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.append(self)

        def close(self) -> None:
            super().close()
            opened[:] = [arena for arena in opened if arena is not self]

    for module in ("load", "disk"):
        monkeypatch.setattr(f"zinfer.engine.stream.weights.{module}.PinnedArena", Noted)
    if moment == "a weight is NaN":
        shard, tensors = next(
            (file, tensors) for file in directory.glob("*.safetensors") if LAST in (tensors := load_file(file))
        )
        tensors[LAST][3, 5] = float("nan")
        save_file(tensors, shard, {"format": "pt"})
    else:
        monkeypatch.setattr(Stream, "_ready", lambda *_: _no_memory())
    with pytest.raises(Exception, match=r"holds NaN|too small"):
        load("stream", directory, offload, folder)
    assert not opened
    assert not list(folder.iterdir())


def _no_memory() -> None:
    raise MemoryError("host memory is too small")


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
