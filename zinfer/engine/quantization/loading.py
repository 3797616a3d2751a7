"""Weights that a load itself stores quantised: random codes of dummy models, and weights in 16 bits that are rounded.

The stored tensors are those of `zinfer.checkpoint.quantization`, one matrix at a time, so that formats mean the same as
in a checkpoint: `zinfer.engine.quantization.dequantize` makes weights of them, or takes them as they are over the link.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zinfer.checkpoint.architecture import MatrixFinder
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantization import Header, Quantization, QuantizedWeight
from zinfer.core.model import ModelSpec
from zinfer.engine.quantization.dequantize import Codes, canonical, dequantize, table
from zinfer.engine.quantization.quantize import quantize
from zinfer.engine.read import DTYPES

POOL = 1 << 22  # random codes that matrices are made of, in blocks of BLOCK bytes in random order
BLOCK = 1024
SPREAD, MANY = 0.1, 64  # so many scales of a matrix, or more, differ by so much, up and down, as in real weights
# Largest code of a table over the standard deviation of the weights that it stands for, as rounding real weights in
# groups of about a hundred values, or whole rows, makes it.
REACH = {"middle4": 2.6, "e2m1": 2.6, "int8": 4.5, "middle8": 4.5, "e4m3": 4.5, "e5m2": 4.5}
POWERS = (torch.uint8, torch.float8_e8m0fnu)  # types of scales that are exponents of two
MIDDLE = 16.0  # scales that are stored in 8 bits beside a factor for all of them


class CodedMatrix(NamedTuple):
    """A matrix of an entry: `name` of its module, how it is stored, and the stored tensors by their role."""

    name: str
    weight: QuantizedWeight
    headers: Mapping[str, Header]


def coded_entries(
    model: PreTrainedModel, stack: str, layers: nn.ModuleList, spec: ModelSpec
) -> dict[str, tuple[CodedMatrix, ...]]:
    """Return the entries of decoder layers that a checkpoint of `spec`'s configuration stores quantised, by name, with
    their matrices in the order of their rows."""
    rules, find = Quantization(spec.config, spec.dtype), MatrixFinder(model)
    found: dict[str, tuple[CodedMatrix, ...]] = {}
    for number, layer in enumerate(layers):
        prefix = f"{stack}.{number}."
        parts: dict[str, list[tuple[CodedMatrix, ...] | None]] = {}  # of each source of an entry, one for each expert
        for matrix, _, entry in find(layer):
            names = [prefix + matrix.name]
            if "*" in matrix.name:
                names = [names[0].replace("*", str(expert)) for expert in range(matrix.experts)]
            told = rules.weight(matrix, names[0])
            several = None if told is None else tuple(CodedMatrix(name, *told) for name in names)
            parts.setdefault(prefix + entry, []).append(several)
        for entry, sources in parts.items():
            known = [one for one in sources if one is not None]
            if known and len(known) == len(sources):
                found[entry] = tuple(matrix for expert in zip(*known, strict=True) for matrix in expert)
    return found


Parts = Iterable[
    tuple[QuantizedWeight, Callable[[], dict[str, Tensor]]]
]  # weights, and functions that make the tensors


def loaded(entry: Tensor, parts: Parts, stored: bool, device: torch.device) -> Tensor | tuple[Codes, ...]:
    """Return an entry, of the shape and type of `entry`, made of stored tensors; with `stored` as they cross the link,
    if they can."""
    several, found = list(parts), list[Codes]()
    for weight, make in several if stored else ():
        codes = canonical(weight, make())
        if codes is None:
            break
        found.append(codes)
    if stored and len(found) == len(several):
        return tuple(found)
    out = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if len(several) == 1:
        ((weight, make),) = several
        return out.copy_(dequantize(weight, make()).view(entry.shape))
    rows, place = out.flatten(0, -2), 0
    for weight, make in several:
        matrix = dequantize(weight, make())
        rows[place : place + len(matrix)].copy_(matrix)
        place += len(matrix)
    return out


def random_entry(
    entry: Tensor, matrices: Iterable[CodedMatrix], std: float, stored: bool, generator: torch.Generator
) -> Tensor | tuple[Codes, ...]:
    """Return an entry with random codes and scales, so that its weights have a mean of 0 and a standard deviation of
    `std`, on the generator's device. The seed is the name of each matrix."""

    def parts() -> Iterator[tuple[QuantizedWeight, Callable[[], dict[str, Tensor]]]]:
        for matrix in matrices:
            yield matrix.weight, lambda matrix=matrix: random_parts(matrix, std, generator)  # type: ignore[misc]

    return loaded(entry, parts(), stored, generator.device)


