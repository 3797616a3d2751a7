"""Check that Triton kernels run on this machine, and compute what others do. Besides a GPU they need a C compiler and
Python's headers, for the code that launches them, and some machines have the GPU only."""

import os
from functools import cache

import torch
from torch import Tensor

from zinfer.core.errors import error_line

# Largest difference of two ways to compute the same, relative to the norm, by bytes of a value: that of rounding.
TOLERANCE = {2: 0.03, 4: 1e-4}


def cannot_run(device: torch.device) -> str | None:
    """Return the reason why no kernel runs on a device; None if kernels run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return trouble() if device.type == "cuda" else "no GPU"


def alike(found: Tensor, expected: Tensor) -> bool:
    """Tell whether results ``[tokens, H]`` differ by rounding alone; padding may be NaN in both."""
    one, other = (torch.nan_to_num(states.double(), 0.0, 0.0, 0.0) for states in (found, expected))
    error = (one - other).norm() / other.norm().clamp(min=1e-30)
    return float(error) < TOLERANCE[found.dtype.itemsize]


@cache
def trouble() -> str | None:
    """Return the error, in one line, of our smallest kernel on the current GPU; None if it runs."""
    try:
        from zinfer.engine.zero_copy import UNIT, copy

        source = torch.ones(UNIT, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(source)
        copy(source, out)
        return None if bool((out == source).all()) else "Triton's kernels compute wrong results"
    except Exception as error:
        return error_line(error)
