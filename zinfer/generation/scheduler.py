"""The decode loop, and the schedulers that run sequences on an engine.

`DecodeLoop` knows tokens on the device and nothing of text: prefill, then a token a row and step, each chosen by a
sampler. `ContinuousScheduler` runs sequences that come at any time, each with its length, sampling and stops: it
carries out the passes that `zinfer.generation.schedule.Schedule` plans.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.generation import passes
from zinfer.generation.draft_model import drafter_of
from zinfer.generation.drafts import MOST, Drafter, DraftRow, Drafts
from zinfer.generation.prefix_cache import KeptFolder, PrefixCache, cache_identity
from zinfer.generation.running_text import RunningText
from zinfer.generation.sampling import GREEDY, NotFiniteError, Sampling, Score, choose, scores
from zinfer.generation.schedule import (
    EXPANDED_SHARE,
    MAX_ROWS,
    Abilities,
    Group,
    GroupWork,
    Limits,
    Move,
    PassPlan,
    PassTimes,
    Row,
    Schedule,
    arrival_order,
    like_order,
    largest_load,
    load_of_pass,
    positions_of,
)
from zinfer.generation.tokenizer import UNFINISHED, Tokenizer
from zinfer.plan.cost import draft_kv_bytes
from zinfer.record.measurement import Span
from zinfer.system.host import host_bytes

if TYPE_CHECKING:
    from zinfer.engine.kv_snapshot import KVSnapshot
    from zinfer.plan.plan import Plan

Sampler = Callable[[Tensor], Tensor]  # logits [B, V] to the ids [B] that come next


class DecodeLoop:
    """The decode loop: a batch that is started, stepped and ended.

    `tokens` are the ids chosen last, ``[B]``, on the device; `steps` counts the decode steps since the prefill. A batch
    whose pass or sampler raises is ended.
    """

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine, self._sampler = engine, sampler
        self._batch: MicroBatch | None = None
        self.steps = 0
        self._most_steps: int | None = None  # more cross the switch of longrope
        self.tokens: Tensor

    @property
    def active(self) -> bool:
        """True from a batch's start until its end."""
        return self._batch is not None

    @property
    def batch(self) -> MicroBatch:
        """Running micro-batch. Raises EngineError if there is none."""
        if self._batch is None:
            raise EngineError("no batch is running")
        return self._batch

    def start(self, token_ids: Tensor, mask: Tensor, reserve: int, past: "Several[KVSnapshot]" = ()) -> Tensor:
        """Prefill a batch and choose its first tokens, ``[B]``; a batch that was running is ended. The arguments are
        those of `zinfer.generation.passes.prefill`."""
        self.end()
        most = self.engine.recompute_beyond
        lengths = [] if most is None else mask.sum(-1).tolist()
        self._most_steps = min((most - one for one in lengths if most is not None and one <= most), default=None)
        self._batch, logits = passes.prefill(self.engine, token_ids, mask, reserve, past)
        self.steps = 0
        return self._choose(logits)

    def step(self) -> Tensor:
        """Run one decode step with the tokens chosen last; returns the next ones, ``[B]``. Raises EngineError where a
        row grows beyond the switch of longrope, since that needs other keys."""
        if self._most_steps is not None and self.steps >= self._most_steps:
            self._abandon()
            raise EngineError(
                f"beyond {self.engine.recompute_beyond} tokens {self.engine.plan.model.name} turns all keys by other "
                "angles (longrope), also those in the cache: prompts and their answers must stay on one side here"
            )
        try:
            logits = passes.decode(self.engine, self.batch, self.tokens)
        except BaseException:
            self._abandon()
            raise
        self.steps += 1
        return self._choose(logits)

    def end(self) -> None:
        """Free the batch's KV cache. Safe to call twice."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.engine.retire(batch)

    def snapshot(self, first: int, last: int) -> "KVSnapshot":
        """Copy the keys and values of the computed positions from `first` up to `last` to host memory."""
        return self.engine.snapshot(self.batch, first, last)

    def timeline(self) -> tuple[Span, ...]:
        """Run one more decode step, traced, whose tokens count for nothing."""
        return self.engine.timeline([Work(self.batch, self.tokens[:, None])])

    def _choose(self, logits: Tensor) -> Tensor:
        try:
            self.tokens = self._sampler(logits)
        except BaseException:
            self._abandon()
            raise
        return self.tokens

    def _abandon(self) -> None:
        with suppress(Exception):
            self.end()


@dataclass(eq=False)
class Sequence:
    """One request: its prompt, the sampling of its tokens, its stops, and its output so far.

    `left` is the number of tokens that it may still get. Once it has ended, `finish_reason` is ``stop`` (an end token,
    or one of the texts `stop`) or ``length`` and `text` its output; or `error` says why it has none. The end token is
    not part of `output_ids`. The text continues that of the prompt; with `chat` it is a text of its own. `cached`
    counts the tokens of the prompt whose keys and values were kept and not computed.

    `logprobs` asks for the scores of its tokens, with that many others in each place: `scores` are those of
    `output_ids` and of the end token, if it ended with one, and with `echo` `prompt_scores` those of the prompt from
    its second token on. `ContinuousScheduler` alone gives them; who reads them may take them out.
    """

    prompt_ids: list[int]
    left: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    output_ids: list[int] = field(default_factory=list)
    key: int = 0
    request: int = 0
    chat: bool = False
    finish_reason: Literal["stop", "length"] | None = None
    error: str | None = None
    text: str = ""
    logprobs: int | None = None
    echo: bool = False
    cached: int = 0
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    running: RunningText = field(default_factory=RunningText, repr=False)
    searched: int = 0  # characters of its text in which there is none of its stops

    @property
    def scores_prompt(self) -> bool:
        """True while scores of its prompt are to be computed."""
        return self.echo and self.logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids) - 1

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def before(self) -> list[int]:
        """Tokens whose text its own continues."""
        return [] if self.chat else self.prompt_ids


def _draft_row(sequence: Sequence, most: int, recompute_beyond: int | None) -> DraftRow:
    """Return a running sequence, which may get up to `most` tokens, as drafts are made for it; none may take it beyond
    the switch of longrope (`Engine.recompute_beyond`)."""
    known = sequence.prompt_ids + sequence.output_ids
    if recompute_beyond is not None and len(known) <= recompute_beyond:
        most = min(most, recompute_beyond + 1 - len(known))
    return DraftRow(known, min(sequence.left, most), sequence.sampling, len(sequence.output_ids))


def add_token(tokenizer: Tokenizer, sequence: Sequence, token: int, finite: bool) -> None:
    """Add its next token to a sequence, which may end with it; `finite` tells whether its logits are numbers."""
    if not finite:
        sequence.error = str(NotFiniteError())
    elif token in tokenizer.ends and not sequence.ignore_eos:
        sequence.finish_reason, sequence.text = "stop", tokenizer.decode(sequence.output_ids, sequence.before)
    else:
        sequence.output_ids.append(token)
        sequence.left -= 1
        text = _before_stop(tokenizer, sequence)
        if text is not None:
            sequence.finish_reason, sequence.text = "stop", text
        elif sequence.left == 0:
            sequence.finish_reason, sequence.text = "length", tokenizer.decode(sequence.output_ids, sequence.before)


def _before_stop(tokenizer: Tokenizer, sequence: Sequence) -> str | None:
    """Return the text before the first of the sequence's stops; None if it contains none. Looks for stops in new text
    alone, whatever their lengths."""
    if not sequence.stop:
        return None
    text = sequence.running.of(tokenizer, sequence.output_ids, sequence.before)
    seen, sequence.searched = sequence.searched, max(0, len(text.rstrip(UNFINISHED)) - LOOSE)
    if all(text.find(stop, max(0, seen - len(stop))) < 0 for stop in sequence.stop):
        return None
    text = tokenizer.decode(sequence.output_ids, sequence.before)
    places = [place for stop in sequence.stop if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None


class ContinuousScheduler:
    """Scheduler of sequences that come at any time, on an engine of its own: continuous batching.

    `load` is the largest load to reckon with, all rows together (`zinfer.generation.schedule.largest_load`); at most `rows`
    run at a time. With `arrivals` requests share the rows, in the order in which they came; otherwise like rows begin
    together.

    Keys and values of complete prompts and of rows that end or are dropped are kept in up to `cache_size` bytes of host
    memory, in `prefixes`, and in `folder`; a later row reuses its longest prefix that is there. `cannot_reuse` is the
    reason why the engine does not, if it cannot. Where `rows` is 1 all rows are turns of one conversation: they are
    kept once they end, however short they are.

    With a `drafter`, by default the one that the engine's options ask for, a pass may give a row several tokens. Raises
    EngineError then where `Engine.cannot_draft` gives a reason.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        load: Workload,
        rows: int | None = None,
        arrivals: bool = False,
        cache_size: int = 0,
        folder: KeptFolder | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        drafter = drafter_of(engine) if drafter is None else drafter
        if drafter is not None and (why_not := engine.cannot_draft()) is not None:
            raise EngineError(why_not)
        self.engine, self._tokenizer = engine, tokenizer
        self.drafts = None if drafter is None else Drafts(drafter)
        self._one_length = engine.one_length() is not None  # rows of a group get as many tokens of a pass
        self.sequences: dict[int, Sequence] = {}  # those that have not ended, by key
        engine.clear()
        engine.expect(load)
        setup = engine.plan.at(load).placement
        times = PassTimes(setup, engine.plan.model, engine.plan.machine, load.input_len, engine.joins)
        positions = self._positions(load, rows)
        limits = Limits(positions, rows or 1 << 20, group_positions(engine.plan))
        order = arrival_order if arrivals else like_order
        able = abilities(engine, setup.kv_host_share > 0)
        self.schedule = Schedule(times, limits, able, order, engine.recompute_beyond, reusable=self._reusable)
        if self.drafts is not None:
            self.schedule.slack, self.schedule.ahead = SLACK, MOST
        self.cannot_reuse = engine.cannot_snapshot() or engine.cannot_chunk()
        self.prefixes: PrefixCache | None = None
        self._matched: dict[int, tuple[int, int]] = {}  # by key: version of `prefixes`, tokens found there
        self._to_keep: list[tuple[list[int], MicroBatch, int]] = []  # tokens that are computed, and their row
        self._notes: list[str] = []
        self._one_by_one = rows == 1
        self._least_kept = 1 if self._one_by_one else LEAST_KEPT
        if cache_size and self.cannot_reuse is None:
            where, size = folder or (None, 0)
            identity = {} if folder is None else cache_identity(engine.plan)  # memory holds this model alone
            self.prefixes = PrefixCache(
                identity, cache_size, where, size, self._notes.append,
                pin=engine.device.type == "cuda", piece=PIECE, spare=int(SPARE * host_bytes()),
            )  # fmt: skip
        self.gained: dict[int, int] = {}  # tokens that the last pass gave to each sequence, by key
        self._batches: dict[int, MicroBatch] = {}  # by the id of their group
        self._kept: dict[int, KVSnapshot] = {}  # of suspended groups, by the id of their group

    def _positions(self, load: Workload, rows: int | None) -> int:
        """Return the positions of KV cache that there is memory for: the plan's, and no more than a GPU has free. At
        most `rows` rows run."""
        if self.engine.plan.at(load).placement.kv_host_share:  # room is taken at once, for all tokens of a row
            return load.batch_size * load.total_len
        planned = positions_of(load)
        if rows is not None and load.batch_size == rows:  # not memory bounds the rows: longer ones have room, too
            most = largest_load(self.engine.plan, [(load.input_len, load.output_len)] * MAX_ROWS)
            planned = max(planned, positions_of(most))
        if self.engine.device.type != "cuda":
            return planned
        self.engine.give_back()
        plan = self.engine.plan
        free = torch.cuda.mem_get_info()[0] * plan.placement.gpus  # they are alike
        room = plan.machine.gpu_bytes * plan.placement.gpus
        each = plan.model.kv_bytes(1, load.total_len) * plan.placement.kv_ratio / load.total_len
        each += draft_kv_bytes(plan.model, 1, load.total_len) / load.total_len
        return max(load.total_len, min(planned, int((free - WORKING_SHARE * room) / max(1.0, each))))

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; their keys differ from those of all that have not ended."""
        new = list(sequences)
        self.sequences |= {sequence.key: sequence for sequence in new}
        known = (len(sequence.prompt_ids) + len(sequence.output_ids) for sequence in new)
        rows = zip(new, known, strict=True)
        self.schedule.add(Row(sequence.key, count, sequence.left, sequence.request) for sequence, count in rows)

    def drop(self, keys: Iterable[int]) -> None:
        """Forget sequences, however far they are; their keys and values are kept as those of rows that ended."""
        self._note_dropped(set(keys := list(keys)))
        gone = [key for key in keys if self.sequences.pop(key, None) is not None]
        for key in gone:
            self._matched.pop(key, None)
            if self.drafts is not None:
                self.drafts.forget(key)
        self.schedule.drop(gone)

    @property
    def running(self) -> bool:
        """True while a sequence has not ended."""
        return bool(self.sequences)

    def step(self) -> list[Sequence]:
        """Run a pass. Returns the sequences that got a token or ended with it.

        Where memory falls short, the prompts that it was for are computed again, with less of it (without prompts the
        rows of one group), and the other rows take the pass again; raises torch.OutOfMemoryError or MemoryError where
        that does not help, and other errors of the engine, after which nothing runs any more.
        """
        self.schedule.times.joins = self.engine.joins  # a first pass may find out that it cannot
        try:
            self._keep()
        except BaseException:
            self.end()
            raise
        planned = self.schedule.plan()
        planned = planned._replace(works=[self._bounded(work) for work in planned.works])
        began = time.monotonic()
        touched: list[Sequence] | None = None
        gained: dict[int, int] = {}
        self.gained = gained
        try:
            if not self._carry_out(planned.moves):
                planned = PassPlan([], [])
            elif not planned.works:  # the weights need no trip
                return []
            else:
                drafting = time.monotonic()
                planned, drafts = self._drafted(planned)
                computing = time.monotonic()
                began += computing - drafting  # it says nothing of the seconds of a pass
                try:
                    touched = self._compute(planned.works, drafts, gained)
                    self._forget_rejected(planned.works, gained)
                    self._note_pass(planned.works, time.monotonic() - computing)
                except (torch.OutOfMemoryError, MemoryError):
                    if len(self.schedule.running) <= 1:
                        raise
        except BaseException:
            self.end()
            raise
        if touched is None:
            self._lose(self._cost_of(planned.works))  # not within the handler, which holds what failed
            return []
        ended = [one.key for one in touched if one.ended]
        self._note_computed(planned.works, gained)
        self.schedule.done(planned.works, time.monotonic() - began, ended, gained)
        if self.drafts is not None:
            tally = self.schedule.tally
            tally.drafted, tally.accepted = self.drafts.drafted, self.drafts.accepted
        for key in ended:
            del self.sequences[key]
            if self.drafts is not None:
                self.drafts.forget(key)
        return touched

    # Drafts

    def _drafted(self, planned: PassPlan) -> tuple[PassPlan, dict[int, list[int]]]:
        """Return the plan of a pass with room for drafts in the works of running groups, and the drafts by key."""
        running = [group for group, _ in planned.works if group.running]
        if self.drafts is None or not running:
            return planned, {}
        most = min(group.capacity - group.length - 1 for group in running)
        if self.schedule.able.regroups is not True:  # gaps take room that is not made anew
            most = min(group.capacity - group.length - group.max_remaining for group in running)
        if (last := self.engine.plan.model.max_position) is not None:  # every row computes as many positions
            longest = max((row.length for group in running for row in group.rows if row is not None), default=0)
            most = min(most, last - longest)
        rows = {
            row.key: _draft_row(one, 1 + most, self.engine.recompute_beyond)
            for group in running for row in group.rows
            if row is not None and (one := self.sequences.get(row.key)) is not None
        }  # fmt: skip
        room = min(
            self.schedule.times.room_for_drafts(load_of_pass(planned.works)),
            SCORED_LOGITS // self.engine.plan.model.vocab_size,
        )
        drafts = self.drafts.propose(rows, room)
        if self._one_length:
            drafts = {key: own for group in running for key, own in _as_short(group, drafts).items()}
        count = 1 + max(map(len, drafts.values()), default=0)
        works = [GroupWork(group, count) if group.running else GroupWork(group, own) for group, own in planned.works]
        return planned._replace(works=works), drafts

    def _begin_drafts(self, works: Several[GroupWork]) -> None:
        """Get drafts ready for rows that get their first token in a pass."""
        if self.drafts is None:
            return
        first = [group for group, count in works if not group.running and group.length + count >= group.width]
        alive = [self.sequences.get(row.key) for group in first for row in group.rows if row is not None]
        self.drafts.begin({one.key: one.prompt_ids + one.output_ids for one in alive if one and one.left > 1})

    def _rest_drafts(self, group: Group) -> None:
        """Free the memory of drafts for rows that do not run for a while."""
        if self.drafts is not None:
            for row in filter(None, group.rows):
                self.drafts.drafter.forget(row.key)

    def _note_pass(self, works: Several[GroupWork], seconds: float) -> None:
        """Note the seconds of a pass in which all rows run, in which drafting must pay."""
        if self.drafts is not None and works and all(group.running for group, _ in works):
            self.drafts.passed(seconds)

    def _forget_rejected(self, works: Several[GroupWork], gained: dict[int, int]) -> None:
        """Have the engine forget the positions of drafts that were rejected."""
        for group, count in works:
            if not group.running or count == 1:
                continue
            kept = [1 if row is None else gained.get(row.key, 1) for row in group.rows]
            if self._one_length:  # those of rows that have ended do not matter
                kept = [max(kept)] * len(kept)
            if min(kept) < count:
                self.engine.rollback(self._batches[id(group)], group.length + torch.tensor(kept))

    def release(self) -> None:
        """Free the memory of sequences that have ended."""
        self._keep()
        self._carry_out([move for move in self.schedule.plan().moves if move.kind == "retire"])

    def end(self) -> None:
        """Forget all sequences, and free their memory. Safe to call twice."""
        with suppress(Exception):
            if self.drafts is not None:
                for key in self.sequences:
                    self.drafts.forget(key)
        with suppress(Exception):
            self._forget_prefixes()
        for kept in self._kept.values():
            with suppress(Exception):
                kept.close()
        self._kept, self._batches, self.sequences, self._matched, self._to_keep = {}, {}, {}, {}, []
        self.schedule.groups, self.schedule.waiting, self.schedule.suspended = [], [], []
        with suppress(Exception):
            self.engine.clear()
        self.engine.expect(None)

    def _carry_out(self, moves: Several[Move]) -> bool:
        """Make the moves before a pass; return False if there was no memory for one of them, which is then lost."""
        for place, move in enumerate(moves):
            try:
                self._move(move)
                continue
            except (torch.OutOfMemoryError, MemoryError) as error:
                if isinstance(error, MemoryError):  # host memory is needed for what runs
                    self._forget_prefixes()
                if len(self.schedule.running) <= 1:
                    raise
            self._undo(moves[place:])
            return False
        return True

    def _move(self, move: Move) -> None:
        group, engine = move.group, self.engine
        if move.kind in ("suspend", "recompute", "yield"):
            self._rest_drafts(group)
        on_host = move.kind == "suspend" or engine.device.type != "cuda"
        if self.prefixes is not None and on_host and move.kind not in ("retire", "recompute", "yield"):
            self.prefixes.give_way(engine.plan.model.kv_bytes(len(group.rows), group.capacity))  # rows go first
        if move.kind == "admit":
            mask = torch.tensor([[0] * (group.width - count) + [1] * count for count in self._lengths(group)])
            answered = [0 if row is None else len(self.sequences[row.key].output_ids) for row in group.rows]
            self._hold(group, engine.admit(mask, group.capacity, self._past(group), answered))
        elif move.kind == "regroup":
            sources = [(self._batches[id(source)], places) for source, places in move.sources]
            self._hold(group, engine.regroup(sources, group.capacity))
            for source, _ in move.sources:
                engine.retire(self._batches.pop(id(source)))  # rows that have ended
        elif move.kind == "split":
            ((source, places),) = move.sources
            self._hold(group, engine.regroup([(self._batches[id(source)], places)], group.capacity))
        elif move.kind == "yield":
            ((source, places),) = move.sources
            self._keep_some(group, source, places)
            if len(places) == self._batches[id(source)].batch_size:
                self._drop(source)
            else:
                engine.retire(self._batches[id(source)], places)
        elif move.kind == "suspend":
            self._kept[id(group)] = engine.snapshot(self._batches[id(group)], 0, group.length)
            engine.retire(self._batches.pop(id(group)))
        elif move.kind == "resume":
            ((source, _),) = move.sources
            snapshot = self._kept[id(source)]
            real = [group.real(place) for place in range(len(group.rows))]
            mask = torch.tensor([[0] * (group.length - count) + [1] * (count + 1) for count in real])
            self._hold(group, engine.admit(mask, max(group.capacity, group.length + 1), [snapshot]))
            if engine.device.type == "cuda":
                torch.cuda.synchronize()  # its copies have run
            del self._kept[id(source)]
            snapshot.close()
        else:
            self._drop(group)

    def _hold(self, group: Group, batch: MicroBatch) -> None:
        self._batches[id(group)] = batch
        group.hosted = batch.hosted > 0

    # Kept prefixes

    def take_notes(self) -> list[str]:
        """Return what could not be kept or read since the last time, a line each."""
        notes, self._notes[:] = list(self._notes), []
        return notes

    def _reusable(self, row: Row) -> int:
        """Return how many of a row's first positions are kept and may be reused."""
        if self.prefixes is None:
            return 0
        version, count = self._matched.get(row.key, (-1, 0))
        if version != self.prefixes.version:
            sequence = self.sequences[row.key]
            # Scores of a prompt need the logits of all its positions.
            whole = sequence.scores_prompt or not self._alike(row.length)
            count = 0 if whole else self.prefixes.matched(sequence.prompt_ids + sequence.output_ids)
            count = count if count >= self._least_kept else 0
            self._matched[row.key] = self.prefixes.version, count
        return count

    def _alike(self, length: int) -> bool:
        """Tell whether a row of `length` tokens has the keys of others that begin with its tokens."""
        most = self.engine.alike_until
        return most is None or length <= most

    def _past(self, group: Group) -> tuple[RowsPast, ...]:
        """Return the kept keys and values that a group begins with; its length becomes what is there."""
        rows = [row for row in group.rows if row is not None]  # all of them: the group is new
        for row in rows:
            self._matched.pop(row.key, None)
        if not group.length or self.prefixes is None:
            return ()
        sequences = [self.sequences[row.key] for row in rows]
        found = [self.prefixes.find(one.prompt_ids + one.output_ids) for one in sequences]
        pads = [group.width - row.length for row in rows]
        kept = [pad + sum(part.length for part in parts) for pad, parts in zip(pads, found, strict=True)]
        group.length = min(group.length, *kept)
        for sequence, pad in zip(sequences, pads, strict=True):
            if not sequence.output_ids:
                sequence.cached = max(0, group.length - pad)
        return (RowsPast(found, pads, group.length),) if group.length else ()

    def _note_computed(self, works: Several[GroupWork], gained: Mapping[int, int]) -> None:
        """Note which prompts a pass has completed, and which rows have ended with it: they are kept before the next
        one, so that no first token waits for that."""
        if self.prefixes is None:
            return
        for group, count in works:
            if group.length + count < group.width:
                continue
            for place, row in enumerate(group.rows):
                sequence = None if row is None else self.sequences.get(row.key)
                if row is None or sequence is None or sequence.error is not None:
                    continue
                scored = sequence.echo and sequence.logprobs is not None  # as those that are like it will be
                alone = len(group.rows) == 1
                whole = not group.gaps and (alone or count == 1 or not group.running)
                wanted = (sequence.ended and whole) or not (group.running or self._one_by_one)
                computed = row.length + (gained.get(row.key, 1) - 1 if group.running else 0)
                if row.length >= self._least_kept and self._alike(computed) and not scored and wanted:
                    known = (sequence.prompt_ids + sequence.output_ids)[:computed]
                    self._to_keep.append((known, self._batches[id(group)], place))

    def _note_dropped(self, keys: Collection[int]) -> None:
        """Note rows that are dropped while they run: they are kept as those that end."""
        if self.prefixes is None:
            return
        for group in self.schedule.groups:
            for place, row in enumerate(group.rows):
                if row is None or row.key not in keys or group.gaps or not group.running:
                    continue
                sequence, computed = self.sequences[row.key], group.real(place)
                kept = computed >= self._least_kept and self._alike(computed)
                if kept and not (sequence.echo and sequence.logprobs is not None):
                    known = (sequence.prompt_ids + sequence.output_ids)[:computed]
                    self._to_keep.append((known, self._batches[id(group)], place))

    def _keep_some(self, group: Group, source: Group, places: Several[int]) -> None:
        """Keep what rows of `source` have computed, which go on later as those of `group`."""
        for number, place in enumerate(places):
            row, computed = group.rows[number], group.real(number)
            if row is None:
                continue
            sequence = self.sequences[row.key]
            kept = self.prefixes is not None and computed >= self._least_kept and self._alike(row.length)
            if self.prefixes is None or not kept or source.gaps or sequence.scores_prompt:
                self.schedule.tally.again += computed
                continue
            known = (sequence.prompt_ids + sequence.output_ids)[:computed]
            self.prefixes.keep(known, self.engine, self._batches[id(source)], place)

    def _keep(self) -> None:
        """Keep the keys and values of rows that were noted."""
        noted, self._to_keep = self._to_keep, []
        for known, batch, place in noted:
            if self.prefixes is not None:
                self.prefixes.keep(known, self.engine, batch, place)

    def _forget_prefixes(self) -> None:
        if self.prefixes is not None:
            self.prefixes.close()

    def _drop(self, group: Group) -> None:
        batch, kept = self._batches.pop(id(group), None), self._kept.pop(id(group), None)
        if batch is not None:
            self.engine.retire(batch)
        if kept is not None:
            kept.close()

    def _undo(self, moves: Several[Move]) -> None:
        """Give up moves that were planned, the first of which failed: their groups are lost."""
        for move in moves:
            for source, _ in move.sources:
                self._drop(source)
            self._drop(move.group)
        made = [move.group for move in moves if move.kind not in ("retire", "recompute")]
        made += [source for move in moves if move.kind in ("split", "yield") for source, _ in move.sources]
        live = {id(group) for group in (*self.schedule.groups, *self.schedule.suspended)}
        self._lose([group for group in {id(group): group for group in made}.values() if id(group) in live])

    def _cost_of(self, works: Several[GroupWork]) -> list[Group]:
        """Return the groups whose rows a pass without enough memory costs their KV cache: prompts, for which it was
        taken, and groups of which the engine cannot forget what the pass has stored. Without any it is the one with
        most to come."""
        for group, _ in works:
            self._rest_drafts(group)
        lost = [group for group, _ in works if not (group.running and self._set_back(group))]
        return lost or sorted((group for group, _ in works), key=lambda group: group.max_remaining)[-1:]

    def _set_back(self, group: Group) -> bool:
        """Have the engine forget the positions of a running group that a failed pass has stored; return False if it
        cannot."""
        try:
            self.engine.rollback(self._batches[id(group)], torch.full((len(group.rows),), group.length))
        except (EngineError, ValueError):
            return False
        return True

    def _lose(self, groups: Several[Group]) -> None:
        """Let the rows of groups, whose KV cache is lost, wait again, with less memory to fill."""
        schedule = self.schedule
        schedule.tally.retries += 1
        if groups:
            schedule.fell_short(groups)
        for group in groups:
            self._rest_drafts(group)
            self._drop(group)
        live = {id(batch) for batch in self._batches.values()}
        for batch in [one for one in self.engine.batches if id(one) not in live]:
            self.engine.retire(batch)
        schedule.lost(groups)
        if groups:
            self.engine.give_back()

    def _lengths(self, group: Group) -> list[int]:
        return [0 if row is None else row.length for row in group.rows]

    def _tokens(self, group: Group, count: int, drafts: Mapping[int, list[int]]) -> Tensor:
        """Return the next `count` token ids of each row, ``[B, count]``: of a prompt, or the last token and drafts."""
        padding, rows = self._tokenizer.padding, []
        for row in group.rows:
            sequence = None if row is None else self.sequences.get(row.key)
            if sequence is None:
                rows.append([padding] * count)
            elif group.running:
                known = sequence.output_ids or sequence.prompt_ids
                rows.append((known[-1:] + drafts.get(sequence.key, []) + [padding] * count)[:count])
            else:
                known = sequence.prompt_ids + sequence.output_ids
                skip = group.length - (group.width - len(known))
                rows.append(([padding] * max(0, -skip) + known[max(0, skip) :])[:count])
        return torch.tensor(rows)

    def _scored(self, group: Group) -> bool:
        """Tell whether all positions of a group's prompts need logits, for their scores."""
        sequences = (self.sequences.get(row.key) for row in group.rows if row is not None)
        return not group.running and any(one is not None and one.scores_prompt for one in sequences)

    def _bounded(self, work: GroupWork) -> GroupWork:
        """Return `work` with fewer tokens if the logits of all its positions would take too much memory."""
        if not self.schedule.able.chunks or not self._scored(work.group):
            return work
        most = SCORED_LOGITS // (self.engine.plan.model.vocab_size * len(work.group.rows))
        return work._replace(tokens=max(1, min(work.tokens, most)))

    def _compute(
        self, works: Several[GroupWork], drafts: Mapping[int, list[int]], gained: dict[int, int]
    ) -> list[Sequence]:
        """Run the pass; return the sequences that got a token. `gained` gets the number of tokens of each, by key."""
        scored = [self._scored(group) for group, _ in works]
        asked = [
            Work(
                self._batches[id(group)],
                self._tokens(group, count, drafts),
                count if all_positions or group.running else 1,
            )
            for (group, count), all_positions in zip(works, scored, strict=True)
        ]
        self._begin_drafts(works)
        found = self.engine.forward(asked)
        touched: list[Sequence] = []
        chosen = list[tuple[list[Sequence | None], int, dict[tuple[int, int], Score]]]()
        tokens, finite = list[Tensor](), list[Tensor]()
        for (group, count), all_positions, logits in zip(works, scored, found, strict=True):
            if all_positions:
                self._score_prompts(group, logits)
            if group.length + count < group.width:  # prompts that are not complete
                continue
            sequences = [None if row is None else self.sequences.get(row.key) for row in group.rows]
            logits = logits if group.running else logits[:, -1:]
            own_tokens, own_finite, own_scores = self._choose(sequences, logits)
            tokens.append(own_tokens)
            finite.append(own_finite)
            chosen.append((sequences, logits.shape[1], own_scores))
        del found
        flat = torch.stack([torch.cat(tokens), torch.cat(finite)]).tolist() if chosen else [[], []]
        first = 0  # of the tokens of a group
        for sequences, count, scored_rows in chosen:
            rows = [slice(first + place * count, first + (place + 1) * count) for place in range(len(sequences))]
            first += len(sequences) * count
            ids, finites = ([whole[row] for row in rows] for whole in flat)
            owns = [[] if one is None else drafts.get(one.key, [])[: len(row) - 1] for one, row in
                    zip(sequences, ids, strict=True)]  # fmt: skip
            right = [_right(own, row) for own, row in zip(owns, ids, strict=True)]
            least = min((count for one, count in zip(sequences, right, strict=True) if one is not None), default=0)
            for place, sequence in enumerate(sequences):
                if sequence is None:
                    continue
                own, most = owns[place], least if self._one_length else right[place]
                gained[sequence.key] = 0
                for position, (token, fine) in enumerate(zip(ids[place], finites[place], strict=True)):
                    add_token(self._tokenizer, sequence, token, fine)
                    gained[sequence.key] += 1
                    if (place, position) in scored_rows and fine:
                        sequence.scores.append(scored_rows[place, position])
                    if sequence.ended or position >= most:
                        break
                if own and self.drafts is not None:
                    self.drafts.saw(sequence.key, len(own), gained[sequence.key] - 1, given_up=most < right[place])
                touched.append(sequence)
        return touched

    @staticmethod
    def _choose(
        sequences: Several[Sequence | None], logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[tuple[int, int], Score]]:
        """Return the token of each row and position of ``[B, n, V]`` logits, as if those before it were right, ``[B *
        n]``, whether its logits are numbers, and the scores that are asked for, by row and position."""
        count = logits.shape[1]
        samplings = [GREEDY if one is None else one.sampling for one in sequences for _ in range(count)]
        places = [0 if one is None else len(one.output_ids) + ahead for one in sequences for ahead in range(count)]
        flat = logits.reshape(-1, logits.shape[-1])
        tokens, finite = choose(flat, samplings, places)
        asking = [one for one in sequences for _ in range(count)]
        found = {divmod(number, count): score for number, score in _scores(asking, flat, tokens).items()}
        return tokens, finite, found

    def _score_prompts(self, group: Group, logits: Tensor) -> None:
        """Add the scores that `logits`, ``[B, count, V]`` of a group's next positions, have for tokens of prompts."""
        count = logits.shape[1]
        for place, row in enumerate(group.rows):
            sequence = None if row is None else self.sequences.get(row.key)
            if sequence is None or not sequence.scores_prompt:
                continue
            first = group.length - (group.width - len(sequence.prompt_ids) - len(sequence.output_ids))
            known = len(sequence.prompt_scores)  # the next score is that of token `known` + 1, from position `known`
            last = min(first + count, len(sequence.prompt_ids) - 1)
            if first <= known < last:
                part = logits[place, known - first : last - first]
                sequence.prompt_scores += scores(
                    part, sequence.prompt_ids[known + 1 : last + 1], sequence.logprobs or 0
                )


