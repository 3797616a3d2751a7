# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernel that unpacks quantised rows: table look-up, zero point, scale, rounding, for codes of 4 and 8 bits.

One program unpacks `BLOCK` values of a row. A table look-up serves every format alike, 8-bit floating point too, which
GPUs before Hopper do not convert. With TRITON_INTERPRET=1 in the environment the kernel runs on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.quantization.dequantize import Codes

BLOCK = 2048  # values of a program
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch(codes: Codes, out: Tensor, table: Tensor, scale_table: Tensor | None, block: int = BLOCK) -> None:
    """Unpack `codes` into `out` ``[rows, columns]`` on the current stream, `block` values in a program; the tables are
    float32."""
    rows, columns = out.shape
    zeros = codes.zeros
    whole_rows, whole_columns = codes.scales.shape[0] == 1, codes.scales.shape[1] == 1
    _expand[(rows, triton.cdiv(columns, block))](
        codes.numbers,
        codes.scales,
        codes.scales if zeros is None else zeros,
        codes.scales if codes.order is None else codes.order,
        table,
        table if scale_table is None else scale_table,
        out,
        codes.divisor,
        codes.factor,
        columns,
        codes.numbers.stride(0),
        codes.scales.shape[1],
        FOUR=codes.bits == 4,
        ROWS=0 if whole_rows else codes.block[0],
        COLUMNS=0 if whole_columns else codes.block[1],
        ZEROS=zeros is not None,
        ORDER=codes.order is not None,
        CODED=scale_table is not None,
        DIVIDED=codes.divisor != 1.0,
        MULTIPLIED=codes.factor != 1.0,
        INNER=_TYPES[codes.inner],
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["divisor", "factor"])
def _expand(
    codes,
    scales,
    zeros,
    order,
    table,
    scale_table,
    out,
    divisor,
    factor,
    columns,
    stride,
    scale_columns,
    FOUR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDER: tl.constexpr,
    CODED: tl.constexpr,
    DIVIDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if FOUR:
        code = tl.load(codes + row * stride + column // 2, mask=inside, other=0).to(tl.int32)
        code = code >> (column % 2) * 4 & 15
    else:
        code = tl.load(codes + row * stride + column, mask=inside, other=0).to(tl.int32)
    value = tl.load(table + code)
    place = tl.zeros([BLOCK], tl.int64)
    if ROWS > 0:
        place += row // ROWS * scale_columns
    if ORDER:
        place += tl.load(order + column, mask=inside, other=0)
    elif COLUMNS > 0:
        place += column // COLUMNS
    if ZEROS:
        value -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
    if CODED:
        scale = tl.load(scale_table + tl.load(scales + place, mask=inside, other=0).to(tl.int32))
    else:
        scale = tl.load(scales + place, mask=inside, other=0).to(tl.float32)
    if DIVIDED:
        scale = tl.div_rn(scale, tl.zeros([BLOCK], tl.float32) + divisor)
    if MULTIPLIED:
        scale = scale * factor
    value = _rounded(_rounded(value * scale, INNER).to(tl.float32), out.dtype.element_ty)
    tl.store(out + row * columns + column, value, mask=inside)


@triton.jit
def _rounded(value, TYPE: tl.constexpr):
    """Return float32 values in another type, rounded to the nearest, to even ones in between; bf16 by its bits, since
    Triton's interpreter cuts them off."""
    if tl.bfloat16 == TYPE:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(TYPE)
