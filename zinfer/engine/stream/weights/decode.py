# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernel that decodes the codec: one program per block, which reads and writes each byte once.

At 800 GB/s of output an H100 has about 70 instructions for each value; the kernel takes 19 for level 1 and 7 for the
deeper levels, which only a quarter of the values reach. A thread has a row of 16 values. The exponent of an escape is
found by counting: escapes before this row (a prefix sum over the rows) and before this value (bits of the row). Level
`k + 1` has to be unpacked before level `k`; its exponents, one byte each, wait in the block's own part of `out`:

    level 4 -> end of the part, 3 -> its beginning, 2 -> its end, then the values from the beginning on

A value takes two bytes and an exponent one, so the values never overwrite exponents that are still needed, provided
that each tile is read before it is written: hence the barriers. Damaged data can only change starts and counts, which
are clamped to the streams and to the block's part.

Triton comes with torch for CUDA; with TRITON_INTERPRET=1 in the environment the kernel runs on a CPU.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights import block as numbers

BLOCK, LEVELS, MAX_ESCAPES = map(tl.constexpr, (numbers.BLOCK, numbers.LEVELS, numbers.MAX_ESCAPES))
# A tile is one row per thread. More warps waste work on levels 3 and 4, which seldom fill a tile (25, 26, 30
# instructions a value for 1, 2, 4 warps); fewer warps hide less latency and leave longer tails.
WARPS = 2


def launch(data: Tensor, out: Tensor, blocks: int, offsets: Sequence[int]) -> None:
    """Decode the whole blocks of `data` (uint8) into `out` (bf16 ``[numel]``). The tail is left out. Runs on the
    current stream. `offsets` has levels 2 to 4, the bytes and the tail, in units of 16 bytes. Checks nothing:
    `codec.decode` does."""
    # A load moved ahead of a barrier would read data that is not written yet: hence one stage.
    _decode[(blocks,)](data, out, blocks, *offsets, ROWS=32 * WARPS, num_warps=WARPS, num_stages=1)


def launch_chosen(data: Tensor, table: Tensor, chosen: Tensor, max_blocks: int, out: Tensor) -> None:
    """Decode the chunks of chosen experts in one launch. Runs on the current stream. `table` is int64 ``[experts,
    chunks, 8]``, the places that `codec.decode_chosen` describes; numbers in `chosen` beyond the experts are left out.
    Checks nothing."""
    experts, chunks, _ = table.shape
    grid = max_blocks, chunks, chosen.numel()
    _decode_chosen[grid](data, table, chosen, out, experts, chunks, ROWS=32 * WARPS, num_warps=WARPS, num_stages=1)


# The offsets differ for every tensor: specialisation would compile a kernel for every pattern of divisibility.
@triton.jit(do_not_specialize=["blocks", "level_2", "level_3", "level_4", "rest", "tail"])
def _decode(data, out, blocks, level_2, level_3, level_4, rest, tail, ROWS: tl.constexpr):
    block = tl.program_id(0)
    _decode_block(data, out, block, blocks, level_2, level_3, level_4, rest, tail, ROWS)


@triton.jit(do_not_specialize=["experts", "chunks"])
def _decode_chosen(data, table, chosen, out, experts, chunks, ROWS: tl.constexpr):
    block = tl.program_id(0)
    expert = tl.load(chosen + tl.program_id(2)).to(tl.int64)
    inside = (expert >= 0) & (expert < experts)
    entry = table + (tl.where(inside, expert, 0) * chunks + tl.program_id(1)) * 8
    blocks = tl.load(entry + 2).to(tl.int32)
    if inside & (block < blocks):
        begin = tl.multiple_of(tl.load(entry), 16)
        first = tl.multiple_of(tl.load(entry + 1), 16)
        level_2 = tl.load(entry + 3).to(tl.int32)
        level_3 = tl.load(entry + 4).to(tl.int32)
        level_4 = tl.load(entry + 5).to(tl.int32)
        rest = tl.load(entry + 6).to(tl.int32)
        tail = tl.load(entry + 7).to(tl.int32)
        values = (out + first).to(tl.pointer_type(tl.uint16))
        _decode_block(data + begin, values, block, blocks, level_2, level_3, level_4, rest, tail, ROWS)


