"""Completion requests and answers of OpenAI's API, ``/v1/completions`` and ``/v1/chat/completions``.

The one place that checks a request's body, for batch files and for the server, and that makes the body of an answer.

A body is refused unless every parameter is carried out, or has a value without an effect on the answer; so are its
messages and their parts. Sources: OpenAI's API reference, and the parameters that vLLM's server adds to it.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.core.case import MAX_COUNT
from zinfer.core.errors import ZinferError
from zinfer.core.request import EchoedPrompt, Failure, Request, Sampling, TokenScore

MAX_STOPS, MAX_STOP = 16, 1000  # texts that end an answer, and characters of one
MAX_MESSAGES = 10_000  # of a chat
MAX_BIASED, MAX_ENDS = 1024, 128  # tokens with a bias, and those that end an answer
MAX_TOP = 20  # alternatives with a log-probability
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have
PART = "bytes:\\x"  # beginning of the text of a token that is part of a character (`Tokenizer.text_of`)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# A text, token ids, or the messages of a chat; these with settings of the chat template, if there are any.
Prompt = str | list[int] | list[dict[str, Any]] | dict[str, Any]

_NUMBERS: dict[str, tuple[float, float]] = {  # of the sampling, with the least and the most
    "temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
}  # fmt: skip
_USED = frozenset({"max_tokens", "max_completion_tokens", "stop", "seed", "model", *_NUMBERS})
_USED |= {"top_k", "logit_bias", "stop_token_ids", "min_tokens"}
# Parameters that the server carries out, and a batch file does not.
_SERVED = frozenset({"n", "stream", "logprobs", "ignore_eos", "stream_options"})
_TEMPLATE = frozenset({"chat_template_kwargs", "reasoning_effort"})  # parameters of chats
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SERVED_OF = {True: _SERVED | {"top_logprobs"}, False: _SERVED | {"echo"}}  # by whether it is a chat

_ANY = ("any value",)
# Values without an effect on the answer, which clients send though they ask for nothing, by part and name. Null, and
# an empty text, list or object, has none either, unless its name is followed by an empty tuple.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "the body": {
        **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                         "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls"), _ANY),
        "n": (1,), "best_of": (1,), "stream": (False,), "stream_options": _ANY, "echo": (False,), "logprobs": (False,),
        "top_logprobs": (0,), "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
        "verbosity": ("medium",), "web_search_options": (),
        # of vLLM
        "ignore_eos": (False,), "length_penalty": (1,), "use_beam_search": (False,),
        "early_stopping": (False,), "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "priority": (0,),
        "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "return_prompt_text": (False,),
        "watermarking": (False,),
    },
    COMPLETIONS: {"add_special_tokens": (True,)},
    CHAT: {"add_special_tokens": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
           "include_reasoning": (True,)},
    "stream_options": {"include_obfuscation": _ANY, "include_usage": (False,), "continuous_usage_stats": (False,)},
    "a message": {"annotations": _ANY, "cache_control": _ANY, "prefix": (False,)},
    "a part of a message": {"annotations": _ANY, "cache_control": _ANY, "prompt_cache_breakpoint": _ANY},
}  # fmt: skip


class Refused(ZinferError):
    """Request that cannot be served: the reason, OpenAI's `code`, the parameter, and the status of HTTP.

    It may come again after `retry_s`.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, status: int = 400, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status, self.retry_s = code, param, status, retry_s

    @property
    def failure(self) -> Failure:
        return Failure(code=self.code, message=str(self), status=self.status, param=self.param)


class ServerLimits(NamedTuple):
    """Bounds of a server's requests: the model's vocabulary, and the maximum of answers to one request."""

    vocab_size: int
    answers: int


class Asked(NamedTuple):
    """Request of a body. `seed`, which `sampling` lacks, and `output_len` are None where it has none.

    `logprobs` is the number of alternatives with a log-probability, None without log-probabilities.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    output_len: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    seed: str | None
    model: str | None = None
    n: int = 1
    echo: bool = False
    logprobs: int | None = None
    stream: bool = False
    usage: bool = False  # a stream ends with the numbers of tokens
    usages: bool = False  # every event of a stream has those so far
    ignore_eos: bool = False

    @property
    def subject(self) -> str:
        return "messages" if self.chat else "prompt"

    def request(self, prompt_ids: Sequence[int], limit: int, seed: str | None = None, **fields: Any) -> Request:
        """Return the worker's request for one answer of at most `limit` tokens."""
        sampling = self.sampling.model_copy(update={"seed": seed or self.seed or "0"})
        return Request(
            prompt_ids, limit, sampling, self.stop, self.ignore_eos, chat=self.chat, stream=self.stream,
            logprobs=self.logprobs, echo=self.echo, **fields,
        )  # fmt: skip


