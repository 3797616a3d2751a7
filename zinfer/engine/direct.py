"""Direct reads by many threads, past the page cache (O_DIRECT).

They reach the full rate of the drive. Where a file system refuses direct I/O, it is read through the cache, and the
pages are dropped behind the reads. Direct reads begin and end at whole pages, in the file (`aligned`) and in memory;
that should lie in huge pages, as in `PinnedArena`: requests into scattered pages cost a third of the rate.
"""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.errors import environment_error
from zinfer.core.value import Closing

PAGE = 4096  # bytes; a multiple of every drive's sectors
REQUEST = 8 << 20  # bytes of one read: what a drive brings in a millisecond or more
THREADS = 16  # reads in flight

Identity = tuple[int, int, int, int]  # size in bytes, inode, and times of the last change of content and state, in ns


def aligned(start: int, end: int) -> tuple[int, int]:
    """Return the range of whole pages around bytes `start` to `end`."""
    return start - start % PAGE, end + -end % PAGE


class _Opened(Closing):
    """Open file; -1 is none."""

    _file = -1

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class DirectFile(_Opened):
    """Open file for reads by many threads. `direct` is True if it is read past the page cache. Raises CheckpointError
    where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path, self.direct = path, True
        try:
            try:
                self._open(os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a fault of the file, or of the drive; else the system refuses
                    raise
                self.direct = False
                self._open(0)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            self.close()
            raise environment_error(CheckpointError(f"{path} cannot be read: {error.strerror}")) from None

    def _open(self, flag: int) -> None:
        """Open the file and try a read. Some systems refuse direct ones only then."""
        self.close()
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(self._file, [page], 0)

    @property
    def identity(self) -> Identity:
        """Facts that differ once the content has changed. No program can set them all back."""
        status = os.fstat(self._file)
        return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    def requests(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split the bytes `start` to `end` into ranges of one read."""
        while start < end:
            stop = min(end, start - start % REQUEST + REQUEST)
            yield start, stop
            start = stop

    def read(self, part: memoryview, start: int, need: int) -> None:
        """Read at least `need` bytes, from `start`, into `part`.

        The file may end within its last page. Direct reads want `part`, its length and `start` at whole pages. Raises
        OSError, with the path, and CheckpointError where the file ends too early.
        """
        done = 0
        while done < need:
            try:
                count = os.preadv(self._file, [part[done:]], start + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror or "read error", str(self.path)) from None
            if done + count < need and self.direct:
                count -= count % PAGE  # the next read begins at a whole page again
            if not count:
                raise CheckpointError(f"{self.path} is cut off: it ends before byte {start + need:,}")
            done += count
        if not self.direct:
            with suppress(OSError):
                os.posix_fadvise(self._file, start, len(part), os.POSIX_FADV_DONTNEED)


class DirectWriter(_Opened):
    """Writer of the file of a `DirectFile`. Raises CheckpointError where the drive is full or cannot be written to."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, 0
        with self._told():
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = f"takes no more weights ({error.strerror}): free space there, or name another --nvme-path"
            raise CheckpointError(f"{self._path.parent} {free}") from None

    def write(self, content: memoryview) -> None:
        with self._told():
            while content:
                count = os.pwrite(self._file, content[:REQUEST], self._end)
                self._end, content = self._end + count, content[count:]

    def flush(self) -> None:
        """Write all bytes to the drive; drop them from the page cache."""
        with self._told():
            os.fdatasync(self._file)
        with suppress(OSError):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
