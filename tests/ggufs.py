"""GGUF files of small random models, as llama.cpp's converter writes them.

Names come from the maps of the package gguf, changes of order from llama.cpp's converter; nothing is of zinfer or of
transformers' reader. Types without a quantiser in the package get random blocks.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING

Kind = gguf.GGMLQuantizationType
BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "initializer_range": 0.05, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
SLIDING = ["sliding_attention", "full_attention"]
# architecture of the GGUF, model type, and fields of the configuration
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama3": ("llama", "llama", {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}),
    "mixtral": ("llama", "mixtral", EXPERTS | {"num_local_experts": 4}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 256}),
    "qwen3": ("qwen3", "qwen3", {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "gemma2": ("gemma2", "gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 16}),
    "gemma3": ("gemma3", "gemma3_text", {
        "tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 16, "num_hidden_layers": 6}),
    "phi3": ("phi3", "phi3", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "layer_types": SLIDING,
        "sliding_window": 16, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}}),
    "starcoder2": ("starcoder2", "starcoder2", {"tie_word_embeddings": True}),
    "stablelm": ("stablelm", "stablelm", {"partial_rotary_factor": 0.25}),
}  # fmt: skip
if "gpt_oss" not in GGUF_CONFIG_MAPPING:  # before transformers 5.10
    del MODELS["gpt-oss"]
BLOCKS = {Kind.Q4_K: 0, Kind.Q5_K: 0, Kind.Q6_K: 208}  # random blocks: where the first of their factors is


class Part(NamedTuple):
    """Tensor made of a parameter, and how to put values back."""

    name: str
    values: Tensor
    back: Callable[[Tensor], Tensor]


def permuted(heads: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return llama.cpp's order of queries and keys, and its opposite."""

    def order(rows: int) -> Tensor:
        return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)

    return lambda t: t[order(len(t))], lambda t: t[order(len(t)).argsort()]


def model_of(name: str) -> Any:
    """Return a random model, float32, with norms that are not ones."""
    _, kind, fields = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(BASE | fields)), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))
    return model


def parts_of(name: str, key: str, value: Tensor, names: Any) -> list[Part]:
    """Return the tensors of a GGUF that a parameter becomes."""
    arch, kind, fields = MODELS[name]
    config = BASE | fields
    base, _, leaf = key.rpartition(".")
    if leaf not in ("weight", "bias"):
        base, leaf = key, "weight"
    same: Callable[[Tensor], Tensor] = lambda t: t  # noqa: E731
    layer = key.split(".")[2] if ".layers." in key else ""
    if ".experts." in key:
        biased = "bias" if key.endswith("_bias") else "weight"
        turned = kind == "gpt_oss" and biased == "weight"
        whole = value.transpose(1, 2) if turned else value
        back: Callable[[Tensor], Tensor] = (lambda t: t.transpose(1, 2)) if turned else same
        if "down_proj" in key:
            return [Part(f"blk.{layer}.ffn_down_exps.{biased}", whole, back)]
        halves = (whole[:, 0::2], whole[:, 1::2]) if kind == "gpt_oss" else tuple(whole.chunk(2, 1))
        roles = zip(("gate", "up"), halves, strict=True)
        return [Part(f"blk.{layer}.ffn_{role}_exps.{biased}", half, same) for role, half in roles]
    stored = names.get_name(base)
    assert stored is not None, key
    if arch == "llama" and base.endswith(("q_proj", "k_proj")):
        there, back = permuted(config["num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"])
        return [Part(f"{stored}.{leaf}", there(value), back)]
    if kind.startswith("gemma") and "norm" in base:
        return [Part(f"{stored}.{leaf}", value + 1, lambda t: t - 1)]
    if "shared_expert_gate" in base:
        return [Part(f"{stored}.{leaf}", value[0], lambda t: t[None])]
    return [Part(f"{stored}.{leaf}", value, same)]


def stored(values: np.ndarray, kind: Any, dice: np.random.Generator) -> np.ndarray:
    """Return the bytes of a tensor in a type."""
    if kind not in BLOCKS:
        return np.asarray(gguf.quants.quantize(values, kind))
    at = BLOCKS[kind]
    return random_blocks(values.shape, kind, at, [2e-4] if at else [2e-4, 2e-3], dice)


