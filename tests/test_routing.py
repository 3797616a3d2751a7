"""Routing of mixtures: the record of a study, and what a cache would have met."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import invoke, passes, test_experts
from tests.checkpoints import save_config
from tests.results import routing_run
from tests.test_experts import MIXTURES
from tools import trained
from zinfer.analysis.study import hits, show
from zinfer.checkpoint import resolve
from zinfer.engine.stream.experts.pool import ExpertCache
from zinfer.record import study
from zinfer.record.study import Hits, Touched
from zinfer.worker import routing

TEXT = "def f(x):\n    return x + 1  # a function\n" * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save a checkpoint of one of `MIXTURES`, or without experts. Its tokenizer is one of bytes."""

    def make(name: str) -> Path:
        more = {"vocab_size": 256, "max_position_embeddings": 128}
        folder = save_config(tmp_path_factory.mktemp(name), name, **MIXTURES.get(name, {}) | more)
        trained.tokenizer().save_pretrained(folder)
        return folder

    return make


def measured(folder: Path, *more: str) -> tuple[int, str, Path]:
    text = folder / "text.txt"
    text.write_text(TEXT)
    words = ["study", "routing", "-m", str(folder), "--prompt-file", str(text), "--samples", "3", "--length", "40"]
    done = invoke(*words, "-o", folder / "r.jsonl", *more)
    return done.exit_code, f"{done.output}{done.exception or ''}", folder / "r.jsonl"


def test_a_run_is_recorded_and_shown(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3_moe")
    code, shown, path = measured(folder)
    assert code == 0, shown
    run = study.last(path, "routing")
    assert (run.num_layers, run.num_experts, run.experts_per_token, run.text and run.text.tokens) == (4, 16, 3, 120)
    assert sorted({row.experts for row in run.of(Hits)}) == [6, 16, 32, 48]
    assert 0 < hits(run, 6) < hits(run, 16) < hits(run, 32) < hits(run, 48) < 1
    assert [touched.batch_size for touched in run.of(Touched)] == [2, 4, 8, 11], "from 12 tokens on all experts come"
    shares = [3 / 16, *(touched.share for touched in run.of(Touched))]
    assert shares == sorted(shares)
    assert shares[-1] < 1 - (13 / 16) ** 11, "tokens of a text are alike"
    assert sum(row.batch_size == 11 for row in run.of(Hits)) == 4
    assert " hits " in shown
    assert measured(folder)[0] == 0
    assert len(study.read(path, "routing").runs) == 2


def test_a_model_without_routed_experts_or_a_short_text_is_refused(checkpoint: Callable[[str], Path]) -> None:
    code, shown, path = measured(checkpoint("llama"))
    assert code != 0
    assert "no routed experts" in shown
    assert not path.exists()
    code, shown, _ = measured(checkpoint("mixtral"), "--samples", "900")
    assert code != 0
    assert "fewer --samples" in shown


def test_a_forward_pass_over_text_gives_the_choices_of_single_steps(checkpoint: Callable[[str], Path]) -> None:
    spec = resolve.from_directory(checkpoint("mixtral")).with_dtype("float32")
    tokens = list(TEXT.encode()[:24])

    def choices(count: int) -> dict[int, torch.Tensor]:
        (chosen,) = routing.trace(spec, [tokens[:count]])
        return chosen

    whole = choices(24)
    for end in (5, 24):
        for number, chosen in choices(end).items():
            assert torch.equal(chosen[-1], whole[number][end - 1])


def test_rows_of_a_step_read_their_own_parts_of_the_text() -> None:
    steps = [[(0, [token % 3]), (2, [token, 9])] for token in range(7)]
    assert routing.side_by_side(steps, 1) == [[(0, [token % 3]), (2, [token, 9])] for token in range(7)]
    assert routing.side_by_side(steps, 2) == [[(0, [0]), (2, [0, 3, 9])], [(0, [1]), (2, [1, 4, 9])],
                                              [(0, [2]), (2, [2, 5, 9])]]  # fmt: skip
    assert routing.side_by_side(steps, 7) == [[(0, [0, 1, 2]), (2, [0, 1, 2, 3, 4, 5, 6, 9])]]


def test_a_replay_meets_what_the_engine_meets(checkpoint: Callable[[str], Path]) -> None:
    """Two rows read two parts of a text from their start."""
    folder, tokens, length = checkpoint("qwen3_moe"), list(TEXT.encode()), 20
    spec = resolve.from_directory(folder).with_dtype("float32")
    rows = tokens[:length], tokens[57 : 57 + length]
    steps: list[routing.Step] = []
    for seen in routing.trace(spec, rows):
        chosen = sorted((number, experts.tolist()) for number, experts in seen.items())
        steps += ([(number, experts[token]) for number, experts in chosen] for token in range(length))
    engine: Any = test_experts.load(folder, share="60%")
    ids = torch.tensor(rows)
    batch, _ = passes.prefill(engine, ids[:, :1], torch.ones(2, 1, dtype=torch.int64), length)
    for token in range(1, length):
        passes.decode(engine, batch, ids[:, token])
    met, missed, room = engine._pool.counts.hits, engine._pool.counts.misses, engine._pool.cached
    engine.close()
    pairs = routing.side_by_side(steps, 2)
    assert met + missed == sum(len(experts) for step in pairs for _, experts in step)
    assert 0 < room < 64
    assert routing.replay(pairs, room) == pytest.approx(met / (met + missed))


def test_a_cache_that_holds_all_misses_each_expert_once() -> None:
    steps = [[(0, [step % 4]), (1, [3, 3, step % 2])] for step in range(20)]
    needs = sum(len(set(experts)) for step in steps for _, experts in step)
    assert routing.replay(steps, 99) == pytest.approx(1 - (4 + 3) / needs)
    assert routing.replay(steps, 0) == 0
    cache = ExpertCache()
    assert cache.insert((0, 0), 0) == (0, 0), "no room: it leaves at once"


def test_hits_are_those_of_the_largest_cache_that_is_not_larger() -> None:
    run = routing_run()
    assert [hits(run, size) for size in (3, 4, 7, 8, 99)] == [0, 0.5, 0.5, 0.7, 0.7]
    assert show(run).cells == [("25%", "4", "50.0%"), ("50%", "8", "70.0%")]
