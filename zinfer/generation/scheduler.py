"""Schedulers: the decode loop, and sequences on an engine.

`DecodeLoop` knows tokens on the device and nothing of text: prefill, then a token a row and step, each chosen by a
sampler. `ContinuousScheduler` carries out the passes that `zinfer.generation.schedule.Schedule` plans.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.core.engine import MAX_DRAFTS
from zinfer.core.errors import NotFiniteError
from zinfer.core.request import GREEDY, Failure, Request
from zinfer.engine import EngineError, gpu_memory
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.transfer import to_device
from zinfer.generation import tuning
from zinfer.generation.draft_model import drafter_of
from zinfer.generation.drafts import Drafter, Drafts, NgramDrafter
from zinfer.generation.grammar import Grammar, Grammars
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.prefix_cache import PrefixCache
from zinfer.generation.sampling import EditedRow, LogitEdits, Score, choose, scores
from zinfer.generation.schedule import (
    Abilities,
    Limits,
    Move,
    PlannedBatch,
    PlannedWork,
    Schedule,
    largest_load,
    load_of_pass,
    positions_of,
)
from zinfer.generation.sequence import Sequence, common
from zinfer.generation.tokenizer import Tokenizer
from zinfer.plan.bytes import draft_kv_bytes
from zinfer.plan.planner import Plan
from zinfer.system.host import host_bytes

Sampler = Callable[[Tensor], Tensor]  # logits [B, V] to the ids [B] that come next


class DecodeLoop:
    """The decode loop: a batch that is started, stepped and ended. `tokens` are the ids chosen last, ``[B]``, on the
    device. A batch whose pass or sampler raises is ended."""

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine, self._sampler = engine, sampler
        self._batch: MicroBatch | None = None
        self.tokens: Tensor

    @property
    def batch(self) -> MicroBatch:
        """Running micro-batch. Raises EngineError if there is none."""
        if self._batch is None:
            raise EngineError("no batch is running")
        return self._batch

    def start(self, token_ids: Tensor, mask: Tensor, reserve: int, past: RowsPast | None = None) -> Tensor:
        """Prefill a batch of left-padded prompts and choose its first tokens, ``[B]``; a running batch is ended. There
        is room for `reserve` further tokens; `past` holds first positions of the prompts. Raises the errors of
        `Engine.admit` and `Engine.forward`."""
        self.end()
        self._batch = self.engine.admit(mask, token_ids.shape[1] + reserve, past)
        return self._forward(to_device(token_ids[:, self.batch.length :], self.engine.device))

    def step(self) -> Tensor:
        """Run one decode step with the tokens chosen last; returns the next ones, ``[B]``."""
        return self._forward(self.tokens[:, None])

    def end(self) -> None:
        """Free the batch's KV cache. Safe to call twice."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.engine.retire(batch)

    def _forward(self, token_ids: Tensor) -> Tensor:
        try:
            (logits,) = self.engine.forward([Work(self.batch, token_ids)])
            self.tokens = self._sampler(logits[:, -1])
        except BaseException:
            with suppress(Exception):
                self.end()
            raise
        return self.tokens


def add_token(tokenizer: Tokenizer, sequence: Sequence, token: int, finite: bool) -> None:
    """Add its next token to a sequence, which may end with it; `finite` tells whether its logits are numbers."""
    tokenizer = tokenizer.raw if sequence.special else tokenizer
    if not finite:
        sequence.failure = Failure("nan_output", str(NotFiniteError()))
    elif (token in tokenizer.ends and not sequence.ignore_eos) or token in sequence.sampling.stop_token_ids:
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
    """Return the text before the first of the sequence's stops; None if it contains none."""
    if not sequence.stop or len(sequence.output_ids) < sequence.sampling.min_tokens:
        return None
    if sequence.stops_from is None:
        first = sequence.output_ids[: sequence.sampling.min_tokens]
        sequence.stops_from = len(tokenizer.decode(first, sequence.before)) if first else 0
        if len(first) == len(sequence.output_ids):
            return None
    floor = sequence.stops_from
    text = sequence.running.of(tokenizer, sequence.output_ids, sequence.before)
    if not any(stop in text[max(0, floor + 1 - len(stop)) :] for stop in sequence.stop):
        return None
    text = tokenizer.decode(sequence.output_ids, sequence.before)
    starts = [text.find(stop, max(0, floor + 1 - len(stop))) for stop in sequence.stop]
    return min((text[:start] for start in starts if start >= 0), key=len, default=None)


