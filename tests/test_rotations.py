"""Rotary positions of recorded passes: found by what functions compute, turned by one kernel with the same results.

The kernel runs in a process of its own (`tests.interpreter`).
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_norms import model_of

# Parts of a head with angles that the kernel serves. Cohere turns neighbours against each other, BLOOM turns nothing.
KINDS = {"llama": {1}, "mixtral": {1}, "gpt_oss": {2}, "cohere": set[int](), "bloom": None}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 32, 8, 1, 128), (3, 5, 1, 2, 24))  # rows, heads of queries and of keys, tokens, size


def inputs(shape: tuple[int, ...], part: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys as models have them, cosines and sines."""
    rows, heads, key_heads, count, size = shape
    dice = torch.Generator().manual_seed(size)
    query = torch.randn((rows, count, heads, size), generator=dice).to(dtype).transpose(1, 2)
    keys = torch.randn((rows, count, 2 * key_heads, size), generator=dice).to(dtype)[:, :, :key_heads].transpose(1, 2)
    angles = torch.randn((rows, count, size // 2), generator=dice)
    angles = torch.cat((angles, angles), -1) if part == 1 else angles
    return query, keys, angles.cos().to(dtype), angles.sin().to(dtype)


def main(path: Path) -> None:
    """Save which forms are served, and whether results are equal."""
    from zinfer.engine.stream.rotations import FUNCTION, Rotations

    results = dict[str, Any]()
    for name in KINDS:
        for dtype in DTYPES:
            model = model_of(name, dtype)
            scope = vars(sys.modules[type(model).__module__])
            function: Any = scope.get(FUNCTION)
            rotations = Rotations(model, torch.device("cpu"))
            forms = {part for _, _, fused in rotations._replaced for part in fused.args[1]}  # type: ignore[attr-defined]
            equal = list[bool]()
            for shape in SHAPES if function is not None else ():
                for part in forms:
                    given, limit = inputs(shape, part, dtype), 0.0 if dtype.itemsize == 2 else 1e-6
                    with rotations.fused():
                        turned, other = scope[FUNCTION](*given), scope[FUNCTION](*given, unsqueeze_dim=1)
                    expected = function(*given)
                    pairs = [*zip(turned, expected, strict=True), (other[0], expected[0])]
                    equal += [float((a - b).abs().max()) <= limit for a, b in pairs]
            results[f"{name}-{dtype}"] = [sorted(forms), len(rotations), equal, scope.get(FUNCTION) is function]
    torch.save(results, path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_rotations_are_found_and_give_the_same(by_kernel: Any, name: str, dtype: torch.dtype) -> None:
    forms, count, equal, restored = by_kernel[f"{name}-{dtype}"]
    assert (set(forms), count, restored) == (KINDS[name] or set(), bool(forms), True)
    assert equal == 3 * len(SHAPES) * count * [True]
