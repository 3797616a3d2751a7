"""Decoder layers as TensorRT networks: BLOOM, Llama, Mistral, Qwen2.

The names and shapes of parameters come from the `transformers` model, which also computes what surrounds the layers. A
parameter of a layer that the network does not use is an error: an unknown variant is refused, not approximated.

Inputs, with P cached positions, S new ones and T = P + S: ``hidden [B, S, H]``; ``bias [B, 1, S, T]``, added to
attention scores; ``cos`` and ``sin [B, 1, S, D]``, or for BLOOM ``alibi [B, heads, 1, T]``; ``past_{key,value}_i [B,
kv_heads, C, D]``, the KV cache, of which the first P positions are read. Outputs: ``output [B, S, H]``, and
``{key,value}_i [B, kv_heads, S, D]``, for the caller to append. So a pass copies each layer's cache once, inside the
GPU, to put the new positions behind it, and writes nothing of it back.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.core.model import ModelSpec
from zinfer.engine import EngineError
from zinfer.engine.tensorrt.library import Library
from zinfer.engine.tensorrt.ops import Net, Node

NETWORK_VERSION = 2  # part of a plan's key; raise it when the code in this folder changes what a network computes


def make_network(
    library: Library,
    network: Any,
    model: PreTrainedModel,
    spec: ModelSpec,
    weights: dict[str, Tensor],
    max_seq_len: int,
) -> Net:
    """Fill `network` with the decoder layers of `model`. Sequences have up to `max_seq_len` tokens. `weights` are the
    layers' parameters, on the CPU, and must outlive the returned `Net`. Raises EngineError for a model that differs in
    any detail from the decoders above."""
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
    hidden = net.input("hidden", net.dtype, ("B", "S", model.get_input_embeddings().weight.shape[1]))
    net.output("output", body(net, hidden, model, spec, max_seq_len))
    if net.unused:
        raise EngineError(
            f"{spec.name} has parameters that the {spec.architecture} network does not use: {min(net.unused)}"
            + (f" and {len(net.unused) - 1} more" if len(net.unused) > 1 else "")
        )
    return net


class Attention:
    """Attention of all layers of a network. Queries that share a key are rows of one product."""

    def __init__(self, net: Net, spec: ModelSpec, alibi: bool = False) -> None:
        self.net, self.spec = net, spec
        bias = net.input("bias", net.dtype, ("B", 1, "S", "T"))
        total, new = (net.gather(net.shape(bias), net.constant([axis]), 0) for axis in (3, 2))
        self._past = net.binary("SUB", total, new)
        if alibi:
            bias = net.add(net.input("alibi", net.dtype, ("B", spec.num_heads, 1, "T")), bias)
        groups = spec.num_heads // spec.num_kv_heads
        self.bias = net.concat([bias] * groups, 2) if groups > 1 else bias

    def __call__(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """Add attention of `layer`; return ``[B, S, heads · D]``. Queries are ``[B, heads, S, D]``, new keys and values
        ``[B, kv_heads, S, D]``."""
        net, spec = self.net, self.spec
        cached = []
        for name, new in (("key", key), ("value", value)):
            past = net.input(f"past_{name}_{layer}", net.dtype, ("B", spec.num_kv_heads, "C", spec.head_dim))
            net.output(f"{name}_{layer}", new)
            cached.append(net.concat([net.head(past, 2, self._past), new], 2))
        query = net.multiply(query, net.scalar(1 / sqrt(spec.head_dim), 4))
        rows = net.shuffle(query, (0, spec.num_kv_heads, -1, spec.head_dim))
        scores = net.add(net.product(rows, cached[0], turned=True), self.bias)
        mixed = net.product(net.softmax(scores), cached[1])
        heads = net.shuffle(mixed, (0, spec.num_heads, -1, spec.head_dim), after=(0, 2, 1, 3))
        return net.shuffle(heads, (0, 0, spec.num_heads * spec.head_dim))


def _heads(net: Net, x: Node, heads: int, spec: ModelSpec) -> Node:
    """Reshape ``[B, S, heads · D]`` to ``[B, heads, S, D]``."""
    return net.shuffle(x, (0, 0, heads, spec.head_dim), after=(0, 2, 1, 3))


def _require(holds: bool, spec: ModelSpec, what: str) -> None:
    if not holds:
        raise EngineError(f"{spec.name}: the TensorRT network does not support {what}; use --engine stream")


def _bloom(net: Net, hidden: Node, model: PreTrainedModel, spec: ModelSpec, _max_seq_len: int) -> Node:
    config, eps = model.config, model.config.layer_norm_epsilon
    attend = Attention(net, spec, alibi=True)
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
    return hidden


def _llama(net: Net, hidden: Node, model: PreTrainedModel, spec: ModelSpec, max_seq_len: int) -> Node:
    config, eps = model.config, model.config.rms_norm_eps
    _require(config.hidden_act in ("silu", "swish"), spec, f"the activation {config.hidden_act}")
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",)):
        _require(max_seq_len <= window, spec, f"a sliding window ({window}) shorter than --max-seq-len {max_seq_len}")
    attend, rotate = Attention(net, spec), _rotary(net, model, spec)
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
    return hidden


def _rotary(net: Net, model: PreTrainedModel, spec: ModelSpec) -> Callable[[Node], Node]:
    """Return the rotary embedding, a function of ``[B, heads, S, D]``."""
    module = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    half = spec.head_dim // 2
    _require(module.inv_freq.numel() == half, spec, "a rotary embedding of part of the head")
    cos, sin = (net.input(name, net.dtype, ("B", 1, "S", spec.head_dim)) for name in ("cos", "sin"))
    swapped = net.constant([*range(half, 2 * half), *range(half)])
    signs = net.constant(torch.tensor([-1.0] * half + [1.0] * half, dtype=net.dtype), 4)

    def rotate(x: Node) -> Node:
        turned = net.multiply(net.gather(x, swapped, 3), signs)
        return net.add(net.multiply(x, cos), net.multiply(turned, sin))

    return rotate


Body = Callable[[Net, Node, PreTrainedModel, ModelSpec, int], Node]
BODIES: dict[str, Body] = {"bloom": _bloom, "llama": _llama, "mistral": _llama, "qwen2": _llama}
