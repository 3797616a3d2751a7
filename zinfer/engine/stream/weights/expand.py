# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels that unpack quantised rows: table look-up, zero point, scale, rounding, for codes of 4 and 8 bits; and
FP8 codes (e4m3) whose exponents are coded (`zinfer.engine.stream.weights.codec`).

For stored codes one program unpacks `BLOCK` values of a row. A table look-up serves every format alike, 8-bit floating
point too, which GPUs before Hopper do not convert. Coded ones are decoded as in `zinfer.engine.stream.weights.decode`,
one program for each of the codec's blocks, and multiplied with their scales before they are written, so that codes are
never written to memory. A number of e4m3 has the bits of one of fp16 that is 256 times smaller, which every GPU
converts; NaN alone is put right. Scales times 256 are exact: they are far from the largest number
(`zinfer.engine.quantization.dequantize.Codes.fit`).

With TRITON_INTERPRET=1 in the environment the kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.quantization.dequantize import SUPER, Codes
from zinfer.engine.stream.weights import codec, decode
from zinfer.engine.stream.weights.decode import BLOCK, LEVELS, escapes, exponents

TILE = 2048  # values of a program
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch(
    codes: Codes,
    out: Tensor,
    table: Tensor,
    scale_table: Tensor | None,
    block: int = TILE,
    count: int = 1,
    strides: tuple[int, int] = (0, 0),
) -> None:
    """Unpack `codes` into `out` ``[rows, columns]``, `block` values a program. The tables are float32. Runs on the
    current stream. There are `count` such matrices, `strides` bytes from each other, in memory of codes and of `out`.
    """
    rows, columns = out.shape
    whole_rows, whole_columns = codes.scales.shape[0] == 1, codes.scales.shape[1] == 1
    _expand[(rows, triton.cdiv(columns, block), count)](
        codes.numbers,
        codes.scales,
        codes.zeros,
        codes.order,
        codes.supers,
        table,
        scale_table,
        out,
        codes.divisor,
        codes.factor,
        columns,
        codes.numbers.stride(0),
        codes.scales.shape[1],
        *strides,
        BITS=codes.bits,
        ROWS=0 if whole_rows else codes.block[0],
        COLUMNS=0 if whole_columns else codes.block[1],
        DIVIDED=codes.divisor != 1.0,
        MULTIPLIED=codes.factor != 1.0,
        MINIMUMS=codes.minimums,
        SUPERS=0 if codes.supers is None else codes.supers.shape[2],
        SUPER_COLUMNS=SUPER,
        INNER=TYPES[codes.inner],
        BLOCK=block,
        num_warps=4,
    )


def launch_coded(codes: Codes, layout: codec.Layout, out: Tensor, scale_table: Tensor | None) -> None:
    """Decode e4m3 `codes`, coded as `layout` describes, into `out` ``[rows, columns]``. Their numbers are uint8
    ``[layout.size]``, whole blocks, of which each 16 values share a scale; `out` is bf16 or fp16, from a multiple of 16
    bytes on. This is one launch on the current stream. Checks nothing:
    `zinfer.engine.stream.weights.formats.encode_chunks` does."""
    whole_rows, whole_columns = codes.scales.shape[0] == 1, codes.scales.shape[1] == 1
    _expand_blocks[(layout.blocks,)](
        codes.numbers,
        codes.scales,
        scale_table,
        out,
        codes.columns,
        codes.scales.shape[1],
        layout.blocks,
        *layout.sections[:-1],
        SCALE_ROWS=0 if whole_rows else codes.block[0],
        SCALE_COLUMNS=0 if whole_columns else codes.block[1],
        INNER=TYPES[codes.inner],
        ROWS=32 * decode.WARPS,
        num_warps=decode.WARPS,
        num_stages=1,  # a load moved ahead of a barrier would read data that is not written yet
    )


