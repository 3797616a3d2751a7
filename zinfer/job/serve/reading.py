"""Readers of prompts: texts and messages to token ids for the dispatcher, while the worker runs.

Two threads have prompts read by a `TokenizerProcess`, each in a child of its own: one for short prompts, within half a
second of CPU time, and one for long prompts, slower ones, and those with a grammar. In both, clients take turns.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from zinfer.core.errors import error_line
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess, is_quick

UNREAD = "tokenizer_failed"  # code of prompts that nobody could read

Ids = list[int] | Refusal
Asked = tuple[Any, Any]  # a prompt, and whose it is


class _Part(NamedTuple):
    client: Hashable
    prompt: Any
    owner: Any


class _Turns(queue.Queue[_Part | None]):
    """Queue of prompts whose clients take turns; None ends it."""

    def _init(self, _maxsize: int) -> None:
        self._waiting: dict[Hashable, deque[_Part | None]] = {}  # by client, the next one first

    def _qsize(self) -> int:
        return len(self._waiting)

    def _put(self, part: _Part | None) -> None:
        self._waiting.setdefault(None if part is None else part.client, deque()).append(part)

    def _get(self) -> _Part | None:
        client = next(iter(self._waiting))
        parts = self._waiting.pop(client)
        part = parts.popleft()
        if parts:
            self._waiting[client] = parts
        return part


class Reader:
    """Threads that read prompts. `on_read` gets each owner with its token ids, or the reason why there are none, from a
    thread; prompts of owners that `wanted` denies are left out."""

    def __init__(
        self, tokenizer: TokenizerProcess, on_read: Callable[[Any, Ids], None], wanted: Callable[[Any], bool]
    ) -> None:
        self._tokenizer, self._on_read, self._wanted = tokenizer, on_read, wanted
        self._short, self._long = _Turns(), _Turns()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=args, daemon=True, name="reader")
            for args in ((self._short, tokenizer.encode_quickly), (self._long, tokenizer.encode_alone))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, asked: Iterable[Asked], client: Hashable = None) -> None:
        """Queue the prompts of a client, each with its owner."""
        for prompt, owner in asked:
            turns = self._short if is_quick(prompt) else self._long
            turns.put(_Part(client, prompt, owner))

    def close(self) -> None:
        """End the process and the threads; prompts that wait are discarded."""
        self._closed = True
        self._tokenizer.close()
        for turns in (self._short, self._long):
            turns.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, turns: _Turns, encode: Callable[[Any], Ids | None]) -> None:
        while (part := turns.get()) is not None and not self._closed:
            if not self._wanted(part.owner):
                continue
            try:
                ids = encode(part.prompt)
            except Exception as error:  # of the process, not of a prompt: nobody may wait for ever
                ids = Refusal(UNREAD, error_line(error))
            if self._closed:
                return
            if ids is None:
                self._long.put(part)
            else:
                self._on_read(part.owner, ids)
