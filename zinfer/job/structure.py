"""Structure of answers: grammars that requests ask for, tools, and answers taken apart.

Grammars are those of `zinfer.generation.grammar`. How a model writes its thoughts and calls of tools is seen from its
chat template: thoughts as ``<think>..</think>``, calls as JSON within ``<tool_call>`` (Hermes, Qwen), as JSON alone
(Llama 3), or both in channels (gpt-oss, https://github.com/openai/harmony).
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from zinfer.generation.grammar import THINK, thinks
from zinfer.generation.sequence import before_a_stop
from zinfer.generation.tokenizer_process import Facts
from zinfer.system.documents import parse_json

MAX_GRAMMAR = 1 << 16  # characters of a grammar, tools included
MAX_TOOLS = 128
_SPACE = r"( |\n {0,32})?"  # between tokens of JSON; without a bound a model may go on for ever
_JSON = {"whitespace_pattern": _SPACE}
_END = "</think>"
_TAG, _TAG_END, _CLOSED = "<tool_call>", "</tool_call>", re.compile(r"\s*</tool_call>")
_HEAD, _BODY, _CLOSE, _NEXT = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"  # of a message of harmony
_THOUGHT = "/(?s:.*)/"
_DECODER = json.JSONDecoder()


class Form(NamedTuple):
    """Form of a model's answers; `think` is the token that begins a thought."""

    calls: Literal["none", "tags", "json", "harmony"] = "none"
    thoughts: bool = False
    think: int | None = None


PLAIN = Form()


def form_of(facts: Facts) -> Form:
    """Return the form of answers by a tokenizer's chat template."""
    text = facts.template or ""
    if _HEAD in text and "<|start|>" in text:
        return Form("harmony", True)
    plain, thoughts = text.replace("\\", ""), _END in text
    if _TAG in text and '"arguments"' in plain and not re.search("<function[= ]|<arg_key>|<parameter[= ]", text):
        return Form("tags", thoughts, facts.think)
    return Form("json" if '"parameters": dictionary of argument name' in plain else "none", thoughts, facts.think)


# Grammars


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar of JSON by a schema."""
    return {"json_schema": {**schema, "x-guidance": _JSON}}


def lark(*rules: str) -> dict[str, Any]:
    """Return a grammar in llguidance's form of Lark."""
    return {"lark_grammar": "\n".join(rules)}


def asked(kind: str, value: Any) -> dict[str, Any]:
    """Return the grammar of a field of vLLM's `structured_outputs`. Raises an error for a wrong one."""
    if kind == "json":
        return json_schema({**(parse_json(value.encode(), kind) if isinstance(value, str) else value)})
    if kind == "json_object" and value is True:
        return json_schema({"type": "object"})
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return lark("start: " + " | ".join(map(json.dumps, value)))
    if kind == "regex":
        escapes = {"/": r"\/", "\n": r"\n"}
        escaped = re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), value, flags=re.S)
        return lark(f"start: /{escaped}/")
    if kind == "grammar":  # in Lark's form, or GBNF
        return {"ebnf": value.strip()}
    raise ValueError(kind)


