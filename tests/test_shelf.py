"""Prefix cache: conversations are kept and found again, with a real engine, within a budget."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests import Checkpoints, Patch
from tests.running import prefill
from tests.test_parity import load
from zinfer.engine.base import Engine
from zinfer.generation.prefix_cache import PrefixCache
from zinfer.generation.sequence import common

TOKENS = torch.randint(4, 128, (40,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load("stream", checkpoint("llama"), "none", tmp_path_factory.mktemp("engine"))
    yield loaded
    loaded.close()


class Bench(NamedTuple):
    """Prefix caches of an engine."""

    engine: Engine

    def size(self, positions: int) -> int:
        return self.engine.plan.model.kv_bytes(1, positions)

    def cache(self, positions: int = 1000, **fields: int) -> PrefixCache:
        """Return a prefix cache with memory for a number of positions."""
        return PrefixCache(self.size(positions), **fields)

    def run(self, tokens: list[int], cache: PrefixCache | None = None) -> tuple[torch.Tensor, int]:
        """Compute and cache `tokens`. Return the logits after them, and how many were cached before."""
        parts = cache.find(tokens) if cache else []
        ids = torch.tensor([tokens])
        logits = prefill(self.engine, ids, torch.ones_like(ids), past=parts)
        if cache:
            cache.keep(tokens, self.engine, self.engine.batches[-1])
        return logits, sum(part.length for part in parts)

    def check(self, cache: PrefixCache, tokens: list[int], cached: int) -> None:
        logits, count = self.run(tokens, cache)
        assert count == cached
        assert torch.allclose(logits, self.run(tokens)[0], atol=1e-4)


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def test_each_turn_finds_the_one_before_and_an_edited_one_their_beginning(bench: Bench) -> None:
    cache = bench.cache()
    for length, cached in ((10, 0), (20, 10), (35, 20)):
        bench.check(cache, TOKENS[:length], cached)
    assert cache.held == bench.size(35), "no position is there twice"
    bench.check(cache, TOKENS[:35], 34)
    bench.check(cache, [*TOKENS[:25], 5, 6, 7, 8], 25)
    bench.check(cache, [*TOKENS[:25], 5, 6, 7, 8, 9], 29)
    bench.check(cache, TOKENS[:3], 2)
    cache.close()
    assert cache.held == 0


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning(bench: Bench) -> None:
    cache = bench.cache(positions=40)
    other, third = TOKENS[::-1], [7, *TOKENS[5:]]
    bench.run(TOKENS[:10], cache)
    bench.run(TOKENS[:20], cache)
    bench.run(other[:20], cache)
    assert cache.held == bench.size(40)
    bench.run(third[:10], cache)  # takes the place of the first one's end
    assert cache.held == bench.size(40)
    assert sum(part.length for part in cache.find(TOKENS)) == 10
    assert sum(part.length for part in cache.find(other)) == 20
    bench.run(third[:39], cache)
    assert sum(part.length for part in cache.find(other)) == 0
    bench.run([8, *TOKENS, 5], cache)
    assert cache.held == 0, "more than the size is not kept"


def test_a_beginning_that_two_share_is_there_once_and_the_end_may_go_alone(bench: Bench) -> None:
    """A second conversation parts from the first within a node. That stays with it; other ends go before."""
    cache = bench.cache(positions=50, chunk=8)
    bench.check(cache, TOKENS[:20], 0)
    other = [*TOKENS[:13], *TOKENS[29:13:-1]]
    bench.check(cache, other, 13)
    assert cache.held == bench.size(20 + len(other) - 13)
    bench.check(cache, TOKENS[:20], 19)
    bench.check(cache, other, len(other) - 1)
    assert cache.matched([*TOKENS[:20], 5]) == 20
    bench.check(cache, [*other, *TOKENS[:20]], len(other))  # 50 positions: the end of the first one goes
    assert cache.matched([*TOKENS[:20], 5]) == 16
    assert cache.held <= bench.size(50)
    bench.check(cache, TOKENS[:20], 16)
    assert cache.matched([*other, 5]) == len(other)
    cache.close()
    assert (cache.held, cache.matched(TOKENS)) == (0, 0)


def test_host_memory_that_others_need_is_given_back(bench: Bench, monkeypatch: Patch) -> None:
    free = 0
    each = bench.size(1)
    cache = bench.cache(chunk=8, min_free=100)
    monkeypatch.setattr("zinfer.generation.prefix_cache.available_bytes", lambda: free - cache.held)
    bench.run(TOKENS[:10], cache)
    assert cache.held == 0, "no memory but what is to stay free"
    free = 100 + 20 * each
    bench.run(TOKENS[:20], cache)
    assert cache.held == 20 * each
    bench.run(TOKENS[20:32], cache)
    assert cache.held == 20 * each
    assert cache.matched(TOKENS) == 8, "the last 12 positions are in two nodes"


def test_the_longest_kept_prefix_is_found() -> None:
    """As a search through all sequences finds it; each position is kept once, and the least recent ones give way."""
    dice = random.Random(4)
    cache, sequences = PrefixCache(1 << 30, chunk=5), list[list[int]]()
    engine = Copies()
    for _ in range(300):
        tokens = [dice.randrange(3) for _ in range(dice.randrange(1, 14))]
        longest = max((common(sequence, tokens) for sequence in sequences), default=0)
        assert cache.matched([*tokens, 9]) == longest
        engine.tokens = tokens
        cache.keep(tokens, engine, engine)  # type: ignore[arg-type]
        kept = [token for part in cache.find([*tokens, 9]) for token in part.tokens]  # type: ignore[attr-defined]
        assert kept == tokens
        assert cache.matched(tokens) == len(tokens) - 1, "the logits of the last token are those of the next one"
        assert sum(part.nbytes for part in cache.find(tokens)) == len(tokens) - 1
        sequences.append(tokens)
        assert cache.held == len({tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)})
    cache.close()
    assert (cache.held, cache.matched(sequences[0])) == (0, 0)


class Copies:
    """Engine whose snapshots are tokens."""

    def __init__(self) -> None:
        self.tokens, self.plan, self.model = list[int](), self, self

    def kv_bytes(self, _rows: int, positions: int) -> int:
        return positions

    def snapshot(self, _batch: Any, first: int, last: int, _row: int) -> "Copy":
        return Copy(self.tokens[first:last])


class Copy:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.nbytes = tokens, len(tokens)

    def head(self, length: int) -> "Copy":
        return Copy(self.tokens[:length])

    def close(self) -> None:
        pass
