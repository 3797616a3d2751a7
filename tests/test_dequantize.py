"""Test the dequantise kernel of 8-bit KV caches against PyTorch. Both agree to the bit.

The kernel runs in a process of its own (`tests.interpreter`).
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.checkpoints import ARCHITECTURES, save_config
from tests.running import decode, prefill
from tests.test_parity import load
from zinfer.engine.cache import dequantize_kv

SHAPES = ((1, 1, 1, 64), (2, 3, 37, 128), (1, 2, 130, 80), (3, 2, 9, 1), (1, 1, 3, 5000), (0, 2, 4, 16), (2, 1, 0, 16))
DTYPES = torch.float32, torch.bfloat16, torch.float16


def inputs(shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return numbers and scales of a cache with spare room. It has other rows and positions, small and large scales,
    and NaN."""
    rows, heads, positions, size = shape
    dice = torch.Generator().manual_seed(size)
    numbers = torch.randint(-127, 128, (rows + 1, heads, positions + 5, size), generator=dice).to(torch.int8)
    scales = torch.rand((rows + 1, heads, positions + 5, 1), generator=dice) * 10.0 ** torch.randint(
        -30, 3, (rows + 1, heads, positions + 5, 1), generator=dice
    )
    scales[1:, :, 3:4] = torch.nan
    tensors = (tensor.to(device)[1:, :, 2 : 2 + positions] for tensor in (numbers, scales))
    return next(tensors), next(tensors)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Compare the dtype, shape and values of two tensors. NaN is one value."""
    return actual.dtype == expected.dtype and torch.equal(actual.isnan(), expected.isnan()) and torch.equal(
        actual.nan_to_num(), expected.nan_to_num()
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_what_pytorch_gives(dtype: torch.dtype, by_kernel: dict[str, Any]) -> None:
    for shape in SHAPES:
        actual = by_kernel["kernel"][dtype, shape]
        assert same(actual, dequantize_kv(*inputs(shape), dtype))
        assert actual.is_contiguous()


def test_an_engine_with_the_kernel_gives_the_same_logits(by_kernel: dict[str, Any], tmp_path: Path) -> None:
    ran, logits = by_kernel["engine"]
    assert ran > 0
    assert all(map(torch.equal, logits, run(tmp_path)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (6, 112, 528, 128)])
def test_the_kernel_gives_what_pytorch_gives_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from zinfer.engine.stream.attention_kernel import dequantize

    numbers, scales = inputs(shape, "cuda")
    assert same(dequantize(numbers, scales, dtype), dequantize_kv(numbers, scales, dtype))


def run(folder: Path) -> list[Tensor]:
    """Return int8-KV logits of a prompt and eight steps."""
    directory = save_config(folder, "bloom", **ARCHITECTURES["bloom"])
    engine = load("stream", directory, "cpu", kv_cache_dtype="int8")
    ids = torch.arange(14).reshape(2, 7) % 11 + 3
    first = prefill(engine, ids, torch.ones_like(ids), reserve=8)
    logits = [first, *(decode(engine, torch.tensor([3, 4])) for _ in range(8))]
    engine.close()
    return logits


def main(path: Path) -> None:
    """Save the kernel's results, and those of an engine that uses it."""
    from zinfer.engine.stream import attention_kernel as kernel

    results: dict[str, Any] = {"kernel": {}}
    for dtype in DTYPES:
        for shape in SHAPES:
            results["kernel"][dtype, shape] = kernel.dequantize(*inputs(shape), dtype)
    kernel.dequantize = counted = Mock(wraps=kernel.dequantize)
    logits = run(path.parent)
    results["engine"] = counted.call_count, logits
    torch.save(results, path)
