"""Studies: what `zinfer study` measured, in one record type.

A file ``<study>.jsonl`` holds the runs of a study, a sealed line each (`zinfer.record.jsonl`)::

    append(Path("sweeps/results/h100/codec.jsonl"), run)
    runs = read(Path("sweeps/results/h100/codec.jsonl"), "codec").runs

Files of zinfer 0.1 are read as well: a header and a line for each row, or one JSON document. `zinfer.analysis.study`
makes tables and answers of runs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AliasChoices, Field, ValidationError, model_validator

from zinfer.core.case import Case, Name
from zinfer.core.errors import ZinferError
from zinfer.core.value import Frozen, first_fault
from zinfer.record.bounds import AtLeastOne, Count, Ms, NotNegative, Number, Positive, Versions
from zinfer.record.bounds import Text as Words
from zinfer.record.jsonl import AppendLog, Damage, Garbled, StoreError, finite, read_files, read_lines, seal, unseal
from zinfer.record.measurement import Status
from zinfer.system.documents import parse_json

StudyName = Literal["codec", "accuracy", "reuse", "routing"]
KIND = "study"  # of a line that holds a run; those of zinfer 0.1 begin so
Share = Annotated[float, Field(ge=0, le=1)]
Along = Literal["own", "text"]
ExpertPolicy = Literal["lru", "lfu"]  # experts that leave a cache first: in old records those not used for longest, too


class StudyError(ZinferError):
    """Study that cannot be made."""


class Rate(Frozen):
    """Bytes a second: the median of `samples`, and their range over it."""

    median: Positive
    spread: NotNegative
    samples: AtLeastOne
    of: Words


class Coded(Frozen):
    """Weights of one kind, laid end to end and coded (`codec`). Rates are of raw bytes, None if nothing was timed."""

    name: Name
    description: Words = Field(validation_alias=AliasChoices("description", "told"))  # earlier records have `told`
    total_bytes: AtLeastOne  # bytes of all weights of this kind
    raw_bytes: AtLeastOne  # bytes of the weights that were coded, before coding
    coded_bytes: AtLeastOne
    # Size that coding exponents one by one, with a table for every block, can reach, as a share: their entropy and 8
    # bits, over 16; of FP8 with 4 bits, over 8.
    bound: NotNegative
    status: Literal["ok", "no_smaller", "wrong_bits"]
    encode: Rate | None = None
    decode: Rate | None = None

    @property
    def ratio(self) -> float:
        return self.coded_bytes / self.raw_bytes


class Position(NamedTuple):
    """Deviation of a setting from the reference at one next token."""

    error: float  # of the logits: root of the mean square, over the standard deviation of the reference's
    kl: float  # divergence from the reference's distribution, in nats
    same: float  # 1 if the most likely token is that of the reference, else 0
    reference_nats: float  # -ln p of the token that came next, by the reference
    nats: float  # the same by the setting


class Deviation(Frozen):
    """Deviation of a setting from the reference (`accuracy`): means over all positions, and the largest."""

    case: Case
    along: Along  # rows follow the reference's greedy tokens (`own`), or a text, whose perplexity is known
    rows: AtLeastOne
    positions: AtLeastOne  # of a row the first is its prefill's, which no setting of the KV cache changes
    error: Number
    error_max: Number
    kl: Number
    kl_max: Number
    agreement: Share
    reference_perplexity: Positive | None = None
    perplexity: Positive | None = None
    first_differences: tuple[Count | None, ...] = ()  # tokens of each `own` row before one that differs, None if none

    @classmethod
    def of(cls, case: Case, along: Along, rows: Sequence[Sequence[Position]]) -> Self:
        """Return the deviation over `rows` of positions, one row at least."""
        every = [position for row in rows for position in row]
        error, kl, same, reference_nats, nats = zip(*every, strict=True)
        text = along == "text"
        first = () if text else (next((i for i, position in enumerate(row) if not position.same), None) for row in rows)
        return cls(
            case=case, along=along, rows=len(rows), positions=len(every), error=fmean(error), error_max=max(error),
            kl=fmean(kl), kl_max=max(kl), agreement=fmean(same), first_differences=tuple(first),
            reference_perplexity=exp(fmean(reference_nats)) if text else None,
            perplexity=exp(fmean(nats)) if text else None,
        )  # fmt: skip


class Failed(Frozen):
    """A setting without numbers (`accuracy`), and the reason."""

    case: Case
    status: Status
    error: Words


class Reload(Frozen):
    """TTFT of a context whose KV cache was kept, but `new_tokens` (`reuse`)."""

    context: AtLeastOne
    new_tokens: AtLeastOne
    kept_bytes: Count = 0
    recompute_ms: tuple[Ms, ...] = ()
    memory_ms: tuple[Ms, ...] = ()
    disk_ms: tuple[Ms, ...] = ()  # of zinfer 0.1, which kept conversations on disk, too
    same_token: bool | None = None
    max_difference: Number | None = None  # between any logit computed and reloaded
    skipped: Words | None = None  # reason why this context was not measured

    @property
    def gain(self) -> float | None:
        """Median speed-up of a reload from memory over computing; None without samples."""
        return median(self.recompute_ms) / median(self.memory_ms) if self.memory_ms and self.recompute_ms else None


class Hits(Frozen):
    """Hit rate of a cache of `experts` experts of all layers (`routing`)."""

    policy: ExpertPolicy = "lfu"
    experts: Count
    hits: Share  # of all experts that layers chose for tokens, those that were on the device already
    batch_size: AtLeastOne = 1  # tokens of a step


class Touched(Frozen):
    """Mean share of a layer's experts that a step needs (`routing`)."""

    batch_size: AtLeastOne
    share: Share