def grammar(form: Form, answer: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Return the grammar of an `answer`, a call of `tools`, or either. A thought may precede it, and there may be
    `several` calls, where the form has any. `answer` or `tools` is there."""
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


Steps = Generator[None, None, None]  # they yield where they need more text
Taken = Generator[None, None, tuple[str, str]]


class Parser:
    """Take an answer to a prompt apart as it comes. Calls of others than `tools` are content. `calls` counts calls so
    far."""

    def __init__(self, form: Form, tools: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self.calls = 0
        self._form, self._tools, self._prompt_ids = form, tools, prompt_ids
        self._rest, self._ended = "", False  # text that is not taken yet
        self._new = Parsed()
        self._blank: str | None = ""  # what the next text does not begin with; None is any space
        self._steps = self._harmony() if form.calls == "harmony" else self._text()

    def add(self, text: str, ended: bool) -> Parsed:
        """Return the parts that `text` adds; if the answer has not `ended`, those that will not change."""
        self._rest += text
        self._ended, self._new = ended, Parsed()
        next(self._steps, None)
        return self._new

    def _text(self) -> Steps:
        if self._form.thoughts:
            while THINK.startswith(start := self._rest.lstrip()) and start != THINK and not self._ended:
                yield
            if start.startswith(THINK) or thinks(self._form.think, self._prompt_ids):
                self._rest, self._blank = start.removeprefix(THINK), "\n"
                blank, mark = yield from self._take("reasoning", _END, blank="\n")
                self._say("reasoning", "" if mark else blank)
                self._blank = "\n"
        if self._tools and self._form.calls == "tags":
            yield from self._tags()
        elif self._tools and self._form.calls == "json":
            yield from self._json()
        else:
            yield from self._take("content")

    def _tags(self) -> Steps:
        while True:
            blank, mark = yield from self._take("content", _TAG, blank=None)
            if not mark:
                self._say("content", "" if self.calls else blank)
                return
            seen, call = 0, None
            while call is None:  # tried where a tag closes, which may be within a string of it
                value, end = _value(self._rest) if _TAG_END in self._rest[seen:] else (None, 0)
                close = _CLOSED.match(self._rest, end)
                call = _call(value, "arguments", self._tools) if close else None
                seen = max(0, len(self._rest) - len(_TAG_END) + 1)
                if close and call:
                    self._add(call)
                    self._rest, self._blank = self._rest[close.end() :], None
                elif self._ended:
                    text = blank + _TAG + self._rest
                    self._say("content", text.rstrip() if self.calls else text)
                    return
                else:
                    yield

    def _json(self) -> Steps:
        while not self._ended and not self._rest.strip():
            yield
        text, _ = yield from self._take("" if self._rest.lstrip().startswith("{") else "content")
        value, end = _value(text)
        call = _call(value, "parameters", self._tools) or _call(value, "arguments", self._tools)
        if call is None or text[end:].strip(" \n;"):
            self._say("content", text)
        else:
            self._add(call)

    def _harmony(self) -> Steps:
        """Take messages. Each has a head with a channel, perhaps a recipient, and a body."""
        mark, said = _NEXT, set()
        while mark:
            head, mark = yield from self._take("", _BODY, _NEXT)
            channel, to = re.search(r"<\|channel\|>\s*(\w+)", head), re.search(r"to=functions\.([^\s<]+)", head)
            part = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            if mark != _BODY:
                self._say("content", "" if _HEAD in head else head)
            elif to is None:
                self._say(part, "\n" * (part in said))
                said.add(part)
                _, mark = yield from self._take(part, _CLOSE, _NEXT)
            else:
                body, mark = yield from self._take("", _CLOSE, _NEXT)
                call = _call({"name": to[1], "arguments": _value(body)[0]}, "arguments", self._tools)
                if call is None:
                    self._say(part, body)
                else:
                    self._add(call)
            if mark == _CLOSE:
                _, mark = yield from self._take("", _NEXT)

    def _take(self, part: str, *marks: str, blank: str | None = "") -> Taken:
        """Say text up to one of `marks` as `part`; "" holds it. Return what was not said, and the mark. `blank`
        characters at the end are not said."""
        held = ""
        while True:
            text = self._rest
            found = re.search("|".join(map(re.escape, marks)), text) if marks else None
            mark, over = found[0] if found else "", found or self._ended
            at = found.start() if found else len(text if over else before_a_stop(text, marks))
            self._rest, held = text[at + len(mark) :], held + text[:at]
            if part:
                said = held.rstrip(blank)
                held = held[len(said) :]
                self._say(part, said)
            if over:
                return held, mark
            yield

    def _say(self, part: str, text: str) -> None:
        if text := text.lstrip(self._blank):
            self._new = self._new._replace(**{part: getattr(self._new, part) + text})
            self._blank = ""

    def _add(self, call: Call) -> None:
        self._new = self._new._replace(calls=(*self._new.calls, call))
        self.calls += 1


def _value(text: str) -> tuple[Any, int]:
    """Return the JSON at the beginning of a text, and its end."""
    try:
        return _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None, 0


def _call(value: Any, key: str, tools: Sequence[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in tools or not isinstance(value.get(key), dict):
        return None
    return Call(value["name"], json.dumps(value[key], ensure_ascii=False))
