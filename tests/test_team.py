"""Several ranks of `stream`: the same tokens as one, whatever the weights are and wherever the KV cache is, and no
process left when one ends."""

from collections.abc import Iterator
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import Checkpoints, Patch, passes
from tests.test_continuous import alike, begin, crowded, keeping, run, run_short, sequences, small
from tests.test_continuous import greedy as alone
from tests.test_drafts import drafting
from tests.test_parity import BATCHES, OUTPUT_LEN, check_tokens, greedy, load, prompts, reference
from zinfer.analysis.timeline import by_rank
from zinfer.engine import EngineError, decoder
from zinfer.engine.base import Engine, Work
from zinfer.engine.stream.engine import Stream
from zinfer.generation.sequence import Sequence

pytestmark = pytest.mark.usefixtures("ranks_forked")


@pytest.fixture(scope="module")
def team(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load("stream", checkpoint("llama"), "cpu", tmp_path_factory.mktemp("none"), gpus=2)
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def cleared(team: Engine) -> Iterator[None]:
    yield
    team.clear()


@pytest.fixture
def single(checkpoint: Checkpoints) -> Engine:
    return load("stream", checkpoint("llama"), "cpu")


def check_alone(engine: Engine, rows: list[Sequence], limits: list[int]) -> None:
    """Compare rows' tokens with each row alone, up to its limit."""
    for row, limit in zip(rows, limits, strict=True):
        assert (row.failure, row.finish_reason) == (None, "length")
        assert row.output_ids == alone(engine, row.prompt_ids, limit), row.key


def test_tokens_are_those_of_transformers(team: Any, checkpoint: Checkpoints) -> None:
    check_tokens(team, checkpoint("llama"))
    effective = team.effective()
    assert effective.settings["gpus"] == 2
    assert effective.wire_bytes_per_step == effective.host_weight_bytes == effective.streamed_bytes_per_step
    assert team.bring() == sum(layer.end - layer.start for layer in team._engine.ring.layers[::4])
    leader, other = team._all("host_memory")
    assert all(effective.host_weight_bytes <= shared < peak for peak, shared in (leader, other))
    assert team.host_memory() == pytest.approx(leader[0] + other[0] - other[1], rel=0.05), "the weights once"


def test_a_rank_without_rows_takes_part(team: Engine, single: Engine) -> None:
    prompt = [5, 9, 11, 30]
    assert alone(team, prompt, 6) == alone(single, prompt, 6)


def test_rows_go_where_there_is_room(team: Any) -> None:
    mask = torch.ones(3, 4, dtype=torch.int64)
    first, second = team.admit(mask, 8), team.admit(mask, 8)
    assert (first.ranks, second.ranks) == ([0, 0, 1], [0, 1, 1])
    team.retire(first, [0, 1])
    assert (first.ranks, first.batch_size) == ([1], 1)
    assert team.admit(mask[:2], 8).ranks == [0, 0]
    team.clear()
    assert team.batches == []


def test_sequences_that_come_and_go(team: Engine, single: Engine, monkeypatch: Patch) -> None:
    small(monkeypatch)
    running = begin(team)
    rows = sequences(14, 3)
    limits = [row.left for row in rows]
    done = run(running, [rows[:5], rows[5:6], rows[6:]])
    assert running.schedule.tally.merged > 0
    running.end()
    check_alone(single, done, limits)


def test_drafts_are_verified(team: Engine, single: Engine, monkeypatch: Patch) -> None:
    small(monkeypatch)
    rows = sequences(9, 3)
    answers = {row.key: (row.prompt_ids, alone(single, row.prompt_ids, row.left)) for row in rows}
    running = drafting(team, monkeypatch, answers, 0.4)
    done = run(running, [rows[:5], rows[5:]])
    assert 0 < running.drafts.accepted < running.drafts.drafted
    running.end()
    assert [row.output_ids for row in done] == [answers[row.key][1] for row in done]


@pytest.mark.parametrize("fault", [MemoryError("no room"), EngineError("not this")])
def test_a_pass_that_fails_on_one_rank_fails_alone(fault: Exception, team: Any, checkpoint: Checkpoints) -> None:
    token_ids, mask = prompts(BATCHES[0])
    batch, logits = passes.prefill(team, token_ids, mask, OUTPUT_LEN)

    with patch.object(decoder.Decoder, "_alone", side_effect=fault), pytest.raises(type(fault), match=str(fault)):
        passes.decode(team, batch, logits.argmax(-1))
    team.retire(batch)
    assert torch.equal(greedy(team, BATCHES[0]), reference(checkpoint("llama"))[0])
    with pytest.raises(IndexError, match="the KV cache holds"):
        team.forward([Work(team.batches[0], torch.zeros(3, 99, dtype=torch.int64))])


@pytest.mark.parametrize("verb", ["apply_placement", "admit"])
def test_a_rank_without_room_leaves_all_alike(verb: str, team: Engine, checkpoint: Checkpoints) -> None:
    """Refuse a micro-batch that one rank cannot hold. The others go on."""
    token_ids, mask = prompts(BATCHES[0])
    batch, logits = passes.prefill(team, token_ids, mask, OUTPUT_LEN)
    tokens, full = [logits.argmax(-1)], torch.OutOfMemoryError("no room")
    with patch.object(Stream, verb, side_effect=full), pytest.raises(torch.OutOfMemoryError, match="no room"):
        team.admit(mask, 2000)
    assert team.batches == [batch]
    while len(tokens) < OUTPUT_LEN:
        tokens.append(passes.decode(team, batch, tokens[-1]).argmax(-1))
    assert torch.equal(torch.stack(tokens, dim=1), reference(checkpoint("llama"))[0])


def test_a_pass_without_memory_on_one_rank(team: Engine, single: Engine, monkeypatch: Patch) -> None:
    """One rank fails within a layer, the other finishes the pass."""
    small(monkeypatch)
    running = begin(team)
    rows = alike(12, 9, 12)
    limits = [row.left for row in rows]
    check_alone(single, run_short(running, rows, monkeypatch), limits)


def test_a_step_has_a_timeline_with_gathers(team: Engine) -> None:
    token_ids, mask = prompts(BATCHES[1])
    batch, logits = passes.prefill(team, token_ids, mask, OUTPUT_LEN)
    begun = perf_counter()
    spans = team.timeline([Work(batch, logits.argmax(-1)[:, None])])
    within_ms = (perf_counter() - begun) * 1e3
    layers = team.plan.model.num_layers
    ranks = by_rank(spans)
    assert [rank[0].rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert [span.layer for span in rank if span.lane == "gather"] == list(range(layers))
        assert sum(span.lane == "compute" for span in rank) == layers
        assert -within_ms < min(span.start_ms for span in rank) < max(span.end_ms for span in rank) < within_ms
    # On one clock: a gather ends in no rank before it has begun in all of them.
    for layer in range(layers):
        gathers = [span for span in spans if (span.lane, span.layer) == ("gather", layer)]
        assert max(span.start_ms for span in gathers) < min(span.end_ms for span in gathers)


def test_rows_of_different_lengths_move_together(team: Engine, single: Engine) -> None:
    """After a move each rank counts its own positions."""
    results = []
    for engine in (team, single):
        long, first = passes.prefill(engine, torch.tensor([[5, 6, 7, 8, 9, 10, 11]]), torch.ones(1, 7).long(), 9)
        short, second = passes.prefill(engine, torch.tensor([[9, 8, 7], [4, 5, 6]]), torch.ones(2, 3).long(), 9)
        batch = engine.move_rows([(short, [1, 0]), (long, [0])], 20)
        assert (batch.length, batch.batch_size, len(engine.batches)) == (7, 3, 1)
        tokens = torch.cat([second[[1, 0]], first]).argmax(-1)
        steps = [passes.decode(engine, batch, tokens)]
        engine.rollback(batch, torch.tensor([8, 7, 7]))
        steps.append(passes.decode(engine, batch, steps[-1].argmax(-1)))
        engine.clear()
        results.append(steps)
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_prefixes_are_not_kept(team: Engine, monkeypatch: Patch) -> None:
    small(monkeypatch)
    running = keeping(team, monkeypatch)
    assert running.cannot_reuse == "several GPUs keep no keys and values of earlier prompts"
    running.end()


def test_rows_give_way_and_come_back(team: Engine, single: Engine, monkeypatch: Patch) -> None:
    done, limits = crowded(team, monkeypatch)
    check_alone(single, done, limits)
