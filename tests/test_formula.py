"""Closed forms against the models that they stand for."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_architecture import GQA, MLA, ROUTED
from zinfer.checkpoint.architecture import measure
from zinfer.checkpoint.formula import shape
from zinfer.checkpoint.quantization import scheme
from zinfer.checkpoint.quantized_bytes import stored_ratios
from zinfer.checkpoint.resolve import from_directory
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelError, Shape

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GQA | {"head_dim": 20},
    "llama-biased": GQA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": GQA | {"sliding_window": 8, "head_dim": 12},
    "mixtral": GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": GQA,
    "qwen2-yarn": GQA | {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0,
                                                                         "original_max_position_embeddings": 64}},
    "qwen3": GQA | {"head_dim": 20},
    "qwen2_moe": ROUTED | {"num_experts": 8, "shared_expert_intermediate_size": 36},
    "qwen3_moe": ROUTED | {"num_experts": 8, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "glm4_moe": ROUTED | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
                          "attention_bias": True, "n_group": 1, "topk_group": 1},
    "deepseek_v3": MLA,
    "deepseek_v3-whole-queries": MLA | {"q_lora_rank": None},
}  # fmt: skip
PLAIN = {
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "seq_length": 64},
    "codegen": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64, "rotary_dim": 4},
    "falcon": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "gpt_bigcode": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "gpt_neox": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
                 "intermediate_size": 80},
    "gptj": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "rotary_dim": 4},
    "opt": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "ffn_dim": 80},
    "phi": GQA,
    "stablelm": GQA | {"partial_rotary_factor": 0.5},
}  # fmt: skip


def counts(measured: Shape) -> Shape:
    """Return a shape without names and matrices unknown to closed forms."""
    layers = tuple(layer.model_copy(update={"matrices": ()}) for layer in measured.layers)
    return measured.model_copy(update={"layers": layers, "stack": ""})


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_closed_form_is_what_the_model_says(kind: str) -> None:
    config = {"model_type": kind.split("-")[0]} | CONFIGS[kind]
    assert shape(kind, config) == counts(measure(kind, config))


@pytest.mark.parametrize("quantised", [{"quant_method": "fp8"}, scheme("int4")])
def test_bytes_of_a_format_are_nearly_those_of_the_matrices(quantised: dict[str, Any]) -> None:
    config = {"model_type": "llama"} | GQA | {"hidden_size": 2048, "intermediate_size": 5632, "head_dim": 128}
    sizes = [
        stored_ratios(model.layers, model.stack, model.hidden_size, {"quantization_config": quantised}, "bfloat16")
        for model in (shape("it", config), measure("it", config))
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=2e-3)
    assert sizes[1][0] < 0.51


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_cached_follows_from_heads_where_weights_are_counted(kind: str) -> None:
    config = {"model_type": kind} | PLAIN[kind]
    asked = measure(kind, config)
    weights = {f"layers.{index}.weight": (layer.parameters,) for index, layer in enumerate(asked.layers)}
    estimate = shape(kind, config, weights | {"head": (asked.other_parameters,)})
    unsaid = {"max_position": None}  # a default of transformers'
    assert estimate.model_copy(update=unsaid) == counts(asked).model_copy(update=unsaid)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "jamba"},
        {"model_type": "bloom"} | PLAIN["bloom"],
        {"model_type": "llama"} | GQA | {"layer_types": ["full_attention"] * 6},
        {"model_type": "deepseek_v3"} | GQA,
    ],
)
def test_without_a_closed_form_it_says_what_is_needed(config: dict[str, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"^it: .*needs torch and transformers: pip install 'zinfer\[engines\]'"
    ) as error:
        shape("it", config)
    assert error.value.exit_code == ENVIRONMENT


@pytest.mark.parametrize("architecture", ["bloom", "llama", "opt", "mixtral"])
def test_a_checkpoint_counts_the_same_without_torch(architecture: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(architecture)
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
from zinfer.checkpoint.resolve import from_directory, from_catalogue
spec = from_directory(Path({str(folder)!r}))
print(spec.parameters, spec.layer_parameters, spec.expert_parameters, spec.kv_bytes(1, 9))
assert from_catalogue("mixtral-8x7b").parameters > 0
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    spec = from_directory(folder)
    printed = f"{spec.parameters} {spec.layer_parameters} {spec.expert_parameters} {spec.kv_bytes(1, 9)}"
    assert run.stdout.strip() == printed, run.stderr
