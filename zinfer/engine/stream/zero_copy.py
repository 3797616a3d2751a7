# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Small tensors to the GPU, past the weights.

A link's copies to the GPU are done one after the other, and behind a ring that runs ahead a layer's worth of them is
always waiting: whatever is copied then comes when the next layer's weights are there, and the GPU idles until it does.
A kernel that reads page-locked memory itself stands in no line, and takes as long as its bytes do.
"""

from collections import deque
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words of 4 bytes that a program copies
UNIT = 64  # bytes; buffers are whole ones, so that every thread reads 16 bytes at a time

_staged: deque[tuple[Tensor, Any]] = deque()  # page-locked buffers, the longest unused first, and when each is read


def lift(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of `tensor`, on the CPU, on `device`, a GPU, in the order of its current stream. Waits for nothing."""
    size = prod(tensor.shape) * tensor.itemsize
    room = -(-size // UNIT) * UNIT
    staged, read = _buffer(room), torch.cuda.Event()
    staged[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    out = torch.empty(room, dtype=torch.uint8, device=device)
    copy(staged[:room], out)
    read.record()
    _staged.append((staged, read))
    return out[:size].view(tensor.dtype).view(tensor.shape)


def copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out`, both uint8 and whole units of `UNIT` bytes, with a kernel on the current stream."""
    words = out.numel() // 4
    if words:
        _copy[(triton.cdiv(words, BLOCK),)](source.view(torch.int32), out.view(torch.int32), words, BLOCK=BLOCK)


def _buffer(size: int) -> Tensor:
    """A page-locked buffer of `size` bytes or more that nobody reads any more; those that are too small are let go."""
    while _staged and _staged[0][1].query():
        staged, _ = _staged.popleft()
        if staged.numel() >= size:
            return staged
    with torch.inference_mode(False):  # whoever uses it next may not be in that mode
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@triton.jit
def _copy(source, out, words, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(source + index, mask=index < words), mask=index < words)
