"""Completion requests and answers of OpenAI's API, ``/v1/completions`` and ``/v1/chat/completions``.

The one place that checks a request's body, for batch files and for the server, and that makes the body of an answer.

A body is refused unless every parameter is carried out, or has a value without an effect on the answer; so are its
messages and their parts. Sources: OpenAI's API reference, and the parameters that vLLM's server adds to it.
"""

import json
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.core.case import MAX_COUNT
from zinfer.core.errors import ZinferError
from zinfer.core.request import EchoedPrompt, Failure, Request, Sampling, TokenScore
from zinfer.generation import grammar
from zinfer.job import structure
from zinfer.job.structure import Form, Parsed, Parser
from zinfer.system.documents import DocumentError, parse_json

MAX_STOPS, MAX_STOP = 16, 1000  # texts that end an answer, and characters of one
MAX_MESSAGES = 10_000  # of a chat
MAX_BIASED, MAX_ENDS = 1024, 128  # tokens with a bias, and those that end an answer
MAX_TOP = 20  # alternatives with a log-probability
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have
PART = "bytes:\\x"  # beginning of the text of a token that is part of a character (`Tokenizer.text_of`)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Prompt = str | list[int] | dict[str, Any]  # one of `zinfer.generation.tokenizer_process`, or token ids

_NUMBERS: dict[str, tuple[float, float]] = {  # of the sampling, with the least and the most
    "temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
}  # fmt: skip
_USED = frozenset({"max_tokens", "max_completion_tokens", "stop", "seed", "model", *_NUMBERS})
_USED |= {"top_k", "logit_bias", "stop_token_ids", "min_tokens", "response_format", "structured_outputs"}
# Parameters that the server carries out, and a batch file does not.
_SERVED = frozenset({"n", "stream", "logprobs", "ignore_eos", "stream_options"})
# Parameters of chats.
_TEMPLATE = frozenset({"chat_template_kwargs", "reasoning_effort", "tools", "tool_choice"})
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_SERVED_OF = {True: _SERVED | {"top_logprobs"}, False: _SERVED | {"echo"}}  # by whether it is a chat

_ANY = ("any value",)
# Values without an effect on the answer, which clients send though they ask for nothing, by part and name. Null, and
# an empty text, list or object, has none either, unless its name is followed by an empty tuple.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "the body": {
        **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                         "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls"), _ANY),
        **dict.fromkeys(("stream", "echo", "logprobs", "ignore_eos", "use_beam_search", "early_stopping",
                         "include_stop_str_in_output", "return_tokens_as_token_ids", "return_token_ids",
                         "return_prompt_text", "watermarking"), (False,)),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
        **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)), **dict.fromkeys(("top_logprobs", "priority"), (0,)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        "stream_options": _ANY, "modalities": (["text"],), "verbosity": ("medium",), "web_search_options": (),
    },
    COMPLETIONS: {"add_special_tokens": (True,)},
    CHAT: {"add_special_tokens": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
           "include_reasoning": (True,)},
    "stream_options": {"include_obfuscation": _ANY, "include_usage": (False,), "continuous_usage_stats": (False,)},
    "a message": {"annotations": _ANY, "cache_control": _ANY, "prefix": (False,)},
    "a part of a message": {"annotations": _ANY, "cache_control": _ANY, "prompt_cache_breakpoint": _ANY},
}  # fmt: skip


class Refused(ZinferError):
    """Request that cannot be served: the reason, OpenAI's `code`, the parameter, and the status of HTTP. It may come
    again after `retry_s`."""

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


class Tools(NamedTuple):
    """Tools of a request: as the template gets them, names that may be called, whether one must be, and several."""

    given: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    required: bool = False
    several: bool = True


NO_TOOLS = Tools()