class ContinuousScheduler:
    """Scheduler of sequences that come at any time, on its own engine: continuous batching. `load` is the largest load
    to reckon with, all rows together (`zinfer.generation.schedule.largest_load`); at most `rows` run at a time. With
    `arrivals` requests share the rows, in the order in which they came; otherwise like rows begin together. Keys and
    values of complete prompts and of rows that end or are dropped are kept in up to `cache_size` bytes of host memory,
    for later rows that begin alike; `cannot_reuse` is the reason why not, if the engine cannot. Where `rows` is 1 all
    rows are turns of one conversation: they are kept once they end, however short they are. With a `drafter`, by
    default from the engine's options, a pass may give a row several tokens. Raises EngineError if the engine cannot
    draft then."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        load: Workload,
        rows: int | None = None,
        arrivals: bool = False,
        cache_size: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        drafter = drafter_of(engine) if drafter is None else drafter
        if drafter is not None and (why_not := engine.cannot_draft()) is not None:
            raise EngineError(why_not)
        self.engine, self._tokenizer = engine, tokenizer
        self.drafts = Drafts(drafter or NgramDrafter(), 0 if drafter is None else MAX_DRAFTS)
        self._one_length = engine.equal_lengths() is not None  # rows of a micro-batch get equally many tokens of a pass
        self._grammars = Grammars(tokenizer, engine.plan.model.vocab_size)
        self._compiling: list[Sequence] = []  # rows whose grammars are being compiled
        self.sequences: dict[int, Sequence] = {}  # unfinished ones, by key
        self.gained: dict[int, int] = {}  # tokens that the last pass gave to each sequence, by key
        engine.clear()
        engine.expect(load)
        placement = engine.planner.placement(load)
        times = PassTimes(placement, engine.plan.model, engine.plan.machine, load.input_len, engine.joins)
        limits = Limits(self._kv_positions(load, rows), rows or 1 << 20, max_batch_positions(engine.plan))
        able = abilities(engine, placement.kv_host_share > 0)
        self.schedule = Schedule(times, limits, able, arrivals, reusable=self._reusable)
        if drafter is not None:
            self.schedule.slack, self.schedule.ahead = tuning.TUNED.draft_slack, MAX_DRAFTS
        self.cannot_reuse = engine.cannot_snapshot() or engine.cannot_chunk()
        size, spare = 0 if self.cannot_reuse else cache_size, int(tuning.TUNED.kept_spare * host_bytes())
        self.prefixes = PrefixCache(size, tuning.TUNED.kept_chunk, spare)
        self._matched: dict[int, tuple[int, int]] = {}  # by key: version of `prefixes`, tokens found there
        self._to_keep: list[tuple[list[int], MicroBatch, int]] = []  # tokens that are computed, and their row
        self._one_by_one = rows == 1
        self._min_kept = 1 if self._one_by_one else tuning.TUNED.min_kept

    def _kv_positions(self, load: Workload, rows: int | None) -> int:
        """Return the positions of KV cache that fit: the plan's, and no more than a GPU has free."""
        plan, planner, tuned = self.engine.plan, self.engine.planner, tuning.TUNED
        if planner.placement(load).kv_host_share:  # room is reserved at once, for all tokens of a row
            return load.batch_size * load.total_len
        planned = positions_of(load)
        if rows is not None and load.batch_size == rows:  # not memory bounds the rows: longer ones have room, too
            largest = largest_load(planner, [(load.input_len, load.output_len)] * tuned.max_rows)
            planned = max(planned, positions_of(largest))
        if self.engine.device.type != "cuda":
            return planned
        self.engine.give_back()
        free = gpu_memory.free_and_total()[0] * plan.placement.gpus  # they are alike
        room = plan.machine.gpu_bytes * plan.placement.gpus
        each = plan.model.kv_bytes(1, load.total_len) * plan.placement.kv_ratio / load.total_len
        each += draft_kv_bytes(plan.model, 1, load.total_len) / load.total_len
        return max(load.total_len, min(planned, int((free - tuned.working_share * room) / max(1.0, each))))

    def add(self, requests: Iterable[Request]) -> list[Sequence]:
        """Let requests wait, whose keys differ from all that have not ended; return their sequences."""
        new = [Sequence.of(request) for request in requests]
        for sequence in new:
            if sequence.sampling.edits:
                sampling, ends = sequence.sampling, self._tokenizer.ends
                sequence.edits = edits = LogitEdits(sampling, sequence.prompt_ids, sequence.output_ids, ends)
                if sampling.grammar:
                    edits.grammar = self._grammars.add(sampling.grammar, sequence.prompt_ids, sequence.output_ids)
                    self._compiling.append(sequence)
        self.sequences |= {sequence.key: sequence for sequence in new}
        self.schedule.waiting.add(sequence for sequence in new if not sequence.sampling.grammar)
        return new

    def _add_compiled(self) -> list[Sequence]:
        """Let rows wait whose grammars are compiled; return those with a wrong one, which have ended."""
        if self._compiling and not self.schedule.busy:
            wait([_grammar(row).compiled for row in self._compiling], return_when=FIRST_COMPLETED)
        ready = [row for row in self._compiling if _grammar(row).ready]
        self._compiling = [row for row in self._compiling if row not in ready]
        wrong = [row for row in ready if _fail(row)]
        self.schedule.waiting.add(row for row in ready if row not in wrong)
        for row in wrong:
            self._discard(row.key)
        return wrong

    def drop(self, keys: Iterable[int]) -> None:
        """Discard sequences, finished or not; their keys and values are kept as finished rows' are."""
        gone = [key for key in dict.fromkeys(keys) if key in self.sequences]
        for batch in self.schedule.batches:
            for index, row in zip(batch.alive, batch.living, strict=True):
                if row.key in gone and batch.running and not batch.has_gaps:
                    self._note(row, batch, index, batch.computed(index))
        for key in gone:
            self._discard(key)
        self.schedule.drop(gone)

    def _discard(self, key: int) -> None:
        sequence = self.sequences.pop(key)
        self._compiling = [row for row in self._compiling if row is not sequence]
        self._matched.pop(key, None)
        self.drafts.discard(key)

    @property
    def running(self) -> bool:
        """True while a sequence has not ended."""
        return bool(self.sequences)

    def step(self) -> list[Sequence]:
        """Run a pass; return the sequences that got a token or ended with it. On out-of-memory the rows of the pass are
        computed again, with less memory to fill. Raises torch.OutOfMemoryError or MemoryError where that does not help,
        and other errors of the engine, after which nothing runs any more."""
        self.schedule.times.joins = self.engine.joins  # a first pass may find out that it cannot
        try:
            self._keep_noted()
            return self._add_compiled() or self._step()
        except BaseException:
            self.end()
            raise

    def _step(self) -> list[Sequence]:
        moves, planned = self.schedule.plan()
        works = [self._bounded(work) for work in planned]
        began = time.monotonic()
        self.gained = {}
        touched: list[Sequence] | None = None
        try:
            for move in moves:
                self._move(move)
            if not works:  # the weights need no pass
                return []
            drafting = time.monotonic()
            works, drafts = self._drafted(works)
            computing = time.monotonic()
            began += computing - drafting  # it says nothing of the seconds of a pass
            touched = self._compute(works, drafts)
            self._roll_back(works)
            if all(batch.running for batch, _ in works):  # such passes drafting must pay in
                self.drafts.passed(time.monotonic() - computing)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if isinstance(error, MemoryError):  # host memory is needed for what runs
                self.prefixes.close()
            if len(self.schedule.running) <= 1:
                raise
        if touched is None:  # all rows wait again; not within the handler, which holds what failed
            self._rest_drafts(self.schedule.running)
            self.schedule.fell_short()
            self.engine.clear()
            self.engine.give_back()
            return []
        ended = {sequence.key for sequence in touched if sequence.ended}
        self._note_computed(works)
        self.schedule.done(works, time.monotonic() - began, ended, self.gained)
        self.schedule.tally.drafted, self.schedule.tally.accepted = self.drafts.drafted, self.drafts.accepted
        for key in ended:
            self._discard(key)
        return touched

    # Drafts

    def _drafted(self, works: list[PlannedWork]) -> tuple[list[PlannedWork], dict[int, list[int]]]:
        """Return the works with room for drafts, and the drafts by key."""
        running = [batch for batch, _ in works if batch.running]
        if not self.drafts.max_drafts or not running:
            return works, {}
        model, grows = self.engine.plan.model, self.schedule.able.moves_rows is True  # else gaps take room for good
        max_drafts = min(batch.capacity - batch.length - (1 if grows else batch.max_remaining) for batch in running)
        rows = {row.key: row for batch in running for row in batch.living}
        if (last := model.max_position) is not None:  # every row computes equally many positions
            max_drafts = min(max_drafts, last - max((row.length for row in rows.values()), default=0))
        limits = {key: min(max_drafts, row.left - 1) for key, row in rows.items()}
        room = self.schedule.times.room(load_of_pass(works))
        drafts = self.drafts.propose(rows, limits, min(room, tuning.TUNED.scored_logits // model.vocab_size))
        if self._one_length:
            for keys in [[row.key for row in batch.living] for batch in running]:
                fewest = min((len(drafts.get(key, ())) for key in keys), default=0)
                drafts |= {key: drafts.get(key, [])[:fewest] for key in keys}
        count = 1 + max(map(len, drafts.values()), default=0)
        return [PlannedWork(batch, count if batch.running else tokens) for batch, tokens in works], drafts

    def _rest_drafts(self, rows: Iterable[Sequence]) -> None:
        for row in rows:
            self.drafts.drafter.discard(row.key)

    def _roll_back(self, works: Several[PlannedWork]) -> None:
        for batch, count in works:
            if not batch.running or count == 1:
                continue
            kept = [1 if row is None else self.gained.get(row.key, 1) for row in batch.rows]
            if self._one_length:  # values of ended rows do not matter
                kept = [max(kept)] * len(kept)
            if min(kept) < count:
                self.engine.rollback(_micro_batch(batch), batch.length + torch.tensor(kept))

    def release(self) -> None:
        """Free the memory of sequences that have ended."""
        self._keep_noted()
        for move in self.schedule.plan()[0]:
            if move.kind == "retire":
                self._move(move)

    def end(self) -> None:
        """Discard all sequences, and free their memory. Safe to call twice."""
        with suppress(Exception):
            for key in self.sequences:
                self.drafts.discard(key)
        with suppress(Exception):
            self.prefixes.close()
        self.sequences, self._matched, self._to_keep, self._compiling = {}, {}, [], []
        self.schedule.clear()
        with suppress(Exception):
            self.engine.clear()
        self.engine.expect(None)

    # Moves

    def _move(self, move: Move) -> None:
        kind, batch, sources = move
        engine = self.engine
        if kind == "admit":
            lengths = [0 if row is None else row.length for row in batch.rows]
            mask = torch.tensor([[0] * (batch.width - length) + [1] * length for length in lengths])
            self._hold(batch, engine.admit(mask, batch.capacity, self._past(batch)))
        elif kind == "move_rows":
            moved = [(_micro_batch(source), indices) for source, indices in sources]
            self._hold(batch, engine.move_rows(moved, batch.capacity))
            for source, _ in sources:
                self._drop(source)  # rows that have ended
        elif kind == "yield":
            self._rest_drafts(batch.living)
            ((source, indices),) = sources
            self._keep_yielded(batch, source, indices)
            if len(indices) == _micro_batch(source).batch_size:
                self._drop(source)
            else:
                engine.retire(_micro_batch(source), indices)
        else:
            self._drop(batch)

    @staticmethod
    def _hold(batch: PlannedBatch, micro_batch: MicroBatch) -> None:
        batch.micro_batch, batch.on_host = micro_batch, micro_batch.host_rows > 0

    def _drop(self, batch: PlannedBatch) -> None:
        micro_batch, batch.micro_batch = batch.micro_batch, None
        if micro_batch is not None:
            self.engine.retire(micro_batch)

    # Kept prefixes

    def _reusable(self, row: Sequence) -> int:
        """Return how many first positions of a row may be reused. These are kept."""
        version, count = self._matched.get(row.key, (-1, 0))
        if version != self.prefixes.version:
            # Scores of a prompt need the logits of all its positions.
            count = 0 if row.scores_prompt else self.prefixes.matched(row.known_ids)
            count = count if count >= self._min_kept else 0
            self._matched[row.key] = self.prefixes.version, count
        return count

    def _past(self, batch: PlannedBatch) -> RowsPast | None:
        """Return the kept keys and values that a new micro-batch begins with; its length becomes what is there."""
        for row in batch.living:
            self._matched.pop(row.key, None)
        if not batch.length:
            return None
        kept = [self.prefixes.find(row.known_ids) for row in batch.living]
        pads = [batch.width - row.length for row in batch.living]
        ends = [pad + sum(part.length for part in parts) for pad, parts in zip(pads, kept, strict=True)]
        batch.length = min(batch.length, *ends)
        for row, pad in zip(batch.living, pads, strict=True):
            if not row.output_ids:
                row.cached = max(0, batch.length - pad)
        return RowsPast(kept, pads, batch.length) if batch.length else None

    def _note_computed(self, works: Several[PlannedWork]) -> None:
        """Note completed prompts and ended rows, to keep before the next pass. So no first token waits for that."""
        for batch, count in works:
            if batch.length + count < batch.width:
                continue
            whole = not batch.has_gaps and (len(batch.rows) == 1 or count == 1 or not batch.running)
            for index, row in zip(batch.alive, batch.living, strict=True):
                if row.failure is not None:
                    continue
                if (row.ended and whole) or not (batch.running or self._one_by_one):
                    tokens = (
                        batch.computed(index) + self.gained[row.key]
                        if batch.running
                        else batch.width - batch.pads[index]
                    )
                    self._note(row, batch, index, tokens)

    def _note(self, sequence: Sequence, batch: PlannedBatch, index: int, computed: int) -> None:
        scored = sequence.echo and sequence.logprobs is not None  # as similar rows will be
        if computed >= self._min_kept and not scored:
            self._to_keep.append((sequence.known_ids[:computed], _micro_batch(batch), index))

    def _keep_yielded(self, batch: PlannedBatch, source: PlannedBatch, indices: Several[int]) -> None:
        """Keep what rows that give way have computed."""
        for number, row in zip(batch.alive, batch.living, strict=True):
            computed = batch.computed(number)
            kept = 0
            if computed >= self._min_kept and not source.has_gaps and not row.scores_prompt:
                kept = self.prefixes.keep(row.known_ids[:computed], self.engine, _micro_batch(source), indices[number])
            self.schedule.tally.again += computed - kept

    def _keep_noted(self) -> None:
        noted, self._to_keep = self._to_keep, []
        for token_ids, micro_batch, index in noted:
            self.prefixes.keep(token_ids, self.engine, micro_batch, index)

    # A pass

    def _token_ids(self, batch: PlannedBatch, count: int, drafts: Mapping[int, list[int]]) -> Tensor:
        """Return the next `count` token ids of each row, ``[B, count]``: of a prompt, or the last token and drafts."""
        padding, rows = self._tokenizer.padding, []
        for row in batch.rows:
            if row is None:
                rows.append([padding] * count)
            elif batch.running:
                last = (row.output_ids or row.prompt_ids)[-1:]
                rows.append(([*last, *drafts.get(row.key, []), *[padding] * count])[:count])
            else:
                token_ids = row.known_ids
                skip = batch.length - (batch.width - len(token_ids))
                rows.append(([padding] * max(0, -skip) + token_ids[max(0, skip) :])[:count])
        return torch.tensor(rows)

    def _scored(self, batch: PlannedBatch) -> bool:
        """Tell whether a micro-batch's prompts need logits everywhere, for their scores."""
        return not batch.running and any(row.scores_prompt for row in batch.living)

    def _bounded(self, work: PlannedWork) -> PlannedWork:
        """Cut a work whose scored logits would take too much memory."""
        if not self.schedule.able.chunks or not self._scored(work.batch):
            return work
        max_tokens = tuning.TUNED.scored_logits // (self.engine.plan.model.vocab_size * len(work.batch.rows))
        return work._replace(tokens=max(1, min(work.tokens, max_tokens)))

    def _compute(self, works: Several[PlannedWork], drafts: Mapping[int, list[int]]) -> list[Sequence]:
        """Run the pass; return the sequences that got a token, whose numbers are in `gained` then."""
        scored = [self._scored(batch) for batch, _ in works]
        masks = self._begin_masks(works, drafts)
        asked = []
        for (batch, count), whole in zip(works, scored, strict=True):
            keep = count if whole or batch.running else 1
            asked.append(Work(_micro_batch(batch), self._token_ids(batch, count, drafts), keep))
        outputs = self.engine.forward(asked)
        masks_of = masks()
        chosen = list[tuple[list[Sequence | None], int, dict[tuple[int, int], Score]]]()
        tokens, finite = list[Tensor](), list[Tensor]()
        for (batch, count), whole, logits in zip(works, scored, outputs, strict=True):
            if whole:
                self._score_prompts(batch, logits)
            if batch.length + count < batch.width:  # prompts that are not complete
                continue
            logits = logits if batch.running else logits[:, -1:]
            ids, numbers, token_scores = _choose(batch.rows, logits, drafts, masks_of)
            tokens.append(ids)
            finite.append(numbers)
            chosen.append((batch.rows, logits.shape[1], token_scores))
        del outputs
        if not chosen:
            return []
        touched = list[Sequence]()
        whole_pass = torch.stack([torch.cat(tokens), torch.cat(finite)]).cpu()  # one copy for all
        parts = whole_pass.split([len(part) for part in tokens], dim=1)
        for part, (sequences, count, token_scores) in zip(parts, chosen, strict=True):
            ids_of, finite_of = part.view(2, len(sequences), count).tolist()
            touched += self._accept(sequences, ids_of, finite_of, drafts, token_scores)
        return touched

    def _begin_masks(
        self, works: Several[PlannedWork], drafts: Mapping[int, list[int]]
    ) -> Callable[[], dict[int, Tensor]]:
        """Begin to compute the masks of a pass, beside it. Returns what waits for those of each row, by key: int32
        ``[n, W]`` on the device."""
        choosing = [batch for batch, count in works if batch.length + count >= batch.width]
        rows = [row for batch in choosing for row in batch.living if row.sampling.grammar]
        counts = [1 + len(drafts.get(row.key, ())) for row in rows]
        bits = torch.full((sum(counts), -(-self.engine.plan.model.vocab_size // 32)), -1, dtype=torch.int32)
        parts = zip(rows, bits.split(counts), strict=True)
        asked = [(_grammar(row), [*part], drafts.get(row.key, ())) for row, part in parts]
        filling = self._grammars.begin(asked)

        def masks() -> dict[int, Tensor]:
            for future in filling:
                future.result()
            whole = to_device(bits, self.engine.device).split(counts) if rows else ()
            return {row.key: part for row, part in zip(rows, whole, strict=True)}

        return masks

    def _accept(
        self,
        sequences: Several[Sequence | None],
        ids: Several[list[int]],
        finite: Several[list[int]],
        drafts: Mapping[int, list[int]],
        token_scores: Mapping[tuple[int, int], Score],
    ) -> list[Sequence]:
        """Append each sequence's tokens, up to the first without a matching draft; return the sequences."""
        rows = [(index, sequence) for index, sequence in enumerate(sequences) if sequence is not None]
        proposed = {index: drafts.get(sequence.key, [])[: len(ids[index]) - 1] for index, sequence in rows}
        right = {index: common(guesses, ids[index]) for index, guesses in proposed.items()}
        for index, sequence in rows:
            limit, count = min(right.values()) if self._one_length else right[index], 0
            for position in range(limit + 1):
                if sequence.edits is not None and sequence.edits.grammar is not None and _fail(sequence):
                    count = 1
                    break
                add_token(self._tokenizer, sequence, ids[index][position], bool(finite[index][position]))
                count += 1
                if (index, position) in token_scores and finite[index][position]:
                    sequence.scores.append(token_scores[index, position])
                if sequence.ended:
                    break
            self.gained[sequence.key] = count
            if proposed[index]:
                self.drafts.observe(sequence.key, len(proposed[index]), count - 1, given_up=limit < right[index])
        return [sequence for _, sequence in rows]

    def _score_prompts(self, batch: PlannedBatch, logits: Tensor) -> None:
        """Add prompt scores from `logits`, ``[B, count, V]``. They belong to a micro-batch's next positions."""
        count = logits.shape[1]
        for index, row in enumerate(batch.rows):
            if row is None or not row.scores_prompt:
                continue
            first = batch.length - (batch.width - row.length)
            done = len(row.prompt_scores)  # the next score is that of token `done` + 1, from position `done`
            last = min(first + count, len(row.prompt_ids) - 1)
            if first <= done < last:
                part = logits[index, done - first : last - first]
                row.prompt_scores += scores(part, row.prompt_ids[done + 1 : last + 1], row.logprobs or 0)


def _grammar(row: Sequence) -> Grammar:
    assert row.edits is not None
    assert row.edits.grammar is not None
    return row.edits.grammar


def _fail(row: Sequence) -> bool:
    """End a row whose grammar has an error; tell whether it has."""
    if (why := _grammar(row).error) is None:
        return False
    row.failure = Failure("invalid_grammar", why, 400)
    return True


def _micro_batch(batch: PlannedBatch) -> MicroBatch:
    assert batch.micro_batch is not None
    return batch.micro_batch


def _choose(
    sequences: Several[Sequence | None], logits: Tensor, drafts: Mapping[int, list[int]], masks: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor, dict[tuple[int, int], Score]]:
    """Choose tokens from ``[B, n, V]`` logits, trusting all earlier drafts; `masks` are by key. Returns the tokens
    ``[B * n]``, whether their logits are numbers, and the scores that are asked for, by row and position."""
    count = logits.shape[1]
    each = [sequence for sequence in sequences for _ in range(count)]
    samplings = [GREEDY if sequence is None else sequence.sampling for sequence in each]
    made = [0 if sequence is None else len(sequence.output_ids) for sequence in sequences]
    places = [tokens + ahead for tokens in made for ahead in range(count)]
    flat = logits.reshape(-1, logits.shape[-1])
    edited = {
        row * count + ahead: EditedRow(
            sequence.edits,
            drafts.get(sequence.key, [])[:ahead],
            masks[sequence.key][ahead] if sequence.key in masks and ahead < len(masks[sequence.key]) else None,
        )
        for row, sequence in enumerate(sequences)
        if sequence is not None and sequence.edits is not None
        for ahead in range(count)
    }
    tokens, finite = choose(flat, samplings, places, edited)
    asked = [None if sequence is None else sequence.logprobs for sequence in each]
    scored = [(number, top_count) for number, top_count in enumerate(asked) if top_count is not None]
    if not scored:
        return tokens, finite, {}
    rows = [number for number, _ in scored]
    token_scores = scores(flat[rows], tokens[rows].tolist(), max(top_count for _, top_count in scored))
    each_score = zip(scored, token_scores, strict=True)
    scores_by_index = {
        divmod(number, count): score._replace(top=score.top[:top_count]) for (number, top_count), score in each_score
    }
    return tokens, finite, scores_by_index


def max_batch_positions(plan: Plan) -> int:
    """Return the maximum of positions in one micro-batch. Attention of grouped heads with padding copies a layer's keys
    and values for each query head."""
    model, memory = plan.model, plan.machine.device_bytes
    heads = model.num_heads // max(1, model.num_kv_heads)
    largest = model.largest_kv_layer_bytes(1, 1024) / 1024
    if heads <= 1 or not largest or not memory:
        return 1 << 62
    return max(4096, int(tuning.TUNED.expanded_share * memory / (heads * largest)))


def abilities(engine: Engine, on_host: bool = False) -> Abilities:
    """Return the abilities of `engine` for the scheduler; `on_host`: rows have their KV cache in host memory."""
    moves = engine.cannot_move_rows() is None
    return Abilities(
        one_pass=engine.one_pass,
        chunks=engine.cannot_chunk() is None,
        moves_rows="rarely" if moves and on_host else moves,
        pads=engine.cannot_pad() is None,
    )
