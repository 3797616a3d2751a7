"""OpenAI batch format: requests in and answers out, each a JSON object a line.

A request gives the text to continue and its parameters::

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon", "max_tokens": 64}}

Its answer has the same `custom_id`, a completion as that endpoint returns it, and ids that depend on nothing but the
line, so that a job that is run twice writes the same ids. A request that cannot be served is answered with status 400
and an `error`; one that the machine failed on with an `error` and no response. Sources: "The request input object" and
"The request output object" of OpenAI's API reference; `BatchRequestOutput` in its openapi.yaml.
"""

import json
import re
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from zinfer.job.openai import (
    CHAT,
    COMPLETIONS,
    Refused,
    choice_object,
    completion_object,
    error_object,
    read_body,
    usage_object,
)
from zinfer.record.jsonl import Garbled
from zinfer.system.documents import DocumentError, parse_json

LINE = 16 << 20  # most bytes of a request
TOKENS = 1 << 20  # of JSON within which a line that cannot be parsed may say its custom_id
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}:,]|[^\s"\[\]{}:,]++|"')  # the last: a text without an end


class BatchRequest(NamedTuple):
    """A line that can be served. Temperature 0 is greedy; `seed` is derived from the line if it names none."""

    id: str
    custom_id: str
    chat: bool
    prompt: Any  # a text, or a chat's messages, each a dict of role and content
    output_len: int | None
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: str


class Fault(NamedTuple):
    """A line that cannot be served, and the reason."""

    id: str
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


class Done(NamedTuple):
    """An answer that an earlier run wrote: its id, True unless it is an error, and its number of tokens."""

    id: str
    ok: bool
    tokens: int


def digest(content: bytes) -> str:
    """Return the digest of a file of requests, as .job files name it."""
    return sha256(content).hexdigest()[:16]


def read_requests(content: bytes) -> list[BatchRequest | Fault]:
    """Return the requests of a file, in its order; blank lines are skipped, lines that cannot be served are Faults.
    Never raises."""
    found: list[BatchRequest | Fault] = []
    seen: Counter[bytes] = Counter()
    first: dict[str, int] = {}  # custom_id -> number of its line
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        line = line.strip()
        if not line:
            continue
        key = sha256(b"%d\n%s" % (seen[line], line)).hexdigest()[:24]
        seen[line] += 1
        custom_id: str | None = None
        try:
            try:
                fields = _object(line, number)
            except Refused:
                if (custom_id := _find_custom_id(line)) is not None:
                    first.setdefault(custom_id, number)
                raise
            custom_id = _custom_id(fields, number)
            if custom_id in first:
                raise Refused(
                    "duplicate_custom_id", f"line {number}: line {first[custom_id]} has the custom_id {custom_id!r} too"
                )
            first[custom_id] = number
            found.append(_request(key, custom_id, fields))
        except Refused as refused:
            found.append(Fault(f"batch_req_{key}", custom_id, refused.code, str(refused), refused.param))
    return found


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


def _find_custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line that cannot be parsed, as far as its outermost object can be followed.

    Depth, digits and what stands in inner objects do not matter. None without a custom_id that is a text, or with two.
    """
    found: list[str] = []
    depth, wanted, key = 0, b"{", b""  # wanted: what may come next in the outermost object
    for match in islice(_TOKEN.finditer(line, 0, LINE), TOKENS):
        token = match[0]
        kind = token[:1]
        if token == b'"':
            break
        if depth > 1 or (depth == 1 and wanted == b"v" and kind in b"[{"):
            depth += (kind in b"[{") - (kind in b"]}")
            wanted = b","
        elif depth == 0 and wanted == b"{" == token:
            depth, wanted = 1, b"k"
        elif depth == 1 and wanted == b"k" and kind == b'"':
            key, wanted = token, b":"
        elif depth == 1 and wanted == token in (b":", b","):
            wanted = b"v" if token == b":" else b"k"
        elif depth == 1 and wanted == b"v" and kind not in b":,]}":
            with suppress(ValueError):
                if json.loads(key) == "custom_id" and isinstance(value := json.loads(token), str) and value:
                    found.append(value)
            wanted = b","
        else:
            break
    return found[0] if len(found) == 1 else None


def _custom_id(fields: dict[str, Any], number: int) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise Refused("missing_required_parameter", f"line {number} has no custom_id, or it is not a text", "custom_id")
    return custom_id


def _request(key: str, custom_id: str, fields: dict[str, Any]) -> BatchRequest:
    if fields.get("method") != "POST":
        raise Refused("invalid_method", "method must be POST", "method")
    url, body = fields.get("url"), fields.get("body")
    if url not in (COMPLETIONS, CHAT):
        raise Refused("invalid_url", f"url must be {COMPLETIONS} or {CHAT}", "url")
    if not isinstance(body, dict):
        raise Refused("missing_required_parameter", "the line has no body, or it is not an object", "body")
    asked = read_body(body, chat=url == CHAT)
    return BatchRequest(
        id=f"batch_req_{key}", custom_id=custom_id, chat=asked.chat, prompt=asked.prompts[0],
        output_len=asked.output_len, temperature=asked.temperature, top_p=asked.top_p, stop=asked.stop,
        seed=asked.seed or key,
    )  # fmt: skip


def answer(
    request: BatchRequest, text: str, finish_reason: str, tokens: tuple[int, int], model: str, created: int
) -> dict[str, Any]:
    """Return the output object of a request that was continued. `tokens` counts the prompt's and the answer's tokens;
    `finish_reason` is ``stop`` or ``length``."""
    key = request.id.removeprefix("batch_req_")
    body = completion_object(
        f"{'chatcmpl' if request.chat else 'cmpl'}-{key}", created, model, request.chat,
        [choice_object(0, request.chat, text, finish_reason)], usage_object(tokens),
    )  # fmt: skip
    return _output(request.id, request.custom_id, {"status_code": 200, "request_id": f"req_{key}", "body": body}, None)


def refusal(fault: Fault) -> dict[str, Any]:
    """Return the output object of a request that cannot be served: OpenAI's status 400, and the same as `error`, where
    other programs look for it."""
    key = fault.id.removeprefix("batch_req_")
    body = error_object(fault.message, fault.code, fault.param)
    response = {"status_code": 400, "request_id": f"req_{key}", "body": body}
    return _output(fault.id, fault.custom_id, response, {"code": fault.code, "message": fault.message})


def failure(request: BatchRequest, code: str, message: str) -> dict[str, Any]:
    """Return the output object of a request that the machine failed on."""
    return _output(request.id, request.custom_id, None, {"code": code, "message": message})


def _output(identity: str, custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {"id": identity, "custom_id": custom_id, "response": response, "error": error}


def encode(record: dict[str, Any]) -> bytes:
    """Return the line of an output object, or of any other, in ASCII, without its newline."""
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
