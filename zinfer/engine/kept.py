"""What was computed of a conversation, kept in host memory: keys and values that a later prefill takes up as its past.

A position costs a prefill the whole model's work, and a copy only its keys and values. They lie layer by layer in one
block of exactly their size, in an order that no engine is named in: what one engine kept, another can go on from.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinfer.checkpoint import Checkpoint, CheckpointError
from zinfer.engine.arena import Block, HostArena
from zinfer.engine.cache import FixedLayer
from zinfer.engine.read import DTYPES, as_bytes, fill, reading
from zinfer.lines import sync_folder

SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}
HALVES = ("keys", "values")


class Kept:
    """Keys and values of `length` positions, from `first` on, of a batch: for each decoder layer ``[B, kv_heads, n,
    head_dim]`` each, in page-locked memory if `pin`, until it is closed.

    `head` is a part of it that shares its memory.
    """

    def __init__(self, first: int, blocks: Mapping[str, Block], pin: bool) -> None:
        self.first, self.blocks = first, blocks
        self.length: int = next(iter(blocks.values())).shape[2]
        self.nbytes = sum(block.size for block in blocks.values())
        self._arena = HostArena(self.nbytes, pin)

    @classmethod
    def of(cls, layers: Sequence[FixedLayer], first: int, last: int, pin: bool) -> "Kept":
        """A copy of what `layers` hold of the positions from `first` up to `last`; it is complete on return.

        Raises MemoryError where the host has no room for it.
        """
        states = {
            f"{index}.{half}": part[:, :, first:last]
            for index, layer in enumerate(layers)
            for half, part in zip(HALVES, (layer.keys, layer.values), strict=True)
        }
        kept = cls(first, _end_to_end(states), pin)
        try:
            for name, block in kept.blocks.items():
                # Laid out on the device: of what is in one piece there, the link carries a copy at its full rate.
                block.view(kept.memory).copy_(states[name].contiguous(), non_blocking=pin)
            if pin:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            kept.close()
            raise
        return kept

    @property
    def memory(self) -> Tensor:
        """All of it, uint8 ``[nbytes]``."""
        return self._arena.memory[: self.nbytes]

    @property
    def pinned(self) -> bool:
        return self._arena.pinned

    def head(self, length: int) -> "Kept":
        """Its first `length` positions only, in the same memory."""
        part = copy(self)
        part.length = length
        return part

    def put(self, layers: Sequence[FixedLayer], device: torch.device) -> None:
        """Add it to `layers`, which hold exactly the positions before it. The copies are ordered before whatever the
        current stream computes next; it must not be closed until that has run."""
        for index, layer in enumerate(layers):
            # Whole, as the link likes it, and cut on the device.
            states = (self.blocks[f"{index}.{half}"].view(self.memory) for half in HALVES)
            keys, values = (part.to(device, non_blocking=True)[:, :, : self.length] for part in states)
            layer.update(keys, values)

    def fits(self, layers: int, batch_size: int) -> bool:
        """Whether it is of `batch_size` sequences and of a model of so many layers."""
        return len(self.blocks) == 2 * layers and all(block.shape[0] == batch_size for block in self.blocks.values())

    def close(self) -> None:
        """Free the memory, once no copy from it is under way."""
        if self._arena.pinned:
            torch.cuda.synchronize()
        self._arena.close()

    def write(self, path: Path, told: Mapping[str, Any]) -> int:
        """Write it to `path`, whole or not at all, as safetensors whose metadata tell `told` (JSON) and a CRC-32 of
        everything; the bytes of the file. Raises OSError."""
        header: dict[str, Any] = {"__metadata__": {"told": json.dumps(dict(told))}}
        for name, block in self.blocks.items():
            place = [block.offset, block.offset + block.size]
            header[name] = {"dtype": SAFETENSORS[block.dtype], "shape": list(block.shape), "data_offsets": place}
        data = as_bytes(self.memory)
        header["__metadata__"]["crc32"] = str(_checksum(header, data))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        sync_folder(path.parent)
        return 8 + len(text) + len(data)

    @classmethod
    def read(cls, path: Path, first: int, pin: bool) -> "Kept":
        """What `write` wrote to `path`, of the positions from `first` on, read by many threads.

        Raises CheckpointError for a file that is cut off or damaged, OSError for one that cannot be read, and
        MemoryError where the host has no room for it.
        """
        header = _header(path)
        tensors = Checkpoint.of_file(path).tensors
        start = min((info.start for info in tensors.values()), default=0)
        try:
            blocks = {
                name: Block(tensors[name].start - start, torch.Size(tensors[name].shape), DTYPES[tensors[name].dtype])
                for name in header
                if name != "__metadata__"
            }
            if not all(block.size == tensors[name].end - tensors[name].start for name, block in blocks.items()):
                raise ValueError
            kept = cls(first, blocks, pin)
        except (KeyError, IndexError, StopIteration, ValueError):
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


def told(path: Path) -> dict[str, Any]:
    """What `Kept.write` was told to tell of the file, its data unread. Raises CheckpointError for any other file, and
    for one that is cut off."""
    header = _header(path)
    try:
        found = json.loads(header["__metadata__"]["told"])
    except (KeyError, TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no kept conversation")
    return found


def drop_from_page_cache(path: Path) -> None:
    """Have the next read of the file come from its disk, as far as the file system goes along."""
    with path.open("rb") as stream, suppress(OSError):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(path: Path) -> dict[str, Any]:
    Checkpoint.of_file(path)  # says what is wrong with the file, if anything is
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    if not isinstance(header.get("__metadata__"), dict):
        raise CheckpointError(f"{path} is no kept conversation")
    return dict(header)


def _checksum(header: Mapping[str, Any], data: memoryview) -> int:
    """CRC-32 of the data and of everything that the header says, but for the checksum itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "crc32"}
    rest = json.dumps({**header, "__metadata__": metadata}, sort_keys=True).encode()
    return zlib.crc32(rest, zlib.crc32(data))


def _end_to_end(states: Mapping[str, Tensor]) -> dict[str, Block]:
    """Blocks without gaps, as safetensors wants its data; every tensor is of one type, so that all are aligned."""

    def laid_out() -> Iterator[tuple[str, Block]]:
        end = 0
        for name, tensor in states.items():
            block = Block(end, tensor.shape, tensor.dtype)
            end += block.size
            yield name, block

    return dict(laid_out())
