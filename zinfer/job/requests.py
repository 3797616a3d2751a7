"""Requests of a sweep: drawn from a distribution of lengths, or read from a file.

A file has a JSON object a line: a request in OpenAI's batch format (`zinfer.job.batch.openai`), or the lengths of one,
``{"input_len": 245, "output_len": 106}``.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from zinfer.core.case import MAX_COUNT
from zinfer.core.request import GREEDY, Sampling
from zinfer.core.requests import DEFAULT_REQUESTS, MAX_REQUESTS, LengthDistribution, RequestLoad
from zinfer.core.value import Frozen
from zinfer.generation.tokenizer_process import characters
from zinfer.job.batch.openai import Fault, read_requests
from zinfer.job.recipe import Sweep
from zinfer.system import documents

LENGTHS = ("input_len", "output_len")
TEXT_TOKEN = 4  # characters of a token, roughly: what a plan reckons with before the tokenizer is loaded


class RequestsError(documents.DocumentError):
    """A file of requests that cannot be used; the message names the line and the fault."""


class AskedRequest(NamedTuple):
    """Request of a load: its prompt, a text or a chat's messages, or None for `input_len` random tokens. Its answer has
    `output_len` tokens, sampled as it asks. The `input_len` of a text is an estimate."""

    prompt: Any
    input_len: int
    output_len: int
    sampling: Sampling = GREEDY


Asked = tuple[AskedRequest, ...]


class RequestSet(NamedTuple):
    """The requests of a load."""

    load: RequestLoad
    requests: Asked

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Mean tokens of a prompt and of an answer, rounded up."""
        count = len(self.requests)
        prompts, answers = (sum(getattr(request, name) for request in self.requests) for name in LENGTHS)
        return -(-prompts // count), -(-answers // count)

    @property
    def longest(self) -> AskedRequest | None:
        """Longest request whose tokens are known; None if there is only text."""
        exact = [request for request in self.requests if request.prompt is None]
        return max(exact, key=lambda request: request.input_len + request.output_len, default=None)


class _LengthLine(Frozen):
    input_len: int = Field(ge=1, le=MAX_COUNT, strict=True)
    output_len: int = Field(ge=1, le=MAX_COUNT, strict=True)


def request_sets(sweep: Sweep) -> tuple[RequestSet, ...]:
    """Return a sweep's loads of requests: each source in each closed and open loop. Raises DocumentError."""
    loops: list[dict[str, int | float | str]] = [{"in_flight": number} for number in sweep.in_flight]
    loops += [{"request_rate": rate} for rate in sweep.request_rate]
    sets = []
    for name, requests in _sources(sweep):
        fields = {"source": name, "requests": len(requests), "seed": sweep.seed, "order": sweep.request_order}
        sets += [RequestSet(RequestLoad.model_validate(fields | loop), requests) for loop in loops]
    return tuple(sets)


def _sources(sweep: Sweep) -> Iterator[tuple[str, Asked]]:
    if sweep.requests is not None:
        path = Path(sweep.requests)
        requests = read_file(path)[: sweep.num_requests]
        yield f"{path.name} {sha256(repr(requests).encode(errors='replace')).hexdigest()[:12]}", requests
    for text in sweep.request_lengths:
        wanted = LengthDistribution.parse(text)
        lengths = wanted.draw(sweep.num_requests or DEFAULT_REQUESTS, sweep.seed)
        yield wanted.describe(), tuple(AskedRequest(None, *pair) for pair in lengths)


def read_file(path: Path) -> Asked:
    """Return the requests of a file, in its order. Raises DocumentError that names the line, or the request."""
    try:
        content = documents.read_bytes(path)
    except FileNotFoundError:
        raise RequestsError(f"no file {path} of requests") from None
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not 1 <= len(numbered) <= MAX_REQUESTS:
        raise RequestsError(f"{path} has {len(numbered):,} requests: a load has 1 to {MAX_REQUESTS:,}")
    if b'"custom_id"' in numbered[0][1]:
        return tuple(_asked(path, request) for request in read_requests(content))
    requests = []
    for number, line in numbered:
        name = f"{path}, line {number}"
        lengths = documents.validate(_LengthLine, documents.parse_json(line, name), name)
        requests.append(AskedRequest(None, lengths.input_len, lengths.output_len))
    return tuple(requests)


def _asked(path: Path, request: Any) -> AskedRequest:
    if isinstance(request, Fault):
        name = "" if request.custom_id is None else f" {request.custom_id[:60]!r}"
        raise RequestsError(f"{path}: request{name}: {request.failure.message}")
    if request.asked.output_len is None:
        raise RequestsError(f"{path}: request {request.custom_id[:60]!r} has no max_tokens: a load has exact lengths")
    if request.asked.sampling.grammar:
        raise RequestsError(f"{path}: request {request.custom_id[:60]!r} has a grammar: a load has exact lengths")
    asked = request.asked.request((), request.asked.output_len)
    return AskedRequest(request.prompt, max(1, characters(request.prompt) // TEXT_TOKEN), asked.left, asked.sampling)
