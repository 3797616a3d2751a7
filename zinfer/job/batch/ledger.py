"""Ledger of a batch job. Its files on disk, with the answers, the job's settings and unfinished rows.

``out.jsonl`` holds output objects of the OpenAI format and nothing else. ``out.jsonl.job`` holds the settings that the
job was started with, and while it runs the tokens of unfinished rows, every minute or so. Its lines are sealed
(`zinfer.record.jsonl.seal`): a changed token would be continued as if the model had chosen it.

Each shard (`zinfer.job.shard`) has both files. `merge` believes none of them: each request must have exactly one
answer, from its own shard, of the same job.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from zinfer.core.errors import ZinferError
from zinfer.core.value import Closing
from zinfer.job.batch.openai import BatchLine, Done, Fault, decode, encode
from zinfer.job.shard import Shard, ShardError, whole_split
from zinfer.record.jsonl import AppendLog, Damage, Garbled, StoreError, read_lines, seal, unseal
from zinfer.system import atomic

JOB, ROW = "batch", "batch_row"  # kinds of lines in a .job file: the settings, and tokens of an unfinished row


class JobChanged(ZinferError):
    """Output file that belongs to another job; the message lists the differences."""

    exit_code = 6


def job_path(output: Path) -> Path:
    """Return the path of the .job file next to `output`."""
    return output.with_name(output.name + ".job")


class Ledger(Closing):
    """Files of one job, open for this process alone. Make one with `Ledger.open`. `done` holds the answers in the
    output by id, `made` the tokens of unfinished rows by id, `created` the time of the job's first start, in seconds
    since 1970; `damaged` are the lines of both files that were left out."""

    def __init__(self, output: AppendLog) -> None:
        self.done: dict[str, Done] = {}
        self.made: dict[str, list[int]] = {}
        self.damaged: tuple[Damage, ...] = ()
        self.created = 0
        self._output = output
        self._job: AppendLog | None = None

    @classmethod
    def open(cls, output: Path, settings: Mapping[str, Any], created: int, force: bool = False) -> Self:
        """Start or continue the job of `settings` in `output`. A first start is at `created`. With `force` the answers
        of another job stay. Raises JobChanged for another job's output, StoreError for one that is no batch output,
        that another process writes, or that cannot be written; nothing is changed then."""
        ledger = cls(AppendLog(output))
        try:
            ledger._open(settings, created, force)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _open(self, settings: Mapping[str, Any], created: int, force: bool) -> None:
        path = job_path(self._output.path)
        before, tokens_by_id = read_job(path)
        foreign = before is None and path.exists() and path.stat().st_size
        self.done = {done.id: done for done in _answers(self._output.path)}
        changes = _changes(before, settings)
        if not force and (foreign or (changes and (self.done or tokens_by_id))):
            why = "\n".join(f"  {line}" for line in changes.values())
            if before is None:
                why = f"  {path.name} does not say which: it is missing, or its first line is damaged"
            remedy = "name another file with --output, or use --force to add the answers that are missing"
            raise JobChanged(f"{self._output.path} may belong to another job: {remedy}.\n{why}")
        self.damaged = tuple(Damage(self._output.path, *fault) for fault in self._output.mend(decode, "batch output"))
        started = (before or {}).get("created")
        self.created = started if isinstance(started, int) and not changes else created
        self._header = header_line(settings, self.created)
        self.made = tokens_by_id if changes.keys() <= {"prompts"} else {}  # another model cannot continue these tokens
        if changes:
            self._begin(path)
        self._job = AppendLog(path)
        self.damaged += tuple(Damage(path, *fault) for fault in self._job.mend(_read, "job file", keep_garbled=False))
        if changes and self.made:
            self.save((identity, 0, tokens) for identity, tokens in self.made.items())

    def _begin(self, path: Path) -> None:
        """Replace the .job file by its first line alone."""
        try:
            atomic.write(path, self._header + b"\n")
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append output objects and wait for the disk. Raises StoreError."""
        lines = [encode(record) for record in records]
        if lines:
            self._output.append_lines(*lines)
            self.done |= {done.id: done for done in map(decode, lines)}

    def save(self, rows: Iterable[tuple[str, int, list[int]]]) -> None:
        """Append tokens of unfinished rows. The id, the number of tokens saved before, and the tokens since."""
        assert self._job is not None
        lines = [seal(ROW, {"id": identity, "at": at, "tokens": tokens}) for identity, at, tokens in rows if tokens]
        if lines:
            self._job.append_lines(*lines)

    def finish(self) -> None:
        """Mark the job as done: no row is unfinished. Raises TakenAwayError if its answers were taken away."""
        self._output.check()
        if self._job is not None:
            self._job.close()
        self._begin(job_path(self._output.path))

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        self._output.close()
        if self._job is not None:
            self._job.close()


def _answers(path: Path) -> list[Done]:
    answers = []
    for line in read_lines(path):
        with suppress(Garbled):
            answers.append(decode(line))
    return answers


