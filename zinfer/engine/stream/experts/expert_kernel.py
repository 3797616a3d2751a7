# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels that compute routed experts for a few tokens.

A pair is a token and one of its experts. `_multiply` multiplies each pair's hidden states with its expert's matrix, as
many rows at a time as make a tile of some 8 KiB; the weights are read once, 16 bytes a thread, and several programs on
each multiprocessor keep some 64 KiB of them in flight. Pairs are the fastest axis of the grid: pairs that share an
expert read a tile at about the same time, so that it comes from the L2 cache for all but one. No row is sorted, padded,
or moved, and the host never waits for the router, so a CUDA graph can hold the kernels.

Sums are in float32, without atomic additions: columns that are split among programs give partial sums, which `_combine`
adds in a fixed order. Results are rounded where `transformers` rounds them: after each matrix, bias, activation, gate
and weight.

With TRITON_INTERPRET=1 in the environment the kernels run on a CPU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.experts.modules import Gate
from zinfer.engine.stream.weights.expand import TYPES, rounded

TILE = 4096  # weights of a tile: 32 a thread, which leaves registers for their sums and for 4 to 8 programs at a time
WARPS = 4
MAX_LENGTH = 1024  # weights along a tile's contiguous side: as many as all threads read at 16 bytes each
MIN_PROGRAMS = 4096  # of a launch, if they have enough to read: four waves of an H100
MIN_READ = 16384  # weights of a program where columns are split
COMBINED, ADDED = 256, 4096  # rows of a program that adds partial sums, and its values, at most


