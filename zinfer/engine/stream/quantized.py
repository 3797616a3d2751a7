"""Quantised matrices on the wire: rows of codes and their scales, as many bits as released, unpacked into the slot.

A chunk holds whole rows. Its parts, each from a multiple of 16 bytes on: codes, scales, and, if there are some, zero
points and the order of the columns. FP8 codes (e4m3) are coded losslessly (`zinfer.engine.stream.codec`) where that
makes them smaller. On a GPU one launch unpacks a chunk (`zinfer.engine.stream.expand`); on a CPU torch does so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zinfer.engine.quantization.dequantize import Codes, expand, table
from zinfer.engine.stream import codec

UNIT = 16  # bytes
# Rows of codes that are the inputs of transposed experts, and share a row of scales: products read them together.
TURNED_ROWS = 32


def _up(size: int) -> int:
    return -(-size // UNIT) * UNIT


@dataclass(frozen=True)
class CodesLayout:
    """Parts of a chunk of quantised rows (`zinfer.engine.quantization.dequantize.Codes`), and the arithmetic of its
    values."""

    rows: int
    columns: int
    bits: int
    table: str
    block: tuple[int, int]
    grid: tuple[int, int]  # rows and columns of scales
    scale_dtype: torch.dtype
    scale_table: str
    zeros: bool
    order: bool
    divisor: float
    factor: float
    inner: torch.dtype
    dtype: torch.dtype  # of the entry
    coded: codec.Layout | None = None  # given if the codes are coded losslessly

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Size of the unpacked rows, in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def _codes(self) -> int:
        return self.coded.size if self.coded is not None else self.rows * (self.columns * self.bits // 8)

    @property
    def _scales(self) -> int:
        return self.grid[0] * self.grid[1] * self.scale_dtype.itemsize

    @property
    def size(self) -> int:
        """Size of the data, in bytes."""
        return _up(self._codes) + _up(self._scales) + _up(self._zeros) + (_up(4 * self.columns) if self.order else 0)

    @property
    def _zeros(self) -> int:
        return self.grid[0] * self.grid[1] * 2 if self.zeros else 0

    @property
    def starts(self) -> tuple[int, int, int]:
        """Places of scales, zero points and order in the data, in bytes."""
        second = _up(self._codes) + _up(self._scales)
        return _up(self._codes), second, second + _up(self._zeros)

    def views(self, data: Tensor) -> Codes:
        """Return the codes in `data` (uint8, at least `size`), as views; coded ones as they are, in one dimension."""
        first, second, third = self.starts
        zeros = data[second : second + self._zeros].view(torch.int16).view(self.grid) if self.zeros else None
        order = data[third : third + 4 * self.columns].view(torch.int32) if self.order else None
        numbers = data[: self._codes]
        return Codes(
            numbers if self.coded is not None else numbers.view(self.rows, -1), self.columns, self.bits, self.table,
            data[first : first + self._scales].view(self.scale_dtype).view(self.grid), self.block, self.inner,
            self.scale_table, zeros, self.divisor, self.factor, order,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Chunks of rows of one matrix, `count` of them, `stride` bytes apart: the last one may have fewer rows, all else
    is alike."""

    layout: CodesLayout
    last: CodesLayout
    count: int = 1
    stride: int = 0

    @property
    def rows(self) -> int:
        return (self.count - 1) * self.layout.rows + self.last.rows

    @property
    def size(self) -> int:
        """Bytes from the beginning of the first chunk to the end of the last one."""
        return (self.count - 1) * self.stride + self.last.size

    def continued(self, layout: CodesLayout, begin: int) -> "Run | None":
        """Return the run with one more chunk, `begin` bytes from the first one's beginning; None if it does not
        continue this one."""
        first, stride = self.layout, self.stride or begin
        several = layout.grid[0] == -(-layout.rows // layout.block[0]) if first.grid[0] > 1 else layout.grid[0] == 1
        same = replace(layout, rows=first.rows, grid=first.grid) == first and layout.grid[1] == first.grid[1]
        if not (same and several and begin == self.count * stride):
            return None
        if not self.last.rows == first.rows >= layout.rows:
            return None
        return replace(self, last=layout, count=self.count + 1, stride=stride)


def rows_at_once(codes: Codes, itemsize: int, most: int) -> int:
    """Return how many rows a chunk of at most `most` unpacked bytes holds: whole blocks, one at least."""
    rows = max(1, most // (codes.columns * itemsize))
    if codes.scales.shape[0] == 1:
        return rows
    return max(1, rows // codes.block[0]) * codes.block[0]


def worth_coding(codes: Codes, dtype: torch.dtype) -> bool:
    """Tell whether `codes`, of an entry in `dtype`, are of the kind that is coded losslessly: e4m3 for a type of 16
    bits, and not a few."""
    plain = codes.zeros is None and codes.order is None and codes.divisor == codes.factor == 1.0
    enough = max(codec.MIN_NUMEL, codec.BLOCK) <= codes.rows * codes.columns < codec.MAX_NUMEL
    return (codes.table, codes.bits, dtype.itemsize) == ("e4m3", 8, 2) and plain and enough


def joined(matrices: Iterable[Codes], itemsize: int, most: int) -> Iterator[Codes]:
    """Yield matrices, those that follow each other as one where their scales allow it and the whole unpacks to at most
    `most` bytes: so the many experts of a layer take fewer launches."""
    group = list[Codes]()
    for matrix in matrices:
        if group and (
            not _continues(group[-1], matrix)
            or (sum(one.rows for one in group) + matrix.rows) * matrix.columns * itemsize > most
        ):
            yield _as_one(group)
            group = []
        group.append(matrix)
    if group:
        yield _as_one(group)


def _continues(one: Codes, other: Codes) -> bool:
    """Tell whether the rows of `other` may follow those of `one` in a matrix."""

    def kind(codes: Codes) -> tuple[object, ...]:
        return (
            codes.columns, codes.bits, codes.table, codes.block, codes.inner, codes.scale_table, codes.divisor,
            codes.factor, codes.scales.shape[1], codes.scales.dtype, codes.zeros is None,
        )  # fmt: skip

    several = min(one.scales.shape[0], other.scales.shape[0]) > 1  # one row of scales may be that of a whole matrix
    return kind(one) == kind(other) and one.order is other.order is None and several and one.rows % one.block[0] == 0


def _as_one(group: list[Codes]) -> Codes:
    first = group[0]
    if len(group) == 1:
        return first
    zeros = None if first.zeros is None else torch.cat([one.zeros for one in group if one.zeros is not None])
    numbers, scales = torch.cat([one.numbers for one in group]), torch.cat([one.scales for one in group])
    return replace(first, numbers=numbers, scales=scales, zeros=zeros)


def pieces(codes: Codes, dtype: torch.dtype, most: int, place: int = 0) -> list[tuple[CodesLayout, Tensor]]:
    """Return a matrix in chunks of at most `most` unpacked bytes: their layouts and their data (uint8). `place` is the
    matrix's in the slot: the kernel for coded ones writes from multiples of 16 bytes on."""
    step, found = rows_at_once(codes, dtype.itemsize, most), list[tuple[CodesLayout, Tensor]]()
    several = worth_coding(codes, dtype)
    for first in range(0, codes.rows, step):
        rows = slice(first, min(first + step, codes.rows))
        own = slice(None)
        if codes.scales.shape[0] > 1:
            own = slice(first // codes.block[0], -(-rows.stop // codes.block[0]))
        scales, zeros = codes.scales[own], None if codes.zeros is None else codes.zeros[own]
        layout = CodesLayout(
            rows.stop - rows.start, codes.columns, codes.bits, codes.table, codes.block, (len(scales), scales.shape[1]),
            scales.dtype, codes.scale_table, zeros is not None, codes.order is not None, codes.divisor, codes.factor,
            codes.inner, dtype,
        )  # fmt: skip
        numbers = codes.numbers[rows]
        if several and place % UNIT == 0:
            coded = codec.encode(numbers.view(torch.float8_e4m3fn))
            if coded is not None:
                layout, numbers = replace(layout, coded=coded.layout), coded.data
        place += layout.nbytes
        data = torch.zeros(layout.size, dtype=torch.uint8, device=codes.numbers.device)
        parts = layout.views(data)
        parts.numbers.copy_(numbers)
        parts.scales.copy_(scales)
        if zeros is not None and parts.zeros is not None:
            parts.zeros.copy_(zeros)
        if codes.order is not None and parts.order is not None:
            parts.order.copy_(codes.order)
        found.append((layout, data))
    return found


def unpack(data: Tensor, layout: CodesLayout, out: Tensor) -> None:
    """Unpack `data` (uint8) into `out` (`layout.dtype`, contiguous, `layout.numel` values); a GPU does so on the
    current stream. Raises ValueError where coded data and `out` do not fit their layout, or do not begin at multiples
    of 16 bytes."""
    coded = layout.coded
    if coded is not None and (
        not coded.sound
        or (coded.bits, coded.numel) != (8, layout.numel)
        or (data.numel() < layout.size or data.data_ptr() % UNIT or out.data_ptr() % UNIT)
    ):
        raise ValueError(f"{layout} does not fit {data.numel()} bytes at {data.data_ptr():#x}, out {out.data_ptr():#x}")
    codes, rows = layout.views(data), out.view(layout.rows, layout.columns)
    if out.is_cuda:
        from zinfer.engine.stream.expand import launch, launch_coded

        scale_table = table(layout.scale_table, out.device) if layout.scale_table else None
        if coded is None:
            launch(codes, rows, table(layout.table, out.device), scale_table)
        else:
            launch_coded(codes, coded, rows, scale_table)
        return
    if coded is not None:
        numbers = torch.empty(layout.rows, layout.columns, dtype=torch.uint8)
        codec.decode(codes.numbers, coded, numbers.view(torch.float8_e4m3fn))
        codes = replace(codes, numbers=numbers)
    rows.copy_(expand(codes, layout.dtype))
