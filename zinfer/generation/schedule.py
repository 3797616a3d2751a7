"""Continuous batching: which rows and which chunks of prompts go into the next pass, from lengths and seconds alone.

A pass of streamed weights takes as long as the link needs for them, whatever it computes meanwhile. So each pass
carries a token for every running row and chunks of waiting prompts, up to the work that hides behind the
link. Rows begin and end at every pass (Orca, Yu et al. 2022); chunks of prompts as in Sarathi-Serve (arXiv:2403.02310).

Rows live in rectangles, the micro-batches of an engine: `PlannedBatch` is the plan of one. Padding, and rows that have
ended, are read at every step all the same; so micro-batches are made of rows of like length, and are merged and
compacted where that is worth more than it costs. Room for tokens still to come is reserved in steps; where it runs out,
rows give way, wait again, and are computed again but for prefixes that are kept.

Rows of requests that arrive share the memory by request: the next row to begin is one of the request that has fewest.
Where there is no room for it, a request with more than a quarter of the rows gives some up.

This module runs no model: `Schedule.plan` returns the `Move`s and the works of a pass, which
`zinfer.generation.scheduler.ContinuousScheduler` carries out; tests carry them out on a clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zinfer.core.case import Workload
from zinfer.core.engine import plan_options
from zinfer.generation import tuning
from zinfer.generation.pass_times import PassLoad, PassTimes
from zinfer.generation.queue import Queue
from zinfer.generation.sequence import Sequence
from zinfer.plan import search
from zinfer.plan.planner import Planner

if TYPE_CHECKING:
    from zinfer.engine.base import MicroBatch

# Numbers of passes from now at which memory is counted, up to more than any row has tokens
_TIMES = np.array([0, *accumulate(repeat(16, 23), lambda passes, step: max(passes + step, passes * 3 // 2))])


class PlannedBatch:
    """Plan of a micro-batch: `rows`, None where one has ended, and their positions. Of `width` positions of known
    tokens, padding included, `length` are computed; `capacity` are reserved. `tokens` counts each row's known tokens.
    `on_host` tells that some of its KV cache is in host memory, so that moving it is slow. `micro_batch` is the
    engine's."""

    on_host = False
    micro_batch: "MicroBatch | None" = None

    def __init__(
        self, rows: Several[Sequence | None], tokens: Several[int], width: int, capacity: int, length: int = 0
    ) -> None:
        self.rows: list[Sequence | None] = list(rows)
        self.pads = [width - count for count in tokens]
        self.width, self.capacity, self.length = width, capacity, length
        self.has_gaps = False  # True once positions between others were forgotten
        self._count()

    def _count(self) -> None:
        self.alive = [index for index, row in enumerate(self.rows) if row is not None]
        self.living = [row for row in self.rows if row is not None]
        pads = [self.pads[index] for index in self.alive]
        self._padding, self._min_padding = sum(pads), min(pads, default=0)

    @property
    def running(self) -> bool:
        """True once all known tokens are computed."""
        return self.length >= self.width

    @property
    def positions(self) -> int:
        """Positions that a decode step reads."""
        return len(self.rows) * self.length

    @property
    def reserved(self) -> int:
        return len(self.rows) * self.capacity

    def computed(self, index: int) -> int:
        """Return the computed positions of a row without padding."""
        return max(0, self.length - self.pads[index])

    @property
    def needed(self) -> int:
        """Computed positions of rows that have not ended, without padding."""
        if self.running:
            return len(self.alive) * self.length - self._padding
        return sum(map(self.computed, self.alive))

    def keep(self, kept: Several[int]) -> None:
        """Count the positions of a pass that rows keep, at least one; the others were forgotten."""
        longest = max(kept)
        self.length += longest
        self.pads = [pad + longest - count for pad, count in zip(self.pads, kept, strict=True)]
        self.has_gaps = self.has_gaps or min(kept) < longest
        self._count()

    def end(self, keys: Collection[int]) -> None:
        """Note rows that have ended, by key."""
        if any(row.key in keys for row in self.living):
            self.rows = [None if row is not None and row.key in keys else row for row in self.rows]
            self._count()

    def remove(self, indices: Collection[int]) -> None:
        """Remove rows; the others close up."""
        kept = [index for index in range(len(self.rows)) if index not in indices]
        self.rows, self.pads = [self.rows[index] for index in kept], [self.pads[index] for index in kept]
        self._count()

    @property
    def compact(self) -> tuple[int, int]:
        """Rows and positions of each after a compaction."""
        return len(self.alive), max(0, self.length - self._min_padding) if self.alive else 0

    @property
    def max_remaining(self) -> int:
        """Most tokens that a row may still get."""
        return max((row.left for row in self.living), default=0)


