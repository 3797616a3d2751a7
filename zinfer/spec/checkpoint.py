"""Local safetensors checkpoints, checked before any weight is read.

The format: 8 bytes little-endian header length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the data.
A truncated shard behind a memory map reads as zeros in most loaders, and a weight map may name any file on the disk;
both are refused here, from the headers alone. Nothing is unpickled and no code of a checkpoint is run.

Source of the format: the safetensors README, "Format".
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zinfer.spec.errors import ZinferError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # the limit of the reference implementation
_PICKLED = ("*.bin", "*.pt", "*.pth")
SAMPLE = 4096  # bytes hashed at either end of a tensor: tell retrained weights of one layout apart


class CheckpointError(ZinferError):
    """A checkpoint that cannot be loaded safely; the message names the file and its fault."""


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor: bytes ``[start, end)`` of `file`; `dtype` as safetensors spells it (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and one or more safetensors files, all headers read and checked."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers under `directory`. Raises CheckpointError for the first fault found."""
        config = _read_json(directory / "config.json", "it is not a checkpoint folder without it")
        if (directory / INDEX).is_file():
            weight_map = _read_json(directory / INDEX, "").get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{directory / INDEX} has no weight_map")
            files = [_inside(directory, str(name)) for name in sorted(set(map(str, weight_map.values())))]
        elif (directory / SINGLE).is_file():
            weight_map, files = None, [directory / SINGLE]
        else:
            others = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
            hint = f"; {others[0]} is pickled and is not read: convert it to safetensors" if others else ""
            raise CheckpointError(f"{directory} holds no {SINGLE} and no {INDEX}{hint}")
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            tensors |= _read_header(file)
        for name, file_name in (weight_map or {}).items():
            if name not in tensors or tensors[name].file.name != Path(str(file_name)).name:
                raise CheckpointError(f"{directory / INDEX} places {name} in {file_name}, which does not hold it")
        return cls(directory, config, tensors)

    @classmethod
    def of_file(cls, file: Path) -> "Checkpoint":
        """Return the tensors of one file, without a configuration. Raises CheckpointError as `open` does."""
        return cls(file.parent, {}, _read_header(file))

    @property
    def revision(self) -> str:
        """Fingerprint of the configuration, of every shard's header, and of the first and last bytes of every tensor,
        as 16 hex digits. It changes with the weights' layout, and with any training that touches a matrix as a whole.
        (Hashing 350 GB of data would cost more than many a sweep.)"""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.file.name} {info.dtype} {info.shape} {info.start} {info.end}\n".encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            with file.open("rb", buffering=0) as stream:
                own = (info for info in self.tensors.values() if info.file == file)
                for info in sorted(own, key=lambda info: info.start):
                    for begin in sorted({info.start, max(info.start, info.end - SAMPLE)}):
                        digest.update(os.pread(stream.fileno(), min(SAMPLE, info.end - begin), begin))
        return digest.hexdigest()[:16]


def bare_config(path: Path) -> Mapping[str, Any] | None:
    """Return the configuration of a model without weights: the file `path`, or the `config.json` of a folder that holds
    no weights of any kind; None if it holds some. Raises CheckpointError if it cannot be read."""
    if path.is_file():
        return _read_json(path, "")
    weights = (SINGLE, INDEX, "*.safetensors", *_PICKLED)
    if not (path / "config.json").is_file() or any(next(path.glob(pattern), None) for pattern in weights):
        return None
    return _read_json(path / "config.json", "")


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing" + (f": {why}" if why else "")) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _inside(directory: Path, name: str) -> Path:
    """Return the path of the shard `name`, which must lie in `directory` itself. (A hub snapshot's files are links out
    of it: the link, not its target, has to be inside.)"""
    if name != Path(name).name or name in {"", ".", ".."} or not name.endswith(".safetensors"):
        raise CheckpointError(f"{directory / INDEX} points to {name!r}: shards are .safetensors files of this folder")
    if not (directory / name).is_file():
        raise CheckpointError(f"{directory / name} is missing: the checkpoint is not complete")
    return directory / name


def _read_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{file} is not a safetensors file, or is cut off within its header")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: its header is damaged ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is damaged (not a JSON object)")
    tensors, end_of_data, base = {}, 0, 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = entry["data_offsets"]
            info = TensorInfo(file, entry["dtype"], tuple(entry["shape"]), base + start, base + end)
            if not all(isinstance(number, int) and number >= 0 for number in (start, end, *info.shape)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file}: the header's entry for {name} is damaged") from None
        if not 0 <= start <= end:
            raise CheckpointError(f"{file}: the header's entry for {name} is damaged")
        end_of_data = max(end_of_data, end)
        tensors[name] = info
    if base + end_of_data != size:
        state = "cut off" if size < base + end_of_data else "longer than its header says"
        raise CheckpointError(f"{file} is {state}: {size} bytes, {base + end_of_data} expected; copy it again")
    return tensors