def _right(drafts: Several[int], tokens: Several[int]) -> int:
    """Return how many drafts of a row are right: the first ones that are the row's tokens."""
    return next((place for place, one in enumerate(drafts) if one != tokens[place]), len(drafts))


def _as_short(group: Group, drafts: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Return the drafts of a group's rows, as many of each row as of the one with fewest; none if that has none."""
    keys = [row.key for row in group.rows if row is not None]
    least = min((len(drafts.get(key, ())) for key in keys), default=0)
    return {key: drafts[key][:least] for key in keys} if least else {}


def _scores(sequences: Several[Sequence | None], logits: Tensor, tokens: Tensor) -> dict[int, Score]:
    """Return the scores of `tokens`, chosen by ``[B, V]`` logits, for the places whose sequences ask for them."""
    wanted = [place for place, one in enumerate(sequences) if one is not None and one.logprobs is not None]
    if not wanted:
        return {}
    most = max(one.logprobs or 0 for one in sequences if one is not None)
    found = dict(zip(wanted, scores(logits[wanted], tokens[wanted].tolist(), most), strict=True))
    return {
        place: score._replace(top=score.top[: one.logprobs])
        for place, score in found.items()
        if (one := sequences[place]) is not None
    }


LOOSE = 8  # last characters of a text, which the next token may change
SLACK = 0.5  # room for forgotten positions, as a share of the tokens to come, where drafts are verified
LEAST_KEPT = 16  # tokens of a prefix that is worth keeping and reusing
SPARE = 0.02  # share of the host's memory that kept KV caches leave free
PIECE = 512  # tokens whose keys and values are kept, and dropped, together at most
SCORED_LOGITS = 1 << 27  # logits of one group that a pass keeps for the scores of prompts
WORKING_SHARE = 0.08  # share of a GPU's memory that the KV cache leaves to the work of a pass


def group_positions(plan: "Plan") -> int:
    """Return the most positions of one micro-batch: attention of grouped heads with padding copies the keys and values
    of a layer for each query head."""
    model, memory = plan.model, plan.machine.device_bytes
    heads = model.num_heads // max(1, model.num_kv_heads)
    largest = model.largest_kv_layer_bytes(1, 1024) / 1024
    if heads <= 1 or not largest or not memory:
        return 1 << 62
    return max(4096, int(EXPANDED_SHARE * memory / (heads * largest)))


def abilities(engine: Engine, hosted: bool = False) -> Abilities:
    """Return what the scheduler may ask of `engine`; `hosted`: rows have their KV cache in host memory."""
    moves = engine.cannot_regroup() is None
    return Abilities(
        one_trip=engine.one_trip,
        chunks=engine.cannot_chunk() is None,
        regroups="rarely" if moves and hosted else moves,
        snapshots=engine.cannot_snapshot() is None,
        pads=engine.cannot_pad() is None,
    )
