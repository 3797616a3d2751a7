"""Structure of answers: grammars that requests ask for, tools, and answers taken apart.

Grammars are those of `zinfer.generation.grammar`. How a model writes its thoughts and calls of tools is seen from its
chat template: thoughts as ``<think>..</think>``, calls as JSON within ``<tool_call>`` (Hermes, Qwen), as JSON alone
(Llama 3), or both in channels (gpt-oss, https://github.com/openai/harmony).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from zinfer.generation.detokenizer import before_a_stop
from zinfer.generation.grammar import THINK, thinks

MAX_GRAMMAR = 1 << 16  # characters of a grammar, tools included
MAX_TOOLS = 128
_SPACE = r"( |\n {0,32})?"  # between tokens of JSON; without a bound a model may go on for ever
_JSON = {"whitespace_pattern": _SPACE}
_END = "</think>"
_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_HEAD, _BODY, _NEXT = "<|channel|>", "<|message|>", "<|start|>assistant"  # of a message of harmony
_THOUGHT = "/(?s:.*)/"
_DECODER = json.JSONDecoder()


class Form(NamedTuple):
    """Form of a model's answers; `think` is the token that begins a thought."""

    calls: Literal["none", "tags", "json", "harmony"] = "none"
    thoughts: bool = False
    think: int | None = None


PLAIN = Form()


def form_of(template: str | None, think: int | None) -> Form:
    """Return the form of answers by a chat template."""
    text = template or ""
    if _HEAD in text and "<|start|>" in text:
        return Form("harmony", True)
    calls: Literal["none", "tags", "json"] = "none"
    plain = text.replace("\\", "")
    if _TAG in text and '"arguments"' in plain and not re.search("<function[= ]|<arg_key>|<parameter[= ]", text):
        calls = "tags"
    elif '"parameters": dictionary of argument name' in plain:
        calls = "json"
    return Form(calls, _END in text, think)


# Grammars


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar of JSON by a schema."""
    return {"json_schema": {**schema, "x-guidance": _JSON}}


def lark(*rules: str) -> dict[str, Any]:
    """Return a grammar in llguidance's form of Lark."""
    return {"lark_grammar": "\n".join(rules)}


def choice(texts: Iterable[str]) -> dict[str, Any]:
    """Return the grammar of one of some texts."""
    return lark("start: " + " | ".join(map(json.dumps, texts)))


def regex(pattern: str) -> dict[str, Any]:
    """Return the grammar of a regular expression."""
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern, flags=re.S)
    return lark(f"start: /{escaped}/")


def ebnf(text: str) -> dict[str, Any]:
    """Return the grammar of a text in Lark's form or GBNF."""
    return {"ebnf": text.strip()}