def random_blocks(
    shape: tuple[int, ...], kind: Any, at: int, factors: list[float], dice: np.random.Generator
) -> np.ndarray:
    """Return random bytes of blocks. From byte `at` on they have factors with these means."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = dice.integers(0, 256, (math.prod(shape) // size, width), dtype=np.uint8)
    drawn = dice.uniform(0.5, 1.5, (len(blocks), len(factors))) * factors
    blocks[:, at : at + 2 * len(factors)] = drawn.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    name: str, path: Path, kind: Any, split: int = 0, tokens: str = "", more: dict[str, Any] | None = None,
    down: Any = None,
) -> Any:  # fmt: skip
    """Write a GGUF; return the model whose weights are those that it stands for.

    Matrices of layers are of type `kind` where their rows are whole blocks, the last ones of experts of type `down` if
    one is given. With `split`, a file has as many tensors. `tokens` is the kind of a vocabulary, ``gpt2`` or ``llama``;
    `more` are other fields of the metadata.
    """
    arch, model_type, fields = MODELS[name]
    model = model_of(name)
    config, width = BASE | fields, gguf.GGML_QUANT_SIZES[kind][0]
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 8)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    describe(writer, arch, model, config, tokens)
    for key, value in (more or {}).items():
        key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    dice = np.random.default_rng(0)
    with torch.no_grad():
        tied = {id(model.get_output_embeddings().weight)} if config["tie_word_embeddings"] else set()
        for key, weight in model.named_parameters():
            made = []
            for part in parts_of(name, key, weight.clone(), names):
                values = part.values.contiguous().numpy()
                inside = values.ndim > 1 and "router" not in key and ".gate." not in key
                wanted = down if down is not None and "down_exps" in part.name else kind
                chosen = wanted if inside and values.shape[-1] % width == 0 and id(weight) not in tied else Kind.F32
                data = stored(values, chosen, dice)
                writer.add_tensor(part.name, data, raw_dtype=chosen)
                made.append(part.back(torch.from_numpy(gguf.quants.dequantize(data, chosen).copy())))
            whole = made[0] if len(made) == 1 else torch.cat(made, 1)
            if len(made) == 2 and model_type == "gpt_oss":
                whole = torch.stack(made, 2).flatten(1, 2)
                whole = whole.transpose(1, 2) if whole.dim() == 3 else whole
            weight.copy_(whole)
    if name == "llama3":
        rotation = model.model.rotary_emb.inv_freq
        plain = 1 / config["rope_theta"] ** (torch.arange(0, config["head_dim"], 2) / config["head_dim"])
        writer.add_tensor("rope_freqs.weight", (plain / rotation).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def describe(writer: Any, arch: str, model: Any, config: dict[str, Any], tokens: str) -> None:
    """Write the metadata."""
    writer.add_name("a small model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rotary = model.config.rope_parameters
    writer.add_rope_freq_base(float(rotary.get("full_attention", rotary)["rope_theta"]))
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1)))
    settings = model.config
    writer.add_layer_norm_rms_eps(getattr(settings, "rms_norm_eps", 1e-6))
    writer.add_layer_norm_eps(getattr(settings, "norm_epsilon", getattr(settings, "layer_norm_eps", 1e-5)))
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if arch != "llama":
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    if tokens:
        letters = [chr(code) for code in range(33, 127)]
        vocabulary = ["<s>", "</s>", *letters, "Ġ" if tokens == "gpt2" else "▁", "th", "the"]
        count = config["vocab_size"] - len(vocabulary)
        writer.add_tokenizer_model(tokens)
        if tokens == "gpt2":
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_merges(["t h", "th e"])
        else:  # bytes, so that each text has tokens
            writer.add_token_scores([0.0] * 2 + [-float(n) for n in range(len(vocabulary) - 2)] + [0.0] * count)
        kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 2)
        writer.add_token_list(vocabulary + [f"<0x{n:02X}>" for n in range(count)])
        writer.add_token_types(kinds + [gguf.TokenType.BYTE] * count)
        writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
