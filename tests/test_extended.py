"""Positions beyond those that a model was trained with: YaRN, dynamic NTK and longrope give the text of a row alone."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import save_config
from tests.grid import covering
from tests.test_continuous import MORE, Words, run, small
from tests.test_drafts import drafting
from tests.test_parity import OUTPUT_LEN, greedy, load, prompts
from tests.test_passes import WAYS, keep_here, small_blocks
from zinfer.checkpoint import resolve
from zinfer.core.case import Workload
from zinfer.core.model import stretched
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.engine.rotary import turned_by
from zinfer.generation import sequence, tuning
from zinfer.generation.scheduler import ContinuousScheduler, DecodeLoop

SWITCH = 24
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": SWITCH, **FACTORS}
SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": None}
# Architecture, rotary positions, positions of the configuration, other settings. `generate` computes a row of Phi anew
# where it grows beyond the switch, one of Llama not.
KINDS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 32, {}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, 32, {}),
    "phi3": ("phi3", LONGROPE, 128, {"original_max_position_embeddings": SWITCH}),
    "phimoe": ("phimoe", LONGROPE | SCALES, 128, EXPERTS),
    "llama": ("llama", LONGROPE, 128, {}),
}
LOAD = Workload(batch_size=8, input_len=60, output_len=14)
Patch = pytest.MonkeyPatch
Saved = Callable[[str], Path]
Ids = list[int]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that makes a checkpoint of one of `KINDS`, once."""

    @cache
    def make(kind: str) -> Path:
        architecture, rope, positions, others = KINDS[kind]
        settings = {"num_hidden_layers": 2, "max_position_embeddings": positions, **others}
        settings["rope_parameters"] = {"rope_theta": 1e4, **rope}
        return save_config(tmp_path_factory.mktemp(kind), architecture, **settings)

    return make


