"""Intake: rows from requests, with their lengths and limits, and faults for requests that cannot be served."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zinfer.job.batch.openai import Fault, Request
from zinfer.job.batch.packing import RowDemand, order


@dataclass(eq=False)
class Row:
    """A request under way: the length of its prompt, the limit of its answer, and the tokens made, all in tokens."""

    key: int
    request: Request
    length: int
    limit: int
    made: list[int] = field(default_factory=list)
    saved: int = 0  # tokens of `made` that are on disk
    tries: int = 0  # failed batches that contained it

    @property
    def need(self) -> RowDemand:
        """Demand of the row from its present state on."""
        return RowDemand(self.length + len(self.made), self.limit - len(self.made))


def row_order(row: Row) -> tuple[int, int, int]:
    """Sort key of rows for packing."""
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
    """The rows of requests, and faults for those that cannot be served.

    `lengths` holds each prompt's number of tokens, or the reason why it could not be read; `positions` is the model's
    limit; `output_len` applies to requests without a limit of their own, as far as positions allow; `made` holds the
    tokens made so far, by request id.
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
        before = made.get(request.id, [])[: limit - 1]
        rows.append(Row(len(rows), request, length, limit, list(before), saved=len(before)))
    return rows, faults


def split(rows: Sequence[Row], fits: Sequence[bool], where: str) -> tuple[list[Row], list[Fault]]:
    """The rows that fit, and faults for the others, which need more memory than `where` has."""
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
