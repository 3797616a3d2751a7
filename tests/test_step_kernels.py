"""Kernels of recorded decode steps: products, norms, new keys and values; and which products are one launch.

The kernels run in a process of their own (`tests.interpreter`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from tests.running import error
from tests.test_codec import compile_for_h100, need_triton
from zinfer.engine.stream.linears import MAX_TOKENS, Linears

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
# Columns, and rows of matrices of one launch: fewer rows than a program has, and a number that no block divides.
SHAPES = ((64, (64,)), (288, (96, 32, 32)), (300, (37, 3)), (8200, (5,)))
PROGRAMS = 8  # so that programs of most shapes have several rows


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=dice).to(dtype)


def multiplied(tokens: int, columns: int, rows: tuple[int, ...], biased: bool, dtype: torch.dtype) -> list[Any]:
    """Return products of one launch, each with that in double precision."""
    from zinfer.engine.stream.step_kernels import products

    states = drawn(tokens, columns, dtype=dtype)
    weights = [drawn(count, columns, dtype=dtype) / 16 for count in rows]
    biases = [drawn(count, dtype=dtype) if biased else None for count in rows]
    expected = [
        linear(states.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return list(zip(products(states, weights, biases), expected, strict=True))


def normed_states(dtype: torch.dtype) -> list[Any]:
    from zinfer.engine.stream.step_kernels import normed

    results = []
    for shape in ((1, 1, 288), (3, 2, 64)):
        states, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
        plain = rms_norm(states.double(), shape[-1:], eps=1e-5)
        results += [
            (normed(states, weight, 1e-5, False), plain * weight),
            (normed(states.transpose(0, 1), weight, 1e-5, True), (plain.to(dtype) * weight).transpose(0, 1)),
        ]
    return results


def appended(dtype: torch.dtype) -> list[Any]:
    """Return memories with new keys and values, by kernel and torch."""
    from zinfer.engine.stream.step_kernels import append

    memories = [torch.zeros(2, 3, 9, size, dtype=dtype) for size in (16, 12)]
    new = [drawn(2, 2, 3, size, dtype=dtype).transpose(1, 2) for size in (16, 12)]
    slots = torch.tensor([5, 2])
    expected = [memory.clone().index_copy_(2, slots, each) for memory, each in zip(memories, new, strict=True)]
    append(memories[0][:, :, :7], memories[1][:, :, :7], new[0], new[1], slots)
    return list(zip(memories, expected, strict=True))


def summed_parts(dtype: torch.dtype) -> list[Any]:
    from zinfer.engine.stream.weights.align_kernel import summed

    partial, bias = drawn(3, 5, 300, dtype=dtype), drawn(300, dtype=dtype)
    return [(summed(partial, None), partial.double().sum(1)), (summed(partial, bias), partial.double().sum(1) + bias)]


class Attention(nn.Module):
    """Matrices as models call them: three with the same states, one with others, and one of equal width."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, rows, dtype=dtype) for rows in (64, 16, 16, 64))
        self.up = nn.Linear(64, 48, bias=False, dtype=dtype)

    def forward(self, states: Tensor) -> list[Tensor]:
        mixed = self.q(states)
        outputs = [mixed, self.k(states), self.v(states)]
        other = self.o(mixed)
        return [*outputs, other, self.up(other), self.q(other)]


def called(dtype: torch.dtype) -> list[Any]:
    """Return results of a module and of the kernel, and its launches."""
    from zinfer.engine.stream import step_kernels

    torch.manual_seed(1)
    module, launches = Attention(dtype).requires_grad_(False), list[int]()
    linears, kernel = Linears([module]), step_kernels.products

    def counted(states: Tensor, weights: Any, biases: Any) -> list[Tensor]:
        launches.append(len(weights))
        return kernel(states, weights, biases)

    step_kernels.products = counted
    results = []
    for tokens in (1, 1, MAX_TOKENS, MAX_TOKENS + 1):
        states = drawn(tokens, 1, 64, dtype=dtype)
        launches.clear()
        with linears.fused():
            output = module(states)
        results.append((module(states), output, tuple(launches)))
    step_kernels.products = kernel
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_double_precision(dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    pairs = by_kernel["products", dtype]
    assert len(pairs) == 2 * 2 * sum(len(rows) for _, rows in SHAPES)
    for actual, expected in pairs:
        assert actual.dtype == dtype
        assert error(actual, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("kernel", ["norms", "sums"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_sums_are_those_of_double_precision(
    kernel: str, dtype: torch.dtype, by_kernel: dict[Any, Any]
) -> None:
    for actual, expected in by_kernel[kernel, dtype]:
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert error(actual, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_keys_and_values_go_to_their_slots(dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    for actual, expected in by_kernel["append", dtype]:
        assert expected.count_nonzero() > 0
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_that_read_the_same_states_are_one_launch(dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    passes = by_kernel["module", dtype]
    # The second call of q follows one of another kind, without a bias.
    assert [launches for *_, launches in passes] == [(1,) * 6, (3, 1, 1, 1), (3, 1, 1, 1), ()]
    for expected, actual, _ in passes:
        for result, wanted in zip(actual, expected, strict=True):
            assert error(result, wanted) < BOUNDS[dtype] * 4


def test_the_kernels_compile_for_an_h100() -> None:
    need_triton()
    from zinfer.engine.stream import step_kernels as kernel

    constants = {"COLUMNS": 2880, "TOKENS": 1, "BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024}
    types = dict.fromkeys(("weights", "biases", "outputs"), ("*bf16",) * 3) | {
        "states": "*bf16",
        "counts": ("i32",) * 3,
    }
    compile_for_h100(kernel._products, constants, types, num_warps=4)


def main(path: Path) -> None:
    """Save what the kernels give."""
    from zinfer.engine.stream import step_kernels

    step_kernels.PROGRAMS = PROGRAMS
    results: dict[Any, Any] = {}
    for dtype in DTYPES:
        results["products", dtype] = [
            pair
            for columns, rows in SHAPES
            for tokens, biased in ((1, True), (2, False), (1, False), (2, True))
            for pair in multiplied(tokens, columns, rows, biased, dtype)
        ]
        results["norms", dtype], results["append", dtype] = normed_states(dtype), appended(dtype)
        results["sums", dtype], results["module", dtype] = summed_parts(dtype), called(dtype)
    torch.save(results, path)
