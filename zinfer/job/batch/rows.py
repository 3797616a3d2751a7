"""Requests of a batch job, and faults for lines without one."""

from collections.abc import Mapping, Sequence

from zinfer.core.request import Request
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job.batch.openai import BatchLine, Fault
from zinfer.job.openai import Refused, answer_limit, check_tokens


def requests_of(
    lines: Sequence[BatchLine],
    prompts: Sequence[Sequence[int] | Refusal],
    positions: int | None,
    vocab_size: int,
    output_len: int,
    output_ids: Mapping[str, list[int]],
) -> tuple[list[Request], list[Fault]]:
    """Return lines as requests, keyed by their numbers, and the faults. `prompts` are token ids or refusals;
    `positions` and `vocab_size` the model's; `output_len` limits a line that names no limit. `output_ids` are tokens
    made so far, by id: a row that cannot have made them begins again."""
    requests: list[Request] = []
    faults: list[Fault] = []
    for number, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        try:
            if isinstance(prompt, Refusal):
                raise Refused(*prompt)
            check_tokens(line.asked.sampling, vocab_size)
            limit = answer_limit(line.asked.output_len, len(prompt), positions, output_len)
        except Refused as refused:
            faults.append(_fault(line, refused.code, str(refused)))
            continue
        request = line.asked.request(prompt, limit, key=number)
        ids = output_ids.get(line.id, [])
        if len(ids) < limit and all(0 <= token < vocab_size for token in ids):
            request.add(ids)
        requests.append(request)
    return requests, faults


def split(
    lines: Sequence[BatchLine], requests: Sequence[Request], fits: Sequence[bool], where: str
) -> tuple[list[Request], list[Fault]]:
    """Return the requests that fit, and faults for the others."""
    fitting, faults = list[Request](), list[Fault]()
    for request, fine in zip(requests, fits, strict=True):
        if fine:
            fitting.append(request)
            continue
        why = f"the prompt's {len(request.prompt_ids)} tokens and {request.limit} of the answer need more memory than "
        faults.append(_fault(lines[request.key], "context_length_exceeded", why + f"{where} has"))
    return fitting, faults


def _fault(line: BatchLine, code: str, message: str) -> Fault:
    return Fault(line.id, line.custom_id, code, message, line.asked.subject)
