"""The KV cache of every kind of layer: greedy tokens are those of `transformers.generate`, wherever the cache is."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import VOCAB_SIZE
from tests.test_parity import OUTPUT_LEN, greedy, load, prompts
from zinfer.engine import EngineError

LENGTHS = (13, 5, 9)  # of the prompts: longer than the windows, and shorter
_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATE = ["sliding_attention", "full_attention"] * 3
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},  # a window in every layer
    "gemma2": {"sliding_window": 6, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 6, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 16},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},  # chunks
    "deepseek_v3": {  # K and V of different widths
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 8,
    },
    "qwen3_next": {  # a state of fixed size in three layers of four
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "jamba": {**_MAMBA, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "time_step_limit": [0.0, 1e9]},  # both in every layer
    "mamba": {"state_size": 8},  # states only
    "gemma4_text": {  # later layers attend to keys of earlier ones
        "sliding_window": 6, "layer_types": _ALTERNATE, "num_kv_shared_layers": 2, "global_head_dim": 32,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE,
    },
}  # fmt: skip
STATES_ONLY = ("mamba",)

Kinds = Callable[[str], Path]


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Makes the checkpoint of one of `KINDS`, once."""

    @cache
    def make(name: str) -> Path:
        torch.manual_seed(1)
        config = AutoConfig.for_model(name, **(_SHAPE | KINDS[name]), initializer_range=0.3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        return directory

    return make


@cache
def expected(directory: Path, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """What `transformers.generate` continues a batch with, ``[B, OUTPUT_LEN]``."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    token_ids, mask = prompts(lengths)
    output = model.generate(token_ids, attention_mask=mask, max_new_tokens=OUTPUT_LEN, do_sample=False)
    return output[:, token_ids.shape[1] :]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "cpu": ("cpu", {}),
    "kv by the cpu": ("cpu", {"kv_offload": "cpu", "kv_attention": "cpu"}),
    "kv over the link": ("cpu", {"kv_offload": "cpu", "kv_attention": "gpu"}),
}


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_transformers(
    name: str, way: str, at_once: int, kind: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zinfer.cost.BLOCK_VALUES", 1)
    monkeypatch.setattr("zinfer.cost.BLOCK_TOKENS", max(LENGTHS) * at_once)
    monkeypatch.setattr("zinfer.engine.cache.LEAST_SPARE", 2)  # the window moves every other step
    offload, options = WAYS[way]
    if options and name in STATES_ONLY:
        with pytest.raises(EngineError, match="keep a state of fixed size, and no keys and values: kv_offload=cpu"):
            load("stream", kind(name), offload, tmp_path, **options)  # type: ignore[arg-type]
        return
    engine = load("stream", kind(name), offload, tmp_path, **options)  # type: ignore[arg-type]
    for _ in range(2):
        assert torch.equal(greedy(engine, LENGTHS), expected(kind(name)))
    engine.close()


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("name", KINDS)
def test_8_bits_are_what_the_record_says(
    name: str, storage: str, kind: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer with keys and values has them in 8 bits, and the logits are close to exact ones."""
    monkeypatch.setattr("zinfer.engine.stream.DEQUANTIZED_BYTES", 1)  # a row at a time
    monkeypatch.setattr("zinfer.engine.cache.LEAST_SPARE", 2)
    if name in STATES_ONLY:
        with pytest.raises(EngineError, match=f"and no keys and values: kv_cache_dtype={storage}"):
            load("stream", kind(name), "cpu", tmp_path, kv_cache_dtype=storage)
        return
    ways = [{"kv_cache_dtype": storage}] + [{"kv_cache_dtype": storage, "kv_offload": "cpu"}] * (storage == "int8")
    exact = load("stream", kind(name), "cpu", tmp_path)
    for way in ways:
        engine = load("stream", kind(name), "cpu", tmp_path, **way)  # type: ignore[arg-type]
        token_ids, mask = prompts(LENGTHS)
        logits = [one.prefill(token_ids, mask, reserve=OUTPUT_LEN) for one in (engine, exact)]
        assert torch.allclose(*logits, atol=1e-3), "the prompt's attention sees exact keys"
        errors = []
        for _ in range(OUTPUT_LEN - 1):
            token = logits[1].argmax(-1)
            logits = [one.decode(token) for one in (engine, exact)]
            errors.append(float((logits[0] - logits[1]).norm() / logits[1].norm()))
        assert max(errors) > 0
        assert sum(errors) / len(errors) < (0.1 if storage == "int8" else 0.4)
        assert engine.effective().settings["kv_cache_dtype"] == storage
        engine.close()
    exact.close()


def test_of_a_sliding_window_a_step_reads_and_keeps_the_window(kind: Kinds, tmp_path: Path) -> None:
    """The prompt has 40 tokens, the window 8: 7 are stored, and what comes is 7 before each token."""
    over_link, by_cpu, here = (
        load("stream", kind("mistral"), "cpu", tmp_path, **WAYS[way][1])
        for way in ("kv over the link", "kv by the cpu", "cpu")
    )
    for engine in (over_link, by_cpu, here):
        tokens = greedy(engine, (40, 33))
        assert torch.equal(tokens, expected(kind("mistral"), (40, 33)))
    a_token = 2 * 2 * 16 * 4  # of a layer, in bytes
    assert over_link.effective().settings["kv_bytes_per_step"] == 6 * 2 * 7 * a_token
    room = 6 * 2 * (7 + 16) * a_token
    for engine in (over_link, by_cpu):
        assert engine._kv_memory.size == room  # type: ignore[attr-defined]
    layers = here._cache.layers  # type: ignore[attr-defined]
    assert sum(layer._keys.nbytes + layer._values.nbytes for layer in layers) == room
    assert {layer.keys.shape[2] for layer in layers} == {7}
    assert "the last 8 positions only" in str(here.cannot_keep())
    for engine in (over_link, by_cpu, here):
        engine.close()
