"""Results of sweeps on disk: a sealed line for each start and each point.

Lines (`zinfer.record.jsonl`) are appended whole and synced, and checked when read::

    with Store(Path("sweeps/results/h100/bloom.jsonl")) as store:
        store.append(Header(machine="h100", recipe=recipe), measurement)
    points = read(Path("sweeps/results")).points
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, ValidationError

from zinfer.core.case import Name
from zinfer.core.value import first_fault, group_by
from zinfer.record.bounds import Bounded, Text
from zinfer.record.jsonl import AppendLog, Damage, finite, read_files, seal, unseal
from zinfer.record.jsonl import StoreError as StoreError  # for callers that catch it
from zinfer.record.measurement import Measurement, Recorded
from zinfer.record.requests import RequestPoint
from zinfer.record.study import KIND, Start


class Header(Start):
    """Start of a sweep, with its settings."""

    description: Text = ""  # of the recipe
    recipe: Bounded = Field(default_factory=dict)
    model_revision: Text = ""
    shard: Name | None = None  # ``i/n``
    complete: bool = False  # True at the end of a shard's part


class Records(NamedTuple):
    """Records of files in order, repeated cases included."""

    points: tuple[Measurement, ...] = ()  # of equal sequences
    headers: tuple[Header, ...] = ()
    damaged: tuple[Damage, ...] = ()
    requests: tuple[RequestPoint, ...] = ()  # loads of requests, which are never compared with points

    @classmethod
    def joined(cls, files: "Iterable[Records]") -> Self:
        """Return the records of all `files`."""
        fields: Any = zip(*files, strict=True)
        return cls(*(tuple(chain.from_iterable(field)) for field in fields))

    def those(self, wanted: Callable[[Recorded], bool]) -> Self:
        """Return wanted points and loads of requests, all headers and faults."""
        return self._replace(points=tuple(filter(wanted, self.points)), requests=tuple(filter(wanted, self.requests)))

    @property
    def warning(self) -> str | None:
        """Warning in one line if lines were left out, else None."""
        if not self.damaged:
            return None
        rest = f" (and {len(self.damaged) - 1} more lines)" if len(self.damaged) > 1 else ""
        return f"left out {self.damaged[0]}{rest}"


Record = Header | Measurement | RequestPoint
_KINDS: dict[str, type[Record]] = {"sweep": Header, "point": Measurement, "requests": RequestPoint}


def _validated(kind: str, fields: dict[str, Any]) -> Record:
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of record {kind[:40]!r}")
    try:
        return _KINDS[kind].model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_fault(error)[:300]) from None


def encode(record: Record) -> bytes:
    """Return the line of a record, without its newline. Raises StoreError for values that JSON does not have."""
    kind = next(name for name, of in _KINDS.items() if isinstance(record, of))
    try:
        return seal(kind, finite(record.model_dump()))
    except (ValueError, TypeError) as error:
        raise StoreError(f"a {kind} record that cannot be stored: {error}") from error


def decode(line: bytes) -> Record:
    """Return the record of a line. Raises ValueError with the reason unless its bytes are as `encode` wrote them."""
    return _validated(*unseal(line))


def files(path: Path) -> tuple[Path, ...]:
    """Return the results files of `path`: itself, or those below it."""
    return tuple(sorted(path.rglob("*.jsonl"))) if path.is_dir() else (path,)


def read(path: Path, containing: tuple[str, ...] = ()) -> Records:
    """Read the records with texts `containing` of a file or folder. Raises StoreError for `path`.

    Studies are passed over. Lines that cannot be used are in `damaged`, and files below a folder, as line 0.
    """
    words, damaged, records = [word.encode() for word in containing], list[Damage](), list[Any]()
    for file, lines in read_files(path, files(path), damaged):
        for number, line in enumerate(lines, start=1):
            if all(word in line for word in words):
                try:
                    kind, fields = unseal(line)
                    records += [] if kind.startswith(KIND) else [_validated(kind, fields)]
                except ValueError as error:
                    damaged.append(Damage(file, number, str(error)))
    by_kind: dict[type, list[Any]] = group_by(records, type)
    points, headers, requests = (tuple(by_kind.get(kind, ())) for kind in (Measurement, Header, RequestPoint))
    return Records(points, headers, tuple(damaged), requests)


class Store(AppendLog):
    """Results file open for appending, by this process alone, and mended. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with ExitStack() as undo:
            undo.callback(self.close)
            self.mend(decode, "results file")
            undo.pop_all()

    def append(self, *records: Record) -> None:
        """Append records and wait for the disk. Raises StoreError, also for a value that JSON does not have."""
        self.append_lines(*map(encode, records))
