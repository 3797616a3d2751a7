"""Readers of prompts: texts and messages to token ids for the dispatcher, while the worker runs.

Two threads have prompts read by a `TokenizerProcess`, each in a child of its own: one for short prompts, within half a
second of CPU time, and one for long prompts, or slower ones. In both, clients take turns.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from zinfer.core.errors import error_line
from zinfer.generation.tokenizer_process import QUICK_CHARACTERS, Refusal, characters, parts

UNREAD = "tokenizer_failed"  # code of prompts that nobody could read

Ids = list[int] | Refusal
Asked = tuple[Any, Any]  # a prompt, and whose it is


class Tokenizes(Protocol):
    """Part of a `zinfer.generation.tokenizer_process.TokenizerProcess` that readers use."""

    max_tokens: int | None

    def encode_quickly(self, prompts: Sequence[Any]) -> list[Ids] | None: ...
    def encode_alone(self, prompt: Any) -> Ids: ...
    def close(self) -> None: ...


class _Part(NamedTuple):
    """Prompts of one client to read together."""

    client: Hashable
    asked: list[Asked]


class _Queue:
    """Queue of parts whose clients take turns."""

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
        waiting = list(asked)
        coming = iter(waiting)
        with self._changed:
            for part in parts([prompt for prompt, _ in waiting]):
                queue = self._long if sum(map(characters, part)) > QUICK_CHARACTERS else self._short
                queue.put(_Part(client, [*islice(coming, len(part))]))
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
            asked = [(prompt, owner) for prompt, owner in part.asked if self._wanted(owner)]
            if asked:
                try:
                    read(part._replace(asked=asked))
                except Exception as error:  # of the process, not of a prompt: nobody may wait for ever
                    self._report(asked, [Refusal(UNREAD, error_line(error))] * len(asked))

    def _read_short(self, part: _Part) -> None:
        ids = self._tokenizer.encode_quickly([prompt for prompt, _ in part.asked])
        if ids is not None:
            self._report(part.asked, ids)
            return
        with self._changed:
            queue = self._short if len(part.asked) > 1 else self._long
            for asked in part.asked:  # one of several is to blame, which shows when each is read alone
                queue.put(_Part(part.client, [asked]))
            self._changed.notify_all()

    def _read_long(self, part: _Part) -> None:
        self._report(part.asked, [self._tokenizer.encode_alone(prompt) for prompt, _ in part.asked])

    def _report(self, asked: list[Asked], ids: Sequence[Ids]) -> None:
        if not self._closed:
            self._on_read([(owner, result) for (_, owner), result in zip(asked, ids, strict=True)])
