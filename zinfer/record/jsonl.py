"""Append-only files of sealed lines: synced, locked, repaired.

A job of days may end in a kill, a full disk or a power cut; whatever was written by then must be on disk and legible. A
sealed line (`seal`) is JSON that carries its kind, its schema version and a checksum. It is canonical (sorted keys, no
spaces, ASCII), so that any changed byte shows.
"""

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic_core import from_json, to_json

from zinfer.core.errors import INTEGRITY, ZinferError
from zinfer.core.value import Closing
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, read_bytes

SCHEMA_VERSION = 2  # 1: a case of `stream` without options had no share on the GPU, and no KV cache in host memory
MAX_BYTES = 2 << 30  # largest file of records or answers


class StoreError(ZinferError):
    """File of records that cannot be read or written."""

    exit_code = 5  # environment: disk, permissions, a second writer


class TakenAwayError(StoreError):
    """File that another process changed; the message says where its lines are."""

    exit_code = INTEGRITY


class Garbled(ValueError):
    """Error of a line whose bytes changed after they were written."""


class Damage(NamedTuple):
    """Line that could not be used: its number (from 1), and the reason."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{16})",')
Check = Callable[[bytes], object]  # raises Garbled for such a line, ValueError for a whole one that cannot be used


def seal(kind: str, fields: dict[str, Any]) -> bytes:
    """Return the line of a record, without its newline. Raises ValueError or TypeError for what JSON does not have."""
    fields = {"kind": kind, "schema_version": SCHEMA_VERSION} | fields
    return _canonical(fields | {"checksum": _checksum(_canonical(fields))})


def unseal(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and fields of a line. Raises Garbled for a wrong checksum, ValueError for an unknown version."""
    claims = list(_CHECKSUM.finditer(line))
    if claims and not any(
        claim[1].decode() == _checksum(line[: claim.start()] + line[claim.end() :]) for claim in claims
    ):
        raise Garbled(f"the checksum {claims[0][1].decode()} does not match the line")
    try:
        fields: dict[str, Any] = from_json(line if claims else b"", allow_inf_nan=False)
        del fields["checksum"]
    except (ValueError, TypeError, KeyError):
        raise Garbled("not a whole record") from None
    version = fields.pop("schema_version", None)
    if version not in (1, SCHEMA_VERSION):
        raise ValueError(f"schema version {version!s:.40}; this zinfer reads 1 and {SCHEMA_VERSION}")
    if version == 1:
        _state_defaults(fields)
    return str(fields.pop("kind", None)), fields


def _state_defaults(fields: dict[str, Any]) -> None:
    """State in a case of version 1 what `stream` did without options."""
    case = fields.get("case")
    if not isinstance(case, dict) or case.get("engine") != "stream" or not isinstance(case.get("options"), list):
        return
    options = case["options"]
    if not any(isinstance(option, list) and option[:1] == ["kv_offload"] for option in options):
        options.append(["kv_offload", "none"])
    if case.get("offload") != "none" and case.get("gpu_weights") is None:
        case["gpu_weights"] = "0%"


def finite(value: Any) -> Any:
    """Return `value` as JSON, with null for NaN and the infinities."""
    return from_json(to_json(value, inf_nan_mode="null", fallback=str))


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str).encode()


