"""Packing: choose the prompts that share a batch, for how many tokens, and when to pack a new one.

Pure functions of lengths and of the plan's predicted seconds. A batch is a rectangle of KV cache: rows x (the longest
prompt + the tokens reserved for each row). A row that has ended still costs its share of every step, and room for
distant tokens is room that other rows could have. So a batch runs for a block of tokens only; then unfinished rows are
prefilled again, together with prompts that take the places of finished rows. A short block packs more rows and loses
fewer steps, a long one prefills less again: behind a slow link, where another prefill costs little more than a step,
blocks are short.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice
from math import expm1, log1p
from typing import NamedTuple

from zinfer.plan import cost
from zinfer.plan.plan import CAUTIOUS, Plan, largest_batch, make_plan, place
from zinfer.plan.search import best_batch
from zinfer.spec.case import Case, Workload
from zinfer.spec.engine import plan_options
from zinfer.spec.machine import Machine
from zinfer.spec.model import ModelSpec

GRAIN = 16  # lengths are rounded up to multiples of this when the plan computes room, in tokens
MOST_ROWS = 4096  # rows considered for one batch
GAIN = 1.2  # least predicted speed-up for packing in mid-block: predictions are not more precise than that


class RowDemand(NamedTuple):
    """Demand of a row: tokens that prefill has to read, and the most tokens still to come."""

    length: int
    left: int


class BatchShape(NamedTuple):
    """Shape of a batch: its rows, the length that they are padded to, and the tokens reserved for each row."""

    rows: int
    length: int
    reserve: int

    @property
    def padded(self) -> int:
        """Tokens that the KV cache has room for."""
        return self.rows * (self.length + self.reserve)


class PlannedBatch(NamedTuple):
    """A batch to run until its reserve is used up, with the tokens it should yield and the seconds they should take."""

    shape: BatchShape
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected throughput, in tok/s."""
        return self.tokens / self.seconds


class Progress(NamedTuple):
    """A block under way: its shape, the tokens made for each row so far, and the rows that go on."""

    shape: BatchShape
    made: int
    alive: Sequence[RowDemand]

    @property
    def nearly_full(self) -> bool:
        """True if so few rows have ended that packing anew cannot gain anything."""
        return len(self.alive) * GAIN > self.shape.rows


Room = Callable[[int, int], int]  # (length, reserve) -> number of rows that fit


def order(need: RowDemand) -> tuple[int, int, int]:
    """Return the sort key for packing: most tokens to come first, by powers of two; of equal ones the longest prompt
    first.

    Adjacent rows then end at about the same time and need little padding; and the batches that take most memory and
    time come first, where a failure costs least and the time left is learnt early.
    """
    return -need.left.bit_length(), -need.length, -need.left


def needed(shape: BatchShape, needs: Iterable[RowDemand]) -> int:
    """Return the tokens of `BatchShape.padded` that the rows need; the others are waste."""
    return sum(need.length + min(need.left, shape.reserve) for need in needs)


def fits_alone(case: Case, need: RowDemand, model: ModelSpec, machine: Machine) -> bool:
    """Return True if the plan finds room for the row by itself, all of its tokens included."""
    return largest_batch(shaped(case, BatchShape(1, need.length, need.left)), model, machine) > 0


def fitting(case: Case, needs: Sequence[RowDemand], model: ModelSpec, machine: Machine) -> list[bool]:
    """Tell for each of `needs` whether it fits alone."""
    if not needs or fits_alone(case, _envelope(needs), model, machine):
        return [True] * len(needs)
    known: dict[RowDemand, bool] = {}
    for need in needs:
        if need not in known:
            known[need] = fits_alone(case, need, model, machine)
    return [known[need] for need in needs]


def _envelope(needs: Iterable[RowDemand]) -> RowDemand:
    """Return the smallest demand that covers all of `needs`."""
    lengths, left = zip(*needs, strict=True)
    return RowDemand(max(lengths), max(left))


