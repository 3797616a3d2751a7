"""Process that renders conversations and tokenises texts, within limits.

A tokenizer and a chat template are programs that came with a checkpoint: a regular expression may backtrack for hours,
a template make 10^12 characters. This process loads them, with limits on CPU time and memory. Then it forks a child for
each connection that `zinfer.generation.tokenizer_process` hands it on stdin; the child answers requests, each within
limits of its own, and can open no file. The kernel ends a child that exceeds them, and the next connection gets another
one at once.

It needs no torch, and `transformers` is kept from importing it.
"""

import gc
import inspect
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from zinfer.checkpoint import tokenizer_files
from zinfer.core.model import ModelError
from zinfer.generation import grammar
from zinfer.generation.tokenizer import check_library, decode, load_tokenizer, own_end

CHARACTER_BYTES = 256  # memory of a request for each of its characters (170 measured)
BEGINNING = 12  # characters for each position that tell whether a long text is far too long
MAX_TEXT = 64 << 20  # characters of a rendered conversation
# Names what transformers, jinja2 and Python import late: constants, the names of days, errors.
WARM_UP = "{{ '\\n\\u00e9' }}{{ strftime_now('%A %Y') }}{{ [1] | tojson }}{{ raise_exception('') }}"


@dataclass
class Checkpoint:
    """Tokenizer `hf` and chat template of a checkpoint; name, vocabulary and end tokens of its model."""

    hf: Any
    template: str | None
    vocab_size: int
    name: str
    ends: Sequence[int] = ()

    def encode(self, prompt: Any, special: bool, max_tokens: int | None) -> list[int] | int:
        """Return the ids of a prompt; their number if far above `max_tokens`. Raises ModelError. Also for the grammar
        of its answer."""
        limit = sys.maxsize if max_tokens is None else max_tokens
        if isinstance(prompt, dict):
            if prompt.get("grammar"):
                self._vocabulary.check(prompt["grammar"])
            prompt = prompt.get("prompt", prompt)
        if isinstance(prompt, list):
            return [*prompt]
        chat = not isinstance(prompt, str)
        text = self.render(prompt) if chat else _unicode(prompt)
        # Text that follows changes a few tokens at the end of a beginning, and never half of them.
        beginning = self._ids(text[: BEGINNING * limit], special=False) if len(text) > 2 * BEGINNING * limit else []
        if len(beginning) > 2 * limit:
            return len(beginning)
        ids = self._ids(text, special and not chat)
        return ids if len(ids) <= 2 * limit else len(ids)

    def render(self, given: dict[str, Any]) -> str:
        """Return the text of a conversation, up to where its answer begins. Raises ModelError."""
        messages, settings, tools = given["messages"], given.get("template") or {}, given.get("tools")
        known = set(re.findall(r"\w+", self.template or "")) - {"messages"}
        if tools and "tools" not in known:
            raise ModelError("the model's chat template has no tools")
        known -= inspect.signature(self.hf.apply_chat_template).parameters.keys()  # tools, tokenize, ..
        if unknown := [name for name in settings if name not in known]:
            raise ModelError(f"the model's chat template has no setting {unknown[0][:60]!r}")
        conversation = [
            {key: _unicode(value) if isinstance(value, str) else value for key, value in message.items()}
            for message in messages
        ]
        try:
            how = {"add_generation_prompt": True, "chat_template": self.template, "tools": tools, **settings}
            text = self.hf.apply_chat_template(conversation, tokenize=False, **how)
        except Exception as error:  # a template says no in whatever way its author chose
            raise ModelError(f"the model's chat template refuses the conversation: {error_line(error)}") from None
        if len(text) > MAX_TEXT:
            raise ModelError(f"the model's chat template makes {len(text):,} characters: at most {MAX_TEXT:,}")
        if _unicode(text) != text:
            raise ModelError("the model's chat template makes half of a surrogate pair, which is no character")
        return str(text)

    @cached_property
    def _vocabulary(self) -> grammar.Vocabulary:
        """Vocabulary for grammars, once one was asked for: it takes a second. Raises ModelError."""
        return grammar.Vocabulary(self.hf, self.vocab_size, self.ends)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            ids = list(self.hf(text, add_special_tokens=special).input_ids)
        except BaseException as error:
            check_library(error)
            raise ModelError(f"the tokenizer of {self.name} fails: {error_line(error)}") from None
        if ids and max(ids) >= self.vocab_size:
            foreign = f"the tokenizer gives token {max(ids):,}, and {self.name} has {self.vocab_size:,}"
            raise ModelError(f"{foreign}: they do not belong together")
        return ids


