"""Host memory for weights: one mapping of exactly the size that is asked for, page-locked when a GPU reads it.

torch's pinned allocator rounds every block up to a power of two (BLOOM-176B's 352 GB become about 497 GB) and pins at
1-2 GB/s. Mapping, advising huge pages, touching with all cores and registering the finished range costs nothing extra
and takes a fraction of the time; copies from it run at full link speed.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from zinfer.engine.base import Progress, silent
from zinfer.units import gb

ALIGNMENT = 256  # bytes; what cuBLAS wants of an operand, and a multiple of every dtype
PAGE = 4096
CHUNK = 256 << 20  # bytes one thread touches at a time

# Settings of torch's own pinned allocator for an engine that cannot use an arena: memory is touched by several threads
# and then registered, without rounding. The best first; a torch that does not know a key refuses the line.
PINNED_ALLOCATOR = (
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:8,pinned_max_round_threshold_mb:1",
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
)


@dataclass(frozen=True)
class Block:
    """Where one tensor lies in a range of bytes."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor, base: int = 0) -> Tensor:
        """The tensor in `memory` (uint8 ``[n]``), whose range begins at `base`. No copy."""
        start = base + self.offset
        return memory[start : start + self.size].view(self.dtype).view(self.shape)


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Block], int]:
    """Blocks for named tensors (shape and dtype count, they may be on the meta device), aligned and in order; and the
    bytes they take together."""
    blocks, end = {}, 0
    for name, tensor in tensors:
        block = Block(end, tensor.shape, tensor.dtype)
        blocks[name] = block
        end += -(-block.size // ALIGNMENT) * ALIGNMENT
    return blocks, end


class HostArena:
    """`size` bytes of host memory, all of them present, and page-locked if `pin`.

    With `grow`, `size` is only a limit: memory is handed out by `take` and becomes present then; `seal` ends that, and
    page-locks what was taken. Raises MemoryError, saying how much was asked for and what limits it, when the system
    refuses to lock that much.
    """

    def __init__(self, size: int, pin: bool, progress: Progress = silent, grow: bool = False) -> None:
        self.size = size
        self.used = 0
        self._map: mmap.mmap | None = mmap.mmap(-1, max(size, PAGE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=max(size, PAGE))
        self.pinned, self._pin = False, pin
        if not grow:
            self.take(size, progress)
            self.seal()

    def take(self, size: int, progress: Progress = silent) -> Tensor:
        """The next `size` bytes, present, uint8 ``[size]``."""
        start, self.used = self.used, self.used + size
        if self.used > self.size:
            raise MemoryError(f"the arena has {gb(self.size)}, and {gb(self.used)} were taken")
        self._touch(start, self.used, progress)
        return self.memory[start : self.used]

    def seal(self) -> None:
        """Take no more: `size` is what was taken, and that is page-locked if it is to be."""
        self.size = self.used
        if self._pin:
            self._register()

    def _touch(self, begin: int, end: int, progress: Progress) -> None:
        """Make every page present, in parallel: some hosts hand memory out slowly at its first use."""

        def touch(start: int) -> int:
            self.memory[start : min(start + CHUNK, end) : PAGE].zero_()
            return start

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for start in pool.map(touch, range(begin + -begin % PAGE, end, CHUNK)):  # no page that holds data
                progress("taking host memory", min(1.0, (start + CHUNK) / end))

    def _register(self) -> None:
        code = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), max(self.size, PAGE), 0)
        if int(code) != 0:
            raise MemoryError(
                f"the system refused to page-lock {gb(self.size)} of host memory (CUDA error {int(code)}); "
                "raise the memlock limit (`ulimit -l unlimited`) or use fewer layers"
            )
        self.pinned = True

    def views(self, blocks: Mapping[str, Block], base: int = 0) -> dict[str, Tensor]:
        """The tensors of a layout that begins at byte `base`."""
        return {name: block.view(self.memory, base) for name, block in blocks.items()}

    def close(self) -> None:
        """Unlock and unmap. Views must not be used afterwards."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped with its last view; closing it under a live view would raise


def set_pinned_allocator() -> str:
    """Make large blocks of torch's pinned allocator as cheap as this torch can; the settings then in force."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not torch.cuda.is_available():
        return settings
    for wanted in PINNED_ALLOCATOR:
        with suppress(RuntimeError, ValueError):
            torch.cuda.memory._set_allocator_settings(f"{settings},{wanted}".strip(","))
            return f"{settings},{wanted}".strip(",")
    return settings


def pinned_bytes() -> int:
    """Bytes that torch's pinned allocator holds, its rounding included."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def empty_pinned_cache() -> None:
    """Unlock and free the blocks that torch's pinned allocator keeps for reuse."""
    with suppress(AttributeError, RuntimeError):
        if torch.cuda.is_available():
            torch._C._accelerator_emptyHostCache()
