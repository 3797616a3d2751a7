"""Dequantisation: a quantised weight as `Codes`, and its values, equal to each format's own library to the bit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zinfer.checkpoint.gguf import BLOCKS
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantized_tensors import QuantizedWeight
from zinfer.engine.read import DTYPES

# Numbers of E2M1, the 4-bit floating-point type, by their codes.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
VALUES_AT_ONCE = 1 << 26  # values that are expanded at a time: each takes some 12 bytes besides
SUPER = 256  # columns of a block of scales with factors of their own, in K-quants of GGUF
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # index within its word of each of eight columns, which lie in a row
_BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}  # tables that are torch's types
_BYTE_TABLES = {dtype: name for name, dtype in _BYTES.items()}
_MIDDLES = {"middle4": 8, "middle6": 32, "middle8": 128, "whole4": 0, "whole5": 0, "whole8": 0}  # numbers less this


@dataclass(frozen=True)
class Codes:
    """A quantised matrix in the form of all formats: rows of codes.

    A value is ``(table[code] - zero) * scale``, rounded to `inner` and then to the type of the entry. `numbers` are
    uint8 ``[rows, ceil(columns * bits / 8)]``, as many bits as released; of two codes of 4 bits the first one is in the
    low bits. Of codes of 5 and 6 bits the low 4 bits come first, then the others of all columns. `scales`, and `zeros`
    if there are some, are ``[ceil(rows / block[0]), ceil(columns / block[1])]``; scales of a type that few processors
    multiply are bytes, codes of `scale_table`, and all are divided by `divisor` and multiplied by `factor`. `order`,
    int32 ``[columns]``, names the column of scales of each column where they do not follow each other.

    With `transposed`, rows are those of the entry's transpose; a stack of matrices has the rows of one after the other.

    `supers` are factors of scales in blocks of `SUPER` columns, float16 ``[rows, columns / SUPER, 1 or 2]``. Zeros that
    are no int16 are minimums: ``table[code] * scale - zero``, the zero times the second of the factors.
    """

    numbers: Tensor
    columns: int
    bits: int
    table: str
    scales: Tensor
    block: tuple[int, int]
    inner: torch.dtype
    scale_table: str = ""
    zeros: Tensor | None = None
    divisor: float = 1.0
    factor: float = 1.0
    order: Tensor | None = None
    supers: Tensor | None = None
    transposed: bool = False

    @property
    def rows(self) -> int:
        return len(self.numbers)

    @property
    def minimums(self) -> bool:
        """True if zeros are subtracted from products with scales."""
        return self.zeros is not None and self.zeros.dtype != torch.int16

    def fit(self, dtype: torch.dtype) -> bool:
        """Tell whether any codes stand for finite numbers in `dtype`."""
        largest = float(table(self.table, self.scales.device).nan_to_num(0.0, 0.0, 0.0).abs().max())
        zero = 0.0 if self.zeros is None else float(zero_values(self).abs().max())
        bound = min(torch.finfo(self.inner).max, torch.finfo(dtype).max)
        scale = float(scale_values(self).abs().max()) * abs(self.factor)
        most = scale * largest + zero * (1.0 if self.minimums else scale)
        return self.divisor != 0 and most / abs(self.divisor) <= bound

    def part(self, start: int, count: int) -> "Codes":
        """Return `count` rows from `start` on as views. All but the last have whole blocks."""
        first, last = start // self.block[0], -(-(start + count) // self.block[0])
        grid = slice(first, last) if len(self.scales) > 1 else slice(None)
        zeros = None if self.zeros is None else self.zeros[grid]
        supers = None if self.supers is None else self.supers[grid]
        numbers = self.numbers[start : start + count]
        return replace(self, numbers=numbers, scales=self.scales[grid], zeros=zeros, supers=supers)

    def to(self, device: torch.device) -> "Codes":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


def dequantize(weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight from its stored tensors by role. Raises CheckpointError for damaged ones."""
    dtype = DTYPES[weight.dtype]
    if parts["codes"].device.type == "meta":
        return torch.empty(weight.shape, dtype=dtype, device="meta")
    if weight.format == "gguf" and not weight.bits:
        assert weight.convert is not None
        values = [_values(weight.kind, part).numpy() for part in parts.values()]
        return torch.from_numpy(weight.convert(*values)).to(dtype)
    codes = canonical(weight, parts)
    out = torch.empty(codes.rows, codes.columns, dtype=dtype, device=codes.numbers.device)
    block = codes.block[0] if len(codes.scales) > 1 else 1
    step = max(1, VALUES_AT_ONCE // (codes.columns * block)) * block
    for start in range(0, codes.rows, step):
        out[start : start + step] = expand(codes.part(start, step), dtype)
    if not codes.transposed:
        return out.view(weight.shape)
    *lead, rows, columns = weight.shape
    return out.view(*lead, columns, rows).mT.contiguous()


@cache
def table(name: str, device: torch.device) -> Tensor:
    """Return the numbers of a table of codes, float32."""
    every = torch.arange(256, dtype=torch.uint8)
    if name == "e2m1":
        numbers = torch.tensor(FP4)
    elif name == "e8m0":
        numbers = torch.exp2(every.to(torch.float32) - 127)
    elif name in _BYTES:
        numbers = every.view(_BYTES[name]).to(torch.float32)
    else:
        numbers = every[: 1 << int(name[-1])].to(torch.float32) - _MIDDLES[name]
    return numbers.to(device)


def numbers_of(codes: Codes) -> Tensor:
    """Return the codes as bytes, ``[rows, columns]``."""
    numbers = codes.numbers
    if codes.bits == 8:
        return numbers
    low, high = numbers[:, : -(-codes.columns // 2)], numbers[:, codes.columns // 2 :]
    numbers = torch.stack([low & 15, low >> 4], dim=-1).flatten(-2)[:, : codes.columns]
    if (more := codes.bits - 4) > 0:
        shifts = torch.arange(0, 8, more, dtype=torch.uint8, device=high.device)
        numbers = numbers | (high[..., None] >> shifts & (1 << more) - 1).flatten(-2) << 4
    return numbers


def expand(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the matrix of `codes`, ``[rows, columns]`` in `dtype`."""
    numbers = numbers_of(codes)
    if codes.table in _BYTES:
        values = numbers.view(_BYTES[codes.table]).to(torch.float32)
    elif codes.table in _MIDDLES:
        values = numbers.to(torch.float32) - _MIDDLES[codes.table]
    else:
        values = table(codes.table, numbers.device)[numbers.int()]
    scales, zeros, block = scale_values(codes).to(torch.float32), codes.zeros, codes.block
    if codes.divisor != 1.0:
        scales = scales / codes.divisor
    if codes.factor != 1.0:
        scales = scales * codes.factor
    if codes.order is not None:
        block, order = (block[0], 1), codes.order.long()
        scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
    if codes.minimums:
        values = values * _spread(scales, values.shape, block) - _spread(zero_values(codes), values.shape, block)
        return values.to(codes.inner).to(dtype)
    if zeros is not None:
        values = values - _spread(zeros.to(torch.float32), values.shape, block)
    return (values * _spread(scales, values.shape, block)).to(codes.inner).to(dtype)


def scale_values(codes: Codes) -> Tensor:
    """Return the scales, times the factors of their blocks."""
    scales = table(codes.scale_table, codes.scales.device)[codes.scales.int()] if codes.scale_table else codes.scales
    return _multiplied(scales, codes.supers, 0)


def zero_values(codes: Codes) -> Tensor:
    """Return zeros, or minimums times the factors of their blocks."""
    assert codes.zeros is not None
    return _multiplied(codes.zeros.to(torch.float32), codes.supers, 1)


def _multiplied(values: Tensor, supers: Tensor | None, number: int) -> Tensor:
    """Return scales or minimums times their factors."""
    if supers is None:
        return values
    factors = supers[..., number].to(torch.float32)
    return values * factors.repeat_interleave(values.shape[1] // factors.shape[1], dim=1)


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return `scales` of blocks so that they multiply a matrix."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.shape[0] > 1:
        scales = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return scales.repeat_interleave(block[1], dim=1)[:, : shape[1]] if scales.shape[1] > 1 else scales


def canonical(weight: QuantizedWeight, parts: Mapping[str, Tensor], device: torch.device | None = None) -> Codes:
    """Return a weight as `Codes`, from its stored tensors by role. They are made on `device`, if one is given. Raises
    CheckpointError as `dequantize` does."""
    if weight.format == "gguf":
        return _gguf_codes(weight, parts, device)
    parts = {role: part.to(device) for role, part in parts.items()}
    codes, scales, inner = parts["codes"], parts["scales"], DTYPES[weight.dtype]
    if weight.format in ("fp8", "fp8 or int8"):
        return _eight_bits(weight, codes, scales, parts.get("zeros"), inner)
    if weight.format == "modelopt fp8":
        scales = scales.reshape(scales.shape[0], scales.shape[2]) if scales.dim() == 4 else scales
        return _eight_bits(weight, codes, scales.to(inner), None, inner)
    if weight.format in ("nvfp4", "mxfp4", "modelopt nvfp4"):
        if weight.format == "mxfp4":
            _check_exponents(weight.name, scales)
        divisor = float(parts["global"]) if weight.format == "nvfp4" else 1.0
        factor = float(parts["global"]) if weight.format == "modelopt nvfp4" else 1.0
        kind = "e8m0" if weight.format == "mxfp4" else "e4m3"
        return Codes(codes.view(torch.uint8), weight.shape[1], 4, "e2m1", scales.view(torch.uint8), weight.block, inner,
                     kind, divisor=divisor, factor=factor)  # fmt: skip
    if weight.format == "mxfp4 experts":
        return _expert_codes(weight, codes, scales, inner)
    if weight.format == "int":
        return _int_codes(weight, codes, scales, parts, inner)
    return _column_codes(weight, codes, scales, parts, inner)


def _check_exponents(name: str, scales: Tensor) -> None:
    if bool((scales.view(torch.uint8) == 255).any()):
        raise CheckpointError(f"{name}: a scale is no number: the weights are damaged")


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` codes in each row of int32 `words`, lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def _pairs(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, two in a byte, first one low."""
    codes = pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _group_of(weight: QuantizedWeight, order: Tensor, groups: int) -> Tensor:
    """Return the number of the group of each column."""
    if bool(((order < 0) | (order >= groups)).any()):
        raise CheckpointError(f"{weight.name}: a column names a group that has no scale: the weights are damaged")
    return order.long()


def _eight_bits(
    weight: QuantizedWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None, inner: torch.dtype
) -> Codes:
    rows, columns = weight.shape[-2:]
    powers, block = scales.dtype in (torch.uint8, torch.float8_e8m0fnu), weight.block
    if powers:
        _check_exponents(weight.name, scales)
        scales = scales.view(torch.uint8)
    if len(weight.shape) > 2 and scales.numel() > 1 and rows % block[0]:  # the last block of each matrix is cut
        scales, block = scales.repeat_interleave(block[0], dim=-2)[..., :rows, :], (1, block[1])
    if scales.numel() == 1:
        grid, block = (1, 1), (codes.numel() // columns, columns)
    else:
        grid = (-1, scales.shape[-1] if scales.dim() > 1 else 1)
    if zeros is not None:
        whole = zeros.to(torch.float32).to(torch.int16)
        if not torch.equal(whole.to(torch.float32), zeros.to(torch.float32)):
            raise CheckpointError(f"{weight.name}: a zero point is no whole number")
        zeros = whole.reshape(grid)
    return Codes(codes.view(torch.uint8).reshape(-1, columns), columns, 8, _BYTE_TABLES[codes.dtype],
                 scales.reshape(grid), block, inner, "e8m0" if powers else "", zeros)  # fmt: skip


def _int_codes(
    weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], inner: torch.dtype
) -> Codes:
    rows, columns = weight.shape
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = (_unpacked(zeros.t(), weight.bits, rows).t() - (1 << weight.bits - 1)).to(torch.int16).contiguous()
    numbers = words.contiguous().view(torch.uint8)[:, : -(-columns * weight.bits // 8)]
    grid = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(rows, -1)
    order = _group_of(weight, parts["order"], grid.shape[1]).to(torch.int32) if "order" in parts else None
    return Codes(numbers, columns, weight.bits, f"middle{weight.bits}", grid, weight.block, inner, zeros=zeros,
                 order=order)  # fmt: skip


def _expert_codes(weight: QuantizedWeight, codes: Tensor, scales: Tensor, inner: torch.dtype) -> Codes:
    """Return a stack of experts in MXFP4.

    It is stored as ``[experts, out, in / 32, 16]``, of an entry ``[experts, in, out]``.
    """
    _check_exponents(weight.name, scales)
    numbers, (size, _) = codes.view(torch.uint8).flatten(-2).flatten(0, 1), weight.block
    return Codes(numbers, weight.shape[1], 4, "e2m1", scales.view(torch.uint8).flatten(0, 1), (1, size), inner, "e8m0",
                 transposed=True)  # fmt: skip


def _gguf_codes(weight: QuantizedWeight, parts: Mapping[str, Tensor], device: torch.device | None) -> Codes:
    blocks = parts["codes"]
    if weight.convert is not None:
        blocks = torch.from_numpy(weight.convert(*(part.numpy() for part in parts.values())))
    blocks = blocks.to(device)
    if weight.block[0] == 1:
        return block_codes(weight.kind, blocks, weight.name)
    blocks = blocks.unflatten(-1, (-1, 17))
    return _expert_codes(weight, _halves(blocks[..., 1:]), blocks[..., 0], torch.float32)


def block_codes(kind: str, blocks: Tensor, name: str = "") -> Codes:
    """Return blocks of a GGUF, ``[.., bytes of a row]``, as `Codes`.

    These are the same bits in another order. Raises CheckpointError for a scale that is no number.
    """
    size, width, bits = BLOCKS[kind]
    rows = blocks.reshape(-1, blocks.shape[-1] // width, width)
    columns, block = rows.shape[1] * size, (1, size)
    if kind == "MXFP4":
        scales = rows[..., 0].contiguous()
        _check_exponents(name, scales)
        return Codes(_halves(rows[..., 1:]).flatten(1), columns, 4, "e2m1", scales, block, torch.float32, "e8m0")
    if kind in ("Q4_0", "Q8_0", "Q4_1"):
        scales, numbers = _half(rows[..., :2]), rows[..., 2 + 2 * (kind == "Q4_1") :]
        # A byte of Q8_0 with its first bit turned is the number plus 128, as kernels read it.
        numbers = numbers ^ 128 if kind == "Q8_0" else _halves(numbers)
        zeros, name = (-_half(rows[..., 2:4]), "whole4") if kind == "Q4_1" else (None, f"middle{bits}")
        return Codes(numbers.flatten(1), columns, bits, name, scales, block, torch.float32, zeros=zeros)
    return _super_codes(kind, rows, columns)


def _super_codes(kind: str, rows: Tensor, columns: int) -> Codes:
    """Return super blocks, ``[rows, blocks, bytes]``, as `Codes`."""
    bits, zeros, table_name, width = BLOCKS[kind][2], None, "whole8", 32
    if kind == "Q6_K":
        low, high, scales, factors = rows.split([128, 64, 16, 2], dim=-1)
        low, high, table_name, width = low.unflatten(-1, (2, 64)), high.unflatten(-1, (2, 1, 32)), "int8", 16
    else:
        factors, one, other, third, high, low = rows.split([4, 4, 4, 4, rows.shape[-1] - 144, 128], dim=-1)
        low, high = low.unflatten(-1, (4, 32)), high.unflatten(-1, (-1, 1, 32))
        scales = torch.cat([one & 63, third & 15 | one >> 6 << 4], -1)
        zeros = torch.cat([other & 63, third >> 4 | other >> 6 << 4], -1).flatten(1)
    numbers = _halves(low).flatten(1)
    if (more := bits - 4) > 0:  # split into values of 1 or 2 bits, first the low ones of all, and pack these
        shifts = torch.arange(0, 8, more, dtype=torch.uint8, device=high.device)
        values = (high >> shifts[:, None] & (1 << more) - 1).flatten(1).unflatten(1, (-1, len(shifts)))
        numbers = torch.cat([numbers, (values << shifts).sum(-1, dtype=torch.uint8)], -1)
    supers = _half(factors).unflatten(-1, (-1, 1 if zeros is None else 2))
    return Codes(numbers, columns, bits, "middle6" if kind == "Q6_K" else f"whole{bits}", scales.flatten(1), (1, width),
                 torch.float32, table_name, zeros, supers=supers)  # fmt: skip


def _half(part: Tensor) -> Tensor:
    """Return bytes as float16, ``[rows, numbers]``."""
    return part.contiguous().view(torch.float16).flatten(1)


def _halves(codes: Tensor) -> Tensor:
    """Return pairs of neighbours, of bytes with one of either half."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return torch.cat([even & 15 | odd << 4, even >> 4 | odd & 240], dim=-1)


def _values(kind: str, part: Tensor) -> Tensor:
    """Return a tensor of a GGUF, float32."""
    if kind not in BLOCKS:
        return part.to(torch.float32)
    codes = block_codes(kind, part)
    return expand(codes, torch.float32).view(*part.shape[:-1], codes.columns)


def _column_codes(
    weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], inner: torch.dtype
) -> Codes:
    """Return a weight of GPTQ or AWQ, stored as ``[in, out]``."""
    out, inside = weight.shape
    zeros = _unpacked(parts["zeros"], weight.bits, parts["zeros"].shape[1] * 32 // weight.bits)
    if weight.format == "gptq":
        codes = _unpacked(words.t(), weight.bits, inside).t()
    else:
        codes = _unpacked(words, weight.bits, out)
        if weight.bits == 4:
            codes, zeros = _columns_in_order(codes), _columns_in_order(zeros)
    zeros = (zeros[:, :out] + weight.offset) & ((1 << weight.bits) - 1) if weight.offset else zeros[:, :out]
    in_turn = torch.arange(inside, device=words.device) // weight.block[1]
    groups = _group_of(weight, parts.get("order", in_turn), scales.shape[0])
    numbers = codes.t().to(torch.uint8).contiguous()
    return Codes(_pairs(numbers) if weight.bits == 4 else numbers, inside, weight.bits, f"whole{weight.bits}",
                 scales.t().contiguous(), weight.block, inner, zeros=zeros.t().to(torch.int16).contiguous(),
                 order=None if torch.equal(groups, in_turn) else groups.to(torch.int32))  # fmt: skip


def _columns_in_order(codes: Tensor) -> Tensor:
    eights: Tensor = codes.view(*codes.shape[:-1], -1, 8)
    return eights[..., list(AWQ_ORDER)].flatten(-2)
