"""Quantisation: the codes and scales of a weight, named and packed as the library compressed-tensors stores them.

Weights are rounded to the nearest code, without calibration data. Scales are symmetric: the largest magnitude that they
cover, over half the range of the codes. They are rounded to their type before codes are chosen, so that no error comes
twice. `zinfer.checkpoint.quantization` and `zinfer.engine.quantization.dequantize` read the result as they read any
released checkpoint.

Source: compressed-tensors, `calculate_qparams` and the formats pack-quantized, int-quantized and float-quantized.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zinfer.checkpoint.quantization import GROUP_SIZES, SCHEMES, Scheme

VALUES_AT_ONCE = 1 << 24  # values that are quantised at a time: float32 copies of a large matrix would fill a GPU


class _Kind(NamedTuple):
    """Codes of a scheme: their type, and the least and the largest of them."""

    dtype: torch.dtype
    least: float
    largest: float


_KINDS: dict[str, _Kind] = {
    "int4": _Kind(torch.int8, -8, 7),
    "int8": _Kind(torch.int8, -128, 127),
    "fp8": _Kind(torch.float8_e4m3fn, -448, 448),
}


def group_size(columns: int, scheme: Scheme) -> int:
    """Return the number of columns that share a scale in a matrix of so many; 0 if `scheme` leaves it in 16 bits."""
    if scheme == "int4":
        return next((size for size in GROUP_SIZES if columns and columns % size == 0), 0)
    return columns


def quantize(weight: Tensor, scheme: Scheme, size: int | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of `weight` ``[out, in]``, on its device, by their names within a module; those of a
    weight on the meta device have shapes and types only.

    ``int4``: `weight_packed` (int32 ``[out, in / 8]``, the first code in the lowest bits, plus 8), `weight_scale`
    ``[out, in / size]`` and `weight_shape` (int64 ``[2]``, on the CPU). ``int8`` and ``fp8`` (e4m3): codes `weight`
    ``[out, in]`` and `weight_scale` ``[out, 1]``. Scales have the type of the weight. A matrix whose rows no group size
    divides comes back as it is, as `weight`. `size` is that of `group_size` unless it is given; it must divide a row.
    Raises ValueError for what is no matrix of floating-point numbers, and for NaN and infinity.
    """
    if scheme not in _KINDS:
        raise ValueError(f"no scheme {scheme!r}: there are {', '.join(SCHEMES)}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(f"no matrix of floating-point weights: {weight.dtype} {list(weight.shape)}")
    rows, columns = weight.shape
    size = group_size(columns, scheme) if size is None else size
    if not size or not rows:
        return {"weight": weight}
    step = max(1, VALUES_AT_ONCE // columns)
    parts = [_rows(part, scheme, size) for part in weight.detach().split(step)]
    codes, scales = (torch.cat(several) for several in zip(*parts, strict=True))
    if scheme == "int4":
        return {"weight_packed": codes, "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    return {"weight": codes, "weight_scale": scales}


def _rows(part: Tensor, scheme: Scheme, size: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of some rows; codes of 4 bits are packed."""
    kind = _KINDS[scheme]
    groups = part.to(torch.float32).unflatten(-1, (-1, size))  # [rows, groups, size]
    scales = (groups.abs().amax(-1) / ((kind.largest - kind.least) / 2)).to(part.dtype)
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity")
    scales = torch.where(scales == 0, torch.finfo(part.dtype).eps, scales)  # a group of zeros
    numbers = (groups / scales.to(torch.float32)[..., None]).clamp_(kind.least, kind.largest).flatten(-2)
    if kind.dtype.is_floating_point:
        return numbers.to(kind.dtype), scales
    numbers = numbers.round_()
    return (_packed(numbers) if scheme == "int4" else numbers.to(kind.dtype)), scales


def _packed(numbers: Tensor) -> Tensor:
    """Return codes of 4 bits, ``[rows, columns]`` from -8 to 7, as words of eight."""
    codes = numbers.add_(8).to(torch.uint8)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)
