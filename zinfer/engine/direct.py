"""Direct reads by many threads, past the page cache (O_DIRECT).

They reach the full rate of the drives. The page cache would drop weights before the next pass needs them; a file system
that refuses direct I/O is read through it all the same, and the pages are dropped behind the reads.

Direct reads begin and end at whole pages, in the file and in memory: `aligned` gives the range to read. The memory
should lie in huge pages, as that of `PinnedArena` does: requests into scattered pages cost a third of the rate.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.errors import environment_error
from zinfer.core.value import Closing

PAGE = 4096  # bytes; a multiple of every drive's sectors
REQUEST = 8 << 20  # bytes of one read, and of a stripe: what one drive brings in a millisecond or more
THREADS = 16  # reads in flight

Identity = tuple[int, int, int, int]  # size in bytes, inode, and times of the last change of content and state, in ns


def aligned(start: int, end: int) -> tuple[int, int]:
    """Return the range of whole pages around bytes `start` to `end`."""
    return start - start % PAGE, end + -end % PAGE


class _Striped(Closing):
    """Open files on several drives. Stripe n, of `REQUEST` bytes, lies in file n modulo their number."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._files = paths, list[int]()

    def _place(self, start: int) -> tuple[int, int]:
        """Return the file with byte `start`, by number, and the offset there."""
        number, within = divmod(start, REQUEST)
        return number % len(self._paths), number // len(self._paths) * REQUEST + within

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        while self._files:
            os.close(self._files.pop())


class StripedFile(_Striped):
    """Bytes spread evenly over files, for reads by many threads. `direct` is True if all files are read past the page
    cache. Raises CheckpointError where one cannot be opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._direct: list[bool] = []
        for path in paths:
            try:
                self._direct.append(self._open_direct(path))
                if not self._direct[-1]:
                    self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    os.posix_fadvise(self._files[-1], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except OSError as error:
                self.close()
                raise environment_error(CheckpointError(f"{path} cannot be read: {error.strerror}")) from None
        self.direct = all(self._direct)

    def _open_direct(self, path: Path) -> bool:
        """Open a file for direct reads; return False if its system refuses. Some refuse only when they are tried."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a fault of the file, or of the drive
                raise
            return False
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(file, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                os.close(file)
                return False
        self._files.append(file)
        return True

    @property
    def identity(self) -> tuple[Identity, ...]:
        """Facts that differ once the content has changed. No program can set them all back."""
        stats = map(os.fstat, self._files)
        return tuple((status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns) for status in stats)

    def name(self, start: int) -> Path:
        """Return the path of the file with byte `start`."""
        return self._paths[self._place(start)[0]]

    def requests(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split the bytes `start` to `end` into ranges of one read."""
        while start < end:
            stop = min(end, start - start % REQUEST + REQUEST)
            yield start, stop
            start = stop

    def read(self, part: memoryview, start: int, need: int) -> None:
        """Read at least `need` bytes of a stripe, from `start`, into `part`.

        A file may end within its last page. Direct reads want `part`, its length and `start` at whole pages. Raises
        OSError, with the path, and CheckpointError where the file ends too early.
        """
        which, offset = self._place(start)
        path, file, direct, done = self._paths[which], self._files[which], self._direct[which], 0
        while done < need:
            try:
                count = os.preadv(file, [part[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror or "read error", str(path)) from None
            if done + count < need and direct:
                count -= count % PAGE  # the next read begins at a whole page again
            if not count:
                raise CheckpointError(f"{path} is cut off: it ends before byte {offset + need:,}")
            done += count
        if not direct:
            with suppress(OSError):
                os.posix_fadvise(file, offset, len(part), os.POSIX_FADV_DONTNEED)


class StripedWriter(_Striped):
    """Writer of the files of a `StripedFile`. Raises CheckpointError where a drive is full or cannot be written to."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._end = 0
        for path in paths:
            try:
                self._files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except OSError as error:
                self.close()
                raise _unwritten(path, error) from None

    def write(self, content: memoryview) -> None:
        while content:
            which, offset = self._place(self._end)
            try:
                count = os.pwrite(self._files[which], content[: REQUEST - self._end % REQUEST], offset)
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


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path.parent} takes no more weights ({error.strerror}): free space there, or name another --nvme-path"
    )
