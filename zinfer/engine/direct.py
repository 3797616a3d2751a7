"""Direct reads by many threads, past the page cache (O_DIRECT).

They reach the full rate of the drives. The page cache would hold weights a second time, and drop them before the next
pass needs them. A file system that refuses direct I/O is read through the cache all the same, and the pages are dropped
behind the reads.

Direct reads begin and end at whole pages, in the file and in memory: `aligned` gives the range to read. The memory
should lie in huge pages, as that of `PinnedArena` does: a request into scattered pages is split into many, which cost a
third of the rate of a virtio disk. Into huge pages fio with io_uring or libaio read that disk no faster than these
threads, at the same size and number of requests.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.errors import environment_error

PAGE = 4096  # bytes; a multiple of every drive's sectors
REQUEST = 8 << 20  # bytes of one read, and of a stripe: what one drive brings in a millisecond or more
THREADS = 16  # reads in flight

Identity = tuple[int, int, int, int]  # size in bytes, inode, and times of the last change of content and state, in ns


def aligned(start: int, end: int) -> tuple[int, int]:
    """Return the range of whole pages around bytes `start` to `end`."""
    return start - start % PAGE, end + -end % PAGE


class DirectFile:
    """File open for direct reads by any number of threads. Raises CheckpointError where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = self._open_direct()
            self.direct = self._file >= 0
            if not self.direct:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            raise environment_error(CheckpointError(f"{path} cannot be read: {error.strerror}")) from None

    def _open_direct(self) -> int:
        """Return a descriptor for direct reads; -1 if the file system refuses. Some refuse only when they are tried."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a fault of the file, or of the drive
                raise
            return -1
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(file, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                os.close(file)
                return -1
        return file

    @property
    def identity(self) -> Identity:
        """Facts that differ once the content of the file has changed. No program can set them all back."""
        status = os.fstat(self._file)
        return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    def read(self, part: memoryview, offset: int, need: int) -> None:
        """Read at least `need` bytes from `offset` on into `part`.

        A file may end within its last page. Direct reads want `part`, its length and `offset` at whole pages. Raises
        OSError, with the path, and CheckpointError where the file ends too early.
        """
        done = 0
        while done < need:
            try:
                count = os.preadv(self._file, [part[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror or "read error", str(self.path)) from None
            if done + count < need and self.direct:
                count -= count % PAGE  # the next read begins at a whole page again
            if not count:
                raise CheckpointError(f"{self.path} is cut off: it ends before byte {offset + need:,}")
            done += count
        if not self.direct:
            with suppress(OSError):
                os.posix_fadvise(self._file, offset, len(part), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class StripedFile:
    """Bytes spread evenly over files on several drives.

    Stripe n, of `REQUEST` bytes, lies in file n modulo their number. With one file the bytes are the file's.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[DirectFile] = []
        try:
            for path in paths:
                self._files.append(DirectFile(path))
        except CheckpointError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """True if all files are read past the page cache."""
        return all(file.direct for file in self._files)

    @property
    def identity(self) -> tuple[Identity, ...]:
        return tuple(file.identity for file in self._files)

    def name(self, start: int) -> Path:
        """Return the path of the file with byte `start`."""
        return self._files[start // REQUEST % len(self._files)].path

    def requests(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split the bytes `start` to `end` into ranges of one read."""
        while start < end:
            stop = min(end, start - start % REQUEST + REQUEST)
            yield start, stop
            start = stop

    def read(self, part: memoryview, start: int, need: int) -> None:
        """Read bytes of one stripe, from `start` on, as `DirectFile.read` does."""
        number, within = divmod(start, REQUEST)
        file = self._files[number % len(self._files)]
        file.read(part, number // len(self._files) * REQUEST + within, need)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()


class StripedWriter:
    """Writer of the files of a `StripedFile`. Raises CheckpointError where a drive is full or cannot be written to."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._end = paths, 0
        self._files: list[int] = []
        for path in paths:
            try:
                self._files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except OSError as error:
                self.close()
                raise _unwritten(path, error) from None

    def write(self, content: memoryview) -> None:
        while content:
            number, within = divmod(self._end, REQUEST)
            which = number % len(self._files)
            offset = number // len(self._files) * REQUEST + within
            try:
                count = os.pwrite(self._files[which], content[: REQUEST - within], offset)
            except OSError as error:
                raise _unwritten(self._paths[which], error) from None
            self._end, content = self._end + count, content[count:]

    def flush(self) -> None:
        """Write all bytes to the drives; drop them from the page cache."""
        for path, file in zip(self._paths, self._files, strict=True):
            try:
                os.fdatasync(file)
            except OSError as error:
                raise _unwritten(path, error) from None
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path.parent} takes no more weights ({error.strerror}): free space there, or name another --nvme-path"
    )