def rounded_entry(
    name: str, tensor: Tensor, matrices: Iterable[CodedMatrix], scheme: str, stored: bool
) -> Tensor | tuple[Codes, ...]:
    """Return an entry whose weights `tensor` are rounded to codes of `scheme`, matrix by matrix, on its device. Raises
    CheckpointError for NaN and infinity."""
    rows = tensor.flatten(0, -2)

    def parts() -> Iterator[tuple[QuantizedWeight, Callable[[], dict[str, Tensor]]]]:
        place = 0
        for matrix in matrices:
            own = rows[place : place + matrix.weight.shape[-2]]
            place += len(own)
            yield matrix.weight, lambda matrix=matrix, own=own: _rounded(name, own, matrix.weight, scheme)  # type: ignore[misc]

    return loaded(tensor, parts(), stored, tensor.device)


def _rounded(name: str, matrix: Tensor, weight: QuantizedWeight, scheme: str) -> dict[str, Tensor]:
    try:
        found = quantize(matrix, scheme)  # type: ignore[arg-type]
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be rounded to {scheme}: {error}") from None
    leaf = {role: part.rpartition(".")[2] for role, part in weight.parts.items()}
    return {role: found[own] for role, own in leaf.items()}


# Random codes


def random_parts(matrix: CodedMatrix, std: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random tensors, by role, in which a weight is stored, on the generator's device."""
    weight, headers = matrix.weight, matrix.headers
    generator.manual_seed(zlib.crc32(matrix.name.encode()))
    device, name = generator.device, _table_of(weight, headers)
    wanted = std * REACH[name] / _largest(name)
    powers = DTYPES[headers["scales"].dtype] in POWERS
    if powers:
        wanted = 2.0 ** ceil(log2(wanted))
    pool, own_std = _pool(name, round(wanted / std, 4), device)
    scale = wanted if powers else std / own_std
    found: dict[str, Tensor] = {}
    for role, header in headers.items():
        dtype, shape = DTYPES[header.dtype], header.shape
        if role == "codes":
            found[role] = _filled(pool, header.nbytes, generator).view(dtype).view(shape)
        elif role == "scales":
            found[role] = _scales(dtype, shape, MIDDLE if "global" in headers else scale, generator)
        elif role == "global":  # scales in 8 bits are divided by it; ModelOpt's are multiplied
            factor = MIDDLE / scale
            value = 1 / factor if weight.format.startswith("modelopt") else factor
            found[role] = torch.full(shape, value, dtype=dtype, device=device)
        elif role == "order":
            found[role] = torch.arange(prod(shape), dtype=dtype, device=device) // weight.block[1]
        else:
            found[role] = _zeros(weight, dtype, shape, device)
    return found


def _table_of(weight: QuantizedWeight, headers: Mapping[str, Header]) -> str:
    """Return the name of the table (`zinfer.engine.quantization.dequantize.table`) that a weight's codes stand for.
    Words hold whole numbers less a zero point in the middle."""
    known = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "int8", "U8": "e2m1", "I32": f"middle{weight.bits}"}
    return known[headers["codes"].dtype]


def _largest(name: str) -> float:
    return float(table(name, torch.device("cpu")).nan_to_num(0.0, 0.0, 0.0).max())


@cache
def _pool(name: str, scale: float, device: torch.device) -> tuple[Tensor, float]:
    """Return codes, int64 ``[blocks, BLOCK / 8]``, of normally distributed numbers (standard deviation 1) over `scale`,
    and the standard deviation of the numbers that they stand for."""
    numbers = table(name, device)
    order = numbers.nan_to_num(float("inf"), float("inf"), float("inf")).argsort(stable=True)
    known = numbers[order][: int(numbers.isfinite().sum())]
    dice = torch.Generator(device).manual_seed(0)
    normal = torch.randn(POOL, generator=dice, device=device) / scale
    nearest = torch.bucketize(normal, (known[1:] + known[:-1]) / 2)
    codes = order[nearest].to(torch.uint8)
    std = float(known[nearest].std())
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
    """Return zero points in the middle of the codes, so that the weights' mean is 0."""
    if weight.format == "fp8 or int8":
        return torch.zeros(shape, device=device).to(dtype)
    middle = (1 << weight.bits - 1) - weight.offset
    whole = sum(middle << shift for shift in range(0, 8, weight.bits))
    return torch.full((*shape, 4), whole, dtype=torch.uint8, device=device).view(dtype).view(shape)
