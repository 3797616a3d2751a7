"""Decoders as TensorRT networks: BLOOM, Llama, Mistral, Qwen2.

A decoder's shape and the names of its parameters come from its `transformers` model. A parameter that the network does
not use is an error: an unknown variant is refused, not approximated.

The inputs, besides the attention's, are ``token_ids [B, S]``, ``positions [B, S]`` for models with position embeddings,
and ``last [1]``, the index of the last token. The output is ``logits [B, V]``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.core.model import ModelSpec
from zinfer.engine import EngineError
from zinfer.engine.tensorrt.attention import Attention
from zinfer.engine.tensorrt.library import Library
from zinfer.engine.tensorrt.ops import Net, Node

NETWORK_VERSION = 1  # part of a plan's key; raise it when the code in this folder changes what a network computes


def make_network(
    library: Library,
    network: Any,
    model: PreTrainedModel,
    spec: ModelSpec,
    weights: dict[str, Tensor],
    max_seq_len: int,
) -> Net:
    """Fill `network` with the decoder of `model`. `model` is made by `zinfer.checkpoint.architecture.empty_model`, for
    sequences of up to `max_seq_len` tokens. `weights` are its parameters, on the CPU, and must outlive the returned
    `Net`. Raises EngineError for a model that differs in any detail from the decoders above."""
    body = BODIES.get(spec.architecture)
    if body is None:
        raise EngineError(
            f"no TensorRT network for {spec.architecture} models; there is one for {', '.join(BODIES)}. "
            "Use --engine stream, which runs any decoder"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and max_seq_len > limit:
        raise EngineError(f"--max-seq-len {max_seq_len} is more than the {limit} positions of {spec.name}")
    net = Net(library, network, weights, getattr(torch, spec.dtype))
    hidden = body(net, model, spec, max_seq_len)
    last = net.gather(hidden, net.input("last", torch.int32, (1,)), 1)
    name = "lm_head" if net.has("lm_head.weight") else _embedding(model).removesuffix(".weight")
    width = model.get_input_embeddings().weight.shape[1]
    net.output("logits", net.linear(net.shuffle(last, (0, width)), name))  # two dimensions, like a tied embedding
    if net.unused:
        raise EngineError(
            f"{spec.name} has parameters that the {spec.architecture} network does not use: {min(net.unused)}"
            + (f" and {len(net.unused) - 1} more" if len(net.unused) > 1 else "")
        )
    return net


def _embedding(model: PreTrainedModel) -> str:
    """Return the name of the token embedding, also a tied head."""
    table = model.get_input_embeddings().weight
    return next(str(name) for name, parameter in model.named_parameters() if parameter is table)


def _embedded(net: Net, model: PreTrainedModel) -> Node:
    token_ids = net.input("token_ids", torch.int32, ("B", "S"))
    return net.gather(net.parameter(_embedding(model), 2), token_ids, 0)


def _heads(net: Net, x: Node, heads: int, spec: ModelSpec) -> Node:
    """Reshape ``[B, S, heads · D]`` to ``[B, heads, S, D]``."""
    return net.shuffle(x, (0, 0, heads, spec.head_dim), after=(0, 2, 1, 3))


def _require(holds: bool, spec: ModelSpec, what: str) -> None:
    if not holds:
        raise EngineError(f"{spec.name}: the TensorRT network does not support {what}; use --engine stream")


def _bloom(net: Net, model: PreTrainedModel, spec: ModelSpec, max_seq_len: int) -> Node:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    config, eps = model.config, model.config.layer_norm_epsilon
    slopes = build_alibi_tensor(torch.ones(1, 2), spec.num_heads, torch.float32)[:, 0, 1]  # ALiBi of key position 1
    attend = Attention(net, spec, max_seq_len, slopes)
    hidden = net.layer_norm(_embedded(net, model), "transformer.word_embeddings_layernorm", eps)
    for index in range(spec.num_layers):
        prefix = f"transformer.h.{index}"
        normed = net.layer_norm(hidden, f"{prefix}.input_layernorm", eps)
        residual = normed if config.apply_residual_connection_post_layernorm else hidden
        fused = net.linear(normed, f"{prefix}.self_attention.query_key_value")
        parts = net.shuffle(fused, (0, 0, spec.num_heads, 3, spec.head_dim))
        query, key, value = (net.shuffle(net.pick(parts, part, 3), before=(0, 2, 1, 3)) for part in range(3))
        mixed = attend(index, query, key, value)
        hidden = net.add(net.linear(mixed, f"{prefix}.self_attention.dense"), residual)
        normed = net.layer_norm(hidden, f"{prefix}.post_attention_layernorm", eps)
        residual = normed if config.apply_residual_connection_post_layernorm else hidden
        inner = net.activation(net.linear(normed, f"{prefix}.mlp.dense_h_to_4h"), "GELU_TANH")
        hidden = net.add(net.linear(inner, f"{prefix}.mlp.dense_4h_to_h"), residual)
    return net.layer_norm(hidden, "transformer.ln_f", eps)


def _llama(net: Net, model: PreTrainedModel, spec: ModelSpec, max_seq_len: int) -> Node:
    config, eps = model.config, model.config.rms_norm_eps
    _require(config.hidden_act in ("silu", "swish"), spec, f"the activation {config.hidden_act}")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    _require(
        kind in ("default", "linear", "llama3", "yarn"), spec, f"rotary embedding {kind}, which changes with length"
    )
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",)):
        _require(max_seq_len <= window, spec, f"a sliding window ({window}) shorter than --max-seq-len {max_seq_len}")
    attend = Attention(net, spec, max_seq_len)
    rotate = _rotary(net, model, spec)
    hidden = _embedded(net, model)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        normed = net.rms_norm(hidden, f"{prefix}.input_layernorm", eps)
        query, key, value = (
            _heads(net, net.linear(normed, f"{prefix}.self_attn.{part}_proj"), heads, spec)
            for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads))
        )
        mixed = attend(index, rotate(query), rotate(key), value)
        hidden = net.add(hidden, net.linear(mixed, f"{prefix}.self_attn.o_proj"))
        normed = net.rms_norm(hidden, f"{prefix}.post_attention_layernorm", eps)
        gate = net.linear(normed, f"{prefix}.mlp.gate_proj")
        swish = net.multiply(gate, net.activation(gate, "SIGMOID"))
        gated = net.multiply(swish, net.linear(normed, f"{prefix}.mlp.up_proj"))
        hidden = net.add(hidden, net.linear(gated, f"{prefix}.mlp.down_proj"))
    return net.rms_norm(hidden, "model.norm", eps)


def _rotary(net: Net, model: PreTrainedModel, spec: ModelSpec) -> Callable[[Node], Node]:
    """Return the rotary embedding, a function of ``[B, heads, S, D]``."""
    module = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    half = spec.head_dim // 2
    _require(module.inv_freq.numel() == half, spec, "a rotary embedding of part of the head")
    positions = net.cast(net.input("positions", torch.int32, ("B", "S")), torch.float32)
    angles = net.multiply(net.shuffle(positions, (0, 1, -1, 1)), net.constant(module.inv_freq.float().cpu(), 4))
    both = net.concat([angles, angles], 3)
    scale = net.scalar(module.attention_scaling, 4, torch.float32)
    cos, sin = (net.cast(net.multiply(net.unary(both, name), scale), net.dtype) for name in ("COS", "SIN"))
    swapped = net.constant([*range(half, 2 * half), *range(half)])
    signs = net.constant(torch.tensor([-1.0] * half + [1.0] * half, dtype=net.dtype), 4)

    def rotate(x: Node) -> Node:
        turned = net.multiply(net.gather(x, swapped, 3), signs)
        return net.add(net.multiply(x, cos), net.multiply(turned, sin))

    return rotate


Body = Callable[[Net, PreTrainedModel, ModelSpec, int], Node]
BODIES: dict[str, Body] = {"bloom": _bloom, "llama": _llama, "mistral": _llama, "qwen2": _llama}