def read_body(body: dict[str, Any], chat: bool, served: ServerLimits | None = None) -> Asked:
    """Return the request in a body, of a batch file unless `served`. Raises Refused."""
    subject = "messages" if chat else "prompt"
    carried_out = (
        {subject} | _USED | (_TEMPLATE if chat else frozenset()) | (_SERVED_OF[chat] if served else frozenset())
    )
    given = _effective(body, carried_out, "the body", CHAT if chat else COMPLETIONS)
    if subject not in given:
        raise Refused("missing_required_parameter", f"the body has no {subject}", subject)
    length = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    prompts = (_chat(given),) if chat else _prompts(given[subject], served)
    output_len = _whole(given, length, 0 if served and given.get("echo") is True else 1) if length in given else None
    sampling = read_sampling(given, None if served is None else served.vocab_size)
    if output_len is not None and sampling.min_tokens > output_len:
        raise Refused("invalid_value", f"min_tokens {sampling.min_tokens} exceeds {length}", "min_tokens")
    asked = Asked(
        chat=chat,
        prompts=prompts,
        output_len=output_len,
        sampling=sampling,
        stop=_stop(given.get("stop")),
        seed=str(_whole(given, "seed", None)) if "seed" in given else None,
    )
    return _for_server(asked, given, served) if served else asked


def _for_server(asked: Asked, given: dict[str, Any], served: ServerLimits) -> Asked:
    n = _whole(given, "n", 1) if "n" in given else 1
    if n * len(asked.prompts) > served.answers:
        param = "prompt" if len(asked.prompts) > 1 else "n"
        raise Refused("invalid_value", f"{param}: at most {served.answers:,} answers to one request", param)
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused("invalid_type", "model must be a text", "model")
    stream = _flag(given, "stream")
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("invalid_value", "stream_options must be an object", "stream_options")
    options = _effective(options, ("include_usage", "continuous_usage_stats"), "stream_options")
    if any(options.values()) and not stream:
        raise Refused("invalid_value", "stream_options goes with stream only", "stream_options")
    return asked._replace(
        model=model,
        n=n,
        echo=_flag(given, "echo"),
        logprobs=_logprobs(given, asked.chat),
        stream=stream,
        usage=_flag(options, "include_usage", "stream_options.include_usage"),
        usages=_flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats"),
        ignore_eos=_flag(given, "ignore_eos"),
    )


def _logprobs(given: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return None if given.get("logprobs", False) is False else _whole(given, "logprobs", 0, MAX_TOP)
    count = _whole(given, "top_logprobs", 0, MAX_TOP) if "top_logprobs" in given else 0
    if not _flag(given, "logprobs"):
        if count:
            raise Refused("invalid_value", "top_logprobs goes with logprobs only", "top_logprobs")
        return None
    return count


def served_name(model: str) -> str:
    """Return the name of a model in answers: the last part of its folder or hub id."""
    path = Path(model)
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


def answer_limit(asked: int | None, length: int, positions: int | None, output_len: int) -> int:
    """Return the maximum of tokens of an answer: `asked`, else `output_len`.

    Raises Refused where the model has not enough `positions` for it.
    """
    left = math.inf if positions is None else positions - length
    limit = int(min(output_len, max(1, left))) if asked is None else asked
    if limit > left:
        message = f"the prompt's {length} tokens and {limit} of the answer exceed the model's {positions} positions"
        raise Refused("context_length_exceeded", message)
    return limit


# Parameters


def _effective(fields: Mapping[str, Any], carried_out: Collection[str], *parts: str) -> dict[str, Any]:
    """Return the fields that are to be carried out. Raises Refused for any other whose value may have an effect."""
    effective = {key: value for key, value in fields.items() if key in carried_out and value is not None}
    neutral = {key: values for part in parts for key, values in _NEUTRAL[part].items()}
    for key, value in fields.items():
        if key in effective or _is_neutral(value, neutral.get(key)):
            continue
        shown = f"={json.dumps(value[:40] if isinstance(value, str) else value)[:40]}"
        name = key[:60] + (shown if isinstance(value, str | int | float) else "")
        if parts[0] == "the body":
            raise Refused("unsupported_parameter", f"{name} is not supported", key[:60])
        if parts[0] == "stream_options":
            raise Refused("unsupported_parameter", f"stream_options.{name} is not supported", parts[0])
        raise Refused("unsupported_parameter", f"{name} in {parts[0]} is not supported", "messages")
    return effective


def _is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """Tell whether a value has no effect; `neutral` are such values of its name."""
    if value is None or neutral is _ANY:
        return True
    if value in ("", [], {}):
        return neutral != ()
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral or ())


