"""Results of sweeps on disk: a sealed line for each start and each point.

Lines (`zinfer.record.jsonl`) are appended whole and synced, and checked when read::

    with Store.open(Path("sweeps/results/h100/bloom.jsonl")) as store:
        store.append(Header(machine="h100", recipe=recipe), measurement)
    points = read(Path("sweeps/results")).points
"""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, ValidationError

from zinfer.core.value import first_fault
from zinfer.record.bounds import Bounded, Name, Text
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
    """Read the records of a file or folder, with all texts `containing`.

    A line that cannot be used is reported in `damaged` and the rest is used; so is a file below a folder that cannot be
    read, as line 0. Studies are passed over. Raises StoreError when `path` itself cannot be read.
    """
    words = [word.encode() for word in containing]
    by_kind: dict[type[Record], list[Any]] = {Measurement: [], Header: [], RequestPoint: []}
    damaged: list[Damage] = []
    for file, lines in read_files(path, files(path), damaged):
        for number, line in enumerate(lines, start=1):
            if all(word in line for word in words):
                try:
                    kind, fields = unseal(line)
                    if not kind.startswith(KIND):
                        record = _validated(kind, fields)
                        by_kind[type(record)].append(record)
                except ValueError as error:
                    damaged.append(Damage(file, number, str(error)))
    points, headers, requests = (tuple(records) for records in by_kind.values())
    return Records(points, headers, tuple(damaged), requests)


class Store(AppendLog):
    """Results file open for appending, by this process alone. Make one with `Store.open`."""

    damaged: tuple[Damage, ...] = ()  # lines that could not be used when it was opened

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open `path`, made if need be, mend it, and lock it. Raises StoreError."""
        store = super().open(path)
        try:
            store.damaged = tuple(Damage(path, *fault) for fault in store.mend(decode, "results file"))
        except BaseException:
            store.close()
            raise
        return store

    def append(self, *records: Record) -> None:
        """Append records and wait for the disk. Raises StoreError, also for a value that JSON does not have."""
        self.append_lines(*map(encode, records))
