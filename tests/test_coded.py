"""Weights that a load itself stores quantised: random codes of dummy models, and weights that are rounded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import Checkpoints, Patch
from tests.test_finite import spoil
from tests.test_parity import greedy, load
from tools import shapes
from zinfer.checkpoint import resolve as resolving
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantization import SCHEMES, scheme
from zinfer.checkpoint.quantized_tensors import Quantization
from zinfer.checkpoint.resolve import from_directory, resolve
from zinfer.checkpoint.source import find, revision_of
from zinfer.core.case import LoadFormat
from zinfer.core.errors import ZinferError
from zinfer.core.model import Matrix, ModelSpec, Weights
from zinfer.engine.quantization import loading
from zinfer.engine.quantization.dequantize import expand
from zinfer.engine.quantization.loading import CodedMatrix, random_parts
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import codec
from zinfer.record.measurement import Effective

CPU = torch.device("cpu")
STD = 0.05
SHAPE = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 192, "head_dim": 32, "initializer_range": STD, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("llama", FP8),
    "fp8 of experts": ("mixtral", FP8),
    "fp4 of experts": ("mixtral", FP8 | {"expert_dtype": "fp4"}),
    "int4": ("llama", scheme("int4")),
    "int4 of experts": ("mixtral", scheme("int4")),
    "int8": ("llama", scheme("int8")),
    "fp8 of channels": ("llama", scheme("fp8")),
    "int4 asymmetric": ("llama", compressed("pack-quantized", **(PACKED | {"symmetric": False}))),
    "int4 in order": ("llama", compressed("pack-quantized", **PACKED, actorder="group")),
    "nvfp4": ("llama", compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
    "mxfp4": ("llama", compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)),
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq of 8 bits": ("llama", {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "awq": ("llama", {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "mxfp4 of experts": ("gpt_oss", {"quant_method": "mxfp4"}),
}


def bare(folder: Path, architecture: str, quantised: dict[str, Any], **others: Any) -> ModelSpec:
    shape = (SHAPE if architecture == "llama" else EXPERTS) | {"model_type": architecture, **others}
    path = folder / "config.json"
    path.write_text(json.dumps(shape | {"quantization_config": quantised}))
    return from_directory(path)


def both(spec: ModelSpec, load_format: LoadFormat = "dummy") -> tuple[dict[str, Tensor], set[str]]:
    """Return a model's entries as loaded, and names of those sent coded."""
    state = ModelState(spec, load_format)
    plain, coded = {name: tensor.clone() for name, tensor in state.load(CPU)}, set[str]()
    sent = []
    for name, loaded in state.load(CPU, stored=True):
        sent.append(name)
        if not isinstance(loaded, Tensor):
            coded.add(name)
            whole = plain[name].mT if loaded[0].transposed else plain[name]
            rows = torch.cat([expand(codes, whole.dtype) for codes in loaded]).view(whole.shape)
            loaded = rows.mT if loaded[0].transposed else rows
        assert torch.equal(loaded, plain[name])
    assert plain.keys() == set(sent) == state.entries.keys()
    return plain, coded


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_of_a_format_are_spread_like_others(name: str, tmp_path: Path) -> None:
    """Codes and scales are random; the weights that they stand for have the mean and deviation of dummy weights."""
    spec = bare(tmp_path, *FORMATS[name])
    plain, coded = both(spec)
    inside = {entry for entry in plain if entry.endswith(("_proj.weight", "gate_up_proj", "down_proj"))}
    assert coded == {entry for entry in inside if name != "mxfp4 of experts" or ".experts." in entry}
    for entry in inside:
        values = plain[entry].float()
        assert float(values.std()) == pytest.approx(STD, rel=0.05), entry
        assert abs(float(values.mean())) < 4 * STD / values.numel() ** 0.5, entry
        assert float((values.abs() < STD).float().mean()) == pytest.approx(0.68, abs=0.12), entry  # not uniform
    first, second = (plain[f"model.layers.{number}.self_attn.q_proj.weight"] for number in (0, 1))
    assert not torch.equal(first, second)
    assert all(torch.equal(tensor, plain[entry]) for entry, tensor in ModelState(spec, "dummy").load(CPU))


def test_dummy_codes_in_fp8_are_coded_like_rounded_weights() -> None:
    config = Quantization({"quantization_config": FP8 | {"weight_block_size": [128, 128]}}, "bfloat16")
    matrix = config.weight(Matrix("up", 1024, 2048), "layers.0.up")
    assert matrix is not None
    codes = random_parts(CodedMatrix("layers.0.up", *matrix), 0.02, torch.Generator())["codes"]
    weights = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1)).unflatten(0, (8, 128))
    blocks = weights.unflatten(2, (16, 128))  # [8, 128, 16, 128]
    rounded = (blocks / (blocks.abs().amax((1, 3), keepdim=True) / 448)).to(torch.float8_e4m3fn)
    sizes = []
    for values in (codes, rounded):
        coded = codec.encode(values)
        assert coded is not None
        sizes.append(coded.layout.size / codes.numel())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.005)
    assert 0.82 < sizes[0] < 0.835


