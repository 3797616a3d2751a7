"""Compilation of DeepSpeed's operators: noted, and abandoned locks removed.

torch compiles an operator at its first use, which takes minutes, and keeps others from doing the same with a file named
``lock`` beside it (`torch.utils.file_baton`). A killed process leaves that file, for which everybody would wait for
ever. Whoever holds it has it open, though, so a lock that no process has open is nobody's.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from glob import iglob
from pathlib import Path
from typing import Any

from zinfer.core.progress import Progress, note

WAIT_S = 0.2  # between two looks at the lock of another process


def watch(progress: Progress, undo: Callable[[Callable[[], object]], object]) -> None:
    """Note which operators are compiled, and remove abandoned locks."""
    from torch.utils.file_baton import FileBaton

    acquire = FileBaton.try_acquire

    def acquire_at_last(baton: Any) -> bool:
        path, noted = Path(baton.lock_file_path), False
        name = path.parent.name
        while not acquire(baton):
            if abandoned(path):
                with suppress(FileNotFoundError):
                    path.unlink()
                note(progress, f"removed {path}, the lock of a process that was killed while it compiled {name}")
                continue
            if not noted:
                note(progress, f"waiting for another process, which compiles DeepSpeed's operator {name}")
                noted = True
            time.sleep(WAIT_S)
        with suppress(OSError):
            fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # seen from other containers, too
        if not path.with_name(f"{name}.so").exists():
            note(progress, f"compiling DeepSpeed's operator {name}: once, and it takes minutes")
        return True

    setattr(FileBaton, "try_acquire", acquire_at_last)  # noqa: B010 - a method of torch
    undo(lambda: setattr(FileBaton, "try_acquire", acquire))


def abandoned(path: Path) -> bool:
    """Tell whether no process locks or has opened the file at `path`."""
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
    for path in iglob("/proc/[0-9]*/fd/*"):
        if not path.startswith(f"/proc/{os.getpid()}/"):
            with suppress(OSError):  # the process has ended, or is another user's
                if os.path.samestat(os.stat(path), file):
                    return True
    return False
