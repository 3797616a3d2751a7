# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels of decode steps: products, norms, new keys and values.

Such a step of a token or two spends more time between kernels, and in those too small for a GPU, than on reading
weights. cuBLAS splits a token's product among programs, and adds their sums in a second launch; queries, keys and
values are three of them. Here matrices that read the same states are one launch: each program multiplies a few rows.
Sums are in float32, in a fixed order. With TRITON_INTERPRET=1 in the environment the kernels run on a CPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

MAX_FUSED = 3  # matrices of a launch
PROGRAMS = 528  # of a product, at least, if it has the rows: four a multiprocessor of an H100
ROWS = 4  # of a program, at most
TILE, LONG = 4096, 8192  # products of a program at a time, 32 a thread; as many columns have twice as many


def products(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the products of `states` ``[tokens, K]`` with up to three matrices.

    These are ``[N, K]``, all contiguous and of one type, with a bias ``[N]`` each or none. Results are ``[tokens, N]``.
    """
    tokens, columns = states.shape
    outputs = [states.new_empty(tokens, len(weight)) for weight in weights]
    padded = triton.next_power_of_2(tokens)
    rows = sum(map(len, weights)) // PROGRAMS
    block = min(ROWS, max(1, triton.next_power_of_2(rows + 1) // 2))
    missing = MAX_FUSED - len(weights)
    counts = [*map(len, weights), *[0] * missing]
    _products[(sum(triton.cdiv(count, block) for count in counts),)](
        states,
        *weights,
        *[weights[0]] * missing,
        *biases,
        *[biases[0]] * missing,
        *outputs,
        *[outputs[0]] * missing,
        *counts,
        tokens,
        COLUMNS=columns,
        TOKENS=padded,
        BLOCK_ROWS=block,
        BLOCK_COLUMNS=min(triton.next_power_of_2(columns), (TILE if columns < LONG else 2 * TILE) // (block * padded)),
        num_warps=4,
    )
    return outputs


def normed(states: Tensor, weight: Tensor, eps: float, after: bool) -> Tensor:
    """Return the RMS norm of `states` ``[.., H]``, times `weight` ``[H]``.

    If `after`, it is rounded before it is multiplied, too.
    """
    size = states.shape[-1]
    states = states.contiguous()
    out = torch.empty_like(states, dtype=torch.promote_types(states.dtype, weight.dtype) if after else states.dtype)
    block = triton.next_power_of_2(size)
    _normed[(states.numel() // size,)](
        states, weight, out, eps, SIZE=size, AFTER=after, BLOCK=block, num_warps=min(16, max(1, block // 256))
    )
    return out


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Put new keys and values into their slots.

    New ones are ``[B, K, n, ..]``, `slots` ``[n]``, the memories ``[B, K, room, ..]``; the last dimension of all is
    contiguous.
    """
    rows, heads, count, size = new_keys.shape
    width = new_values.shape[-1]
    _append[(rows * heads * count, 2)](
        keys,
        values,
        new_keys,
        new_values,
        slots,
        heads,
        count,
        *keys.stride()[:3],
        *values.stride()[:3],
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        SIZE=size,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(max(size, width)),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["rows0", "rows1", "rows2", "tokens"])
def _products(
    states,
    weights0,
    weights1,
    weights2,
    bias0,
    bias1,
    bias2,
    out0,
    out1,
    out2,
    rows0,
    rows1,
    rows2,
    tokens,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Multiply a block of rows of one of the matrices."""
    block = tl.program_id(0)
    second = tl.cdiv(rows0, BLOCK_ROWS)
    third = second + tl.cdiv(rows1, BLOCK_ROWS)
    if block < second:
        _product(states, weights0, bias0, out0, rows0, tokens, block, COLUMNS, TOKENS, BLOCK_ROWS, BLOCK_COLUMNS)
    elif block < third:
        block -= second
        _product(states, weights1, bias1, out1, rows1, tokens, block, COLUMNS, TOKENS, BLOCK_ROWS, BLOCK_COLUMNS)
    else:
        block -= third
        _product(states, weights2, bias2, out2, rows2, tokens, block, COLUMNS, TOKENS, BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def _product(
    states,
    weights,
    bias,
    out,
    rows,
    tokens,
    block,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK_COLUMNS)
    weights += row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    states += token[:, None] * COLUMNS + column[None, :]
    total = tl.zeros([TOKENS, BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, COLUMNS, BLOCK_COLUMNS):
        inside = (first + column < COLUMNS)[None, :]
        tile = tl.load(weights + first, mask=(row < rows)[:, None] & inside, other=0.0, eviction_policy="evict_first")
        state = tl.load(states + first, mask=(token < tokens)[:, None] & inside, other=0.0)
        total += tile.to(tl.float32)[None, :, :] * state.to(tl.float32)[:, None, :]
    value = tl.sum(total, 2)
    if bias is not None:
        value += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    target = out + token[:, None] * rows + row[None, :]
    tl.store(target, rounded(value, out.dtype.element_ty), mask=(token < tokens)[:, None] & (row < rows)[None, :])


@triton.jit
def _normed(states, weight, out, eps, SIZE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(states + row * SIZE + column, mask=inside, other=0.0)
    TYPE: tl.constexpr = states.dtype.element_ty
    value = value.to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    if AFTER:
        value = rounded(value, TYPE).to(tl.float32)
    value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def _append(
    keys,
    values,
    new_keys,
    new_values,
    slots,
    heads,
    count,
    keys_row,
    keys_head,
    keys_slot,
    values_row,
    values_head,
    values_slot,
    new_keys_row,
    new_keys_head,
    new_keys_token,
    new_values_row,
    new_values_head,
    new_values_token,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one head's key of a token, or its value."""
    token = tl.program_id(0) % count
    head = (tl.program_id(0) // count % heads).to(tl.int64)
    row = (tl.program_id(0) // count // heads).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        source = new_keys + row * new_keys_row + head * new_keys_head + token * new_keys_token
        out = keys + row * keys_row + head * keys_head + slot * keys_slot
        tl.store(out + column, tl.load(source + column, mask=column < SIZE), mask=column < SIZE)
    else:
        source = new_values + row * new_values_row + head * new_values_head + token * new_values_token
        out = values + row * values_row + head * values_head + slot * values_slot
        tl.store(out + column, tl.load(source + column, mask=column < WIDTH), mask=column < WIDTH)
