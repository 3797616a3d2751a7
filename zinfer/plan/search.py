"""Searches over batch sizes, given a function to judge one."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

LARGEST_BATCH = 1 << 20  # nobody asks for more
PRECISION = 64  # a peak is searched to this part of the batch
GOLDEN = (5**0.5 - 1) / 2
NEARLY = 0.9  # share of the best rate of powers of two from which on a better batch is searched next to one


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that `fits`; 0 if none."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def powers(limit: int) -> list[int]:
    """Return 1, 2, 4, .. up to `limit`, and `limit` itself; nothing for 0."""
    return sorted({1 << power for power in range(limit.bit_length())} | {limit} - {0})


def best_batch(rate: Callable[[int], float], limit: int) -> int:
    """Return the batch with the highest rate: 1, 2, 4, .., `limit`, or a peak next to nearly best ones."""

    @cache
    def rank(size: int) -> tuple[float, int]:
        return rate(size), -size

    sizes = powers(limit) or [1]
    promising = NEARLY * max(rank(size) for size in sizes)[0]
    peaks = [peak(rank, low, high) for low, high in pairwise(sizes) if max(rank(low), rank(high))[0] >= promising]
    return max(*sizes, *peaks, key=rank) if peaks else max(sizes, key=rank)


def peak(rank: Callable[[int], Any], low: int, high: int) -> int:
    """Return the best of a section with one peak. Each step shortens it by the golden ratio, for one new number."""
    left = right = low
    while high - low > max(2, low // PRECISION):
        if not low < left < right < high:
            left, right = (low + round(GOLDEN * part * (high - low)) for part in (GOLDEN, 1))
        if rank(left) < rank(right):
            low, left, right = left, right, left + high - right
        else:
            high, left, right = right, low + right - left, left
    return max({low, (low + high) // 2, high}, key=rank)


def boundaries(keeps: Callable[[int], bool], limit: int) -> None:
    """Ask `keeps` for 1, 2, 4, .. up to `limit`, and for the batches on both sides of each change of its answer."""
    for low, high in pairwise(powers(limit)):
        lower = keeps(low)
        if lower == keeps(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle) == lower else (low, middle)