def _checksum(line: bytes) -> str:
    return sha256(line).hexdigest()[:16]


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a regular file, the last one perhaps torn. Raises StoreError."""
    try:
        content = read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise StoreError(f"cannot read {path}: there is no such file") from None
    except DocumentError as error:
        raise StoreError(str(error)) from None
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def read_files(path: Path, files: Iterable[Path], damaged: list[Damage]) -> Iterator[tuple[Path, list[bytes]]]:
    """Yield files with their lines; unreadable ones go to `damaged`, as line 0. Raises StoreError for `path` itself."""
    for file in files:
        try:
            yield file, read_lines(file)
        except StoreError as error:
            if file == path:
                raise
            damaged.append(Damage(file, 0, str(error).removeprefix(f"{file} ")))


class AppendLog(Closing):
    """File open for appending, made if need be, and locked until `close`; call `mend` before appending.

    Raises StoreError if another process writes the file or it cannot be written.

    Locks are only advice. So every append, and `check` at the end of a run, sees whether the file is still where it was
    and ends where this process left it; if not, the lines that it holds are saved in a new file next to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot open {path} for writing: {error.strerror}") from error
        with ExitStack() as undo:
            undo.callback(self.close)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise StoreError(f"{path} is not a regular file; name another file with --output")
            try:
                # not lockf: a POSIX lock is lost when its process closes any descriptor of the file, as reading it does
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                wait = f"another zinfer is writing {path}; wait for it, or name another file with --output"
                held = isinstance(error, BlockingIOError)
                raise StoreError(wait if held else f"cannot lock {path}: {error.strerror}") from error
            atomic.sync_folder(path.parent)
            self._end = os.fstat(self._descriptor).st_size  # where the next line belongs
            undo.pop_all()

    def append_lines(self, *lines: bytes) -> None:
        """Append lines, without newlines, and wait for the disk. Nothing of them stays after a StoreError."""
        data = b"".join(line + b"\n" for line in lines)
        self.check(data)
        _append(self._descriptor, data, self.path)
        self._end += len(data)

    def check(self, pending: bytes = b"") -> None:
        """Raise TakenAwayError if the file changed. Its lines, and `pending` ones, are saved."""
        opened = os.fstat(self._descriptor)
        try:
            fault = "" if os.path.samestat(os.stat(self.path), opened) else "was replaced by another file"
        except OSError:
            fault = "was deleted"
        if not fault and opened.st_size != self._end:
            fault = "was cut" if opened.st_size < self._end else "was written to by somebody else"
        if not fault:
            return
        paths = (Path(f"{self.path}.saved{f'-{number}' * (number > 1)}") for number in count(1))
        saved = next(path for path in paths if not os.path.lexists(path))
        try:
            kept = Path(f"/proc/self/fd/{self._descriptor}").read_bytes()[: self._end]
            atomic.write(saved, kept + b"\n" * (kept[-1:] not in (b"", b"\n")) + pending)
        except OSError as error:
            _refuse(saved, error)
        raise TakenAwayError(
            f"{self.path} {fault} while this command wrote to it: its lines are saved in {saved}; rename that to "
            f"{self.path.name} to go on"
        )

    def mend(self, check: Check, kind: str, keep_garbled: bool = True) -> tuple[tuple[int, str], ...]:
        """Check every line, repair the file, and return the faults.

        Faults have the number of a line (from 1) and a reason. Garbled lines are copied to ``<file>.damaged`` if
        `keep_garbled`; those at the end, such as a line that a kill tore, are then cut off. Raises StoreError, and
        changes nothing, if no line is intact: the file is no `kind` ("results file").
        """
        lines, faults, garbled = read_lines(self.path), list[tuple[int, str]](), list[bytes]()
        end = position = 0  # end: where the last line to keep ends
        for number, line in enumerate(lines, start=1):
            position += len(line) + 1
            try:
                check(line)
            except ValueError as error:
                faults.append((number, str(error)))
                if isinstance(error, Garbled):
                    garbled.append(line)
                    continue
            end = position  # intact, perhaps of another version
        size = os.fstat(self._descriptor).st_size
        torn = len(lines) == 1 and lines[0].startswith(b"{") and size < position  # the first line ever, torn by a kill
        if lines and len(garbled) == len(lines) and not torn:
            raise StoreError(f"{self.path} is not a {kind}: no line is a record; name another file with --output")
        path = Path(f"{self.path}.damaged")
        kept = set(read_lines(path)) if keep_garbled and garbled and path.exists() else set()
        if keep_garbled and (new := [line for line in garbled if line not in kept]):
            with AppendLog(path) as log:
                log.append_lines(*new)
        if end > size:  # an intact last line without its newline
            _append(self._descriptor, b"\n", self.path)
        elif end < size:
            _cut(self._descriptor, end, self.path)
        self._end = os.fstat(self._descriptor).st_size
        return tuple(faults)

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _append(descriptor: int, data: bytes, path: Path) -> None:
    """Write and sync; if that fails, restore the file's size."""
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
