"""Quantisation: codes and scales, named and packed as by compressed-tensors.

Weights are rounded to the nearest code, without calibration data. Scales are symmetric: the largest magnitude that they
cover, over half the range of the codes. They are rounded to their type before codes are chosen, so that no error comes
twice. Source: compressed-tensors, `calculate_qparams`, formats pack-quantized, int-quantized and float-quantized.
"""

import torch
from torch import Tensor

from zinfer.checkpoint import quantization
from zinfer.checkpoint.quantization import Scheme

VALUES_AT_ONCE = 1 << 24  # values that are quantised at a time: float32 copies of a large matrix would fill a GPU


# Type of a scheme's codes, the smallest and the largest of them.
_CODES = {"int4": (torch.int8, -8, 7), "int8": (torch.int8, -128, 127), "fp8": (torch.float8_e4m3fn, -448, 448)}


def group_size(columns: int, scheme: Scheme) -> int:
    """Return how many columns share a scale; 0: the matrix stays."""
    return quantization.group_size(columns) if scheme == "int4" and columns else columns


def quantize(weight: Tensor, scheme: Scheme, size: int | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix ``[out, in]``, on its device.

    They are by their names within a module; those of a weight on the meta device have shapes and types only.

    ``int4``: `weight_packed` (int32 ``[out, in / 8]``, the first code in the lowest bits, plus 8), `weight_scale`
    ``[out, in / size]`` and `weight_shape` (int64 ``[2]``, on the CPU). ``int8`` and ``fp8`` (e4m3): codes `weight`
    ``[out, in]`` and `weight_scale` ``[out, 1]``. Scales have the type of the weight. A matrix whose rows no group size
    divides comes back as it is, as `weight`. `size` is that of `group_size` unless it is given; it must divide a row.
    Raises ValueError for what is no matrix of floating-point numbers, and for NaN and infinity.
    """
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
    dtype, low, high = _CODES[scheme]
    groups = part.to(torch.float32).unflatten(-1, (-1, size))  # [rows, groups, size]
    scales = (groups.abs().amax(-1) / ((high - low) / 2)).to(part.dtype)
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity")
    scales = torch.where(scales == 0, torch.finfo(part.dtype).eps, scales)  # a group of zeros
    numbers = (groups / scales.to(torch.float32)[..., None]).clamp_(low, high).flatten(-2)
    if not dtype.is_floating_point:
        numbers = numbers.round_()
    if scheme != "int4":
        return numbers.to(dtype), scales
    codes = numbers.add_(8).to(torch.uint8)  # eight in a word of 32 bits
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32), scales