class Asked(NamedTuple):
    """Request of a body. `seed`, which `sampling` lacks, and `output_len` are None where it has none. `logprobs` is the
    number of alternatives with a log-probability, None without log-probabilities."""

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
    tools: tuple[str, ...] = ()  # names of tools that an answer may call
    form: Form = Form()

    @property
    def subject(self) -> str:
        return "messages" if self.chat else "prompt"

    def request(self, prompt_ids: Sequence[int], limit: int, seed: str | None = None, **fields: Any) -> Request:
        """Return the worker's request for one answer of at most `limit` tokens."""
        sampling = self.sampling.model_copy(update={"seed": seed or self.seed or "0"})
        return Request(
            prompt_ids, limit, sampling, self.stop, self.ignore_eos, chat=self.chat, stream=self.stream,
            logprobs=self.logprobs, echo=self.echo, special=self.chat and self.form.calls == "harmony", **fields,
        )  # fmt: skip

    def parser(self, prompt_ids: Sequence[int]) -> Parser:
        """Return what takes an answer to a prompt apart."""
        return Parser(self.form if self.chat else structure.PLAIN, self.tools, prompt_ids)


def read_body(
    body: dict[str, Any], chat: bool, served: ServerLimits | None = None, form: Form = structure.PLAIN
) -> Asked:
    """Return the request in a body, of a batch file unless `served`; `form` is the model's. Raises Refused."""
    subject = "messages" if chat else "prompt"
    carried_out = {subject, *_USED, *(_TEMPLATE if chat else ()), *(_SERVED_OF[chat] if served else ())}
    given = _effective(body, carried_out, "the body", CHAT if chat else COMPLETIONS)
    if subject not in given:
        raise Refused("missing_required_parameter", f"the body has no {subject}", subject)
    length = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    tools = _tools(given, body, form)
    prompts: tuple[Prompt, ...] = (_chat(given, tools),) if chat else _prompts(given[subject], served)
    output_len = _whole(given, length, 0 if served and given.get("echo") is True else 1) if length in given else None
    sampling = _sampling(given, None if served is None else served.vocab_size)
    if output_len is not None and sampling.min_tokens > output_len:
        raise Refused("invalid_value", f"min_tokens {sampling.min_tokens} exceeds {length}", "min_tokens")
    if text := _grammar(given, form if chat else structure.PLAIN, tools):  # it is tried with its prompt
        prompts = tuple((it if isinstance(it, dict) else {"prompt": it}) | {"grammar": text} for it in prompts)
    for name in ("min_tokens", "ignore_eos"):
        if text and given.get(name):
            raise Refused("invalid_value", f"{name} does not go with a grammar of the answer", name)
    n, model = _whole(given, "n", 1) if "n" in given else 1, given.get("model")
    if served and n * len(prompts) > served.answers:
        param = "prompt" if len(prompts) > 1 else "n"
        raise Refused("invalid_value", f"{param}: at most {served.answers:,} answers to one request", param)
    if served and model is not None and not isinstance(model, str):
        raise Refused("invalid_type", "model must be a text", "model")
    stream = _flag(given, "stream")
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("invalid_value", "stream_options must be an object", "stream_options")
    options = _effective(options, ("include_usage", "continuous_usage_stats"), "stream_options")
    if any(options.values()) and not stream:
        raise Refused("invalid_value", "stream_options goes with stream only", "stream_options")
    return Asked(
        chat=chat,
        prompts=prompts,
        output_len=output_len,
        sampling=sampling.model_copy(update={"grammar": text}),
        stop=_stop(given.get("stop")),
        seed=str(_whole(given, "seed", None)) if "seed" in given else None,
        model=model,
        n=n,
        echo=_flag(given, "echo"),
        logprobs=_logprobs(given, chat),
        stream=stream,
        usage=_flag(options, "include_usage", "stream_options.include_usage"),
        usages=_flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats"),
        ignore_eos=_flag(given, "ignore_eos"),
        tools=tools.names,
        form=form,
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
    """Return the maximum of tokens of an answer: `asked`, else `output_len`. Raises Refused where the model has not
    enough `positions` for it."""
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


def _sampling(given: Mapping[str, Any], vocab_size: int | None) -> Sampling:
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
    if served is None and not isinstance(prompt, str):
        raise Refused("invalid_type", "prompt must be a single text; write one line for each prompt", "prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return tuple(
        _unicode(item, "prompt") if isinstance(item, str) else _ids(item, served)
        for item in (prompt if several else [prompt])
    )


def _ids(ids: Any, served: ServerLimits | None) -> list[int]:
    if served is None or not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise Refused("invalid_type", "prompt must be a text, a list of token ids, or a list of either", "prompt")
    if wrong := [token for token in (min(ids), max(ids)) if not 0 <= token < served.vocab_size]:
        why = f"prompt has token {wrong[0]}: ids are from 0 to {served.vocab_size - 1}"
        raise Refused("invalid_value", why, "prompt")
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


# Structure


def _grammar(given: Mapping[str, Any], form: Form, tools: Tools) -> str:
    """Return the grammar that a body's fields ask for, "" without any. Raises Refused."""
    answers = [*_response_format(given.get("response_format")), *_structured(given.get("structured_outputs"))]
    if not answers and not tools.required:
        return ""
    named = "structured_outputs" if "structured_outputs" in given else "response_format"
    param = named if answers else "tool_choice"
    if len(answers) + tools.required > 1:
        raise Refused("invalid_value", "only one of response_format, structured_outputs and a required tool", param)
    if not grammar.available():
        raise Refused("unsupported_parameter", f"{param} {grammar.MISSING}", param)
    functions = [tool["function"] for tool in tools.given if tool["function"]["name"] in tools.names]
    text = structure.grammar(form, answers[0] if answers else None, functions, tools.several)
    if len(text) > structure.MAX_GRAMMAR:
        raise Refused("invalid_value", f"{param} has more than {structure.MAX_GRAMMAR:,} characters", param)
    return text


def _response_format(asked: Any) -> list[dict[str, Any]]:
    kind = asked.get("type") if isinstance(asked, dict) else asked
    if kind in (None, "text"):
        return []
    if kind == "json_object":
        return [structure.asked("json_object", True)]
    holder = asked.get("json_schema") if kind == "json_schema" else None
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        why = "response_format must have the type text, json_object, or json_schema with a schema in json_schema"
        raise Refused("invalid_value", why, "response_format")
    return [structure.json_schema(holder["schema"])]


def _structured(asked: Any) -> list[dict[str, Any]]:
    """Return the grammars of vLLM's `structured_outputs`."""
    given = {name: value for name, value in asked.items() if value is not None} if isinstance(asked, dict) else asked
    if not given:
        return []
    try:
        (field,) = given.items()
        return [structure.asked(*field)]
    except (AttributeError, KeyError, TypeError, ValueError, DocumentError):
        why = "structured_outputs must be an object with one of json, json_object, regex, choice and grammar"
        raise Refused("invalid_value", why, "structured_outputs") from None


def _tools(given: Mapping[str, Any], body: Mapping[str, Any], form: Form) -> Tools:
    """Return the tools of a body. Raises Refused."""
    tools, wanted = given.get("tools") or [], given.get("tool_choice", "auto")
    named = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(tools, list) or len(tools) > structure.MAX_TOOLS or not all(map(_is_tool, tools)):
        why = f"tools must be a list of at most {structure.MAX_TOOLS} functions, each with a name and parameters"
        raise Refused("invalid_value", why, "tools")
    if name is None and wanted not in ("none", "auto", "required"):
        why = "tool_choice must be none, auto, required, or a function's type and name"
        raise Refused("invalid_value", why, "tool_choice")
    every = [tool["function"]["name"] for tool in tools]
    names = tuple(each for each in every if name in (None, each))
    if not names and (name is not None or wanted == "required"):
        raise Refused("invalid_value", f"tool_choice: there is no tool {str(name or '')[:64]!r}", "tool_choice")
    if not tools or wanted == "none":
        return NO_TOOLS
    if form.calls == "none":
        why = "tools: the model's chat template has no form of calls that is known"
        raise Refused("unsupported_parameter", why, "tools")
    several = body.get("parallel_tool_calls") is not False and name is None
    functions = [{key: value for key, value in tool["function"].items() if value is not None} for tool in tools]
    for_template = tuple({"type": "function", "function": _FUNCTION | function} for function in functions)
    return Tools(for_template, names, name is not None or wanted == "required", several)


# Fields that templates want, and clients leave out.
_FUNCTION: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("parameters") or {}, dict):
        return False
    name = function.get("name")
    return isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII) is not None


