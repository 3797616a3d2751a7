"""Prompts that are read beside the worker: short ones wait for no long one, and clients for no other."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests import PATIENCE_S
from zinfer.generation.tokenizer_process import QUICK_CHARACTERS, Refusal, TokenizerProcess
from zinfer.job.serve.reading import UNREAD, Ids, Reader

LONG = "x" * (QUICK_CHARACTERS + 1)


class Gated(TokenizerProcess):
    """A tokenizer whose prompts are read when the test says so; those with a ``!`` take longer than short ones may."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.gates = {"short": threading.Semaphore(0), "long": threading.Semaphore(0)}
        self.open = False

    def _wait(self, kind: str) -> None:
        if not self.open:
            assert self.gates[kind].acquire(timeout=PATIENCE_S)

    def encode_quickly(self, prompt: Any) -> Ids | None:
        self._wait("short")
        self.read.append(prompt)
        return None if "!" in prompt else [len(prompt)]

    def encode_alone(self, prompt: Any, special: bool = True) -> Ids:
        self._wait("long")
        self.read.append(prompt)
        if "broken" in prompt:
            raise RuntimeError("no process\ncan be had")
        return Refusal("invalid_prompt", "too slow") if "!" in prompt else [len(prompt)]

    def close(self) -> None:
        self.open = True
        for gate in self.gates.values():
            gate.release(100)


class Room:
    """A reader, and what it has found."""

    def __init__(self, wanted: Callable[[Any], bool] = lambda _who: True) -> None:
        self.tokenizer, self.answers = Gated(), list[tuple[Any, Ids]]()
        self.reader = Reader(self.tokenizer, lambda *read: self.answers.append(read), wanted)

    def let(self, kind: str, count: int = 1) -> None:
        self.tokenizer.gates[kind].release(count)

    def wait(self, fact: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not fact():
            assert time.monotonic() < until, (self.tokenizer.read, self.answers)
            time.sleep(0.002)


@pytest.fixture
def room() -> Any:
    created = Room()
    yield created
    created.reader.close()


def test_a_short_prompt_waits_for_no_long_one(room: Room) -> None:
    room.reader.add([(LONG, "long")], "a")
    room.reader.add([("abc", "short")], "a")
    room.let("short")
    room.wait(lambda: room.answers == [("short", [3])])
    room.let("long")
    room.wait(lambda: room.answers[1:] == [("long", [len(LONG)])])


def test_a_prompt_that_takes_too_long_is_read_again_beside_the_short_ones(room: Room) -> None:
    room.reader.add([("a", 1), ("b!", 2), ("c", 3)], "a")
    room.let("short", 3)
    room.wait(lambda: room.answers == [(1, [1]), (3, [1])])
    room.let("long")
    room.wait(lambda: (2, Refusal("invalid_prompt", "too slow")) in room.answers)
    assert room.tokenizer.read == ["a", "b!", "c", "b!"]


@pytest.mark.parametrize("kind", ["short", "long"])
def test_clients_take_turns(kind: str, room: Room) -> None:
    """One has sent a hundred prompts; another's, and a third's, come behind the one that is being read."""
    text = "x" if kind == "short" else LONG
    for number in range(100):
        room.reader.add([(f"{text}{number}", ("many", number))], "many")
    room.wait(lambda: not room.tokenizer.gates[kind]._value)
    for name in ("second", "third"):
        room.reader.add([(f"{text} {name}", name)], name)
    room.let(kind, 4)
    room.wait(lambda: len(room.answers) == 4)
    assert {"second", "third"} <= {who for who, _ in room.answers}


def test_prompts_that_nobody_waits_for_are_not_read() -> None:
    room = Room(lambda who: who != "gone")
    room.reader.add([("a", "gone"), ("b", "there")], "a")
    room.let("short")
    room.wait(lambda: room.answers == [("there", [1])])
    room.reader.close()
    assert room.tokenizer.read == ["b"]
    assert not [thread for thread in room.reader._threads if thread.is_alive()]


def test_a_fault_of_the_process_is_told_and_ends_no_thread(room: Room) -> None:
    room.reader.add([(f"broken {LONG}", 1)], "a")
    room.reader.add([(LONG, 2)], "a")
    room.let("long", 2)
    room.wait(lambda: len(room.answers) == 2)
    assert room.answers == [(1, Refusal(UNREAD, "RuntimeError: no process can be had")), (2, [len(LONG)])]
