"""Prompts to token ids, in a process with limits (`zinfer.generation.tokenizer_server`).

What one prompt does to that process is its own error: a child that it ends is replaced in milliseconds.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.tokenizer_files import ChatTemplate
from zinfer.core.model import ModelError, ModelSpec
from zinfer.core.value import Closing
from zinfer.generation import tokenizer_server
from zinfer.generation.tokenizer import NO_TOKENS
from zinfer.record.study import StudyError
from zinfer.system import scratch
from zinfer.system.ending import at_end

QUICK_S = 0.5  # CPU time in which nearly all prompts are read
QUICK_CHARACTERS = 1 << 16  # characters that are read in it: 0.12 s with a vocabulary of 250,000 tokens
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

# A text, or messages, perhaps with settings of the template, tools, and the grammar of the answer:
# {"messages": .., "template": {..}, "tools": [..], "grammar": ".."}, {"prompt": TEXT OR IDS, "grammar": ".."}.
Prompt = str | dict[str, Any]


class Refusal(NamedTuple):
    """Reason why a prompt has no token ids: OpenAI's error code, and one line."""

    code: str
    message: str


class Facts(NamedTuple):
    """Facts about a tokenizer: end tokens, first token, chat template, and the token that begins a thought."""

    ends: list[int]
    bos: int | None
    template: str | None
    think: int | None = None


