"""Which prompts share a batch, for how many tokens, and when it is packed anew: lengths and the plan's seconds in,
decisions out.

A batch is a rectangle of KV cache: rows x (the longest prompt + the tokens that each gets room for). A row that has
ended goes on costing its share of every step, and room for tokens that are far off is room that other rows could have.
So a batch runs for a block of tokens only; then what is unfinished is read again, together with prompts that take the
places of finished rows. A short block packs more rows and loses fewer steps, a long one reads less again: behind a slow
link, where reading a batch again costs little more than a step, blocks are short.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice
from math import expm1, log1p
from typing import NamedTuple

from zinfer.plan import cost
from zinfer.plan.plan import CAUTIOUS, Plan, largest_batch, make_plan, placement_of, split_free_memory
from zinfer.plan.search import best_batch
from zinfer.spec.case import Case, Workload
from zinfer.spec.machine import Machine
from zinfer.spec.model import ModelSpec

GRAIN = 16  # tokens to which lengths are rounded up when the plan is asked for room
MOST_ROWS = 4096  # that are looked at for one batch
GAIN = 1.2  # what packing anew in mid-block has to promise: predictions are not better than that


class RowDemand(NamedTuple):
    """What a row needs of a batch: tokens that prefill has to read, and tokens still to come at most."""

    length: int
    left: int


class Shape(NamedTuple):
    """A batch: its rows, the length they are padded to, and the tokens that each gets room for."""

    rows: int
    length: int
    reserve: int

    @property
    def padded(self) -> int:
        """Tokens that the KV cache has room for."""
        return self.rows * (self.length + self.reserve)


class Block(NamedTuple):
    """A batch to run until its reserve is used up: the tokens it should yield, and the seconds they should take."""

    shape: Shape
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Progress(NamedTuple):
    """A block under way: its shape, the tokens made for each row so far, and the rows that go on."""

    shape: Shape
    made: int
    alive: Sequence[RowDemand]

    @property
    def nearly_full(self) -> bool:
        """Whether so few rows have ended that nothing can be gained by packing anew."""
        return len(self.alive) * GAIN > self.shape.rows


Room = Callable[[int, int], int]  # the rows that fit, of a length and a reserve


def order(need: RowDemand) -> tuple[int, int, int]:
    """The key that sorts needs for packing: most tokens to come first, by powers of two; of those the longest first.

    Rows side by side then end at about the same time and need little padding; and the batches that take most memory and
    time come first, where a failure costs least and the time left is not found out too late.
    """
    return -need.left.bit_length(), -need.length, -need.left


def needed(shape: Shape, needs: Iterable[RowDemand]) -> int:
    """Of the tokens that a batch has room for, `Shape.padded`, those that its rows need; the others are waste."""
    return sum(need.length + min(need.left, shape.reserve) for need in needs)


def fits_alone(case: Case, need: RowDemand, model: ModelSpec, machine: Machine) -> bool:
    """Whether the plan finds room for a row by itself, all of its tokens included."""
    return largest_batch(shaped(case, Shape(1, need.length, need.left)), model, machine) > 0


def fitting(case: Case, needs: Sequence[RowDemand], model: ModelSpec, machine: Machine) -> list[bool]:
    """Whether each of `needs` fits alone."""
    if not needs or fits_alone(case, _envelope(needs), model, machine):
        return [True] * len(needs)
    known: dict[RowDemand, bool] = {}
    for need in needs:
        if need not in known:
            known[need] = fits_alone(case, need, model, machine)
    return [known[need] for need in needs]


def _envelope(needs: Iterable[RowDemand]) -> RowDemand:
    """The least need that holds all of `needs`."""
    lengths, left = zip(*needs, strict=True)
    return RowDemand(max(lengths), max(left))


def best_plan(
    cases: Iterable[Case], needs: Sequence[RowDemand], model: ModelSpec, machine: Machine, nvme_path: str | None = None
) -> Plan:
    """Of the loads that can run, the plan of the one that has room for most of `needs`, and of those the fastest at its
    best batch; where none can run, the last one's plan, which says why not. Its workload is the longest row's."""
    mean = RowDemand(*(max(1, sum(column) // len(needs)) for column in zip(*needs, strict=True)))
    ranked: list[tuple[tuple[bool, int, float], Plan]] = []
    for case in cases:
        fits = [need for need, fine in zip(needs, fitting(case, needs, model, machine), strict=True) if fine]
        typical = shaped(case, Shape(1, *mean))
        rate = best_batch(typical, model, machine).output_tok_s or 0.0
        longest = max(fits or [mean], key=sum)
        plan = make_plan(shaped(case, Shape(1, *longest)), model, machine, nvme_path)
        ranked.append(((plan.fits, len(fits), rate), plan))
    best = max(rank for rank, _ in ranked)
    able = [plan for rank, plan in ranked if rank == best]
    return able[0] if best[0] else ranked[-1][1]


def room_of(case: Case, model: ModelSpec, machine: Machine) -> Room:
    """How many rows of a shape the plan finds room for; with a KV cache in host memory, where more rows may be slower,
    how many are the fastest. Lengths are rounded up a little, so that few are planned."""
    more_is_better = dict(case.options).get("kv_offload", "none") == "none"

    @cache
    def rows(length: int, reserve: int) -> int:
        asked = shaped(case, Shape(1, length, reserve))
        if more_is_better:
            return largest_batch(asked, model, machine, CAUTIOUS)
        best = best_batch(asked, model, machine, CAUTIOUS)
        return best.case.workload.batch_size if best.output_tok_s and best.fits else best.max_batch_size

    return lambda length, reserve: rows(-(-length // GRAIN) * GRAIN, -(-reserve // GRAIN) * GRAIN)


def shaped(case: Case, shape: Shape) -> Case:
    """`case` with a batch as its workload."""
    workload = Workload(batch_size=shape.rows, input_len=shape.length, output_len=shape.reserve)
    return case.model_copy(update={"workload": workload})


class StepTimeModel:
    """Seconds of a prefill and of a decode step: the plan's, corrected by the last ones that were measured.

    Where the plan knows no times, a prefill goes by its tokens and steps are all the same.
    """

    def __init__(self, case: Case, model: ModelSpec, machine: Machine) -> None:
        self._case, self._model, self._machine = case, model, machine
        self._prefill_scale = self._step_scale = 1.0

    def prefill(self, shape: Shape) -> float:
        """Seconds that the prefill of `shape` takes."""
        times = cost.prefill(self._setup(shape), self._model, self._machine, shape.rows, shape.length)
        return self._prefill_scale * (times.seconds or float(shape.rows * shape.length))

    def step(self, shape: Shape, made: int) -> float:
        """Seconds of a decode step of `shape` after `made` tokens."""
        context = shape.length + made
        times = cost.step(self._setup(shape), self._model, self._machine, shape.rows, context)
        return self._step_scale * (times.seconds or 1.0)

    def saw_prefill(self, shape: Shape, seconds: float) -> None:
        """Take note of a prefill."""
        self._prefill_scale *= max(seconds, 1e-6) / self.prefill(shape)

    def saw_step(self, shape: Shape, made: int, seconds: float) -> None:
        """Take note of a decode step after `made` tokens."""
        self._step_scale *= max(seconds, 1e-6) / self.step(shape, made)

    def _setup(self, shape: Shape) -> cost.Placement:
        case = shaped(self._case, shape)
        depth, automatic = split_free_memory(case, self._model, self._machine)
        return placement_of(case, self._model, self._machine, automatic, depth)


def pack(
    needs: Iterable[RowDemand], room: Room, pace: StepTimeModel, positions: int | None = None, ending: float = 0.0
) -> Block:
    """The next block: of the first of `needs` (in `order`, at least one) as many as fit, for as many tokens as yield
    most tokens a second, reading again what is unfinished then included.

    `ending` is the chance that a row ends at a token though it may have more. No row gets beyond `positions`, for some
    models have no place for more tokens, be they of use or not. One row is taken even where there is no room for it.
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
) -> Block | None:
    """The block of `reserve` tokens; None where not even its first row can have them. (One token it can always have:
    somebody has to find out that there is no room for it.)"""
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
    shape = Shape(rows, length, min(reserve, max(need.left for need in needs[:rows])))
    tokens = sum(expected(min(need.left, reserve), ending) for need in needs[:rows])
    seconds = shape.reserve * pace.step(shape, shape.reserve // 2)
    unfinished = (1 - ending) ** reserve * sum(need.left > reserve for need in needs[:rows])
    if unfinished >= 0.5:
        seconds += pace.prefill(Shape(round(unfinished) or 1, length + reserve, 1))
    return Block(shape, tokens, seconds)


def expected(tokens: int, ending: float) -> float:
    """Of `tokens` that a row may have, how many it has on average if it ends at each with chance `ending`."""
    return -expm1(tokens * log1p(-ending)) / ending if ending > 0 else float(tokens)


def worth_packing_anew(
    now: Progress, following: Block, fresh: Sequence[RowDemand], pace: StepTimeModel, finishing: float
) -> bool:
    """Whether to break off `now` for the block `following`, in which prompts that were not yet begun, `fresh`, take the
    places of finished rows.

    A batch is left when the rate at which it still makes tokens falls below that of a new one from its beginning on:
    the marginal value theorem (Charnov 1976, doi:10.1016/0040-5809(76)90040-X). The price of a beginning is reading
    the unfinished rows again; `fresh` has to be read some time anyway, if not with so much padding. A row that finishes
    where it is need not be read again, which `finishing`, the chance that it does so at a token, puts to the credit of
    staying.
    """
    if now.nearly_full:
        return False
    step = pace.step(now.shape, now.made)
    again = pace.prefill(Shape(len(now.alive), max(need.length for need in now.alive), 1))
    price = again
    if fresh:
        alone = Shape(len(fresh), max(need.length for need in fresh), 1)
        price = max(again, pace.prefill(following.shape) - pace.prefill(alone))
    extra = max(0.0, price - pace.step(following.shape, 1))  # a prefill yields a token too
    rate = following.tokens / (following.seconds + extra)
    return rate * (1 - finishing * again / step) > GAIN * len(now.alive) / step
