# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernel that turns queries and keys by their positions.

Each value of the second half of a head is turned against the one at the same place of the first half. Products and
sums are rounded where `transformers` rounds them. With TRITON_INTERPRET=1 in the environment it runs on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

HEADS = 8  # of a program
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, turned.

    `query` is ``[B, H, n, D]``, `keys` ``[B, K, n, D]``. `cos` and `sin` are ``[B, n, D]``, or ``[B, n, D / 2]`` for
    both halves; the last dimension of all is contiguous.
    """
    rows, heads, count, size = query.shape
    turned = torch.empty_like(query), torch.empty_like(keys)
    blocks = triton.cdiv(heads, HEADS)
    _rotate[(rows * count, blocks + triton.cdiv(keys.shape[1], HEADS))](
        query,
        keys,
        cos,
        sin,
        *turned,
        count,
        blocks,
        heads,
        keys.shape[1],
        *query.stride()[:3],
        *keys.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        *turned[0].stride()[:3],
        *turned[1].stride()[:3],
        HALF=size // 2,
        SECOND=cos.shape[-1] - size // 2,
        TYPE=_TYPES[query.dtype],
        BLOCK=triton.next_power_of_2(size // 2),
        HEADS=HEADS,
        num_warps=4,
    )
    return turned


@triton.jit
def _rotate(
    query,
    keys,
    cos,
    sin,
    query_out,
    keys_out,
    count,
    blocks,
    heads,
    key_heads,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    query_out_row,
    query_out_head,
    query_out_token,
    keys_out_row,
    keys_out_head,
    keys_out_token,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn `HEADS` heads of a token: those of its query in the first `blocks` programs, else those of its keys."""
    row = (tl.program_id(0) // count).to(tl.int64)
    token = (tl.program_id(0) % count).to(tl.int64)
    block = tl.program_id(1)
    cos += row * cos_row + token * cos_token
    sin += row * sin_row + token * sin_token
    if block < blocks:
        source = query + row * query_row + token * query_token
        out = query_out + row * query_out_row + token * query_out_token
        _heads(source, out, cos, sin, block, heads, query_head, query_out_head, HALF, SECOND, TYPE, BLOCK, HEADS)
    else:
        source = keys + row * key_row + token * key_token
        out = keys_out + row * keys_out_row + token * keys_out_token
        block -= blocks
        _heads(source, out, cos, sin, block, key_heads, key_head, keys_out_head, HALF, SECOND, TYPE, BLOCK, HEADS)


@triton.jit
def _heads(
    source,
    out,
    cos,
    sin,
    block,
    heads,
    stride,
    out_stride,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    head = block * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (column < HALF)[None, :]
    offset = head.to(tl.int64)[:, None] * stride + column[None, :]
    first = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    value = _turned(first, -second, cos + column, sin + column, column < HALF, TYPE)
    other = _turned(second, first, cos + SECOND + column, sin + SECOND + column, column < HALF, TYPE)
    offset = head.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + offset, value, mask=inside)
    tl.store(out + offset + HALF, other, mask=inside)


@triton.jit
def _turned(value, other, cos, sin, inside, TYPE: tl.constexpr):
    """Return ``value * cos + other * sin``, each product rounded."""
    cosine = tl.load(cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    straight = rounded(value * cosine, TYPE).to(tl.float32)
    return rounded(straight + rounded(other * sine, TYPE).to(tl.float32), TYPE)
