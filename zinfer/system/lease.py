"""Leases: files and folders that a process makes for itself alone, removed at the next start if it was killed.

Each process has a private folder in the user's state folder, named by a random token, with a file that it keeps locked
as long as it lives. It holds a symbolic link to each path that the process owns, made before the path is. `sweep` takes
the folders whose file nobody holds, and removes what their links name.

Nothing else is removed: an owned path has the token in its name, and of an owned folder's files only those go whose
names its maker has announced. Leases of other hosts, and those that others may write to, are not read.
"""

import atexit
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal, Self

MARK = ".zinfer"  # file in an owned folder; it holds the patterns of its files, one a line
LOCK = "lock"
STEM = 150  # bytes of a file's name that the name of its part begins with
UNREACHABLE_DAYS = 30  # a lease whose paths lie on a drive that is not mounted is forgotten after so long

Say = Callable[[str], object]


def state_folder() -> Path:
    """Return the folder of the user's leases; it need not exist."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "zinfer" / "leases"


class _Lease:
    """Lease of this process: its token, its folder (None where none can be made), and the paths it owns."""

    def __init__(self) -> None:
        self.pid, self.token = os.getpid(), os.urandom(16).hex()
        self.links: dict[str, Path | None] = {}  # by owned path
        self._folder: Path | None = None
        with suppress(OSError, RuntimeError):  # a user without a home folder
            self._open(_private(state_folder()) / f"{self.token}@{os.uname().nodename}@{_boot()}")

    def _open(self, folder: Path) -> None:
        while True:
            folder.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if (folder / LOCK).exists():  # else a sweep took the folder before it was locked
                    break
                os.close(self._lock)
        self._folder = folder

    def add(self, path: str) -> None:
        """Own `path`. On a full disk it is removed at this process's own end alone."""
        self.links[path] = None
        if self._folder is not None:
            with suppress(OSError):
                link = self._folder / str(next(_number))
                link.symlink_to(path)
                self.links[path] = link

    def drop(self, path: str) -> None:
        """Forget `path`, which is no more or belongs to nobody now."""
        if (link := self.links.pop(path, None)) is not None:
            with suppress(OSError):
                link.unlink()

    def end(self) -> None:
        """Remove all that is still owned, and the lease. Safe to call twice."""
        if self.pid != os.getpid():
            return
        for path in list(self.links):
            if _remove(path, self.token) != "stuck":
                self.drop(path)
        if self._folder is not None:
            if not self.links:
                with suppress(OSError):
                    (self._folder / LOCK).unlink()
                    self._folder.rmdir()
            os.close(self._lock)
            self._folder = None


_own: _Lease | None = None
_lock = threading.RLock()  # reentrant: a signal may end the process while it writes its lease
_number = count()


def _lease() -> _Lease:
    """Return the lease of this process; a forked child has one of its own."""
    global _own
    with _lock:
        if _own is None or _own.pid != os.getpid():
            _own = _Lease()
        return _own


def end() -> None:
    """Remove all that this process owns. For a process that is about to end; safe to call twice."""
    global _own
    with _lock:
        ending, _own = _own, None
        if ending is not None:
            ending.end()


atexit.register(end)


def part_of(path: Path) -> Path:
    """Return the path of an unfinished file that will take the place of `path`, in the same folder. This process owns
    it until `release`."""
    with _lock:
        lease = _lease()
        stem = os.fsencode(path.name)[:STEM].decode(errors="ignore")
        part = path.with_name(f"{stem}.{next(_number)}.{lease.token}.part")
        lease.add(os.path.abspath(part))
        return part


def release(part: Path) -> None:
    """Give up a path of `part_of`, which has been renamed or removed."""
    with _lock:
        _lease().drop(os.path.abspath(part))


