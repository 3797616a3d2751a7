"""Reading ahead: every byte arrives, the next group comes while one is used, and no thread outlives its reader."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import PATIENCE_S, Checkpoints, Patch
from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.checkpoint.resolve import from_directory
from zinfer.engine import pinned, read
from zinfer.engine.read import Group, read_groups
from zinfer.engine.state import ModelState

Readers = Callable[[], list[str]]
GROUPS: list[Group] = [("big", "odd"), ("flags", "scalar", "none"), ("wide",), ("last",)]
TENSORS = {
    "big": torch.randn(300, 70).to(torch.bfloat16),
    "odd": torch.arange(7, dtype=torch.int8),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "wide": torch.randn(9, 1000).to(torch.float8_e4m3fn),
    "last": torch.arange(50000, dtype=torch.int64),
}


@pytest.fixture
def opened(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture
def readers() -> Readers:
    """Return a function that names running readers of this test."""
    earlier = set(threading.enumerate())

    def begun() -> list[str]:
        threads = set(threading.enumerate()) - earlier
        return [thread.name for thread in threads if thread.name.startswith("zinfer-read")]

    return begun


def same(first: Tensor, other: Tensor) -> bool:
    return first.dtype == other.dtype and first.shape == other.shape and first.tolist() == other.tolist()


@pytest.mark.parametrize("chunk", [1, 1000, 16 << 20])
def test_every_tensor_arrives(readers: Readers, chunk: int, opened: Checkpoint, monkeypatch: Patch) -> None:
    groups = GROUPS if chunk > 1 else GROUPS[1:2]
    monkeypatch.setattr(read, "CHUNK", chunk)
    arrived: dict[str, Tensor] = {}
    for group, tensors in zip(groups, read_groups(opened, groups), strict=True):
        assert tuple(tensors) == group
        arrived |= {name: tensor.clone() for name, tensor in tensors.items()}
    assert all(same(tensor, TENSORS[name]) for name, tensor in arrived.items())
    assert readers() == []
    assert list(read_groups(opened, [])) == []


def test_the_next_group_is_read_while_one_is_used(opened: Checkpoint, monkeypatch: Patch) -> None:
    real, done = read._read, threading.Semaphore(0)

    def tell(*args: Any) -> None:
        real(*args)
        done.release()

    monkeypatch.setattr(read, "_read", tell)
    groups: list[tuple[str, ...]] = [("big",), ("wide",), ("last",)]
    source = read_groups(opened, groups)
    for begun in (2, 3, 3):
        tensors = next(source)
        for _ in range(begun):
            assert done.acquire(timeout=PATIENCE_S), "the group after this one is not on its way"
        assert not done.acquire(timeout=0.05), "more than one group is on its way"
        for _ in range(begun):
            done.release()
        assert all(same(tensor, TENSORS[name]) for name, tensor in tensors.items()), "a loan was overwritten"


def test_who_stops_early_leaves_no_thread(
    readers: Readers, opened: Checkpoint, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """Also who loads weights and does not take them to the end."""
    loading = ModelState(from_directory(checkpoint("llama")), "safetensors").load(torch.device("cpu"))
    assert next(loading)
    assert readers() != []
    loading.close()
    assert readers() == []
    real, count = read._read, []

    def slowly(*args: Any) -> None:
        count.append(args)
        time.sleep(0.25 if len(count) > 4 else 0)
        real(*args)

    monkeypatch.setattr(read, "_read", slowly)
    monkeypatch.setattr(read, "CHUNK", 100)
    monkeypatch.setattr(read, "THREADS", 2)
    source = read_groups(opened, [("odd",), ("last",)])
    next(source)
    assert readers() != []
    source.close()
    assert readers() == []
    assert len(count) < 100, "reads that nobody waits for are given up"


def test_a_file_that_shrinks_meanwhile_is_named(readers: Readers, opened: Checkpoint) -> None:
    file = opened.tensors["last"].file
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off: copy it again"):
        for _ in read_groups(opened, GROUPS):
            pass
    assert readers() == []


def test_a_disk_that_fails_is_an_error_of_the_reader(readers: Readers, opened: Checkpoint, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        next(read_groups(opened, GROUPS))
    assert readers() == []


def test_memory_that_is_short_for_two_groups_is_said(opened: Checkpoint, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="of host memory are needed"):
        next(read_groups(opened, GROUPS))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"dtype": "F4"}, "big is of type F4, which cannot be read"), ({"end": 100}, "the header's entry for big")],
)
def test_a_header_that_is_wrong_is_refused(change: dict[str, Any], says: str, opened: Checkpoint) -> None:
    info = opened.tensors["big"]
    wrong = info._replace(**change)
    spoilt = Checkpoint(opened.directory, opened.config, {**opened.tensors, "big": wrong})
    with pytest.raises(CheckpointError, match=says):
        next(read_groups(spoilt, GROUPS))


def test_the_revision_changes_with_any_matrix(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The last tensor, an untrained norm, stays as it is."""
    directory = checkpoint("llama")
    other = tmp_path / directory.name
    shutil.copytree(directory, other)
    assert Checkpoint.open(other).revision == Checkpoint.open(directory).revision
    before = {Checkpoint.open(other).revision}
    for name, info in Checkpoint.open(other).tensors.items():
        with info.file.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, info.start)[0] ^ 1]), info.start)
        revision = Checkpoint.open(other).revision
        assert revision not in before, name
        before.add(revision)