def streamed(spec: ModelSpec) -> tuple[Effective, int]:
    """Stream dummy weights uncoded, then coded, with the same tokens; return what happened, and the bytes read."""
    batches = []
    for codec_ in ("none", "lossless"):
        loaded = load("stream", spec, load_format="dummy", weight_codec=codec_)
        batches.append(greedy(loaded, (5, 9, 3)))
        effective, read = loaded.effective(), loaded.loaded_bytes
    assert torch.equal(*batches)
    assert effective.wire_bytes_per_step == pytest.approx(spec.stored_ratio * spec.streamed_bytes, rel=0.06)
    return effective, read


MLA = {
    "hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256,
    "max_position_embeddings": 256,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {  # entries of the catalogue -> widths of a small model of the same kind
    "deepseek-v3": MLA | {"n_group": 4, "topk_group": 2},
    "kimi-k2": MLA,
    "minimax-m2": {
        "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 256, "max_position_embeddings": 256,
    },
    "gpt-oss-120b": {
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "max_position_embeddings": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("kimi-k2", "minimax-m2"))) for name in SMALL]
)
def test_a_released_model_of_the_catalogue_runs_with_dummy_codes(name: str, monkeypatch: Patch) -> None:
    entry = resolving._catalogue()[name]
    monkeypatch.setattr(resolving, "_catalogue", lambda: {name: entry | {"config": entry["config"] | SMALL[name]}})
    counted = shapes.packed(shapes.measured(name))
    monkeypatch.setattr(resolving, "_shapes", lambda: {name: counted})
    spec = find(name, None, SMALL[name]["num_hidden_layers"] - 1, "dummy").spec
    _, coded = both(spec)
    experts = [entry for entry in coded if ".experts." in entry]
    assert len(experts) == 2 * sum(layer.expert_parameters > 0 for layer in spec.layers) > 0
    streamed(spec)
    assert spec.stored_ratio < 0.56


@pytest.mark.parametrize("weights", ["int4", "fp8"])
def test_dummy_weights_stream_as_they_are_stored(weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | {"model_type": "llama", "initializer_range": 0.4}))
    spec = resolve(str(path), weights=weights)
    effective, read = streamed(spec)
    assert read == spec.stored_bytes < spec.weight_bytes
    assert effective.host_weight_bytes < 1.06 * spec.stored_ratio * spec.streamed_bytes
    assert revision_of(spec, "dummy") != revision_of(resolve(str(path)), "dummy")


@pytest.mark.parametrize("weights", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_weights_in_16_bits_are_rounded_while_they_load(
    architecture: str, weights: Weights, checkpoint: Checkpoints
) -> None:
    """Each matrix is that of `zinfer.engine.quantization.loading.quantize`; the others stay."""
    folder = checkpoint(architecture, hidden_size=128)
    before, _ = both(resolve(str(folder), "bfloat16"), "safetensors")
    spec = resolve(str(folder), "bfloat16", weights=weights)
    after, coded = both(spec, "safetensors")
    assert coded == {name for name in before if name.endswith(("_proj.weight", "gate_up_proj", "down_proj"))}
    for name, tensor in after.items():
        if name not in coded:
            assert torch.equal(tensor, before[name]), name
            continue
        rows = before[name].flatten(0, -2)
        size = loading.group_size(rows.shape[1], weights)  # type: ignore[arg-type]
        half = {"int4": 7.5, "int8": 127.5}.get(weights, 14)
        steps = rows.float().unflatten(-1, (-1, size)).abs().amax(-1, keepdim=True) / half
        error = (tensor.flatten(0, -2).float() - rows.float()).unflatten(-1, (-1, size)).abs()
        assert bool((error <= 0.52 * steps + 0.005 * rows.abs().max()).all()), name
        assert not torch.equal(tensor, before[name])
    assert revision_of(spec, "safetensors").endswith(f"-{weights}")


def test_rounded_weights_give_the_tokens_of_a_folder_with_these_weights(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoint("llama", hidden_size=128)
    spec = resolve(str(folder), "bfloat16", weights="int4")
    first = load("stream", spec, weight_codec="lossless")
    expected = greedy(first, (5, 9, 3))
    assert first.loaded_bytes == spec.weight_bytes  # what was read is in 16 bits
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model*"))
    save_file(both(spec, "safetensors")[0], tmp_path / "model.safetensors")
    second = load("stream", tmp_path, dtype="bfloat16", weight_codec="none")
    assert torch.equal(greedy(second, (5, 9, 3)), expected)


def test_what_cannot_be_rounded_is_refused_in_a_line(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ZinferError, match="released quantised"):
        resolve(bare(tmp_path, "llama", FP8).name, weights="int4")
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, float("nan"))
    state = ModelState(resolve(str(tmp_path), "bfloat16", weights="int4"), "safetensors", allow_nan=True)
    with pytest.raises(CheckpointError, match="cannot be rounded to int4"):
        list(state.load(CPU, stored=True))
