"""BLOOM's attention as other models have it: by one function, with ALiBi as a bias.

`transformers` multiplies, adds and normalises scores of all heads and positions in memory, one kernel after the other,
and GELU likewise. The adapter replaces these forward passes on a model's instances.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomGelu, build_alibi_tensor

NAME = "zinfer"  # of the attention function, `zinfer.engine.stream.attention`
BIAS_BYTES = 256 << 20  # a fused kernel gets ALiBi and mask of some heads at a time, in memory of about this size


def adapt(layers: nn.ModuleList) -> Tensor | None:
    """Adapt BLOOM's layers; return the slopes of ALiBi, float32 ``[heads]`` on the CPU, None for other models."""
    modules = [module for layer in layers for module in layer.modules()]
    attentions = [module for module in modules if isinstance(module, BloomAttention)]
    if not attentions or any(module.pretraining_tp > 1 and module.slow_but_exact for module in attentions):
        return None
    for module in attentions:
        module.forward = MethodType(_attend, module)
    for module in modules:
        if isinstance(module, BloomGelu):
            module.forward = partial(gelu, approximate="tanh")
    slopes: Tensor = build_alibi_tensor(torch.ones(1, 2), attentions[0].num_heads, torch.float32)[:, 0, 1]
    return slopes


def _attend(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Compute `BloomAttention.forward`."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    bias = alibi.view(len(query), module.num_heads, 1, -1)
    if hasattr(key, "zinfer_states"):
        by_name = ALL_ATTENTION_FUNCTIONS[NAME]
        mixed, _ = by_name(
            module, query, key, value, attention_mask, scaling=module.inv_norm_factor, position_bias=bias
        )
    else:
        mixed = attend_with_bias(query, key, value, attention_mask, bias, module.inv_norm_factor).transpose(1, 2)
    return residual + module.dense(mixed.flatten(2)), None


def attend_with_bias(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_bias: Tensor, scale: float
) -> Tensor:
    """Return attention with a mask and a bias of keys. It is ``[B, heads, n, D]``, the mask ``[B, 1, n, m]``, the bias
    ``[B, heads, 1, m]``. Scores of all heads never exist at once, nor do their biases."""
    if mask is None:
        return scaled_dot_product_attention(query, key, value, position_bias, scale=scale)
    length = key.shape[2]
    room = -(-length // 8) * 8  # kernels read a bias in vectors
    of_head = len(query) * query.shape[2] * room * query.element_size()
    at_once, mixed = max(1, BIAS_BYTES // of_head), []
    for first in range(0, query.shape[1], at_once):
        heads = slice(first, first + at_once)
        some = query[:, heads]
        bias = some.new_empty((*some.shape[:3], room))
        bias[..., length:] = 0
        torch.add(position_bias[:, heads], mask, out=bias[..., :length])
        mixed.append(
            scaled_dot_product_attention(some, key[:, heads], value[:, heads], bias[..., :length], scale=scale)
        )
    return torch.cat(mixed, dim=1)
