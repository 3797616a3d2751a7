"""Completions of a server: one request, the times of its tokens, and whether it did what was asked.

Requests are those of OpenAI's ``/v1/completions``, streamed. Tokens are counted by what the server says of each event:
``usage``, ``token_ids`` or llama.cpp's ``timings``; by events only if their number is that of the whole answer.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from zinfer.engine import EngineError
from zinfer.engine.server.process import Address, headers

PATH, DONE = "/v1/completions", b"[DONE]"
Event = tuple[float, bytes]  # time at which a line arrived, and the line


class Completion(NamedTuple):
    """Answer: when it was asked for, and when each token came. Seconds of `time.monotonic`."""

    asked: float
    tokens: list[float]


def body(model: str, prompt: Sequence[int], output_len: int, more: dict[str, Any]) -> bytes:
    """Return the body of a request for exactly `output_len` tokens, chosen greedily."""
    fields = {"model": model, "prompt": list(prompt), "max_tokens": output_len, "temperature": 0, "stream": True}
    return json.dumps(fields | more).encode()


def complete(address: Address, request: bytes, timeout_s: float) -> tuple[float, list[Event]]:
    """Send a request; return its time, and the timed lines of its answer.

    Lines are not parsed before all is over: a client that parses would slow its own clock. Raises EngineError for an
    answer that is an error, OSError and HTTPException for a connection that breaks.
    """
    with closing(address.connection(timeout_s)) as connection:
        asked = time.monotonic()
        connection.request("POST", PATH, request, headers())
        answer = connection.getresponse()
        if answer.status != 200:
            text = " ".join(answer.read(2000).decode(errors="replace").split())
            raise EngineError(f"the server refused a request with status {answer.status}: {text[:300]}")
        events = []
        while line := answer.readline():
            if line.startswith(b"data:"):
                events.append((time.monotonic(), line[5:].strip()))
        if not events or (events[-1][1] != DONE and b'"error"' not in events[-1][1]):
            raise ConnectionError(f"an answer was broken off after {len(events)} events")
        return asked, events


def token_times(events: Sequence[Event], input_len: int, output_len: int) -> list[float]:
    """Return the times at which the tokens of an answer came.

    Raises EngineError unless they are exactly those asked for: `output_len` tokens, after a prompt of `input_len` that
    was computed, not taken from a cache.
    """
    times: list[float] = []
    usage: dict[str, Any] = {}
    by_event = False
    for moment, line in events:
        if line == DONE:
            continue
        event = json.loads(line)
        if "error" in event:
            raise EngineError(f"the server ended an answer with an error: {json.dumps(event['error'])[:300]}")
        usage = event.get("usage") or usage
        seen, has_text = _seen(event), any(choice.get("text") for choice in event.get("choices", ()))
        if seen is None and has_text:  # a token, if the whole answer has as many
            times.append(moment)
            by_event = True
        elif seen is not None and not by_event:
            ids_alone = event.get("usage") is None and "timings" not in event
            times += [moment] * (seen - (0 if ids_alone else len(times)))
    total = usage.get("completion_tokens", None if by_event else len(times))
    if total is None:
        raise EngineError("the server says neither ids nor numbers of tokens, so nothing can be measured")
    if total != output_len or len(times) != output_len:
        counted = f"{total} tokens" if total == len(times) else f"{total} tokens in events of {len(times)}"
        raise EngineError(f"the server answered with {counted} where {output_len} were asked for")
    prompt = usage.get("prompt_tokens", input_len)
    if prompt != input_len:
        raise EngineError(f"the server read a prompt of {prompt} tokens where {input_len} were sent")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if cached:
        raise EngineError(f"the server took {cached} tokens of a prompt from its cache: switch that off in its preset")
    return times


def _seen(event: dict[str, Any]) -> int | None:
    """Return how many tokens an event says that there are: so far, or in it if it has only ids."""
    if (usage := event.get("usage")) is not None:
        return int(usage["completion_tokens"])
    if (timings := event.get("timings")) is not None:
        return int(timings["predicted_n"])
    ids = [choice["token_ids"] for choice in event.get("choices", ()) if choice.get("token_ids") is not None]
    return sum(map(len, ids)) if ids else None