class Move(NamedTuple):
    """Change of micro-batches before a pass. `admit` and `move_rows` make `batch`, the latter of rows, by index, of
    `sources`. The first `length` positions of an admitted batch are not computed, but come from kept prefixes. `retire`
    frees it; `yield` frees the rows of `batch`, which are in a source, and wait again."""

    kind: Literal["admit", "move_rows", "retire", "yield"]
    batch: PlannedBatch
    sources: tuple[tuple[PlannedBatch, tuple[int, ...]], ...] = ()


class PlannedWork(NamedTuple):
    """The positions of a micro-batch that a pass computes."""

    batch: PlannedBatch
    tokens: int  # a row


class Abilities(NamedTuple):
    """Abilities of an engine, as `Engine` names them. `moves_rows` is "rarely" where moving rows of some micro-batches,
    `PlannedBatch.on_host`, is slow."""

    one_pass: bool = True
    chunks: bool = True
    moves_rows: bool | Literal["rarely"] = True
    pads: bool = True


class Limits(NamedTuple):
    """KV cache memory of running rows, in positions, padding and reserve included."""

    positions: int
    rows: int = 1 << 20
    batch_positions: int = 1 << 62  # of one micro-batch


@dataclass
class Tally:
    """Counts of the passes so far."""

    passes: int = 0
    seconds: float = 0.0
    read: int = 0  # positions of KV cache
    padded: int = 0  # of those read, positions of no running row
    computed: int = 0  # positions
    again: int = 0  # positions computed more than once
    prompts: int = 0  # positions of prompts that were computed, padding included
    merged: int = 0
    yielded: int = 0  # rows that gave way to others
    retries: int = 0  # passes, or moves before them, that ran out of memory
    drafted: int = 0  # tokens that were verified
    accepted: int = 0


def load_of_pass(works: Several[PlannedWork]) -> PassLoad:
    """Return the work of a pass that has not been done yet."""
    decoding = [batch for batch, _ in works if batch.running]
    return PassLoad(
        rows=sum(len(batch.rows) * count for batch, count in works if batch.running),
        positions=sum(batch.positions for batch in decoding),
        prompt_tokens=sum(len(batch.rows) * count for batch, count in works if not batch.running),
        batches=sum(not batch.on_host for batch in decoding) + any(batch.on_host for batch in decoding),
        prompts=len(works) - len(decoding),
    )


