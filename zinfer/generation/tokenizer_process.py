"""Prompts to token ids, in a process with limits (`zinfer.generation.tokenizer_server`).

What one prompt does to that process is its own error: a child that it ends is replaced in milliseconds. Before anything
is computed a prompt is bounded: of more characters than the model's positions hold of the longest token it cannot fit.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple, Self

from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.tokenizer_files import ChatTemplate
from zinfer.core.model import ModelError, ModelSpec
from zinfer.generation import tokenizer_server
from zinfer.generation.tokenizer import NO_TOKENS
from zinfer.system import scratch
from zinfer.system.ending import at_end

QUICK_S = 0.5  # CPU time in which nearly all prompts are read
QUICK_CHARACTERS = 1 << 16  # characters that are read in it: 0.12 s with a vocabulary of 250,000 tokens
QUICK_PROMPTS = 32
# CPU time of a prompt, and more for each million of its characters, of which fast tokenizers read one a second.
PROMPT_S, MILLION_S = 5.0, 3.0
LOAD_S, LOAD_BYTES = 60.0, 4 << 30  # CPU time and memory of loading; 250,000 tokens take 4 s and 0.4 GB
REQUEST_BYTES = 1 << 30  # memory of a request
LOAD_WALL_S = 600.0  # time in which the tokenizer must be loaded on a busy machine
PATIENCE_S = 60.0  # time in which the process must begin, or be ended by the kernel
# The process gets these variables of the environment, and no secret.
_PASSED = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "XDG_STATE_HOME")
_SET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# This package comes last where modules are looked for, and the working folder, which may be a checkpoint's, not at all.
_MAIN = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
_MAIN += f"from {tokenizer_server.__name__} import main; main()"

Prompt = str | list[dict[str, Any]]  # a text, or the messages of a chat


class Refusal(NamedTuple):
    """Reason why a prompt has no token ids: OpenAI's error code, and one line."""

    code: str
    message: str


class EndToken(NamedTuple):
    """End token, its text, and the files that name it."""

    token: int
    text: str
    files: str


class Facts(NamedTuple):
    """Facts about a tokenizer: characters of its longest token, end tokens, first token, and whether it can chat."""

    longest: int
    ends: tuple[EndToken, ...]
    bos: int | None
    template: bool

    @property
    def differing_ends(self) -> str | None:
        """One line about the end tokens, if files name different ones."""
        if len({end.files for end in self.ends}) < 2:
            return None
        return "a text ends at " + " or ".join(f"{end.text or end.token} ({end.files})" for end in self.ends)


