"""OpenAI batch format: requests in, answers out, a JSON object a line.

A request gives the text to continue and its parameters::

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon", "max_tokens": 64}}

Its answer has the same `custom_id`, and ids that depend on nothing but the line. A request that cannot be served is
answered with status 400 and an `error`; one that the machine failed on has an `error` and no response. Sources:
OpenAI's API reference, and `BatchRequestOutput` in its openapi.yaml.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

from zinfer.core.request import Failure, Request
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job import openai
from zinfer.job.openai import CHAT, COMPLETIONS, Asked, Refused
from zinfer.job.structure import PLAIN, Form
from zinfer.record.jsonl import Garbled
from zinfer.system.documents import DocumentError, parse_json

LINE = 16 << 20  # most bytes of a request


class BatchLine(NamedTuple):
    """Line that can be served. Its seed is derived from the line if it names none."""

    id: str
    custom_id: str
    asked: Asked

    @property
    def prompt(self) -> Any:
        """Text, or an object with a chat's messages."""
        return self.asked.prompts[0]


class Fault(NamedTuple):
    """Line that cannot be served, and the reason."""

    id: str
    custom_id: str | None
    failure: Failure


class Done(NamedTuple):
    """Answer of an earlier run: its id, its outcome, its tokens."""

    id: str
    ok: bool
    tokens: int


def digest(content: bytes) -> str:
    """Return the digest of a file of requests for .job files."""
    return sha256(content).hexdigest()[:16]


def read_requests(content: bytes, form: Form = PLAIN) -> list[BatchLine | Fault]:
    """Return the lines of a file, in its order, without blank ones. Lines that cannot be served are Faults."""
    lines: list[BatchLine | Fault] = []
    seen: Counter[bytes] = Counter()
    first: dict[str, int] = {}  # custom_id -> number of its line
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        line = line.strip()
        if not line:
            continue
        key = sha256(b"%d\n%s" % (seen[line], line)).hexdigest()[:24]
        seen[line] += 1
        custom_id = _custom_id(line)
        try:
            if custom_id is not None and first.setdefault(custom_id, number) != number:
                why = f"line {number}: line {first[custom_id]} has the custom_id {custom_id!r} too"
                raise Refused("duplicate_custom_id", why)
            lines.append(_line(key, custom_id, _object(line, number), number, form))
        except Refused as refused:
            lines.append(Fault(f"batch_req_{key}", custom_id, refused.failure))
    return lines


def _custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line, if it can be parsed: also of one that is refused."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(line) if len(line) <= LINE else None
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        return custom_id if isinstance(custom_id, str) and custom_id else None
    return None


def _object(line: bytes, number: int) -> dict[str, Any]:
    if len(line) > LINE:
        raise Refused("invalid_json_line", f"line {number} has {len(line):,} bytes: at most {LINE:,}")
    try:
        fields = parse_json(line, f"line {number}")
    except DocumentError as error:
        why = str(error).removeprefix(f"line {number} is ")[:200]
        raise Refused("invalid_json_line", f"line {number} is not valid JSON: {why}") from None
    if not isinstance(fields, dict):
        raise Refused("invalid_json_line", f"line {number} is not a JSON object")
    return fields


def _line(key: str, custom_id: str | None, fields: dict[str, Any], number: int, form: Form) -> BatchLine:
    if custom_id is None:
        raise Refused("missing_required_parameter", f"line {number} has no custom_id, or it is not a text", "custom_id")
    if fields.get("method") != "POST":
        raise Refused("invalid_method", "method must be POST", "method")
    url, body = fields.get("url"), fields.get("body")
    if url not in (COMPLETIONS, CHAT):
        raise Refused("invalid_url", f"url must be {COMPLETIONS} or {CHAT}", "url")
    if not isinstance(body, dict):
        raise Refused("missing_required_parameter", "the line has no body, or it is not an object", "body")
    asked = openai.read_body(body, chat=url == CHAT, form=form)
    return BatchLine(f"batch_req_{key}", custom_id, asked._replace(seed=asked.seed or key))


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
            openai.check_tokens(line.asked.sampling, vocab_size)
            limit = openai.answer_limit(line.asked.output_len, len(prompt), positions, output_len)
        except Refused as refused:
            faults.append(_fault(line, refused))
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
        faults.append(_fault(lines[request.key], Refused("context_length_exceeded", why + f"{where} has")))
    return fitting, faults


def _fault(line: BatchLine, refused: Refused) -> Fault:
    return Fault(line.id, line.custom_id, replace(refused.failure, param=line.asked.subject))


def answer(
    line: BatchLine,
    text: str,
    finish_reason: str,
    tokens: tuple[int, int],
    model: str,
    created: int,
    prompt_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the output object of a continued line. `tokens` are the prompt's and the answer's."""
    parsed = line.asked.parser(prompt_ids).add(text, ended=True)
    key, chat = line.id.removeprefix("batch_req_"), line.asked.chat
    identity, choice = f"{'chatcmpl' if chat else 'cmpl'}-{key}", openai.choice_object(0, chat, parsed, finish_reason)
    body = openai.completion_object(identity, created, model, chat, [choice], usage=openai.usage_object(tokens))
    return _output(line, {"status_code": 200, "request_id": f"req_{key}", "body": body})


def refusal(fault: Fault) -> dict[str, Any]:
    """Return the output object of a line that cannot be served: status 400, and `error` for other programs."""
    key = fault.id.removeprefix("batch_req_")
    body = openai.error_object(replace(fault.failure, status=400))
    return _output(fault, {"status_code": 400, "request_id": f"req_{key}", "body": body}, fault.failure)


def failed(line: BatchLine, failure: Failure) -> dict[str, Any]:
    """Return the output object of a line that the machine failed on."""
    return _output(line, None, failure)


def _output(line: BatchLine | Fault, response: Any, failure: Failure | None = None) -> dict[str, Any]:
    error = failure and {"code": failure.code, "message": failure.message}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}


def encode(record: dict[str, Any]) -> bytes:
    """Return the line of any object, in ASCII, without its newline."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()


def decode(line: bytes) -> Done:
    """Read an output line. Raises Garbled for a line that is no output object."""
    try:
        record = json.loads(line)
        response, error = record["response"], record["error"]
        ok = error is None and response["status_code"] == 200
        tokens = response["body"]["usage"]["completion_tokens"] if ok else 0
        if not isinstance(record["id"], str) or "custom_id" not in record or not isinstance(tokens, int):
            raise Garbled("not an output object of a batch")
        return Done(record["id"], ok, tokens)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Garbled("not a whole output object of a batch") from None
