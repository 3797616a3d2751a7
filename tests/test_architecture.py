"""Properties of a model that are read from the model itself: parameters, experts, and the size of its cache."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import Patch, invoke, mentions
from tests.results import case
from tests.test_model import counted
from zinfer.checkpoint.architecture import CACHE_NAMES, decoder_layers, empty_model, measure
from zinfer.checkpoint.resolve import from_config, resolve
from zinfer.checkpoint.source import find
from zinfer.core.model import ATTEND_THEMSELVES, ModelError, ModelSpec
from zinfer.job.recipe import make_sweep
from zinfer.job.sweep import prepare
from zinfer.plan.planner import make_plan
from zinfer.system.machines import load as machine

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 64,
}  # fmt: skip
GQA = BASE | {"num_key_value_heads": 2}
ROUTED = GQA | {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MLA = BASE | SHARED | {
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 2, "kv_lora_rank": 24,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_group": 2,
    "num_key_value_heads": 4,
}  # fmt: skip
SLIDING = ["sliding_attention"] * 2 + ["full_attention"]
GEMMA = GQA | {"head_dim": 12, "sliding_window": 8, "layer_types": SLIDING * 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
    "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2, "head_dim": 12,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "gpt2": {"n_embd": 48, "n_layer": 6, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "gpt_neo": {"hidden_size": 48, "num_layers": 6, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 3]]},
    "mpt": {"d_model": 48, "n_layers": 6, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64},
    "xglm": {"d_model": 48, "num_layers": 6, "attention_heads": 4, "ffn_dim": 80, "vocab_size": 96},
    "bart": {"d_model": 48, "decoder_layers": 6, "encoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 96,
             "decoder_ffn_dim": 80, "encoder_ffn_dim": 80, "encoder_attention_heads": 4},
    "gemma3_text": GEMMA,
    "gemma3": {"text_config": GEMMA, "vision_config": VISION},
    "mistral3": {"text_config": GQA | {"model_type": "mistral", "head_dim": 12}, "vision_config": VISION},
    "deepseek_v3": MLA,
    "glm4_moe": ROUTED | SHARED,
    "qwen3_moe": ROUTED | {"num_experts": 8},
    "gpt_oss": GQA | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 8,
                      "layer_types": ["sliding_attention", "full_attention"] * 3},
    "qwen3_next": ROUTED | LINEAR | {"num_experts": 8, "shared_expert_intermediate_size": 20},
    "mamba": {"hidden_size": 48, "num_hidden_layers": 6, "vocab_size": 96, "state_size": 8},
    "nemotron_h": GQA | {"layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
                         "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2,
                         "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                         "moe_shared_expert_intermediate_size": 20, "head_dim": 12},
}  # fmt: skip


@cache
def spec_of(kind: str) -> ModelSpec:
    return from_config(kind, {"model_type": kind} | CONFIGS[kind])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_counted_as_it_is_built(kind: str) -> None:
    spec = spec_of(kind)
    model = empty_model(spec)
    _, layers = decoder_layers(model)
    assert (spec.layer_parameters, spec.parameters) == (tuple(map(counted, layers)), counted(model))
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (6, 48, 96 if kind != "gemma3" else spec.vocab_size)


def cached(spec: ModelSpec, length: int) -> tuple[int, ...]:
    """Count the values that a forward pass leaves in transformers' cache. One sequence, part by part."""
    model = empty_model(spec).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.zeros_(tensor)
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=True)
    parts = next(cache[name] for name in CACHE_NAMES if cache.get(name) is not None).layers

    def size(value: Any) -> int:
        return sum(map(size, value.values())) if isinstance(value, dict) else 0 if value is None else value.numel()

    names = ("keys", "values", "conv_states", "recurrent_states")
    return tuple(sum(size(vars(layer).get(name)) for name in names) for layer in parts)


def planned(spec: ModelSpec, length: int) -> tuple[int, ...]:
    """Return the number of values that each layer caches of one sequence."""
    return tuple(layer.tokens(length) * layer.kv_width + layer.state for layer in spec.layers)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"gemma3", "bart"}))
