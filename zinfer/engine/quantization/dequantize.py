"""Dequantisation: the weights that a quantised checkpoint stands for, equal to the bit to those of its own library."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantization import QuantizedWeight
from zinfer.engine.read import DTYPES

# Numbers of E2M1, the 4-bit floating-point type, by their codes.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in its word of each of eight columns, which lie in a row


def dequantize(weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight, of its own shape and type, from its stored tensors by role (on any device).

    Raises CheckpointError for scales and groups that no quantiser writes.
    """
    dtype = DTYPES[weight.dtype]
    codes, scales = parts["codes"], parts["scales"]
    if codes.device.type == "meta":
        return torch.empty(weight.shape, dtype=dtype, device="meta")
    if weight.format == "fp8":
        return _scaled(codes.to(torch.float32), _powers(weight, scales).to(torch.float32), weight.block).to(dtype)
    if weight.format == "fp8 or int8":
        numbers = codes.to(scales.dtype)
        if (zeros := parts.get("zeros")) is not None:
            numbers = numbers - _spread(zeros.to(scales.dtype), numbers.shape, weight.block)
        return _scaled(numbers, scales, weight.block)
    if weight.format == "modelopt fp8":
        return _scaled(codes.to(dtype), _matrix(scales).to(dtype), weight.block)
    if weight.format == "int":
        return _int(weight, codes, scales, parts)
    if weight.format in ("nvfp4", "modelopt nvfp4"):
        whole = parts["global"].reshape(())
        scales = scales.to(torch.float32)
        scales = scales / whole if weight.format == "nvfp4" else scales * whole
        return _scaled(_fp4(codes, torch.float32), scales, weight.block).to(dtype)
    if weight.format == "mxfp4":
        return _scaled(_fp4(codes, torch.float32), _powers(weight, scales).to(torch.float32), weight.block).to(dtype)
    if weight.format == "mxfp4 experts":
        exponents = _exponents(weight, scales)
        numbers = torch.ldexp(_fp4(codes, dtype), exponents[..., None])
        return numbers.flatten(2).transpose(1, 2).contiguous()
    return _columns(weight, codes, scales, parts)


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return `scales`, one for each block of values, so that they multiply a weight of `shape`."""
    if scales.numel() == 1:
        return scales.reshape(())
    scales = scales if scales.dim() > 1 else scales[:, None]
    rows, columns = shape[-2:]
    if scales.shape[-2] > 1:
        scales = scales.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return scales.repeat_interleave(block[1], dim=-1)[..., :columns] if scales.shape[-1] > 1 else scales


def _matrix(scales: Tensor) -> Tensor:
    """Return scales of blocks that are stored as ``[rows, 1, columns, 1]`` without the dimensions of 1."""
    return scales.reshape(scales.shape[0], scales.shape[2]) if scales.dim() == 4 else scales


def _scaled(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    return numbers * _spread(scales, numbers.shape, block)


def _powers(weight: QuantizedWeight, scales: Tensor) -> Tensor:
    """Return scales as numbers; a byte is the exponent of a power of two, plus 127."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales
    return torch.exp2(_exponents(weight, scales).to(torch.float32))


def _exponents(weight: QuantizedWeight, scales: Tensor) -> Tensor:
    raw = scales.view(torch.uint8)
    if bool((raw == 255).any()):
        raise CheckpointError(f"{weight.name}: a scale is no number: the weights are damaged")
    return raw.to(torch.int32) - 127


def _fp4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of bytes with two 4-bit codes each, the first one in the low bits."""
    table = torch.tensor(FP4, dtype=dtype, device=codes.device)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).flatten(-2)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` codes that each row of `words` (int32) holds, lowest bits first, as int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def _group_of(weight: QuantizedWeight, order: Tensor, groups: int) -> Tensor:
    """Return the number of the group of each column."""
    if bool(((order < 0) | (order >= groups)).any()):
        raise CheckpointError(f"{weight.name}: a column names a group that has no scale: the weights are damaged")
    return order.long()


def _int(weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    rows, columns = weight.shape
    middle = 1 << weight.bits - 1
    numbers = (_unpacked(words, weight.bits, columns) - middle).to(scales.dtype)
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = (_unpacked(zeros.t(), weight.bits, rows).t() - middle).to(scales.dtype)
    if (order := parts.get("order")) is not None:
        own = _group_of(weight, order, scales.shape[-1])
        scales, block = scales[:, own], (1, 1)
        zeros = None if zeros is None else zeros[:, own]
    else:
        block = weight.block
    if zeros is not None:
        numbers = numbers - _spread(zeros, numbers.shape, block)
    return _scaled(numbers, scales, block)


def _columns(weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight of GPTQ or AWQ, whose matrices are stored as ``[in, out]``."""
    codes, zeros, own = _codes_of_columns(weight, words, scales, parts)
    return ((codes - zeros[own]).to(scales.dtype) * scales[own]).t().contiguous()


