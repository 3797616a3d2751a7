"""Atomic writes: a file is replaced as a whole, or stays as it was if writing fails or is interrupted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zinfer.system import scratch


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a stream that replaces `path` when the block ends without exception.

    Otherwise `path` stays; its permissions always do. Makes the folder. A path that is no regular file (a pipe, a
    terminal) is written to directly; a link keeps pointing at its file, which is replaced. What a kill leaves of the
    new content is removed at the next start (`zinfer.system.scratch`). Raises OSError, also where nobody reads a pipe.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as stream:
            os.set_blocking(stream.fileno(), True)  # a reader is not waited for; then its reading is
            yield stream
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch.unfinished(path) as part:
        descriptor = os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as stream:
            with suppress(OSError):  # a new file, or one of somebody else
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.path.replace(path)
    sync_folder(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, text in UTF-8. Raises OSError."""
    with writing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that a new file's name survives a power cut."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
