"""Batch sizes of a sweep: listed ones, and searches for more, up to the plateau or to the edge of memory."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

from zinfer.job.recipe import Sweep, automatic
from zinfer.plan.planner import Plan
from zinfer.plan.search import LARGEST_BATCH
from zinfer.record.measurement import Status

OUT_OF_MEMORY: frozenset[Status] = frozenset({"oom_gpu", "oom_host"})
PLATEAU = 0.05  # gain of two doublings together, over the best before, from which on a larger batch is tried


@dataclass(frozen=True)
class Try:
    """Batch to run: timed, or only to see whether it fits."""

    batch_size: int
    timed: bool = True


class Answer(NamedTuple):
    """Status of a try, and its output tokens a second if measured."""

    status: Status
    tok_s: float | None = None


Batches = Generator[Try, Answer, None]


def search(limit: int, first: Iterable[int] = (), guess: int = 0) -> Batches:
    """Search for the batch with the most output tokens a second. `first` are timed, then doubles, until two of them
    gain less than `PLATEAU`, or memory ends. There untimed tries begin at `guess`, proceed in growing strides, then by
    bisection, and the largest batch that runs is timed. An answer is sent in for every batch yielded; any status but
    ``ok`` counts as not running."""
    listed_first = sorted(first)
    start = 2 * listed_first[-1] if listed_first else 1
    rates: dict[int, float] = {}
    good, bad, level = 0, limit + 1, False
    for batch in chain(listed_first, (start * 2**power for power in count())):
        if batch > limit or batch > guess > good >= start // 2:
            break
        answer = yield Try(batch)
        if answer.status != "ok":
            bad = batch
            break
        good = batch
        if answer.tok_s is not None:
            rates[batch] = answer.tok_s
        if batch * 2 >= start and (level := levels_off(rates)):
            break
    if not level:
        yield from _edge(good, bad, guess, rates)


def levels_off(rates: dict[int, float]) -> bool:
    """Return whether the rates have reached their plateau."""
    before = [rate for batch, rate in rates.items() if batch * 4 <= max(rates)]
    return bool(before) and max(rates.values()) < (1 + PLATEAU) * max(before)


def _edge(good: int, bad: int, guess: int, rates: dict[int, float]) -> Batches:
    largest_timed = good
    batch, stride = (guess, 1) if guess > good else (2 * good, good)
    while good and bad - good > 1:
        if not good < batch < bad:
            batch = (good + bad) // 2
        if (yield Try(batch, timed=False)).status == "ok":
            good, batch = batch, batch + stride
        else:
            bad, batch = batch, batch - stride
        stride *= 2
    while good > largest_timed:
        answer = yield Try(good)
        if answer.status == "ok":
            rates[good] = answer.tok_s or 0.0
            return
        good -= 1  # timed, it needs a little more memory


def listed(batches: Iterable[int]) -> Batches:
    """Yield batches in rising order until memory runs out."""
    for batch in sorted(batches):
        if (yield Try(batch)).status in OUT_OF_MEMORY:
            return


def batches_of(sweep: Sweep, plan: Plan) -> Batches:
    """Return the batches to try. Without a GPU none is larger than planned: the host would run out of memory."""
    if not isinstance(sweep.batch_size, str):
        return listed(sweep.batch_size)
    limit = LARGEST_BATCH if plan.machine.gpu_count else max(1, plan.max_batch_size)
    return search(limit, automatic(sweep.batch_size), min(plan.max_batch_size, limit))


def advance(batches: Batches, answer: Answer | None) -> Try | None:
    """Return the next try after an answer, None before the first; None at the end."""
    try:
        return next(batches) if answer is None else batches.send(answer)
    except StopIteration:
        return None
