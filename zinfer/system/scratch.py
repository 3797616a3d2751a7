"""Scratch folders and unfinished files, removed even after a kill.

Each has an entry in the user's own state folder: a file that holds its path, and that its process keeps locked. An
entry without a lock is of a dead process, whatever its process id stands for now, and `remove_abandoned` removes what
it names. The name of a path has that of its entry in it, so that no entry names what zinfer did not make.
"""

import atexit
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

MAX_NAME_BYTES = 150  # of a file's name that its unfinished file takes over
PREFIX, SUFFIX = "zinfer-", ".scratch"  # of scratch folders; of entries

_made: set["Scratch"] = set()


class Scratch:
    """Scratch folder or unfinished file, removed with its process or later."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._pid, self._entry = os.getpid(), _open_entry()
        token = secrets.token_hex(8) if self._entry is None else Path(self._entry.name).stem
        self.path = path_of(token)
        self._absolute = Path(os.path.abspath(self.path))
        if self._entry is not None:
            with suppress(OSError):  # a full disk does not stop a run: a kill then leaves the path for good
                self._entry.write(json.dumps([*_host(), str(self._absolute)]).encode())
        _made.add(self)

    def cleanup(self) -> None:
        """Remove the path, or leave it to the next start. Safe to call twice."""
        if self._pid == os.getpid() and _removed(self._absolute):
            _made.discard(self)
            if self._entry is not None:
                with suppress(OSError):
                    os.unlink(self._entry.name)
                    self._entry.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.cleanup()


def folder(parent: Path, kind: str) -> Scratch:
    """Make a private scratch folder ``zinfer-<kind>-..`` in `parent`. Raises OSError."""
    made = Scratch(lambda token: parent / f"{PREFIX}{kind}-{token}")
    try:
        made.path.mkdir(mode=0o700)
    except OSError:
        made.cleanup()
        raise
    return made


def unfinished(path: Path) -> Scratch:
    """Name an unfinished file next to `path`, for the caller to make."""
    stem = os.fsencode(path.name)[:MAX_NAME_BYTES].decode(errors="ignore")
    return Scratch(lambda token: path.with_name(f"{stem}.{token}.part"))


@atexit.register
def cleanup() -> None:
    """Remove all scratch of this process, which is about to end. Safe to call twice."""
    for scratch in list(_made):
        scratch.cleanup()


def remove_abandoned(on_message: Callable[[str], object] = str) -> None:
    """Remove the scratch of killed processes; `on_message` gets a line about each. Never raises OSError."""
    with suppress(OSError, RuntimeError):
        for entry in sorted(_private(_state_folder()).glob(f"*{SUFFIX}")):
            with suppress(OSError):
                _remove_if_dead(entry, on_message)


def _remove_if_dead(entry: Path, on_message: Callable[[str], object]) -> None:
    with entry.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        try:
            boot, host, name = json.loads(file.read())
        except (ValueError, TypeError):  # killed before it had made anything
            entry.unlink()
            return
        path = Path(name)
        if boot != _host()[0] and host != _host()[1]:  # containers of one host share its boot
            return
        if entry.stem in path.name and os.path.lexists(path):
            removed = _removed(path)
            on_message(f"{'removed' if removed else 'cannot remove'} {path}, which a killed run left behind")
            if not removed:
                return
        entry.unlink()


def _removed(path: Path) -> bool:
    """Remove a file or a folder; return False if it stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _open_entry() -> Any:
    """Make an entry and lock it; None where the user has no private state folder."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home folder
        home = _state_folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            entry = tempfile.NamedTemporaryFile(buffering=0, dir=_private(home), suffix=SUFFIX, delete=False)  # noqa: SIM115
            try:
                fcntl.flock(entry, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                os.unlink(entry.name)
                raise
            if os.fstat(entry.fileno()).st_nlink:  # else another process has just taken it for a dead one's
                return entry
            entry.close()
    return None


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "zinfer" / "scratch"


def _private(home: Path) -> Path:
    """Return `home`; raise PermissionError unless it is a folder that this user alone may write to."""
    status = home.lstat()
    if not home.is_dir() or home.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{home} is not private")
    return home


@cache
def _host() -> tuple[str, str]:
    """Return the kernel's boot id, empty if unknown, and the host's name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().nodename
    return "", os.uname().nodename