def _flag(body: dict[str, Any], key: str, name: str | None = None) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool | None):
        raise Refused("invalid_type", f"{name or key} must be true or false", name or key)
    return bool(value)


def _whole(body: Mapping[str, Any], key: str, low: int | None, high: int = MAX_COUNT) -> int:
    value = body[key]
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and not low <= value <= high):
        limits = f" from {low} to {high:,}" if low is not None else ""
        raise Refused("invalid_value", f"{key} must be a whole number{limits}", key)
    return value


def read_sampling(given: Mapping[str, Any], vocab_size: int | None = None) -> Sampling:
    """Return the sampling of a body's fields, at temperature 1 by default. Raises Refused."""
    fields: dict[str, Any] = {"temperature": 1.0}
    given = {name: value for name, value in given.items() if (name, value) != ("top_k", -1)}  # which takes all, too
    fields |= {name: _number(name, given[name], *limits) for name, limits in _NUMBERS.items() if name in given}
    fields |= {name: _whole(given, name, 0) for name in ("top_k", "min_tokens") if name in given}
    bias, ends = given.get("logit_bias") or {}, given.get("stop_token_ids") or []
    known = isinstance(bias, dict) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias)
    if not known or len({*map(int, bias)}) < len(bias) or len(bias) > MAX_BIASED:
        why = f"logit_bias must be an object of at most {MAX_BIASED:,} token ids with a number each"
        raise Refused("invalid_value", why, "logit_bias")
    if not isinstance(ends, list) or len(ends) > MAX_ENDS or not all(type(token) is int for token in ends):
        raise Refused("invalid_value", f"stop_token_ids must be a list of at most {MAX_ENDS} ids", "stop_token_ids")
    fields["logit_bias"] = tuple((int(key), _number("logit_bias", value, -100, 100)) for key, value in bias.items())
    sampling = Sampling(**fields, stop_token_ids=tuple(ends))
    check_tokens(sampling, MAX_COUNT if vocab_size is None else vocab_size)
    return sampling


def check_tokens(sampling: Sampling, vocab_size: int) -> None:
    """Raise Refused for a token of `sampling` that the model lacks."""
    if (unknown := sampling.unknown_token(vocab_size)) is not None:
        raise Refused("invalid_value", unknown, unknown.split()[0])


