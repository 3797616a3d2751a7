"""Attention of a recorded pass: by zinfer's kernel where a row or two would leave most of the GPU idle."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_HEADS = 132  # heads of keys of all rows, at most: as many as an H100 has multiprocessors
MAX_QUERIES = 64  # queries of a head of keys, at most
MIN_POSITIONS = 128
MAX_BYTES = 512  # of a key or value, at most: a tile has 64 of each


def split_attention(
    query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute `scaled_dot_product_attention`, by zinfer's kernel where that is faster. Query heads are ``[B, K, m,
    D]``, keys and values ``[B, K, n, ..]``, the bias expands to ``[B, K, m, n]``; `zinfer.engine.triton_check` must
    have found that kernels run."""
    rows, heads, count, size = query.shape
    largest = max(size, values.shape[-1]) * query.element_size()
    dense = keys.stride(-1) == 1 == values.stride(-1) and (attn_mask is None or attn_mask.stride(-1) == 1)
    if (
        rows * heads > MAX_HEADS or count > MAX_QUERIES or keys.shape[2] < MIN_POSITIONS or largest > MAX_BYTES
        or not dense or not query.dtype == keys.dtype == values.dtype or not query.is_floating_point()
    ):  # fmt: skip
        return scaled_dot_product_attention(query, keys, values, attn_mask=attn_mask, scale=scale)
    from zinfer.engine.stream.attention_kernel import attend

    return attend(query, keys, values, attn_mask, size**-0.5 if scale is None else scale)