def best_plan(
    cases: Iterable[Case], needs: Sequence[RowDemand], model: ModelSpec, machine: Machine, nvme_path: str | None = None
) -> Plan:
    """Return the plan of the best load: the one that has room for most of `needs`, then the fastest at its best batch.
    If no load can run, return the last one's plan, with the reason. The workload is that of the longest row."""
    mean = RowDemand(*(max(1, sum(column) // len(needs)) for column in zip(*needs, strict=True)))
    ranked: list[tuple[tuple[bool, int, float], Plan]] = []
    for case in cases:
        fits = [need for need, fine in zip(needs, fitting(case, needs, model, machine), strict=True) if fine]
        typical = shaped(case, BatchShape(1, *mean))
        rate = best_batch(typical, model, machine, cost.Efficiency()).output_tok_s or 0.0
        longest = max(fits or [mean], key=sum)
        plan = make_plan(shaped(case, BatchShape(1, *longest)), model, machine, nvme_path)
        ranked.append(((plan.fits, len(fits), rate), plan))
    best = max(rank for rank, _ in ranked)
    able = [plan for rank, plan in ranked if rank == best]
    return able[0] if best[0] else ranked[-1][1]


def room_of(case: Case, model: ModelSpec, machine: Machine) -> Room:
    """Return a function from a row's length and reserve to the number of rows that the plan has room for. With a KV
    cache in host memory, where more rows may be slower, it returns the fastest number. Lengths are rounded up a little,
    so that few plans are made."""
    more_is_better = plan_options(case.engine, case.options).kv_offload == "none"

    @cache
    def rows(length: int, reserve: int) -> int:
        asked = shaped(case, BatchShape(1, length, reserve))
        if more_is_better:
            return largest_batch(asked, model, machine, CAUTIOUS)
        best = best_batch(asked, model, machine, CAUTIOUS)
        return best.case.workload.batch_size if best.output_tok_s and best.fits else best.max_batch_size

    return lambda length, reserve: rows(-(-length // GRAIN) * GRAIN, -(-reserve // GRAIN) * GRAIN)


def shaped(case: Case, shape: BatchShape) -> Case:
    """Return `case` with the workload of a batch."""
    workload = Workload(batch_size=shape.rows, input_len=shape.length, output_len=shape.reserve)
    return case.model_copy(update={"workload": workload})


class StepTimeModel:
    """Time of a prefill and of a decode step, in seconds: the plan's, scaled by the last measured ones.

    If the plan knows no times, a prefill's is proportional to its tokens and all steps are equal.
    """

    def __init__(self, case: Case, model: ModelSpec, machine: Machine) -> None:
        self._case, self._model, self._machine = case, model, machine
        self._prefill_scale = self._step_scale = 1.0

    def prefill(self, shape: BatchShape) -> float:
        """Return the predicted seconds of the prefill of `shape`."""
        times = cost.prefill(self._setup(shape), self._model, self._machine, shape.rows, shape.length)
        return self._prefill_scale * (times.seconds or float(shape.rows * shape.length))

    def step(self, shape: BatchShape, made: int) -> float:
        """Return the predicted seconds of a decode step of `shape` after `made` tokens."""
        context = shape.length + made
        times = cost.step(self._setup(shape), self._model, self._machine, shape.rows, context)
        return self._step_scale * (times.seconds or 1.0)

    def saw_prefill(self, shape: BatchShape, seconds: float) -> None:
        """Correct the model by a measured prefill."""
        self._prefill_scale *= max(seconds, 1e-6) / self.prefill(shape)

    def saw_step(self, shape: BatchShape, made: int, seconds: float) -> None:
        """Correct the model by a measured decode step after `made` tokens."""
        self._step_scale *= max(seconds, 1e-6) / self.step(shape, made)

    def _setup(self, shape: BatchShape) -> cost.Placement:
        return place(shaped(self._case, shape), self._model, self._machine)


def pack(
    needs: Iterable[RowDemand], room: Room, pace: StepTimeModel, positions: int | None = None, ending: float = 0.0
) -> PlannedBatch:
    """Pack the next block: as many of the first of `needs` (in `order`, at least one) as fit, with the reserve that
    yields most tokens a second, the repeated prefill of unfinished rows included.

    `ending` is the chance that a row ends at a token before its limit. No row gets beyond `positions`, since some
    models cannot compute further tokens, useful or not. One row is taken even if the plan has no room for it.
    """
    first = tuple(islice(needs, MOST_ROWS))
    most = max(need.left for need in first)
    blocks = []
    reserve = 1
    while True:
        block = _block(first, reserve, room, pace, positions, ending)
        if block is not None:
            blocks.append(block)
        if reserve == most:
            return max(blocks, key=lambda block: block.rate)
        reserve = min(most, max(reserve + 1, reserve * 3 // 2))


def _block(
    needs: Sequence[RowDemand], reserve: int, room: Room, pace: StepTimeModel, positions: int | None, ending: float
) -> PlannedBatch | None:
    """Return the block with a reserve of `reserve` tokens; None if not even its first row fits. (A reserve of one token
    always makes a block: the machine has to show that there is no room.)"""
    length = rows = limit = 0
    for need in needs:
        longer = max(length, need.length)
        if longer > length:
            too_far = positions is not None and longer + reserve > positions
            limit = 0 if too_far else room(longer, reserve)
        if rows + 1 > limit and (rows or reserve > 1):
            break
        length, rows = longer, rows + 1
    if not rows:
        return None
    shape = BatchShape(rows, length, min(reserve, max(need.left for need in needs[:rows])))
    tokens = sum(expected(min(need.left, reserve), ending) for need in needs[:rows])
    seconds = shape.reserve * pace.step(shape, shape.reserve // 2)
    unfinished = (1 - ending) ** reserve * sum(need.left > reserve for need in needs[:rows])
    if unfinished >= 0.5:
        seconds += pace.prefill(BatchShape(round(unfinished) or 1, length + reserve, 1))
    return PlannedBatch(shape, tokens, seconds)


def expected(tokens: int, ending: float) -> float:
    """Return the mean number of tokens that a row makes of `tokens`, if it ends at each with chance `ending`."""
    return -expm1(tokens * log1p(-ending)) / ending if ending > 0 else float(tokens)


def worth_packing_anew(
    now: Progress, following: PlannedBatch, fresh: Sequence[RowDemand], pace: StepTimeModel, finishing: float
) -> bool:
    """Return True if `now` should be left for the block `following`, in which prompts not yet begun, `fresh`, replace
    finished rows.

    A batch is left when the rate at which it still makes tokens falls below that of a new one, its start included: the
    marginal value theorem (Charnov 1976, doi:10.1016/0040-5809(76)90040-X). The price of a start is the repeated
    prefill of the unfinished rows; `fresh` needs a prefill at some time anyway, though with less padding. A row that
    finishes where it is needs no repeated prefill; `finishing`, the chance of that at a token, credits this to staying.
    """
    if now.nearly_full:
        return False
    step = pace.step(now.shape, now.made)
    again = pace.prefill(BatchShape(len(now.alive), max(need.length for need in now.alive), 1))
    price = again
    if fresh:
        alone = BatchShape(len(fresh), max(need.length for need in fresh), 1)
        price = max(again, pace.prefill(following.shape) - pace.prefill(alone))
    extra = max(0.0, price - pace.step(following.shape, 1))  # a prefill yields a token too
    rate = following.tokens / (following.seconds + extra)
    return rate * (1 - finishing * again / step) > GAIN * len(now.alive) / step
