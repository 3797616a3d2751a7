"""Attention of recorded passes by zinfer's kernel: few rows, or sinks.

PyTorch's kernels leave most of the GPU idle where a row or two have many positions. Sinks are scores that a model has
learned, one a head (gpt-oss). They take their part of each softmax and have no value, so that a head may attend to
nothing. PyTorch's fused attention has no place for them.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_HEADS = 132  # heads of keys of all rows, at most, without sinks: as many as an H100 has multiprocessors
MAX_QUERIES = 64  # queries of a head of keys, at most
MIN_POSITIONS = 128  # without sinks
MAX_BYTES = 512  # of a key or value, at most: a tile has 64 of each


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `scaled_dot_product_attention` by torch alone, with `sinks` or without.

    These are ``[K, m]``; scores are in their type, as models choose it.
    """
    if sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=attn_mask, scale=scale)
    scores = query.to(sinks.dtype) @ keys.to(sinks.dtype).transpose(2, 3)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + attn_mask
    column = sinks[None, :, :, None].expand(len(query), -1, -1, 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return shares.to(values.dtype) @ values


def split_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `plain_attention`, by zinfer's kernel where that is faster. Query heads are ``[B, K, m, D]``, keys and
    values ``[B, K, n, ..]``, the bias expands to ``[B, K, m, n]``, `sinks` are ``[K, m]``;
    `zinfer.engine.triton_check` must have found that kernels run."""
    rows, heads, count, size = query.shape
    largest = max(size, values.shape[-1]) * query.element_size()
    dense = keys.stride(-1) == 1 == values.stride(-1) and (attn_mask is None or attn_mask.stride(-1) == 1)
    if (
        (sinks is None and (rows * heads > MAX_HEADS or keys.shape[2] < MIN_POSITIONS))
        or count > MAX_QUERIES or largest > MAX_BYTES
        or not dense or not query.dtype == keys.dtype == values.dtype or not query.is_floating_point()
    ):  # fmt: skip
        return plain_attention(query, keys, values, attn_mask, scale, sinks)
    from zinfer.engine.stream.attention_kernel import attend

    factor = size**-0.5 if scale is None else scale
    return attend(query, keys, values, attn_mask, factor, None if sinks is None else sinks.contiguous())
