"""Leases: files and folders that a process makes for itself alone, removed at the next start if it was killed.

A process that makes a temporary file or folder first writes its path into its lease, a file in the user's own state
folder that it keeps locked as long as it lives. `sweep` takes the leases that nobody holds any more, and removes the
paths that they name. A kill at any moment thus leaves nothing for good, neither the weights that an engine has put on a
drive nor half a file beside a good one.

A lease deletes nothing that its process did not make: every path carries the lease's random token in its name, a folder
carries it in a mark inside as well, and of a folder's files only those go whose names its maker has announced. Leases
of other users, and those in a folder that others may write to, are not read.
"""

import atexit
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

MARK = ".zinfer"  # file in an owned folder; it holds the token
TOKEN = re.compile(r"[0-9a-f]{32}")
OWNED = re.compile(rf"zinfer-.+-{TOKEN.pattern}")  # name of a folder that a process made for itself
STEM = 150  # bytes of a file's name that the name of its part begins with
UNREACHABLE_DAYS = 30  # a lease whose paths lie on a drive that is not mounted is forgotten after so long
MOST_BYTES = 16 << 20  # of a lease

Say = Callable[[str], object]


def state_folder() -> Path:
    """Return the folder of the user's leases; it need not exist."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "zinfer" / "leases"


class _Lease:
    """Lease of this process: its token, its locked file (None where none can be written), and the paths it owns."""

    def __init__(self) -> None:
        self.pid, self.token = os.getpid(), os.urandom(16).hex()
        self.paths: dict[str, dict[str, Any]] = {}
        self._file: int | None = None
        self._header = json.dumps(
            {"zinfer_lease": 1, "token": self.token, "pid": self.pid, "started": _started(), "boot": _boot(),
             "host": os.uname().nodename}
        ).encode() + b"\n"  # fmt: skip
        with suppress(OSError, RuntimeError):  # a user without a home folder
            self._open(_private(state_folder()))

    def _open(self, folder: Path) -> None:
        draft = folder / f"{self.token}.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, self._header)
            self.place = folder / f"{self.token}.lease"
            draft.replace(self.place)  # locked before anybody can see it
        except OSError:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        self._file = descriptor

    def add(self, path: str, **facts: Any) -> None:
        self.paths[path] = {"path": path, **facts, "token": self.token}
        self._write({"path": path, **facts})

    def drop(self, path: str) -> None:
        """Forget `path`, which is no more or belongs to nobody now."""
        if self.paths.pop(path, None) is None or self._file is None:
            return
        if self.paths:
            self._write({"gone": path})
        else:
            with suppress(OSError):
                os.ftruncate(self._file, len(self._header))

    def _write(self, fields: dict[str, Any]) -> None:
        """Append a line. A full disk does not stop the run: what it makes is then removed at its own end alone."""
        if self._file is not None:
            with suppress(OSError):
                os.write(self._file, json.dumps(fields).encode() + b"\n")

    def end(self) -> None:
        """Remove all that is still owned, and the lease. Safe to call twice."""
        if self.pid != os.getpid():
            return
        for fields in list(self.paths.values()):
            if _remove(fields) != "stuck":
                self.paths.pop(fields["path"], None)
        if self._file is not None and not self.paths:
            with suppress(OSError):
                self.place.unlink()
            os.close(self._file)
            self._file = None


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
    """Give up a path of `part_of`, which has been renamed, or is removed now. What cannot be removed, on a drive that
    is read-only or away, goes at the next start."""
    with _lock, suppress(OSError):
        part.unlink(missing_ok=True)
        path = os.path.abspath(part)
        if not _away(path):
            _lease().drop(path)


class OwnFolder:
    """Private folder that this process owns, until `cleanup` or the end of the ``with`` block; made by `folder`."""

    def __init__(self, path: Path, made: Sequence[str]) -> None:
        self.path = path
        self._lease = _lease()
        self._fields = {"path": os.path.abspath(path), "made": list(made), "token": self._lease.token}

    @property
    def name(self) -> str:
        """Path as text."""
        return str(self.path)

    def cleanup(self) -> None:
        """Remove the folder and the files that were announced. Safe to call twice."""
        with _lock:
            if _remove(self._fields) != "stuck":
                self._lease.drop(str(self._fields["path"]))

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
        lease.add(os.path.abspath(path), made=list(made))
        try:
            path.mkdir(mode=0o700)
            (path / MARK).write_text(lease.token)
        except OSError:
            with suppress(OSError):
                path.rmdir()
            if _remove(lease.paths[os.path.abspath(path)]) != "stuck":
                lease.drop(os.path.abspath(path))
            raise
        return OwnFolder(path, made)


def sweep(say: Say = str) -> None:
    """Remove what killed processes of this user left behind; `say` gets a line about each. Never raises OSError."""
    with suppress(OSError, RuntimeError):
        home = state_folder()
        if not home.is_dir():
            return
        for path in sorted(_private(home).iterdir()):
            if path.suffix in {".lease", ".new"}:
                with suppress(OSError):
                    _sweep_one(path, say)


def _sweep_one(path: Path, say: Say) -> None:
    """Remove the paths of one lease if its process is dead, and then the lease. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        theirs = status.st_uid != os.geteuid() or status.st_mode & 0o077 or status.st_nlink != 1
        if theirs or not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its process lives
        if os.fstat(descriptor).st_nlink == 0:
            return  # its process has just ended in order
        done = [_swept(fields, say) for fields in _parse(os.pread(descriptor, MOST_BYTES, 0))]
        if all(done) or time.time() - status.st_mtime > UNREACHABLE_DAYS * 86400:
            path.unlink()
    finally:
        os.close(descriptor)


