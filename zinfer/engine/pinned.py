"""Pinned memory: one mapping of exactly the requested size, page-locked for GPUs.

torch's pinned allocator rounds every block up to a power of two (BLOOM-176B's 352 GB become about 497 GB) and pins at
1-2 GB/s. The arena maps the range, advises huge pages, touches the pages with all cores and registers the range: this
needs no extra memory and takes a fraction of the time. Copies from it run at full link speed.
"""

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.system.host import available_bytes

ALIGNMENT = 256  # bytes; the alignment that cuBLAS wants for operands, and a multiple of every dtype's size
PAGE = 4096
HUGE = 2 << 20  # bytes of a huge page
COLLAPSE = 25  # advice MADV_COLLAPSE, which Python does not name
CHUNK = 64 << 20  # bytes that a thread touches at a time; few enough pages that torch keeps them on one thread
AHEAD = 8 << 30  # bytes that are touched before they are taken
LOCKED_TOGETHER = 1 << 30  # bytes that are locked in a load at a time, at least: about 50 ms
LOCK_LIMIT = 1 << 39  # bytes; drivers from 580 on cannot hold the page table of a larger range (vLLM #51080)
LESS = "Stop other programs, or load less: --layers, --gpu-weights, -O weight_codec=lossless, --offload nvme."