@cache
def unused(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def alone(directory: Path, prompt: Sequence[int], count: int) -> Ids:
    """Return the tokens that `transformers.generate` adds to a prompt. The model has run no other."""
    return [*generated(directory, tuple(prompt), count)]


@cache
def generated(directory: Path, prompt: tuple[int, ...], count: int) -> Ids:
    model = deepcopy(unused(directory))  # rotary embeddings keep what they were used for
    ids = torch.tensor([list(prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in output[0, len(prompt) :]]


def rows_of(lengths: Sequence[int], left: int = 14) -> list[sequence.Sequence]:
    """Return a sequence of each length. Each may get up to `left` tokens."""
    token_ids, _ = prompts((max(lengths),))
    return [
        sequence.Sequence([key + 4, *token_ids[0, 1:length].tolist()], left - key % 3, key=key)
        for key, length in enumerate(lengths)
    ]


def check(directory: Path, rows: Sequence[sequence.Sequence], limits: Sequence[int]) -> None:
    assert len({tuple(row.output_ids) for row in rows}) > len(rows) // 2  # texts that tell angles apart
    for row, limit in zip(rows, limits, strict=True):
        assert (row.error, row.finish_reason) == (None, "length")
        assert row.output_ids == alone(directory, row.prompt_ids, limit), (row.key, len(row.prompt_ids))


@pytest.mark.parametrize(
    ("case", "engine"),
    covering(
        [
            ("yarn", (100, 9, 31)), ("yarn", (25, 5)), ("dynamic", (20, 9, 14)), ("dynamic", (100, 9, 31)),
            ("dynamic", (33, 25, 116)), ("phi3", (100, 9, 12)), ("phi3", (25, 5)), ("phimoe", (40, 9)),
            ("llama", (100, 9, 31)), ("llama", (20, 24, 23)),
        ],
        ["stream", "accelerate"],
    ),
)  # fmt: skip
def test_rows_get_the_text_of_the_row_alone(
    case: tuple[str, tuple[int, ...]], engine: str, saved: Saved, tmp_path: Path
) -> None:
    kind, lengths = case
    directory = saved(kind)
    assert max(lengths) + OUTPUT_LEN <= (resolve.from_directory(directory).max_position or 0)
    token_ids, mask = prompts(lengths)
    expected = [
        alone(directory, row[real.bool()].tolist(), OUTPUT_LEN) for row, real in zip(token_ids, mask, strict=True)
    ]
    loaded = load(engine, directory, "cpu", tmp_path)
    try:
        assert greedy(loaded, lengths).tolist() == expected
    finally:
        loaded.close()


@pytest.mark.parametrize("kind", ["dynamic", "phi3", "phimoe"])
def test_a_prompt_in_chunks_has_the_logits_of_the_prompt_alone(kind: str, saved: Saved, tmp_path: Path) -> None:
    token_ids, mask = prompts((70, 9, 40))
    loaded = load("stream", saved(kind), "cpu", tmp_path)
    batch = loaded.admit(mask, 80)
    for first in range(0, 70, 32):
        (logits,) = loaded.forward([Work(batch, token_ids[:, first : first + 32], 1)])
    for row, real in enumerate(mask.bool()):
        model = deepcopy(unused(saved(kind)))
        with torch.inference_mode():
            expected = model(token_ids[row][real][None]).logits[0, -1]
        torch.testing.assert_close(logits[row, -1], expected, rtol=1e-4, atol=1e-4)
    loaded.close()


COMING = {name: (WAYS | MORE)[name] for name in ("none", "cpu", "kv auto by the cpu", "kv auto over the link")}
COMING["accelerate"] = ("accelerate", "cpu", {})


@pytest.mark.parametrize(("kind", "way"), covering(["dynamic", "phi3", "phimoe", "llama"], [*COMING]))
def test_rows_that_come_and_go_get_the_text_of_the_row_alone(
    kind: str, way: str, saved: Saved, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch, 80)
    small(monkeypatch)
    name, offload, options = COMING[way]
    if options.get("kv_offload") == "auto":
        keep_here(monkeypatch, 3)
    engine = load(name, saved(kind), offload, tmp_path, **options)
    assert engine.cannot_move_rows() is None
    sizes = list[tuple[int, int]]()  # shortest and longest row of a pass
    forward = engine.forward

    def counted(works: Sequence[Work]) -> list[torch.Tensor]:
        rows = [row.length for row in running.schedule.running]
        sizes.append((min(rows), max(rows)))
        return forward(works)

    monkeypatch.setattr(engine, "forward", counted)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    running.schedule.step = 8
    rows = rows_of((5, 60, 22, 33, 11, 24, 25, 45, 17, 30))
    limits = [row.left for row in rows]
    run(running, [rows[:5], rows[5:6], rows[6:]])
    assert any(shortest <= SWITCH < 32 < longest for shortest, longest in sizes)
    assert running.schedule.tally.merged
    assert (running.schedule.tally.again > 0) == (kind in ("phi3", "phimoe"))  # rows that cross the switch
    running.end()
    engine.close()
    check(saved(kind), rows, limits)


@pytest.mark.parametrize("kind", ["dynamic", "phi3", "llama"])
def test_half_generated_rows_go_on_with_the_text_of_the_row_alone(
    kind: str, saved: Saved, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As after a worker's restart, a batch's resumption, or out-of-memory."""
    small(monkeypatch)
    engine = load("stream", saved(kind), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD)  # type: ignore[arg-type]
    rows = rows_of((20, 40, 30, 9, 22))
    for row, generated in zip(rows, (6, 9, 4, 2, 2), strict=True):
        row.output_ids = alone(saved(kind), row.prompt_ids, generated)
    limits = [row.left + len(row.output_ids) for row in rows]
    running.add(rows)
    for _ in range(8):
        running.step()
    lost = [batch for batch in running.schedule.batches if batch.running]
    assert lost
    running._lose(lost)
    run(running, [])
    running.end()
    engine.close()
    check(saved(kind), rows, limits)


@pytest.mark.parametrize(("kind", "wrong"), [("dynamic", 0), ("phi3", 0), ("dynamic", 0.4), ("llama", 0.4)])
def test_drafts_leave_the_text_of_the_row_alone(
    kind: str, wrong: float, saved: Saved, tmp_path: Path, monkeypatch: Patch
) -> None:
    small(monkeypatch)
    engine = load("stream", saved(kind), "cpu", tmp_path)
    rows = rows_of((5, 50, 20, 23, 28, 31))
    limits = [row.left for row in rows]
    answers = {row.key: (row.prompt_ids, alone(saved(kind), row.prompt_ids, row.left)) for row in rows}
    running = drafting(engine, monkeypatch, answers, wrong)
    run(running, [rows[:4], rows[4:]])
    assert running.drafts.accepted
    running.end()
    engine.close()
    check(saved(kind), rows, limits)


@pytest.mark.parametrize("kind", ["dynamic", "phi3"])
def test_kept_prefixes_serve_rows_with_the_same_keys_alone(
    kind: str, saved: Saved, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, min_kept=4))
    engine = load("stream", saved(kind), "cpu", tmp_path)
    running = ContinuousScheduler(engine, Words(), LOAD, cache_size=1 << 24)  # type: ignore[arg-type]
    token_ids, _ = prompts((70,))
    ids = token_ids[0].tolist()
    rows = [sequence.Sequence(ids[:length], 6, key=key) for key, length in enumerate((14, 18, 60, 61, 20, 19, 65))]
    for row in rows:  # one after the other, so that each may find what earlier ones kept
        run(running, [[row]])
    cached = {len(row.prompt_ids): row.cached for row in rows}
    assert cached[18] >= 14
    assert cached[60] == cached[61] == cached[65] == 0
    assert cached[20] >= 18
    running.end()
    engine.close()
    check(saved(kind), rows, [6] * len(rows))


def test_a_pass_whose_positions_are_of_other_rows_is_refused(saved: Saved, tmp_path: Path) -> None:
    engine = load("stream", saved("dynamic"), "cpu", tmp_path)
    rotary = engine.model.model.rotary_emb  # type: ignore[attr-defined]
    with turned_by(torch.ones((2, 3), dtype=torch.int64)), pytest.raises(EngineError, match="other lengths"):
        rotary(torch.zeros(1), torch.ones((3, 3), dtype=torch.int64))
    engine.close()


def test_a_decode_loop_never_goes_on_with_other_keys(saved: Saved, tmp_path: Path) -> None:
    """Given or timed steps stay on one side of the switch. All rows begin and end there."""
    engine = load("stream", saved("phi3"), "cpu", tmp_path)
    loop = DecodeLoop(engine, lambda logits: logits.argmax(-1))
    token_ids, mask = prompts((20, 40))
    loop.start(token_ids, mask, 8)
    for _ in range(SWITCH - 20):
        loop.step()
    with pytest.raises(EngineError, match=r"beyond 24 tokens .*longrope"):
        loop.step()
    with pytest.raises(EngineError, match="no batch"):
        _ = loop.batch
    engine.close()


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 32), ({"rope_type": "linear", "factor": 4.0}, 32), ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}, 64),
        ({"type": "dynamic", "factor": 1.0}, 32), ({"rope_type": "llama3", "factor": 32.0}, 32),
        ({"rope_type": "yarn", "factor": 4.0}, 128), ({"type": "yarn", "factor": 2}, 64),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4}, 160),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, 32),
        ({"rope_type": "yarn", "factor": 1e300}, 32), ({"rope_type": "yarn", "factor": "4"}, 32),
        ({"rope_type": "yarn", "factor": True}, 32), ({"rope_type": "yarn", "factor": float("nan")}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}, 32),
    ],
)  # fmt: skip
def test_yarn_and_dynamic_ntk_stretch_positions(settings: dict[str, Any], positions: int) -> None:
    assert stretched(32, json.loads(json.dumps(settings))) == positions
    assert stretched(None, settings) is None
