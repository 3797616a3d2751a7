"""Random GGUF of a model's shapes, to measure llama.cpp without its weights.

    python -m tools.random_gguf gpt-oss-120b /dev/shm/gpt-oss.gguf --type MXFP4

Blocks are random, and their scales such that activations stay finite; norms multiply by 1, and biases are 0, so that
routers choose by token and not the same experts for all. Tokens are numbers. Needs the package gguf.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from zinfer.checkpoint.resolve import resolve
from zinfer.core.model import ModelSpec

TILE = 1 << 16  # random blocks of a type, which repeat
SCALE = 0.01  # of a weight
TYPES = "BF16, F16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K or MXFP4 (of experts)"
# Place in a super block of its factors, of scales and of minimums, that make the mean of weights 0.
FACTORS = {
    "Q4_K": (0, (SCALE / 150, SCALE / 20)), "Q5_K": (0, (SCALE / 300, SCALE / 20)), "Q6_K": (208, (SCALE / 1300,)),
}  # fmt: skip
ARCHITECTURES = {"gpt_oss": "gpt-oss", "llama": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


class Tensor(NamedTuple):
    """Tensor of a GGUF: its name, its shape as torch has it, and its type."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType


def tensors(config: dict[str, Any], type_: gguf.GGMLQuantizationType) -> Iterator[Tensor]:
    """Yield the tensors of a model; matrices of layers have type `type_`, with MXFP4 only those of experts."""
    full, half = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16
    kind, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    experts = _experts(config)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    biased = kind == "gpt_oss"
    dense = half if type_ == gguf.GGMLQuantizationType.MXFP4 else type_
    yield Tensor("token_embd.weight", (vocab, hidden), half)
    yield Tensor("output_norm.weight", (hidden,), full)
    yield Tensor("output.weight", (vocab, hidden), half)
    for layer in range(config["num_hidden_layers"]):
        matrices = [
            ("attn_q", (heads * width, hidden), dense),
            ("attn_k", (kv_heads * width, hidden), dense),
            ("attn_v", (kv_heads * width, hidden), dense),
            ("attn_output", (hidden, heads * width), dense),
        ]
        norms = [("attn_norm", hidden), ("post_attention_norm" if biased else "ffn_norm", hidden)]
        if kind.startswith("qwen3"):
            norms += [("attn_q_norm", width), ("attn_k_norm", width)]
        stack, suffix = ((experts,), "_exps") if experts else ((), "")
        matrices += [("ffn_gate_inp", (experts, hidden), full)] if experts else []
        matrices += [(f"ffn_{name}{suffix}", (*stack, inner, hidden), type_) for name in ("gate", "up")]
        matrices += [(f"ffn_down{suffix}", (*stack, hidden, inner), type_)]
        for name, size in norms:
            yield Tensor(f"blk.{layer}.{name}.weight", (size,), full)
        for name, shape, stored in matrices:
            yield Tensor(f"blk.{layer}.{name}.weight", shape, stored)
            if biased:
                yield Tensor(f"blk.{layer}.{name}.bias", shape[:-1], full)
        if biased:
            yield Tensor(f"blk.{layer}.attn_sinks.weight", (heads,), full)


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def tile(type_: gguf.GGMLQuantizationType, dice: np.random.Generator) -> np.ndarray:
    """Return `TILE` random blocks of a type, ``[TILE, bytes]`` uint8."""
    size, width = gguf.GGML_QUANT_SIZES[type_]
    if size == 1 or type_ in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        values = dice.standard_normal((TILE, size), dtype=np.float32) * SCALE
        return np.asarray(gguf.quants.quantize(values, type_)).view(np.uint8).reshape(TILE, width)
    blocks = dice.integers(0, 256, (TILE, width), dtype=np.uint8)
    if type_ == gguf.GGMLQuantizationType.MXFP4:
        blocks[:, 0] = 120  # a power of two: 2^(120 - 127)
    elif type_.name in FACTORS:
        place, factors = FACTORS[type_.name]
        blocks[:, place : place + 2 * len(factors)] = np.array(factors, np.float16).view(np.uint8)
    else:
        sys.exit(f"{type_.name}: choose from {TYPES}")
    return blocks


def write(spec: ModelSpec, path: Path, type_: gguf.GGMLQuantizationType) -> None:
    """Write the GGUF of a model."""
    config: dict[str, Any] = {"num_key_value_heads": None} | spec.config
    kind = ARCHITECTURES.get(config["model_type"])
    if kind is None:
        sys.exit(f"{config['model_type']}: choose from {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(path, kind)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"] or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.get("rope_theta") or 150000.0))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5))
    if experts := _experts(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    vocab = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([str(number) for number in range(vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["1 0"])
    writer.add_eos_token_id(0)
    needed = list(tensors(config, type_))
    sizes = {}
    for tensor in needed:
        block, size = gguf.GGML_QUANT_SIZES[tensor.type]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        sizes[tensor.name] = int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), sizes[tensor.name], tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    dice = np.random.default_rng(0)
    tiles = {used: tile(used, dice).reshape(-1) for used in {tensor.type for tensor in needed}}
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor in needed:
        left, blocks = sizes[tensor.name], tiles[tensor.type]
        if len(tensor.shape) == 1 or tensor.name.endswith(".bias"):
            blocks = np.full(left // 4, tensor.name.endswith("norm.weight"), np.float32).view(np.uint8)
        start = int(dice.integers(TILE)) * gguf.GGML_QUANT_SIZES[tensor.type][1] % len(blocks)
        while left:
            part = blocks[start : start + left]
            file.write(part.data)
            left, start = left - len(part), 0
        writer.write_padding(file, sizes[tensor.name])
    writer.close()


def main() -> None:
    """Write the GGUF that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="name of the catalogue, folder or config.json")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_0", help=TYPES)
    asked = parser.parse_args()
    write(resolve(asked.model), asked.file, gguf.GGMLQuantizationType[asked.type])
    print(f"{asked.file}: {asked.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
