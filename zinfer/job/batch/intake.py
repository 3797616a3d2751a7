"""Intake: rows from requests, with their token ids and limits, and faults for requests that cannot be served."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zinfer.generation.schedule import like_order
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job.batch.openai import BatchRequest, Fault
from zinfer.job.batch.packing import RowDemand
from zinfer.job.openai import Refused, answer_limit


@dataclass(eq=False)
class RequestRow:
    """A request under way: the ids of its prompt, the limit of its answer in tokens, and the tokens made so far."""

    key: int
    request: BatchRequest
    prompt_ids: Sequence[int]
    limit: int
    output_ids: list[int] = field(default_factory=list)
    saved: int = 0  # tokens of `output_ids` that are on disk
    tries: int = 0  # failures while it was in the worker

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def need(self) -> RowDemand:
        return RowDemand(self.length + len(self.output_ids), self.limit - len(self.output_ids))


def row_order(row: RequestRow) -> tuple[int, int, int]:
    """Return the sort key of rows: those that should begin first come first, like rows side by side."""
    return like_order(row.need)


def needs(rows: Iterable[RequestRow]) -> list[RowDemand]:
    return [row.need for row in rows]


def rows_of(
    requests: Sequence[BatchRequest],
    prompts: Sequence[Sequence[int] | Refusal],
    positions: int | None,
    vocab_size: int,
    output_len: int,
    output_ids: Mapping[str, list[int]],
) -> tuple[list[RequestRow], list[Fault]]:
    """Return the requests as rows, and those that cannot be served.

    `prompts` are the prompts' token ids, or the reasons why there are none; `positions` and `vocab_size` those of the
    model; `output_len` is the limit of a request that names none, as far as there are positions for it; `output_ids`
    are the tokens made so far, by id. A row begins again if it cannot have made them: as many as its limit, or one that
    the model does not have.
    """
    rows: list[RequestRow] = []
    faults: list[Fault] = []
    for request, prompt in zip(requests, prompts, strict=True):
        if isinstance(prompt, Refusal):
            faults.append(_fault(request, *prompt))
            continue
        length = len(prompt)
        try:
            limit = answer_limit(request.output_len, length, positions, output_len)
        except Refused as refused:
            faults.append(_fault(request, refused.code, str(refused)))
            continue
        known = output_ids.get(request.id, [])
        if len(known) >= limit or not all(0 <= token < vocab_size for token in known):
            known = []
        rows.append(RequestRow(len(rows), request, prompt, limit, list(known), saved=len(known)))
    return rows, faults


def split(rows: Sequence[RequestRow], fits: Sequence[bool], where: str) -> tuple[list[RequestRow], list[Fault]]:
    """Return the rows that fit, and faults for the others, which need more memory than `where` has."""
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


def _fault(request: BatchRequest, code: str, message: str) -> Fault:
    return Fault(request.id, request.custom_id, code, message, "messages" if request.chat else "prompt")
