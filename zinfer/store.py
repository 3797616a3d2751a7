"""Results on disk: one JSON line a record, appended whole and synced, checked when read.

A sweep of days may end in a kill, a full disk or a power cut; whatever was finished by then must be on disk and
legible. A line carries its schema version and a checksum and is canonical (sorted keys, no spaces, ASCII), so that any
changed byte shows. Files are only ever appended to::

    with Store.open(Path("sweeps/results/h100/bloom.jsonl")) as store:
        store.append_header(Header(machine="h100", recipe=recipe))
        store.append(measurement)
    points = read(Path("sweeps/results")).points
"""

import errno
import fcntl
import json
import math
import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from pydantic import Field, ValidationError

from zinfer.frozen import Frozen
from zinfer.record import SCHEMA_VERSION, Measurement


class StoreError(ValueError):
    """A results file that cannot be read or written; the message says what to do next."""

    exit_code = 5  # the environment's fault: disk, permissions, a second writer


class _Garbled(ValueError):
    """A line whose bytes are not those that were written."""


class Header(Frozen):
    """What a sweep was started with; written at each start, so that a resumed file tells its whole story."""

    machine: str
    recipe: dict[str, Any] = Field(default_factory=dict)
    model_revision: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: str = ""  # ISO 8601, UTC


