"""Damaged configurations, generation settings, tokenizers and checkpoints: each loads, or is refused in one line."""

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Patch
from tests.checkpoints import save_checkpoint
from tests.damage_files import damage_bytes, damage_header, damage_json, damage_text
from tests.test_architecture import CONFIGS
from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.configuration import CheckpointWarning
from zinfer.checkpoint.resolve import resolve
from zinfer.core.errors import ZinferError
from zinfer.engine.state import ModelState
from zinfer.generation import tokenizer_server
from zinfer.generation.tokenizer import Tokenizer
from zinfer.generation.tokenizer_process import what_to_load

SHORT = 120
CPU = torch.device("cpu")


def attempt(run: Callable[[], object], what: str) -> str:
    """Run it: return "loads", or "refused" if it ends with one line of zinfer. Any other exception fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        try:
            run()
        except ZinferError as error:
            line = str(error)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            return "loads"
    assert "\n" not in line, what
    assert 0 < len(line) < 2000, what
    return "refused"


def load_text(folder: Path) -> None:
    """Load the tokenizer in this process and read two prompts. Load it first as its own process does, then as a worker
    does."""
    spec, template = resolve(str(folder)), tokenizer_files.chat_template(folder)
    tokenizer, _ = tokenizer_server.load(what_to_load(spec, template))
    prompts: list[Any] = ["Once", {"messages": [{"role": "user", "content": "Once"}]}]
    for prompt in prompts:
        with suppress(Exception):  # which its process answers with
            tokenizer.encode(prompt, special=True, max_tokens=None)
    Tokenizer(spec)


def load_weights(folder: Path) -> None:
    for _ in ModelState(resolve(str(folder)), "safetensors").load(CPU):
        pass


def damaged_configs(dice: random.Random, folder: Path, times: int) -> Counter[str]:
    """Damage configurations of several architectures and measure their models; return the numbers of outcomes."""
    outcomes: Counter[str] = Counter()
    kinds = list(CONFIGS)
    path = folder / "config.json"
    for number in range(times):
        kind = dice.choice(kinds)
        path.write_text(json.dumps({"model_type": kind, "eos_token_id": 2, "dtype": "bfloat16", **CONFIGS[kind]}))
        what = f"config {number} of {kind}: {damage_json(dice, path)}"
        outcomes[attempt(lambda: resolve(str(folder)), what)] += 1
    return outcomes


FILES: dict[str, tuple[Callable[[random.Random, Path], str], Callable[[Path], None]]] = {
    "config.json": (damage_json, load_weights),
    "generation_config.json": (damage_json, load_text),
    "tokenizer_config.json": (damage_json, load_text),
    "tokenizer.json": (damage_json, load_text),
    "chat_template.jinja": (damage_text, load_text),
    "model.safetensors.index.json": (damage_json, load_weights),
    "*.safetensors": (damage_bytes, load_weights),
    "model-*.safetensors": (damage_header, load_weights),
}


def damaged_files(dice: random.Random, source: Path, folder: Path, times: int) -> Counter[str]:
    """Damage files of copies of the checkpoint `source` and load them; return the numbers of outcomes."""
    outcomes: Counter[str] = Counter()
    for number in range(times):
        name = dice.choice(list(FILES))
        damage, load = FILES[name]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        what = f"{name} {number}: {damage(dice, dice.choice(sorted(folder.glob(name))))}"
        outcomes[attempt(lambda load=load: load(folder), what)] += 1  # type: ignore[misc]
    return outcomes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a sharded checkpoint with a chat template and all settings."""
    folder = save_checkpoint("llama", tmp_path_factory.mktemp("damaged"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": 10**30, "added_tokens_decoder": {"0": {"content": "<pad>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.5}))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_damaged_configurations_load_or_are_refused(tmp_path: Path) -> None:
    outcomes = damaged_configs(random.Random(1), tmp_path, SHORT // 4)
    assert outcomes["refused"] > SHORT // 16
    assert outcomes["loads"] > 0


def test_damaged_files_load_or_are_refused(source: Path, tmp_path: Path) -> None:
    outcomes = damaged_files(random.Random(1), source, tmp_path / "copy", SHORT // 4)
    assert outcomes["refused"] > SHORT // 16
    assert outcomes["loads"] > 0
