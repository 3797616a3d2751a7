"""Dequantisation: the weights that a quantised checkpoint stands for, equal to the bit to those of its own library."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zinfer.engine.read import DTYPES
from zinfer.spec.checkpoint import CheckpointError
from zinfer.spec.quantization import QuantizedWeight

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
    if weight.format == "int":
        return _int(weight, codes, scales, parts)
    if weight.format == "nvfp4":
        scales = scales.to(torch.float32) / parts["global"].reshape(())
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
    own = _group_of(weight, order, scales.shape[0])
    return ((codes - zeros[own]).to(scales.dtype) * scales[own]).t().contiguous()


def _columns_in_order(codes: Tensor) -> Tensor:
    places = torch.tensor(AWQ_ORDER, device=codes.device)
    return codes.unflatten(-1, (-1, 8))[..., places].flatten(-2)