def grammar(form: Form, answer: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Return the grammar of an `answer`, a call of `tools`, or either.

    A thought may precede it, and there may be `several` calls, where the form has any. `answer` or `tools` is there.
    """
    named = {} if answer is None else {"answer": answer}
    calls, rules = [], list[str]()
    for number, tool in enumerate(tools):
        name, schema = json.dumps(tool["name"]), tool.get("parameters") or {"type": "object"}
        named[f"f{number}"] = json_schema(schema)
        calls.append(f"c{number}")
        if form.calls == "harmony":
            head = json.dumps(f"commentary to=functions.{tool['name']} ")
            rules.append(f'c{number}: <|channel|> {head} <|constrain|> "json" <|message|> @f{number}')
        else:
            key = "parameters" if form.calls == "json" else "arguments"
            begin, end = (json.dumps(text) for text in ('{"name": ' + name + f', "{key}": ', "}"))
            tags = ('<tool_call> "\\n" ', ' "\\n" </tool_call>') if form.calls == "tags" else ("", "")
            rules.append(f"c{number}: {tags[0]}{begin} @f{number} {end}{tags[1]}")
    texts = []
    if answer is not None:
        texts.append('<|channel|> "final" <|message|> @answer' if form.calls == "harmony" else "@answer")
    if calls:
        rules.append("call: " + " | ".join(calls))
        texts.append('call ("\\n" call)*' if several and form.calls == "tags" else "call")
    thoughts = form.thoughts and form.think is not None
    if texts == ["@answer"] and not thoughts:
        return json.dumps({"grammars": [answer]})
    rules.append("text: " + " | ".join(texts))
    begun = None
    if form.calls == "harmony":
        first = lark(
            "start: thought? text",
            f'thought: <|channel|> "analysis" <|message|> {_THOUGHT} <|end|> <|start|> "assistant"',
            *rules,
        )
    elif thoughts:
        rules += [f"rest: {_THOUGHT} {_END}", r"space: /\n{0,2}/"]
        first, begun = lark(f"start: ({THINK} rest space)? text", *rules), lark("start: rest space text", *rules)
    else:
        first = lark("start: text", *rules)
    grammars = [first, *({"name": name, **grammar} for name, grammar in named.items())]
    return json.dumps({"grammars": grammars} | ({} if begun is None else {"begun": begun}))


# Answers


class Call(NamedTuple):
    """Call of a tool: its name, and its arguments as JSON."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """Parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()

    def since(self, before: "Parsed") -> "Parsed":
        """Return what came after `before`, which is a beginning of this."""
        lengths = len(before.reasoning), len(before.content), len(before.calls)
        return Parsed(*(part[length:] for part, length in zip(self, lengths, strict=True)))  # type: ignore[arg-type]


NOTHING = Parsed()


def parse(text: str, form: Form, tools: Sequence[str], prompt_ids: Sequence[int], ended: bool) -> Parsed:
    """Take an answer apart. Of one that has not `ended` the parts are those that will not change.

    Calls of others than `tools` are content.
    """
    if form.calls == "harmony":
        return _of_channels(text, tools, ended)
    reasoning = ""
    if form.thoughts:
        begun = thinks(form.think, prompt_ids)
        start = text.lstrip()
        if not ended and not begun and len(start) < len(THINK) and THINK.startswith(start):
            return NOTHING
        if begun or start.startswith(THINK):
            reasoning, found, text = start.removeprefix(THINK).partition(_END)
            reasoning = reasoning.strip("\n") if found else _settled(reasoning.lstrip("\n"), ended, _END)
            text = text.lstrip("\n")
    if not tools or form.calls == "none":
        return Parsed(reasoning, text)
    content, calls = (_of_tags if form.calls == "tags" else _of_json)(text, tools, ended)
    return Parsed(reasoning, content, calls)


def _settled(text: str, ended: bool, *marks: str) -> str:
    """Return `text` without an end that may become another thing: space, or one of `marks`."""
    return text if ended else before_a_stop(text, marks).rstrip()


def _of_tags(text: str, tools: Sequence[str], ended: bool) -> tuple[str, tuple[Call, ...]]:
    calls, end, content = list[Call](), 0, ""
    while (start := text.find(_TAG, end)) >= 0:
        value, behind = _value(text, start + len(_TAG))
        call = _call(value, "arguments", tools)
        close = re.compile(rf"\s*{_TAG_END}").match(text, behind)
        if call is None or close is None:
            break
        content += text[end:start].strip() if calls else text[end:start]
        calls.append(call)
        end = close.end()
    rest = text[end:]
    if not ended:
        rest = _settled(rest.partition(_TAG)[0], ended, _TAG)
    content += rest.lstrip() if calls else rest
    return content.rstrip() if calls else content, tuple(calls)


def _of_json(text: str, tools: Sequence[str], ended: bool) -> tuple[str, tuple[Call, ...]]:
    if not text.lstrip().startswith("{"):
        return text if ended else text.rstrip(), ()
    value, end = _value(text, 0) if ended else (None, 0)
    call = _call(value, "parameters", tools) or _call(value, "arguments", tools)
    if call is None or text[end:].strip(" \n;"):
        return (text if ended else ""), ()
    return "", (call,)


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON at `start` or None, and the position behind it."""
    try:
        return _DECODER.raw_decode(text, start + len(text[start:]) - len(text[start:].lstrip()))
    except (ValueError, RecursionError):
        return None, start


def _call(value: Any, key: str, tools: Sequence[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in tools or not isinstance(value.get(key), dict):
        return None
    return Call(value["name"], json.dumps(value[key], ensure_ascii=False))


def _of_channels(text: str, tools: Sequence[str], ended: bool) -> Parsed:
    """Take an answer of harmony apart: messages, each a head with a channel and perhaps a recipient, and a body."""
    parsed = NOTHING
    parts = text.split(_NEXT)
    for number, part in enumerate(parts):
        whole = ended or number + 1 < len(parts)
        head, found, body = part.partition(_BODY)
        if not found:
            if ended and _HEAD not in part:
                parsed = parsed._replace(content=parsed.content + part)
            continue
        body, closed, _ = body.partition("<|end|>")
        channel, to = re.search(r"<\|channel\|>\s*(\w+)", head), re.search(r"to=functions\.([^\s<]+)", head)
        body = body if closed or whole else _settled(body, whole, "<|end|>", _NEXT)
        if channel is not None and channel[1] == "analysis":
            parsed = parsed._replace(reasoning=parsed.reasoning + "\n" * bool(parsed.reasoning) + body)
        elif to is None:
            parsed = parsed._replace(content=parsed.content + "\n" * bool(parsed.content) + body)
        elif whole:
            value, _ = _value(body, 0)
            call = _call({"name": to[1], "arguments": value}, "arguments", tools)
            parsed = parsed._replace(calls=(*parsed.calls, call)) if call else parsed._replace(
                content=parsed.content + body
            )  # fmt: skip
    return parsed
