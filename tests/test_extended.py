"""Positions of YaRN, dynamic NTK and longrope: rows have the text of the row alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import once, save_config
from tests.grid import covering
from tests.test_parity import OUTPUT_LEN, greedy, load, prompts
from zinfer.checkpoint import resolve
from zinfer.core.model import stretched

SWITCH = 24
ROPE_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": SWITCH, **ROPE_FACTORS}
SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": None}
# Architecture, rotary positions, positions of the configuration, other settings.
KINDS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 32, {}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, 32, {}),  # within the positions of the configuration
    "phi3": ("phi3", LONGROPE, 128, {"original_max_position_embeddings": SWITCH}),
    "phimoe": ("phimoe", LONGROPE | SCALES, 128, EXPERTS),
}
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that makes a checkpoint of one of `KINDS`, once."""

    def save(kind: str, folder: Path) -> None:
        architecture, rope, positions, others = KINDS[kind]
        settings = {"num_hidden_layers": 2, "max_position_embeddings": positions, **others}
        settings["rope_parameters"] = {"rope_theta": 1e4, **rope}
        save_config(folder, architecture, **settings)

    return once(tmp_path_factory, save)


def alone(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that `transformers.generate` adds to a prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in output[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("case", "engine"),
    covering(
        [
            ("yarn", (100, 9, 31)), ("yarn", (25, 5)), ("dynamic", (20, 9, 14)), ("phi3", (12, 9, 5)),
            ("phimoe", (9, 5)),
        ],
        ["stream", "accelerate"],
    ),
)  # fmt: skip
def test_rows_get_the_text_of_the_row_alone(case: tuple[str, tuple[int, ...]], engine: str, saved: Saved) -> None:
    kind, lengths = case
    directory = saved(kind)
    assert max(lengths) + OUTPUT_LEN <= (resolve.from_directory(directory).max_position or 0)
    token_ids, mask = prompts(lengths)
    expected = [
        alone(directory, row[real.bool()].tolist(), OUTPUT_LEN) for row, real in zip(token_ids, mask, strict=True)
    ]
    loaded = load(engine, directory, "cpu")
    assert greedy(loaded, lengths).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 32), ({"rope_type": "linear", "factor": 4.0}, 32), ({"rope_type": "dynamic", "factor": 4.0}, 32),
        ({"type": "dynamic", "factor": 1.0}, 32), ({"rope_type": "llama3", "factor": 32.0}, 32),
        ({"rope_type": "yarn", "factor": 4.0}, 128), ({"type": "yarn", "factor": 2}, 64),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4}, 160),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, 32),
        ({"rope_type": "yarn", "factor": 1e300}, 32), ({"rope_type": "yarn", "factor": "4"}, 32),
        ({"rope_type": "yarn", "factor": True}, 32), ({"rope_type": "yarn", "factor": float("nan")}, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}, 32),
        ({"rope_type": "longrope", "original_max_position_embeddings": 24}, 24), ({"type": "su"}, 32),
    ],
)  # fmt: skip
def test_positions_that_are_served(settings: dict[str, Any], positions: int) -> None:
    assert stretched(32, json.loads(json.dumps(settings))) == positions
    assert stretched(None, settings) is None
