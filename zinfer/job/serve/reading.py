"""Readers of prompts: texts and messages to token ids for the dispatcher, while the worker runs.

Two threads have prompts read by a `TokenizerProcess`, each in a child of its own: one for short prompts, within half a
second of CPU time, and one for long prompts, or slower ones. In both, clients take turns.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

from zinfer.core.errors import error_line
from zinfer.generation.tokenizer_process import QUICK_CHARACTERS, Refusal, characters

UNREAD = "tokenizer_failed"  # code of prompts that nobody could read

Ids = list[int] | Refusal
Asked = tuple[Any, Any]  # a prompt, and whose it is


class Tokenizes(Protocol):
    """Part of a `zinfer.generation.tokenizer_process.TokenizerProcess` that readers use."""

    max_tokens: int | None

    def encode_quickly(self, prompt: Any) -> Ids | None: ...
    def encode_alone(self, prompt: Any) -> Ids: ...
    def close(self) -> None: ...


class _Part(NamedTuple):
    """Prompt of a client to read, and its owner."""

    client: Hashable
    prompt: Any
    owner: Any


class _Queue:
    """Queue of prompts whose clients take turns."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Part]] = {}  # by client, the next one first

    def put(self, part: _Part) -> None:
        self._waiting.setdefault(part.client, deque()).append(part)

    def get(self) -> _Part | None:
        if not self._waiting:
            return None
        client = next(iter(self._waiting))
        parts_of_client = self._waiting.pop(client)
        part = parts_of_client.popleft()
        if parts_of_client:
            self._waiting[client] = parts_of_client
        return part


class Reader:
    """Threads that read prompts.

    `on_read` gets each owner with its token ids, or the reason why there are none, from a thread; prompts of owners
    that `wanted` denies are left out.
    """

    def __init__(
        self, tokenizer: Tokenizes, on_read: Callable[[list[tuple[Any, Ids]]], None], wanted: Callable[[Any], bool]
    ) -> None:
        self._tokenizer, self._on_read, self._wanted = tokenizer, on_read, wanted
        self._changed = threading.Condition()
        self._short, self._long = _Queue(), _Queue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=args, daemon=True, name="reader")
            for args in ((self._short, self._read_short), (self._long, self._read_long))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, asked: Iterable[Asked], client: Hashable = None) -> None:
        """Queue the prompts of a client, each with its owner."""
        with self._changed:
            for prompt, owner in asked:
                queue = self._long if characters(prompt) > QUICK_CHARACTERS else self._short
                queue.put(_Part(client, prompt, owner))
            self._changed.notify_all()

    def close(self) -> None:
        """End the process and the threads; prompts that wait are discarded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tokenizer.close()
        for thread in self._threads:
            thread.join()

    def _run(self, queue: _Queue, read: Callable[[_Part], None]) -> None:
        while True:
            with self._changed:
                while (part := queue.get()) is None and not self._closed:
                    self._changed.wait()
                if self._closed or part is None:
                    return
            if self._wanted(part.owner):
                try:
                    read(part)
                except Exception as error:  # of the process, not of a prompt: nobody may wait for ever
                    self._report(part, Refusal(UNREAD, error_line(error)))

    def _read_short(self, part: _Part) -> None:
        ids = self._tokenizer.encode_quickly(part.prompt)
        if ids is not None:
            self._report(part, ids)
            return
        with self._changed:
            self._long.put(part)
            self._changed.notify_all()

    def _read_long(self, part: _Part) -> None:
        self._report(part, self._tokenizer.encode_alone(part.prompt))

    def _report(self, part: _Part, ids: Ids) -> None:
        if not self._closed:
            self._on_read([(part.owner, ids)])
