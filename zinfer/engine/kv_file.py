"""KV snapshots on disk: one safetensors file each, with a checksum.

A file is either whole or absent, its header alone describes it, and many threads read it straight into the memory that
the GPU copies from. Nothing is unpickled.

A checksum does not say who wrote a file, and its writer decides what the model has "read". So only regular files of
this user are believed, in a folder that nobody else may write to.
"""

import json
import os
import stat
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zinfer.checkpoint.headers import Checkpoint, CheckpointError, TensorInfo
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.engine.pinned import TensorPlace
from zinfer.engine.read import CHUNK, DTYPES, as_bytes, fill, reading
from zinfer.system import atomic

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def private_folder(folder: Path) -> None:
    """Make `folder` for this user alone. Raises CheckpointError if others may write to it, OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{folder} is not a folder")
    _check_owner(folder, status, ": name a folder of your own", f": `chmod go-w {folder}`, or name another")


def _check_owner(path: Path, status: os.stat_result, theirs: str = "", shared: str = "") -> None:
    """Raise CheckpointError, with advice, if other users may write to `path`."""
    if status.st_uid != os.geteuid():
        raise CheckpointError(f"{path} belongs to another user{theirs}")
    if status.st_mode & 0o022:
        raise CheckpointError(f"{path} can be written to by other users{shared}")


def write(kept: KVSnapshot, path: Path, label: Mapping[str, Any]) -> int:
    """Write `kept` to `path`, whole or not at all. Returns the size of the file in bytes. Raises OSError. The file is
    safetensors; its metadata hold `label` (JSON) and a CRC-32 of everything."""
    header: dict[str, Any] = {"__metadata__": {"told": json.dumps(dict(label))}}
    for name, block in kept.blocks.items():
        offsets = [block.offset, block.offset + block.size]
        header[name] = {"dtype": _NAMES[block.dtype], "shape": list(block.shape), "data_offsets": offsets}
    data = as_bytes(kept.memory)
    header["__metadata__"]["crc32"] = str(_checksum(header, data))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic.writing(path, private=True) as stream:  # a conversation is private
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.write(data)
    return 8 + len(text) + len(data)


def read(path: Path, first: int, pin: bool) -> KVSnapshot:
    """Read a snapshot from `path`, whose first position is `first`. Raises CheckpointError for a file that is cut off
    or damaged or that others may have written, OSError for one that cannot be read, and MemoryError where the host has
    no room for it."""
    header, tensors = _header(path)
    start = min((info.start for info in tensors.values()), default=0)
    try:
        blocks = {
            name: TensorPlace(info.start - start, torch.Size(info.shape), DTYPES[info.dtype])
            for name, info in tensors.items()
        }
        kept = KVSnapshot(first, blocks, pin)
    except (KeyError, IndexError, StopIteration):
        raise CheckpointError(f"{path} holds no keys and values") from None
    try:
        with reading() as pool:
            for job in fill(pool, kept.memory, path, start):
                job.result()
        if str(_checksum(header, as_bytes(kept.memory))) != header["__metadata__"].get("crc32"):
            raise CheckpointError(f"{path} is damaged")
    except BaseException:
        kept.close()
        raise
    return kept


def read_label(path: Path) -> dict[str, Any]:
    """Return the label that `write` was given. Raises CheckpointError for files that are not believed."""
    header, _ = _header(path)
    try:
        return dict(json.loads(header["__metadata__"]["told"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is not a kept conversation") from None


def data_bytes(path: Path) -> int:
    """Return the bytes of the tensors in the file, from its header. Raises CheckpointError as `read_label` does."""
    return sum(info.end - info.start for info in Checkpoint.of_file(path).tensors.values())


def drop_from_page_cache(path: Path) -> None:
    """Drop the file from the page cache, where the system can."""
    with path.open("rb") as stream, suppress(OSError):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(path: Path) -> tuple[dict[str, Any], Mapping[str, TensorInfo]]:
    """Return header and tensors of a file of this user alone."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    _check_owner(path, status)
    tensors = Checkpoint.of_file(path).tensors  # raises CheckpointError where the file is damaged
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {"__metadata__": {}, **header}, tensors


def _checksum(header: Mapping[str, Any], data: memoryview) -> int:
    """Return a CRC-32 of the data and the header. All cores compute it; the header comes without its checksum."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        chunks = list(pool.map(zlib.crc32, (data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK))))
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "crc32"}
    return zlib.crc32(json.dumps([chunks, {**header, "__metadata__": metadata}], sort_keys=True).encode())
