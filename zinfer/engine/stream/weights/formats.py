"""Quantised matrices on the wire: rows of codes and scales in the released bits, unpacked into the layer buffer.

A chunk holds whole rows. Its parts, each from a multiple of 16 bytes on: codes, scales, and, if there are some, zero
points, the order of the columns and factors of scales. FP8 codes (e4m3) are coded losslessly
(`zinfer.engine.stream.weights.codec`) where that makes them smaller. On a GPU one launch unpacks a chunk
(`zinfer.engine.stream.weights.expand`); on a CPU torch does so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor

from zinfer.engine.quantization.dequantize import SUPER, Codes, expand, table
from zinfer.engine.stream.weights import codec

UNIT = 16  # bytes


def _up(size: int) -> int:
    return -(-size // UNIT) * UNIT


@dataclass(frozen=True)
class CodesLayout:
    """Parts of a chunk of quantised rows, and how to unpack them."""

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
    zero_dtype: torch.dtype = torch.int16
    supers: int = 0  # factors of the scales of `SUPER` columns

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Size of the unpacked rows, in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def _sections(self) -> tuple[int, int, int, int, int]:
        """Sizes of codes, scales, zero points, order and factors, in bytes."""
        codes = self.coded.size if self.coded is not None else self.rows * (self.columns * self.bits // 8)
        count = self.grid[0] * self.grid[1]
        zeros, supers = count * self.zero_dtype.itemsize * self.zeros, 2 * self.supers * self.grid[0]
        supers *= self.columns // SUPER
        return codes, count * self.scale_dtype.itemsize, zeros, 4 * self.columns * self.order, supers

    @property
    def size(self) -> int:
        """Size of the data, in bytes."""
        return sum(map(_up, self._sections))

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """Places of all parts but codes in the data, in bytes."""
        first, second, third, fourth = accumulate(map(_up, self._sections[:4]))
        return first, second, third, fourth

    def views(self, data: Tensor) -> Codes:
        """Return views of the codes in `data` (uint8). Coded ones have one dimension."""
        codes, *others = self._sections
        scales, zeros, order, supers = (
            data[start : start + size] for start, size in zip(self.starts, others, strict=True)
        )
        numbers = data[:codes]
        return Codes(
            numbers if self.coded is not None else numbers.view(self.rows, -1), self.columns, self.bits, self.table,
            scales.view(self.scale_dtype).view(self.grid), self.block, self.inner, self.scale_table,
            zeros.view(self.zero_dtype).view(self.grid) if self.zeros else None, self.divisor, self.factor,
            order.view(torch.int32) if self.order else None,
            supers.view(torch.float16).view(self.grid[0], -1, self.supers) if self.supers else None,
        )  # fmt: skip


def worth_coding(codes: Codes, dtype: torch.dtype) -> bool:
    """Tell whether `codes` are coded losslessly: many, e4m3, for 16-bit values, each `codec.ROW` with one scale."""
    plain = codes.zeros is None and codes.order is None and codes.divisor == codes.factor == 1.0
    enough = max(codec.MIN_NUMEL, codec.BLOCK) <= codes.rows * codes.columns < codec.MAX_NUMEL
    rows = codes.columns % codec.ROW == 0 and (codes.scales.shape[1] == 1 or codes.block[1] % codec.ROW == 0)
    return (codes.table, codes.bits, dtype.itemsize) == ("e4m3", 8, 2) and plain and enough and rows


def join(matrices: Iterable[Codes], itemsize: int, max_bytes: int) -> Iterator[Codes]:
    """Yield matrices, successive ones as one where their scales allow it. So the many experts of a layer take fewer
    launches. The whole unpacks to at most `max_bytes`."""
    group = list[Codes]()
    for matrix in matrices:
        rows = sum(codes.rows for codes in group) + matrix.rows
        if group and (not _continues(group[-1], matrix) or rows * matrix.columns * itemsize > max_bytes):
            yield _concatenate(group)
            group = []
        group.append(matrix)
    if group:
        yield _concatenate(group)


def _continues(before: Codes, after: Codes) -> bool:
    """Tell whether two matrices make one, `after` below `before`."""

    def kind(codes: Codes) -> tuple[object, ...]:
        return (
            codes.columns, codes.bits, codes.table, codes.block, codes.inner, codes.scale_table, codes.divisor,
            codes.factor, codes.scales.shape[1], codes.scales.dtype, codes.zeros is None, codes.minimums,
            codes.supers is None,
        )  # fmt: skip

    # One row of scales may be that of a whole matrix.
    whole_blocks = min(len(before.scales), len(after.scales)) > 1 and before.rows % before.block[0] == 0
    return kind(before) == kind(after) and before.order is after.order is None and whole_blocks


def _concatenate(group: list[Codes]) -> Codes:
    first = group[0]
    if len(group) == 1:
        return first
    parts: dict[str, Any] = {
        name: torch.cat([getattr(codes, name) for codes in group])
        for name in ("numbers", "scales", "zeros", "supers")
        if getattr(first, name) is not None
    }
    return replace(first, **parts)


def encode_chunks(
    codes: Codes, dtype: torch.dtype, max_bytes: int, offset: int = 0, plain: bool = False
) -> list[tuple[CodesLayout, Tensor]]:
    """Return the layouts and data (uint8) of a matrix's chunks. Each has at most `max_bytes` unpacked. `offset` is the
    matrix's in the layer buffer: the kernel for coded ones writes from multiples of 16 bytes on.
    None is coded if `plain`."""
    step, chunks = max(1, max_bytes // (codes.columns * dtype.itemsize)), list[tuple[CodesLayout, Tensor]]()
    codable = not plain and worth_coding(codes, dtype)
    unit = codes.block[0] if codes.scales.shape[0] > 1 else 1  # whole blocks of scales, and of the codec
    unit = lcm(unit, codec.BLOCK // gcd(codec.BLOCK, codes.columns)) if codable else unit
    step = max(1, step // unit) * unit
    for first in range(0, codes.rows, step):
        part = codes.part(first, min(step, codes.rows - first))
        numbers, scales, supers = part.numbers, part.scales, part.supers
        layout = CodesLayout(
            part.rows, codes.columns, codes.bits, codes.table, codes.block, (len(scales), scales.shape[1]),
            scales.dtype, codes.scale_table, part.zeros is not None, codes.order is not None, codes.divisor,
            codes.factor, codes.inner, dtype,
            zero_dtype=torch.int16 if part.zeros is None else part.zeros.dtype,
            supers=0 if supers is None else supers.shape[2],
        )  # fmt: skip
        if codable and offset % UNIT == numbers.numel() % codec.BLOCK == 0:
            coded = codec.encode(numbers.view(torch.float8_e4m3fn))
            if coded is not None:
                layout, numbers = replace(layout, coded=coded.layout), coded.data
        offset += layout.nbytes
        data = torch.zeros(layout.size, dtype=torch.uint8, device=codes.numbers.device)
        views = layout.views(data)
        for view, values in ((views.numbers, numbers), (views.scales, scales), (views.zeros, part.zeros),
                             (views.order, codes.order), (views.supers, supers)):  # fmt: skip
            if view is not None and values is not None:
                view.copy_(values)
        chunks.append((layout, data))
    return chunks


def unpack(data: Tensor, layout: CodesLayout, out: Tensor, count: int = 1, strides: tuple[int, int] = (0, 0)) -> None:
    """Unpack `data` (uint8) into `out` (`layout.dtype`, contiguous, `layout.numel` values). A GPU does so on the
    current stream. Coded data and `out` begin at multiples of 16 bytes. With `count`, so many chunks of uncoded data
    begin `strides` bytes from each other, in `data` and in `out`."""
    coded, shape = layout.coded, (layout.rows, layout.columns)
    if out.is_cuda:
        from zinfer.engine.stream.weights.expand import launch, launch_coded

        codes, rows = layout.views(data[: layout.size]), out[: layout.numel].view(shape)
        scale_table = table(layout.scale_table, out.device) if layout.scale_table else None
        if coded is None:
            launch(codes, rows, table(layout.table, out.device), scale_table, count=count, strides=strides)
        else:
            launch_coded(codes, coded, rows, scale_table)
        return
    for number in range(count):
        codes = layout.views(data[number * strides[0] :][: layout.size])
        if coded is not None:
            numbers = torch.empty(shape, dtype=torch.uint8)
            codec.decode(codes.numbers, coded, numbers.view(torch.float8_e4m3fn))
            codes = replace(codes, numbers=numbers)
        first = number * strides[1] // out.itemsize
        out[first : first + layout.numel].view(shape).copy_(expand(codes, layout.dtype))
