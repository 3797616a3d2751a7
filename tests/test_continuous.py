"""Continuous batching on real engines: sequences that come and go at any pass get the tokens that each has alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import Checkpoints, Patch, passes
from tests import test_cache_kinds as kinds
from tests.grid import covering
from tests.test_parity import load
from tests.test_passes import WAYS, keep_here, small_blocks
from zinfer.core.case import Workload
from zinfer.engine import EngineError
from zinfer.engine.base import Engine
from zinfer.engine.cache import WindowIndex
from zinfer.engine.stream.engine import Stream
from zinfer.generation import schedule, sequence, tuning
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.tokenizer import Tokenizer

kind = kinds.kind  # the fixture
LOAD = Workload(batch_size=8, input_len=20, output_len=12)
MORE: dict[str, Any] = {
    "kv auto by the cpu": ("stream", "cpu", {"kv_offload": "auto", "kv_attention": "cpu"}),
    "kv auto over the link": ("stream", "cpu", {"kv_offload": "auto", "kv_attention": "gpu"}),
    "int8 by the cpu": ("stream", "cpu", {"kv_offload": "cpu", "kv_cache_dtype": "int8"}),
}


class Words:
    """A tokenizer without text: no token ends a sequence, and a text is its ids."""

    ends: frozenset[int] = frozenset()
    padding = 0

    def decode(self, token_ids: Sequence[int], _before: Sequence[int] = ()) -> str:
        return " ".join(map(str, token_ids))


ALONE: dict[tuple[Any, ...], list[int]] = {}


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Tokens of a prompt alone, computed once: all engines agree, given the types of weights and cache."""
    case = engine.plan.case
    key = (engine.plan.model.directory, case.dtype, dict(case.options).get("kv_cache_dtype"), tuple(prompt), count)
    if key not in ALONE:
        ids = torch.tensor([list(prompt)])
        batch, logits = passes.prefill(engine, ids, torch.ones_like(ids), count)
        tokens = [int(logits.argmax(-1))]
        while len(tokens) < count:
            tokens.append(int(passes.decode(engine, batch, torch.tensor(tokens[-1:])).argmax(-1)))
        engine.retire(batch)
        ALONE[key] = tokens
    return ALONE[key]


def random_ids(dice: random.Random, low: int, high: int) -> list[int]:
    return [dice.randint(4, 90) for _ in range(dice.randint(low, high))]


def sequences(count: int, seed: int, longest: int = 30, max_tokens: int = 14) -> list[sequence.Sequence]:
    dice = random.Random(seed)
    return [
        sequence.Sequence(random_ids(dice, 1, longest), dice.randint(1, max_tokens), key=key) for key in range(count)
    ]


def alike(count: int, length: int, limit: int) -> list[sequence.Sequence]:
    """Sequences of nearly equal lengths."""
    dice = random.Random(1)
    lengths = [length - key % 2 for key in range(count)]
    return [
        sequence.Sequence(random_ids(dice, size, size), limit - key % 3, key=key) for key, size in enumerate(lengths)
    ]


def tune(patch: Patch, **values: Any) -> None:
    """Change tuned numbers of the scheduler."""
    patch.setattr(tuning, "TUNED", replace(tuning.TUNED, **values))


def small(patch: Patch, budget: int = 17) -> None:
    """Make decisions that are made for thousands of tokens with few."""
    tune(patch, min_prompt_tokens=6, few_batches=2, many_batches=3)
    patch.setattr(PassTimes, "room", lambda *_: budget)
    patch.setattr(PassTimes, "tokens", budget, raising=False)


def begin(engine: Engine, step: int = 8, **settings: Any) -> ContinuousScheduler:
    """Return a scheduler whose micro-batches grow by `step` positions."""
    running = ContinuousScheduler(engine, Words(), LOAD, **settings)  # type: ignore[arg-type]
    running.schedule.step = step
    return running