class Damage(NamedTuple):
    """A line that could not be used, by its number (from 1), and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class Records(NamedTuple):
    """What was read: every point in file order, repeated cases included; of these the last one counts."""

    points: tuple[Measurement, ...] = ()
    headers: tuple[Header, ...] = ()
    damaged: tuple[Damage, ...] = ()

    @property
    def warning(self) -> str | None:
        """One line for stderr when something was left out."""
        if not self.damaged:
            return None
        rest = f" (and {len(self.damaged) - 1} more lines)" if len(self.damaged) > 1 else ""
        return f"left out {self.damaged[0]}{rest}"


_KINDS: dict[str, type[Header] | type[Measurement]] = {"sweep": Header, "point": Measurement}


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str).encode()


def _sealed(fields: dict[str, Any]) -> bytes:
    return _canonical(fields | {"checksum": sha256(_canonical(fields)).hexdigest()[:16]})


def _finite(value: Any) -> Any:
    """`value` with null for NaN and the infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _validated(kind: str, fields: dict[str, Any]) -> Header | Measurement:
    try:
        return _KINDS[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def encode(record: Header | Measurement) -> bytes:
    """The line of a record, without its newline. Raises StoreError for a record that could not be read back."""
    kind = "point" if isinstance(record, Measurement) else "sweep"
    fields = _finite(record.model_dump())
    try:
        _validated(kind, fields)
        return _sealed(fields | {"kind": kind, "schema_version": SCHEMA_VERSION})
    except (ValueError, TypeError) as error:
        raise StoreError(f"a {kind} record that cannot be stored: {error}") from error


def decode(line: bytes) -> Header | Measurement:
    """The record of a line. Raises ValueError with the reason when it is not exactly what `encode` wrote."""
    try:
        fields = json.loads(line)
        claimed = fields.pop("checksum")
        sealed = _sealed(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _Garbled("not a whole record") from None
    if sealed != line:
        raise _Garbled(f"the checksum {str(claimed)[:16]} does not match the line")
    version = fields.pop("schema_version", None)
    kind = fields.pop("kind", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema version {version}; this zinfer reads {SCHEMA_VERSION}")
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of record {kind!r}")
    return _validated(kind, fields)


def files(path: Path) -> tuple[Path, ...]:
    """The results files that `path` stands for: itself, or every ``*.jsonl`` below it, sorted."""
    return tuple(sorted(path.rglob("*.jsonl"))) if path.is_dir() else (path,)


def read(path: Path) -> Records:
    """All records of a file, or of every ``*.jsonl`` below a folder; changes nothing.

    A line that cannot be used is reported in `damaged` and the rest is used. Raises StoreError when there is no such
    path or it cannot be read.
    """
    points: list[Measurement] = []
    headers: list[Header] = []
    damaged: list[Damage] = []
    for file in files(path):
        for number, line in enumerate(_lines(file), start=1):
            try:
                record = decode(line)
            except ValueError as error:
                damaged.append(Damage(file, number, str(error)))
                continue
            if isinstance(record, Measurement):
                points.append(record)
            else:
                headers.append(record)
    return Records(tuple(points), tuple(headers), tuple(damaged))


def read_usable(path: Path) -> Records:
    """`read`, where nothing to work from is an error too: raises StoreError unless a point is usable."""
    records = read(path) if path.exists() else Records()
    if any(point.usable for point in records.points):
        return records
    if not records.points:
        lost = f" ({records.warning})" if records.warning else ""
        raise StoreError(f"no results in {path}{lost}: measure first, with `zinfer sweep`")
    statuses = ", ".join(sorted({point.status for point in records.points}))
    raise StoreError(f"none of the {len(records.points)} points in {path} succeeded ({statuses}): see `zinfer report`")


def _lines(file: Path) -> list[bytes]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


class Store:
    """A results file open for appending, by this process alone. Make one with `Store.open`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.damaged: tuple[Damage, ...] = ()  # found on opening; garbled lines are kept in `<file>.damaged`
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open `path`, made if need be, and lock it until `close`.

        Garbled lines are copied to ``<file>.damaged``; those at the end, such as a record that a kill tore, are then
        cut off. Raises StoreError when another process writes the file or it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            store = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise StoreError(f"cannot open {path} for writing: {error.strerror}") from error
        try:
            store._lock()
            store._mend()
            _sync_folder(path.parent)
        except BaseException:
            store.close()
            raise
        return store

    def append(self, point: Measurement) -> None:
        """Write one point and wait for the disk. On StoreError (disk full, say) the file ends at its last record."""
        _append(self._descriptor, encode(point) + b"\n", self.path)

    def append_header(self, header: Header) -> None:
        """Write the header of a start, like `append`."""
        _append(self._descriptor, encode(header) + b"\n", self.path)

    def points(self) -> tuple[Measurement, ...]:
        return read(self.path).points

    def headers(self) -> tuple[Header, ...]:
        return read(self.path).headers

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise StoreError(f"{self.path} is not a regular file; name another with --output")
        try:
            # not lockf: a POSIX lock is lost when its process closes any descriptor of the file, as read() does
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another zinfer is writing {self.path}; wait for it, or name another --output") from None
        except OSError as error:
            raise StoreError(f"cannot lock {self.path}: {error.strerror}") from error

    def _mend(self) -> None:
        lines, garbled = _lines(self.path), []
        end = position = 0  # end: of the last line to keep
        for number, line in enumerate(lines, start=1):
            position += len(line) + 1
            try:
                decode(line)
                end = position
            except ValueError as error:
                self.damaged += (Damage(self.path, number, str(error)),)
                if isinstance(error, _Garbled):
                    garbled.append(line)
                else:
                    end = position  # whole, but of another version: not ours to cut
        if lines and len(garbled) == len(lines) and not (len(lines) == 1 and lines[0].startswith(b"{")):
            raise StoreError(f"{self.path} is not a results file: no line is a record; name another with --output")
        _keep_aside(self.path.with_name(self.path.name + ".damaged"), garbled)
        size = os.fstat(self._descriptor).st_size
        if end > size:  # a whole record that lacks only its newline
            _append(self._descriptor, b"\n", self.path)
        elif end < size:
            _cut(self._descriptor, end, self.path)


def _keep_aside(path: Path, lines: list[bytes]) -> None:
    """Add `lines` to the file at `path`, unless they are there since an earlier opening."""
    known = set(_lines(path)) if path.exists() else set()
    new = b"".join(line + b"\n" for line in lines if line not in known)
    if not new:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _refuse(path, error)
    try:
        _append(descriptor, new, path)
        _sync_folder(path.parent)
    finally:
        os.close(descriptor)


def _append(descriptor: int, data: bytes, path: Path) -> None:
    """One write and a sync; if either fails, the file is cut back to what it was."""
    size = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError as error:
        with suppress(StoreError):
            _cut(descriptor, size, path)
        _refuse(path, error)


def _cut(descriptor: int, size: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    except OSError as error:
        _refuse(path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise StoreError(f"cannot write {path}: {error.strerror}; the records in it are kept") from error


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the file system can sync a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
