"""Tests of zinfer. Their waits are not measurements."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 600  # time-out of a wait, after which the test fails: a busy machine may take minutes to start a process


def environment(**settings: str) -> dict[str, str]:
    """Return this environment with `settings` and zinfer on the path."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1]))))
    return os.environ | {"PYTHONPATH": path} | settings


def found(facts: Sequence[str], text: str) -> list[str]:
    """Return the `facts` that `text` states, in this order.

    A fact counts as a whole word or number only: ``8`` is neither in ``18`` nor in ``8.5``.
    """
    known, place = [], 0
    for fact in facts:
        before, after = (r"(?<!\w)(?<!\d[.,])", r"(?![.,]?\d)(?!\w)")
        pattern = before * fact[:1].isalnum() + re.escape(fact) + after * fact[-1:].isalnum()
        if match := re.compile(pattern).search(text, place):
            known.append(fact)
            place = match.end()
    return known


def mentions(text: str, *facts: str) -> bool:
    """Tell whether a line of `text` has all `facts` in order."""
    return any(len(found(facts, line)) == len(facts) for line in text.splitlines())