def run(
    running: ContinuousScheduler, arrivals: list[list[sequence.Sequence]], every: int = 4
) -> list[sequence.Sequence]:
    """Run sequences that arrive in groups, every few passes; return all of them."""
    waiting, count = list(arrivals), 0
    while waiting or running.running:
        if waiting and count % every == 0:
            running.add(waiting.pop(0))
        running.step()
        count += 1
        assert count < 400
    running.release()
    assert running.engine.batches == []
    return [row for group in arrivals for row in group]


def come_and_go(engine: Engine, count: int = 14) -> tuple[list[sequence.Sequence], list[int], schedule.Tally]:
    """Run sequences that arrive in three groups; return them, the tokens that each may have, and what was counted."""
    running = begin(engine)
    rows = sequences(count, 3)
    limits = [row.left for row in rows]
    finished = run(running, [rows[:5], rows[5:6], rows[6:]])
    tally = running.schedule.tally
    running.end()
    return finished, limits, tally


def check(engine: Engine, rows: list[sequence.Sequence], limits: list[int]) -> None:
    for row, limit in zip(rows, limits, strict=True):
        assert (row.failure, row.finish_reason) == (None, "length")
        assert row.output_ids == greedy(engine, row.prompt_ids, limit), row.key


def complete(running: ContinuousScheduler, *arrivals: list[sequence.Sequence]) -> None:
    """Run sequences that arrive in groups, and close the scheduler: each gets the tokens that it has alone."""
    limits = [row.left for group in arrivals for row in group]
    finished = run(running, [*arrivals])
    running.end()
    check(running.engine, finished, limits)


@pytest.fixture
def llama(checkpoint: Checkpoints) -> Engine:
    return load("stream", checkpoint("llama"), "cpu")


def engine_of(way: str, checkpoint: Checkpoints, folder: Path, patch: Patch) -> Engine:
    small_blocks(patch, 20)
    small(patch)
    name, offload, options = (WAYS | MORE)[way]
    if options.get("kv_offload") == "auto":
        keep_here(patch, 3)
    return load(name, checkpoint("llama"), offload, folder, **options)


@pytest.mark.parametrize("way", [*WAYS, *MORE])
def test_tokens_are_those_of_each_sequence_alone(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    engine = engine_of(way, checkpoint, tmp_path, monkeypatch)
    finished, limits, tally = come_and_go(engine, 10)
    assert tally.again == 0
    assert [len(row.output_ids) for row in finished] == limits
    if way != "int8 by the cpu":
        check(engine, finished, limits)


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",  # other kinds below, with passes that lack memory
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "falcon_h1", "mamba", "gemma4_text")),
    ],
)
def test_layers_of_every_kind_take_part(name: str, kind: kinds.Kinds, monkeypatch: Patch) -> None:
    small(monkeypatch)
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    engine = load("stream", kind(name), "cpu")
    rows = sequences(9, 5)
    complete(begin(engine), rows[:4], rows[4:])


def crowded(engine: Engine, patch: Patch) -> tuple[list[sequence.Sequence], list[int]]:
    """Run and return eight rows, some of which give way, with limits. Admission is made to expect that rows end at
    once, so that memory falls short."""
    small(patch, 60)
    running = begin(engine, step=4)
    running.schedule.limits = running.schedule.limits._replace(positions=90)
    running.schedule._early = running.schedule._tokens = 1000
    rows = alike(8, 8, 24)
    limits = [row.left for row in rows]
    finished = run(running, [rows])
    assert running.schedule.tally.yielded > 0
    running.end()
    return finished, limits


@pytest.mark.parametrize("verb", ["forward", "admit", "move_rows"])
def test_a_shortage_of_memory_costs_no_sequence(verb: str, llama: Engine, monkeypatch: Patch) -> None:
    small(monkeypatch, 40)
    running = begin(llama, step=4)
    whole, seen = getattr(llama, verb), list[int]()

    def short(*arguments: Any) -> Any:
        seen.append(running.schedule.limits.positions)
        if len(seen) in (3, 4, 7):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*arguments)

    monkeypatch.setattr(llama, verb, short)
    rows = alike(10, 9, 12)
    before = running.schedule.limits.positions
    tune(monkeypatch, min_prompt_tokens=6, few_batches=2, many_batches=3, calm=1)
    complete(running, rows[:6], rows[6:])
    assert len(seen) > 4
    assert min(seen) < before
    assert running.schedule.limits.positions > min(seen), "passes that have enough memory let the limits rise"


