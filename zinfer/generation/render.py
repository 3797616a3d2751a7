"""Rendering of a chat template in a process of its own, which `zinfer.generation.chat_template` starts.

A template is a program that came with a checkpoint. jinja2's sandbox keeps it from Python's objects, and not from loops
of 10^9 steps or texts of 10^12 characters: the process has limits on CPU time and memory, and can open no file.

Imports nothing of zinfer and no torch: it starts in a tenth of a second. The environment has what `transformers` gives
to templates: trimmed blocks, loop controls, the tag ``generation``, `raise_exception`, `strftime_now`, `tojson`, `dict`
and `namespace`.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 64 << 20  # characters of a rendered conversation


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text and changes nothing in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` as templates see it."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> Environment:
    """Return the environment of templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form), "dict": _Dict(),
        "namespace": Namespace,
    }  # fmt: skip
    del made.globals["lipsum"]
    return made


def warm_up(made: Environment) -> None:
    """Have Python and jinja2 import what they import late: modules for text constants, time zones and errors."""
    with suppress(TemplateError):
        made.from_string(
            "{{ '\\n\\u00e9' }}{{ strftime_now('%A %Y') }}{{ [1] | tojson }}{{ raise_exception('') }}"
        ).render()


def limit(memory: int) -> None:
    """Take the right to open files, and memory beyond `memory` bytes, from this process."""
    for what, size in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(what, (size, size))


def allow(seconds: int) -> None:
    """Have the kernel end this process after `seconds` more of CPU time, also where nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, resource.RLIM_INFINITY))


def serve(memory: int, seconds: int) -> None:
    """Answer lines of JSON until stdin ends: first the template and its variables, then conversations.

    ``{"template": .., "variables": {..}}``, then ``{"messages": [..]}`` to ``{"text": ..}`` or ``{"error": ..}``.
    """
    first = json.loads(sys.stdin.readline())
    made, template = environment(), None
    warm_up(made)
    limit(memory)
    for line in sys.stdin:
        allow(seconds)
        try:
            if template is None:
                template = made.from_string(first["template"])
            answer = {"text": _rendered(template, json.loads(line)["messages"], first["variables"])}
        except Exception as error:  # a template may raise anything
            answer = {"error": " ".join(f"{error}".split())[:300] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _rendered(template: Template, messages: Any, variables: dict[str, Any]) -> str:
    text = template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables)
    if len(text) > MAX_TEXT:
        raise TemplateError(f"it makes {len(text):,} characters")
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of stdin ends it
    serve(int(sys.argv[1]), int(sys.argv[2]))