def _codes_of_columns(
    weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[in, out]`` and zero points ``[groups, out]``, int32, and the group of each column."""
    out, inside = weight.shape
    zeros = _unpacked(parts["zeros"], weight.bits, parts["zeros"].shape[1] * 32 // weight.bits)
    if weight.format == "gptq":
        codes = _unpacked(words.t(), weight.bits, inside).t()
    else:
        codes = _unpacked(words, weight.bits, out)
        if weight.bits == 4:
            codes, zeros = _columns_in_order(codes), _columns_in_order(zeros)
    zeros = (zeros[:, :out] + weight.offset) & ((1 << weight.bits) - 1) if weight.offset else zeros[:, :out]
    order = parts.get("order")
    if order is None:
        order = torch.arange(inside, device=words.device) // weight.block[1]
    return codes, zeros, _group_of(weight, order, scales.shape[0])


def _columns_in_order(codes: Tensor) -> Tensor:
    eights: Tensor = codes.view(*codes.shape[:-1], -1, 8)
    return eights[..., list(AWQ_ORDER)].flatten(-2)


# Codes on the wire


@dataclass(frozen=True)
class Codes:
    """A quantised matrix in the one form in which all formats cross the link: rows of codes, as many bits as released.

    A value is ``(table[code] - zero) * scale``, rounded to `inner` and then to the type of the entry. `numbers` are
    uint8 ``[rows, columns * bits / 8]``; of two codes of 4 bits the first one is in the low bits. `scales`, and `zeros`
    if there are some, are ``[ceil(rows / block[0]), ceil(columns / block[1])]``; scales of a type that few processors
    multiply are bytes, codes of `scale_table`, and all are divided by `divisor` and multiplied by `factor`. `order`,
    int32 ``[columns]``, names the column of scales of each column where they do not follow each other.
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

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def fit(self, dtype: torch.dtype) -> bool:
        """Tell whether every value is a number in `dtype`, whatever the codes are."""
        scales = self.scales
        if self.scale_table:
            scales = table(self.scale_table, scales.device)[scales.long()]
        largest = float(table(self.table, scales.device).nan_to_num(0.0, 0.0, 0.0).abs().max())
        if self.zeros is not None:
            largest += float(self.zeros.abs().max())
        bound = min(torch.finfo(self.inner).max, torch.finfo(dtype).max)
        return self.divisor != 0 and (
            float(scales.abs().max()) * largest * abs(self.factor) / abs(self.divisor) <= bound
        )

    def to(self, device: torch.device) -> "Codes":
        """Return a copy on `device`."""
        zeros = None if self.zeros is None else self.zeros.to(device, copy=True)
        order = None if self.order is None else self.order.to(device, copy=True)
        numbers, scales = self.numbers.to(device, copy=True), self.scales.to(device, copy=True)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, order=order)


@cache
def table(name: str, device: torch.device) -> Tensor:
    """Return the numbers of a table of codes, float32."""
    every = torch.arange(256, dtype=torch.int32)
    if name == "e2m1":
        found = torch.tensor(FP4)
    elif name in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        found = every.to(torch.uint8).view(dtype).to(torch.float32)
    elif name == "e8m0":
        found = torch.exp2((every - 127).to(torch.float32))
    elif name == "int8":
        found = every.to(torch.uint8).view(torch.int8).to(torch.float32)
    else:  # whole numbers less their middle, or as they are
        bits, middle = {"middle4": (4, 8), "middle8": (8, 128), "whole4": (4, 0), "whole8": (8, 0)}[name]
        found = (torch.arange(1 << bits) - middle).to(torch.float32)
    return found.to(device)


def canonical(weight: QuantizedWeight, parts: Mapping[str, Tensor]) -> Codes | None:
    """Return a weight as `Codes`, from its stored tensors by role; None if it cannot cross the link as it is stored: a
    row has part of a byte, or matrices in one tensor have blocks in common. Raises CheckpointError as `dequantize`
    does."""
    codes, scales, inner = parts["codes"], parts["scales"], DTYPES[weight.dtype]
    if weight.format in ("fp8", "fp8 or int8"):
        return _eight_bits(weight, codes, scales, parts.get("zeros"), inner)
    if weight.format == "modelopt fp8":
        return _eight_bits(weight, codes, _matrix(scales).to(inner), None, inner)
    if weight.format in ("nvfp4", "mxfp4", "modelopt nvfp4"):
        kind = "e8m0" if weight.format == "mxfp4" else "e4m3"
        if kind == "e8m0":
            _exponents(weight, scales)
        divisor = float(parts["global"]) if weight.format == "nvfp4" else 1.0
        factor = float(parts["global"]) if weight.format == "modelopt nvfp4" else 1.0
        return Codes(codes, weight.shape[1], 4, "e2m1", scales.view(torch.uint8), weight.block, inner, kind,
                     divisor=divisor, factor=factor)  # fmt: skip
    if weight.shape[-1] * weight.bits % 8:
        return None
    if weight.format == "mxfp4 experts":
        return _expert_codes(weight, codes, scales, inner)
    if weight.format == "int":
        return _int_codes(weight, codes, scales, parts, inner)
    return _column_codes(weight, codes, scales, parts, inner)