def test_the_cache_is_the_size_that_a_real_one_has(kind: str) -> None:
    spec = spec_of(kind).with_dtype("float32")
    assert [size for size in planned(spec, 5) if size] == [size for size in cached(spec, 5) if size]
    if spec.layers[0].window == 8:  # transformers keeps one token less than the window attends to
        width = spec.layers[0].kv_width
        assert planned(spec, 30)[0] == 8 * width == cached(spec, 30)[0] + width


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_slice_is_the_model_of_its_cut_configuration(kind: str) -> None:
    part = spec_of(kind).slice(3)
    again = measure(kind, part.config)
    assert (part.layers, part.other_parameters) == (again.layers, again.other_parameters)
    assert len(decoder_layers(empty_model(part))[1]) == 3


def test_windows_states_and_attention_of_each_layer() -> None:
    sliding, full = (spec_of("gemma3_text").layers[index] for index in (0, 2))
    assert (sliding.kv_width, sliding.window, sliding.attention) == (2 * 2 * 12, 8, 4 * 12)
    assert full == sliding.model_copy(update={"window": None})
    recurrent, attending = (spec_of("qwen3_next").layers[index] for index in (0, 2))
    assert (recurrent.kv_width, recurrent.attention) == (0, 0)
    assert recurrent.state >= 4 * 12 * 12
    assert (attending.kv_width, attending.state, attending.attention) == (2 * 2 * 12, 0, 4 * 12)
    assert spec_of("mamba").num_heads == 0
    assert spec_of("mamba").kv_bytes(2, 10) == spec_of("mamba").kv_bytes(2, 1000) > 0
    wrapper, text = spec_of("gemma3"), spec_of("gemma3_text")
    assert (wrapper.layers, wrapper.architecture) == (text.layers, "gemma3"), "only the text model counts"
    assert not any("vision" in name for name, _ in empty_model(wrapper).named_parameters())


def test_attention_reads_no_more_than_the_window() -> None:
    windowed = spec_of("gemma3_text")
    whole = from_config("whole", {"model_type": "gemma3_text"} | GEMMA | {"layer_types": ["full_attention"] * 6})
    assert windowed.decode_flops(1, 8) == whole.decode_flops(1, 8)
    assert whole.decode_flops(1, 58) - windowed.decode_flops(1, 58) == 4 * 50 * 4 * 48
    by_token = sum(windowed.decode_flops(1, seen) - windowed.decode_flops(1, 0) for seen in range(1, 4001))
    blind = tuple(layer.model_copy(update={"attention": 0}) for layer in windowed.layers)
    others = windowed.model_copy(update={"layers": blind}).prefill_flops(1, 4000)
    assert windowed.prefill_flops(1, 4000) - others == pytest.approx(by_token, rel=1e-3)


MLLAMA = {
    "num_hidden_layers": 3, "cross_attention_layers": [1], "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}, "keeps nothing"),
        ({"model_type": "rwkv", "num_hidden_layers": 6, "hidden_size": 32}, "changes its weights as it runs"),
        ({"model_type": "kosmos-2.5"}, "numbers positions by its padding token"),
        ({"model_type": "mllama", "text_config": MLLAMA}, "a text does not pass through all of its layers"),
        ({"model_type": "clip"}, "no decoder-only language model"),
        ({"model_type": "novel"}, "code of the repository, which zinfer does not run"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers cannot build"),
        ({"model_type": "gemma3", "text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quantised"),
    ],
)
def test_unsupported_models_are_refused_in_one_line(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"^it: .*{says}") as error:
        from_config("it", config)
    assert "\n" not in str(error.value)


def test_a_bare_configuration_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "glm4_moe", "dtype": "float16"} | CONFIGS["glm4_moe"]))
    for reference in (tmp_path, file):
        spec = resolve(str(reference))
        assert (spec.layers, spec.dtype, spec.directory) == (spec_of("glm4_moe").layers, "float16", None)
    words = f"plan --model {file} --machine h100-80gb --input-len 32 --output-len 8 --json"
    result = invoke(*words.split())
    assert result.exit_code == 0, result.output
    assert {plan["model"]["num_experts"] for plan in json.loads(result.output)} == {8}


