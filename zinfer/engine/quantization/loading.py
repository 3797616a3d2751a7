"""Weights that a load itself stores quantised: random codes, rounded weights.

The stored tensors are those of `zinfer.checkpoint.quantized_tensors`, one matrix at a time, so that formats mean the
same as in a checkpoint: `zinfer.engine.quantization.dequantize` makes weights of them, or takes them over the link.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zinfer.checkpoint import quantization
from zinfer.checkpoint.architecture import MatrixFinder
from zinfer.checkpoint.headers import CheckpointError, TensorInfo
from zinfer.checkpoint.quantization import Scheme
from zinfer.checkpoint.quantized_tensors import Quantization, QuantizedWeight
from zinfer.core.model import ModelSpec, Weights
from zinfer.engine.quantization.dequantize import Codes, canonical, dequantize, table
from zinfer.engine.read import DTYPES

# Random codes and scales, chosen to resemble released weights
POOL = 1 << 22  # random codes that all matrices are made of
BLOCK = 1024  # bytes of the pool that stay together; their order is random
SPREAD = 0.1  # share by which scales differ, up and down, as in real weights
MANY = 64  # scales of a matrix from which on they differ
MIDDLE = 16.0  # scale that is stored in 8 bits beside a factor for all of them
# Largest code of a table over the standard deviation of the weights that it stands for, as rounding real weights in
# groups of about a hundred values, or whole rows, makes it.
REACH = {"middle4": 2.6, "e2m1": 2.6, "int8": 4.5, "middle8": 4.5, "e4m3": 4.5, "e5m2": 4.5}
POWERS = (torch.uint8, torch.float8_e8m0fnu)  # types of scales that are exponents of two


class CodedMatrix(NamedTuple):
    """A matrix of an entry. `name` is that of its module; it is stored as `weight` says, in tensors with `headers` by
    their role."""

    name: str
    weight: QuantizedWeight
    headers: Mapping[str, TensorInfo]


def coded_entries(
    model: PreTrainedModel, stack: str, layers: nn.ModuleList, spec: ModelSpec
) -> dict[str, tuple[CodedMatrix, ...]]:
    """Return the matrices of entries that are stored quantised, in row order."""
    rules, find = Quantization(spec.config, spec.dtype), MatrixFinder(model)
    entries: dict[str, tuple[CodedMatrix, ...]] = {}
    for number, layer in enumerate(layers):
        prefix = f"{stack}.{number}."
        parts: dict[str, list[tuple[CodedMatrix, ...] | None]] = {}  # of each source of an entry, one for each expert
        for matrix, _, entry in find(layer):
            names = [prefix + matrix.name]
            if "*" in matrix.name:
                names = [names[0].replace("*", str(expert)) for expert in range(matrix.experts)]
            stored = rules.weight(matrix, names[0])
            matrices = None if stored is None else tuple(CodedMatrix(name, *stored) for name in names)
            parts.setdefault(prefix + entry, []).append(matrices)
        for entry, sources in parts.items():
            coded = [matrices for matrices in sources if matrices is not None]
            if len(coded) == len(sources):
                entries[entry] = tuple(matrix for expert in zip(*coded, strict=True) for matrix in expert)
    return entries


def random_entry(
    entry: Tensor, matrices: Sequence[CodedMatrix], std: float, stored: bool, generator: torch.Generator
) -> Tensor | tuple[Codes, ...]:
    """Return an entry with random codes and scales, on the generator's device. Its weights have a mean of 0 and a
    standard deviation of `std`; the seed is the name of each matrix. With `stored` it comes as it crosses the link, if
    it can."""
    parts = (random_parts(matrix, std, generator) for matrix in matrices)
    return _assembled(entry, matrices, parts, stored, generator.device)


def rounded_entry(
    name: str, tensor: Tensor, matrices: Sequence[CodedMatrix], scheme: Weights, stored: bool
) -> Tensor | tuple[Codes, ...]:
    """Return an entry whose weights `tensor` are rounded to codes of `scheme`. `stored` is as in `random_entry`. Raises
    CheckpointError for NaN and infinity."""
    rows = tensor.flatten(0, -2).split([matrix.weight.shape[-2] for matrix in matrices])
    parts = (_rounded(name, part, matrix.weight, scheme) for part, matrix in zip(rows, matrices, strict=True))
    return _assembled(tensor, matrices, parts, stored, tensor.device)


def _assembled(
    entry: Tensor,
    matrices: Sequence[CodedMatrix],
    parts: Iterable[dict[str, Tensor]],
    stored: bool,
    device: torch.device,
) -> Tensor | tuple[Codes, ...]:
    """Return an entry like `entry`, made of each matrix's stored tensors."""
    weights = [matrix.weight for matrix in matrices]
    if stored and all(weight.in_whole_bytes for weight in weights):
        return tuple(canonical(weight, tensors) for weight, tensors in zip(weights, parts, strict=True))
    out = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    rows, start = out.view(-1, out.shape[-1]), 0
    for weight, tensors in zip(weights, parts, strict=True):
        matrix = dequantize(weight, tensors).view(-1, out.shape[-1])
        rows[start : start + len(matrix)].copy_(matrix)
        start += len(matrix)
    return out


