"""Rows of a batch job, and faults for lines without one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zinfer.core.request import Request
from zinfer.generation.schedule import like_order
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job.batch.openai import BatchLine, Fault
from zinfer.job.batch.packing import RowDemand
from zinfer.job.openai import Refused, answer_limit


@dataclass(eq=False)
class Row:
    """Line of the job under way, and its request to the worker."""

    line: BatchLine
    request: Request
    saved: int = 0  # output tokens that are on disk

    @property
    def need(self) -> RowDemand:
        return RowDemand(self.request.length, self.request.left)


def row_order(row: Row) -> tuple[int, int, int]:
    """Return the sort key that puts like rows side by side."""
    return like_order(row.need)


def needs(rows: Iterable[Row]) -> list[RowDemand]:
    return [row.need for row in rows]


def rows_of(
    lines: Sequence[BatchLine],
    prompts: Sequence[Sequence[int] | Refusal],
    positions: int | None,
    vocab_size: int,
    output_len: int,
    output_ids: Mapping[str, list[int]],
) -> tuple[list[Row], list[Fault]]:
    """Return lines as rows, and faults for lines that cannot be served.

    `prompts` are the prompts' token ids, or the reasons why there are none; `positions` and `vocab_size` those of the
    model; `output_len` is the limit of a line that names none, as far as there are positions for it; `output_ids` are
    the tokens made so far, by id. A row begins again if it cannot have made them: as many as its limit, or one that the
    model does not have.
    """
    rows: list[Row] = []
    faults: list[Fault] = []
    for line, prompt in zip(lines, prompts, strict=True):
        if isinstance(prompt, Refusal):
            faults.append(_fault(line, *prompt))
            continue
        try:
            limit = answer_limit(line.asked.output_len, len(prompt), positions, output_len)
        except Refused as refused:
            faults.append(_fault(line, refused.code, str(refused)))
            continue
        ids = output_ids.get(line.id, [])
        if len(ids) >= limit or not all(0 <= token < vocab_size for token in ids):
            ids = []
        request = line.asked.request(prompt, limit, key=len(rows))
        request.add(ids)
        rows.append(Row(line, request, saved=len(ids)))
    return rows, faults


def split(rows: Sequence[Row], fits: Sequence[bool], where: str) -> tuple[list[Row], list[Fault]]:
    """Return the rows that fit, and faults for the others."""
    faults = [
        _fault(
            row.line,
            "context_length_exceeded",
            f"the prompt's {len(row.request.prompt_ids)} tokens and {row.request.limit} of the answer need more memory "
            f"than {where} has",
        )
        for row, fine in zip(rows, fits, strict=True)
        if not fine
    ]
    return [row for row, fine in zip(rows, fits, strict=True) if fine], faults


def _fault(line: BatchLine, code: str, message: str) -> Fault:
    return Fault(line.id, line.custom_id, code, message, "messages" if line.asked.chat else "prompt")
