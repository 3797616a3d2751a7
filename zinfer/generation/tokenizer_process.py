"""Prompts to token ids, in a process with limits (`zinfer.generation.tokenizer_server`).

What one prompt does to that process is its own error: a child that it ends is replaced in milliseconds. Before anything
is computed a prompt is bounded: of more characters than the model's positions hold of the longest token it cannot fit.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.tokenizer_files import ChatTemplate
from zinfer.core.model import ModelError, ModelSpec
from zinfer.generation import tokenizer_server
from zinfer.generation.tokenizer import NO_TOKENS
from zinfer.system import lease
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
    """A token that ends a text, its own text, and the files that name it."""

    token: int
    text: str
    files: str


class Facts(NamedTuple):
    """Facts about a tokenizer: the characters of its longest token, the tokens that end a text, the token that begins
    one, and whether it has a chat template."""

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
    """Tokenizer and chat template of a checkpoint, in a process that starts with the object. For several threads.

    Of a prompt of more than twice `most` tokens only the number is told. `template` comes from
    `tokenizer_files.chat_template`.
    """

    def __init__(self, spec: ModelSpec, template: ChatTemplate | None = None, most: int | None = None) -> None:
        directory = None if spec.directory is None else Path(spec.directory)
        self.most = most
        self.template = tokenizer_files.chat_template(directory) if template is None else template
        self._name, self._positions = spec.name, spec.max_position
        self._wanted = what_to_load(spec, self.template)
        self._starting, self._idling = threading.Lock(), threading.Lock()
        self._idle: list[socket.socket] = []  # connections that wait for a request
        self._facts: Facts | None = None
        self._fault: ModelError | None = None  # reason why the process could not load
        self._loading = self._closed = False
        self._start()

    @property
    def facts(self) -> Facts:
        """Facts about the tokenizer, once it is loaded. Raises ModelError if it cannot be loaded within the limits."""
        if self._facts is None:
            with self._starting:
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
        found: list[list[int] | Refusal] = []
        for part in parts(prompts):
            some = self.encode_quickly(part, special) if len(part) > 1 else None
            found += [self.encode_alone(prompt, special) for prompt in part] if some is None else some
        return found

    def encode_quickly(self, prompts: Sequence[Prompt], special: bool = True) -> list[list[int] | Refusal] | None:
        """Return what `encode` does of a few short prompts; None if any of them needs longer than `QUICK_S`."""
        return self._encode(prompts, special, QUICK_S)

    def encode_alone(self, prompt: Prompt, special: bool = True) -> list[int] | Refusal:
        """Return the token ids of one prompt, which may take the time that its length permits, or why it has none."""
        seconds = PROMPT_S + MILLION_S * characters(prompt) / 1e6
        found = self._encode([prompt], special, seconds)
        if found is not None:
            return found[0]
        return Refusal("invalid_prompt", _exceeds("prompt" if isinstance(prompt, str) else "conversation", seconds))

    def continuation(self, before: list[int], added: str) -> list[int] | None:
        """Return the ids of a text that follows the tokens `before`; None unless both decode to both texts."""
        return self._ask({"do": "continue", "before": before, "added": added}, PROMPT_S).get("answer")

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a conversation by the chat template. Raises ModelError where that refuses it."""
        if (why_not := self._too_large(messages) or self.cannot_chat) is not None:
            raise ModelError(why_not.message if isinstance(why_not, Refusal) else why_not)
        return str(self._answer({"do": "render", "messages": messages}, PROMPT_S))

    def encode_document(self, text: str) -> list[int]:
        """Return the token ids of a text of any length, without special ones. Raises ModelError."""
        request = {"do": "encode", "prompts": [text], "special": False, "most": None}
        (found,) = self._answer(request, PROMPT_S + MILLION_S * len(text) / 1e6)
        if "why" in found:
            raise ModelError(found["why"])
        return list(found["ids"])

    def vocabulary(self) -> tuple[dict[str, int], list[int]]:
        """Return the id of each token, and the ids of special tokens. Raises ModelError."""
        found = self._answer({"do": "vocabulary"}, LOAD_S)
        return found["tokens"], found["special"]

    def close(self) -> None:
        """End the process; calls under way find no answer. Safe to call twice."""
        self._closed = True
        self._end()
        with self._idling:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _encode(self, prompts: Sequence[Prompt], special: bool, seconds: float) -> list[list[int] | Refusal] | None:
        found: list[list[int] | Refusal | None] = [self._refused(prompt) for prompt in prompts]
        asked = [prompt for prompt, refusal in zip(prompts, found, strict=True) if refusal is None]
        request = {"do": "encode", "prompts": asked, "special": special, "most": self.most}
        answers = self._ask(request, seconds) if asked else {"answer": []}
        if "answer" not in answers:
            return None
        coming = iter(answers["answer"])
        return [self._read(next(coming)) if refusal is None else refusal for refusal in found]

    def _read(self, answer: dict[str, Any]) -> list[int] | Refusal:
        if "why" in answer:
            return Refusal("invalid_prompt", answer["why"])
        if "length" in answer:
            why = f"the prompt has at least {answer['length']:,} tokens, which exceed {self.most:,} positions"
            return Refusal("context_length_exceeded", why)
        return answer["ids"] or Refusal("invalid_prompt", f"the prompt {NO_TOKENS}")

    def _refused(self, prompt: Prompt) -> Refusal | None:
        """Return why a prompt is not read at all."""
        if not isinstance(prompt, str) and (why_not := self.cannot_chat) is not None:
            return Refusal("invalid_prompt", why_not)
        return self._too_large(prompt)

    def _too_large(self, prompt: Prompt) -> Refusal | None:
        positions = [one for one in (self.most, self._positions) if one is not None]
        largest = min(positions) * self.facts.longest if positions else tokenizer_server.MAX_TEXT
        if (size := characters(prompt)) <= largest:
            return None
        why = f"a prompt of {size:,} characters: at most {largest:,}"
        why += f", {min(positions):,} positions of the longest token" if positions else ""
        return Refusal("context_length_exceeded", why)

    def _answer(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the answer to a request. Raises ModelError if there is none."""
        found = self._ask(request, seconds)
        if "answer" not in found:
            raise ModelError(found.get("why", _exceeds("text", seconds)))
        return found["answer"]

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return an `answer`, or `why` there is none; neither if the process did not survive the request. Raises
        ModelError if there is no process."""
        line = json.dumps(request | {"seconds": seconds}).encode() + b"\n"
        with self._idling:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        answer = b""
        connection.settimeout(PATIENCE_S + tokenizer_server.wall_s(seconds))
        with suppress(OSError):
            connection.sendall(line)
            answer = _line(connection)
        if not answer.endswith(b"\n"):
            connection.close()
            return {}
        with self._idling:
            self._idle.append(connection)
        found: dict[str, Any] = json.loads(answer)
        return found

    def _connect(self) -> socket.socket:
        """Return a connection to a new child of the process, which is started again if something has ended it. Raises
        ModelError if that cannot be."""
        for _ in range(2):
            with self._starting:
                if self._fault is not None and self._facts is not None:  # it was loaded before: not the files' fault
                    self._restart()
                self._await()
                ours, theirs = socket.socketpair()
                with theirs, suppress(OSError):
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                ours.settimeout(PATIENCE_S)
                with suppress(OSError):
                    if ours.recv(1):
                        return ours
                ours.close()
                if self._closed:
                    break
                self._restart()
        raise ModelError(f"the process that reads prompts of {self._name} cannot be started")

    def _await(self) -> None:
        """Wait until the process has loaded the tokenizer. Raises ModelError if it cannot."""
        if self._loading:
            self._loading = False
            found = self._loaded()
            if isinstance(found, ModelError):
                self._fault = found
            else:
                self._facts = found
        if self._fault is not None:
            raise self._fault

    def _restart(self) -> None:
        self._end()
        self._start()

    def _start(self) -> None:
        self._loading, self._fault = True, None
        self._control, theirs = socket.socketpair()
        env = {name: os.environ[name] for name in _PASSED if name in os.environ} | _SET
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip
        forget = at_end(self._process.kill)
        self._end = weakref.finalize(self, _end, self._process, self._control, forget)
        self._control.settimeout(LOAD_WALL_S)
        with suppress(OSError):
            self._control.sendall(json.dumps(self._wanted).encode() + b"\n")

    def _loaded(self) -> Facts | ModelError:
        line = b""
        with suppress(OSError):
            line = _line(self._control)
        if not line.endswith(b"\n"):
            self._end()
            lease.sweep()  # what it owned
            limits = f"{LOAD_S:.0f} s of CPU time or {LOAD_BYTES >> 30} GiB"
            name = self._wanted["directory"] or self._name
            return ModelError(f"{name}: its tokenizer takes more than {limits} to load, or crashes the library")
        found = json.loads(line)
        if "why" in found:
            return ModelError(found["why"])
        ends = tuple(EndToken(*end) for end in found.pop("ends"))
        return Facts(ends=ends, **found)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket, forget: Callable[[], None]) -> None:
    """End a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    control.close()
    forget()


def _line(connection: socket.socket) -> bytes:
    """Return what comes up to the end of a line, or of the connection."""
    found = bytearray()
    while not found.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            break
        found += more
    return bytes(found)


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
    """Return the number of characters of a prompt, those of roles and tool calls among them."""
    if isinstance(prompt, str):
        return len(prompt)
    values = (value for message in prompt for value in message.values())
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in values)


def parts(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return prompts, in their order, in parts that are read quickly; a long one is alone."""
    found: list[list[Prompt]] = [[]]
    size = 0
    for prompt in prompts:
        own = characters(prompt)
        if found[-1] and (size + own > QUICK_CHARACTERS or len(found[-1]) == QUICK_PROMPTS):
            found.append([])
            size = 0
        found[-1].append(prompt)
        size += own
    return found if found[-1] else []