@triton.jit(do_not_specialize=["divisor", "factor"])
def _expand(
    codes,
    scales,
    zeros,
    order,
    supers,
    table,
    scale_table,
    out,
    divisor,
    factor,
    columns,
    stride,
    scale_columns,
    next_codes,
    next_out,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIVIDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUPERS: tl.constexpr,
    SUPER_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    matrix = tl.program_id(2).to(tl.int64)
    codes, scales, out = (
        _next(codes, matrix * next_codes),
        _next(scales, matrix * next_codes),
        _next(out, matrix * next_out),
    )
    if zeros is not None:
        zeros = _next(zeros, matrix * next_codes)
    if order is not None:
        order = _next(order, matrix * next_codes)
    if supers is not None:
        supers = _next(supers, matrix * next_codes)
    if BITS < 8:
        code = tl.load(codes + row * stride + column // 2, mask=inside, other=0).to(tl.int32)
        code = code >> (column % 2) * 4 & 15
        if BITS > 4:
            EACH: tl.constexpr = 8 // (BITS - 4)
            high = tl.load(codes + row * stride + columns // 2 + column // EACH, mask=inside, other=0).to(tl.int32)
            code += (high >> column % EACH * (BITS - 4) & (1 << BITS - 4) - 1) << 4
    else:
        code = tl.load(codes + row * stride + column, mask=inside, other=0).to(tl.int32)
    value = tl.load(table + code)
    scale_index = tl.zeros([BLOCK], tl.int64)
    if ROWS > 0:
        scale_index += row // ROWS * scale_columns
    if order is not None:
        scale_index += tl.load(order + column, mask=inside, other=0)
    elif COLUMNS > 0:
        scale_index += column // COLUMNS
    scale = _scale(scales, scale_table, scale_index, inside)
    if zeros is not None:
        zero = tl.load(zeros + scale_index, mask=inside, other=0).to(tl.float32)
        if not MINIMUMS:
            value -= zero
    if supers is not None:
        factors = supers + (row * (columns // SUPER_COLUMNS) + column // SUPER_COLUMNS) * SUPERS
        scale *= tl.load(factors, mask=inside, other=0).to(tl.float32)
        if MINIMUMS:
            zero *= tl.load(factors + 1, mask=inside, other=0).to(tl.float32)
    if DIVIDED:
        scale = tl.div_rn(scale, tl.zeros([BLOCK], tl.float32) + divisor)
    if MULTIPLIED:
        scale = scale * factor
    value *= scale
    if MINIMUMS:
        value -= zero
    value = rounded(rounded(value, INNER).to(tl.float32), out.dtype.element_ty)
    tl.store(out + row * columns + column, value, mask=inside)


@triton.jit(do_not_specialize=["columns", "scale_columns", "blocks", "level_2", "level_3", "level_4", "rest", "tail"])
def _expand_blocks(
    data,
    scales,
    scale_table,
    out,
    columns,
    scale_columns,
    blocks,
    level_2,
    level_3,
    level_4,
    rest,
    tail,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode a block of e4m3 codes; multiply each 16 with their scale."""
    TYPE: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 4)[None, :]
    words = data.to(tl.pointer_type(tl.uint32))
    mantissas = data.to(tl.pointer_type(tl.uint16)) + block * (BLOCK // 4)
    part = (out + block * BLOCK).to(tl.pointer_type(tl.uint32))
    level_1 = words + tl.cast(blocks, tl.int64) * (BLOCK // 8)
    record = level_1 + tl.cast(blocks, tl.int64) * (BLOCK // 16) + block * (2 * LEVELS)
    value = (block * BLOCK).to(tl.int32)

    position = escapes(words, part, record, row, column, level_2, level_3, level_4, rest, tail, ROWS)
    table = tl.load(record + LEVELS)
    for tile in range(0, BLOCK // 16, ROWS):
        index = tile + row
        code = tl.load(level_1 + block * (BLOCK // 16) + index)
        mantissa = tl.load(mantissas + index[:, None] * 4 + column).to(tl.uint32)
        mantissa = (mantissa | mantissa << 8) & 0xFF00FF
        first, second, position = exponents(code, table, part, position, BLOCK // 2 - 2)
        first = (mantissa & 0x80008) << 12 | first << 10 | (mantissa & 0x70007) << 7
        second = (mantissa & 0x800080) << 8 | second << 10 | (mantissa & 0x700070) << 3
        scale_index = _scale_index(value + index * 16, columns, scale_columns, SCALE_ROWS, SCALE_COLUMNS)
        scale = 256.0 * _scale(scales, scale_table, scale_index, scale_index >= 0)[:, None]
        first = _pair(first, scale, INNER, TYPE)
        second = _pair(second, scale, INNER, TYPE)
        tl.debug_barrier()
        pairs = tl.reshape(tl.join(first, second), (ROWS, 8))
        tl.store(part + index[:, None] * 8 + tl.arange(0, 8)[None, :], pairs)


@triton.jit
def _next(pointer, distance):
    """Return a pointer `distance` bytes further."""
    return pointer + distance // (pointer.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _scale_index(value, columns, scale_columns, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """Return the numbers of the scales of values, int32."""
    scale_index = value * 0
    if SCALE_ROWS > 0:
        scale_index += value // columns // SCALE_ROWS * scale_columns
    if SCALE_COLUMNS > 0:
        scale_index += value % columns // SCALE_COLUMNS
    return scale_index


@triton.jit
def _scale(scales, scale_table, scale_index, inside):
    """Return the scales number `scale_index`, float32, where they are `inside`."""
    scale = tl.load(scales + scale_index, mask=inside, other=0)
    if scale_table is not None:
        return tl.load(scale_table + scale.to(tl.int32))
    return scale.to(tl.float32)


@triton.jit
def _pair(pair, scale, INNER: tl.constexpr, TYPE: tl.constexpr):
    """Multiply two numbers, in half-words of `pair`, with their scale."""
    return _bits(_number(pair & 0xFFFF) * scale, INNER, TYPE) | _bits(_number(pair >> 16) * scale, INNER, TYPE) << 16


@triton.jit
def _number(bits):
    """Return numbers of e4m3 over 256, float32; their bits lie where fp16 has them (uint32)."""
    number = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((bits & 0x7FFF) == 0x3F80, float("nan"), number)


@triton.jit
def _bits(value, INNER: tl.constexpr, TYPE: tl.constexpr):
    """Return the bits (uint32) of float32 values rounded to `INNER`, then `TYPE`."""
    if INNER != TYPE:
        value = rounded(value, INNER).to(tl.float32)
    return rounded(value, TYPE).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """Return float32 values in another type, rounded to nearest even; NaN stays NaN. bf16 is rounded by its bits, since
    Triton's interpreter truncates them."""
    if tl.bfloat16 == TYPE:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(TYPE)
