"""Parallel file reads: many threads, since one alone gets a fraction of the rate of a disk or the page cache.

A checkpoint is read one group of tensors (a decoder layer) at a time. The next group is read while the current one is
used, so that a load takes as long as the slower of the two.
"""

import os
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.spec.checkpoint import Checkpoint, CheckpointError, TensorInfo
from zinfer.spec.host import available_bytes

THREADS = 16  # more than cores, since they wait for the disk most of the time
CHUNK = 16 << 20  # bytes that a thread reads at a time

Group = tuple[str, ...]  # names of checkpoint tensors that are used together

DTYPES = {  # name in safetensors -> dtype
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip


def groups_read(checkpoint: Checkpoint, groups: list[Group]) -> Generator[dict[str, Any]]:
    """Yield the tensors of each group, by name, valid until the next group is requested.

    They lie in one of two buffers while threads fill the other. If free memory is less than twice both buffers, the
    tensors come as from `groups_mapped`.
    """
    layouts = [lay_out((name, empty_tensor(name, checkpoint.tensors[name])) for name in group) for group in groups]
    largest = max((size for _, size in layouts), default=0)
    if 4 * largest > available_bytes():  # the system can drop a mapped file's pages when memory is short, not buffers
        yield from groups_mapped(checkpoint, groups)
        return
    buffers = [PinnedArena(largest, pin=False, grow=True) for _ in range(2)]  # new memory is slow

    with reading() as pool:

        def begin(turn: int) -> tuple[dict[str, Tensor], list[Future[None]]]:
            buffer, blocks = buffers[turn % 2], layouts[turn][0]
            jobs = []
            for name, block in blocks.items():
                info, memory = checkpoint.tensors[name], buffer.memory[block.offset : block.offset + block.size]
                jobs += fill(pool, memory, info.file, info.start)
            return buffer.views(blocks), jobs

        begun = map(begin, range(len(groups)))
        ahead = next(begun, None)
        while ahead is not None:
            (tensors, jobs), ahead = ahead, next(begun, None)
            for job in jobs:
                job.result()
            yield tensors


def groups_mapped(checkpoint: Checkpoint, groups: list[Group]) -> Generator[dict[str, Any]]:
    """Yield the tensors of each group, by name, as slices of mapped files: they may be kept, and are read when used."""
    for group in groups:
        with ExitStack() as stack:
            files = {checkpoint.tensors[name].file for name in group}
            readers = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
            yield {name: readers[checkpoint.tensors[name].file].get_slice(name) for name in group}


def empty_tensor(name: str, info: TensorInfo) -> Tensor:
    """Return the tensor without its data, on the meta device.

    Raises CheckpointError for a type that cannot be read, and where type and size disagree.
    """
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{info.file}: {name} is of type {info.dtype}, which cannot be read")
    tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
    if tensor.nbytes != info.end - info.start:
        raise CheckpointError(f"{info.file}: the header's entry for {name} is damaged")
    return tensor


@contextmanager
def reading() -> Iterator[ThreadPoolExecutor]:
    """Provide the threads for `fill`. Reads that have not begun when the ``with`` block ends are cancelled."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="zinfer-read")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def fill(pool: ThreadPoolExecutor, memory: Tensor, file: Path, start: int) -> list[Future[None]]:
    """Start filling `memory` (uint8 ``[n]``) with the bytes of `file` from offset `start` on.

    The futures raise OSError where the file cannot be read, and CheckpointError where it ends too early.
    """
    view = as_bytes(memory)
    return [
        pool.submit(_read, file, view[begin : begin + CHUNK], start + begin) for begin in range(0, len(view), CHUNK)
    ]


def as_bytes(memory: Tensor) -> memoryview:
    """Return a view of the bytes of a uint8 tensor on the CPU."""
    array: Any = memory.numpy()
    return memoryview(array)


def _read(file: Path, part: memoryview, offset: int) -> None:
    with file.open("rb", buffering=0) as stream:
        while part:
            count = os.preadv(stream.fileno(), [part], offset)
            if not count:
                raise CheckpointError(f"{file} is cut off: copy it again")
            part, offset = part[count:], offset + count
