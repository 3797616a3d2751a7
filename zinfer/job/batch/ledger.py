"""What a batch job has on disk: the answers, and beside them what the job is and how far unfinished rows are.

``out.jsonl`` holds output objects of the OpenAI format and nothing else, appended and synced as rows end.
``out.jsonl.job`` tells what the job was started with, so that another one does not write into the same file, and while
the job runs, every minute or so, the tokens that unfinished rows have: a row of thousands of tokens may take hours. It
stays, with its first line only, when the job is done: the same command again has nothing to do then.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from zinfer.job.batch.openai import Done, decode, encode
from zinfer.record.jsonl import Closing, Garbled, Lines, StoreError, read_lines
from zinfer.spec.atomic import sync_folder
from zinfer.spec.errors import ZinferError

FORMAT = 1  # of the .job file


class JobChanged(ZinferError):
    """The output file belongs to another job; the message tells the difference."""

    exit_code = 6


def job_path(output: Path) -> Path:
    """The file beside `output` that tells which job it belongs to."""
    return output.with_name(output.name + ".job")


class Ledger(Closing):
    """The files of one job, open for this process alone. Make one with `Ledger.open`.

    `done` is what is in the output by id, `made` the tokens of unfinished rows by id, `created` the job's first start.
    """

    def __init__(self, output: Lines) -> None:
        self.done: dict[str, Done] = {}
        self.made: dict[str, list[int]] = {}
        self.damaged: tuple[tuple[int, str], ...] = ()
        self.created = 0
        self._output = output
        self._job: Lines | None = None

    @classmethod
    def open(cls, output: Path, settings: Mapping[str, Any], created: int, force: bool = False) -> Self:
        """Start or continue the job of `settings` in `output`; its `created` is that of its first start.

        With `force` the answers of another job stay, and this one adds those that are missing. Raises JobChanged when
        `output` is another job's, StoreError when it is no batch output, somebody else writes it, or it cannot be
        written; nothing is changed then.
        """
        ledger = cls(Lines.open(output))
        try:
            ledger._open(settings, created, force)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _open(self, settings: Mapping[str, Any], created: int, force: bool) -> None:
        path = job_path(self._output.path)
        before, made = _read_job(path)
        if before is None and not force and path.exists() and path.stat().st_size:
            raise StoreError(f"{path} is no job file of `zinfer batch`: name another file with --output")
        self.done = {done.id: done for done in _answers(self._output.path)}
        changes = _changes(before, settings)
        if changes and (self.done or made) and not force:
            if before is None:
                raise JobChanged(
                    f"{self._output.path} has answers, and no {path.name} tells what of: name another file with "
                    "--output, or --force to add the answers that are missing"
                )
            told = "\n".join(f"  {line}" for line in changes.values())
            raise JobChanged(
                f"{self._output.path} belongs to another job; --force adds the answers that are missing.\n{told}"
            )
        self.damaged = self._output.mend(decode, "batch output")
        known = before if before is not None else {}
        self.created = known["created"] if isinstance(known.get("created"), int) and not changes else created
        self._header = {**settings, "zinfer_batch": FORMAT, "created": self.created}
        self.made = made if changes.keys() <= {"prompts"} else {}  # another model would go on with other tokens
        if changes:
            self._begin(path)
        self._job = Lines.open(path)
        self._job.mend(_progress, "job file", aside=False)
        if changes and self.made:
            self.save((identity, 0, tokens) for identity, tokens in self.made.items())

    def _begin(self, path: Path) -> None:
        """Make the .job file anew, with its first line only: whole, or not at all."""
        draft = path.with_name(path.name + ".new")
        with Lines.open(draft) as lines:
            lines.cut()
            lines.append(encode(self._header))
            try:
                os.replace(draft, path)
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror}") from error
        sync_folder(path.parent)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append output objects, and wait for the disk."""
        lines = [encode(record) for record in records]
        if lines:
            self._output.append(*lines)
            self.done |= {done.id: done for done in map(decode, lines)}

    def save(self, rows: Iterable[tuple[str, int, list[int]]]) -> None:
        """Append what unfinished rows have made: the id, the tokens that were saved before, and those since."""
        assert self._job is not None
        lines = [encode({"id": identity, "at": at, "tokens": tokens}) for identity, at, tokens in rows if tokens]
        if lines:
            self._job.append(*lines)

    def finish(self) -> None:
        """The job is done: nothing is unfinished any more."""
        if self._job is not None:
            self._job.close()
        self._begin(job_path(self._output.path))

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        self._output.close()
        if self._job is not None:
            self._job.close()


def _answers(path: Path) -> list[Done]:
    found = []
    for line in read_lines(path):
        try:
            found.append(decode(line))
        except Garbled:
            continue
    return found


def _progress(line: bytes) -> dict[str, Any]:
    """A line of a .job file: the first one, or one about a row. Raises Garbled."""
    try:
        fields: dict[str, Any] = json.loads(line)
        about_a_row = (type(fields.get(key)) for key in ("id", "at", "tokens"))
        if "zinfer_batch" in fields or tuple(about_a_row) == (str, int, list):
            return fields
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise Garbled("not a line of a job file")


def _read_job(path: Path) -> tuple[dict[str, Any] | None, dict[str, list[int]]]:
    """The first line of a .job file, None where there is none, and the tokens of unfinished rows by id."""
    made: dict[str, list[int]] = {}
    header: dict[str, Any] | None = None
    for line in read_lines(path) if path.exists() else ():
        try:
            fields = _progress(line)
        except Garbled:
            continue
        if "zinfer_batch" in fields:
            header = fields
        elif len(made.setdefault(fields["id"], [])) == fields["at"]:
            made[fields["id"]] += fields["tokens"]
    return header, made if header is not None else {}


def _changes(before: dict[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """What differs between a .job file's first line and the settings of now: a line of text by key."""
    after = {**settings, "zinfer_batch": FORMAT}
    known = before or {}
    keys = sorted((after.keys() | known.keys()) - {"created"})
    return {key: f"{key}: {known.get(key)} -> {after.get(key)}" for key in keys if known.get(key) != after.get(key)}