def test_plan_sweep_and_run_refuse_what_is_too_long_at_once(monkeypatch: Patch) -> None:
    words = ["plan", "--model", "opt-1.3b", "--machine", "h100-80gb", "--output-len", "16", "--input-len"]
    assert "2048 positions of opt-1.3b" in str(invoke(*words, 2040).exception)
    result = invoke(*words, "8,2040")
    assert result.exit_code == 0
    assert mentions(result.stderr, "left out", "2048 positions of opt-1.3b")
    sweep = make_sweep({"model": "opt-1.3b", "input_len": [8, 2040], "output_len": 16}, "test")
    with pytest.raises(ModelError, match="2048 positions of opt-1"):
        prepare(sweep, machine("h100-80gb"), lambda load: find(load.model, None, None, "dummy"), lambda _: "engine")
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: pytest.fail("the machine was asked"))
    result = invoke(*f"run -m bloom-tiny --load-format dummy --prompt {'x' * 2040} --output-len 16".split())
    assert mentions(str(result.exception), "2040 tokens", "--output-len 16", "2048 positions", "bloom-tiny")


LLAMA = {"model_type": "llama", **GQA}


@pytest.mark.parametrize(
    "code",
    [
        {"_attn_implementation": "someone/kernels"},
        {"attn_implementation": "someone/kernels:attention"},
        {"attn_implementation": "paged|someone/kernels"},
        {"_attn_implementation_internal": "someone/kernels"},
        {"attn_implementation": {"": "sdpa", "text_config": "someone/kernels"}},
        {"attn_implementation": ["someone/kernels"]},
        {"experts_implementation": "someone/experts"},
        {"text_config": {"_attn_implementation": "someone/kernels"}},
        {"rope_parameters": {"rope_type": "default", "attn_implementation": "someone/kernels"}},
    ],
)
def test_a_configuration_that_names_code_is_refused(code: dict[str, Any], monkeypatch: Patch) -> None:
    """Without the refusal, transformers fetches the repository and imports it."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("a repository was fetched"))
    spec = from_config("llama", LLAMA)
    with pytest.raises(ModelError, match="implementation") as error:
        empty_model(spec.model_copy(update={"config": {**spec.config, **code}}))
    assert mentions(str(error.value), "someone")


def test_an_implementation_of_transformers_is_chosen_by_zinfer_alone() -> None:
    code = {"attn_implementation": "eager", "auto_map": {"AutoModelForCausalLM": "someone/code--modeling.Model"}}
    spec = from_config("llama", {**LLAMA, **code, "use_kernels": True})
    config = empty_model(spec).config
    assert config._attn_implementation == "sdpa"
    assert not hasattr(config, "auto_map")


def test_types_that_compute_attention_themselves_are_known() -> None:
    """They store keys and values, and never look an attention function up. BLOOM has an adapter."""
    causal = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = model_type_to_module_name(kind)
        source = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
        code = source.read_text() if source.exists() else ""
        stores = re.search(r"(\bcache|past_key_values?|layer_past)\.update\(", code)
        if stores and "ALL_ATTENTION_FUNCTIONS" not in code:
            causal.add(kind)
    assert len(causal) > 5
    by_name_later = {"moshi", "nemotron"}
    assert causal - by_name_later - {"bloom"} <= ATTEND_THEMSELVES


@pytest.mark.parametrize(("kind", "offloaded"), [("llama", True), ("falcon", False)])
def test_no_row_in_host_memory_is_planned_for_them(kind: str, offloaded: bool) -> None:
    spec = from_config(kind, GQA | {"model_type": kind, "num_hidden_layers": 80})
    big = spec.model_copy(update={"layers": spec.layers * 4, "num_layers": 320, "total_layers": 320})
    ways = ((("kv_attention", "cpu"),), (("kv_offload", "cpu"),))
    cases = [case(100_000, model=kind, layers=None, input_len=32, options=options) for options in ways]
    plans = [make_plan(each, big, machine("h200")) for each in cases]
    assert (plans[0].placement.host_rows(100_000) > 0) is offloaded
    assert ("computes attention itself" in (plans[1].why_not or "")) is not offloaded