class Text(Frozen):
    """Text that a study read: name, sha256, tokens."""

    name: Name
    sha256: Name = ""
    tokens: Count


Row = Coded | Deviation | Failed | Reload | Hits | Touched
R = TypeVar("R", bound=Frozen)


class Start(Frozen):
    """Start of anything that is recorded: machine, time and versions."""

    machine: Name
    started_at: Name = ""  # ISO 8601, UTC
    versions: Versions = Field(default_factory=dict)


class Study(Start):
    """Run of a study on `machine`: its settings and rows."""

    study: StudyName
    device: Name
    model: Name = ""
    about: Words = ""  # description of the model
    revision: Words = ""
    case: Case | None = None  # reference of `accuracy`; load of `reuse`, whose workload means nothing
    num_layers: AtLeastOne | None = None  # of `routing` those with routed experts
    total_layers: AtLeastOne | None = None
    num_experts: Count | None = None  # of a layer
    experts_per_token: Count | None = None
    guessed: Share | None = None  # share of right guesses of the next layer's experts; None if there were none
    link: Positive | None = None  # bytes a second, host to device
    logits_dtype: Name = ""
    text: Text | None = None
    samples: AtLeastOne | None = None  # windows of the text
    rows: tuple[Row, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = {"codec": "link", "accuracy": "case text", "reuse": "case", "routing": "text num_layers num_experts"}
        if lacks := [name for name in needed[self.study].split() if getattr(self, name) is None]:
            raise ValueError(f"study {self.study} lacks {lacks[0]}")
        return self

    @property
    def asked(self) -> Case:
        """Reference of `accuracy`, or load of `reuse`."""
        assert self.case is not None
        return self.case

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """Return the rows of one kind."""
        return tuple(row for row in self.rows if isinstance(row, kind))


class Runs(NamedTuple):
    """Runs in file order, and lines that could not be used."""

    runs: tuple[Study, ...]
    damaged: tuple[Damage, ...]


def files(path: Path, study: str) -> tuple[Path, ...]:
    """Return the files of a study in `path`, the oldest form first."""
    return (*sorted(path.rglob(f"{study}.json")), *sorted(path.rglob(f"{study}.jsonl"))) if path.is_dir() else (path,)


def append(path: Path, run: Start) -> None:
    """Append a run to the file, made if need be, and sync. Raises StoreError, also if it holds something else."""
    if path.exists() and _document(read_lines(path), path) is not None:
        raise StoreError(f"{path} is a JSON document, to which no run is added; name another file with --output")
    with AppendLog(path) as lines:
        lines.mend(unseal, "record of `zinfer study`")
        lines.append_lines(seal(KIND, finite(run.model_dump())))


def read(path: Path, study: str) -> Runs:
    """Return the runs of a study in a file or folder. Raises StoreError for a file that cannot be read."""
    runs: list[Study] = []
    damaged: list[Damage] = []
    for file, lines in read_files(path, files(path, study), damaged):
        for number, fields in parse_runs(lines, file, study):
            try:
                if isinstance(fields, str):
                    raise ValueError(fields)
                runs.append(Study.model_validate(fields))
            except ValueError as error:
                fault = first_fault(error)[:300] if isinstance(error, ValidationError) else str(error)
                damaged.append(Damage(file, number, fault))
    return Runs(tuple(runs), tuple(sorted(damaged)))


def last(path: Path, study: str) -> Study:
    """Return the last run of a study in a file or folder. Raises StoreError if there is none."""
    runs, damaged = read(path, study)
    if not runs:
        raise StoreError(f"{path} holds no record of `zinfer study {study}`{f': {damaged[0]}' if damaged else ''}")
    return runs[-1]


def parse_runs(lines: list[bytes], path: Path, study: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each run's first line number, and its fields or a fault."""
    if (document := _document(lines, path)) is not None:
        shared = document if isinstance(document, dict) else {"document": document}
        runs = shared.pop("runs", [{}])
        for run in runs if isinstance(runs, list) else [runs]:
            yield 1, _renamed(study, shared | (run if isinstance(run, dict) else {"run": run}))
        return
    entries: deque[tuple[int, str, dict[str, Any]]] = deque()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append((number, *unseal(line)))
        except ValueError as error:
            yield number, str(error)
            entries.append((number, "", {}))  # it may have been a header
    while entries:
        number, kind, fields = entries.popleft()
        if kind == KIND and fields.get("study") == study:
            yield number, fields
        elif kind == f"{KIND}.{study}":
            lines_left, rows = fields.pop("lines", 0), list[dict[str, Any]]()
            missing = lines_left if isinstance(lines_left, int) else 0
            while missing > 0 and entries and entries[0][1].startswith(f"{kind}."):
                rows.append(entries.popleft()[2])
                missing -= 1
            lost = f"{missing} lines of this run are missing"
            yield number, lost if missing > 0 else _renamed(study, fields | {"rows": rows})
        elif kind not in ("", KIND):
            yield number, f"a line of kind {kind[:40]!r} that belongs to no run"


# Fields of records of zinfer 0.1 that have another name today.
_RENAMED = {
    "told": "about", "model_revision": "revision", "reference": "case", "prompts": "text",
    "points": "rows", "deviations": "rows", "failed": "rows", "touched": "rows",
}  # fmt: skip


def _renamed(study: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run of zinfer 0.1, under today's names."""
    today: dict[str, Any] = {"study": study, "rows": []}
    for name, value in fields.items():
        new = _RENAMED.get(name, name)
        today[new] = [*today["rows"], *value] if new == "rows" and isinstance(value, list) else value
    if isinstance(today.get("text"), str):
        today["text"] = {"name": today["text"], "tokens": today.pop("tokens", None)}
    if isinstance(today.get("case"), dict):
        today["model"] = today["case"].get("model")
    return today


def _document(lines: list[bytes], path: Path) -> Any:
    """Return the JSON document of a file; None for a file of lines."""
    try:
        document = parse_json(b"\n".join(lines), path)
        unseal(lines[0])
    except Garbled:
        return document
    except ValueError:
        pass
    return None