@dataclass(frozen=True)
class Tiles:
    """Division of an expert's matrix into tiles, and among programs."""

    rows: int
    columns: int
    steps: int  # tiles of a program, one after the other
    splits: int  # programs that share a block of rows

    @classmethod
    def of(cls, rows: int, columns: int, pairs: int, transposed: bool) -> "Tiles":
        """Choose tiles for `pairs` pairs."""
        contiguous, other = (rows, columns) if transposed else (columns, rows)
        length = _divisor(contiguous, MAX_LENGTH if not transposed else MAX_LENGTH // 8)
        count = min(TILE // length, triton.next_power_of_2(other))
        tile_rows, tile_columns = (length, count) if transposed else (count, length)
        blocks, steps = triton.cdiv(rows, tile_rows) * pairs, triton.cdiv(columns, tile_columns)
        min_steps = max(1, MIN_READ // (tile_rows * tile_columns))
        splits = max(1, min(triton.cdiv(MIN_PROGRAMS, blocks), steps // min_steps))
        each = triton.cdiv(steps, splits)
        return cls(tile_rows, tile_columns, each, triton.cdiv(steps, each))


def _divisor(size: int, limit: int) -> int:
    """Return the length of a tile's side, a power of two. It is the largest one up to `limit` that divides `size`, or
    where that is small the next one above `size`, up to 256."""
    largest = min(limit, size & -size)
    return largest if largest >= 64 else min(limit, 256, triton.next_power_of_2(size))


def multiply(states: Tensor, weights: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Return partial products of each pair, float32 ``[pairs, splits, rows]``. They are to be added along `splits`.
    `states` is ``[tokens, columns]``, or ``[pairs, columns]``; `weights` are ``[E, rows, columns]``, or if `transposed`
    ``[E, columns, rows]``."""
    rows, columns = weights.shape[1:] if not transposed else (weights.shape[2], weights.shape[1])
    pairs = experts.numel()
    tiles = Tiles.of(rows, columns, pairs, transposed)
    out = torch.empty((pairs, tiles.splits, rows), dtype=torch.float32, device=states.device)
    _multiply[(pairs, triton.cdiv(rows, tiles.rows), tiles.splits)](
        states,
        weights,
        experts,
        out,
        tiles.steps,
        EXPERTS=weights.shape[0],
        ROWS=rows,
        COLUMNS=columns,
        EACH=pairs // len(states),
        TRANSPOSED=transposed,
        ONCE=len(experts) == 1,
        BLOCK_ROWS=tiles.rows,
        BLOCK_COLUMNS=tiles.columns,
        num_warps=WARPS,
    )
    return out


def combine(
    partial: Tensor, experts: Tensor, count: int, bias: Tensor | None, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the sums of `partial`, ``[pairs, splits, rows]``, as `dtype`: ``[pairs, rows]``. With `weights`,
    ``[tokens, k]``, they are the weighted sums of the pairs of each token, ``[tokens, rows]``. `bias` is ``[E, rows]``
    with ``E = count``. An expert whose number is not below `count` adds nothing."""
    pairs, splits, rows = partial.shape
    each = 1 if weights is None else weights.shape[1]
    out = torch.empty((pairs // each, rows), dtype=dtype, device=partial.device)
    product = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    together = triton.next_power_of_2(splits)
    block = max(16, min(COMBINED, ADDED // together))
    _combine[(pairs // each, triton.cdiv(rows, block))](
        partial,
        experts,
        bias,
        weights,
        out,
        splits,
        EXPERTS=count,
        ROWS=rows,
        EACH=each,
        PRODUCT=TYPES[product],
        SPLITS=together,
        BLOCK=block,
        num_warps=4,
    )
    return out


def activate(partial: Tensor, experts: Tensor, count: int, bias: Tensor | None, gate: Gate, out: Tensor) -> None:
    """Sum partial products, add the bias, and put gated rows into `out`. `partial` is ``[pairs, splits, 2 * I]``, `out`
    ``[pairs, I]``; `bias` is ``[E, 2 * I]`` with ``E = count``."""
    pairs, splits, _ = partial.shape
    together = triton.next_power_of_2(splits)
    block = max(16, min(COMBINED, ADDED // together))
    _activate[(pairs, triton.cdiv(out.shape[1], block))](
        partial,
        experts,
        bias,
        out,
        splits,
        gate.alpha,
        gate.limit,
        gate.offset,
        EXPERTS=count,
        ROWS=out.shape[1],
        INTERLEAVED=gate.interleaved,
        SILU=gate.alpha == 1,
        SPLITS=together,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["steps"])
def _multiply(
    states,
    weights,
    experts,
    out,
    steps,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Multiply tiles of an expert's matrix with the states of one pair. `ONCE` means that no other pair has the same
    expert. Nothing is read for a number that names none."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    pair = tl.program_id(0)
    expert = tl.load(experts + pair).to(tl.int64)
    valid = (expert >= 0) & (expert < EXPERTS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    states += pair // EACH * COLUMNS
    weights += expert * (ROWS * COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    first = tl.program_id(2) * steps
    end = tl.where(valid, tl.minimum(first + steps, tl.cdiv(COLUMNS, BLOCK_COLUMNS)), first)
    for step in range(first, end):
        column = step * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        element = column[None, :] * ROWS + row[:, None] if TRANSPOSED else row[:, None] * COLUMNS + column[None, :]
        if ROWS % BLOCK_ROWS == 0 and COLUMNS % BLOCK_COLUMNS == 0:
            tile = tl.load(weights + element, eviction_policy=POLICY)
        else:
            inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
            tile = tl.load(weights + element, mask=inside, other=0.0, eviction_policy=POLICY)
        if COLUMNS % BLOCK_COLUMNS == 0:
            state = tl.load(states + column).to(tl.float32)[None, :]
        else:
            state = tl.load(states + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        total += tile.to(tl.float32) * state
    element = (pair * tl.num_programs(2) + tl.program_id(2)) * ROWS + row
    tl.store(out + element, tl.sum(total, 1), mask=row < ROWS)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial,
    experts,
    bias,
    weights,
    out,
    splits,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    PRODUCT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add partial sums of `EACH` pairs in order, with bias and weight. Those of a pair are read at once."""
    TYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < ROWS
    split = tl.arange(0, SPLITS)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(EACH):
        pair = token * EACH + number
        place = (pair * splits + split)[:, None] * ROWS + row[None, :]
        mask = (split < splits)[:, None] & inside[None, :]
        value = tl.sum(tl.load(partial + place, mask=mask, other=0.0).to(tl.float32), 0)
        expert = tl.load(experts + pair).to(tl.int64)
        valid = (expert >= 0) & (expert < EXPERTS)
        value = rounded(value, TYPE).to(tl.float32)
        if bias is not None:
            bias_value = tl.load(bias + tl.where(valid, expert, 0) * ROWS + row, mask=inside, other=0.0).to(tl.float32)
            value = rounded(value + bias_value, TYPE).to(tl.float32)
        if weights is not None:
            value = rounded(value * tl.load(weights + pair).to(tl.float32), PRODUCT).to(tl.float32)
        total += tl.where(valid, value, 0.0)
    tl.store(out + token * ROWS + row, rounded(total, TYPE), mask=inside)


@triton.jit(do_not_specialize=["splits", "alpha", "limit", "offset"])
def _activate(
    partial,
    experts,
    bias,
    out,
    splits,
    alpha,
    limit,
    offset,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SILU: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a pair's partial products, add the bias, and gate the rows."""
    TYPE: tl.constexpr = out.dtype.element_ty
    pair = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < ROWS
    expert = tl.minimum(tl.maximum(tl.load(experts + pair).to(tl.int64), 0), EXPERTS - 1)
    partial += pair.to(tl.int64) * splits * (2 * ROWS)
    if bias is not None:
        bias += expert * (2 * ROWS)
    first = 2 * row if INTERLEAVED else row
    second = first + 1 if INTERLEAVED else row + ROWS
    gate = tl.minimum(_summed(partial, bias, first, inside, splits, 2 * ROWS, TYPE, SPLITS), limit)
    up = _summed(partial, bias, second, inside, splits, 2 * ROWS, TYPE, SPLITS)
    up = rounded(tl.minimum(tl.maximum(up, -limit), limit) + offset, TYPE).to(tl.float32)
    if SILU:
        value = rounded(gate / (1.0 + tl.exp(-gate)), TYPE).to(tl.float32)
    else:
        value = rounded(1.0 / (1.0 + tl.exp(-rounded(alpha * gate, TYPE).to(tl.float32))), TYPE).to(tl.float32)
        value = rounded(gate * value, TYPE).to(tl.float32)
    value *= up
    tl.store(out + pair.to(tl.int64) * ROWS + row, rounded(value, TYPE), mask=inside)


@triton.jit
def _summed(partial, bias, row, inside, splits, WIDTH: tl.constexpr, TYPE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the sums of partial products with their bias, float32."""
    split = tl.arange(0, SPLITS)
    mask = (split < splits)[:, None] & inside[None, :]
    value = tl.sum(tl.load(partial + split[:, None] * WIDTH + row[None, :], mask=mask, other=0.0).to(tl.float32), 0)
    value = rounded(value, TYPE).to(tl.float32)
    if bias is not None:
        value = rounded(value + tl.load(bias + row, mask=inside, other=0.0).to(tl.float32), TYPE).to(tl.float32)
    return value