def _swept(fields: dict[str, Any], say: Say) -> bool:
    """Remove one path of a dead lease; return True if there is nothing more to do about it."""
    path, size = str(fields["path"]), 0
    if not os.path.lexists(path):
        return not _away(path)
    for file in _files(path):
        with suppress(OSError):
            size += os.lstat(file).st_size
    outcome = _remove(fields)
    from zinfer.core.units import gb  # a start with nothing to sweep does without it

    if outcome == "gone":
        say(f"removed {path} ({gb(size)}), which a killed run left behind")
    elif outcome == "shared":
        say(f"{path}, which a killed run left behind, also holds files that are not its own: these stay")
    else:
        say(f"{path}, which a killed run left behind, cannot be removed")
    return outcome != "stuck"


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)


def _parse(content: bytes) -> list[dict[str, Any]]:
    """Return the paths that a lease still owns: those that bear its token. None of a file that is no lease, or that of
    another host."""
    token, owned = "", dict[str, dict[str, Any]]()
    for number, line in enumerate(content.split(b"\n")):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a kill, before what it names was made
        if not isinstance(fields, dict):
            continue
        if number == 0:
            token = str(fields.get("token"))
            elsewhere = fields.get("boot") != _boot() and fields.get("host") != os.uname().nodename
            if fields.get("zinfer_lease") != 1 or not TOKEN.fullmatch(token) or elsewhere:
                return []
        elif isinstance(gone := fields.get("gone"), str):
            owned.pop(gone, None)
        elif isinstance(path := fields.get("path"), str) and os.path.isabs(path):
            made = fields.get("made")
            patterns = None if made is None else [str(one) for one in made] if isinstance(made, list) else []
            owned[path] = {"path": path, "made": patterns, "token": token}
    return [fields for fields in owned.values() if _marked(fields)] if token else []


def _marked(fields: dict[str, Any]) -> bool:
    """Tell whether a path's name bears the token, as those that `part_of` and `folder` made do."""
    name, token = os.path.basename(str(fields["path"])), str(fields["token"])
    if fields.get("made") is None:
        return name.endswith(f".{token}.part")
    return name.startswith("zinfer-") and name.endswith(f"-{token}")


def _away(path: str) -> bool:
    """Tell whether the drive of a path that is not there may come back: the user's folder that it was in is missing."""
    owned = [folder for folder in Path(path).parents if OWNED.fullmatch(folder.name)]  # which zinfer removes
    return not (owned[-1] if owned else Path(path)).parent.is_dir()


def _remove(fields: dict[str, Any]) -> Literal["gone", "shared", "stuck"]:
    """Remove an owned path: ``shared`` is a folder that still has files of somebody else."""
    path, made = str(fields["path"]), fields.get("made")
    try:
        status = os.lstat(path)
        if not _marked(fields) or status.st_uid != os.geteuid():
            return "shared"
        if made is None:
            if not stat.S_ISREG(status.st_mode):
                return "shared"
            os.unlink(path)
        elif stat.S_ISDIR(status.st_mode):
            _remove_folder(path, fields["token"], made)
        else:
            return "shared"
    except FileNotFoundError:
        return "stuck" if _away(path) else "gone"
    except OSError as error:
        return "shared" if error.errno == errno.ENOTEMPTY else "stuck"
    return "gone"


def _remove_folder(path: str, token: str, made: Sequence[str]) -> None:
    """Remove a folder that bears the mark of `token`: its files that match `made`, folders that are empty then, and
    last the mark. Follows no link. Raises OSError."""
    mark = os.path.join(path, MARK)
    with suppress(FileNotFoundError):  # no mark: killed before anything was put into the folder
        descriptor = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.read(descriptor, 64)
        finally:
            os.close(descriptor)
        if found == token.encode():
            for inside, folders, names, here in os.fwalk(path, topdown=False, follow_symlinks=False):
                for name in names:
                    if name == MARK and inside == path:
                        continue  # last, so that a kill in between leaves a folder that is known
                    status = os.stat(name, dir_fd=here, follow_symlinks=False)
                    if stat.S_ISLNK(status.st_mode):
                        own = any(one.endswith("@") and fnmatchcase(name, one[:-1]) for one in made)
                    else:
                        own = stat.S_ISREG(status.st_mode) and any(fnmatchcase(name, one) for one in made)
                    if own:
                        os.unlink(name, dir_fd=here)
                for name in folders:
                    with suppress(OSError):
                        os.rmdir(name, dir_fd=here)
        if token.encode().startswith(found) and os.listdir(path) == [MARK]:  # a kill may have cut the mark short
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


def _started() -> int:
    """Return the start time of this process in ticks after boot; 0 if it is not known."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return 0
