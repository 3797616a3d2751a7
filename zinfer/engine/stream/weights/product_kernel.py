# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels that multiply few tokens with quantised rows, from their codes.

`_multiply` reads the codes of a block of rows once, makes weights of them in registers, and multiplies them with all
tokens by tensor cores, 16 or 32 tokens at a time. A weight is what `zinfer.engine.stream.weights.expand` unpacks, to
the bit: the same zero point, scale and rounding. Of two codes of 4 bits in a byte the first belongs to an even column,
so even and odd columns are two products, and the states come with even columns before odd ones (`pair_columns`).

Rows may lie in several chunks of equal size, the last one shorter, as a packed layer has them. Columns are split among
programs where rows alone are too few to fill the GPU. Sums are in float32, without atomic additions: `_add` adds the
partial sums in order. The host never waits, so a CUDA graph can hold the kernels.

Of stacked experts, whose rows follow each other, each pair of a token and an expert is a product of its own
(`multiply_experts`), as in `zinfer.engine.stream.experts.expert_kernel`. Where a model keeps experts as ``[in, out]``,
rows of codes are inputs, and `_multiply_transposed` sums over rows.

With TRITON_INTERPRET=1 in the environment the kernels run on a CPU.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.quantization.dequantize import table
from zinfer.engine.stream.weights.expand import INTERPRETED, added, rounded
from zinfer.engine.stream.weights.formats import TRANSPOSED_ROWS, Run

ROWS = 128  # rows of a program
BYTES = 64  # bytes of codes of a row that a program reads at a time
WARP_ROWS = 16  # rows of a warp: with more of them weights pass through shared memory
STAGES = 4
TILE_ROWS, TRANSPOSED_BYTES = 8, 512  # rows of a tile where rows are inputs, and bytes of codes of each
TRANSPOSED_STEPS = 2  # smallest number of steps of a program where rows are split
MAX_TOKENS = 32  # of a program; others read the same codes at about the same time, from the L2 cache
MIN_PROGRAMS = 1024  # of a launch, if they have enough to read: two waves of an H100
MIN_STEPS = 8  # reads of a program where columns are split
ADDED = 512  # values of a program that adds partial sums
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MIDDLES = {"middle4": 8, "whole4": 0, "middle8": 128, "whole8": 0}
# Two weights at a time from codes of 4 bits. The bits of a code go into the mantissa of a number whose last place is
# one, 128 in bf16 and 1024 in fp16; a sum, which is exact, takes that number, middle and zero point away, and a product
# rounds once. Both are fused multiply-adds, with one and with minus zero: GPUs before Hopper have no others for bf16.
_PAIRS = """{{
.reg .b32 a, b, one, zero;
mov.b32 one, {one};
mov.b32 zero, {zero};
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
{shift}
lop3.b32 a, a, 0x000F000F, {base}, 0xEA;
lop3.b32 b, b, 0x000F000F, {base}, 0xEA;
fma.rn.{kind} a, a, one, $5;
fma.rn.{kind} b, b, one, $6;
fma.rn.{kind} $0, a, $3, zero;
fma.rn.{kind} $1, b, $4, zero;
}}"""
_REGISTERS = tl.constexpr("=r,=r,r,r,r,r,r")
_SHIFT = "shr.u32 a, a, 4;\nshr.u32 b, b, 4;"


def _pairs(kind: str, base: int, unit: int, second: bool) -> tl.constexpr:
    both = {"base": f"0x{base:04X}{base:04X}", "one": f"0x{unit:04X}{unit:04X}", "zero": "0x80008000"}
    return tl.constexpr(_PAIRS.format(kind=kind, shift=_SHIFT if second else "", **both))


_BF16_FIRST, _BF16_SECOND = (_pairs("bf16x2", 0x4300, 0x3F80, second) for second in (False, True))
_FP16_FIRST, _FP16_SECOND = (_pairs("f16x2", 0x6400, 0x3C00, second) for second in (False, True))

