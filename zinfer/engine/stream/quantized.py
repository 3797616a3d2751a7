"""Quantised matrices on the wire: rows of codes and their scales, as many bits as released, unpacked into the slot.

A chunk holds whole rows. Its parts, each from a multiple of 16 bytes on: codes, scales, and, if there are some, zero
points and the order of the columns. On a GPU one launch unpacks it (`zinfer.engine.stream.expand`); on a CPU torch
does so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zinfer.engine.quantization.dequantize import Codes, expand, table

UNIT = 16  # bytes


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

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Size of the unpacked rows, in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def _codes(self) -> int:
        return self.rows * (self.columns * self.bits // 8)

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

    def views(self, data: Tensor) -> Codes:
        """Return the codes in `data` (uint8, at least `size`), as views."""
        first, second = _up(self._codes), _up(self._codes) + _up(self._scales)
        zeros = data[second : second + self._zeros].view(torch.int16).view(self.grid) if self.zeros else None
        third = second + _up(self._zeros)
        order = data[third : third + 4 * self.columns].view(torch.int32) if self.order else None
        return Codes(
            data[: self._codes].view(self.rows, -1), self.columns, self.bits, self.table,
            data[first : first + self._scales].view(self.scale_dtype).view(self.grid), self.block, self.inner,
            self.scale_table, zeros, self.divisor, self.factor, order,
        )  # fmt: skip


def rows_at_once(codes: Codes, itemsize: int, most: int) -> int:
    """Return how many rows a chunk of at most `most` unpacked bytes holds: whole blocks, one at least."""
    rows = max(1, most // (codes.columns * itemsize))
    if codes.scales.shape[0] == 1:
        return rows
    return max(1, rows // codes.block[0]) * codes.block[0]


def pieces(codes: Codes, dtype: torch.dtype, most: int) -> list[tuple[CodesLayout, Tensor]]:
    """Return a matrix in chunks of at most `most` unpacked bytes: their layouts and their data (uint8)."""
    step, found = rows_at_once(codes, dtype.itemsize, most), []
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
        data = torch.zeros(layout.size, dtype=torch.uint8, device=codes.numbers.device)
        place = layout.views(data)
        place.numbers.copy_(codes.numbers[rows])
        place.scales.copy_(scales)
        if zeros is not None and place.zeros is not None:
            place.zeros.copy_(zeros)
        if codes.order is not None and place.order is not None:
            place.order.copy_(codes.order)
        found.append((layout, data))
    return found


def unpack(data: Tensor, layout: CodesLayout, out: Tensor) -> None:
    """Unpack `data` (uint8) into `out` (`layout.dtype`, contiguous, `layout.numel` values); a GPU does so on the
    current stream."""
    codes, rows = layout.views(data), out.view(layout.rows, layout.columns)
    if out.is_cuda:
        from zinfer.engine.stream.expand import launch

        scale_table = table(layout.scale_table, out.device) if layout.scale_table else None
        launch(codes, rows, table(layout.table, out.device), scale_table)
    else:
        rows.copy_(expand(codes, layout.dtype))
