"""Drafts: the tokens are those of decoding one by one, whatever is drafted, on every engine and KV cache."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Checkpoints, Patch
from tests import test_cache_kinds as kinds
from tests.test_continuous import LOAD, MORE, Words, alike, begin, greedy, keeping, run, sequences, small
from tests.test_parity import load
from tests.test_passes import WAYS, keep_here, small_blocks
from zinfer.core.engine import MAX_DRAFTS
from zinfer.core.request import Sampling
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Work
from zinfer.generation import sequence
from zinfer.generation.drafts import Drafts, NgramDrafter
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.sampling import choose
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.tuning import DRAFTS

kind = kinds.kind  # the fixture
Answers = Mapping[int, tuple[Sequence[int], list[int]]]  # prompt and answer by key
DRAFTED = {name: (WAYS | MORE)[name] for name in ("none", "kv auto by the cpu", "kv auto over the link")}
EIGHT_BITS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "int8 by the cpu": {"kv_cache_dtype": "int8", "kv_offload": "auto", "kv_attention": "cpu"},
}


class Oracle:
    """Drafter that knows the answers. It is `wrong` in a share of its tokens."""

    def __init__(self, answers: Answers, wrong: float) -> None:
        self._answers, self._wrong, self._dice = answers, wrong, random.Random(1)

    token_s = None

    def draft(self, rows: Mapping[int, sequence.Sequence], counts: Mapping[int, int]) -> dict[int, list[int]]:
        return {key: self._of_row(key, len(rows[key].output_ids), count) for key, count in counts.items()}

    def _of_row(self, key: int, at: int, count: int) -> list[int]:
        answer, dice = self._answers[key][1], self._dice
        drafted = [token if dice.random() >= self._wrong else token % 80 + 7 for token in answer[at : at + count]]
        return drafted[: dice.randint(0, count)]

    def discard(self, key: int) -> None:
        assert key in self._answers


def answers(engine: Engine, rows: Sequence[sequence.Sequence]) -> Answers:
    return {row.key: (row.prompt_ids, greedy(engine, row.prompt_ids, row.left)) for row in rows}


def drafting(engine: Engine, patch: Patch, expected: Answers, wrong: float, **settings: Any) -> ContinuousScheduler:
    """Return a scheduler with an `Oracle`. Any number of drafts hides behind the link."""
    patch.setattr(PassTimes, "room", lambda *_: 1000)
    patch.setattr(Drafts, "_worth", lambda _drafts, counts, _rows: max(counts.values()))
    return begin(engine, drafter=Oracle(expected, wrong), **settings)


def check(rows: Sequence[sequence.Sequence], expected: Answers) -> None:
    for row in rows:
        assert (row.failure, row.finish_reason) == (None, "length")
        assert row.output_ids == expected[row.key][1], row.key


@pytest.mark.parametrize(
    ("name", "way", "wrong"),
    [
        *(
            pytest.param("llama", way, wrong, marks=() if way == "none" or wrong == 0.4 else pytest.mark.slow)
            for way in [*DRAFTED, "accelerate cpu"]
            for wrong in (0, 0.4, 1)
        ),
        # models that attend in ways of their own
        ("bloom", "cpu", 0.3), ("bloom", "kv auto by the cpu", 0.3), ("deepseek_v3", "cpu", 0.3),
        pytest.param("gpt_neox", "cpu", 0.3, marks=pytest.mark.slow),
        pytest.param("qwen2", "cpu", 0.3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tokens_are_those_of_decoding_one_by_one(
    name: str, way: str, wrong: float, checkpoint: Checkpoints, kind: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch, 20)
    small(monkeypatch)
    engine_name, offload, options = (DRAFTED | WAYS).get(way, ("accelerate", "cpu", {}))
    if options.get("kv_offload") == "auto":
        keep_here(monkeypatch, 3)
    directory = kind(name) if name in kinds.KINDS else checkpoint(name)
    engine = load(engine_name, directory, offload, tmp_path, **options)
    rows = sequences(14, 3)
    expected = answers(engine, rows)
    running = drafting(engine, monkeypatch, expected, wrong)
    finished = run(running, [rows[:5], rows[5:6], rows[6:]])
    drafted, accepted = running.drafts.drafted, running.drafts.accepted
    assert drafted >= 15
    assert {0.0: accepted == drafted, 1.0: accepted == 0}.get(wrong, 0 < accepted < drafted)
    if wrong == 0 and engine_name == "stream":
        assert running.schedule.tally.passes < 20  # 25 without drafts
    running.end()
    check(finished, expected)


@pytest.mark.parametrize("way", EIGHT_BITS)
def test_tokens_of_a_cache_in_8_bits_are_those_without_drafts(
    way: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """Prompts are computed whole: later chunks of one would see the earlier ones rounded, with drafts or without."""
    options = EIGHT_BITS[way]
    if "kv_offload" in options:
        keep_here(monkeypatch, 3)
    engine = load("stream", checkpoint("llama"), "cpu", **options)
    rows = sequences(14, 3)
    expected = answers(engine, rows)
    for wrong in (0.0, 0.4, 1.0):
        running = drafting(engine, monkeypatch, expected, wrong)
        finished = run(running, [sequences(14, 3)])
        assert running.drafts.drafted >= 15
        assert {0.0: running.drafts.accepted == running.drafts.drafted, 1.0: not running.drafts.accepted}.get(
            wrong, True
        )
        running.end()
        check(finished, expected)


def test_no_row_goes_beyond_the_positions_of_its_model(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """A row that ends at the last position shares passes with others. There are 64 learned positions, and the other
    rows have many tokens to come."""
    small(monkeypatch, 100)
    engine = load("stream", checkpoint("opt"), "cpu")
    rows = alike(4, 60, 4)[:1] + alike(4, 50, 14)[1:]
    expected = answers(engine, rows)
    finished = run(drafting(engine, monkeypatch, expected, 0.2), [rows])
    check(finished, expected)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba"])
def test_models_that_cannot_forget_are_refused(name: str, kind: Any) -> None:
    engine = load("stream", kind(name), "cpu")
    with pytest.raises(EngineError, match="state that cannot forget"):
        ContinuousScheduler(engine, Words(), LOAD, drafter=NgramDrafter())  # type: ignore[arg-type]


def test_drawn_tokens_ends_and_scores_are_the_same(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """Rows are sampled or greedy, end and stop inside drafts. They ask for log-probabilities; each token has a tie."""
    small(monkeypatch)
    engine: Any = load("stream", checkpoint("llama"), "cpu")
    with torch.inference_mode():
        head = engine.model.get_output_embeddings().weight
        head[len(head) // 2 :] = head[: len(head) // 2]
    words = Words()
    monkeypatch.setattr(words, "decode", lambda ids, before=(): "".join(f"<{token % 7}>" for token in ids))
    monkeypatch.setattr(PassTimes, "room", lambda *_: 1000)

    def ran(drafter: Oracle | None = None, max_drafts: int = MAX_DRAFTS) -> list[sequence.Sequence]:
        rows = sequences(10, 8, max_tokens=14)
        for row in rows:
            if row.key % 3:
                row.sampling = Sampling(temperature=0.4, top_p=(1.0, 0.9)[row.key % 2], seed=str(row.key))
            row.logprobs = 2 if row.key % 4 == 0 else None
            row.stop = stops
        running = ContinuousScheduler(engine, words, LOAD, drafter=drafter)  # type: ignore[arg-type]
        running.drafts.max_drafts = max_drafts
        done = run(running, [rows])
        assert drafter is None or running.drafts.accepted > 10
        running.end()
        return done

    stops: tuple[str, ...] = ()
    whole = ran()
    stops = tuple(words.decode(row.output_ids[4:6]) for row in whole if len(row.output_ids) > 8)[:2]
    expected = {row.key: (row.prompt_ids, row.output_ids) for row in whole}
    words.ends = frozenset({Counter(token for row in whole for token in row.output_ids[2:]).most_common(1)[0][0]})
    plain = ran()
    assert {row.finish_reason for row in plain} == {"stop", "length"}
    assert any(stop in words.decode(row.output_ids) for row in plain for stop in row.stop)
    for drafted in (ran(Oracle(expected, 0.2)), ran(Oracle(expected, 0.2), 2)):
        for row, other in zip(drafted, plain, strict=True):
            assert (row.output_ids, row.finish_reason, row.text) == (other.output_ids, other.finish_reason, other.text)
            assert [score.token for score in row.scores] == [score.token for score in other.scores]
            values, wanted = ([score.logprob for score in each.scores] for each in (row, other))
            assert values == pytest.approx(wanted, abs=1e-4)


def test_kept_prefixes_go_together_with_drafts(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    small(monkeypatch)
    engine = load("stream", checkpoint("llama"), "cpu")
    first = sequences(6, 6, max_tokens=8)
    expected = dict(answers(engine, first))
    second = [sequence.Sequence([*prompt, *answer[:-1]], 6, key=10 + key) for key, (prompt, answer) in expected.items()]
    expected |= answers(engine, second)
    monkeypatch.setattr(PassTimes, "room", lambda *_: 1000)
    running = keeping(engine, monkeypatch, drafter=Oracle(expected, 0.3))
    finished = run(running, [first])
    finished += run(running, [second])
    assert sum(row.cached for row in second) > 20
    running.end()
    check(finished, expected)


@pytest.mark.parametrize("name", ["stream", "accelerate"])
def test_a_pass_that_verifies_is_a_step(name: str, checkpoint: Checkpoints) -> None:
    """Passes of one token a row may never come with right drafts. They show what crosses the link."""
    engine = load(name, checkpoint("llama"), "cpu")
    batch = engine.admit(torch.ones(1, 5, dtype=torch.int64), 12)
    engine.forward([Work(batch, torch.full((1, 3), 7))])
    engine.forward([Work(batch, torch.full((1, 2), 7))])
    assert engine.effective().streamed_bytes_per_step == 0, "prompts are no steps"
    engine.forward([Work(batch, torch.full((1, 4), 7))])
    effective = engine.effective()
    assert effective.streamed_bytes_per_step == effective.host_weight_bytes > 0


def test_n_grams_are_looked_up_in_all_tokens() -> None:
    dice = random.Random(2)
    drafter, tokens = NgramDrafter(), [dice.randint(0, 3) for _ in range(3)]
    for _ in range(300):
        count = dice.randint(1, 6)
        expected: list[int] = []
        for size in range(DRAFTS.longest, DRAFTS.shortest - 1, -1):
            places = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
            if places and size <= len(tokens):
                whole = list(tokens)
                for index in range(places[-1], places[-1] + count):
                    whole.append(whole[index])
                expected = whole[len(tokens) :]
                break
        assert drafter.draft({0: sequence.Sequence(tokens, 9)}, {0: count}) == {0: expected}
        tokens += [dice.randint(0, 3) for _ in range(dice.randint(1, 3))]
    drafter.discard(0)
    assert drafter.draft({0: sequence.Sequence([1, 2, 3], 9)}, {0: 4}) == {0: []}


def test_the_number_of_drafts_follows_what_is_accepted() -> None:
    def drafts_of(right: float, passes: int = 60, room: int = 1000) -> list[int]:
        dice, drafts, sizes = random.Random(3), Drafts(NgramDrafter()), []
        rows = {key: sequence.Sequence([1, 2, 3] * 4, 100) for key in range(4)}
        for _ in range(passes):
            proposed = drafts.propose(rows, dict.fromkeys(rows, 99), room)
            sizes.append(max(map(len, proposed.values()), default=0))
            for key, tokens in proposed.items():
                accepted = next((index for index in range(len(tokens)) if dice.random() > right), len(tokens))
                drafts.observe(key, len(tokens), accepted)
            drafts.passed(1.0)
        return sizes

    sizes = drafts_of(1.0, passes=100)[20:]
    assert sizes.count(MAX_DRAFTS) == len(sizes) - 1, "one pass without drafts is measured"
    assert drafts_of(0.3)[:8].count(0) > 0, "sooner where fewer are right"
    assert sum(size > 0 for size in drafts_of(0.0)) < 15, "drafts that are never right are tried now and then"
    assert 2 <= sorted(drafts_of(0.6))[30] < MAX_DRAFTS
    drafts = Drafts(NgramDrafter())
    for _ in range(200):  # others were wrong; a new row, and one that was wrong itself, are tried all the same
        drafts.observe(0, 4, 0)
    assert drafts.propose({0: sequence.Sequence([1, 2, 3] * 4, 100)}, {0: 99}, 1000)
    assert drafts.propose({1: sequence.Sequence([1, 2, 3] * 4, 100)}, {1: 99}, 1000)
    assert max(drafts_of(1.0, room=4 * 3)) == 3, "no more than there is time for"
    assert set(drafts_of(1.0, room=3)) == {0}


def test_drafts_leave_the_distribution_as_it_is() -> None:
    """Sample two tokens in a row from known distributions. Any draft may come first."""
    torch.manual_seed(0)
    first, after = torch.randn(5) * 1.5, torch.randn(5, 5) * 1.5
    count = 20_000
    for draft in (0, 3):
        logits = torch.stack([first, after[draft]]).repeat(count, 1)
        samplings = [Sampling(temperature=1.0, seed=str(row)) for row in range(count) for _ in range(2)]
        ids, _ = choose(logits, samplings, [0, 1] * count)
        drafted, two = ids.view(count, 2).T
        right = drafted == draft
        missed = torch.nonzero(~right)[:, 0]
        sampling = [Sampling(temperature=1.0, seed=str(row)) for row in missed.tolist()]
        two = two.clone()
        two[missed] = choose(after[drafted[missed]], sampling, [1] * len(missed))[0]
        seen = Counter(zip(drafted.tolist(), two.tolist(), strict=True))
        wanted = first.softmax(-1)[:, None] * after.softmax(-1) * count
        chi = sum((seen[a, b] - float(wanted[a, b])) ** 2 / float(wanted[a, b]) for a in range(5) for b in range(5))
        assert chi < 51.2, "24 degrees of freedom: larger in one of 1,000 cases"
