"""Studies on disk: each run of `zinfer codec`, `zinfer accuracy` and `zinfer reuse`, beside the sweeps of its machine.

A file ``<kind>.jsonl`` holds the runs of one kind of study, in checksummed lines as sweeps have them
(`zinfer.record.jsonl`): a header with machine, device, versions and settings, then a line for each point. A run is
appended whole, in one write, so it is there with all its points or not at all::

    append(Path("sweeps/results/h100/codec.jsonl"), run)
    runs = read(Path("sweeps/results/h100/codec.jsonl"), CodecRecord).runs

Files of earlier versions, ``<kind>.json`` with one JSON document, are read as well.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError

from zinfer.core.errors import ENVIRONMENT, ZinferError
from zinfer.core.value import Frozen
from zinfer.record.jsonl import Damage, Lines, StoreError, finite, read_lines, seal, unseal
from zinfer.record.plausible import implausible
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, parse_json

PREFIX = "study."  # beginning of the kinds of lines; files of sweeps have none of them


class StudyError(ZinferError):
    """A file that holds no study of the kind that was asked for; the message says which."""

    exit_code = ENVIRONMENT


class Start(Frozen):
    """Start of anything that is recorded: machine, time and versions."""

    machine: str
    started_at: str = ""  # ISO 8601, UTC
    versions: Mapping[str, str] = Field(default_factory=dict)


class Study(Start):
    """One run of a study on `machine`, whose `device` did the work.

    A subclass names its kind, which is the command's name, and those of its fields that hold points. All other fields
    are the header.
    """

    KIND: ClassVar[str]
    POINTS: ClassVar[tuple[str, ...]]

    device: str

    @classmethod
    def from_document(cls, document: Any) -> tuple[Self, ...]:
        """Return the runs in a JSON document of an earlier version. Raises ValueError."""
        return (cls.model_validate(document),)


S = TypeVar("S", bound=Study)


class Runs(NamedTuple, Generic[S]):
    """Runs in the order of the file, repeated ones included, and the lines that could not be used."""

    runs: tuple[S, ...] = ()
    damaged: tuple[Damage, ...] = ()


def file_name(kind: type[Study]) -> str:
    """Return the name of the file that new runs of a kind of study are appended to."""
    return f"{kind.KIND}.jsonl"


def files(path: Path, kind: type[Study]) -> tuple[Path, ...]:
    """Return the files of a kind of study that `path` stands for: itself, or those anywhere below it, the oldest form
    first in each folder."""
    if not path.is_dir():
        return (path,)
    return tuple(sorted(path.rglob(f"{kind.KIND}.json"))) + tuple(sorted(path.rglob(file_name(kind))))


def append(path: Path, run: Study) -> None:
    """Add a run to the file, made if need be, and wait for the disk; a document of an earlier version becomes lines.

    Raises StoreError if the file cannot be written, another process writes it, or it holds something else.
    """
    earlier = _earlier(path, type(run)) if path.exists() else ()
    if earlier:
        atomic.write(path, b"".join(line + b"\n" for one in earlier for line in _lines(one)))
    with Lines.open(path) as lines:
        lines.mend(unseal, f"record of `zinfer {run.KIND}`")
        lines.append(*_lines(run))


def read(path: Path, kind: type[S]) -> Runs[S]:
    """Return the runs of a file; changes nothing.

    A run with a line that is missing or damaged is left out and reported. Raises StudyError for a file without any run
    of that kind, StoreError for one that cannot be read.
    """
    try:
        return Runs(_document(path, kind))
    except ValueError as error:
        reason = str(error).splitlines()[0]
    runs: list[S] = []
    damaged: list[Damage] = []
    fields: dict[str, Any] = {}
    missing = began = 0
    lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            name, own = unseal(line)
        except ValueError as error:
            damaged.append(Damage(path, number, str(error)))
            if missing:  # it may have been the next header, so no later line may count as this run's
                damaged.append(Damage(path, began, f"{missing} lines of this run are missing"))
                missing = 0
            continue
        group = name.removeprefix(f"{PREFIX}{kind.KIND}.")
        if name == f"{PREFIX}{kind.KIND}":
            if missing:
                damaged.append(Damage(path, began, f"{missing} lines of this run are missing"))
            missing, began = own.pop("lines", 0), number
            if type(missing) is not int or missing < 0:
                damaged.append(Damage(path, number, f"lines: {missing!r:.40} is no count"))
                missing = 0
                continue
            fields = own | {points: [] for points in kind.POINTS}
        elif group in kind.POINTS and missing:
            fields[group].append(own)
            missing -= 1
        else:
            damaged.append(Damage(path, number, f"a line of kind {name[:40]!r} that belongs to no run"))
            continue
        if not missing:
            try:
                run = kind.model_validate(fields)
            except ValidationError as error:
                damaged.append(Damage(path, began, _first(error)))
                continue
            if (fault := implausible(run)) is None:
                runs.append(run)
            else:
                damaged.append(Damage(path, began, fault))
    if missing:
        damaged.append(Damage(path, began, f"{missing} lines of this run are missing"))
    if not runs:
        reason = damaged[0].reason if damaged and len(lines) > 1 else reason
        raise StudyError(f"{path} is no record of `zinfer {kind.KIND}`: {reason}")
    return Runs(tuple(runs), tuple(sorted(damaged)))


def holds(path: Path, kind: type[Study]) -> bool:
    """Return whether the file is there and holds a run of that kind."""
    try:
        return path.is_file() and bool(read(path, kind).runs)
    except ZinferError:
        return False


def last(path: Path, kind: type[S]) -> S:
    """Return the last run that a file, or the files below a folder, hold. Raises StudyError, StoreError."""
    found = [run for file in files(path, kind) for run in read(file, kind).runs]
    if not found:
        raise StudyError(f"{path} holds no record of `zinfer {kind.KIND}`")
    return found[-1]


def _earlier(path: Path, kind: type[S]) -> tuple[S, ...]:
    """Return the runs of a document of an earlier version; none of a file with lines, whole or torn.

    Raises StoreError for a document of something else, which must not be taken for a torn line.
    """
    try:
        return _document(path, kind)
    except DocumentError:  # it is no document
        return ()
    except ValueError as error:
        with suppress(ValueError):
            unseal(read_lines(path)[0])
            return ()
        raise StoreError(
            f"{path} is not a record of `zinfer {kind.KIND}`: {error}; name another with --output"
        ) from None


def _lines(run: Study) -> Iterable[bytes]:
    """Return a run's lines: its header, which counts the others, and its points."""
    fields = finite(run.model_dump())
    points = [(name, point) for name in run.POINTS for point in fields.pop(name)]
    kind = f"{PREFIX}{run.KIND}"
    return [seal(kind, fields | {"lines": len(points)}), *(seal(f"{kind}.{name}", point) for name, point in points)]


def _document(path: Path, kind: type[S]) -> tuple[S, ...]:
    """Return the runs of a file with one JSON document. Raises ValueError for anything else."""
    document = parse_json(b"\n".join(read_lines(path)), path)
    if isinstance(document, dict) and "checksum" in document:
        raise ValueError("it is a line of a later version")
    try:
        runs = kind.from_document(document)
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    if fault := next(filter(None, map(implausible, runs)), None):
        raise ValueError(fault)
    return runs


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