def run_short(
    running: ContinuousScheduler, rows: list[sequence.Sequence], monkeypatch: Patch
) -> list[sequence.Sequence]:
    """Run and end rows; two passes of running ones run out of memory."""
    short: list[int] = []
    left, add, compute = 0, WindowIndex.add, running._compute

    def computed(works: list[schedule.PlannedWork], *arguments: Any) -> Any:
        nonlocal left
        if len(short) < 2 and sum(batch.running for batch, _ in works) >= 2:
            short.append(len(works))
            left = 5
        return compute(works, *arguments)

    def added(self: WindowIndex, start: int, count: int) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return add(self, start, count)

    with monkeypatch.context() as patch:
        patch.setattr(running, "_compute", computed)
        patch.setattr(WindowIndex, "add", added)
        finished = run(running, [rows[:6], rows[6:]])
    assert running.schedule.tally.retries == len(short) == 2
    running.end()
    return finished


@pytest.mark.parametrize("way", [way for way, (name, *_) in (WAYS | MORE).items() if name == "stream"])
def test_a_pass_without_memory_costs_no_sequence(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    engine = engine_of(way, checkpoint, tmp_path, monkeypatch)
    running = begin(engine)
    rows = alike(10, 9, 12)
    limits = [row.left for row in rows]
    finished = run_short(running, rows, monkeypatch)
    if way != "int8 by the cpu":
        check(engine, finished, limits)
    assert [len(row.output_ids) for row in finished] == limits


@pytest.mark.parametrize("way", ["device", "cpu"])
def test_a_window_that_a_failed_pass_may_have_moved_cannot_go_back(
    way: str, kind: kinds.Kinds, monkeypatch: Patch
) -> None:
    """Memory runs out after the window's move is noted, before the move."""
    monkeypatch.setattr("zinfer.engine.cache.MIN_SPARE", 4)
    options: dict[str, Any] = {} if way == "device" else {"kv_offload": "cpu", "kv_attention": "cpu"}
    engine = load("stream", kind("gemma2"), "cpu", **options)
    ids = torch.tensor([[5, 9, 11, 30, 7, 8, 21, 40]])
    batch, _ = passes.prefill(engine, ids, torch.ones_like(ids), 12)
    add, token = WindowIndex.add, torch.tensor([6])

    def added(self: WindowIndex, start: int, count: int) -> Any:
        step = add(self, start, count)
        if step.moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step

    monkeypatch.setattr(WindowIndex, "add", added)
    passes.decode(engine, batch, token)
    with pytest.raises(torch.OutOfMemoryError):  # the first slots of the window are free, the last ones are taken
        passes.decode(engine, batch, token)
    with pytest.raises(EngineError, match="a pass that failed"):
        engine.rollback(batch, torch.tensor([batch.length]))


def test_memory_that_one_row_lacks_is_an_error(llama: Engine, monkeypatch: Patch) -> None:
    running = begin(llama)
    monkeypatch.setattr(llama, "forward", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    assert running.step() == [], "nothing to do is no pass"
    assert running.schedule.tally.passes == 0
    assert Stream.forward(llama, []) == []  # type: ignore[arg-type]
    running.add(sequences(1, 1))
    with pytest.raises(torch.OutOfMemoryError):
        running.step()
    assert not running.running
    assert llama.batches == []


def test_stops_and_dropped_sequences_free_their_rows(llama: Engine, monkeypatch: Patch) -> None:
    small(monkeypatch)
    tokenizer = Tokenizer(llama.plan.model)
    running = ContinuousScheduler(llama, tokenizer, LOAD, arrivals=True)
    prompts = [tokenizer.hf(text).input_ids for text in ("Once upon a time", "ab", "etaoin", "x")]
    free = [sequence.Sequence(ids, 16, ignore_eos=True, key=key) for key, ids in enumerate(prompts)]
    run(running, [free])
    text = free[0].text
    stop = sequence.Sequence(prompts[0], 16, stop=(text[5:8],), ignore_eos=True, key=4)
    gone = sequence.Sequence(prompts[1], 400, ignore_eos=True, key=5)
    other = sequence.Sequence(prompts[2], 16, ignore_eos=True, key=6)
    running.add([stop, gone, other])
    for _ in range(4):
        running.step()
    running.drop([5])
    run(running, [])
    assert (stop.text, stop.finish_reason) == (text[: text.index(text[5:8])], "stop")
    assert other.output_ids == free[2].output_ids
    assert not gone.ended
    running.end()


# Shares


@pytest.mark.parametrize(
    ("way", "size"),
    covering(["cpu", "kv by the cpu", "kv over the link", "accelerate", "int8 by the cpu"], [0, 1 << 22]),
)
def test_rows_that_are_given_up_go_on_as_if_they_had_not_been(
    way: str, size: int, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """One request has all rows; others come, one after the other, and begin at once. What the first one's rows have
    computed is kept where it can be, else computed again."""
    small(monkeypatch)
    tune(monkeypatch, min_kept=2)
    name, offload, options = (WAYS | MORE)[way]
    engine = load(name, checkpoint("llama"), offload, tmp_path, **options)
    running = begin(engine, rows=4, arrivals=True, cache_size=size)
    rows = [replace(row, left=12 + row.key) for row in sequences(9, 7, longest=20)]
    others = [replace(row, left=3, key=20 + row.key, owner=1 + row.key) for row in sequences(3, 8, longest=20)]
    limits = [row.left for row in (*rows, *others)]
    running.add(rows)
    while len(running.schedule.running) < 4 or any(batch.length < 3 for batch in running.schedule.batches):
        running.step()
    for other in others:
        running.add([other])
        for _ in range(6):
            running.step()
        assert other.output_ids
    run(running, [])
    tally = running.schedule.tally
    assert tally.yielded >= (1 if way == "accelerate" else 3)
    assert (tally.again == 0) == (size > 0 and running.cannot_reuse is None)
    assert [len(row.output_ids) for row in (*rows, *others)] == limits
    if way != "int8 by the cpu":
        check(engine, [*rows, *others], limits)
    running.end()


# Kept prefixes


def turns(seed: int, count: int = 6) -> list[list[sequence.Sequence]]:
    """Prompts that come in three rounds: new ones, some with a common beginning; then some that go on from those, or
    part from them; then some that are there whole."""
    dice = random.Random(seed)
    some = partial(random_ids, dice)
    system = some(9, 9)
    first = [system + some(1, 12) if number % 2 else some(1, 20) for number in range(count)]
    second = [ids + some(1, 9) for ids in first] + [ids[: len(ids) // 2 + 1] + some(2, 5) for ids in first[:3]]
    third = [*second[:3], system, some(2, 15)]
    rounds, key = [], 0
    for prompts in (first, second, third):
        dice.shuffle(prompts)
        rounds.append([sequence.Sequence(ids, dice.randint(1, 9), key=key + at) for at, ids in enumerate(prompts)])
        key += len(prompts)
    return rounds


def keeping(engine: Engine, patch: Patch, size: int = 1 << 20, **settings: Any) -> ContinuousScheduler:
    tune(patch, min_kept=2, kept_chunk=5, reuse_slack=3)
    return begin(engine, arrivals=True, cache_size=size, **settings)


def finish(running: ContinuousScheduler, rows: list[sequence.Sequence]) -> int:
    """Run sequences that come at once to their ends; return the number of positions of prompts computed for them."""
    before = running.schedule.tally.prompts
    run(running, [rows])
    return running.schedule.tally.prompts - before


@pytest.mark.parametrize(
    ("name", "offload", "architecture"),
    [("stream", "cpu", "llama"), ("stream", "none", "bloom"), ("accelerate", "cpu", "llama")],
)
def test_kept_prefixes_are_reused_and_change_no_token(
    name: Any, offload: Any, architecture: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small(monkeypatch)
    engine = load(name, checkpoint(architecture), offload, tmp_path)
    running = keeping(engine, monkeypatch)
    assert running.cannot_reuse is None
    for number, rows in enumerate(turns(7)):
        limits = [row.left for row in rows]
        computed = finish(running, rows)
        check(engine, rows, limits)
        whole, cached = sum(len(row.prompt_ids) for row in rows), sum(row.cached for row in rows)
        assert all(row.cached < len(row.prompt_ids) for row in rows)
        assert computed >= whole - cached
        if number:  # accelerate begins rows of all lengths together, and so with as few tokens as one of them has
            assert cached > (0.2 if name == "accelerate" else 0.4) * whole
            assert name == "accelerate" or computed < 0.6 * whole
    assert running.schedule.tally.again == 0
    running.end()
    assert running.prefixes.held == 0


def test_scores_of_a_prompt_need_all_of_it(llama: Engine, monkeypatch: Patch) -> None:
    """They run with rows that reuse their prompt, and are not kept."""
    small(monkeypatch, 60)
    running = keeping(llama, monkeypatch)
    scores: dict[str, Any] = {"logprobs": 1, "echo": True}
    alone, first, scored, free = (
        sequence.Sequence([*range(5, 40, 4)], 2, key=key, **more) for key, more in enumerate((scores, {}, scores, {}))
    )
    finish(running, [alone])
    assert running.prefixes.held == 0
    finish(running, [first])
    finish(running, [scored, free])
    assert (scored.cached, free.cached) == (0, 8)
    values, expected = ([score.logprob for score in row.prompt_scores] for row in (scored, alone))
    assert values == pytest.approx(expected, abs=1e-4)
    assert len(scored.prompt_scores) == 8
    assert scored.output_ids == free.output_ids == alone.output_ids
    running.end()


def test_what_is_kept_has_a_budget_and_gives_way(llama: Engine, monkeypatch: Patch) -> None:
    """In memory for 40 positions the least recently used ones go; where the host has none, rows go on without."""
    small(monkeypatch)
    size = llama.plan.model.kv_bytes(1, 40)
    running = keeping(llama, monkeypatch, size)
    for rows in turns(3, 8):
        limits = [row.left for row in rows]
        finish(running, rows)
        check(llama, rows, limits)
        assert size / 2 < running.prefixes.held <= size
    last = [sequence.Sequence([4] * 30, 4, key=100)]
    finish(running, last)
    again = [sequence.Sequence([*last[0].prompt_ids, *last[0].output_ids, 7], 4, key=101)]
    with monkeypatch.context() as patch:
        patch.setattr(llama, "snapshot", lambda *_: (_ for _ in ()).throw(MemoryError("no host memory")))
        finish(running, again)
    assert again[0].cached == 33
    check(llama, again, [4])
    running.end()


def test_an_engine_that_cannot_reuse_says_why(kind: kinds.Kinds, checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    small(monkeypatch)
    hosted = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu")
    for engine, why in ((load("stream", kind("gemma2"), "cpu"), "sliding window"), (hosted, "kv_offload=cpu")):
        running = keeping(engine, monkeypatch)
        assert why in str(running.cannot_reuse)
        for key in range(2):
            row = sequence.Sequence([5, 6, 7, 8, 9], 2, key=key)
            assert finish(running, [row]) == 5
            assert row.cached == 0
        running.end()


def test_long_answers_that_begin_first_have_room_where_places_bound_the_rows(llama: Engine) -> None:
    """Without it, long rows would be moved although memory is free. Long is longer than the mean."""
    mean = Workload(batch_size=4, input_len=20, output_len=2)
    bounded, alone = (ContinuousScheduler(llama, Words(), mean, rows) for rows in (4, None))  # type: ignore[arg-type]
    assert bounded.schedule.limits.positions >= 4 * (20 + 200)
    assert alone.schedule.limits.positions == schedule.positions_of(mean)
