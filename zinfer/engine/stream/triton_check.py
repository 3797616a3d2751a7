"""Check that Triton kernels run on this machine. Besides a GPU they need a C compiler and Python's headers, for the
code that launches them, and some machines have the GPU only."""

from functools import cache

import torch

from zinfer.spec.errors import one_line


@cache
def trouble() -> str | None:
    """Return the error, in one line, of our smallest kernel on the current GPU; None if it runs."""
    try:
        from zinfer.engine.stream.zero_copy import UNIT, copy

        source = torch.ones(UNIT, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(source)
        copy(source, out)
        return None if bool((out == source).all()) else "Triton's kernels compute wrong results"
    except Exception as error:
        return one_line(error)