def _read(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and fields of a line of a .job file. Raises Garbled for any other line."""
    kind, fields = unseal(line)
    if kind == ROW and fields.keys() == {"id", "at", "tokens"} and type(fields["tokens"]) is list:
        whole = all(type(number) is int and number >= 0 for number in (fields["at"], *fields["tokens"]))
        if whole and isinstance(fields["id"], str):
            return kind, fields
    if kind != JOB:
        raise Garbled("not a line of a job file")
    return kind, fields


def read_job(path: Path) -> tuple[dict[str, Any] | None, dict[str, list[int]]]:
    """Return a .job file's settings and the tokens of unfinished rows."""
    tokens_by_id: dict[str, list[int]] = {}
    header: dict[str, Any] | None = None
    for line in read_lines(path) if path.exists() else ():
        try:
            kind, fields = _read(line)
        except ValueError:
            continue
        if kind == JOB:
            header = fields
        elif kind == ROW and len(tokens := tokens_by_id.setdefault(fields["id"], [])) >= fields["at"]:
            tokens[fields["at"] :] = fields["tokens"]  # of two lines about one position the second counts
    return header, tokens_by_id if header is not None else {}


def header_line(settings: Mapping[str, Any], created: int) -> bytes:
    """Return the first line of a .job file."""
    return seal(JOB, {**settings, "created": created})


def _changes(before: dict[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ from a .job file's, a line each."""
    old = before or {}
    keys = sorted((settings.keys() | old.keys()) - {"created"})
    return {key: f"{key}: {old.get(key)} -> {settings.get(key)}" for key in keys if old.get(key) != settings.get(key)}


class Merged(NamedTuple):
    """Answers of all shards, and the lines that were no answers."""

    done: list[Done]
    damaged: list[str]


def merge(output: Path, prompts: str, requests: Sequence[BatchLine | Fault], force: bool = False) -> Merged:
    """Write all answers to `output` in order, or change nothing. `prompts` is the digest of the requests' file. Raises
    ShardError for shards of several jobs or of other requests, for answers that are missing, doubled or foreign, and
    for another `output` without `force`; StoreError."""
    shards = whole_split(output)
    header = _common_header(shards, output, prompts)
    answers: list[bytes] = [b""] * len(requests)
    done: list[Done] = [Done("", False, 0)] * len(requests)
    damaged: list[str] = []
    for shard in shards:
        path = shard.path(output)
        numbers = {requests[index].id: index for index in shard.of(range(len(requests)))}
        for number, line in enumerate(read_lines(path), start=1):
            try:
                answer = decode(line)
            except Garbled as fault:
                damaged.append(f"{path}:{number}: {fault}")
                continue
            index = numbers.get(answer.id)
            if index is None:
                raise ShardError(f"{path}:{number} answers no request of shard {shard}: remove that line")
            if answers[index]:
                raise ShardError(f"{path}:{number} answers a request for the second time: remove one of the two lines")
            answers[index], done[index] = line, answer
    lacking = [(shard, sum(not line for line in shard.of(answers))) for shard in shards]
    if missing := sum(count for _, count in lacking):
        again = ", ".join(f"--shard {shard} ({count})" for shard, count in lacking if count)
        lack = f"{missing:,} of {len(requests):,} answers are missing"
        raise ShardError(f"{lack}: run these shards again, which go on where they ended: {again[:600]}")
    _write(output, b"".join(line + b"\n" for line in answers), header, force)
    return Merged(done, damaged)


def _common_header(shards: Sequence[Shard], output: Path, prompts: str) -> bytes:
    """Return the first line of the whole job's .job file. Raises ShardError."""
    headers: list[dict[str, Any]] = []
    for shard in shards:
        path = job_path(shard.path(output))
        header, _ = read_job(path)
        if header is None:
            raise ShardError(f"{path} does not say which job {shard.path(output).name} belongs to: run the shard again")
        if header.get("shard") != str(shard):
            raise ShardError(f"{path} is that of shard {header.get('shard')}: give each file its own name back")
        if header.get("prompts") != prompts:
            raise ShardError(f"{shard.path(output)} answers another file of prompts")
        headers.append(header)
        for key in sorted((header.keys() | headers[0].keys()) - {"created", "shard"}):
            if header.get(key) != headers[0].get(key):
                change = f"{key}: {headers[0].get(key)} -> {header.get(key)}"
                raise ShardError(f"shards {shards[0]} and {shard} are of different jobs: {change}")
    created = [header["created"] for header in headers if isinstance(header.get("created"), int)]
    return header_line(headers[0] | {"shard": None}, min(created, default=0))


def _write(output: Path, content: bytes, header: bytes, force: bool) -> None:
    """Replace `output` and its .job file, unless it has other answers. Raises ShardError and StoreError."""
    before = output.exists() and output.stat().st_size
    if before and not force and (before != len(content) or output.read_bytes() != content):
        raise ShardError(f"{output} has other answers than the shards: --force replaces it")
    try:
        if not before or force:
            atomic.write(output, content)
        atomic.write(job_path(output), header + b"\n")
    except OSError as error:
        raise StoreError(f"cannot write {output}: {error.strerror}") from error
