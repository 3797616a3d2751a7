"""The parent's end of `zinfer.worker.teacher_forcing`: batches of rows that a reference runs, and others are led along
after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zinfer.record.accuracy import Along, Position
from zinfer.record.measurement import Status
from zinfer.worker.process import Worker


class NoAnswer(RuntimeError):
    """A load that failed, or a pass: its status, and why in one line."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status


class Row(NamedTuple):
    """A prompt, and the text's tokens that follow it; None where the reference's own do."""

    prompt: list[int]
    tokens: list[int] | None

    @property
    def along(self) -> Along:
        return "own" if self.tokens is None else "text"


@dataclass(frozen=True)
class Recorded:
    """A batch of rows that the reference ran: the tokens that followed, and where its logits are."""

    rows: Sequence[Row]
    tokens: list[list[int]]
    lengths: list[int]  # up to the token that ended the row's own text, if one did
    file: dict[str, Any]  # as `zinfer.worker.teacher_forcing.compare` takes it


def ask(worker: Worker, verb: str, **fields: Any) -> dict[str, Any]:
    """What `zinfer.worker.teacher_forcing` answers. Raises NoAnswer where it failed."""
    answer = worker.serve("follow", verb, **fields)
    if "status" in answer:
        raise NoAnswer(answer["status"], str(answer["error"]))
    return answer


def record(worker: Worker, rows: Sequence[Row], steps: int, file: str, ends: frozenset[int]) -> Recorded:
    """Have the reference run `rows` for `steps` tokens and keep its logits in `file`; `ends` end a row's own text."""
    prompts, given = [row.prompt for row in rows], [row.tokens for row in rows]
    answer = ask(worker, "record", prompts=prompts, tokens=given, steps=steps, file=file)
    tokens = answer.pop("tokens")
    lengths = [
        next((i + 1 for i, token in enumerate(made) if row.tokens is None and token in ends), steps)
        for row, made in zip(rows, tokens, strict=True)
    ]
    return Recorded(rows, tokens, lengths, {"file": file, **answer})


def compare(worker: Worker, batch: Recorded, size: int | None = None) -> list[list[Position]]:
    """The positions of each row of `batch`, `size` rows at a time."""
    size, found = size or len(batch.rows), list[list[Position]]()
    for first in range(0, len(batch.rows), size):
        part = slice(first, first + size)
        prompts = [row.prompt for row in batch.rows[part]]
        answer = ask(worker, "compare", prompts=prompts, tokens=batch.tokens[part], first=first, **batch.file)
        found += [[Position(*fields) for fields in row] for row in answer["rows"]]
    return found