class TokenizerProcess:
    """Tokenizer and chat template of a checkpoint, in a process. For several threads.

    A prompt of more than twice `max_tokens` tokens is refused with its length. `template` comes from
    `tokenizer_files.chat_template`.
    """

    def __init__(self, spec: ModelSpec, template: ChatTemplate | None = None, max_tokens: int | None = None) -> None:
        directory = None if spec.directory is None else Path(spec.directory)
        self.max_tokens = max_tokens
        self.template = tokenizer_files.chat_template(directory) if template is None else template
        self._name, self._positions = spec.name, spec.max_position
        self._load = what_to_load(spec, self.template)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # to children that wait for a request
        self._facts: Facts | None = None
        self._fault: ModelError | None = None  # reason why the process could not load
        self._loading = self._closed = False
        self._start()

    @property
    def facts(self) -> Facts:
        """Facts about the tokenizer, once it is loaded. Raises ModelError if it cannot be loaded within the limits."""
        if self._facts is None:
            with self._lock:
                self._await()
        assert self._facts is not None
        return self._facts

    @property
    def cannot_chat(self) -> str | None:
        """Reason why messages are refused; None if there is a chat template. Raises ModelError as `facts` does."""
        return None if self.facts.template else self.template.why_not

    def encode(self, prompts: Sequence[Prompt], special: bool = True) -> list[list[int] | Refusal]:
        """Return the token ids of each prompt, or why it has none; `special` adds what begins and ends a text.

        Raises ModelError if the tokenizer cannot be loaded.
        """
        results: list[list[int] | Refusal] = []
        for part in parts(prompts):
            quick = self.encode_quickly(part, special) if len(part) > 1 else None
            results += [self.encode_alone(prompt, special) for prompt in part] if quick is None else quick
        return results

    def encode_quickly(self, prompts: Sequence[Prompt], special: bool = True) -> list[list[int] | Refusal] | None:
        """Do as `encode` for a few short prompts; return None if any of them needs longer than `QUICK_S`."""
        return self._encode(prompts, special, QUICK_S)

    def encode_alone(self, prompt: Prompt, special: bool = True) -> list[int] | Refusal:
        """Return the token ids of one prompt, or why it has none. It may take the time that its length permits."""
        seconds = PROMPT_S + MILLION_S * characters(prompt) / 1e6
        results = self._encode([prompt], special, seconds)
        if results is not None:
            return results[0]
        return Refusal("invalid_prompt", _exceeds("prompt" if isinstance(prompt, str) else "conversation", seconds))

    def continuation(self, before: list[int], added: str) -> list[int] | None:
        """Return the ids of a text that follows the tokens `before`; None unless both decode to both texts."""
        return self._ask("continuation", PROMPT_S, before=before, added=added).get("answer")

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a conversation by the chat template. Raises ModelError where that refuses it."""
        if (refusal := self._refused(messages)) is not None:
            raise ModelError(refusal.message)
        return str(self._answer("render", PROMPT_S, messages=messages))

    def encode_document(self, text: str) -> list[int]:
        """Return the token ids of a long text, without special ones. Raises ModelError."""
        seconds = PROMPT_S + MILLION_S * len(text) / 1e6
        (result,) = self._answer("encode", seconds, prompts=[text], special=False, max_tokens=None)
        if "why" in result:
            raise ModelError(result["why"])
        return list(result["ids"])

    def vocabulary(self) -> tuple[dict[str, int], list[int]]:
        """Return the id of each token, and the ids of special tokens. Raises ModelError."""
        tokens, special = self._answer("vocabulary", LOAD_S)
        return tokens, special

    def close(self) -> None:
        """End the process; calls under way get no answer. Safe to call twice."""
        self._closed = True
        self._end()
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _encode(self, prompts: Sequence[Prompt], special: bool, seconds: float) -> list[list[int] | Refusal] | None:
        refusals = [self._refused(prompt) for prompt in prompts]
        asked = [prompt for prompt, refusal in zip(prompts, refusals, strict=True) if refusal is None]
        if not asked:
            return [*filter(None, refusals)]
        answer = self._ask("encode", seconds, prompts=asked, special=special, max_tokens=self.max_tokens)
        if "answer" not in answer:
            return None
        results = map(self._result, answer["answer"])
        return [next(results) if refusal is None else refusal for refusal in refusals]

    def _result(self, answer: dict[str, Any]) -> list[int] | Refusal:
        if "why" in answer:
            return Refusal("invalid_prompt", answer["why"])
        if "length" in answer:
            why = f"the prompt has at least {answer['length']:,} tokens, which exceed {self.max_tokens:,} positions"
            return Refusal("context_length_exceeded", why)
        return answer["ids"] or Refusal("invalid_prompt", f"the prompt {NO_TOKENS}")

    def _refused(self, prompt: Prompt) -> Refusal | None:
        """Return why a prompt is not read at all: without a chat template, or with more characters than can fit."""
        if not isinstance(prompt, str) and (why_not := self.cannot_chat) is not None:
            return Refusal("invalid_prompt", why_not)
        limits = [limit for limit in (self.max_tokens, self._positions) if limit is not None]
        max_size = min(limits) * self.facts.longest if limits else tokenizer_server.MAX_TEXT
        if (size := characters(prompt)) <= max_size:
            return None
        why = f"a prompt of {size:,} characters: at most {max_size:,}"
        why += f", {min(limits):,} positions of the longest token" if limits else ""
        return Refusal("context_length_exceeded", why)

    def _answer(self, do: str, seconds: float, **request: Any) -> Any:
        answer = self._ask(do, seconds, **request)
        if "answer" not in answer:
            raise ModelError(answer.get("why", _exceeds("text", seconds)))
        return answer["answer"]

    def _ask(self, do: str, seconds: float, **request: Any) -> dict[str, Any]:
        """Return an `answer`, or `why` there is none; neither if the child did not survive the request. Raises
        ModelError if there is no process."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        answer: dict[str, Any] = {}
        with suppress(OSError, EOFError):
            connection.send_bytes(json.dumps({"do": do, "seconds": seconds, "request": request}).encode())
            answer = _received(connection, PATIENCE_S + tokenizer_server.wall_s(seconds))
        if answer:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _connect(self) -> Connection:
        """Return a connection to a new child.

        A process that has ended is started again. Raises ModelError if that cannot be.
        """
        for _ in range(2):
            with self._lock:
                self._await()
                ours, theirs = Pipe()
                with theirs, suppress(OSError):
                    send_handle(self._control, theirs.fileno(), None)  # the process id is for Windows
                with suppress(OSError, EOFError):
                    if _received(ours, PATIENCE_S):
                        return ours
                ours.close()
                if self._closed:
                    break
                self._restart()
        raise ModelError(f"the process that reads prompts of {self._name} cannot be started")

    def _await(self) -> None:
        """Wait until the tokenizer is loaded. Raises ModelError if it cannot be: for good, unless it once was."""
        if self._fault is not None and self._facts is not None:
            self._restart()
        if self._loading:
            self._loading = False
            try:
                self._facts = self._loaded()
            except ModelError as fault:
                self._fault = fault
        if self._fault is not None:
            raise self._fault

    def _restart(self) -> None:
        self._end()
        self._start()

    def _start(self) -> None:
        self._loading, self._fault = True, None
        self._control, theirs = Pipe()
        env = {name: os.environ[name] for name in _PASSED if name in os.environ} | _SET
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._control, at_end(self._process.kill))
        with suppress(OSError):
            self._control.send_bytes(json.dumps(self._load).encode())

    def _loaded(self) -> Facts:
        answer: dict[str, Any] = {}
        with suppress(OSError, EOFError):
            answer = _received(self._control, LOAD_WALL_S)
        if not answer:
            self._end()
            limits = f"{LOAD_S:.0f} s of CPU time or {LOAD_BYTES >> 30} GiB"
            name = self._load["directory"] or self._name
            raise ModelError(f"{name}: its tokenizer takes more than {limits} to load, or crashes the library")
        if "why" in answer:
            raise ModelError(answer["why"])
        return Facts(ends=tuple(EndToken(*end) for end in answer.pop("ends")), **answer)


