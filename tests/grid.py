"""Grids of test cases, and parts with every value of every axis."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], times: int = 1) -> list[Any]:
    """Return all combinations of `axes` as parameters of a test; all but some are marked slow.

    The others go through all axes at once, `times` times, each time with other combinations: every value of the
    longest axis is among them `times` times, those of the others at least as often.
    """
    longest = max(map(len, axes))
    taken = {
        tuple((step + index * (step // longest)) % len(axis) for index, axis in enumerate(axes))
        for step in range(times * longest)
    }
    return [
        pytest.param(*(axis[index] for axis, index in zip(axes, places, strict=True)), marks=_marks(places in taken))
        for places in product(*(range(len(axis)) for axis in axes))
    ]


def _marks(taken: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if taken else (pytest.mark.slow,)