class OwnFolder:
    """Private folder that this process owns, until `cleanup` or the end of the ``with`` block; made by `folder`."""

    def __init__(self, path: Path) -> None:
        self.path, self._lease = path, _lease()

    @property
    def name(self) -> str:
        """Path as text."""
        return str(self.path)

    def cleanup(self) -> None:
        """Remove the folder and the files that were announced. Safe to call twice."""
        with _lock:
            path = os.path.abspath(self.path)
            if _remove(path, self._lease.token) != "stuck":
                self._lease.drop(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.cleanup()


def folder(parent: Path, kind: str, made: Sequence[str]) -> OwnFolder:
    """Make a private folder ``zinfer-<kind>-..`` in `parent`; files in it are removed with it if their names match one
    of the patterns `made` (`fnmatch`), and links, but not their targets, if ``pattern@`` is one. Any other file, which
    somebody must have put there, stays. Raises OSError.
    """
    with _lock:
        lease = _lease()
        path = parent / f"zinfer-{kind}-{next(_number)}-{lease.token}"
        lease.add(os.path.abspath(path))
        own = OwnFolder(path)
        try:
            path.mkdir(mode=0o700)
            (path / MARK).write_text("\n".join(made))
        except OSError:
            own.cleanup()
            raise
        return own


def sweep(say: Say = str) -> None:
    """Remove what killed processes of this user left behind; `say` gets a line about each. Never raises OSError."""
    with suppress(OSError, RuntimeError):
        home = state_folder()
        for path in sorted(_private(home).iterdir()) if home.is_dir() else ():
            with suppress(OSError):
                _sweep_one(path, say)


def _sweep_one(folder: Path, say: Say) -> None:
    """Remove the paths of one lease if its process is dead, and then the lease. Raises OSError."""
    token, *here = folder.name.split("@")
    if len(token) != 32 or len(here) != 2 or (here[0] != os.uname().nodename and here[1] != _boot()):
        return
    try:
        lock = os.open(_private(folder) / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        folder.rmdir()  # killed before it owned anything
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
        forgotten = time.time() - folder.stat().st_mtime > UNREACHABLE_DAYS * 86400
        for link in [one for one in folder.iterdir() if one.is_symlink()]:
            if _swept(os.readlink(link), token, say) or forgotten:
                link.unlink()
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()
    finally:
        os.close(lock)


def _swept(path: str, token: str, say: Say) -> bool:
    """Remove one path of a dead lease; return True if there is nothing more to do about it."""
    if not os.path.lexists(path):
        return os.path.isdir(os.path.dirname(path))  # else its drive may not be mounted
    size = sum(os.lstat(os.path.join(inside, name)).st_size for inside, _, names in os.walk(path) for name in names)
    size = size or os.lstat(path).st_size
    outcome = _remove(path, token)
    from zinfer.core.units import gb  # a start with nothing to sweep does without it

    if outcome == "gone":
        say(f"removed {path} ({gb(size)}), which a killed run left behind")
    elif outcome == "shared":
        say(f"{path}, which a killed run left behind, also holds files that are not its own: these stay")
    else:
        say(f"{path}, which a killed run left behind, cannot be removed")
    return outcome != "stuck"


def _remove(path: str, token: str) -> Literal["gone", "shared", "stuck"]:
    """Remove an owned path: ``shared`` is a folder that still has files of somebody else."""
    name = os.path.basename(path)
    try:
        status = os.lstat(path)
        if status.st_uid != os.geteuid():
            return "shared"
        if stat.S_ISREG(status.st_mode) and name.endswith(f".{token}.part"):
            os.unlink(path)
        elif stat.S_ISDIR(status.st_mode) and name.startswith("zinfer-") and name.endswith(f"-{token}"):
            _remove_folder(path)
        else:
            return "shared"
    except FileNotFoundError:
        return "gone" if os.path.isdir(os.path.dirname(path)) else "stuck"  # its drive may come back
    except OSError as error:
        return "shared" if error.errno == errno.ENOTEMPTY else "stuck"
    return "gone"


def _remove_folder(path: str) -> None:
    """Remove a folder: its files that match the patterns of its mark, folders that are empty then, and last the mark.
    Follows no link. Raises OSError."""
    mark = Path(path, MARK)
    made = mark.read_text().split("\n") if mark.is_file() else []
    for inside, folders, names, here in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in names:
            link = stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)
            patterns = [one.removesuffix("@") for one in made if one.endswith("@") == link]
            if any(fnmatchcase(name, one) for one in patterns) and not (name == MARK and inside == path):
                os.unlink(name, dir_fd=here)
        for name in folders:
            with suppress(OSError):
                os.rmdir(name, dir_fd=here)
    if os.listdir(path) == [MARK]:  # last, so that a kill in between leaves a folder whose files are known
        os.unlink(mark)
    os.rmdir(path)


def _private(home: Path) -> Path:
    """Return the folder `home`, made if need be; raise PermissionError unless it is this user's alone."""
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
    status = os.lstat(home)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{home} is not private")
    return home


@cache
def _boot() -> str:
    """Return the id of the kernel's current run, the same in all containers of a host; empty if it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