# Four numbers of e2m1 over 16384 from the first or the second codes of four bytes: the bits of a code are put where
# fp16 has them, two at a time.
_SMALL = """{{
.reg .b32 a, b, c, d;
.reg .b16 one, other;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 c, a, {sign};
shl.b32 d, a, {rest};
and.b32 c, c, 0x80008000;
lop3.b32 d, d, 0x0E000E00, c, 0xEA;
mov.b32 {{one, other}}, d;
cvt.f32.f16 $0, one;
cvt.f32.f16 $1, other;
shl.b32 c, b, {sign};
shl.b32 d, b, {rest};
and.b32 c, c, 0x80008000;
lop3.b32 d, d, 0x0E000E00, c, 0xEA;
mov.b32 {{one, other}}, d;
cvt.f32.f16 $2, one;
cvt.f32.f16 $3, other;
}}"""
_FLOATS = tl.constexpr("=f,=f,=f,=f,r")
_SMALL_FIRST, _SMALL_SECOND = (tl.constexpr(_SMALL.format(sign=sign, rest=sign - 3)) for sign in (12, 8))


@dataclass(frozen=True)
class Tiles:
    """Division of `run`'s columns into reads, and among programs."""

    rows: int
    bytes: int
    steps: int  # reads of a program, one after the other
    splits: int  # programs that share a block of rows

    @classmethod
    def of(cls, run: Run, count: int | None = None, pairs: int = 1) -> "Tiles":
        """Choose tiles for `count` rows of `run` (None: all) in `pairs` products."""
        count, layout = run.rows if count is None else count, run.layout
        width = layout.columns * layout.bits // 8
        group = 0 if layout.grid[1] == 1 else layout.block[1] * layout.bits // 8
        size = min(BYTES, max(16, triton.next_power_of_2(width)))
        if group and group % size and (shared := group & -group) >= 32:
            size = min(size, shared)
        rows = min(ROWS, max(16, triton.next_power_of_2(count)))
        blocks, steps = triton.cdiv(count, rows) * pairs, triton.cdiv(width, size)
        splits = max(1, min(triton.cdiv(MIN_PROGRAMS, blocks), steps // MIN_STEPS))
        each = triton.cdiv(steps, splits)
        return cls(rows, size, each, triton.cdiv(steps, each))


def pair_columns(states: Tensor, bits: int) -> Tensor:
    """Return states ``[tokens, columns]`` as the kernels read them.

    For codes of 4 bits that is ``[2, tokens, columns / 2]``, even columns and odd ones.
    """
    return (states if bits == 8 else states.unflatten(1, (-1, 2)).permute(2, 0, 1)).contiguous()


def multiply_experts(states: Tensor, data: Tensor, run: Run, experts: Tensor, count: int, transposed: bool) -> Tensor:
    """Return partial products of each pair, float32 ``[pairs, splits, rows]``.

    They are to be added along `splits`. `states` is ``[tokens, columns]``, or ``[pairs, columns]``, `experts`
    ``[tokens, k]``; `run`, whose bytes are `data`, has the rows of ``[count, rows, columns]``, or if `transposed` of
    ``[count, columns, rows]``. Checks nothing: `zinfer.engine.stream.weights.products` does.
    """
    pairs, layout, rows = experts.numel(), run.layout, run.rows // count
    if transposed:
        return _multiply_transposed_experts(states, data, run, experts, count)
    tiles = Tiles.of(run, rows, pairs)
    out = torch.empty((pairs, tiles.splits, rows), dtype=torch.float32, device=states.device)
    tokens = len(states)
    _multiply[(pairs, triton.cdiv(rows, tiles.rows), tiles.splits)](
        pair_columns(states, layout.bits),
        *_views(data, run),
        out,
        experts,
        out,
        layout.divisor,
        layout.factor,
        tokens,
        tiles.steps,
        rows,
        **constants(run),
        EXPERTS=count,
        EACH_TOKEN=pairs // tokens,
        TOKENS=16,
        BIASED=False,
        WHOLE=False,
        BLOCK_ROWS=tiles.rows,
        BLOCK=tiles.bytes,
        num_warps=max(1, tiles.rows // WARP_ROWS),
        num_stages=STAGES,
    )
    return out


def _multiply_transposed_experts(states: Tensor, data: Tensor, run: Run, experts: Tensor, count: int) -> Tensor:
    pairs, layout, inputs, tokens = experts.numel(), run.layout, run.rows // count, len(states)
    width = layout.columns * layout.bits // 8
    size = min(TRANSPOSED_BYTES, max(16, triton.next_power_of_2(width)))
    blocks, steps = triton.cdiv(width, size) * pairs, triton.cdiv(inputs, TRANSPOSED_ROWS)
    splits = max(1, min(triton.cdiv(MIN_PROGRAMS, blocks), steps // TRANSPOSED_STEPS))
    each = triton.cdiv(steps, splits)
    out = torch.empty((pairs, triton.cdiv(steps, each), layout.columns), dtype=torch.float32, device=states.device)
    _multiply_transposed[(pairs, triton.cdiv(width, size), out.shape[1])](
        states,
        *_views(data, run),
        experts,
        out,
        layout.divisor,
        layout.factor,
        each,
        **constants(run),
        EXPERTS=count,
        EACH_TOKEN=pairs // tokens,
        GROUP_ROWS=TRANSPOSED_ROWS,
        BLOCK_ROWS=TILE_ROWS,
        BLOCK=size,
        num_warps=4,
        num_stages=STAGES,
    )
    return out


def multiply(states: Tensor, data: Tensor, run: Run, bias: Tensor | None, out: Tensor, tokens: int) -> None:
    """Multiply `states` with the rows of `run` into `out` ``[tokens, rows]``. `states` come from `pair_columns`,
    `data` the bytes from the first chunk on, `bias` is ``[rows]``; the last dimension of `out` is contiguous. Checks
    nothing: `zinfer.engine.stream.weights.products` does."""
    layout, tiles = run.layout, Tiles.of(run)
    partial = out
    if tiles.splits > 1:
        partial = torch.empty((tiles.splits, tokens, run.rows), dtype=torch.float32, device=out.device)
    padded = min(MAX_TOKENS, max(16, triton.next_power_of_2(tokens)))
    _multiply[(triton.cdiv(tokens, padded), triton.cdiv(run.rows, tiles.rows), tiles.splits)](
        states,
        *_views(data, run),
        partial if bias is None else bias,
        partial,
        partial,
        layout.divisor,
        layout.factor,
        tokens,
        tiles.steps,
        partial.stride(-2),
        **constants(run),
        EXPERTS=0,
        EACH_TOKEN=1,
        TOKENS=padded,
        BIASED=bias is not None,
        WHOLE=tiles.splits == 1,
        BLOCK_ROWS=tiles.rows,
        BLOCK=tiles.bytes,
        num_warps=tiles.rows // WARP_ROWS,
        num_stages=STAGES,
    )
    if tiles.splits > 1:
        _add[(triton.cdiv(run.rows, ADDED), tokens)](
            partial,
            partial if bias is None else bias,
            out,
            run.rows,
            out.stride(0),
            tiles.splits,
            BIASED=bias is not None,
            BLOCK=ADDED,
            num_warps=4,
        )


def _views(data: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bytes of `run` as codes, scales, zero points; and a table. Without a table of scales, which is not
    read then, it is the codes again."""
    whole, name = data[: run.size], run.layout.scale_table
    scale_table = table(name, data.device) if name else whole
    return whole, whole.view(run.layout.scale_dtype), whole.view(torch.int16), scale_table


@cache
def constants(run: Run) -> dict[str, object]:
    """Return the constants of `_multiply` that depend on `run`."""
    layout, last = run.layout, run.last
    same = layout.scale_dtype == layout.inner == layout.dtype and layout.divisor == layout.factor == 1.0
    whole_numbers = layout.bits == 4 and layout.table in _MIDDLES
    # Two bits times a power of two: no rounding changes them in types with the exponents of float32.
    powers = (layout.table, layout.scale_table, layout.divisor, layout.factor) == ("e2m1", "e8m0", 1.0, 1.0)
    exact = powers and not layout.zeros and torch.float16 not in (layout.inner, layout.dtype)
    return {
        "LENGTH": run.rows,
        "WIDTH": layout.columns * layout.bits // 8,
        "FOUR": layout.bits == 4,
        "TABLE": layout.table,
        "MIDDLE": _MIDDLES.get(layout.table, -1),
        "CHUNK": layout.rows,
        "CHUNKS": run.count,
        "STRIDE": run.stride,
        "SCALES": layout.starts[0],
        "ZEROS": layout.starts[1] if layout.zeros else -1,
        "LAST_SCALES": last.starts[0],
        "LAST_ZEROS": last.starts[1],
        "SCALE_BYTES": layout.scale_dtype.itemsize,
        "SCALE_ROWS": 0 if layout.grid[0] == 1 else layout.block[0],
        "SCALE_COLUMNS": layout.grid[1],
        "GROUP": 0 if layout.grid[1] == 1 else layout.block[1],
        "CODED": bool(layout.scale_table),
        "DIVIDED": layout.divisor != 1.0,
        "MULTIPLIED": layout.factor != 1.0,
        "INNER": _TYPES[layout.inner],
        "TYPE": _TYPES[layout.dtype],
        "EXACT": exact,
        "FAST": same and whole_numbers and layout.dtype.itemsize == 2 and not INTERPRETED,
        "INTERPRETED": INTERPRETED,
    }


@triton.jit(do_not_specialize=["divisor", "factor", "tokens", "steps", "stride"])
def _multiply(
    states,
    data,
    scales,
    zeros,
    scale_table,
    bias,
    experts,
    out,
    divisor,
    factor,
    tokens,
    steps,
    stride,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    FOUR: tl.constexpr,
    TABLE: tl.constexpr,
    MIDDLE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    LAST_SCALES: tl.constexpr,
    LAST_ZEROS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
    DIVIDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    INNER: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a block of rows with a block of tokens. A program reads `steps` times `BLOCK` bytes of each row. With
    `EXPERTS` these are the rows of one pair's expert and the states of that pair."""
    EACH: tl.constexpr = 2 if FOUR else 1  # codes in a byte
    SHARED: tl.constexpr = GROUP % (EACH * BLOCK) == 0  # the columns of a read share a scale
    WHOLES: tl.constexpr = not SHARED and EACH * BLOCK % GROUP == 0 and GROUP % EACH == 0
    GROUPS: tl.constexpr = EACH * BLOCK // GROUP if WHOLES else 0  # scales of a read, if not one
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ROWS: tl.constexpr = LENGTH // EXPERTS if EXPERTS > 0 else LENGTH  # of a product
    clamped = tl.minimum(row, ROWS - 1)
    if EXPERTS > 0:
        token = tl.program_id(0) // EACH_TOKEN + tl.arange(0, TOKENS)
        real = (tl.arange(0, TOKENS) == 0)[:, None]
        clamped += _expert(experts, EXPERTS) * ROWS
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        real = (token < tokens)[:, None]
    chunk = clamped // CHUNK
    within = clamped % CHUNK
    begin = chunk.to(tl.int64) * STRIDE + within.to(tl.int64) * WIDTH
    scale_row = within // SCALE_ROWS * SCALE_COLUMNS if SCALE_ROWS > 0 else within * 0
    at_end = chunk == CHUNKS - 1
    scale_row = scale_row.to(tl.int64)
    scale_start = (chunk.to(tl.int64) * STRIDE + tl.where(at_end, LAST_SCALES, SCALES)) // SCALE_BYTES + scale_row
    zero_start = (chunk.to(tl.int64) * STRIDE + tl.where(at_end, LAST_ZEROS, ZEROS)) // 2 + scale_row
    total = tl.zeros([TOKENS, BLOCK_ROWS], tl.float32)
    first = tl.program_id(2) * steps
    for step in range(first, tl.minimum(first + steps, tl.cdiv(WIDTH, BLOCK))):
        byte = step * BLOCK + tl.arange(0, BLOCK)
        state = states + token[:, None] * WIDTH + byte[None, :]
        inside = real
        element = begin[None, :] + byte[:, None]
        if WIDTH % BLOCK == 0:
            code = tl.load(data + element, eviction_policy="evict_first")
        else:
            code = tl.load(data + element, mask=(byte < WIDTH)[:, None], other=0, eviction_policy="evict_first")
            inside = inside & (byte < WIDTH)[None, :]
        even = tl.load(state, mask=inside, other=0.0)
        if FOUR:
            odd = tl.load(state + tokens * WIDTH, mask=inside, other=0.0)
        if SHARED:
            group = (step * (EACH * BLOCK) // GROUP if GROUP > 0 else 0) + tl.zeros([1], tl.int32)
        elif GROUPS > 0:
            group = tl.minimum(step * GROUPS + tl.arange(0, GROUPS), SCALE_COLUMNS - 1)
        else:
            group = tl.minimum(byte, WIDTH - 1) * EACH // GROUP
        scale = tl.load(scales + scale_start[None, :] + group[:, None])
        zero = tl.zeros(scale.shape, tl.float32)
        if ZEROS >= 0:
            zero += tl.load(zeros + zero_start[None, :] + group[:, None]).to(tl.float32)
        if FAST:
            zero = (0.0 - zero - (MIDDLE + (128 if tl.bfloat16 == TYPE else 1024))).to(TYPE)
            if GROUPS > 0:
                scale, zero = _spread(scale, GROUPS, BLOCK, BLOCK_ROWS), _spread(zero, GROUPS, BLOCK, BLOCK_ROWS)
            total = tl.dot(even, _fast(code, scale, zero, False, TYPE), total)
            total = tl.dot(odd, _fast(code, scale, zero, True, TYPE), total)
        else:
            scale = _decoded(scale, scale_table, divisor, factor, CODED, DIVIDED, MULTIPLIED)
            if GROUPS > 0:
                scale, zero = _spread(scale, GROUPS, BLOCK, BLOCK_ROWS), _spread(zero, GROUPS, BLOCK, BLOCK_ROWS)
            if FOUR:
                weight = _weight(code & 15, scale, zero, TABLE, MIDDLE, INNER, TYPE, INTERPRETED)
                total = added(even, weight, total, INTERPRETED)
                weight = _weight(code >> 4, scale, zero, TABLE, MIDDLE, INNER, TYPE, INTERPRETED)
                total = added(odd, weight, total, INTERPRETED)
            else:
                weight = _weight(code, scale, zero, TABLE, MIDDLE, INNER, TYPE, INTERPRETED)
                total = added(even, weight, total, INTERPRETED)
    line = tl.program_id(2) * tokens + token
    if EXPERTS > 0:
        line = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2) + tl.arange(0, TOKENS)
    element = line[:, None].to(tl.int64) * stride + row[None, :]
    inside = real & (row < ROWS)[None, :]
    if WHOLE:
        if BIASED:
            total += tl.load(bias + clamped).to(tl.float32)[None, :]
        tl.store(out + element, rounded(total, TYPE), mask=inside)
    else:
        tl.store(out + element, total, mask=inside)


@triton.jit
def _expert(experts, EXPERTS: tl.constexpr):
    """Return the expert of this program's pair."""
    return tl.minimum(tl.maximum(tl.load(experts + tl.program_id(0)).to(tl.int32), 0), EXPERTS - 1)


@triton.jit(do_not_specialize=["divisor", "factor", "steps"])
def _multiply_transposed(
    states,
    data,
    scales,
    zeros,
    scale_table,
    experts,
    out,
    divisor,
    factor,
    steps,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    FOUR: tl.constexpr,
    TABLE: tl.constexpr,
    MIDDLE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    LAST_SCALES: tl.constexpr,
    LAST_ZEROS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
    DIVIDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    INNER: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH_TOKEN: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply one pair's states with its expert, a row an input. A program reads `BLOCK` bytes of each of `steps`
    times `GROUP_ROWS` rows. Those of a step share a row of scales; `BLOCK_ROWS` of them are a tile."""
    EACH: tl.constexpr = 2 if FOUR else 1  # codes in a byte
    INPUTS: tl.constexpr = LENGTH // EXPERTS
    ALIGNED: tl.constexpr = INPUTS % GROUP_ROWS == 0 and CHUNK % GROUP_ROWS == 0  # a step's rows follow each other
    first_row = _expert(experts, EXPERTS) * INPUTS
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    clamped, inside = tl.minimum(byte, WIDTH - 1), (byte < WIDTH)[None, :]
    states += tl.program_id(0) // EACH_TOKEN * INPUTS
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    odd = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    first = tl.program_id(2) * steps
    for step in range(first, tl.minimum(first + steps, tl.cdiv(INPUTS, GROUP_ROWS))):
        lead = first_row + step * GROUP_ROWS
        chunk, within = (lead // CHUNK).to(tl.int64), lead % CHUNK
        at_end = chunk == CHUNKS - 1
        line = within // SCALE_ROWS * SCALE_COLUMNS if SCALE_ROWS > 0 else within * 0
        scale_row = scales + (chunk * STRIDE + tl.where(at_end, LAST_SCALES, SCALES)) // SCALE_BYTES + line
        zero_row = zeros + (chunk * STRIDE + tl.where(at_end, LAST_ZEROS, ZEROS)) // 2 + line
        column = clamped * EACH
        scale = tl.load(scale_row + (column // GROUP if GROUP > 0 else column * 0))
        scale = _decoded(scale, scale_table, divisor, factor, CODED, DIVIDED, MULTIPLIED)
        zero = _zeros(zero_row, column, GROUP, ZEROS)
        if FOUR:
            second = tl.load(scale_row + ((column + 1) // GROUP if GROUP > 0 else column * 0))
            second = _decoded(second, scale_table, divisor, factor, CODED, DIVIDED, MULTIPLIED)
            second_zero = _zeros(zero_row, column + 1, GROUP, ZEROS)
        for part in tl.static_range(GROUP_ROWS // BLOCK_ROWS):
            row = step * GROUP_ROWS + part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            state = tl.load(states + row, mask=row < INPUTS, other=0.0).to(tl.float32)[:, None]
            if ALIGNED:
                begin = chunk * STRIDE + (within + part * BLOCK_ROWS).to(tl.int64) * WIDTH
                element = begin + (tl.arange(0, BLOCK_ROWS)[:, None] * WIDTH + byte[None, :])
            else:
                row = first_row + tl.minimum(row, INPUTS - 1)
                begin = (row // CHUNK).to(tl.int64) * STRIDE + (row % CHUNK).to(tl.int64) * WIDTH
                element = begin[:, None] + byte[None, :]
            code = tl.load(data + element, mask=inside, other=0)
            if EXACT:
                state *= 16384.0
                number = _small((code & 15).to(tl.uint16)) if INTERPRETED else _small_of(code, False)
                total += number * scale[None, :] * state
                number = _small((code >> 4).to(tl.uint16)) if INTERPRETED else _small_of(code, True)
                odd += number * second[None, :] * state
            else:
                number = code & 15 if FOUR else code
                weight = _weight(number, scale[None, :], zero[None, :], TABLE, MIDDLE, INNER, TYPE, INTERPRETED)
                total += weight.to(tl.float32) * state
                if FOUR:
                    number = code >> 4
                    weight = _weight(
                        number, second[None, :], second_zero[None, :], TABLE, MIDDLE, INNER, TYPE, INTERPRETED
                    )
                    odd += weight.to(tl.float32) * state
    element = (tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * (WIDTH * EACH) + byte * EACH
    tl.store(out + element, tl.sum(total, 0), mask=byte < WIDTH)
    if FOUR:
        tl.store(out + element + 1, tl.sum(odd, 0), mask=byte < WIDTH)


@triton.jit
def _decoded(
    scale,
    scale_table,
    divisor,
    factor,
    CODED: tl.constexpr,
    DIVIDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    """Return scales as float32, from their stored form."""
    scale = tl.load(scale_table + scale.to(tl.int32)) if CODED else scale.to(tl.float32)
    if DIVIDED:
        scale = tl.div_rn(scale, tl.zeros(scale.shape, tl.float32) + divisor)
    return scale * factor if MULTIPLIED else scale


@triton.jit
def _zeros(zeros, column, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Return the zero points of columns, float32, from a row of them."""
    if ZEROS >= 0:
        return tl.load(zeros + (column // GROUP if GROUP > 0 else column * 0)).to(tl.float32)
    else:
        return tl.zeros(column.shape, tl.float32)


@triton.jit
def _spread(scales, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return scales ``[GROUPS, ROWS]``, each for as many of `BLOCK` values: ``[BLOCK, ROWS]``."""
    return tl.reshape(tl.broadcast_to(scales[:, None, :], (GROUPS, BLOCK // GROUPS, ROWS)), (BLOCK, ROWS))


@triton.jit
def _weight(
    code,
    scale,
    zero,
    TABLE: tl.constexpr,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the weights of codes (uint8), as unpacking gives them; zero points are float32."""
    if MIDDLE >= 0:  # a code is in the mantissa of a number whose last place is one
        number = (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
    elif TABLE == "int8":
        number = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.uint16)
        if TABLE == "e2m1":
            number = _small(code) * 16384.0
        elif TABLE == "e4m3":
            bits = (code & 0x80) << 8 | (code & 0x7F) << 7
            number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            number = tl.where((code & 0x7F) == 0x7F, float("nan"), number)
        else:
            tl.static_assert(TABLE == "e5m2")
            number = (code << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return _rounded(_rounded((number - zero) * scale, INNER, INTERPRETED).to(tl.float32), TYPE, INTERPRETED)


@triton.jit
def _small(code):
    """Return the numbers of e2m1 (codes of uint16) over 16384, float32."""
    bits = (code & 8) << 12 | (code & 7) << 9
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small_of(code, SECOND: tl.constexpr):
    """Unpack the low (with `SECOND`, the high) nibble of each byte. The numbers are e2m1 over 16384."""
    if SECOND:
        return tl.inline_asm_elementwise(_SMALL_SECOND, _FLOATS, [code], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_SMALL_FIRST, _FLOATS, [code], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def _rounded(value, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round as `zinfer.engine.stream.weights.expand.rounded`, by an instruction where there is one."""
    if INTERPRETED:
        return rounded(value, TYPE)
    return value.to(TYPE)


@triton.jit
def _fast(code, scale, zero, SECOND: tl.constexpr, TYPE: tl.constexpr):
    """Return the weights of the low (with `SECOND`, the high) nibbles; `zero` is added to codes (`_PAIRS`)."""
    if tl.bfloat16 == TYPE:
        pair: tl.constexpr = _BF16_SECOND if SECOND else _BF16_FIRST
        return tl.inline_asm_elementwise(pair, _REGISTERS, [code, scale, zero], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        half: tl.constexpr = _FP16_SECOND if SECOND else _FP16_FIRST
        return tl.inline_asm_elementwise(half, _REGISTERS, [code, scale, zero], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["rows", "stride", "splits"])
def _add(partial, bias, out, rows, stride, splits, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums of a token in order, and the bias."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * tl.num_programs(1) + token) * rows + row, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * stride + row, rounded(total, out.dtype.element_ty), mask=inside)