def _end(process: "subprocess.Popen[bytes]", control: Connection, unregister: Callable[[], None]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    control.close()
    unregister()
    scratch.remove_abandoned()  # what it owned, if it was still loading


def _received(connection: Connection, seconds: float) -> dict[str, Any]:
    """Return the next message; an empty one if none comes in time. Raises EOFError and OSError."""
    message: dict[str, Any] = json.loads(connection.recv_bytes()) if connection.poll(seconds) else {}
    return message


def _exceeds(kind: str, seconds: float) -> str:
    return f"reading the {kind} takes more than {seconds:.0f} s of CPU time, or more memory than it may have"


def what_to_load(spec: ModelSpec, template: ChatTemplate) -> dict[str, Any]:
    """Return the first message to the process."""
    return {
        "directory": spec.directory, "template": template.text, "vocab_size": spec.vocab_size, "name": spec.name,
        "config": {"eos_token_id": spec.config.get("eos_token_id")},
        "load_s": LOAD_S, "load_bytes": LOAD_BYTES, "request_bytes": REQUEST_BYTES,
    }  # fmt: skip


def characters(prompt: Prompt) -> int:
    """Count the characters of a prompt, roles and tool calls included."""
    if isinstance(prompt, str):
        return len(prompt)
    values = (value for message in prompt for value in message.values())
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in values)


def parts(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Split prompts, in their order, into parts that are read quickly; a long one is alone."""
    result: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        size = characters(prompt)
        if not result or size > room or len(result[-1]) == QUICK_PROMPTS:
            result.append([])
            room = QUICK_CHARACTERS
        result[-1].append(prompt)
        room -= size
    return result