def _chat(given: Mapping[str, Any], tools: Tools) -> Prompt:
    """Return the messages of a body, settings of the template, and tools. Raises Refused."""
    messages, settings = _messages(given["messages"]), given.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise Refused("invalid_type", "chat_template_kwargs must be an object", "chat_template_kwargs")
    if (effort := given.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            raise Refused("invalid_value", f"reasoning_effort must be one of {', '.join(_EFFORTS)}", "reasoning_effort")
        settings = {"reasoning_effort": effort} | settings
    more = ({"template": settings} if settings else {}) | ({"tools": list(tools.given)} if tools.given else {})
    return {"messages": messages, **more}


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise Refused("invalid_type", "messages must be a non-empty list", "messages")
    if len(messages) > MAX_MESSAGES:
        why = f"messages: {len(messages):,} of them, and at most {MAX_MESSAGES:,} are taken"
        raise Refused("invalid_value", why, "messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("invalid_value", "a message must be an object with a role", "messages")
    given = _effective(message, _MESSAGE, "a message")
    if not isinstance(calls := given.get("tool_calls", []), list):
        raise Refused("invalid_type", "tool_calls of a message must be a list", "messages")
    calls = [_call(call) for call in calls]
    content = given.get("content", "" if calls else None)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused("unsupported_parameter", "a message's content must be text", "messages")
        _effective(part, ("type", "text"), "a part of a message")
        text += part["text"]
    checked: dict[str, Any] = {"role": _unicode(given["role"], "messages"), "content": _unicode(text, "messages")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name, "") != "":
            if not isinstance(given[name], str):
                raise Refused("invalid_type", f"{name} of a message must be a text", "messages")
            checked[name] = _unicode(given[name], "messages")
    return checked | ({"tool_calls": calls} if calls else {})


def _call(call: Any) -> dict[str, Any]:
    """Return a call of an earlier answer, its arguments as an object: so templates want them."""
    try:
        name, arguments = call["function"]["name"], parse_json(call["function"]["arguments"].encode(), "arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError, DocumentError):
        why = "a tool call of a message must have a function with a name, and an object as JSON in arguments"
        raise Refused("invalid_value", why, "messages") from None
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


# Answers


def completion_object(
    identity: str, created: int, model: str, chat: bool, choices: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Return the body of an answer; `more` may have its `usage` and another `object`."""
    kind = "chat.completion" if chat else "text_completion"
    return {"id": identity, "object": kind, "created": created, "model": model, "choices": choices, **more}


def usage_object(tokens: tuple[int, int], cached: int | None = None) -> dict[str, Any]:
    """Return the numbers of tokens of prompts and answers, and `cached`."""
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return usage | ({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}})


def choice_object(
    index: int, chat: bool, answer: Parsed, finish_reason: str, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return one answer; `finish_reason` is ``stop`` or ``length``."""
    message = {"role": "assistant", "content": answer.content or (None if answer.calls else ""), **_more(answer)}
    content = {"message": message} if chat else {"text": answer.content}
    return {
        "index": index, **content, "logprobs": logprobs,
        "finish_reason": finish_of(finish_reason, len(answer.calls)),
    }  # fmt: skip


def finish_of(finish_reason: str, calls: int) -> str:
    """Return the reason why an answer with `calls` ended."""
    return "tool_calls" if calls and finish_reason == "stop" else finish_reason


def delta_object(new: Parsed, calls: int) -> dict[str, Any]:
    """Return the new part of a streamed message. The answer has `calls` so far, each of which is one delta, whole."""
    content = {"content": new.content} if new.content else {}
    return content | _more(new, calls - len(new.calls))


def _more(answer: Parsed, first: int = 0) -> dict[str, Any]:
    """Return reasoning and calls of a message, numbered from `first`."""
    calls = [
        {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()}
        for number, call in enumerate(answer.calls, first)
    ]
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return reasoning | ({"tool_calls": calls} if calls else {})


def error_object(failure: Failure) -> dict[str, Any]:
    """Return the body of a refusal or a failure."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(failure.status, "invalid_request_error" if failure.status < 500 else "server_error")
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code or None}}


def text_logprobs(
    scores: Sequence[TokenScore], top: int, prompt: EchoedPrompt | None = None, offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of ``/v1/completions``. Those of an echoed prompt are included. The first
    token of a prompt has none. Text begins at `offset`."""
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
