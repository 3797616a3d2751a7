"""Compilation of DeepSpeed's operators: said in a line, and not waited for where nobody compiles any more.

torch compiles an operator at its first use, which takes minutes, and keeps others from doing the same with a file named
``lock`` beside it (`torch.utils.file_baton`). A killed process leaves that file, for which everybody would wait for
ever. Whoever holds it has it open, though, so a lock that no process has open is nobody's.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zinfer.core.progress import Progress, note

WAIT_S = 0.2  # between two looks at the lock of another process


def watch(progress: Progress, undo: Callable[[Callable[[], object]], object]) -> None:
    """Tell `progress` of operators that are compiled from now on, and pass over locks that are nobody's; `undo` gets a
    callback that ends this."""
    from torch.utils.file_baton import FileBaton

    acquire = FileBaton.try_acquire

    def acquire_in_the_end(baton: Any) -> bool:
        path, told = Path(baton.lock_file_path), False
        name = path.parent.name
        while not acquire(baton):
            if abandoned(path):
                with suppress(FileNotFoundError):
                    path.unlink()
                note(progress, f"removed {path}, the lock of a process that was killed while it compiled {name}")
                continue
            if not told:
                note(progress, f"waiting for another process, which compiles DeepSpeed's operator {name}")
                told = True
            time.sleep(WAIT_S)
        with suppress(OSError):
            fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # seen from other containers, too
        if not path.with_name(f"{name}.so").exists():
            note(progress, f"compiling DeepSpeed's operator {name}: once, and it takes minutes")
        return True

    setattr(FileBaton, "try_acquire", acquire_in_the_end)  # noqa: B010 - a method of torch
    undo(lambda: setattr(FileBaton, "try_acquire", acquire))


def abandoned(path: Path) -> bool:
    """Tell whether the lock at `path` is nobody's: no process locks it, and none of this user has it open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # gone, or not a lock
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return not _opened_elsewhere(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _opened_elsewhere(file: os.stat_result) -> bool:
    own = str(os.getpid())
    for process in os.listdir("/proc"):
        if process.isdigit() and process != own:
            with suppress(OSError):  # it has ended, or is another user's
                for descriptor in os.scandir(f"/proc/{process}/fd"):
                    with suppress(OSError):
                        found = descriptor.stat()
                        if (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino):
                            return True
    return False
