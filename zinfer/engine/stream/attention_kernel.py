# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels of attention for few queries: the whole GPU reads their keys.

PyTorch's attention with a mask gives each head of each row to one multiprocessor, which reads the keys one block after
the other. A row or two leave most of the GPU idle, and a step takes longer the longer the row is. This kernel
splits a head's positions among programs (as flash-decoding does, Dao et al. 2023); `_combine` adds their results, each
by the largest score that it saw. Scores and sums are in float32, weights are rounded to the type of the values. Query
heads that share keys are rows of one product, so keys and values are read once for all of them. Where a program has all
positions of a head, it is the only launch.

With TRITON_INTERPRET=1 in the environment the kernels run on a CPU.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

BLOCK = 64  # positions of a tile
PROGRAMS = 264  # programs of a launch, at least, if there are positions for them: two a multiprocessor of an H100
MAX_SPLITS = 64  # programs of a head, at most: what `_combine` adds at once
WARPS = 4
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOWEST = tl.constexpr(-3.0e38)  # score of a position that is not there


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of `query` to `keys` and `values`. Of `query` ``[B, K, m, D]``, `keys` ``[B, K, n, D]`` and
    `values` ``[B, K, n, E]`` it is ``[B, K, m, E]``. `bias`, which expands to ``[B, K, m, n]``, is added to the scores;
    it must be finite. `sinks`, contiguous ``[K, m]``, are scores without a value.
    """
    rows, heads, count, size = query.shape
    positions, width = values.shape[2:]
    blocks = triton.cdiv(positions, BLOCK)
    splits = max(1, min(blocks, triton.cdiv(PROGRAMS, rows * heads), MAX_SPLITS))
    steps = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, steps)
    out = torch.empty((rows, heads, count, width), dtype=query.dtype, device=query.device)
    partial = sums = out
    if splits > 1:
        partial = torch.empty((rows * heads, splits, count, width), dtype=torch.float32, device=query.device)
        sums = torch.empty((2, rows * heads, splits, count), dtype=torch.float32, device=query.device)
    bias = None if bias is None else bias.expand(rows, heads, count, positions)
    _attend[(rows * heads, splits)](
        query.contiguous(),
        keys,
        values,
        bias,
        sinks,
        partial,
        sums,
        scale,
        positions,
        steps,
        keys.stride()[:3],
        values.stride()[:3],
        None if bias is None else bias.stride()[:3],
        HEADS=heads,
        COUNT=count,
        SIZE=size,
        WIDTH=width,
        ALONE=splits == 1,
        ASKED=max(16, triton.next_power_of_2(count)),
        SIZE_BLOCK=max(16, triton.next_power_of_2(size)),
        WIDTH_BLOCK=max(16, triton.next_power_of_2(width)),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    if splits > 1:
        _combine[(rows * heads, count)](
            partial,
            sums,
            out,
            splits,
            COUNT=count,
            WIDTH=width,
            SPLITS=triton.next_power_of_2(splits),
            BLOCK=triton.next_power_of_2(width),
            num_warps=WARPS,
        )
    return out


@triton.jit(do_not_specialize=["steps"])
def _attend(
    query,
    keys,
    values,
    bias,
    sinks,
    partial,
    sums,
    scale,
    positions,
    steps,
    keys_strides,
    values_strides,
    bias_strides,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALONE: tl.constexpr,
    ASKED: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend to `steps` tiles of positions for one head of a row. Without others (`ALONE`) a program divides its sums;
    else it keeps them with the largest score and the sum of weights. The first program has the sinks, too."""
    TYPE: tl.constexpr = values.dtype.element_ty
    pair = tl.program_id(0)
    split = tl.program_id(1)
    row = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    asked = tl.arange(0, ASKED)
    part = tl.arange(0, SIZE_BLOCK)
    column = tl.arange(0, WIDTH_BLOCK)
    element = asked[:, None] * SIZE + part[None, :]
    inside = (asked < COUNT)[:, None] & (part < SIZE)[None, :]
    states = tl.load(query + pair.to(tl.int64) * COUNT * SIZE + element, mask=inside, other=0.0)
    keys += row * keys_strides[0] + head * keys_strides[1]
    values += row * values_strides[0] + head * values_strides[1]
    if bias is not None:
        bias += row * bias_strides[0] + head * bias_strides[1]
    largest = tl.full([ASKED], LOWEST, tl.float32)
    total = tl.zeros([ASKED], tl.float32)
    mixed = tl.zeros([ASKED, WIDTH_BLOCK], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head * COUNT + asked, mask=(asked < COUNT) & (split == 0), other=LOWEST)
        largest = largest.to(tl.float32)
        total += tl.where(split == 0, 1.0, 0.0)
    first = split * steps
    for step in range(first, tl.minimum(first + steps, tl.cdiv(positions, BLOCK))):
        position = step * BLOCK + tl.arange(0, BLOCK)
        valid = position < positions
        offset = position.to(tl.int64)
        tile = tl.load(
            keys + offset[None, :] * keys_strides[2] + part[:, None],
            mask=valid[None, :] & (part < SIZE)[:, None],
            other=0.0,
        )
        score = _added(states, tile, tl.zeros([ASKED, BLOCK], tl.float32)) * scale
        if bias is not None:
            where = bias + asked[:, None] * bias_strides[2] + position[None, :]
            score += tl.load(where, mask=(asked < COUNT)[:, None] & valid[None, :], other=0.0).to(tl.float32)
        score = tl.where(valid[None, :], score, LOWEST)
        higher = tl.maximum(largest, tl.max(score, 1))
        weight = tl.where(valid[None, :], tl.exp(score - higher[:, None]), 0.0)
        fade = tl.exp(largest - higher)
        content = tl.load(
            values + offset[:, None] * values_strides[2] + column[None, :],
            mask=valid[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total = total * fade + tl.sum(weight, 1)
        mixed = _added(rounded(weight, TYPE), content, mixed * fade[:, None])
        largest = higher
    entry = (pair * tl.num_programs(1) + split).to(tl.int64) * COUNT + asked
    if ALONE:
        mixed = rounded(mixed / total[:, None], partial.dtype.element_ty)
    else:
        tl.store(sums + entry, largest, mask=asked < COUNT)
        tl.store(sums + tl.num_programs(0) * tl.num_programs(1) * COUNT + entry, total, mask=asked < COUNT)
    element = entry[:, None] * WIDTH + column[None, :]
    tl.store(partial + element, mixed, mask=(asked < COUNT)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _added(states, weight, total):
    """Return `total` plus the product, in full float32; the interpreter multiplies no bf16."""
    if INTERPRETED:
        return tl.dot(states.to(tl.float32), weight.to(tl.float32), total)
    return tl.dot(states, weight, total, input_precision="ieee")


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial, sums, out, splits, COUNT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Combine the splits of a head for one query."""
    pair = tl.program_id(0).to(tl.int64)
    asked = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    entry = (pair * splits + split) * COUNT + asked
    score = tl.load(sums + entry, mask=split < splits, other=LOWEST)
    share = tl.where(split < splits, tl.exp(score - tl.max(score, 0)), 0.0)
    weight = tl.load(sums + tl.num_programs(0) * splits * COUNT + entry, mask=split < splits, other=0.0)
    inside = (split < splits)[:, None] & (column < WIDTH)[None, :]
    content = tl.load(partial + entry[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    mixed = tl.sum(content * share[:, None], 0) / tl.sum(weight * share, 0)
    element = (pair * COUNT + asked) * WIDTH + column
    tl.store(out + element, rounded(mixed, out.dtype.element_ty), mask=column < WIDTH)
