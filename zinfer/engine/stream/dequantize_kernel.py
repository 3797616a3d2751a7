# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernel that dequantises an 8-bit KV cache for attention. It works at the rate of the GPU's memory.

PyTorch's product of tensors of three types converts value by value. This kernel reads each number once and writes it
once in the model's type, with the same rounding.

With TRITON_INTERPRET=1 in the environment it runs on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

TILE = 4096  # values that a program dequantises
WARPS = 4


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 `numbers` times float32 `scales` in `dtype`, contiguous. They are ``[rows, heads, n, D]`` and
    ``[rows, heads, n, 1]``. The D numbers of a head must lie side by side; rows, heads and positions may have others
    between."""
    rows, heads, positions, size = numbers.shape
    out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    columns = triton.next_power_of_2(size)
    tile = max(1, TILE // columns)
    if out.numel():
        _dequantize[(rows * heads, triton.cdiv(positions, tile))](
            numbers,
            scales,
            out,
            heads,
            positions,
            *numbers.stride()[:3],
            *scales.stride()[:3],
            SIZE=size,
            COLUMNS=columns,
            TILE=tile,
            num_warps=WARPS,
        )
    return out


@triton.jit(do_not_specialize=["positions"])
def _dequantize(
    numbers,
    scales,
    out,
    heads,
    positions,
    row_of_numbers,
    head_of_numbers,
    numbers_stride,
    row_of_scales,
    head_of_scales,
    scales_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Dequantise `TILE` positions of one head of one row."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    position = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)
    valid = position < positions
    inside = valid[:, None] & (column < SIZE)[None, :]
    numbers += row * row_of_numbers + head * head_of_numbers
    scales += row * row_of_scales + head * head_of_scales
    number = tl.load(numbers + position[:, None] * numbers_stride + column[None, :], mask=inside, other=0)
    scale = tl.load(scales + position * scales_stride, mask=valid, other=0.0)
    where = (pair * positions + position)[:, None] * SIZE + column[None, :]
    tl.store(out + where, rounded(number.to(tl.float32) * scale[:, None], out.dtype.element_ty), mask=inside)