@dataclass(frozen=True)
class TensorPlace:
    """Place of one tensor in a range of bytes. It may lie there with its last two dimensions exchanged."""

    offset: int  # bytes
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor, base: int = 0) -> Tensor:
        """View the tensor in `memory` (uint8), where the range begins at `base`."""
        stored = self.view_stored(memory, base)
        return stored.mT if self.transposed else stored

    def view_stored(self, memory: Tensor, base: int = 0) -> Tensor:
        """View the tensor as it lies in `memory`, contiguous."""
        start = base + self.offset
        return memory[start : start + self.size].view(self.dtype).view(self.stored_shape)

    @property
    def stored_shape(self) -> torch.Size:
        """Shape of the tensor as it lies in memory."""
        if not self.transposed:
            return self.shape
        *lead, rows, columns = self.shape
        return torch.Size((*lead, columns, rows))


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, TensorPlace], int]:
    """Return aligned blocks for named tensors, and their bytes together. The tensors may be on the meta device."""
    blocks, end = {}, 0
    for name, tensor in tensors:
        blocks[name] = block = TensorPlace(end, tensor.shape, tensor.dtype)
        end += -(-block.size // ALIGNMENT) * ALIGNMENT
    return blocks, end


class PinnedArena:
    """Host memory of `size` bytes, all pages present, and page-locked if `pin`.

    With `grow`, `size` is only a limit: `allocate` hands memory out and makes it present then or, where plenty
    is free, a little ahead; `seal` ends that and page-locks what was taken, as far as `lock_taken` has not begun to.

    Raises MemoryError before it touches more memory than is free, and where the driver refuses to lock that much. The
    memory goes with the process, however that ends, and is neither inherited by children nor part of a core dump. It is
    private unless `shared` is given, an empty file of `os.memfd_create`: then it goes with the last process that has
    it, and other processes map it with `attach`. An arena dropped without `close` unlocks it, too.
    """

    def __init__(
        self, size: int, pin: bool, progress: Progress = silent, grow: bool = False, shared: int | None = None
    ) -> None:
        self.size = size
        self.used = 0
        self._shared = shared
        if shared is not None:
            os.ftruncate(shared, max(size, PAGE))
        self._map: mmap.mmap | None
        self._map, self.memory = _map(max(size, PAGE), shared)
        self.pinned, self._pin = False, pin
        self._unlocks: list[weakref.finalize[..., Any]] = []
        self._ahead = AHEAD if grow else 0
        self._threads: ThreadPoolExecutor | None = None
        self._touching: deque[tuple[int, Future[None]]] = deque()  # chunks under way: (begin, job)
        self._asked = 0  # end of the last chunk that a thread was asked to touch
        self._locker = ThreadPoolExecutor(1)  # starts no thread before it is used
        self._locking: list[Future[None]] = []
        self._lock_end = 0  # end of the last range that is being locked
        if not grow:
            self.allocate(size, progress)
            self.seal()

    @classmethod
    def attach(cls, size: int, shared: int) -> Self:
        """Map every page of the first `size` bytes of a shared arena. Another process has sealed it."""
        arena = cls(0, False)
        if os.fstat(shared).st_size < size:
            raise ValueError(f"the arena has less than {gb(size)}")
        arena.size = arena.used = size
        arena._map, arena.memory = _map(max(size, PAGE), shared)
        memory = arena.memory
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # the driver would map a page after the other
            list(threads.map(lambda start: memory[start : start + CHUNK : PAGE].max(), range(0, size, CHUNK)))
        return arena

    def allocate(self, size: int, progress: Progress = silent) -> Tensor:
        """Hand out the next `size` bytes, all pages present, as uint8 ``[size]``."""
        start, end = self.used, self.used + size
        if end > self.size:
            raise MemoryError(f"the arena has {gb(self.size)}; {gb(end)} were requested")
        if end > self._asked:
            check_free(end - self._asked)
            plenty = available_bytes() > size + 4 * self._ahead
            self._touch(min(self.size, end + (self._ahead if plenty else 0)))
        while self._touching and self._touching[0][0] < end:
            begin, done = self._touching.popleft()
            done.result()
            progress("taking host memory", min(1.0, (begin + CHUNK - start) / size))
        self.used = end
        return self.memory[start:end]

    def lock_taken(self) -> None:
        """Page-lock in a thread what was taken, while a load goes on. What is taken next begins at a page; no copy to a
        GPU may reach across."""
        end = self.used + -self.used % PAGE
        if self._pin and self._lock_end + LOCKED_TOGETHER <= end <= self.size:
            device = torch.cuda.current_device()
            self._locking.append(self._locker.submit(self._register, self._lock_end, end, device))
            self.used = self._lock_end = end

    def seal(self) -> None:
        """Set `size` to the bytes taken, free the rest, and page-lock. It does the latter if `pin` was given."""
        self._stop()
        self.size = self.used
        excess = self.used + -self.used % PAGE
        if self._shared is not None:
            os.ftruncate(self._shared, max(excess, PAGE))
        elif self._map is not None and excess < self._asked:
            self._map.madvise(mmap.MADV_DONTNEED, excess, self._asked - excess)
        if self._pin:
            self.lock()

    def _touch(self, end: int) -> None:
        """Make every page up to `end` present, in parallel. Some hosts hand memory out slowly at its first use."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        memory, shared = self.memory, self._shared is not None

        def touch(start: int) -> None:
            if shared:
                _make_huge(memory[start : start + CHUNK])
            memory[start : start + CHUNK : PAGE].zero_()

        while self._asked < end:
            self._touching.append((self._asked, self._threads.submit(touch, self._asked)))
            self._asked = min(self._asked + CHUNK, self.memory.numel() + -self.memory.numel() % PAGE)

    def _stop(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._touching.clear()

    def lock(self) -> None:
        """Page-lock the memory for the GPU of this process. Raises MemoryError where the driver refuses."""
        for done in self._locking:
            done.result()
        if self._lock_end < max(self.size, 1):
            self._register(self._lock_end, max(self.size, PAGE))
        self.pinned = True

    def _register(self, start: int, end: int, device: int | None = None) -> None:
        if device is not None:  # in a thread of its own
            torch.cuda.set_device(device)
        runtime, address = torch.cuda.cudart(), self.memory.data_ptr() + start
        code = runtime.cudaHostRegister(address, end - start, 0)
        if int(code) != 0:
            _clear_error()
            limit = f"many drivers lock less than {gb(LOCK_LIMIT)} at once" if end - start >= LOCK_LIMIT else ""
            raise MemoryError(
                f"the GPU's driver refused to page-lock {gb(end - start)} of host memory "
                f"({runtime.cudaGetErrorString(code)}); {limit or f'{gb(available_bytes())} more are free'}. {LESS}"
            )
        # Memory that is unmapped while it is locked stays taken, and nothing else can be locked at its address.
        unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        unlock.atexit = False
        self._unlocks.append(unlock)

    def views(self, blocks: Mapping[str, TensorPlace], base: int = 0) -> dict[str, Tensor]:
        """View the tensors of a layout that begins at byte `base`."""
        return {name: block.view(self.memory, base) for name, block in blocks.items()}

    def close(self) -> None:
        """Unlock and unmap the memory. Its views must not be used afterwards."""
        self._stop()
        self._locker.shutdown(cancel_futures=True)
        for unlock in self._unlocks:
            unlock()
        self.pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped with its last view; closing it under a live view would raise


def check_free(size: int) -> None:
    """Raise MemoryError, with advice, unless `size` bytes of host memory are free."""
    free = available_bytes()
    if size > free:
        raise MemoryError(f"{gb(size)} of host memory are needed, {gb(free)} are free. {LESS}")


def _map(size: int, shared: int | None = None) -> tuple[mmap.mmap, Tensor]:
    """Map `size` bytes, of the file `shared` if given. Returns the mapping and its memory, uint8. A file's mapping
    begins where a huge page can. The mapping reserves nothing, since some hosts have little memory at first and more as
    it is used; `check_free` makes sure that there is enough."""
    more = 0 if shared is None else HUGE
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        mapping = mmap.mmap(-1, size + more, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
        with torch.inference_mode(False):  # threads that are not in that mode write to it
            whole = torch.frombuffer(mapping, dtype=torch.uint8)
        offset = -whole.data_ptr() % HUGE if more else 0
        if shared is not None:
            _map_file(shared, whole.data_ptr() + offset, size, mmap.MAP_SHARED | unreserved)
    except OSError as error:
        limits = "`ulimit -v` and vm.overcommit_memory may limit it"
        raise MemoryError(f"the system refused to map {gb(size)} ({error.strerror}); {limits}. {LESS}") from None
    # A fork of a process copies its page-locked memory, hence DONTFORK; huge pages are touched and locked faster.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # a kernel that does not know the advice
            mapping.madvise(advice)
    return mapping, whole[offset : offset + size]


def _map_file(file: int, address: int, size: int, flags: int) -> None:
    """Map the first `size` bytes of a file at `address`. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10  # MAP_FIXED of Linux, which Python does not name
    if library.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | fixed, file, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _make_huge(memory: Tensor) -> None:
    """Make huge pages of a file's mapping. Most systems must be asked for each (Linux 6.1, MADV_COLLAPSE)."""
    memory[::HUGE].zero_()  # what has no page at all is not made huge
    library = ctypes.CDLL(None)
    library.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), COLLAPSE)


def _clear_error() -> None:
    """Clear the CUDA runtime's last error, which the next launch would report. torch has no function for it."""
    with suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for library in {line.split()[-1] for line in maps if "libcudart" in line}:
            ctypes.CDLL(library).cudaGetLastError()


def pinned_bytes() -> int:
    """Return the bytes that torch's pinned allocator holds, its rounding included."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def empty_pinned_cache() -> None:
    """Unlock and free the blocks that torch's pinned allocator keeps for reuse."""
    with suppress(AttributeError, RuntimeError):
        if torch.cuda.is_available():
            torch._C._accelerator_emptyHostCache()