class TokenizerProcess(Closing):
    """Tokenizer and chat template in a process. Prompts of twice `max_tokens` tokens are refused."""

    def __init__(self, spec: ModelSpec, template: ChatTemplate | None = None, max_tokens: int | None = None) -> None:
        directory = tokenizer_files.folder_of(spec)
        self.max_tokens = max_tokens
        self.template = tokenizer_files.chat_template(directory) if template is None else template
        self._name = spec.name
        self._load = what_to_load(spec, self.template)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # to children that wait for a request
        self._facts: Facts | None = None
        self._loaded = self._closed = False
        self._start()

    @property
    def facts(self) -> Facts:
        """Facts about the tokenizer, once it is loaded. Raises ModelError if it cannot be loaded within the limits."""
        if self._facts is None:
            with self._lock:
                self._await()
        assert self._facts is not None
        return self._facts

    def encode(self, prompts: Iterable[Prompt], special: bool = True) -> list[list[int] | Refusal]:
        """Return the token ids of each prompt, or why it has none; `special` adds what begins a text. Raises ModelError
        if the tokenizer cannot be loaded."""
        return [self.encode_alone(prompt, special) for prompt in prompts]

    def encode_quickly(self, prompt: Prompt) -> list[int] | Refusal | None:
        """Do as `encode` for a short prompt; return None if it needs longer than `QUICK_S`."""
        return self._encode(prompt, True, QUICK_S)

    def encode_alone(self, prompt: Prompt, special: bool = True) -> list[int] | Refusal:
        """Return the token ids of one prompt, or why it has none. It may take the time that its length permits."""
        seconds = PROMPT_S + MILLION_S * characters(prompt) / 1e6
        what = "prompt" if is_text(prompt) else "conversation"
        why = f"reading the {what} takes more than {seconds:.0f} s of CPU time, or too much memory"
        return self._encode(prompt, special, seconds) or Refusal("invalid_prompt", why)

    def close(self) -> None:
        """End the process; calls under way get no answer. Safe to call twice."""
        self._closed = True
        self._end()
        while self._idle:
            self._idle.pop().close()

    def _encode(self, prompt: Prompt, special: bool, seconds: float) -> list[int] | Refusal | None:
        """Return the token ids of a prompt, or why it has none; None if it takes too long."""
        if not is_text(prompt) and not self.facts.template:
            return Refusal("invalid_prompt", self.template.why_not)
        asked = self._ask(seconds, prompt=prompt, special=special, max_tokens=self.max_tokens)
        if "why" in asked:
            return Refusal("invalid_prompt", asked["why"])
        answer: list[int] | int | None = asked.get("answer")
        if isinstance(answer, int):
            why = f"the prompt has at least {answer:,} tokens, which exceed {self.max_tokens:,} positions"
            return Refusal("context_length_exceeded", why)
        return Refusal("invalid_prompt", f"the prompt {NO_TOKENS}") if answer == [] else answer

    def _ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        """Return an `answer`, or `why` there is none; neither if the child did not survive. Raises ModelError."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        with suppress(OSError):
            connection.send_bytes(json.dumps({"seconds": seconds, "request": request}).encode())
        answer = _received(connection, PATIENCE_S + tokenizer_server.wall_s(seconds))
        if answer:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _connect(self) -> Connection:
        """Return a connection to a new child. The process is started again if it has ended. Raises ModelError."""
        for _ in range(2):
            with self._lock:
                self._await()
                ours, theirs = Pipe()
                with theirs, suppress(OSError):
                    send_handle(self._control, theirs.fileno(), None)  # the process id is for Windows
                if _received(ours, PATIENCE_S):
                    return ours
                ours.close()
                self._end()
        raise ModelError(f"the process that reads prompts of {self._name} cannot be started")

    def _await(self) -> None:
        """Wait until the tokenizer is loaded. Raises ModelError if it cannot be; the next call tries again."""
        if not (self._end.alive or self._closed):
            self._start()
        if not self._loaded:
            limits = f"{LOAD_S:.0f} s of CPU time or {LOAD_BYTES >> 30} GiB"
            name = self._load["directory"] or self._name
            none = {"why": f"{name}: its tokenizer takes more than {limits} to load, or crashes the library"}
            answer = _received(self._control, LOAD_WALL_S) or none
            if "why" in answer:
                self._end()
                raise ModelError(answer["why"])
            self._facts, self._loaded = Facts(**answer), True

    def _start(self) -> None:
        self._loaded = False
        self._control, theirs = Pipe()
        env = {name: os.environ[name] for name in _PASSED if name in os.environ} | _SET
        with theirs:
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
            words = [sys.executable, "-P", "-c", _MAIN]
            self._process = subprocess.Popen(words, stdin=theirs.fileno(), start_new_session=True, **quiet)
        self._end = weakref.finalize(self, _end, self._process, self._control, at_end(self._process.kill))
        with suppress(OSError):
            self._control.send_bytes(json.dumps(self._load).encode())


def _end(process: "subprocess.Popen[bytes]", control: Connection, unregister: Callable[[], None]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    control.close()
    unregister()
    scratch.remove_abandoned()  # what it owned, if it was still loading


def _received(connection: Connection, seconds: float) -> dict[str, Any]:
    """Return the next message; an empty one if none comes in time, or nobody is there."""
    message: dict[str, Any] = {}
    with suppress(OSError, EOFError):
        message = json.loads(connection.recv_bytes()) if connection.poll(seconds) else {}
    return message


def windows(tokenizer: TokenizerProcess, text: str, count: int, length: int) -> tuple[list[list[int]], int]:
    """Return `count` windows of a text, and the number of its tokens. They have `length` tokens and are spread evenly.
    No two overlap. Each begins with the tokenizer's first token of a text, if it has one. Raises StudyError if the text
    is too short, ModelError if it cannot be tokenised."""
    bos, first = tokenizer.facts.bos, tokenizer.encode_alone("")
    begin = [bos] if bos is not None and first[:1] == [bos] else []
    token_ids = tokenizer.encode_alone(text, special=False)
    if isinstance(token_ids, Refusal):
        raise ModelError(token_ids.message)
    size = length - len(begin)
    if count * size > len(token_ids):
        few = f"the text has {len(token_ids):,} tokens, too few for {count} samples of {length}"
        raise StudyError(f"{few}: give a longer --prompt-file, or fewer --samples")
    last = len(token_ids) - size
    starts = [index * last // max(1, count - 1) for index in range(count)]
    return [begin + token_ids[start : start + size] for start in starts], len(token_ids)


def what_to_load(spec: ModelSpec, template: ChatTemplate) -> dict[str, Any]:
    """Return the first message to the process."""
    limits = {"load_s": LOAD_S, "load_bytes": LOAD_BYTES, "request_bytes": REQUEST_BYTES}
    facts: dict[str, Any] = {"template": template.text, "config": {"eos_token_id": spec.config.get("eos_token_id")}}
    folder = tokenizer_files.folder_of(spec)
    facts |= {"directory": None if folder is None else str(folder)}
    return spec.model_dump(include={"vocab_size", "name"}) | limits | facts


def is_text(prompt: Prompt) -> bool:
    """Tell whether a prompt is no conversation."""
    return isinstance(prompt, str) or "prompt" in prompt


def is_quick(prompt: Prompt) -> bool:
    """Tell whether a prompt may be read in `QUICK_S`: a short one without a grammar."""
    return characters(prompt) <= QUICK_CHARACTERS and not (isinstance(prompt, dict) and "grammar" in prompt)


def characters(prompt: Prompt) -> int:
    """Count the characters of a prompt, roles and settings included."""
    if isinstance(prompt, str):
        return len(prompt)
    values = [value for name, value in prompt.items() if name != "messages"]
    values += [value for message in prompt.get("messages", ()) for value in message.values()]
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in values)
