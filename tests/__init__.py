"""Tests of zinfer. Their waits are not measurements."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zinfer.cli import cli

Checkpoints = Callable[..., Path]  # fixture `checkpoint`: makes one of `ARCHITECTURES`
Patch = pytest.MonkeyPatch
Spy = Callable[[Any, str], Any]  # fixture `spy`: watches a function of an object, and returns a Mock that has its calls
PATIENCE_S = 600  # time-out of a wait, after which the test fails: a busy machine may take minutes to start a process


def environment(**settings: str) -> dict[str, str]:
    """Return this environment with `settings` and zinfer on the path."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1]))))
    return os.environ | {"PYTHONPATH": path} | settings


def wait(fact: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until `fact` holds."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def alive(process: int) -> bool:
    """Tell whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(process: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


def mapping(process: Path, address: int) -> list[str]:
    """Return the smaps lines of a process's mapping that contains `address`."""
    lines = (process / "smaps").read_text().splitlines()
    heads = [index for index, line in enumerate(lines) if "-" in line.split()[0]]
    for start, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        low, high = (int(bound, 16) for bound in lines[start].split()[0].split("-"))
        if low <= address < high:
            return lines[start:end]
    raise LookupError("no mapping has this address")


def invoke(*words: object, **settings: Any) -> Result:
    """Run `zinfer` with `words` in this process."""
    return CliRunner().invoke(cli, list(map(str, words)), **settings)


def facts_in(facts: Sequence[str], text: str) -> list[str]:
    """Return the `facts` that `text` states, in this order.

    A fact counts as a whole word or number only: ``8`` is neither in ``18`` nor in ``8.5``.
    """
    stated, start = [], 0
    for fact in facts:
        before, after = (r"(?<!\w)(?<!\d[.,])", r"(?![.,]?\d)(?!\w)")
        pattern = before * fact[:1].isalnum() + re.escape(fact) + after * fact[-1:].isalnum()
        if match := re.compile(pattern).search(text, start):
            stated.append(fact)
            start = match.end()
    return stated


def mentions(text: str, *facts: str) -> bool:
    """Tell whether a line of `text` has all `facts` in order."""
    return any(len(facts_in(facts, line)) == len(facts) for line in text.splitlines())
