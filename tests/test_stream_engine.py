"""Decisions of the streamed engine, with fakes of its stores: rows, buffers, and what a failed load leaves."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import Checkpoints, Patch
from tests.fake_stores import LAYER, FakePool, FakeStream, fake_stream
from tests.test_parity import MACHINE, load
from zinfer.core.case import Offload, Workload
from zinfer.engine.base import Work
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.kv.cpu import OwnAttentionError
from zinfer.engine.stream.weights.ring import PrefetchRing

CAPACITY = 8  # positions of each row
LAST = "model.layers.2.mlp.down_proj.weight"
LOAD = Workload(batch_size=6, input_len=4, output_len=4)


@pytest.fixture
def engine(checkpoint: Checkpoints) -> FakeStream:
    """Provide an engine with room for two rows of `LOAD`."""
    made = fake_stream(checkpoint("llama"))
    made.given = made.plan.placement.model_copy(update={"kv_host_share": 4 / 6, "kv_on_cpu": True})
    return made


def admit(engine: FakeStream, rows: int) -> Any:
    return engine.admit(torch.ones(rows, 4, dtype=torch.int64), CAPACITY)


def compute(engine: FakeStream, *batches: Any) -> None:
    """Compute the prompts, or else the next token, of micro-batches."""
    sizes = [(batch.batch_size, 1 if batch.length else 4) for batch in batches]
    ids = (torch.ones(size, dtype=torch.int64) for size in sizes)
    engine.forward([Work(batch, token_ids) for batch, token_ids in zip(batches, ids, strict=True)])


def computed(engine: FakeStream, rows: int) -> Any:
    batch = admit(engine, rows)
    compute(engine, batch)
    return batch


def test_rows_beyond_the_room_of_a_load_are_host_rows(engine: FakeStream) -> None:
    engine.expect(LOAD)
    first, second = computed(engine, 1), computed(engine, 2)
    assert (first.host_rows, second.host_rows) == (0, 1)
    assert admit(engine, 1).host_rows == 1
    engine.retire(first)
    assert admit(engine, 2).host_rows == 1


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


def test_a_model_that_attends_in_its_own_way_runs_the_pass_again(engine: FakeStream) -> None:
    engine.expect(LOAD)
    batch = computed(engine, 2)
    run, failures = engine.run, [OwnAttentionError("another way")]

    def fails_once(part: Any) -> Any:
        if failures:
            raise failures.pop()
        return run(part)

    engine.run = fails_once
    compute(engine, batch)
    assert batch.length == 5
    assert not engine.joins


def test_buffers_shrink_before_others_grow(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    events, resize = list[str](), PrefetchRing.resize

    def noted(ring: PrefetchRing, depth: int, *rest: Any) -> None:
        events.append(f"ring {depth}")
        resize(ring, depth, *rest)

    engine: Any = fake_stream(checkpoint("llama"), pool=FakePool(events))
    monkeypatch.setattr(PrefetchRing, "resize", noted)
    sizes = ({"ring_depth": 6, "expert_buffers": 3, "cached_experts": 4}, {"ring_depth": 3, "expert_buffers": 9})
    for size in sizes:
        update = {"layer_chunks": 99, "cached_experts": 0, **size}
        engine.apply_placement(engine.plan.placement.model_copy(update=update))
    assert events[:4] == ["ring 2", "experts 2 0", "ring 6", "experts 3 4"]
    assert events[4:] == ["ring 3", "experts 3 0", "ring 3", "experts 9 0"]
    computed(engine, 1)
    effective = engine.effective()
    assert effective.gpu_weight_bytes == engine._resident_bytes + 7
    assert (effective.host_weight_bytes, effective.wire_bytes_per_step) == (3 * LAYER, 11)
    assert effective.settings["slot_bytes"] == LAYER + 5
    assert effective.settings["experts"] == "on-demand"


@pytest.mark.parametrize(("gpu_bytes", "resident"), [(3 << 30, 3), (1 << 29, 0)])
def test_resident_layers_change_with_the_batch(gpu_bytes: int, resident: int, checkpoint: Checkpoints) -> None:
    machine = MACHINE.model_copy(update={"gpu_count": 1, "gpu_bytes": gpu_bytes})
    engine = fake_stream(checkpoint("llama", hidden_size=128), machine=machine, gpu_weights="auto")
    for batch_size, expected in ((1, resident), (1 << 14, 0), (1, resident)):
        workload = Workload(batch_size=batch_size, input_len=64, output_len=8)
        engine.apply_placement(engine.planner.placement(workload))
        assert engine.effective().settings["resident_layers"] == expected


@pytest.mark.parametrize("moment", ["a weight is NaN", "host memory is too small"])
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_a_load_that_fails_leaves_no_memory_and_no_file(
    offload: Offload, moment: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    directory, folder = tmp_path / "m", tmp_path / "scratch"
    folder.mkdir()
    shutil.copytree(checkpoint("llama"), directory)
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
        shards = {file: load_file(file) for file in directory.glob("*.safetensors")}
        shard, tensors = next(item for item in shards.items() if LAST in item[1])
        tensors[LAST][3, 5] = float("nan")
        save_file(tensors, shard, {"format": "pt"})
    else:
        monkeypatch.setattr(Stream, "_ready", Mock(side_effect=MemoryError("host memory is too small")))
    with pytest.raises(Exception, match=r"holds NaN|too small"):
        load("stream", directory, offload, folder)
    assert not opened
    assert not list(folder.iterdir())