def _unicode(text: str) -> str:
    """Return `text` with a question mark for each lone surrogate: bytes of a command line, not UTF-8."""
    return text.encode(errors="replace").decode()


def error_line(error: BaseException) -> str:
    """Return the message of an exception as a line of characters."""
    return _unicode(" ".join(str(error).split())[:300]) or type(error).__name__


def load(wanted: dict[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the tokenizer, tried on a text, and the facts about it. Raises ModelError."""
    directory = None if wanted["directory"] is None else Path(wanted["directory"])
    hf: Any = load_tokenizer(directory)
    try:
        template = wanted["template"] or getattr(hf, "chat_template", None)
        template = template if isinstance(template, str) else None
        decode(hf, list(hf("a", add_special_tokens=True).input_ids), special=True)
        with suppress(Exception):
            hf.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, chat_template=WARM_UP)
        ends = tokenizer_files.end_tokens(directory, wanted["config"], own_end(hf), wanted["vocab_size"])
    except BaseException as error:
        check_library(error)
        raise ModelError(f"{directory}: its tokenizer cannot be used: {error_line(error)}") from None
    return Checkpoint(hf, template, wanted["vocab_size"], wanted["name"], ends), {
        "template": template,
        "bos": hf.bos_token_id,
        "ends": ends,
        "think": grammar.token_of(hf, grammar.THINK),
    }


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def wall_s(seconds: float) -> float:
    """Return the wall time of CPU `seconds` on a busy machine."""
    return 60 + 10 * seconds


def serve(connection: Connection, checkpoint: Checkpoint, memory: int) -> None:
    """Answer requests until the connection is closed; the kernel ends this process where one exceeds its limits. It may
    have no files, and `memory` more bytes."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
    _limit_memory(size)
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        resource.setrlimit(what, (0, 0))
    connection.send_bytes(b'{"ready": true}')
    while True:
        message = connection.recv_bytes()
        asked = json.loads(message)
        _limit_memory(size + len(message) * CHARACTER_BYTES)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        signal.setitimer(signal.ITIMER_REAL, wall_s(asked["seconds"]))
        try:
            answer: dict[str, Any] = {"answer": checkpoint.encode(**asked["request"])}
        except BaseException as error:
            check_library(error)
            answer = {"why": error_line(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(answer).encode())
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Load a checkpoint, and serve the connections that stdin brings."""
    control = Connection(0)
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds, and a tokenizer does without
    if grammar.available():  # children can open no file
        import_module("llguidance.hf")
        import_module("llguidance.gbnf_to_lark")
    wanted = json.loads(control.recv_bytes())
    _limit_memory(wanted["load_bytes"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, wanted["load_s"])
    try:
        checkpoint, facts = load(wanted)
    except BaseException as error:
        check_library(error)
        facts = {"why": error_line(error)}
    signal.setitimer(signal.ITIMER_PROF, 0)
    gc.freeze()  # the pages of children stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets a child that ended
    control.send_bytes(json.dumps(facts).encode())
    with suppress(EOFError):
        while "why" not in facts:
            with Connection(recv_handle(control)) as connection, suppress(OSError):
                if os.fork() == 0:
                    control.close()
                    try:
                        serve(connection, checkpoint, wanted["request_bytes"])
                    finally:
                        os._exit(0)