def _rounded(name: str, matrix: Tensor, weight: QuantizedWeight, scheme: Weights) -> dict[str, Tensor]:
    assert scheme != "as-released"
    try:
        tensors = quantize(matrix, scheme)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be rounded to {scheme}: {error}") from None
    return {role: tensors[part.rpartition(".")[2]] for role, part in weight.parts.items()}


# Random codes


def random_parts(matrix: CodedMatrix, std: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random stored tensors of a weight, by role."""
    weight, headers = matrix.weight, matrix.headers
    generator.manual_seed(zlib.crc32(matrix.name.encode()))
    device = generator.device
    signed = "int8" if weight.bits == 8 else "e2m1"
    tables = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": signed, "U8": "e2m1", "I32": f"middle{weight.bits}"}
    name = tables[headers["codes"].dtype]
    largest = float(table(name, torch.device("cpu")).nan_to_num(0.0, 0.0, 0.0).max())
    wanted = std * REACH[name] / largest
    powers = DTYPES[headers["scales"].dtype] in POWERS
    if powers:
        wanted = 2.0 ** ceil(log2(wanted))
    pool, pool_std = _pool(name, round(wanted / std, 4), device)
    scale = wanted if powers else std / pool_std
    parts: dict[str, Tensor] = {}
    for role, header in headers.items():
        dtype, shape = DTYPES[header.dtype], header.shape
        if role == "codes":
            parts[role] = _filled(pool, header.nbytes, generator).view(dtype).view(shape)
        elif role == "scales":
            parts[role] = _scales(dtype, shape, MIDDLE if "global" in headers else scale, generator)
        elif role == "global":  # scales in 8 bits are divided by it; ModelOpt's are multiplied
            factor = MIDDLE / scale
            value = 1 / factor if weight.format.startswith("modelopt") else factor
            parts[role] = torch.full(shape, value, dtype=dtype, device=device)
        elif role == "order":
            parts[role] = torch.arange(prod(shape), dtype=dtype, device=device) // weight.block[1]
        else:
            parts[role] = _zeros(weight, dtype, shape, device)
    return parts


@cache
def _pool(name: str, scale: float, device: torch.device) -> tuple[Tensor, float]:
    """Return codes of normal numbers, and the deviation of their values."""
    numbers = table(name, device)
    order = numbers.nan_to_num(float("inf"), float("inf"), float("inf")).argsort(stable=True)
    values = numbers[order][: int(numbers.isfinite().sum())]
    dice = torch.Generator(device).manual_seed(0)
    normal = torch.randn(POOL, generator=dice, device=device) / scale
    nearest = torch.bucketize(normal, (values[1:] + values[:-1]) / 2)
    codes = order[nearest].to(torch.uint8)
    std = float(values[nearest].std())
    if len(numbers) == 16:
        codes = codes[0::2] | codes[1::2] << 4
    return codes.view(torch.int64).view(-1, BLOCK // 8), std


def _filled(pool: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return `size` bytes: blocks of the pool in random order."""
    device = generator.device
    order = torch.randint(len(pool), (ceil(size / BLOCK),), generator=generator, device=device)
    return pool.index_select(0, order).view(-1).view(torch.uint8)[:size]


def _scales(dtype: torch.dtype, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    device = generator.device
    if dtype in POWERS:
        exponent = torch.full(shape, 127 + round(log2(scale)), dtype=torch.uint8, device=device)
        return exponent if dtype == torch.uint8 else exponent.view(dtype)
    part = SPREAD if prod(shape) >= MANY else 0.0
    spread = torch.empty(shape, device=device).uniform_(1 - part, 1 + part, generator=generator)
    return (spread * scale).to(dtype)


def _zeros(weight: QuantizedWeight, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zero points in the middle of the codes."""
    if weight.format == "fp8 or int8":
        return torch.zeros(shape, device=device).to(dtype)
    middle = (1 << weight.bits - 1) - weight.offset
    whole = sum(middle << shift for shift in range(0, 8, weight.bits))
    return torch.full((*shape, 4), whole, dtype=torch.uint8, device=device).view(dtype).view(shape)


VALUES_AT_ONCE = 1 << 24  # values that are quantised at a time: float32 copies of a large matrix would fill a GPU
# Type of a scheme's codes, the smallest and the largest of them.
_CODES = {"int4": (torch.int8, -8, 7), "int8": (torch.int8, -128, 127), "fp8": (torch.float8_e4m3fn, -448, 448)}


def group_size(columns: int, scheme: Scheme) -> int:
    """Return how many columns share a scale; 0: the matrix stays."""
    return quantization.group_size(columns) if scheme == "int4" and columns else columns


def quantize(weight: Tensor, scheme: Scheme, size: int | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of a matrix ``[out, in]``, on its device.

    They are by their names within a module; those of a weight on the meta device have shapes and types only. Codes are
    the nearest ones, and scales (rounded first) the largest magnitude that they cover over half the range of codes, as
    by compressed-tensors' `calculate_qparams`, formats pack-quantized, int-quantized and float-quantized.

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
