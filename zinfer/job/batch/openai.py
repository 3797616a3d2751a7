"""OpenAI batch format: requests in and answers out, each a JSON object a line.

A request gives the text to continue and its parameters::

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon", "max_tokens": 64}}

Its answer has the same `custom_id`, a completion as that endpoint returns it, and ids that depend on nothing but the
line, so that a job that is run twice writes the same ids. A request that cannot be served is answered with status 400
and an `error`; one that the machine failed on with an `error` and no response. Sources: "The request input object" and
"The request output object" of OpenAI's API reference; `BatchRequestOutput` in its openapi.yaml.
"""

import json
import math
from collections import Counter
from hashlib import sha256
from typing import Any, NamedTuple

from zinfer.record.jsonl import Garbled
from zinfer.spec.case import MOST
from zinfer.spec.documents import DocumentError, parse_json

LINE = 16 << 20  # most bytes of a request
STOPS, STOP = 100, 10_000  # most texts that end an answer, and most characters of one
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Parameters that do not affect the answer.
_IGNORED = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "parallel_tool_calls", "stream_options"}
)  # fmt: skip
_USED = frozenset({"max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed"})
# Parameters that are accepted with these values only, which have no effect; null has none in any parameter.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "suffix": ("",), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip


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


class _Refused(ValueError):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


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
        digest = sha256(b"%d\n%s" % (seen[line], line)).hexdigest()[:24]
        seen[line] += 1
        custom_id: str | None = None
        try:
            fields = _object(line, number)
            custom_id = _custom_id(fields, number)
            if custom_id in first:
                raise _Refused(
                    "duplicate_custom_id", f"line {number}: line {first[custom_id]} has the custom_id {custom_id!r} too"
                )
            first[custom_id] = number
            found.append(_request(digest, custom_id, fields))
        except _Refused as refused:
            found.append(Fault(f"batch_req_{digest}", custom_id, refused.code, str(refused), refused.param))
    return found


def _object(line: bytes, number: int) -> dict[str, Any]:
    if len(line) > LINE:
        raise _Refused("invalid_json_line", f"line {number} has {len(line):,} bytes: at most {LINE:,}")
    try:
        fields = parse_json(line, f"line {number}")
    except DocumentError as error:
        why = str(error).removeprefix(f"line {number} is ")[:200]
        raise _Refused("invalid_json_line", f"line {number} is not valid JSON: {why}") from None
    if not isinstance(fields, dict):
        raise _Refused("invalid_json_line", f"line {number} is not a JSON object")
    return fields


def _custom_id(fields: dict[str, Any], number: int) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _Refused(
            "missing_required_parameter", f"line {number} has no custom_id, or it is not a text", "custom_id"
        )
    return custom_id


def _request(digest: str, custom_id: str, fields: dict[str, Any]) -> BatchRequest:
    if fields.get("method") != "POST":
        raise _Refused("invalid_method", "method must be POST", "method")
    url, body = fields.get("url"), fields.get("body")
    if url not in (COMPLETIONS, CHAT):
        raise _Refused("invalid_url", f"url must be {COMPLETIONS} or {CHAT}", "url")
    if not isinstance(body, dict):
        raise _Refused("missing_required_parameter", "the line has no body, or it is not an object", "body")
    given = {key: value for key, value in body.items() if value is not None}
    subject = "messages" if url == CHAT else "prompt"
    _refuse_unsupported(given, subject)
    if subject not in given:
        raise _Refused("missing_required_parameter", f"the body has no {subject}", subject)
    length = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return BatchRequest(
        id=f"batch_req_{digest}",
        custom_id=custom_id,
        chat=url == CHAT,
        prompt=_messages(given[subject]) if url == CHAT else _text(given[subject]),
        output_len=_whole(given, length, 1) if length in given else None,
        temperature=_number(given, "temperature", 1.0, 2.0),
        top_p=_number(given, "top_p", 1.0, 1.0),
        stop=_stop(given.get("stop")),
        seed=digest if "seed" not in given else str(_whole(given, "seed", None)),
    )


def _refuse_unsupported(body: dict[str, Any], subject: str) -> None:
    for key, value in body.items():
        if key in _IGNORED or key in _USED or key == subject:
            continue
        harmless = any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in _NEUTRAL.get(key, ())
        )
        if not harmless:
            shown = f"={json.dumps(value)[:40]}" if isinstance(value, str | int | float) else ""
            raise _Refused("unsupported_parameter", f"{key}{shown} is not supported", key)


def _whole(body: dict[str, Any], key: str, least: int | None) -> int:
    value = body[key]
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and not least <= value <= MOST):
        limits = f" from {least} to {MOST:,}" if least else ""
        raise _Refused("invalid_value", f"{key} must be a whole number{limits}", key)
    return value


def _number(body: dict[str, Any], key: str, default: float, most: float) -> float:
    value = body.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= most:
        raise _Refused("invalid_value", f"{key} must be a number from 0 to {most:g}", key)
    return float(value)


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise _Refused("invalid_type", "prompt must be a single text; write one line for each prompt", "prompt")
    return _unicode(prompt, "prompt")


def _unicode(text: str, param: str) -> str:
    """Return `text`, which JSON may have escaped. Raises _Refused for half of a surrogate pair."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _Refused("invalid_value", f"{param} has half of a surrogate pair, which is no character", param)
    return text


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _Refused("invalid_value", "stop must be a text or a list of texts, none of them empty", "stop")
    if len(texts) > STOPS or max(map(len, texts), default=0) > STOP:
        raise _Refused("invalid_value", f"stop has at most {STOPS} texts of {STOP:,} characters", "stop")
    return tuple(_unicode(text, "stop") for text in texts)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise _Refused("invalid_type", "messages must be a non-empty list", "messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Refused("invalid_value", "a message must be an object with a role", "messages")
    given = {key: value for key, value in message.items() if value is not None}
    more = given.keys() - {"role", "content", "name", "refusal"}
    if more:
        raise _Refused("unsupported_parameter", f"{min(more)} in a message is not supported", "messages")
    content = given.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _Refused("unsupported_parameter", "a message's content must be text", "messages")
        text += part["text"]
    return {"role": _unicode(given["role"], "messages"), "content": _unicode(text, "messages")}


def answer(
    request: BatchRequest, text: str, finish_reason: str, tokens: tuple[int, int], model: str, created: int
) -> dict[str, Any]:
    """Return the output object of a request that was continued. `tokens` counts the prompt's and the answer's tokens;
    `finish_reason` is ``stop`` or ``length``."""
    key = request.id.removeprefix("batch_req_")
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
    body = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{key}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice | {"logprobs": None, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)},
    }
    return _output(request.id, request.custom_id, {"status_code": 200, "request_id": f"req_{key}", "body": body}, None)


def refusal(fault: Fault) -> dict[str, Any]:
    """Return the output object of a request that cannot be served: OpenAI's status 400, and the same as `error`, where
    other programs look for it."""
    error = {"message": fault.message, "type": "invalid_request_error", "param": fault.param, "code": fault.code}
    key = fault.id.removeprefix("batch_req_")
    response = {"status_code": 400, "request_id": f"req_{key}", "body": {"error": error}}
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
