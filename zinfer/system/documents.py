"""Reader of files that others wrote: of bounded size, depth and digits, with values checked field by field.

Every fault is a DocumentError whose one line names the file, the field and the fault.
"""

import errno
import json
import math
import os
import stat
import tomllib
from collections import Counter
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from zinfer.core.errors import ZinferError, environment_error
from zinfer.core.value import first_fault

MAX_BYTES = 64 << 20  # larger than any configuration or index in use
RECIPE_BYTES = 64 << 10  # largest recipe
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # begins the file that Git has in place of a large one
MAX_DEPTH = 64  # levels of nesting
MAX_DIGITS = 19  # of an integer: 64 bits
_LEVEL = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _LEVEL)
# Faults of the name, not of the machine.
_MISUSED = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO)

Value = TypeVar("Value", bound=BaseModel)


class Bounds(NamedTuple):
    """Maximum of values of a JSON document, and of `composed` ones: texts, lists and objects."""

    values: int = 1 << 26
    composed: int = 1 << 22  # each takes memory and time of its own


FILES = Bounds()


class DocumentError(ZinferError):
    """File that cannot be read, parsed, or believed; the message names the file, the field and the fault."""


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file `path`, or a link to one, for reading.

    A FIFO, a device, a folder, or a link to a file of the kernel (in /proc and /sys, whose reads may wait for ever) is
    refused without waiting for it, as is the pointer that Git LFS leaves in the place of a file. Raises DocumentError,
    with the exit code of this machine if permission is denied or the disk fails; FileNotFoundError without such a file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unread(path, error) from None
    except ValueError:  # a NUL in the name
        raise DocumentError(f"{path!s:.80} cannot be read: it is not a file name") from None
    kernel = os.path.realpath(path).startswith(("/proc/", "/sys/"))
    if kernel or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DocumentError(f"{path} is not a regular file")
    try:
        begin = os.pread(descriptor, len(LFS_POINTER), 0)
    except OSError as error:
        os.close(descriptor)
        raise _unread(path, error) from None
    if begin == LFS_POINTER:
        os.close(descriptor)
        raise DocumentError(f"{path} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")
    return open(descriptor, "rb")


def _unread(path: Path, error: OSError) -> DocumentError:
    fault = DocumentError(f"{path} cannot be read: {error.strerror or error}")
    return fault if error.errno in _MISUSED else environment_error(fault)


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return a regular file's content, at most `limit` bytes. Raises DocumentError, FileNotFoundError."""
    stream = open_regular(path)
    try:
        with stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise _unread(path, error) from None
    if len(content) > limit:
        raise DocumentError(f"{path} is larger than {limit:,} bytes: it is not what its name says")
    return content


def decode(content: bytes, name: object) -> str:
    """Return `content` as UTF-8 text, without a byte-order mark. Raises DocumentError that names the first bad byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{name} is not UTF-8 text (byte {error.start} is {content[error.start]:#04x})") from None


def parse_json(
    content: bytes, name: object, infinite: bool = False, digits: int = MAX_DIGITS, bounds: Bounds = FILES
) -> Any:
    """Return the value of a JSON document; `name` is its file, for messages.

    A key that an object holds twice, more than MAX_DEPTH levels, integers of more than `digits` digits and numbers
    that are not finite (unless `infinite`) are refused, and, before anything is parsed, more values than `bounds`.
    Raises DocumentError.
    """

    def integer(text: str) -> int:
        if len(text.lstrip("-")) > digits:
            raise ValueError(f"an integer of {len(text)} digits")
        return int(text)

    def constant(text: str) -> float:
        if not infinite:
            raise ValueError(f"{text} is not a number")
        return float(text)

    def real(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    text = decode(content, name)
    _check_size(content, name, bounds)
    try:
        return json.loads(text, object_pairs_hook=once, parse_int=integer, parse_float=real, parse_constant=constant)
    except ValueError as error:
        raise DocumentError(f"{name} is damaged: {error}") from None


def read_toml(path: Path, limit: int = RECIPE_BYTES) -> dict[str, Any]:
    """Return the tables of the TOML file `path`. Raises DocumentError; FileNotFoundError if it is missing."""
    text = decode(read_bytes(path, limit), path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise DocumentError(f"{path} is damaged: {why}") from None


def catalogue(folder: Path) -> dict[str, Path]:
    """Return a folder's TOML files by name: the current directory's, else the catalogue's."""
    shipped = Path(str(files("zinfer") / "catalog")) / folder.name
    return {path.stem: path for root in (shipped, folder) for path in sorted(root.glob("*.toml"))}


def read_object(path: Path, limit: int = MAX_BYTES, infinite: bool = False, digits: int = MAX_DIGITS) -> dict[str, Any]:
    """Return the JSON object that the file `path` holds. Raises DocumentError; FileNotFoundError if it is missing."""
    value = parse_json(read_bytes(path, limit), path, infinite, digits)
    if not isinstance(value, dict):
        raise DocumentError(f"{path} is not a JSON object")
    return value


def validate(kind: type[Value], fields: object, name: object) -> Value:
    """Return `fields` as a `kind`; `name` is the file they come from. Raises DocumentError for the first bad field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise DocumentError(f"{name}: {first_fault(error)}") from None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `pairs`: a hook of `json.loads` that raises ValueError for a key that comes twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice[:60]!r} twice")
    return fields


def _check_size(content: bytes, name: object, bounds: Bounds) -> None:
    """Raise DocumentError for JSON with too many values or levels.

    Looks at commas and brackets outside of strings alone, at the speed of memory: parsing takes a hundred times as
    long. What is not JSON may pass, up to where the parser stops.
    """
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = content.count(b'"') // 2
    if texts <= bounds.composed:
        content = b"".join(content.split(b'"')[::2])
        texts += content.count(b"[") + content.count(b"{")
    if texts > bounds.composed:
        raise DocumentError(f"{name} is too large: it has more than {bounds.composed:,} texts, lists and objects")
    if content.count(b",") >= bounds.values:
        raise DocumentError(f"{name} is too large: it has more than {bounds.values:,} values")
    brackets = content.translate(None, _NO_BRACKETS)
    if max(accumulate(map(_LEVEL.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise DocumentError(f"{name} is damaged: it is nested more than {MAX_DEPTH} levels deep")
