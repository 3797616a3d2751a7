"""Check that Triton kernels run on this machine, and compute correctly.

Besides a GPU they need a C compiler and Python's headers, for the code that launches them; some machines lack these.
"""

import os
from functools import cache

import torch
from torch import Tensor

from zinfer.core.errors import error_line

# Largest difference of two ways to compute the same, relative to the norm, by bytes of a value: that of rounding.
TOLERANCE = {2: 0.03, 4: 1e-4}


def cannot_run(device: torch.device) -> str | None:
    """Return why no kernel runs on a device; None if kernels run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return trouble() if device.type == "cuda" else "no GPU"


def alike(result: Tensor, expected: Tensor) -> bool:
    """Tell whether results ``[tokens, H]`` differ by rounding alone. Padding may be NaN in both."""
    first, second = (torch.nan_to_num(states.double(), 0.0, 0.0, 0.0) for states in (result, expected))
    error = (first - second).norm() / second.norm().clamp(min=1e-30)
    return float(error) < TOLERANCE[result.dtype.itemsize]


@cache
def trouble() -> str | None:
    """Return the error of our smallest kernel, in one line, if any."""
    try:
        from zinfer.engine.zero_copy import UNIT, copy

        source = torch.ones(UNIT, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(source)
        copy(source, out)
        return None if bool((out == source).all()) else "Triton's kernels compute wrong results"
    except Exception as error:
        return error_line(error)
