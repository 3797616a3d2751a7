"""Folders of checkpoints as people have them: surplus tensors, several sources of weights, and other kinds of files."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import once, save_config
from tests.command import zinfer
from tests.running import error, prefill
from tests.test_parity import load, prompts
from tests.test_state import stored
from zinfer.checkpoint import gguf, quantization, resolve
from zinfer.checkpoint.headers import INDEX, SINGLE, Checkpoint, CheckpointError
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelError
from zinfer.core.progress import NOTE
from zinfer.engine.state import ModelState

Make = Callable[[str], Path]
GPT: dict[str, dict[str, object]] = {
    "gpt2": {},
    "gptj": {"rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neo": {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
}
MASK = torch.ones(1, 1, 32, 32).tril().bool()
HEAD = {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}
SCORE = {"score.weight": torch.ones(2, 64)}


@pytest.fixture(scope="module")
def gpts(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes the checkpoint of one of `GPT`, once."""
    return once(tmp_path_factory, lambda kind, path: save_config(path, kind, **{"num_hidden_layers": 3, **GPT[kind]}))


def with_tensors(source: Path, folder: Path, extra: Mapping[str, Tensor], renamed: str = "") -> Path:
    """Copy the checkpoint `source`, with `extra` tensors; names lose the prefix `renamed`. Return the copy."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name.removeprefix(renamed): tensor.contiguous() for name, tensor in stored(source).items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    return folder


def masks(names: str, layers: int) -> dict[str, Tensor]:
    """Return the masks that old checkpoints hold, in each layer."""
    parts = {"bias": MASK, "masked_bias": torch.tensor(-1e9)}
    return {f"{names.format(nth)}.{part}": mask.clone() for nth in range(layers) for part, mask in parts.items()}


def theirs(folder: Path) -> Tensor:
    """Return the logits of one prompt by transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(prompts((9,))[0]).logits[:, -1]
    return logits


def error_of(folder: Path, expected: Tensor) -> float:
    """Return the error of our logits of the same prompt."""
    return error(prefill(load("stream", folder, "cpu"), *prompts((9,))), expected)


def description(folder: Path) -> list[str]:
    """Return the lines that loading prints."""
    lines = list[str]()
    state = ModelState(resolve.from_directory(folder), "safetensors")
    for _ in state.load(torch.device("cpu"), lambda stage, _: lines.append(stage)):
        pass
    return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]


SURPLUS = {
    "gptj": ("gptj", "", masks("transformer.h.{}.attn", 3), ""),
    "gpt_neo": ("gpt_neo", "", masks("transformer.h.{}.attn.attention", 4), ""),
    "gpt2": ("gpt2", "", masks("transformer.h.{}.attn", 3), ""),
    "gpt2 without prefix": ("gpt2", "transformer.", masks("h.{}.attn", 3), ""),
    "value head": ("gpt2", "", HEAD, "v_head.summary.bias, v_head.summary.weight"),
    "value head, without prefix": ("gpt2", "transformer.", HEAD, "v_head.summary.bias, v_head.summary.weight"),
    "score": ("gptj", "", SCORE, "score.weight"),
    "another head": ("gpt2", "", {"critic.out.weight": torch.ones(1, 64)}, "critic.out.weight"),
}


@pytest.mark.parametrize("kind", SURPLUS)
def test_surplus_tensors_that_make_no_text_load(kind: str, gpts: Make, tmp_path: Path) -> None:
    architecture, renamed, extra, named = SURPLUS[kind]
    source = gpts(architecture)
    folder = with_tensors(source, tmp_path / "copy", extra, renamed)
    lines = description(folder)
    assert [f"left out {named} of {folder}: no part of a {architecture} model"] * bool(named) == lines
    assert error_of(folder, theirs(folder)) < 1e-5
    assert resolve.from_directory(folder).parameters == resolve.from_directory(source).parameters


CHANGING = {
    "bias of a linear module": {"transformer.h.1.attn.q_proj.bias": torch.ones(64)},
    "scale of a layer": {"transformer.h.1.ln_2.weight": torch.ones(64)},
    "bias of an attention module": {"transformer.h.1.attn.bias": torch.ones(64)},
    "mask of another form": {"transformer.h.1.attn.masked_bias": torch.ones(64)},
    "norm of the embeddings": {"transformer.ln_emb.weight": torch.ones(64)},
    "layer that the model lacks": {"transformer.h.3.ln_1.weight": torch.ones(64)},
    "tensor of the model itself": {"logit_scale": torch.ones(1)},
    "adapter": {"transformer.h.1.attn.q_proj.lora_A.weight": torch.ones(4, 64)},
    "adapter outside": {"base_model.model.transformer.h.1.attn.q_proj.lora_B.weight": torch.ones(64, 4)},
}


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("bare", [False, True])
def test_surplus_tensors_that_change_the_text_are_refused(kind: str, bare: bool, gpts: Make, tmp_path: Path) -> None:
    extra = {name.removeprefix("transformer." * bare): tensor for name, tensor in CHANGING[kind].items()}
    folder = with_tensors(gpts("gptj"), tmp_path / "copy", extra, "transformer." * bare)
    with pytest.raises(CheckpointError, match="merge it" if "adapter" in kind else "do not belong together"):
        ModelState(resolve.from_directory(folder), "safetensors")


