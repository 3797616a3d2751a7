"""Lossless codec for bf16 and FP8 (e4m3) weights: short codes for their exponents, so that fewer bytes cross the link.

Sign and mantissa of a weight are noise; its exponent is not. For Gaussian weights the exponent carries 2.55 bits of
information, so no code gets below 65.9% of the size of bf16, whose exponents have 8 bits, and below 81.8% of that of
e4m3, where they have 4. This codec takes 66.4-66.7% and 83%, Huffman codes take 66.1-66.2% of bf16; its codes have a
fixed length, which a GPU unpacks in parallel.

A block is `BLOCK` values in order. Level 1 gives each value two bits: one of the block's three commonest exponents, or
3, the escape. The escaped values (a quarter), in order and without gaps, have two bits each in level 2 for the next
three exponents, the escaped ones of those in level 3, and so on. A value still escaped after `LEVELS` (one in a
thousand) has a byte with its exponent. Each level is one stream through all blocks. The parts, little-endian, each a
multiple of 16 bytes:

    mantissas    sign and mantissa of each value: a byte of bf16, half a byte of e4m3. Of every 4 values v0 to v3, bf16
                 stores v0, v2, v1, v3; e4m3 stores v0 below v2 in one byte, v1 below v3 in the next
    level 1      rows of 16 codes in 32 bits: value `2i + h` of a row has the bits `2i + 16h` and `2i + 16h + 1`
    records      per block, in 32 bits each: its start in levels 2, 3, .. and in the bytes, and a table for every level
                 (3 exponents, ascending, 8 bits each); a last record holds the ends of the streams
    levels 2..   rows as in level 1; a block may start anywhere in a row
    bytes        exponents that are in no table, then 8 or more padding bytes
    tail         the values after the last whole block, uncoded

The order within rows and mantissas lets a decoder work on two values at a time with masks and without shuffling. The
container of the data keeps checksums: damaged data decode to wrong weights or not at all, but the decoder never reads
or writes outside of `data` and `out`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from zinfer.engine.stream.weights.block import BLOCK as BLOCK
from zinfer.engine.stream.weights.block import LEVELS as LEVELS
from zinfer.engine.stream.weights.block import MAX_ESCAPES
from zinfer.engine.stream.weights.block import ROW as ROW

# A decode is one launch, 10-20 us of CPU time; on a link of 55 GB/s a tensor of this size saves about as much. For FP8,
# which takes a launch in any case, it is the size from which the GPU unpacks faster than the link brings it.
MIN_NUMEL = 1 << 20
MAX_NUMEL = 1 << 31  # values that the kernel for FP8 can count
BITS = {torch.bfloat16: 16, torch.float8_e4m3fn: 8}  # bits of a value, by the types that are coded
_MANTISSA = {16: 7, 8: 3}  # bits of a mantissa

_STRIDE = 7  # exponents are counted in every seventh value: enough for ranks, and few patterns have this period
_GPU_CHUNK, _CPU_CHUNK = 4096, 32  # blocks encoded at a time: enough to keep a GPU busy, few enough for a CPU's caches
_SHIFTS = [2 * (lane // 2) + 16 * (lane % 2) for lane in range(ROW)]


@dataclass(frozen=True)
class Layout:
    """Places of the parts of encoded data. The host has them, so that no decode waits for the device. `sections` are
    the offsets of levels 2 to `LEVELS`, of the bytes, of the tail and of the end, in units of 16 bytes. `bits` are
    a value's before it is coded: 16 of bf16, 8 of e4m3."""

    numel: int
    sections: tuple[int, ...]
    bits: int = 16

    @property
    def blocks(self) -> int:
        return self.numel // BLOCK

    @property
    def records(self) -> int:
        """Offset of the records, in units of 16 bytes."""
        return self.blocks * (BLOCK * (self.bits // 2 + 2) // 8 // 16)

    @property
    def size(self) -> int:
        """Size of the data, in bytes."""
        return self.sections[-1] * 16

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        return self.numel * self.bits // 8


@dataclass(frozen=True)
class Encoded:
    """Encoded tensor of `shape`: `data` (uint8 ``[layout.size]``, contiguous, on the tensor's device). `data` is a view
    of a buffer as large as the tensor: copy it to its final place and drop it."""

    data: Tensor
    shape: torch.Size
    layout: Layout


def worth_coding(tensor: Tensor) -> bool:
    """Tell whether coding saves more than its launch costs. Never for norms, biases and non-bf16 types."""
    return tensor.dtype == torch.bfloat16 and tensor.numel() >= max(MIN_NUMEL, BLOCK)


def encode(tensor: Tensor) -> Encoded | None:
    """Encode a bf16 or e4m3 tensor; return None if it does not shrink. Runs on the tensor's device, one chunk at a
    time: besides the result it takes about 1.2 GB on a GPU, 10 MB on a CPU, and at its peak a byte for each escape (a
    third of the values). A tensor that is not contiguous is copied."""
    blocks = tensor.numel() // BLOCK
    if tensor.dtype not in BITS or not blocks:
        return None
    width = BITS[tensor.dtype]
    bits = tensor.detach().contiguous().view(-1).view(torch.int16 if width == 16 else torch.uint8)
    coded, limit = blocks * BLOCK, bits.nbytes // 16
    data = torch.empty(limit * 16, dtype=torch.uint8, device=bits.device)
    records = Layout(bits.numel(), (), width).records
    level_1 = coded * width // 16
    head = records + _units((blocks + 1) * 8 * LEVELS)
    streams: list[list[Tensor]] = [[] for _ in range(LEVELS)]  # codes of levels 2, .., and the last exponents
    tables, counts, end = [], [], 0
    for chunk in bits[:coded].split(BLOCK * (_GPU_CHUNK if bits.is_cuda else _CPU_CHUNK)):
        start, end = end, end + chunk.numel()
        exponents = (chunk >> 7).to(torch.uint8) if width == 16 else chunk >> 3 & 15
        tables.append(_commonest(exponents))
        symbols, count = _levels(exponents, tables[-1])
        counts.append(count)
        data[start * width // 16 : end * width // 16] = _pack_mantissas(chunk)
        data[level_1 + start // 4 : level_1 + end // 4] = _pack(symbols[0])
        for stream, escaped in zip(streams, symbols[1:], strict=True):
            stream.append(escaped)
    *levels, last = map(torch.cat, streams)
    packed = [_pack(pad(codes, (0, -codes.numel() % ROW))) for codes in levels]
    parts = [*packed, pad(last, (0, 8)), bits[coded:].view(torch.uint8)]
    sections = tuple(accumulate((_units(part.numel()) for part in parts), initial=head))
    count = torch.cat(counts)
    # Starts are unsigned 32-bit numbers.
    if sections[-1] >= limit or int(count.max()) > MAX_ESCAPES or int(count.sum(0).max()) >= 1 << 32:
        return None
    parts.insert(0, _records(count, torch.cat(tables)))
    for (begin, end), part in zip(pairwise((records, *sections)), parts, strict=True):
        section = data[begin * 16 : end * 16]
        section[: part.numel()] = part
        section[part.numel() :] = 0
    layout = Layout(bits.numel(), sections, width)
    return Encoded(data[: layout.size], tensor.shape, layout)


def decode(data: Tensor, layout: Layout, out: Tensor) -> None:
    """Decode `data` (uint8) into `out` (bf16 or e4m3, ``layout.numel`` values). For bf16 on a GPU this is one launch on
    the current stream, and a copy if there is a tail; it allocates nothing and does not wait. The kernel for e4m3 also
    multiplies with scales (`zinfer.engine.stream.weights.expand`); here a GPU decodes e4m3 as a CPU does. Data and
    `out` are contiguous and begin at multiples of 16 bytes; the layout of stored data is checked where it is read
    (`zinfer.engine.stream.weights.packed`)."""
    values = out.view(-1)
    if out.is_cuda and layout.bits == 16:
        from zinfer.engine.stream.weights.decode import launch

        launch(data, values, layout.blocks, layout.sections[:-1])
    else:
        _decode_blocks(data, layout, values)
    if rest := layout.numel % BLOCK:
        values[-rest:] = data[layout.sections[-2] * 16 :][: rest * layout.bits // 8].view(out.dtype)


def chunk_places(chunks: Sequence[tuple[Layout, int, int]]) -> list[list[int]] | None:
    """Return the places of bf16 chunks for `decode_chosen`: each has a layout, its first byte, and where it goes. None
    if one has a tail, or other values."""
    if any(layout.bits != 16 or layout.numel % BLOCK for layout, _, _ in chunks):
        return None
    return [[begin, offset, layout.blocks, *layout.sections[:-1]] for layout, begin, offset in chunks]


def decode_chosen(data: Tensor, places: Tensor, max_blocks: int, chosen: Tensor, out: Tensor) -> None:
    """Decode the chunks of chosen experts, on the device. `chosen` (int ``[n]``) numbers them; their values go to `out`
    (uint8). `places` are those of `chunk_places`, int64 ``[experts, chunks, 8]``, in `data` and `out`, all multiples of
    16 bytes; a chunk has at most `max_blocks` blocks. A GPU needs one launch and waits for nothing; the host never sees
    the choice."""
    if out.is_cuda:
        from zinfer.engine.stream.weights.decode import launch_chosen

        launch_chosen(data, places, chosen, max_blocks, out)
        return
    for number in chosen.tolist():
        for begin, offset, blocks, *sections in places[number].tolist() if 0 <= number < len(places) else ():
            layout = Layout(blocks * BLOCK, (*sections, sections[-1]))
            decode(data[begin : begin + layout.size], layout, out[offset : offset + layout.nbytes].view(torch.bfloat16))


def _units(size: int) -> int:
    return -(-size // 16)


def _commonest(exponents: Tensor) -> Tensor:
    """Return the tables of each block of `exponents` (uint8 ``[blocks * BLOCK]``): uint8 ``[blocks, LEVELS, 3]``."""
    sample = exponents.view(-1, BLOCK)[:, ::_STRIDE].int()
    blocks = sample.shape[0]
    sample += 256 * torch.arange(blocks, dtype=torch.int32, device=sample.device)[:, None]
    counts = sample.view(-1).bincount(minlength=blocks * 256).view(blocks, 256)
    tables = counts.topk(3 * LEVELS).indices.view(blocks, LEVELS, 3)
    return tables.sort(-1).values.to(torch.uint8)


def _levels(exponents: Tensor, tables: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return codes of levels, then the remaining exponents; and counts. Codes take a byte. Counts are codes of levels
    2, .. and remaining exponents of each block (int64 ``[blocks, LEVELS]``)."""
    streams: list[Tensor] = []
    counts: list[Tensor] = []
    symbols = exponents.view(-1, BLOCK)
    ends = torch.arange(1, symbols.shape[0] + 1, device=symbols.device) * BLOCK
    for level in range(LEVELS):
        columns = tables[:, level].unbind(1)
        table = [_repeat(column, counts[-1]) if level else column[:, None] for column in columns]
        # Ones where the symbol differs from the table's exponent; a comparison takes a CPU ten times as long.
        low, middle, high = ((symbols - exponent).clamp_(max=1) for exponent in table)
        escaped = _nonzero((low * middle * high).view(-1))
        streams.append((low * (1 + middle * (1 + high))).view(-1))
        symbols = symbols.view(-1).index_select(0, escaped)
        ends = torch.searchsorted(escaped, ends)
        counts.append(ends.diff(prepend=ends.new_zeros(1)))
    return [*streams, symbols], torch.stack(counts, 1)


# On a CPU numpy runs the next two functions many times faster than torch.


def _nonzero(flags: Tensor) -> Tensor:
    """Return the indices of the ones in `flags` (uint8, zeros and ones)."""
    return flags.nonzero().view(-1) if flags.is_cuda else torch.from_numpy(np.flatnonzero(flags.numpy().view(np.bool_)))


def _repeat(values: Tensor, counts: Tensor) -> Tensor:
    if values.is_cuda:
        return values.repeat_interleave(counts)
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def _records(counts: Tensor, tables: Tensor) -> Tensor:
    starts = pad(counts.t().contiguous().cumsum(1).t(), (0, 0, 1, 0))  # a GPU scans rows in parallel, not columns
    words = (tables.int() << torch.tensor([0, 8, 16], dtype=torch.int32, device=tables.device)).sum(-1)
    return torch.cat([starts, pad(words, (0, 0, 0, 1))], 1).to(torch.int32).view(-1).view(torch.uint8)


def _pack(codes: Tensor) -> Tensor:
    """Pack codes (uint8 ``[n * ROW]``) into rows (uint8 ``[n * 4]``)."""
    words = codes.view(torch.int64)
    words = (words | words >> 14) & 0x00000F0F_00000F0F
    words |= words >> 28  # the even codes of 8 are the first byte now, the odd ones the second
    halves = words.view(torch.uint8).view(-1, 2, 8)
    return torch.stack([halves[:, half, parity] for parity in range(2) for half in range(2)], 1).view(-1)


def _unpack(rows: Tensor) -> Tensor:
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=rows.device)
    return ((rows.view(torch.int32)[:, None] >> shifts).to(torch.uint8) & 3).view(-1)


def _pack_mantissas(bits: Tensor) -> Tensor:
    """Return sign and mantissa of values: uint8 ``[n]`` of bf16 (int16 ``[n]``), ``[n / 2]`` of e4m3 (uint8 ``[n]``),
    computed 4 or 8 at a time."""
    words = bits.clone().view(torch.int64)
    if bits.dtype == torch.uint8:
        signs = words >> 4
        signs &= 0x0808_0808_0808_0808
        words &= 0x0707_0707_0707_0707
        words |= signs
        words |= words >> 12  # the second two of 4 values lie above the first two now
        return words.view(torch.int16)[::2].contiguous().view(torch.uint8)
    signs = words >> 8
    signs &= 0x0080_0080_0080_0080
    words &= 0x007F_007F_007F_007F
    words |= signs
    words |= words >> 24
    return words.view(torch.int32)[::2].contiguous().view(torch.uint8)


def _unpack_mantissas(mantissas: Tensor, width: int) -> Tensor:
    """Return sign and mantissa in values of `width` bits: int16 or uint8 ``[n]``."""
    if width == 8:
        pairs = mantissas.view(-1, 1, 2)
        bits = torch.cat([pairs & 15, pairs >> 4], 1).view(-1)
        return (bits & 8) << 4 | bits & 7
    bits = mantissas.view(-1, 2, 2).transpose(1, 2).reshape(-1).to(torch.int16)
    return (bits & 0x80) << 8 | bits & 0x7F


def _decode_blocks(data: Tensor, layout: Layout, out: Tensor) -> None:
    """Decode in plain torch, deepest level first, one chunk at a time. Waits for the device."""
    blocks, width = layout.blocks, layout.bits
    level_1, dtype = blocks * BLOCK * width // 16, torch.int16 if width == 16 else torch.uint8
    words = data[layout.records * 16 :][: (blocks + 1) * 8 * LEVELS].view(torch.int32).view(-1, 2 * LEVELS)
    starts = words[:, :LEVELS].long() & 0xFFFF_FFFF
    tables = torch.stack([(words[:-1, LEVELS:] >> 8 * i).to(torch.uint8) for i in range(3)], -1)
    streams = [data[16 * a : 16 * b] for a, b in pairwise(layout.sections[:-1])]
    for first in range(0, blocks, _CPU_CHUNK):
        last = min(first + _CPU_CHUNK, blocks)
        begins, ends = starts[first].tolist(), starts[last].tolist()
        symbols = streams[-1][begins[-1] : ends[-1]]
        for level in range(LEVELS - 1, -1, -1):
            table = tables[first:last, level]
            if level:
                begin, end = begins[level - 1], ends[level - 1]
                rows = streams[level - 1][begin // ROW * 4 : -(-end // ROW) * 4]
                codes = _unpack(rows)[begin % ROW :][: end - begin]
                table = table.repeat_interleave(starts[first : last + 1, level - 1].diff(), 0)
            else:
                rows = data[level_1 + first * BLOCK // 4 : level_1 + last * BLOCK // 4]
                codes = _unpack(rows).view(-1, BLOCK)
                table = table[:, None]
            low, middle, high = table.unbind(-1)
            deeper, symbols = symbols, low + (codes & 1) * (middle - low) + (codes >> 1) * (high - low)
            symbols.masked_scatter_(codes == 3, deeper)
        values = out[first * BLOCK : last * BLOCK].view(dtype)
        mantissas = _unpack_mantissas(data[first * BLOCK * width // 16 : last * BLOCK * width // 16], width)
        values.copy_(mantissas | symbols.view(-1).to(dtype) << _MANTISSA[width])
