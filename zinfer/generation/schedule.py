"""Continuous batching: which rows and which chunks of prompts go into the next pass, from lengths and seconds alone.

A pass of streamed weights takes as long as the link needs for them, whatever it computes meanwhile. So each pass
carries a token for every running row and, beside them, chunks of waiting prompts, up to the work that hides behind the
link. Rows begin and end at every pass (Orca, Yu et al. 2022); chunks of prompts as in Sarathi-Serve (arXiv:2403.02310).

Rows live in rectangles, the micro-batches of an engine: `Group` is the plan of one. A row that has ended, and the
padding of a row shorter than the longest, is read at every step all the same; so groups are made of rows of like
length, and are merged and compacted where that is worth more than it costs. Room for tokens still to come is taken in
steps. Nothing that is computed is computed again, unless the engine can neither keep nor move it.

Rows of requests that arrive share the memory by request, not by arrival: the next row to begin is one of the request
that has fewest. Where there is no room for it, a request with more than a quarter of the rows gives some up, which go
on later with the tokens that they have.

Nothing here runs a model: `Schedule.plan` returns the `Move`s and the works of a pass, which
`zinfer.generation.scheduler.ContinuousScheduler` carries out; tests carry them out on a clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeVar

from zinfer.core.case import Case, Workload
from zinfer.core.engine import plan_options
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.plan import cost
from zinfer.plan.cost import Efficiency, Placement
from zinfer.plan.plan import CAUTIOUS, Plan, largest_batch, place, placement_of
from zinfer.plan.search import best_batch

MAX_ROWS = 4096  # rows that run at a time at most
FEW_SHARE = 0.5  # share of the rows that fit without a margin: memory is not kept free for one that leaves fewer
STEP = 64  # positions by which the room of a group grows
AT_FIRST = Efficiency(link_share=0.98, mfu=0.7, expert_mfu=0.45)  # until passes are measured: a bit less than recorded
LEAST_TOKENS = 256  # prompt tokens that a pass takes at least, if any wait: fewer make poor matrix products
FURTHER = 4  # times as many for a further group that does not fit whole: it has a forward pass of its own
FRONT = 64  # waiting rows among which one of like length is looked for
NEW_GROUPS = 3  # groups begun in one pass at most
ALIKE = 0.8  # shortest prompt of a group, as a share of its longest
SLACK = 64  # prompt tokens by which rows that reuse kept ones may differ beyond that
WASTE = 0.08  # share of a group's positions that may be padding before it is compacted
SHARE = 0.05  # share of all positions that may be padding before the worst group is compacted
HOSTED = 0.25, 0.2  # both, of groups that are slow to move
DRAFTED = 0.2, 0.12  # both, where each pass of drafts leaves gaps
GAPS = 2  # passes of drafts that are all wrong, for which a group has room besides
MERGED_SHARE = 0.04  # share of all positions that may be padding after a merge
FEW_GROUPS, MOST_GROUPS = 4, 20  # groups are merged above the first number if that is cheap, above the second anyway
GROUPS_SHARE = 0.6  # share of the link's seconds in which the groups of a pass must have read the weights
WARMING = 8  # passes that are not measured: they compile kernels and take memory
HIDDEN_S = 1.3  # seconds of a pass over those of its link up to which its work may still be shorter: some never hides
RECENT = 5  # passes whose median corrects the seconds: single slow ones say nothing
LAUNCH_S = 0.8e-3  # seconds in which the CPU launches a layer once, at first
PASS_S = 4e-3  # seconds in which it does what a forward pass needs besides its layers
JOINED_S = 0.12e-3  # seconds in which it launches the attention of one group, where groups share a forward pass
SHARE_KEPT = 4  # a request keeps one in so many of the rows while others wait
PATIENT = 4  # passes after which prompts of a request without a row make a pass twice as long, or have their own
MERGES = 4  # merges in one pass at most: each copies the rows of two groups
COPIES = 12  # positions read by a decode step in the time in which one is moved: memory is taken for it, and filled
MOVE_S = 1e-3  # seconds for a layer in which memory is taken and copies are launched
EXPANDED_SHARE = 0.03  # share of the device's memory for keys and values that attention copies for its heads
PADDING = 1.1  # positions taken over positions needed, for steps of growth and padding: what admission reckons with
LOWER = 4, 5  # share of what memory was too little for that the limits allow from then on
CALM = 256  # passes with enough memory after which lowered limits rise by a step
HIGHER = 9, 8  # that step


@dataclass(eq=False)
class Row:
    """A sequence: its known tokens (prompt and output so far), the most tokens that it may still get, and the request
    that it belongs to."""

    key: int
    length: int
    left: int
    request: int = 0

    @property
    def stored(self) -> int:
        """Positions in the KV cache once its known tokens but the last, chosen one are computed."""
        return self.length - 1


class Group:
    """A micro-batch: `rows` (None has ended), of which `length` positions are computed, padding included, `width` of
    them belong to known tokens, and `capacity` are reserved. `real` are each row's positions without padding. `hosted`
    tells whether some of its KV cache is in host memory, so that moving it is slow."""

    hosted = False

    def __init__(
        self, rows: Sequence[Row | None], real: Sequence[int], width: int, capacity: int, length: int = 0
    ) -> None:
        self.rows: list[Row | None] = list(rows)
        self._pads = [width - count for count in real]
        self.width, self.capacity, self.length = width, capacity, length
        self.gaps = False  # True once positions between others were forgotten

    @property
    def running(self) -> bool:
        """True once all known tokens are computed."""
        return self.length >= self.width

    @property
    def alive(self) -> list[int]:
        """Places of the rows that have not ended."""
        return [place for place, row in enumerate(self.rows) if row is not None]

    @property
    def positions(self) -> int:
        """Positions that a decode step reads."""
        return len(self.rows) * self.length

    @property
    def reserved(self) -> int:
        return len(self.rows) * self.capacity

    def real(self, place: int) -> int:
        """Positions of a row without padding."""
        return max(0, self.length - self._pads[place])

    @property
    def needed(self) -> int:
        """Positions of rows that have not ended, without padding."""
        return sum(self.real(place) for place in self.alive)

    def left(self, place: int) -> int:
        """Most tokens that a row may still get."""
        row = self.rows[place]
        return 0 if row is None else row.left

    def keep(self, kept: Sequence[int]) -> None:
        """Count the positions that rows keep of a pass, one at least each; the others were forgotten."""
        most = max(kept)
        self.length += most
        self._pads = [pad + most - own for pad, own in zip(self._pads, kept, strict=True)]
        self.gaps = self.gaps or min(kept) < most

    def remove(self, places: Collection[int]) -> None:
        """Take rows out; the others close up."""
        kept = [place for place in range(len(self.rows)) if place not in places]
        self.rows, self._pads = [self.rows[place] for place in kept], [self._pads[place] for place in kept]

    @property
    def compact(self) -> tuple[int, int]:
        """Rows and positions of each after a compaction."""
        alive = self.alive
        return len(alive), max((self.real(place) for place in alive), default=0)

    @property
    def max_remaining(self) -> int:
        """Most tokens that a row may still get."""
        return max((row.left for row in self.rows if row is not None), default=0)


MoveKind = Literal["admit", "regroup", "split", "retire", "suspend", "resume", "recompute", "yield"]


class Move(NamedTuple):
    """A change of micro-batches before a pass. `admit`, `resume`, `regroup` and `split` make `group`, the latter two of
    rows at places of other groups, `sources`: of all that have not ended, or, `split`, of some. The first `length`
    positions of an admitted group are not computed, but taken from what is kept. `suspend` moves a group's KV cache to
    host memory, `retire` and `recompute` free it, `yield` that of the rows of `group`, which wait again, in another."""

    kind: MoveKind
    group: Group
    sources: tuple[tuple[Group, tuple[int, ...]], ...] = ()


class GroupWork(NamedTuple):
    """The positions of a group that a pass computes."""

    group: Group
    tokens: int  # a row


class PassPlan(NamedTuple):
    """The moves before a pass, and its works."""

    moves: list[Move]
    works: list[GroupWork]


class Abilities(NamedTuple):
    """Abilities of an engine: several works in one trip of the weights, prompts in chunks, rows moved between
    micro-batches, keys and values kept in host memory, rows of unlike length in a micro-batch (`pads`). `regroups` is
    "rarely" where moving rows of some groups, `Group.hosted`, is slow."""

    one_trip: bool = True
    chunks: bool = True
    regroups: bool | Literal["rarely"] = True
    snapshots: bool = True
    pads: bool = True


class Limits(NamedTuple):
    """Memory of the running rows: `positions` of KV cache, padding and reserve included, at most `rows` of them, at
    most `group` positions in one group."""

    positions: int
    rows: int = 1 << 20
    group: int = 1 << 62


@dataclass
class Tally:
    """Counts of the passes so far. `read` are positions of KV cache that were read, `padded` those of them that belong
    to no running row; `computed` are positions computed, `again` those of them that had been computed before; `drafted`
    tokens were verified, `accepted` of them were right."""

    passes: int = 0
    seconds: float = 0.0
    read: int = 0
    padded: int = 0
    computed: int = 0
    again: int = 0
    prompts: int = 0  # positions of prompts that were computed, padding included
    prompt_padding: int = 0
    merged: int = 0
    suspended: int = 0
    yielded: int = 0  # rows that other requests took the place of
    retries: int = 0  # passes, or moves before them, that memory fell short for
    drafted: int = 0
    accepted: int = 0

    @property
    def padding(self) -> float:
        """Share of the KV cache read that is padding."""
        return self.padded / self.read if self.read else 0.0


class PassLoad(NamedTuple):
    """Work of a pass: rows that decode, in `groups`, and the positions that they read; prompt tokens, in `prompts`.
    Groups in host memory share a forward pass, and count as one."""

    rows: int = 0
    positions: int = 0
    prompt_tokens: int = 0
    groups: int = 0
    prompts: int = 0


def load_of_pass(works: "Sequence[GroupWork]") -> PassLoad:
    """Return the work of a pass that has not been done yet."""
    decoding = [group for group, _ in works if group.running]
    return PassLoad(
        rows=sum(len(group.rows) * count for group, count in works if group.running),
        positions=sum(group.positions for group in decoding),
        prompt_tokens=sum(len(group.rows) * count for group, count in works if not group.running),
        groups=sum(not group.hosted for group in decoding) + any(group.hosted for group in decoding),
        prompts=len(works) - len(decoding),
    )


class PassTimes:
    """Seconds of a pass: those of the link, those in which the CPU launches work, and those in which the device does
    it; each hides behind the longest. They are the plan's at first, then corrected by measured passes. If the plan
    knows none, a pass takes `tokens` prompt tokens beside its rows.

    With `joins` the decode steps of all groups share a forward pass, and only attention is launched for each.
    """

    def __init__(
        self, setup: Placement, model: ModelSpec, machine: Machine, length: int = 256, joins: bool = False
    ) -> None:
        self.tokens, self.joins, self._warming = setup.pass_tokens, joins, WARMING
        self._layers = model.num_layers
        self._recent: list[tuple[PassLoad, float]] = []
        self._prompt_s = self._row_s = self._position_s = self._read_s = self._unpack_s = self.link_s = 0.0
        self._launch_s = self._joined_s = 0.0
        step = cost.step(setup, model, machine, 1, length, AT_FIRST)
        prefill = cost.prefill(setup, model, machine, 1, length, AT_FIRST)
        if step.seconds is None or prefill.seconds is None:
            return
        on_gpu = ("compute", "launch", "unpacking")
        self.link_s = max(seconds for bound, seconds in step.limits.items() if bound not in on_gpu)
        self._unpack_s = step.limits.get("unpacking", 0.0)
        self._prompt_s = prefill.limits["compute"] / length
        self._row_s = step.limits["compute"]
        if machine.hbm_bandwidth is not None:  # a forward pass reads the weights, and attention keys and values
            size = model.kv_bytes(1, length) * setup.kv_ratio * (1 - setup.kv_host_share) / length
            size = cost.attention_bytes(setup, size, AT_FIRST)
            self._read_s = model.weight_bytes / machine.hbm_bandwidth
            # Kernels for short rows reach half of the bandwidth; of several GPUs each has its own rows.
            self._position_s = 2 * size / machine.hbm_bandwidth / setup.gpus
            self._launch_s = PASS_S + LAUNCH_S * model.num_layers
            self._joined_s = JOINED_S * model.num_layers

    @property
    def known(self) -> bool:
        """True if the plan knows the seconds of a pass."""
        return self._prompt_s > 0

    def _forwards(self, load: PassLoad) -> int:
        """Return the number of forward passes of the model in a pass."""
        return load.prompts + (min(1, load.groups) if self.joins else load.groups)

    def launching(self, load: PassLoad) -> float:
        """Return the seconds in which the CPU launches a pass."""
        return self._launch_s * self._forwards(load) + (self._joined_s * load.groups if self.joins else 0.0)

    def computing(self, load: PassLoad) -> float:
        """Return the seconds in which the device computes a pass."""
        decode = self._row_s * load.rows + self._position_s * load.positions
        return self._unpack_s + self._read_s * self._forwards(load) + decode + self._prompt_s * load.prompt_tokens

    def work(self, load: PassLoad) -> float:
        """Return the seconds of the work of a pass, without the link's."""
        return max(self.launching(load), self.computing(load))

    def seconds(self, load: PassLoad) -> float:
        """Return the seconds of a pass."""
        return max(self.link_s, self.work(load))

    def room(self, load: PassLoad) -> int:
        """Return the prompt tokens that hide behind the link beside `load`; none if launching takes as long."""
        if not self.known:
            return self.tokens
        if self.launching(load) > self.link_s:
            return 0
        return max(0, int((self.link_s - self.computing(load)) / self._prompt_s))

    def room_for_drafts(self, load: PassLoad) -> int:
        """Return the further tokens of running rows that hide behind the link beside `load`; all if the plan does not
        know."""
        if not self.known:
            return 1 << 30
        return max(0, int((self.link_s - self.computing(load)) / self._prompt_s))

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds of the work of prompt tokens."""
        return self._prompt_s * tokens

    def tokens_in(self, seconds: float) -> int:
        """Return the prompt tokens that are computed in `seconds`; none if the plan does not know."""
        return int(seconds / self._prompt_s) if self.known else 0

    @property
    def groups(self) -> int:
        """Number of groups whose launches and reading of the weights leave the pass time for other work."""
        each = self._group_s
        return min(MOST_GROUPS, max(2, int(GROUPS_SHARE * self.link_s / each))) if each else FEW_GROUPS

    @property
    def hosted_groups(self) -> int:
        """The same of groups in host memory, which share a forward pass. More of them than on the device: their merge,
        which takes keys and values over the link and back, costs as much as many passes with one group more."""
        each = self._joined_s
        return max(self.groups, int(GROUPS_SHARE * self.link_s / each)) if each else MOST_GROUPS

    @property
    def _group_s(self) -> float:
        """Seconds that one group more on the device adds to launching a pass, or to its reading of the weights; 0 if
        the plan does not know."""
        return self._joined_s if self.joins else max(self._launch_s, self._read_s)

    def gained_by_merging(self, positions: int, added: int, left: int, other: int) -> float:
        """Return the seconds that a merge of two groups saves, whose rows get up to `left` and `other` more tokens:
        those of launching one of them for as long as both run, less those of reading the `added` positions of padding,
        and of copying all `positions` now, and again when the rows that end first leave a gap."""
        each = self._group_s
        if not each:  # not known: fewer groups are better
            return 1.0
        copies = 1 if left == other else 2
        taken = copies * (COPIES * self._position_s * positions + MOVE_S * self._layers)
        return min(left, other) * (each - self._position_s * added) - taken

    def saw(self, load: PassLoad, seconds: float) -> None:
        """Correct the seconds by measured passes: by the last ones' median ratio of measured to known seconds."""
        if self._warming:
            self._warming -= 1
            return
        if not self.known or seconds <= 0:
            return
        self._recent = [*self._recent[1 - RECENT :], (load, seconds)]
        load, seconds = sorted(self._recent, key=lambda one: one[1] / self.seconds(one[0]))[len(self._recent) // 2]
        work = self.work(load)
        if work < 0.5 * self.link_s:  # the link's seconds show
            ratio = seconds / self.link_s
            self.link_s *= min(2.0, max(0.5, ratio)) ** 0.25
        elif work > self.link_s or seconds > HIDDEN_S * self.link_s:  # the work's show
            self._scale(load, min(2.0, max(0.5, seconds / work)) ** 0.5)
        elif work > 0.9 * self.link_s and seconds < 1.02 * self.link_s:  # it was hidden: there may be room for more
            self._scale(load, 0.98)

    def _scale(self, load: PassLoad, factor: float) -> None:
        """Correct the seconds that a pass with `load` took: of launches, or of computing."""
        if self.launching(load) > self.computing(load):
            self._launch_s *= factor
            self._joined_s *= factor
            return
        self._prompt_s *= factor
        self._row_s *= factor
        self._position_s *= factor
        self._read_s *= factor


class Demand(Protocol):
    """Tokens that a row knows, and the most that it may still get."""

    @property
    def length(self) -> int: ...
    @property
    def left(self) -> int: ...


def like_order(row: Demand) -> tuple[int, int, int]:
    """Return the sort key of a queue whose rows may run in any order: most tokens to come first, by powers of two; of
    equal ones the longest first. Long answers, which end last, then begin first, and neighbours are alike."""
    return -row.left.bit_length(), -row.length, -row.left


def arrival_order(row: Row) -> tuple[int, int, int]:
    """Return the sort key of a queue in the order of arrival: the row's key, a number that grows."""
    return row.key, 0, 0


class Shared(Protocol):
    """Row of a request; keys grow with arrivals."""

    @property
    def key(self) -> int: ...
    @property
    def request(self) -> int: ...


R = TypeVar("R", bound=Shared)


def in_turn(rows: Iterable[R], held: Mapping[int, int], since: Mapping[int, int] = MappingProxyType({})) -> list[R]:
    """Return waiting rows in the order in which they may begin: the next one is of the request that has fewest rows by
    then, those that it has, `held`, and those before it; of several such requests it is the one that has had so few for
    longest, as `since` says in turns; then the row that came first."""
    ordered = sorted(rows, key=attrgetter("key"))
    ranks, counts = list[tuple[int, int]](), Counter(held)
    for row in ordered:
        ranks.append((counts[row.request], since.get(row.request, 0)))
        counts[row.request] += 1
    return [row for _, row in sorted(zip(ranks, ordered, strict=True), key=itemgetter(0))]


@dataclass
class Schedule:
    """The rows that wait and run, and the plan of each pass.

    Call `plan`, carry it out, then `done` with its works, seconds and the rows that got a token and ended. `ending` is
    the chance that a row ends at a token before its limit. `slack` is the room that is taken besides for the tokens to
    come where it cannot be made later, as a share of them: forgotten positions stay between others. `ahead` is the room
    that drafts take in a pass, behind the next token. `reusable` tells of a waiting row how many of its first positions
    are kept in host memory, and need not be computed; not all of them. A row that grows beyond `recompute_beyond`
    tokens (`Engine.recompute_beyond`) is computed anew.
    """

    times: PassTimes
    limits: Limits
    able: Abilities = field(default_factory=Abilities)
    order: Callable[[Row], tuple[int, int, int]] = like_order
    recompute_beyond: int | None = None
    step: int = STEP
    slack: float = 0.0
    ahead: int = 0
    ending: float = 0.0
    reusable: Callable[[Row], int] = lambda _row: 0
    groups: list[Group] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    suspended: list[Group] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    _sorted: bool = True
    _shared: Counter[int] = field(default_factory=Counter)  # rows of each request when the queue was sorted
    # Turn at which each request came, or last had a row that ended.
    _since: dict[int, int] = field(default_factory=dict)
    _turn: int = 0
    _tokens: int = 0
    _early: int = 0  # rows that ended before their limit
    _debt: float = 0.0  # cost of free places so far: in seconds, or in passes where prompts have a trip of their own
    _whole: Limits | None = None  # limits before memory fell short
    _calm: int = 0  # passes since then, or since the limits last rose
    _patience: int = CALM  # passes after which they rise
    _rose: bool = False  # True if they have risen since

    def add(self, rows: Iterable[Row]) -> None:
        """Let rows wait."""
        rows = list(rows)
        for request in {row.request: None for row in rows if row.request not in self._since}:
            self._next_turn(request)
        self.waiting += rows
        self._sorted = False

    def drop(self, keys: Iterable[int]) -> None:
        """Forget rows, waiting or running; running ones are retired before the next pass."""
        gone = set(keys)
        self.waiting = [row for row in self.waiting if row.key not in gone]
        for group in [*self.groups, *self.suspended]:
            group.rows = [None if row is not None and row.key in gone else row for row in group.rows]

    @property
    def running(self) -> list[Row]:
        """Rows whose micro-batches are in the engine."""
        return [row for group in self.groups for row in group.rows if row is not None]

    @property
    def busy(self) -> bool:
        return bool(self.groups or self.waiting or self.suspended)

    @property
    def shares(self) -> bool:
        """True if rows are shared out by request."""
        return self.order is arrival_order

    # A pass

    def plan(self) -> PassPlan:
        """Return the moves and works of the next pass; no works if nothing is left to do."""
        self._sort()
        moves: list[Move] = []
        self._retire(moves)
        self._recompute(moves)
        if self.able.regroups:
            self._compact(moves)
            self._merge(moves)
        self._grow(moves)
        if self.able.one_trip:
            self._make_way(moves)
        works = [GroupWork(group, 1) for group in self.groups if group.running]
        if self.able.one_trip:
            works += self._prompts(moves, works)
            return PassPlan(moves, works)
        unfinished = [group for group in self.groups if not group.running]
        if unfinished or self._time_for_prompts(works):
            self._make_way(moves)
            prompts = self._prompts(moves, [])
            if prompts:
                return PassPlan(moves, prompts[:1])
            works = [GroupWork(group, 1) for group in self.groups if group.running]
        return PassPlan(moves, works[:1] if len(works) < 2 else self._in_turn(works))

    def done(
        self,
        works: Sequence[GroupWork],
        seconds: float,
        ended: Iterable[int],
        gained: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Count a pass that took `seconds`: each row of a work whose known tokens were computed has got a token, or as
        many as `gained` says by key, but those that `ended` (keys) are over. A row keeps a position for each token that
        it got; the others of a work of several tokens were forgotten."""
        over, tally = set(ended), self.tally
        load = load_of_pass(works)
        for group, count in works:
            if not group.running:
                tally.prompts += len(group.rows) * count
            if group.running and count > 1:
                group.keep([1 if row is None else gained.get(row.key, 1) for row in group.rows])
            else:
                group.length += count
            tally.read += group.positions
            tally.padded += group.positions - group.needed
            tally.computed += len(group.rows) * count
            if group.running:
                for place in group.alive:
                    row = group.rows[place]
                    assert row is not None
                    tokens = gained.get(row.key, 1)
                    row.length += tokens
                    row.left -= tokens
                    self._tokens += tokens
                    self._early += row.key in over and row.left > 0
                    if row.key in over or row.left <= 0:
                        group.rows[place] = None
                        self._next_turn(row.request)
        if self.shares:  # prompts that do not fit into a pass take turns
            served = [group for group, _ in works if not group.running]
            self.groups = [one for one in self.groups if all(one is not group for group in served)] + served
        tally.passes += 1
        tally.seconds += seconds
        self.times.saw(load, seconds)
        self._raise_limits()

    def _raise_limits(self) -> None:
        """Let the limits rise by a step, if memory has not fallen short for long enough."""
        whole, now = self._whole, self.limits
        if whole is None or (now.positions >= whole.positions and now.group >= whole.group):
            return
        self._calm += 1
        if self._calm >= self._patience:
            positions, group = (each * HIGHER[0] // HIGHER[1] + 1 for each in (now.positions, now.group))
            self.limits = now._replace(positions=min(whole.positions, positions), group=min(whole.group, group))
            self._calm, self._rose = 0, True

    def fell_short(self, lost: Iterable[Group]) -> None:
        """Lower the limits: memory was too little for all groups, and `lost` are those that it was asked for. Later
        passes raise the limits again, step by step; where memory falls short of that, they wait twice as long."""
        if self._whole is None:
            self._whole = self.limits
        elif self._rose:
            self._patience *= 2
        self._calm, self._rose = 0, False
        positions = min(self.limits.positions, sum(group.reserved for group in self.groups))
        group = min(self.limits.group, max((one.reserved for one in lost), default=1))
        lower, of = LOWER
        self.limits = self.limits._replace(positions=positions * lower // of, group=max(1, group * lower // of))

    def lost(self, groups: Iterable[Group]) -> list[Row]:
        """Let the rows of `groups`, whose KV cache is lost, wait again; return them."""
        rows = []
        for group in groups:
            rows += [row for row in group.rows if row is not None]
            self.tally.again += group.needed
            self.groups = [one for one in self.groups if one is not group]
            self.suspended = [one for one in self.suspended if one is not group]
        self.add(rows)
        return rows

    # Shares

    def _next_turn(self, request: int) -> None:
        """Let a request wait behind those that have had as few rows for longer."""
        self._turn += 1
        self._since[request] = self._turn
        self._sorted = self._sorted and not self.shares

    def _sort(self) -> None:
        """Sort the queue."""
        if self.shares:
            held = Counter(row.request for row in self.running)
            if not self._sorted or held != self._shared:
                self.waiting, self._shared = in_turn(self.waiting, held, self._since), held
                known = held.keys() | {row.request for row in self.waiting}
                self._since = {request: turn for request, turn in self._since.items() if request in known}
        elif not self._sorted:
            self.waiting.sort(key=self.order)
        self._sorted = True

    @property
    def _newcomer(self) -> bool:
        """True if the next row is of a request that has none, while others have."""
        if not (self.shares and self.waiting):
            return False
        running = self.running
        return bool(running) and all(row.request != self.waiting[0].request for row in running)

    def _make_way(self, moves: list[Move]) -> None:
        """Take rows from requests that have more than a quarter of all, and more than requests whose rows wait and have
        no room; for as many of these as a pass has prompt tokens for. What they have computed is kept if it can be."""
        running = self.running
        held = Counter(row.request for row in running)
        if not (self.shares and self.able.regroups) or len({*held, *(row.request for row in self.waiting)}) < 2:
            return
        least = max(1, len(running) // SHARE_KEPT)
        places = {id(row): group for group in self.groups for row in group.rows}
        queue = sorted(running, key=lambda row: (places[id(row)].running, -row.key))  # whose loss costs least first
        back = [row for group in self.suspended for row in group.rows if row is not None]  # they come first
        needs, reserved, new = self._need(running), self._reserved, self._need(back)
        free, tokens = self.limits.rows - len(running) - len(back), max(LEAST_TOKENS, self.times.room(PassLoad()))
        given: list[Row] = []
        for row in self.waiting[:FRONT]:
            new = [one + more for one, more in zip(new, self._need([row]), strict=True)]
            while free < 1 or any(
                max(now, float(reserved * (not later))) + more > self.limits.positions
                for now, more, later in zip(needs, new, _TIMES, strict=True)
            ):
                victim = max(queue, key=lambda one: held[one.request], default=row)  # the first of the richest
                if held[victim.request] <= max(least, held[row.request] + 1):
                    break
                queue.remove(victim)
                given.append(victim)
                held[victim.request] -= 1
                free, reserved = free + 1, reserved - places[id(victim)].capacity
                needs = [now - less for now, less in zip(needs, self._need([victim]), strict=True)]
            else:
                held[row.request] += 1
                free, tokens = free - 1, tokens - (row.length - self.reusable(row))
                if tokens > 0:
                    continue
            break
        if given:
            self.tally.yielded += len(given)
            self._give_up(moves, given)

    def _recompute(self, moves: list[Move]) -> None:
        """Let running rows wait again whose next token needs other keys than those that they have."""
        if self.recompute_beyond is not None:
            rows = [row for group in self.groups if group.running for row in group.rows]
            grown = [row for row in rows if row is not None and row.length == self.recompute_beyond + 1]
            if grown:
                self._give_up(moves, grown)

    def _give_up(self, moves: list[Move], rows: Sequence[Row]) -> None:
        """Take rows out of their groups, and let them wait again."""
        gone = {id(row) for row in rows}
        for group in list(self.groups):
            taken = tuple(place for place in group.alive if id(group.rows[place]) in gone)
            if not taken:
                continue
            if len(taken) == len(group.alive):
                taken = tuple(range(len(group.rows)))
                self.groups.remove(group)
            real = [group.real(place) for place in taken]
            made = Group([group.rows[place] for place in taken], real, max(real), group.capacity, max(real))
            moves.append(Move("yield", made, ((group, taken),)))
            group.remove(taken)
        self.add(rows)
        self._sort()

    # Moves

    def _retire(self, moves: list[Move]) -> None:
        for group in [one for one in self.groups if not one.alive]:
            self.groups.remove(group)
            moves.append(Move("retire", group))
        for group in [one for one in self.suspended if not one.alive]:
            self.suspended.remove(group)
            moves.append(Move("retire", group))

    def _regroup(self, moves: list[Move], sources: Sequence[Group]) -> Group:
        """Move the living rows of `sources` into one group."""
        taken = tuple((group, tuple(group.alive)) for group in sources)
        rows = [row for group in sources for row in group.rows if row is not None]
        real = [group.real(place) for group, places in taken for place in places]
        length = max(real)
        left = max(row.left for row in rows)
        made = Group(rows, real, length, self._capacity(length, left), length)
        made.hosted = any(group.hosted for group in sources)
        self.groups = [group for group in self.groups if all(group is not one for one in sources)] + [made]
        moves.append(Move("regroup", made, taken))
        return made

    def _capacity(self, length: int, left: int) -> int:
        """Return the capacity of a group with `length` positions whose rows may get `left` more tokens."""
        most = length + max(1, left) + self.ahead
        if self.able.regroups is not True:
            return most + ceil(self.slack * left)
        most += GAPS * self.ahead
        return min(most, -(-(length + 1 + self.ahead) // self.step) * self.step + self.step // 2)

    def _compact(self, moves: list[Move]) -> None:
        """Compact groups with much padding, and the worst ones while there is much in all."""

        def waste(group: Group) -> int:
            rows, length = group.compact
            return group.positions - rows * length

        decoding = [group for group in self.groups if group.running]
        read, needed = sum(group.positions for group in decoding), sum(group.needed for group in decoding)
        for group in sorted(decoding, key=waste, reverse=True):
            gain = waste(group)
            bound, share = HOSTED if group.hosted else DRAFTED if self.ahead else (WASTE, SHARE)
            if gain > bound * group.positions or (gain and read - needed > share * read):
                read -= gain
                self._regroup(moves, [group])

    def _merge(self, moves: list[Move]) -> None:
        """Merge neighbours in length while that adds little padding and saves more time than it takes, or there are too
        many groups."""
        most, most_hosted = (self.times.groups, self.times.hosted_groups) if self.able.one_trip else (1, 1)
        few = min(FEW_GROUPS, most)
        limit = MERGES if self.able.one_trip else 1 << 20
        for _ in range(limit):
            running = [group for group in self.groups if group.running]
            hosted = sum(group.hosted for group in running)
            if len(running) - hosted <= few and hosted <= most_hosted:
                return
            found = sorted(((group, *group.compact) for group in running), key=lambda one: (one[0].hosted, one[2]))
            read = sum(rows * length for _, rows, length in found)
            padded = read - sum(group.needed for group in running)
            best: tuple[int, tuple[Group, Group]] | None = None
            for (one, rows, length), (other, more, longer) in pairwise(found):
                count, bound = (hosted, most_hosted) if one.hosted else (len(running) - hosted, most)
                if one.hosted != other.hosted or count <= (most_hosted if one.hosted else few):
                    continue
                added = rows * (longer - length)
                gain = self.times.gained_by_merging((rows + more) * longer, added, one.max_remaining, other.max_remaining)
                fits = (rows + more) * self._capacity(longer, 1) <= self.limits.group
                if fits and (gain > 0 or count > bound) and (best is None or added < best[0]):
                    best = added, (one, other)
            if best is None:
                return
            many = best[1][0].hosted or len(running) - hosted > most
            if not many and padded + best[0] > MERGED_SHARE * (read + best[0]):
                return
            self.tally.merged += 1
            self._regroup(moves, best[1])

    @property
    def _reserved(self) -> int:
        return sum(group.reserved for group in self.groups)

    def _grow(self, moves: list[Move]) -> None:
        """Give room to groups that are full; where there is none, move rows out of the way."""
        ahead = self.ahead if self.able.regroups is True else 0
        for group in [one for one in self.groups if one.running and one.length + ahead >= one.capacity]:
            if group not in self.groups:  # moved out of the way meanwhile
                continue
            rows, length = group.compact
            need = rows * self._capacity(length, group.max_remaining) - group.reserved
            while self._reserved + need > self.limits.positions and len(self.running) > 1:
                if len(self.groups) > 1:
                    self._make_room(moves, group)
                else:
                    self._split(moves, group)
                rows, length = group.compact
                need = rows * self._capacity(length, group.max_remaining) - group.reserved
            self._regroup(moves, [group])

    def _make_room(self, moves: list[Move], but: Group) -> None:
        """Move a group but `but` out of the engine: one that is not running yet, or the one with most to come."""
        others = [group for group in self.groups if group is not but]
        victim = max(others, key=lambda group: (not group.running, group.max_remaining))
        if not (self.able.snapshots and victim.running):
            moves.append(Move("recompute", victim))
            self.lost([victim])
            self._sort()
            return
        if len(victim.alive) < len(victim.rows) or victim.gaps:
            victim = self._regroup(moves, [victim])
        self.suspended.append(victim)
        self.tally.suspended += len(victim.rows)
        moves.append(Move("suspend", victim))
        self.groups = [group for group in self.groups if group is not victim]

    def _split(self, moves: list[Move], group: Group) -> None:
        """Split off the half of a group's rows with most tokens to come."""
        places = sorted(group.alive, key=lambda place: group.left(place))
        taken = tuple(sorted(places[len(places) // 2 :]))
        rows, real = [group.rows[place] for place in taken], [group.real(place) for place in taken]
        left = max(group.left(place) for place in taken)
        made = Group(rows, real, max(real), self._capacity(max(real), left), max(real))
        group.remove(taken)
        self.groups.append(made)
        moves.append(Move("split", made, ((group, taken),)))

    # Prompts

    def _time_for_prompts(self, works: Sequence[GroupWork]) -> bool:
        """Tell whether prompts should have a trip of their own: once the places that they could take have cost as much
        as the trip will (the ski-rental rule)."""
        if not self.waiting and not self.suspended:
            return False
        running = sum(len(group.alive) for group, _ in works)
        if not running:
            return True
        if not self.able.regroups:  # a group runs to its end
            return False
        free = min(len(self.waiting), self._free_rows())
        self._debt += max(free / running, 1 / PATIENT if self._newcomer else 0.0)
        if self._debt < 1:
            return False
        self._debt = 0.0
        return True

    def _free_rows(self) -> int:
        used = sum(len(group.alive) for group in self.groups)
        mean = max(1, sum(row.length for row in self.waiting[:FRONT]) // max(1, len(self.waiting[:FRONT])))
        return min(self.limits.rows - used, int((self.limits.positions - self._reserved) / (mean * PADDING)))

    def _in_turn(self, works: list[GroupWork]) -> list[GroupWork]:
        """Return the work of one group, the one furthest behind, where each group costs a trip of its own."""
        return [max(works, key=lambda work: work.group.max_remaining)]

    def _prompts(self, moves: list[Move], decoding: Sequence[GroupWork]) -> list[GroupWork]:
        """Return the works of prompts for a pass with the works `decoding`; new groups are admitted."""
        budget, hidden = self.times.tokens, 0
        if self.able.one_trip:
            load = load_of_pass(decoding)
            hidden = self.times.room(load._replace(prompts=load.prompts + 1))
            budget = max(hidden, min(self._flow(), hidden + self.times.tokens_in(self.times.seconds(load))))
            budget = budget if budget >= LEAST_TOKENS else budget + self._overtime(load)
            budget = budget if decoding and budget < LEAST_TOKENS else max(budget, LEAST_TOKENS)
        elif not self.able.regroups:  # the group runs to its end: all rows that fit
            budget = 1 << 62
        works, began = list[GroupWork](), budget
        unfinished = [one for one in self.groups if not one.running]
        share = self._share_of(budget, unfinished)
        if self._newcomer and share < budget:  # with prompts of others under way
            self._resume(moves, works)
            work = self._admit(moves, share, False, False, self._usage())
            if work is not None:
                works.append(work)
                budget -= work.tokens * len(work.group.rows)
        for group in unfinished:
            count = min(group.width - group.length, max(1, min(budget, share) // len(group.rows)))
            if budget >= min(LEAST_TOKENS, len(group.rows) * (group.width - group.length)) or not (decoding or works):
                works.append(GroupWork(group, count))
                budget -= count * len(group.rows)
        if not self.waiting and not self.suspended:
            return works
        self._resume(moves, works)
        usage = self._usage()
        for _ in range(NEW_GROUPS if self.able.pads else MOST_GROUPS):  # rows of one length are few
            alone = not (decoding or works)
            work = self._admit(moves, budget, bool(works), alone, usage)
            if work is None:
                break
            works.append(work)
            budget -= work.tokens * len(work.group.rows)
            if not self.able.one_trip:
                break
        if self.able.one_trip:
            self._debt = max(0.0, self._debt - self.times.prompt_seconds(began - budget - hidden))
        return works

    def _share_of(self, budget: int, unfinished: Sequence[Group]) -> int:
        """Return the prompt tokens of a pass that each unfinished group, and a request without a row, may have; all of
        them if they are of one request."""
        requests = {row.request for group in unfinished for row in group.rows if row is not None}
        count = len(unfinished) + self._newcomer
        if not self.shares or len(requests) + self._newcomer < 2:
            return budget
        return min(budget, max(LEAST_TOKENS, budget // count))

    def _flow(self) -> int:
        """Return the prompt tokens of a pass with which all places stay taken: those of as many rows as end in a pass
        once all places are. They are worth a longer pass; more at once would end at once, and leave passes without
        prompts behind."""
        front = self.waiting[:FRONT]
        if not front:
            return 0
        places = max(0, min(len(self.waiting), self._free_rows())) + len(self.running)
        left = sum(row.left for row in front) / len(front)
        early = self._early / self._tokens if self._tokens else 0.0
        passes = (1 - (1 - early) ** left) / early if early else left
        return ceil(ceil(places / max(1.0, passes)) * sum(row.length for row in front) / len(front))

    def _overtime(self, load: PassLoad) -> int:
        """Return the prompt tokens that may make the pass longer, where next to none hide: free places, which waiting
        rows could take, cost a share of each pass, and prompts may take as much time as these have cost (the ski-rental
        rule). A pass becomes twice as long by them, or by LEAST_TOKENS, at most."""
        running = load.rows
        if not running or not self.waiting:
            return 0
        seconds = self.times.seconds(load)
        free = max(0, min(len(self.waiting), self._free_rows()), running / PATIENT if self._newcomer else 0)
        most = max(seconds, self.times.prompt_seconds(LEAST_TOKENS + 1))
        self._debt = min(most, self._debt + seconds * free / running)
        return self.times.tokens_in(self._debt)

    def _resume(self, moves: list[Move], works: list[GroupWork]) -> None:
        """Bring back groups that were moved out, as long as they fit with what is there."""
        while self.suspended:
            group = self.suspended[0]
            used = self._usage()
            fits = all(
                now + more <= self.limits.positions
                for now, more in zip(used, self._need(row for row in group.rows if row is not None), strict=True)
            )
            if not fits and self.groups:
                return
            del self.suspended[0]
            rows = [row for row in group.rows if row is not None]
            real = [group.real(place) for place in range(len(group.rows))]
            capacity = self._capacity(group.length, max(row.left for row in rows))
            back = Group(group.rows, real, group.length, capacity, group.length)
            self.groups.append(back)
            moves.append(Move("resume", back, ((group, tuple(range(len(group.rows)))),)))
            works.append(GroupWork(back, 1))

    def _need(self, rows: Iterable[Row]) -> list[float]:
        """Return the positions that rows will take, at the `_times` from now, each to its end."""
        need = [0.0] * len(_TIMES)
        whole = self.able.regroups is not True
        for row in rows:
            if whole:  # the room is taken at once
                for index, later in enumerate(_TIMES):
                    if later >= row.left:
                        break
                    need[index] += row.length + row.left + self.ahead + ceil(self.slack * row.left)
                continue
            for index, later in enumerate(_TIMES):
                if later >= row.left:
                    break
                need[index] += (row.length + later + self.step // 2) * PADDING * self._alive(later)
        return need

    def _alive(self, later: int) -> float:
        return float((1 - self.ending) ** later) if self.ending else 1.0

    def _held(self, rows: int, width: int, end: int) -> list[float]:
        """Return the positions, at the `_times` from now, of a group that keeps its room until its last row ends, in
        `end` passes."""
        return [rows * self._capacity(width, end) * float(later < end) for later in _TIMES]

    def _usage(self) -> list[float]:
        if self.able.regroups is False:
            ends = [(group.reserved, group.max_remaining) for group in self.groups]
            return [float(sum(size for size, end in ends if later < end)) for later in _TIMES]
        usage = self._need(self.running)
        usage[0] = max(usage[0], float(self._reserved))
        return usage

    def _admit(self, moves: list[Move], budget: int, begun: bool, alone: bool, usage: list[float]) -> GroupWork | None:
        """Begin a group of waiting rows of like length, as many as the pass and the memory have room for; None if there
        is no room. `usage`, the positions taken from now on, is brought up to date. A row is begun whatever its length
        if it is `alone`; `begun` tells whether the pass has other prompts."""
        if not self.waiting or self.suspended:
            return None
        if self.able.regroups is False and not self.able.one_trip and self.groups:
            return None
        first = self.waiting[0]
        places = self.limits.rows - sum(len(group.alive) for group in self.groups)
        fresh = first.length - self.reusable(first)
        least = min(fresh, LEAST_TOKENS * (FURTHER if begun else 1))
        least = least if self.able.chunks else min(fresh, self.times.tokens)
        if places < 1 or (budget < least and not alone):
            return None
        empty = not self.groups
        taken, width, end = list[Row](), 0, 0
        new = list[int]()  # positions of each that are computed; the group begins where the row with most of them does
        alike, front = (ALIKE, FRONT) if self.able.one_trip else (0.0, 1 << 20)
        for row in self.waiting[:front]:
            longest, shortest = max(width, row.length), min([row.length, *(one.length for one in taken)])
            fresh = row.length - self.reusable(row)
            most, fewest = max([fresh, *new]), min([fresh, *new])
            unlike = shortest < alike * longest or fewest + SLACK < alike * most
            if not self.able.pads:
                unlike = shortest < longest or fewest < most
            if taken and (unlike or (len(taken) + 1) * most > budget):
                if self.order is like_order:
                    break
                continue
            if taken and (len(taken) + 1) * self._capacity(longest, 1) > self.limits.group:
                break
            need = self._need([row])
            if self.able.regroups is False:
                before = self._held(len(taken), width, end)
                after = self._held(len(taken) + 1, longest, max(end, row.left))
                need = [more - less for more, less in zip(after, before, strict=True)]
            room = all(now + more <= self.limits.positions for now, more in zip(usage, need, strict=True))
            if not room and not (empty and not taken):
                break
            taken.append(row)
            new.append(fresh)
            width, end = longest, max(end, row.left)
            for index, more in enumerate(need):
                usage[index] += more
            if len(taken) >= places:
                break
        if not taken:
            return None
        keys = {id(row) for row in taken}
        self.waiting = [row for row in self.waiting if id(row) not in keys]
        count = max(new)
        group = Group(taken, [row.length for row in taken], width, self._capacity(width, end), width - count)
        self.groups.append(group)
        moves.append(Move("admit", group))
        self.tally.prompt_padding += len(taken) * count - sum(new)
        if self.able.chunks and len(taken) * count > budget:
            count = min(count, max(LEAST_TOKENS, budget) // len(taken))
        return GroupWork(group, max(1, count))


def largest_load(plan: Plan, needs: Sequence[tuple[int, int]], at_most: int | None = None) -> Workload:
    """Return the largest load that rows with `needs` (known tokens, tokens to come) make together, each of the mean
    length: as many rows as the plan's machine has room for, and as are faster together, and no more than `at_most`. One
    row at least, since every row fits alone.
    """
    known, left = (max(1, -(-sum(column) // len(needs))) for column in zip(*needs, strict=True))
    case, model, machine = plan.case, plan.model, plan.machine

    def at(rows: int) -> Case:
        return case.model_copy(update={"workload": Workload(batch_size=rows, input_len=known, output_len=left)})

    most = min(len(needs), MAX_ROWS, at_most or MAX_ROWS)
    if plan_options(case.engine, case.options).kv_offload != "none":
        able = _most_rows(best_batch(at(1), model, machine, CAUTIOUS))
        if able < FEW_SHARE * min(most, largest_batch(at(1), model, machine)):
            # A pass that falls short of memory is tried again with fewer rows.
            able = max(able, _most_rows(best_batch(at(1), model, machine)))
        return at(max(1, min(most, able))).workload

    def room(rows: int) -> tuple[bool, bool]:
        """Tell whether there is room, and whether the ring then holds a layer: else the link waits for work."""
        taken = at(ceil(rows * PADDING))
        setup = placement_of(taken, model, machine, factors=CAUTIOUS)
        gpu, host, _ = cost.tiers(setup, model, machine, ceil(rows * PADDING), known, left + STEP, CAUTIOUS)
        total = gpu.total + (0 if machine.gpu_count else host.total)
        fits = total <= (1 - EXPANDED_SHARE) * machine.device_bytes
        return fits, fits and place(taken, model, machine, CAUTIOUS).holds_layer

    deep = room(1)[1]

    def fits(rows: int) -> bool:
        return room(rows)[1 if deep else 0]

    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return at(low).workload


def _most_rows(best: Plan) -> int:
    """Return the rows of the best batch, as planned, or of the largest one where no rate is known."""
    return best.case.workload.batch_size if best.output_tok_s and best.fits else best.max_batch_size


def positions_of(load: Workload) -> int:
    """Return the positions of KV cache that the rows of `load` may take, padding and room for growth included."""
    return ceil(load.batch_size * PADDING) * (load.total_len + STEP)


def _instants() -> tuple[int, ...]:
    found = [0]
    while found[-1] < 1 << 17:
        found.append(max(found[-1] + 16, found[-1] * 3 // 2))
    return tuple(found)


_TIMES = _instants()  # numbers of passes from now at which memory is reckoned with