def _number(name: str, value: Any, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN is none
        raise Refused("invalid_value", f"{name} must be a number from {low:g} to {high:g}", name)
    return float(value)


def _prompts(prompt: Any, served: ServerLimits | None) -> tuple[Prompt, ...]:
    """Return the prompts of a server's request: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (_unicode(prompt, "prompt"),)
    if served is None:
        raise Refused("invalid_type", "prompt must be a single text; write one line for each prompt", "prompt")
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return tuple(_unicode(item, "prompt") for item in prompt)
        if all(isinstance(item, list) for item in prompt):
            return tuple(_ids(item, served) for item in prompt)
        return (_ids(prompt, served),)
    raise Refused("invalid_type", "prompt must be a text, a list of token ids, or a list of either", "prompt")


def _ids(ids: list[Any], served: ServerLimits) -> list[int]:
    if not ids or not all(type(token) is int for token in ids):
        raise Refused("invalid_type", "prompt must be a text, a list of token ids, or a list of either", "prompt")
    if min(ids) < 0 or max(ids) >= served.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise Refused("invalid_value", f"prompt has token {wrong}: ids are from 0 to {served.vocab_size - 1}", "prompt")
    return ids


def _unicode(text: str, param: str) -> str:
    """Return `text`, which JSON may have escaped. Raises Refused for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("invalid_value", f"{param} has half of a surrogate pair, which is no character", param) from None
    return text


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused("invalid_value", "stop must be a text or a list of texts, none of them empty", "stop")
    if len(texts) > MAX_STOPS or max(map(len, texts), default=0) > MAX_STOP:
        raise Refused("invalid_value", f"stop has at most {MAX_STOPS} texts of {MAX_STOP:,} characters", "stop")
    return tuple(_unicode(text, "stop") for text in texts)


def _chat(given: Mapping[str, Any]) -> Prompt:
    """Return the messages of a body, and settings of the template. Raises Refused."""
    messages, settings = _messages(given["messages"]), given.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise Refused("invalid_type", "chat_template_kwargs must be an object", "chat_template_kwargs")
    if (effort := given.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            raise Refused("invalid_value", f"reasoning_effort must be one of {', '.join(_EFFORTS)}", "reasoning_effort")
        settings = {"reasoning_effort": effort} | settings
    return {"messages": messages, "template": settings} if settings else messages


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise Refused("invalid_type", "messages must be a non-empty list", "messages")
    if len(messages) > MAX_MESSAGES:
        raise Refused(
            "invalid_value", f"messages: {len(messages):,} of them, and at most {MAX_MESSAGES:,} are taken", "messages"
        )
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("invalid_value", "a message must be an object with a role", "messages")
    given = _effective(message, ("role", "content", "name"), "a message")
    content = given.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused("unsupported_parameter", "a message's content must be text", "messages")
        _effective(part, ("type", "text"), "a part of a message")
        text += part["text"]
    checked: dict[str, Any] = {"role": _unicode(given["role"], "messages"), "content": _unicode(text, "messages")}
    if "name" in given:
        if not isinstance(given["name"], str):
            raise Refused("invalid_type", "name of a message must be a text", "messages")
        checked["name"] = _unicode(given["name"], "messages")
    return checked


# Answers


def completion_object(
    identity: str, created: int, model: str, chat: bool, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return the body of an answer; `usage` is a `usage_object`."""
    return {
        "id": identity,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def usage_object(tokens: tuple[int, int], cached: int | None = None) -> dict[str, Any]:
    """Return the numbers of tokens of prompts and answers, and `cached`."""
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return usage | ({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}})


def choice_object(
    index: int, chat: bool, text: str, finish_reason: str, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return one answer; `finish_reason` is ``stop`` or ``length``."""
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def error_object(
    message: str, code: str | None, param: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """Return the body of a refusal or a failure."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def text_logprobs(
    scores: Sequence[TokenScore], top: int, prompt: EchoedPrompt | None = None, offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of ``/v1/completions``. Those of an echoed prompt are included.

    The first token of a prompt has none. Text begins at `offset`.
    """
    every = [*(prompt.scores if prompt is not None else ()), *scores]
    tokens = [score.token for score in every]
    values: list[float | None] = [_finite(score.logprob) for score in every]
    tops: list[dict[str, float] | None] = [_top(score) for score in every]
    if prompt is not None:
        tokens, values, tops = [prompt.first, *tokens], [None, *values], [None, *tops]
    offsets = list(accumulate(map(characters, tokens), initial=offset))[:-1]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops if top else None, "text_offset": offsets}


def characters(token: str) -> int:
    """Return the length of a token's text; a part of a character counts 1."""
    return 1 if token.startswith(PART) else len(token)


def _top(score: TokenScore) -> dict[str, float]:
    """Return the log-probabilities of the alternatives and the token by text; of one text, the best."""
    by_text: dict[str, float] = {}
    for token, value in [*score.top, (score.token, score.logprob)]:
        by_text.setdefault(token, _finite(value))
    return by_text


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return log-probabilities as ``/v1/chat/completions`` has them."""

    def entry(token: str, logprob: float) -> dict[str, Any]:
        part = token.startswith(PART)  # of a character
        octets = bytes.fromhex(token.removeprefix(PART).replace("\\x", "")) if part else token.encode(errors="replace")
        return {"token": token, "logprob": _finite(logprob), "bytes": list(octets)}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(token, value) for token, value in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return max(MIN_LOGPROB, value)
