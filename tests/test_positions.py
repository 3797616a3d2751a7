"""Models that number or choose positions by themselves: nobody asks them for more than they can do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import Patch
from tests.checkpoints import once
from tests.test_continuous import LOAD, Words, alike, begin, check, run, sequences, small
from tests.test_drafts import answers, drafting
from tests.test_drafts import check as check_answers
from tests.test_parity import load
from tools.conformance.small import Subject, save, small_model
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.generation.drafts import Drafts, NgramDrafter
from zinfer.generation.scheduler import ContinuousScheduler

Kinds = Callable[[str], Path]


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Make a small checkpoint of a type, once."""
    return once(tmp_path_factory, lambda name, folder: save(small_model(Subject(name), 2.0), folder))


@pytest.mark.parametrize("name", ["stream", "accelerate", "deepspeed"])
@pytest.mark.parametrize("type_name", ["bart", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_padding_that_would_change_the_text_is_refused(name: str, type_name: str, kind: Kinds) -> None:
    engine = load(name, kind(type_name), "cpu")
    for why_not in (engine.cannot_chunk(), engine.cannot_draft(), engine.cannot_move_rows()):
        assert why_not is not None
    with pytest.raises(EngineError, match="knows no padding: its prompts must be of one length in a batch"):
        engine.admit(torch.tensor([[0, 1, 1], [1, 1, 1]]), 8)
    engine.retire(engine.admit(torch.ones((2, 3), dtype=torch.long), 8))


@pytest.mark.parametrize("name", ["bart", "deepseek_v32", pytest.param("mpt", marks=pytest.mark.slow)])
def test_requests_of_any_lengths_have_the_tokens_of_each_alone(name: str, kind: Kinds, monkeypatch: Patch) -> None:
    small(monkeypatch)
    engine = load("stream", kind(name), "cpu")
    running = begin(engine)
    rows = sequences(9, 4, longest=6)
    limits = [row.left for row in rows]
    done = run(running, [rows[:5], rows[5:]], every=2)
    running.end()
    check(engine, done, limits)


WHY = {
    "mpt": "since it counts gaps",
    "gpt_neo": "window of its local layers",
}


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in WHY)])
def test_rows_that_must_stay_alike_get_as_many_drafts_as_the_one_with_fewest(
    name: str, kind: Kinds, monkeypatch: Patch
) -> None:
    small(monkeypatch)
    engine = load("stream", kind(name), "cpu")
    assert WHY.get(name, "window of 8 tokens") in str(engine.equal_lengths())
    plain, rows = alike(6, 5, 14), alike(6, 5, 14)
    expected = answers(engine, rows)
    without = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    run(without, [plain[:4], plain[4:]], every=2)
    running = drafting(engine, monkeypatch, expected, 0.2)
    done = run(running, [rows[:4], rows[4:]], every=2)
    assert 0 < running.drafts.accepted < running.drafts.drafted
    assert running.schedule.tally.passes < without.schedule.tally.passes
    running.end()
    check_answers(done, expected)


def test_rows_that_must_stay_alike_do_not_forget_apart(kind: Kinds) -> None:
    engine = load("stream", kind("gemma2"), "cpu")
    tokens = torch.randint(20, 90, (2, 6))
    batch = engine.admit(torch.ones_like(tokens), 12)
    engine.forward([Work(batch, tokens)])
    engine.forward([Work(batch, tokens[:, :4], keep=4)])
    with pytest.raises(EngineError, match="since its window of 8 tokens counts gaps"):
        engine.rollback(batch, torch.tensor([8, 9]))
    engine.rollback(batch, torch.tensor([9, 9]))
    assert batch.length == 9


def test_a_row_whose_drafts_were_given_up_goes_on_drafting() -> None:
    drafts = Drafts(NgramDrafter())
    for _ in range(9):
        drafts.observe(1, 3, 0, given_up=True)
        drafts.observe(2, 3, 0)
    assert drafts._records[1].chance(0.5) > drafts._records[2].chance(0.5)