def _eight_bits(
    weight: QuantizedWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None, inner: torch.dtype
) -> Codes | None:
    rows, columns = weight.shape[-2:]
    if len(weight.shape) > 2 and (scales.numel() == 1 or rows % weight.block[0]):
        return None
    kind = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}[codes.dtype]
    bytes_of = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if bytes_of:
        _exponents(weight, scales)
    grid = (1, 1) if scales.numel() == 1 else (-1, scales.shape[-1] if scales.dim() > 1 else 1)
    if zeros is not None:
        zeros = zeros.to(torch.float32).to(torch.int16).reshape(grid)
    return Codes(codes.view(torch.uint8).reshape(-1, columns), columns, 8, kind,
                 (scales.view(torch.uint8) if bytes_of else scales).reshape(grid), weight.block, inner,
                 "e8m0" if bytes_of else "", zeros)  # fmt: skip


def _int_codes(
    weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], inner: torch.dtype
) -> Codes | None:
    rows, columns = weight.shape
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = (_unpacked(zeros.t(), weight.bits, rows).t() - (1 << weight.bits - 1)).to(torch.int16).contiguous()
    numbers = words.contiguous().view(torch.uint8)[:, : columns * weight.bits // 8]
    grid = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(rows, -1)
    order = _group_of(weight, parts["order"], grid.shape[1]).to(torch.int32) if "order" in parts else None
    return Codes(numbers, columns, weight.bits, f"middle{weight.bits}", grid, weight.block, inner, zeros=zeros,
                 order=order)  # fmt: skip


def _expert_codes(weight: QuantizedWeight, codes: Tensor, scales: Tensor, inner: torch.dtype) -> Codes:
    """Return experts in MXFP4, stored as ``[experts, out, in / 32, 16]``, as rows of ``[experts * in, out]``: the same
    codes, transposed."""
    experts, inside, out = weight.shape
    _exponents(weight, scales)
    numbers = torch.empty(experts, inside, out // 2, dtype=torch.uint8, device=codes.device)
    for place, own in zip(numbers, codes.view(torch.uint8).reshape(experts, out, inside // 2), strict=True):
        one, other = own[0::2], own[1::2]
        place[0::2] = (one & 0x0F | other << 4).t()
        place[1::2] = (one >> 4 | other & 0xF0).t()
    grid = scales.view(torch.uint8).transpose(1, 2).reshape(-1, out)
    return Codes(numbers.view(-1, out // 2), out, 4, "e2m1", grid, weight.block, inner, "e8m0")


def _column_codes(
    weight: QuantizedWeight, words: Tensor, scales: Tensor, parts: Mapping[str, Tensor], inner: torch.dtype
) -> Codes | None:
    codes, zeros, own = _codes_of_columns(weight, words, scales, parts)
    inside = weight.shape[1]
    in_turn = torch.equal(own, torch.arange(inside, device=own.device) // weight.block[1])
    numbers = codes.t().to(torch.uint8).contiguous()
    if weight.bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return Codes(numbers, inside, weight.bits, f"whole{weight.bits}", scales.t().contiguous(), weight.block, inner,
                 zeros=zeros.t().to(torch.int16).contiguous(),
                 order=None if in_turn else own.to(torch.int32))  # fmt: skip


def expand(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the matrix of `codes`, ``[rows, columns]`` in `dtype`."""
    numbers = codes.numbers
    if codes.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2)[:, : codes.columns]
    values = table(codes.table, numbers.device)[numbers.long()]
    zeros, block = codes.zeros, codes.block
    scales = codes.scales
    scales = table(codes.scale_table, scales.device)[scales.long()] if codes.scale_table else scales.to(torch.float32)
    if codes.divisor != 1.0:
        scales = scales / codes.divisor
    if codes.factor != 1.0:
        scales = scales * codes.factor
    if codes.order is not None:
        block, order = (block[0], 1), codes.order.long()
        scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
    if zeros is not None:
        values = values - _spread(zeros.to(torch.float32), values.shape, block)
    return _scaled(values, scales, block).to(codes.inner).to(dtype)
