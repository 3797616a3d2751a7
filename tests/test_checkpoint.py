"""Headers of safetensors files and indexes: what breaks a rule of the format is refused in one line."""

import json
import os
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.damage_files import damage_bytes, write_header
from zinfer.checkpoint.headers import INDEX as WEIGHT_INDEX
from zinfer.checkpoint.headers import SINGLE, Checkpoint, CheckpointError

SIZES = {"a": [2, 3], "empty": [0, 4], "b": [5], "scalar": [], "c": [1, 7]}
SHAPES: list[Any] = [[-1], "8", None, [2**62, 4], [0.5], [True], [[2]], {}]  # which no tensor has
DATA = bytes(range(4 * sum(prod(shape) for shape in SIZES.values())))


def entries(sizes: dict[str, list[int]]) -> tuple[dict[str, Any], int]:
    """Return a header of float32 tensors, and their data's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sizes.items():
        count = 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + count]}
        end += count
    return header, end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    header, _ = entries(SIZES)
    write_header(tmp_path / SINGLE, header, DATA)
    return tmp_path


def refused(folder: Path, says: str = "safetensors|config") -> str:
    with pytest.raises(CheckpointError, match=says) as error:
        Checkpoint.open(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    return str(error.value)


def test_a_tensor_without_values_and_a_number_alone_are_tensors(folder: Path) -> None:
    tensors = Checkpoint.open(folder).tensors
    assert {name: list(info.shape) for name, info in tensors.items()} == SIZES
    assert tensors["empty"].start == tensors["empty"].end


@pytest.mark.parametrize(
    ("changed", "data"),
    [
        ({"b": {"data_offsets": [20, 40]}}, DATA),
        ({"c": {"data_offsets": [56, 84]}}, bytes(84)),
        ({"c": {"data_offsets": [52, 80]}}, DATA),
        ({}, DATA + b"\0"),
        ({}, DATA[:-1]),
        ({}, b""),
        *(({"b": {"dtype": dtype}}, DATA) for dtype in ("F128", "", "U8", "F64", None, 3, ["F32"], "F32 ")),
        *(({"b": {"shape": shape}}, DATA) for shape in SHAPES),
        *(({"b": {"data_offsets": at}}, DATA) for at in ([0], [8, 0], [-8, 8], None, "0,8", [0, 2**70], [0.0, 8.0])),
        ({"__metadata__": {"a": 1}}, DATA),
        *(({f"h.{'1' * digits}.ln": {}}, DATA) for digits in (10, 5000)),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(changed: dict[str, Any], data: bytes, folder: Path) -> None:
    header, _ = entries({name: [0] for name in changed if name != "__metadata__"} | SIZES)
    write_header(folder / SINGLE, {name: entry | changed.get(name, {}) for name, entry in header.items()}, data)
    assert SINGLE in refused(folder)


def test_a_header_that_names_a_tensor_twice_is_refused(folder: Path) -> None:
    header, _ = entries({"a": [2]})
    twice = json.dumps(header)[:-1] + ', "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    write_header(folder / SINGLE, twice, bytes(8))
    assert SINGLE in refused(folder)


def test_a_flipped_bit_in_a_header_is_refused_or_harmless(folder: Path) -> None:
    """A changed name is another tensor, which the model does not have; all that places the data is checked."""
    good = (folder / SINGLE).read_bytes()
    stored = {(info.dtype, info.shape, info.start, info.end) for info in Checkpoint.open(folder).tensors.values()}
    for seed in range(200):
        (folder / SINGLE).write_bytes(good)
        damage_bytes(random.Random(seed), folder / SINGLE)
        try:
            tensors = Checkpoint.open(folder).tensors
        except CheckpointError:
            continue
        for info in tensors.values():
            entry = (info.dtype, info.shape, info.start, info.end)
            assert entry in stored or (info.dtype in {"I32", "U32"} and ("F32", *entry[1:]) in stored)


def shard(folder: Path, name: str, sizes: dict[str, list[int]]) -> dict[str, str]:
    header, size = entries(sizes)
    write_header(folder / name, header, bytes(size))
    return dict.fromkeys(sizes, name)


def test_a_name_in_two_shards_is_refused(folder: Path) -> None:
    (folder / SINGLE).unlink()
    weight_map = shard(folder, "1.safetensors", {"a": [2], "b": [2]}) | shard(folder, "2.safetensors", {"b": [2]})
    (folder / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "both hold b" in refused(folder)


@pytest.mark.parametrize(
    "index",
    [
        b"{}", b"[]", b"{", b"\xff", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": ["x"]}}',
        b'{"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}}',
        b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
        b'{"weight_map": {"a": "../1.safetensors"}}', b'{"weight_map": {"a": "none.safetensors"}}', b'{"a":' * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(index: bytes, folder: Path) -> None:
    (folder / SINGLE).unlink()
    shard(folder, "1.safetensors", {"a": [2]})
    (folder / WEIGHT_INDEX).write_bytes(index)
    assert WEIGHT_INDEX in refused(folder) or "none.safetensors" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", WEIGHT_INDEX, SINGLE])
@pytest.mark.parametrize("target", ["fifo", "folder", "/dev/zero", "/proc/self/mem", "/proc/kmsg", "itself"])
def test_only_regular_files_are_read(name: str, target: str, folder: Path) -> None:
    path = folder / name
    if name != "config.json":
        (folder / SINGLE).unlink()
    path.unlink(missing_ok=True)
    if target == "fifo":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(name if target == "itself" else target)
    assert name in refused(folder)


def test_a_link_to_a_file_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files are links out of the folder, as in a hub snapshot."""
    blob = tmp_path_factory.mktemp("blobs") / "1234"
    (folder / SINGLE).rename(blob)
    (folder / SINGLE).symlink_to(blob)
    assert Checkpoint.open(folder).tensors.keys() == SIZES.keys()
