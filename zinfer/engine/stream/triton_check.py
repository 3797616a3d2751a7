"""Whether kernels written for Triton run here. Besides a GPU each needs a C compiler and Python's headers, for the code
that launches it, and there are machines with the one and without the others."""

from functools import cache

import torch

from zinfer.spec.errors import one_line


@cache
def trouble() -> str | None:
    """What the smallest kernel of ours fails with on the current GPU, in a line; None if it runs."""
    try:
        from zinfer.engine.stream.zero_copy import UNIT, copy

        source = torch.ones(UNIT, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(source)
        copy(source, out)
        return None if bool((out == source).all()) else "Triton's kernels compute something else than they should"
    except Exception as error:
        return one_line(error)
