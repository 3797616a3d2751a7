"""Positions beyond those that a model was trained with: YaRN runs as far as it reaches, dynamic NTK up to its start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import save_config
from tests.command import zinfer
from tests.test_parity import OUTPUT_LEN, greedy, load, prompts
from zinfer.checkpoint import resolve
from zinfer.core.model import stretched

ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a llama checkpoint of 32 positions with one of `ROPES`, once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            rope = {"rope_theta": 1e4, **ROPES[kind]}
            settings = {"num_hidden_layers": 2, "max_position_embeddings": 32, "rope_parameters": rope}
            made[kind] = save_config(tmp_path_factory.mktemp(kind), "llama", **settings)
        return made[kind]

    return get


def alone(directory: Path, lengths: tuple[int, ...]) -> Tensor:
    """Return the tokens that `transformers.generate` adds to each row without the others, ``[B, OUTPUT_LEN]``."""
    token_ids, mask = prompts(lengths)
    rows = []
    for row, real in zip(token_ids, mask.bool(), strict=True):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()  # dynamic angles are kept
        model.generation_config.eos_token_id = None
        prompt = row[real][None]
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=OUTPUT_LEN, do_sample=False
        )
        rows.append(output[0, prompt.shape[1] :])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "lengths"), [("yarn", (100, 9, 31)), ("yarn", (25, 5)), ("dynamic", (20, 9, 14)), ("dynamic", (5, 20))]
)
@pytest.mark.parametrize("engine", ["stream", "accelerate"])
def test_rows_get_the_text_of_the_row_alone(
    engine: str, kind: str, lengths: tuple[int, ...], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = saved(kind)
    assert max(lengths) + OUTPUT_LEN <= (resolve.from_directory(directory).max_position or 0)
    loaded = load(engine, directory, "cpu", tmp_path)
    try:
        assert torch.equal(greedy(loaded, lengths), alone(directory, lengths))
    finally:
        loaded.close()


def test_yarn_runs_as_far_as_it_reaches(saved: Callable[[str], Path], tmp_path: Path) -> None:
    words = ("run", "--model", str(saved("yarn")), "--offload", "cpu", "--output-len", "8")
    assert zinfer(tmp_path, *words, "--prompt", "a" * 119).returncode == 0
    done = zinfer(tmp_path, *words, "--prompt", "a" * 121)
    assert (done.returncode, "exceed the 128 positions" in done.stderr) == (2, True), done.stderr


def test_rows_that_dynamic_ntk_would_stretch_are_refused_in_a_line(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ("run", "--model", str(saved("dynamic")), "--offload", "cpu", "--output-len", "8")
    assert zinfer(tmp_path, *words, "--prompt", "a" * 23).returncode == 0
    done = zinfer(tmp_path, *words, "--prompt", "a" * 26)
    assert done.returncode == 2, done.stderr
    assert "exceed the 32 positions" in done.stderr
    assert "dynamic NTK" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 32), ({"rope_type": "linear", "factor": 4.0}, 32), ({"rope_type": "llama3", "factor": 32.0}, 32),
        ({"rope_type": "yarn", "factor": 4.0}, 128), ({"type": "yarn", "factor": 2}, 64),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4}, 160),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, 32),
        ({"rope_type": "yarn", "factor": 1e300}, 32), ({"rope_type": "yarn", "factor": "4"}, 32),
        ({"rope_type": "yarn", "factor": True}, 32), ({"rope_type": "yarn", "factor": float("nan")}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}, 32),
    ],
)  # fmt: skip
def test_yarn_alone_stretches_positions(settings: dict[str, Any], positions: int) -> None:
    assert stretched(32, json.loads(json.dumps(settings))) == positions
    assert stretched(None, settings) is None