@dataclass
class Schedule:
    """The rows that wait and run, and the plan of each pass. Call `plan`, carry it out, then `done`. With `arrivals`
    requests share the rows, in the order in which they came; otherwise like rows begin together. `slack` is the room
    for forgotten positions where none can be made later, as a share of the tokens to come; `ahead` the room that drafts
    take in a pass. `reusable` counts the first positions of a waiting row, not all, that are kept."""

    times: PassTimes
    limits: Limits
    able: Abilities = field(default_factory=Abilities)
    arrivals: bool = False
    step: int = field(default_factory=lambda: tuning.TUNED.growth)
    slack: float = 0.0
    ahead: int = 0
    reusable: Callable[[Sequence], int] = lambda _row: 0
    batches: list[PlannedBatch] = field(default_factory=list)
    waiting: Queue[Sequence] = field(init=False)
    begun: list[Sequence] = field(default_factory=list)  # rows that the last plan admits
    tally: Tally = field(default_factory=Tally)
    _tokens: int = 0
    _early: int = 0  # rows that ended before their limit
    _debt: float = 0.0  # cost of free rows so far, in passes, where prompts have a pass of their own
    _whole: Limits | None = None  # limits before memory fell short
    _calm: int = 0  # passes since then, or since the limits last rose
    _used: NDArray[Any] | None = None  # positions taken at `_TIMES`, with the rows that the plan admits so far

    def __post_init__(self) -> None:
        self.waiting = Queue(self.arrivals)

    def drop(self, keys: Iterable[int]) -> None:
        """Discard rows, waiting or running; running ones are retired before the next pass."""
        gone = set(keys)
        self.waiting.remove([row for key in gone if (row := self.waiting.get(key)) is not None])
        for batch in self.batches:
            batch.end(gone)

    def clear(self) -> None:
        """Discard all rows."""
        self.batches, self.waiting = [], Queue(self.arrivals)

    @property
    def ending(self) -> float:
        """Chance that a row ends at a token before its limit."""
        return self._early / (self._tokens + self._early + 1)

    @property
    def running(self) -> list[Sequence]:
        """Rows whose micro-batches are in the engine."""
        return [row for batch in self.batches for row in batch.living]

    @property
    def busy(self) -> bool:
        return bool(self.batches or self.waiting)

    # A pass

    def plan(self) -> tuple[list[Move], list[PlannedWork]]:
        """Return the moves before the next pass, and its works; no works if nothing is left to do."""
        self._hold()
        self.begun, self._used = [], None
        moves = [Move("retire", batch) for batch in self.batches if not batch.alive]
        self.batches = [batch for batch in self.batches if batch.alive]
        if self.able.moves_rows:
            self._compact(moves)
            self._merge(moves)
        self._grow(moves)
        if self.able.one_pass:
            self._make_way(moves)
            works = self._decoding()
            return moves, works + self._prompts(moves, works)
        works = self._decoding()
        if any(not batch.running for batch in self.batches) or self._time_for_prompts(works):
            self._make_way(moves)
            if prompts := self._prompts(moves, []):
                return moves, prompts[:1]
            works = self._decoding()
        # Each micro-batch has a pass of its own: the one furthest behind comes first.
        return moves, [max(works, key=lambda work: work.batch.max_remaining)] if works else []

    def _decoding(self) -> list[PlannedWork]:
        return [PlannedWork(batch, 1) for batch in self.batches if batch.running]

    def done(
        self, works: Several[PlannedWork], seconds: float, ended: Collection[int], gained: Mapping[int, int]
    ) -> None:
        """Count a pass that took `seconds`. Each row whose known tokens were computed has got a token, or as many as
        `gained` says by key, and has them by now; rows that `ended` (keys) are over. A row keeps a position for each
        token that it got; the others of a work were forgotten."""
        tally, load = self.tally, load_of_pass(works)
        tally.prompts += load.prompt_tokens
        for batch, count in works:
            if batch.running and count > 1:
                batch.keep([1 if row is None else gained.get(row.key, 1) for row in batch.rows])
            else:
                batch.length += count
            tally.read += batch.positions
            tally.padded += batch.positions - batch.needed
            tally.computed += len(batch.rows) * count
            if batch.running:
                over = [row for row in batch.living if row.key in ended or row.left <= 0]
                self._tokens += sum(gained.get(row.key, 1) for row in batch.living)
                self._early += sum(row.left > 0 for row in over)
                batch.end({row.key for row in over})
                for row in over:
                    self.waiting.turn(row.owner)
        if self.arrivals:  # prompts that do not fit into a pass take turns
            served = [batch for batch, _ in works if not batch.running]
            self.batches = [batch for batch in self.batches if batch not in served] + served
        tally.passes += 1
        tally.seconds += seconds
        self.times.observe(load, seconds)
        whole, now, (higher, of) = self._whole, self.limits, tuning.TUNED.higher
        self._calm += 1
        if whole is not None and self._calm >= tuning.TUNED.calm:  # no shortage for long
            positions = min(whole.positions, now.positions * higher // of + 1)
            batch_positions = min(whole.batch_positions, now.batch_positions * higher // of + 1)
            self.limits, self._calm = now._replace(positions=positions, batch_positions=batch_positions), 0

    def fell_short(self) -> None:
        """Let all rows wait again, with lower limits for a while."""
        self._whole, self._calm = self._whole or self.limits, 0
        lower, of = tuning.TUNED.lower
        positions = min(self.limits.positions, self._reserved) * lower // of
        largest = min(self.limits.batch_positions, max((batch.reserved for batch in self.batches), default=1))
        self.limits = self.limits._replace(positions=positions, batch_positions=max(1, largest * lower // of))
        self.tally.retries += 1
        self.tally.again += sum(batch.needed for batch in self.batches)
        rows, self.batches = self.running, []
        self.waiting.add(rows)

    # Shares

    def _hold(self) -> None:
        if self.arrivals:
            self.waiting.hold(Counter(row.owner for batch in self.batches for row in batch.living))

    @property
    def _newcomer(self) -> bool:
        """True if the next row's request has no row, while others have."""
        return bool(self.arrivals and self.waiting and self.waiting.held) and not self.waiting.held[self._next.owner]

    @property
    def _next(self) -> Sequence:
        return self.waiting.front(1)[0]

    def _make_way(self, moves: list[Move]) -> None:
        """Take rows from large requests for requests that wait without room. Large ones have more than a quarter. It
        takes as many as a pass has prompt tokens for."""
        if not (self.able.moves_rows and self.waiting.shares()):
            return
        running, tuned, held = self.running, tuning.TUNED, Counter(self.waiting.held)
        fair_share = max(1, len(running) // tuned.request_share)
        batches = {id(row): batch for batch in self.batches for row in batch.rows}
        queue = sorted(running, key=lambda row: (batches[id(row)].running, -row.key))  # whose loss costs least first
        room, free = self.limits.positions - self._usage(), self.limits.rows - len(running)
        tokens = max(tuned.min_prompt_tokens, self.times.room(PassLoad()))
        given: list[Sequence] = []
        for row in self.waiting.front(tuned.front):
            room = room - self._need([row])
            while free < 1 or room.min() < 0:
                victim = max(queue, key=lambda other: held[other.owner], default=row)  # the first of the richest
                if held[victim.owner] <= max(fair_share, held[row.owner] + 1):
                    break
                queue.remove(victim)
                given.append(victim)
                held[victim.owner] -= 1
                free += 1
                room = room + self._need([victim])
            else:
                held[row.owner] += 1
                free, tokens = free - 1, tokens - (row.length - self.reusable(row))
                if tokens > 0:
                    continue
            break
        if given:
            self.tally.yielded += len(given)
            self._give_up(moves, given)

    def _give_up(self, moves: list[Move], rows: Several[Sequence]) -> None:
        """Take rows out of their micro-batches, and let them wait again."""
        gone = {id(row) for row in rows}
        for batch in list(self.batches):
            taken = tuple(index for index in batch.alive if id(batch.rows[index]) in gone)
            if not taken:
                continue
            if len(taken) == len(batch.alive):
                taken = tuple(range(len(batch.rows)))
                self.batches.remove(batch)
            tokens, given = [batch.computed(index) for index in taken], [batch.rows[index] for index in taken]
            part = PlannedBatch(given, tokens, max(tokens), batch.capacity, max(tokens))
            moves.append(Move("yield", part, ((batch, taken),)))
            batch.remove(taken)
        self.waiting.add(rows)
        self._hold()

    # Moves

    def _move_rows(self, moves: list[Move], sources: Several[PlannedBatch]) -> PlannedBatch:
        rows = [row for batch in sources for row in batch.living]
        tokens = [batch.computed(index) for batch in sources for index in batch.alive]
        length = max(tokens)
        new_batch = PlannedBatch(rows, tokens, length, self._capacity(length, max(row.left for row in rows)), length)
        new_batch.on_host = any(batch.on_host for batch in sources)
        self.batches = [batch for batch in self.batches if batch not in sources] + [new_batch]
        moves.append(Move("move_rows", new_batch, tuple((batch, tuple(batch.alive)) for batch in sources)))
        return new_batch

    def _capacity(self, length: int, left: int) -> int:
        capacity = length + max(1, left) + self.ahead
        if self.able.moves_rows is not True:
            return capacity + ceil(self.slack * left)
        capacity += tuning.TUNED.draft_gaps * self.ahead
        return min(capacity, -(-(length + 1 + self.ahead) // self.step) * self.step + self.step // 2)

    def _compact(self, moves: list[Move]) -> None:
        tuned = tuning.TUNED
        for batch in [other for other in self.batches if other.running]:
            rows, length = batch.compact
            share = tuned.host_waste if batch.on_host else tuned.draft_waste if self.ahead else tuned.waste
            if batch.positions - rows * length > share * batch.positions:
                self._move_rows(moves, [batch])

    def _merge(self, moves: list[Move]) -> None:
        """Merge neighbours in length: of many while it adds little padding, of too many."""
        tuned, one_pass = tuning.TUNED, self.able.one_pass
        max_batches, max_on_host = (self.times.max_batches, self.times.max_host_batches) if one_pass else (1, 1)
        few = min(tuned.few_batches, max_batches)
        while True:
            running = [batch for batch in self.batches if batch.running]
            on_host = sum(batch.on_host for batch in running)
            if len(running) - on_host <= few and on_host <= max_on_host:
                return
            ordered = [(batch, *batch.compact) for batch in running]
            ordered.sort(key=lambda row: (row[0].on_host, row[2]))
            read = sum(rows * length for _, rows, length in ordered)
            padded = read - sum(batch.needed for batch in running)
            best: tuple[int, tuple[PlannedBatch, PlannedBatch]] | None = None
            for (shorter, rows, length), (other, more, longer) in pairwise(ordered):
                count, bound = (on_host, max_on_host) if shorter.on_host else (len(running) - on_host, few)
                if shorter.on_host != other.on_host or count <= bound:
                    continue
                added = rows * (longer - length)
                fits = (rows + more) * self._capacity(longer, 1) <= self.limits.batch_positions
                if fits and (best is None or added < best[0]):
                    best = added, (shorter, other)
            if best is None:
                return
            too_many = best[1][0].on_host or len(running) - on_host > max_batches
            if not too_many and padded + best[0] > tuned.merged_waste * (read + best[0]):
                return
            self.tally.merged += 1
            self._move_rows(moves, best[1])

    @property
    def _reserved(self) -> int:
        return sum(batch.reserved for batch in self.batches)

    def _grow(self, moves: list[Move]) -> None:
        """Give room to full micro-batches; where there is none, rows give way."""
        ahead = self.ahead if self.able.moves_rows is True else 0
        for batch in [other for other in self.batches if other.running and other.length + ahead >= other.capacity]:
            while batch in self.batches:  # it may be moved out in between
                rows, length = batch.compact
                need = rows * self._capacity(length, batch.max_remaining) - batch.reserved
                if self._reserved + need <= self.limits.positions or len(self.running) <= 1:
                    self._move_rows(moves, [batch])
                else:
                    self._make_room(moves, batch)

    def _make_room(self, moves: list[Move], batch: PlannedBatch) -> None:
        """Give up rows of another micro-batch, or half of `batch`. The other one has most tokens to come."""
        rows = sorted(batch.living, key=lambda row: row.left)[len(batch.living) // 2 :]
        if others := [other for other in self.batches if other is not batch]:
            rows = max(others, key=lambda other: (not other.running, other.max_remaining)).living
        self.tally.yielded += len(rows)
        self._give_up(moves, rows)

    # Prompts

    def _time_for_prompts(self, works: Several[PlannedWork]) -> bool:
        """Tell whether prompts should have a pass of their own: once free rows have cost as much (ski rental)."""
        if not self.waiting:
            return False
        running = sum(len(batch.alive) for batch, _ in works)
        if not running:
            return True
        if not self.able.moves_rows:  # a micro-batch runs to its end
            return False
        free = min(len(self.waiting), self._free_rows())
        self._debt += max(free / running, 1 / tuning.TUNED.patience if self._newcomer else 0.0)
        if self._debt < 1:
            return False
        self._debt = 0.0
        return True

    def _free_rows(self) -> int:
        used, front = len(self.running), self.waiting.front(tuning.TUNED.front)
        mean = max(1, sum(row.length for row in front) // max(1, len(front)))
        room = int((self.limits.positions - self._reserved) / (mean * tuning.TUNED.padding))
        return min(self.limits.rows - used, room)

    def _prompts(self, moves: list[Move], decoding: Several[PlannedWork]) -> list[PlannedWork]:
        """Return the works of prompts for a pass with the works `decoding`; new micro-batches are admitted."""
        tuned = tuning.TUNED
        min_tokens = tuned.min_prompt_tokens
        budget = self.times.tokens
        if self.able.one_pass:
            load = load_of_pass(decoding)
            hidden = self.times.room(load._replace(prompts=load.prompts + 1))
            flow = min(self._flow(), hidden + self.times.tokens_in(self.times.seconds(load)))
            budget = max(hidden, flow, min_tokens)
        elif not self.able.moves_rows:  # the micro-batch runs to its end: all rows that fit
            budget = 1 << 62
        works = list[PlannedWork]()

        def admit(tokens: int, alone: bool) -> bool:
            nonlocal budget
            work = self._admit(moves, tokens, alone)
            if work is not None:
                works.append(work)
                budget -= work.tokens * len(work.batch.rows)
            return work is not None

        unfinished = [batch for batch in self.batches if not batch.running]
        share, newcomer = budget, self._newcomer  # of an unfinished micro-batch or new request
        if self.arrivals and len({row.owner for batch in unfinished for row in batch.living}) + newcomer > 1:
            share = min(budget, max(min_tokens, budget // (len(unfinished) + newcomer)))
        if newcomer and share < budget:  # with prompts of others under way
            admit(share, False)
        for batch in unfinished:
            rows, missing = len(batch.rows), batch.width - batch.length
            if budget >= min(min_tokens, rows * missing) or not (decoding or works):
                works.append(PlannedWork(batch, min(missing, max(1, min(budget, share) // rows))))
                budget -= works[-1].tokens * rows
        for _ in range(tuned.new_batches):
            if not self.waiting or not admit(budget, not (decoding or works)) or not self.able.one_pass:
                break
        return works

    def _flow(self) -> int:
        """Return the prompt tokens per pass that replace finishing rows. They are worth a longer pass."""
        front = self.waiting.front(tuning.TUNED.front)
        if not front:
            return 0
        rows = max(0, min(len(self.waiting), self._free_rows())) + len(self.running)
        left = sum(row.left for row in front) / len(front)
        passes = (1 - (1 - self.ending) ** left) / self.ending if self.ending else left
        return ceil(ceil(rows / max(1.0, passes)) * sum(row.length for row in front) / len(front))

    def _need(self, rows: Several[Sequence]) -> NDArray[Any]:
        """Return the positions of rows at `_TIMES`, each to its end."""
        left = np.array([row.left for row in rows], dtype=np.int64)[:, None]
        length, alive = np.array([row.length for row in rows], dtype=np.int64)[:, None], left > _TIMES
        at_once = self.able.moves_rows is not True  # the room is reserved at once
        more = left + self.ahead + np.ceil(self.slack * left) if at_once else self.step // 2 + _TIMES
        taken: NDArray[Any] = (alive * (length + more)).sum(0)
        return taken if at_once else taken * tuning.TUNED.padding * (1 - self.ending) ** _TIMES

    def _held(self, rows: int, width: int, end: int) -> NDArray[Any]:
        """Return a micro-batch's positions if it keeps its room for `end` passes."""
        return rows * self._capacity(width, end) * (end > _TIMES)

    def _usage(self) -> NDArray[Any]:
        if self.able.moves_rows is False:
            held = [batch.reserved * (batch.max_remaining > _TIMES) for batch in self.batches]
            return np.asarray(sum(held, 0 * _TIMES))
        usage = self._need(self.running)
        usage[0] = max(usage[0], self._reserved)
        return usage

    def _admit(self, moves: list[Move], budget: int, alone: bool) -> PlannedWork | None:
        """Begin a micro-batch of waiting rows of like length; None if there is no room. A row is begun whatever its
        length if it is `alone`."""
        able, tuned = self.able, tuning.TUNED
        free_rows = self.limits.rows - len(self.running)
        if not self.waiting or free_rows < 1 or (able.moves_rows is False and not able.one_pass and self.batches):
            return None
        fresh = self._next.length - self.reusable(self._next)
        min_tokens = tuned.min_prompt_tokens if able.chunks else self.times.tokens
        if budget < min(fresh, min_tokens) and not alone:
            return None
        used = self._usage() if self._used is None else self._used
        taken, width, end = list[Sequence](), 0, 0
        largest, smallest, narrowest = 0, 1 << 62, 1 << 62  # positions to compute at most and at least; shortest row
        # Where a pass has one micro-batch, it takes whatever fits.
        alike = tuned.alike if able.one_pass else 0.0
        for row in self.waiting.front(tuned.front + (0 if able.one_pass else min(free_rows, tuned.max_rows))):
            count = len(taken) + 1
            if taken and (count * largest > budget or count > free_rows):
                break
            length = row.length
            fresh = length - self.reusable(row)
            longest, shortest = max(width, length), min(narrowest, length)
            max_new, min_new = max(largest, fresh), min(smallest, fresh)
            unlike = shortest < alike * longest or min_new + tuned.reuse_slack < alike * max_new
            if not able.pads:
                unlike = shortest < longest or min_new < max_new
            if taken and (unlike or count * max_new > budget):
                if not self.arrivals:
                    break
                continue
            if taken and count * self._capacity(longest, 1) > self.limits.batch_positions:
                break
            need = self._need([row])
            if able.moves_rows is False:
                after = self._held(count, longest, max(end, row.left))
                need = after - self._held(len(taken), width, end)
            if (used + need > self.limits.positions).any() and (taken or self.batches):
                break
            taken.append(row)
            width, narrowest, largest, smallest = longest, shortest, max_new, min_new
            end, used = max(end, row.left), used + need
        self._used = used
        if not taken:
            return None
        self.waiting.begin(taken)
        self.begun += taken
        count, lengths = largest, [row.length for row in taken]
        batch = PlannedBatch(taken, lengths, width, self._capacity(width, end), width - count)
        self.batches.append(batch)
        moves.append(Move("admit", batch))
        if able.chunks and len(taken) * count > budget:
            count = min(count, max(tuned.min_prompt_tokens, budget) // len(taken))
        return PlannedWork(batch, max(1, count))


def largest_load(planner: Planner, needs: Several[tuple[int, int]], max_rows: int | None = None) -> Workload:
    """Return the largest load of rows. They have the mean of `needs`, (known tokens, tokens to come) each; there are as
    many as the plan's machine has room for, and as are faster together, at most `max_rows`, and one at least."""
    input_len, left = (max(1, -(-sum(column) // len(needs))) for column in zip(*needs, strict=True))
    case, cautious, limits, tuned = planner.case, planner.cautious, planner.limits, tuning.TUNED

    def at(rows: int) -> Workload:
        return Workload(batch_size=rows, input_len=input_len, output_len=left)

    row_limit = min(len(needs), tuned.max_rows, max_rows or tuned.max_rows)
    place = plan_options(case.engine, case.options).kv_place
    if place != "none":
        plans = cautious.best(at(1)), limits.best(at(1))
        if place == "cpu" or any(plan.placement.kv_host_share for plan in plans):
            rows = [
                plan.case.workload.batch_size if plan.output_tok_s and plan.fits else plan.max_batch_size
                for plan in plans
            ]
            # A pass that falls short of memory is tried again with fewer rows.
            enough = rows[0] >= tuned.min_margin_share * min(row_limit, limits.max_batch(at(1)))
            return at(max(1, min(row_limit, rows[0] if enough else max(rows))))

    def room(rows: int) -> tuple[bool, bool]:
        """Tell whether the load fits, with a layer in the ring: else the link waits for work."""
        padded = at(ceil(rows * tuned.padding))
        grown = padded.model_copy(update={"output_len": left + tuned.growth})
        taken = cautious.placer.device_bytes(cautious.placer.tiers(cautious.placer.bare(padded), grown))
        fits = taken <= (1 - tuned.expanded_share) * planner.machine.device_bytes
        return fits, fits and cautious.placement(padded).holds_layer

    deep = room(1)[1]
    return at(1 + search.largest(lambda more: room(1 + more)[1 if deep else 0], row_limit - 1))


def positions_of(load: Workload) -> int:
    """Return the positions a load may take, padding and growth included."""
    return ceil(load.batch_size * tuning.TUNED.padding) * (load.total_len + tuning.TUNED.growth)