def test_run_prints_what_is_left_out_once_and_ends_with_2_for_a_faulty_checkpoint(gpts: Make, tmp_path: Path) -> None:
    source, surplus = gpts("gpt2"), {"transformer.h.0.attn.scale.weight": torch.ones(1)}
    done = run(tmp_path, with_tensors(source, tmp_path / "head", HEAD))
    assert (done.returncode, done.stderr.count("left out v_head")) == (0, 1), done.stderr
    faulty = [with_tensors(source, tmp_path / f"faulty{nth}", extra) for nth, extra in enumerate((surplus, {}, {}))]
    weights = stored(faulty[1])
    del weights["transformer.wpe.weight"]
    save_file(weights, faulty[1] / SINGLE)
    (faulty[2] / "tokenizer.json").write_text("{")
    for folder in faulty:
        done = run(tmp_path, folder)
        assert done.returncode == 2, (folder, done.stderr)
        assert len(done.stderr.strip().splitlines()[-1]) < 400


def test_of_several_sources_the_one_of_transformers_is_read(gpts: Make, tmp_path: Path) -> None:
    source = gpts("gpt2")
    folder = Path(shutil.copytree(source, tmp_path / "two"))
    assert (folder / INDEX).exists()
    assert not description(folder)
    (folder / SINGLE).symlink_to("gone")  # the index is read where the whole file is no file
    assert error_of(folder, theirs(folder)) < 1e-5
    assert len(description(folder)) == 1
    (folder / SINGLE).unlink()
    changed = {name: tensor * 1.1 for name, tensor in stored(source).items()}
    save_file(changed, folder / SINGLE, {"format": "pt"})
    line = f"{folder} holds several sources of weights: {{}} is read, as transformers does, and {{}} is not"
    assert description(folder) == [line.format(SINGLE, INDEX)]
    whole = theirs(folder)
    assert error_of(folder, whole) < 1e-5
    assert error(theirs(source), whole) > 1e-2
    save_file(changed, folder / "own.safetensors", {"format": "pt"})
    changed_config(folder, transformers_weights="own.safetensors")
    assert description(folder) == [line.format("own.safetensors", SINGLE), line.format("own.safetensors", INDEX)]
    assert error(theirs(folder), whole) == 0
    assert error_of(folder, whole) < 1e-5


@pytest.mark.parametrize("named", ["../own.safetensors", "gone.safetensors", "weights.bin", "", 3, ["own.safetensors"]])
def test_named_weights_are_a_file_of_the_folder(named: object, gpts: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpts("gpt2"), tmp_path / "named"))
    changed_config(folder, transformers_weights=named)
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


QUIP = {"quant_method": "quip"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 1000000\n"


def changed_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    held = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))


def run(here: Path, folder: Path) -> CompletedProcess[str]:
    return zinfer(here, *f"run --model {folder} --offload cpu --output-len 3 --prompt ab".split())


def adapter(folder: Path) -> None:
    for path in {*folder.iterdir()} - {folder / "tokenizer.json"}:
        path.unlink()
    adapter_beside_a_model(folder)


def adapter_beside_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    save_file({"base_model.model.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def pointer(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(POINTER)


def transforms(field: str) -> Callable[[Path], None]:
    groups = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", field: {"config_groups": groups}}
    return lambda folder: changed_config(folder, quantization_config=quantized)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapter": (adapter, "an adapter .* merge it"),
    "adapter beside a model": (adapter_beside_a_model, "an adapter .* merge it"),
    "weights of Git LFS": (pointer(SINGLE), "Git LFS pointer.*git lfs pull"),
    "configuration of Git LFS": (pointer("config.json"), "config.json is a Git LFS pointer.*git lfs pull"),
    "tokenizer of Git LFS": (pointer("tokenizer.json"), "tokenizer.json is a Git LFS pointer"),
    "chat template of Git LFS": (pointer("chat_template.jinja"), "template.jinja is a Git LFS pointer"),
    "no model_type": (lambda folder: changed_config(folder, model_type=None), "has no model_type"),
    "QuIP": (lambda folder: changed_config(folder, quantization_config=QUIP), "quantised by 'quip'"),
    "transforms": (transforms("transform_config"), "transformed .* take another version"),
    "SpinQuant": (transforms("spinquant"), "transformed .* take another version"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_are_no_checkpoint_are_named(kind: str, gpts: Make, tmp_path: Path) -> None:
    change, says = KINDS[kind]
    folder = with_tensors(gpts("gpt2"), tmp_path / "model", {})
    change(folder)
    done = run(tmp_path, folder)
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ")
    assert re.search(says, line), line
    if "of Git LFS" not in kind:  # planning reads no weights and no tokenizer
        assert zinfer(tmp_path, "plan", "--model", str(folder)).returncode == 2


def test_the_package_that_reads_a_gguf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "version", Mock(side_effect=PackageNotFoundError("gguf")))
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path / "model.gguf", tmp_path):
        with pytest.raises(ModelError, match=r"gguf is a GGUF file: pip install 'zinfer\[engines,gguf\]'") as caught:
            resolve.resolve(str(path))
        assert caught.value.exit_code == ENVIRONMENT


def test_a_configuration_without_transforms_is_read() -> None:
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    every: list[object] = [{}, {"config_groups": {}}, None]
    for empty in every:
        assert quantization.settings_of({"quantization_config": quantized | {"transform_config": empty}}) is not None
