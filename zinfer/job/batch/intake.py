"""From requests to rows: how long each is, how many tokens it may get, and which cannot be served at all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zinfer.job.batch.openai import Fault, Request
from zinfer.job.batch.packing import RowDemand, order


@dataclass(eq=False)
class Row:
    """A request on its way: its prompt's tokens, how many it may get, and those it has."""

    key: int
    request: Request
    length: int
    limit: int
    made: list[int] = field(default_factory=list)
    saved: int = 0  # of `made`, on disk
    tries: int = 0  # batches with it that failed

    @property
    def need(self) -> RowDemand:
        return RowDemand(self.length + len(self.made), self.limit - len(self.made))


def row_order(row: Row) -> tuple[int, int, int]:
    """The order in which rows are packed."""
    return order(row.need)


def needs(rows: Iterable[Row]) -> list[RowDemand]:
    return [row.need for row in rows]


def rows_of(
    requests: Sequence[Request],
    lengths: Sequence[int | str],
    positions: int | None,
    output_len: int,
    made: Mapping[str, list[int]],
) -> tuple[list[Row], list[Fault]]:
    """The requests as rows, and those that cannot be served.

    `lengths` are the prompts' tokens, or why they could not be read; `positions` those of the model; `output_len` what
    a request gets that does not say, as far as there are positions for it; `made` what requests have by id.
    """
    rows: list[Row] = []
    faults: list[Fault] = []
    for request, length in zip(requests, lengths, strict=True):
        if isinstance(length, str):
            faults.append(_fault(request, "invalid_prompt", length))
            continue
        left = None if positions is None else positions - length
        limit = request.output_len
        if limit is None:
            limit = output_len if left is None else min(output_len, max(1, left))
        if left is not None and limit > left:
            message = f"the prompt's {length} tokens and {limit} of the answer exceed the model's {positions} positions"
            faults.append(_fault(request, "context_length_exceeded", message))
            continue
        known = made.get(request.id, [])[: limit - 1]
        rows.append(Row(len(rows), request, length, limit, list(known), saved=len(known)))
    return rows, faults


def split(rows: Sequence[Row], fits: Sequence[bool], where: str) -> tuple[list[Row], list[Fault]]:
    """The rows that fit, and faults for the others, which need too much memory `where`."""
    faults = [
        _fault(
            row.request,
            "context_length_exceeded",
            f"the prompt's {row.length} tokens and {row.limit} of the answer need more memory than {where} has",
        )
        for row, fine in zip(rows, fits, strict=True)
        if not fine
    ]
    return [row for row, fine in zip(rows, fits, strict=True) if fine], faults


def _fault(request: Request, code: str, message: str) -> Fault:
    return Fault(request.id, request.custom_id, code, message, "messages" if request.chat else "prompt")
