"""Atomic writes: a file is there as a whole or as it was before, whatever happens while it is written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content replaces `path`, on disk, when the block ends well; else `path` stays as it was. Only the
    user may read the file if `private`. What is no regular file (a pipe, a terminal) is written to directly.

    Makes the folder. Raises OSError.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
        with open(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    sync_folder(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, text in UTF-8. Raises OSError."""
    with writing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the file system can sync a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
