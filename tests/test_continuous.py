"""Continuous batching on real engines: sequences that come and go at any pass get the tokens that each has alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import test_cache_kinds as kinds
from tests.test_parity import load
from tests.test_passes import WAYS, keep_here, small_blocks
from zinfer.engine.base import Engine, Work
from zinfer.generation import passes, schedule, scheduler
from zinfer.generation.schedule import PassTimes
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.tokenizer import Tokenizer
from zinfer.spec.case import Workload

Checkpoints = Callable[..., Path]
Patch = pytest.MonkeyPatch
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

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Tokens of a prompt alone."""
    ids = torch.tensor([prompt])
    batch, logits = passes.prefill(engine, ids, torch.ones_like(ids), count)
    found = [int(logits.argmax(-1))]
    while len(found) < count:
        found.append(int(passes.decode(engine, batch, torch.tensor(found[-1:])).argmax(-1)))
    engine.retire(batch)
    return found


def sequences(count: int, seed: int, longest: int = 30, most: int = 14) -> list[scheduler.Sequence]:
    dice = random.Random(seed)
    return [
        scheduler.Sequence(
            [dice.randint(4, 90) for _ in range(dice.randint(1, longest))], dice.randint(1, most), key=key
        )
        for key in range(count)
    ]


def alike(count: int, length: int, limit: int) -> list[scheduler.Sequence]:
    """Sequences of nearly equal lengths."""
    dice = random.Random(1)
    return [
        scheduler.Sequence([dice.randint(4, 90) for _ in range(length - key % 2)], limit - key % 3, key=key)
        for key in range(count)
    ]


def small(patch: Patch, budget: int = 17) -> None:
    """Make decisions that are made for thousands of tokens with few."""
    patch.setattr(schedule, "LEAST_TOKENS", 6)
    patch.setattr(schedule, "FEW_GROUPS", 2)
    patch.setattr(schedule, "MOST_GROUPS", 3)
    patch.setattr(PassTimes, "room", lambda *_: budget)
    patch.setattr(PassTimes, "tokens", budget, raising=False)


def run(
    running: ContinuousScheduler, arrivals: list[list[scheduler.Sequence]], every: int = 4
) -> list[scheduler.Sequence]:
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
    return [one for group in arrivals for one in group]


def check(engine: Engine, found: list[scheduler.Sequence], limits: list[int]) -> None:
    for one, limit in zip(found, limits, strict=True):
        assert (one.error, one.finish_reason) == (None, "length")
        assert one.output_ids == greedy(engine, one.prompt_ids, limit), one.key


@pytest.mark.parametrize("way", [*WAYS, *MORE])
def test_tokens_are_those_of_each_sequence_alone(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch, 20)
    small(monkeypatch)
    name, offload, options = (WAYS | MORE)[way]
    if options.get("kv_offload") == "auto":
        keep_here(monkeypatch, 3)
    engine = load(name, checkpoint("llama"), offload, tmp_path, **options)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    running.schedule.step = 8
    rows = sequences(10, 3)
    limits = [one.left for one in rows]
    found = run(running, [rows[:5], rows[5:6], rows[6:]])
    tally = running.schedule.tally
    assert tally.again == 0
    running.end()
    if way == "int8 by the cpu":
        assert all(len(one.output_ids) == limit for one, limit in zip(found, limits, strict=True))
    else:
        check(engine, found, limits)
    engine.close()


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "qwen3_next", "deepseek_v3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "falcon_h1", "mamba", "gemma4_text")),
    ],
)
def test_layers_of_every_kind_take_part(name: str, kind: kinds.Kinds, tmp_path: Path, monkeypatch: Patch) -> None:
    small(monkeypatch)
    monkeypatch.setattr("zinfer.engine.cache.LEAST_SPARE", 4)
    engine = load("stream", kind(name), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    running.schedule.step = 8
    rows = sequences(9, 5)
    limits = [one.left for one in rows]
    found = run(running, [rows[:4], rows[4:]])
    running.end()
    check(engine, found, limits)
    engine.close()


def test_rows_wait_in_host_memory_and_come_back(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    """Admission is made to expect that rows end at once, so that memory falls short."""
    small(monkeypatch, 60)
    engine = load("stream", checkpoint("llama"), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    running.schedule.step = 4
    running.schedule.limits = running.schedule.limits._replace(positions=90)
    running.schedule.ending = 0.5
    rows = alike(8, 8, 24)
    limits = [one.left for one in rows]
    found = run(running, [rows])
    tally = running.schedule.tally
    assert tally.suspended > 0
    assert tally.again == 0
    running.end()
    check(engine, found, limits)
    engine.close()


@pytest.mark.parametrize("verb", ["forward", "admit", "regroup"])
def test_a_shortage_of_memory_costs_no_sequence(
    verb: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small(monkeypatch, 40)
    engine = load("stream", checkpoint("llama"), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    running.schedule.step = 4
    calls, whole = 0, getattr(engine, verb)

    def short(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 4, 9):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*arguments)

    monkeypatch.setattr(engine, verb, short)
    rows = alike(10, 9, 12)
    limits = [one.left for one in rows]
    before = running.schedule.limits.positions
    found = run(running, [rows[:6], rows[6:]])
    assert calls > 4
    assert running.schedule.limits.positions < before
    running.end()
    monkeypatch.undo()
    check(engine, found, limits)
    engine.close()


def test_memory_that_one_row_lacks_is_an_error(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    engine = load("stream", checkpoint("llama"), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]

    def short(_works: Sequence[Work]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "forward", short)
    running.add(sequences(1, 1))
    with pytest.raises(torch.OutOfMemoryError):
        running.step()
    assert not running.running
    assert engine.batches == []
    engine.close()


def test_stops_and_dropped_sequences_free_their_rows(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small(monkeypatch)
    directory = checkpoint("llama")
    engine = load("stream", directory, "cpu", tmp_path)
    tokenizer = Tokenizer(engine.plan.model)
    running = ContinuousScheduler(engine, tokenizer, LOAD, arrivals=True)
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "ab", "etaoin", "x")]
    free = [scheduler.Sequence(ids, 16, ignore_eos=True, key=key) for key, ids in enumerate(prompts)]
    run(running, [free])
    text = free[0].text
    stop = scheduler.Sequence(prompts[0], 16, stop=(text[5:8],), ignore_eos=True, key=4)
    gone = scheduler.Sequence(prompts[1], 400, ignore_eos=True, key=5)
    other = scheduler.Sequence(prompts[2], 16, ignore_eos=True, key=6)
    running.add([stop, gone, other])
    for _ in range(4):
        running.step()
    running.drop([5])
    while running.running:
        running.step()
    assert stop.text == text[: text.index(text[5:8])]
    assert stop.finish_reason == "stop"
    assert other.output_ids == free[2].output_ids
    assert not gone.ended
    running.end()
    engine.close()