@triton.jit
def _decode_block(data, out, number, blocks, level_2, level_3, level_4, rest, tail, ROWS: tl.constexpr):
    """Decode one block. Positions within the block's parts of `out` and `data` have 32 bits, the parts' offsets 64."""
    block = number.to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 4)[None, :]
    words = data.to(tl.pointer_type(tl.uint32))
    part = (out + block * BLOCK).to(tl.pointer_type(tl.uint32))
    level_1 = words + tl.cast(blocks, tl.int64) * (BLOCK // 4)
    record = level_1 + tl.cast(blocks, tl.int64) * (BLOCK // 16) + block * (2 * LEVELS)

    position = escapes(words, part, record, row, column, level_2, level_3, level_4, rest, tail, ROWS)
    table = tl.load(record + LEVELS)
    for tile in range(0, BLOCK // 16, ROWS):
        index = tile + row
        code = tl.load(level_1 + block * (BLOCK // 16) + index)
        mantissa = tl.load(words + block * (BLOCK // 4) + index[:, None] * 4 + column)
        first, second, position = exponents(code, table, part, position, BLOCK // 2 - 2)
        first = mantissa << 8 & 0x80008000 | mantissa & 0x7F007F | first << 7
        second = mantissa & 0x80008000 | mantissa >> 8 & 0x7F007F | second << 7
        tl.debug_barrier()
        pairs = tl.reshape(tl.join(first, second), (ROWS, 8))
        tl.store(part + index[:, None] * 8 + tl.arange(0, 8)[None, :], pairs)


@triton.jit
def escapes(words, part, record, row, column, level_2, level_3, level_4, rest, tail, ROWS: tl.constexpr):
    """Unpack a block's deeper levels; return the first exponent's place. That is the place, in bytes, of the exponent
    of level 1's first escape. `part` of the output is a pointer to words, two bytes a value; `words` are all data,
    `record` is the block's."""
    sections = (level_2, level_3, level_4, rest, tail)
    # Place of the deepest escapes: bytes of `data`.
    start = tl.load(record + LEVELS - 1).to(tl.int64)
    size = tl.cast(tail - rest, tl.int64) * 4
    skipped = tl.minimum(start >> 2, size - 2)
    source = words + tl.cast(rest, tl.int64) * 4 + skipped
    last = tl.minimum(size - 2 - skipped, BLOCK // 4).to(tl.int32)
    position = (start & 3).to(tl.int32)

    for level in tl.static_range(LEVELS - 1, 0, -1):
        # The block's codes begin and end anywhere in a row. Codes of the previous block are set to 0, which is no
        # escape; codes of the next block are read and ignored.
        start = tl.load(record + level - 1)
        count = tl.minimum(tl.load(record + 2 * LEVELS + level - 1) - start, MAX_ESCAPES).to(tl.int32)
        lead = (start & 15).to(tl.int32)
        skipped = (start >> 4).to(tl.int64)
        size = tl.maximum(tl.cast(sections[level] - sections[level - 1], tl.int64) * 4 - skipped, 0)
        rows = tl.minimum((lead + count + 15) // 16, size).to(tl.int32)
        inside = (0xFFFF << (lead + 1 & ~1)) & 0xFFFF | 0xFFFF << (lead & ~1) << 16
        codes = words + tl.cast(sections[level - 1], tl.int64) * 4 + skipped
        table = tl.load(record + LEVELS + level)
        target = BLOCK // 2 - 4 - rows * 4 if level % 2 else 0  # a window reads one word too many
        for tile in range(0, rows, ROWS):
            index = tile + row
            code = tl.load(codes + index, mask=index < rows, other=0)
            code = tl.where(index == 0, code & inside.to(tl.uint32), code)
            first, second, position = exponents(code, table, source, position, last)
            quad = (first | first >> 8) & 0xFFFF | (second | second >> 8) << 16
            tl.store(part + target + index[:, None] * 4 + column, quad, mask=(index < rows)[:, None])
        tl.debug_barrier()
        source = part
        last = BLOCK // 2 - 2
        position = target * 4 + lead
    return position


@triton.jit
def exponents(codes, table, source, position, last):
    """Return the exponents of rows of codes (uint32 ``[ROWS]``). The exponents of escapes are bytes at `source` (a
    pointer to words; the last but one is number `last`), the first one at `position`. Returns two uint32 ``[ROWS, 4]``,
    with the exponents of the first two and of the last two of every four values in the low bytes of half-words, and the
    position after the last escape."""
    # Number of escapes in every four values, in nibbles; then in all fours before.
    flags = codes & codes >> 1 & 0x55555555
    counts = flags + (flags >> 16)
    counts = (counts & 0x3333) + (counts >> 2 & 0x3333)
    before = counts * 0x1110
    total = ((before >> 12 & 15) + (counts >> 12)).to(tl.int32)
    begin = position + tl.cumsum(total) - total
    nibble = tl.arange(0, 4)[None, :] * 4
    begin = begin[:, None] + (before[:, None] >> nibble & 15).to(tl.int32)
    # Four values have at most four escapes, which lie in two words.
    word = tl.minimum(begin >> 2, last)
    window = tl.load(source + word + 1).to(tl.uint64) << 32 | tl.load(source + word).to(tl.uint64)
    shift = ((begin & 3) * 8).to(tl.uint32)
    four = codes[:, None] >> nibble
    first, shift = _pair(four, table, window, shift)
    second, shift = _pair(four >> 2, table, window, shift)
    return first, second, position + tl.sum(total)


@triton.jit
def _pair(codes, table, window, shift):
    """Return the exponents of two values, and the `shift` behind them. They are in the low bytes of half-words; the
    codes are bits 0-1 and 16-17. `shift` leads to the next unused byte of the `window`."""
    low = codes & 0x10001
    high = codes >> 1 & 0x10001
    escaped = low & high
    # The table ascends, so that no half-word borrows from the other.
    base = table & 0xFF
    listed = base * 0x10001 + low * ((table >> 8 & 0xFF) - base) + high * ((table >> 16 & 0xFF) - base)
    first = (window >> shift).to(tl.uint32) & 0xFF
    shift += (escaped & 1) * 8
    second = (window >> shift).to(tl.uint32) & 0xFF
    shift += (escaped >> 16) * 8
    mask = escaped * 0xFFFF
    return listed ^ (listed ^ (first | second << 16)) & mask, shift
