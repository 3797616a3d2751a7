"""Parallel reads of checkpoints: one thread gets a fraction of the rate.

A checkpoint is read one group of tensors (a decoder layer) at a time. The next group is read while the current one is
used, so that a load takes as long as the slower of the two.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from zinfer.checkpoint.headers import Checkpoint, CheckpointError, TensorInfo
from zinfer.engine.pinned import PinnedArena, check_free, lay_out

THREADS = 16  # more than cores, since they wait for the disk most of the time
CHUNK = 16 << 20  # bytes that a thread reads at a time

BLOCK = 1 << 20  # bytes that are checked at a time: they are still in the cache for the second look

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Group = tuple[str, ...]  # names of checkpoint tensors that are used together
Visit = Callable[[str, int, memoryview], None]  # receives a tensor's name, an offset in its bytes, and bytes from there

DTYPES = {  # name in safetensors -> dtype
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip

# Floating-point type in safetensors -> bytes of a number, and the smallest bit patterns that are no number: as a signed
# integer for positive ones, as an unsigned integer for negative ones. Larger patterns of each sign are none either, so
# two maxima tell all, at the rate of a copy.
_NOT_FINITE: dict[str, tuple[int, int, int]] = {
    "F64": (8, 0x7FF << 52, 0xFFF << 52), "F32": (4, 0x7F800000, 0xFF800000), "C64": (4, 0x7F800000, 0xFF800000),
    "F16": (2, 0x7C00, 0xFC00), "BF16": (2, 0x7F80, 0xFF80), "F8_E5M2": (1, 0x7C, 0xFC), "F8_E4M3": (1, 0x7F, 0xFF),
    "F8_E8M0": (1, 0x80, 0xFF),
}  # fmt: skip


def read_groups(
    checkpoint: Checkpoint, groups: list[Group], visits: Iterable[Visit] = ()
) -> Generator[dict[str, Tensor]]:
    """Yield the tensors of each group, by name, until the next request.

    They lie in one of two buffers while threads fill the other. Each of `visits` gets all bytes of a group's tensors
    before the group comes, in the threads that read them; an exception of a visit is raised in this thread. Raises
    MemoryError, with advice, where the buffers have no room.
    """
    layouts = [lay_out((name, empty_tensor(name, checkpoint.tensors[name])) for name in group) for group in groups]
    largest = max((size for _, size in layouts), default=0)
    check_free(2 * largest)
    buffers = [PinnedArena(largest, pin=False, grow=True) for _ in range(2)]  # new memory is slow

    with reading() as pool:

        def begin(turn: int) -> tuple[dict[str, Tensor], list[Future[None]]]:
            buffer, blocks = buffers[turn % 2], layouts[turn][0]
            jobs = []
            for name, block in blocks.items():
                info, memory = checkpoint.tensors[name], buffer.memory[block.offset : block.offset + block.size]
                jobs += fill(pool, memory, info.file, info.start, [partial(visit, name) for visit in visits])
            return buffer.views(blocks), jobs

        for _, (tensors, jobs) in ahead(begin, range(len(groups)), 1):
            for job in jobs:
                job.result()
            yield tensors


def ahead(begin: Callable[[Item], Begun], items: Iterable[Item], count: int) -> Iterator[tuple[Item, Begun]]:
    """Yield each item and what `begin` returned for it, `count` items earlier."""
    under_way = deque[tuple[Item, Begun]]()
    for item in items:
        under_way.append((item, begin(item)))
        if len(under_way) > count:
            yield under_way.popleft()
    yield from under_way


def visit_tensors(checkpoint: Checkpoint, names: Iterable[str], visit: Visit) -> None:
    """Have threads read all bytes of tensors for `visit`, as `read_groups` does."""
    with reading() as pool:
        for name in names:
            info = checkpoint.tensors[name]
            for job in fill(pool, info.end - info.start, info.file, info.start, [partial(visit, name)]):
                job.result()


def check_finite(checkpoint: Checkpoint, name: str, begin: int, part: memoryview) -> None:
    """Raise CheckpointError if bytes of a tensor hold NaN or infinity. They begin at byte `begin` of it."""
    info = checkpoint.tensors[name]
    if info.dtype not in _NOT_FINITE:
        return
    if (number := _first_not_finite(info.dtype, np.frombuffer(part, np.uint8))) is not None:
        raise not_finite(f"{info.file}: {name}", begin // _NOT_FINITE[info.dtype][0] + number)


def not_finite(where: str, number: int) -> CheckpointError:
    """Return the error for NaN or infinity in a tensor. `where` names file and tensor, `number` the value."""
    return CheckpointError(
        f"{where} holds NaN or infinity (value {number:,}): the weights are damaged; --allow-nan loads them as they are"
    )


def first_not_finite(tensor: Tensor) -> int | None:
    """Return the index of the first NaN or infinity, if any."""
    name = next((name for name, dtype in DTYPES.items() if dtype == tensor.dtype), "")
    if name not in _NOT_FINITE or not tensor.numel():
        return None
    return _first_not_finite(name, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _first_not_finite(dtype: str, content: Any) -> int | None:
    size, positive, negative = _NOT_FINITE[dtype]
    signed, unsigned = content.view(f"<i{size}"), content.view(f"<u{size}")
    step = BLOCK // size
    for begin in range(0, len(signed), step):
        block, bits = signed[begin : begin + step], unsigned[begin : begin + step]
        if block.max() >= positive or bits.max() >= negative:
            return begin + int(np.flatnonzero((block >= positive) | (bits >= negative))[0])
    return None


def empty_tensor(name: str, info: TensorInfo) -> Tensor:
    """Return the tensor without its data. Raises CheckpointError for an unknown type, or a wrong size."""
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{info.file}: {name} is of type {info.dtype}, which cannot be read")
    tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
    if tensor.nbytes != info.end - info.start:
        raise CheckpointError(f"{info.file}: the header's entry for {name} is damaged")
    return tensor


@contextmanager
def reading() -> Iterator[ThreadPoolExecutor]:
    """Provide the threads for `fill`. The end of the block cancels reads that have not begun."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="zinfer-read")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def fill(
    pool: ThreadPoolExecutor,
    memory: Tensor | int,
    file: Path,
    start: int,
    visits: Iterable[Callable[[int, memoryview], None]] = (),
) -> list[Future[None]]:
    """Start filling `memory` (uint8) with bytes of `file` from `start` on. If it is their number, nothing keeps them.
    Each chunk goes to `visits`, with its offset in `memory`, in the thread that read it. The futures raise OSError
    where the file cannot be read, CheckpointError where it ends too early, and what a visit raises."""
    view = None if isinstance(memory, int) else as_bytes(memory)
    size = memory if isinstance(memory, int) else memory.numel()

    def read(begin: int) -> None:
        end = min(begin + CHUNK, size)
        part = memoryview(bytearray(end - begin)) if view is None else view[begin:end]
        _read(file, part, start + begin)
        for visit in visits:
            visit(begin, part)

    return [pool.submit(read, begin) for begin in range(0, size, CHUNK)]


def as_bytes(memory: Tensor) -> memoryview:
    """View the bytes of a uint8 tensor on the CPU."""
    array: Any = memory.numpy()
    return memoryview(array)


def _read(file: Path, part: memoryview, offset: int) -> None:
    with file.open("rb", buffering=0) as stream:
        while part:
            count = os.preadv(stream.fileno(), [part], offset)
            if not count:
                raise CheckpointError(f"{file} is cut off: copy it again")
            part, offset = part[count:], offset + count
