# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Zero-copy transfer of small tensors to the GPU, past streaming weights.

Copies to the GPU queue, and the prefetch ring always has a layer's worth of them queued: another copy would arrive
after the next layer's weights. A kernel that reads page-locked memory takes only the time of its own bytes.
"""

from collections import deque
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words of 4 bytes that a program copies
UNIT = 64  # bytes; buffers are multiples of it, so that every thread reads 16 bytes at a time

_staged: deque[tuple[Tensor, Any]] = deque()  # page-locked buffers, least recently used first, with their last read


def zero_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to the GPU `device` without waiting. The copy is in the order of the current stream."""
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
    """Copy `source` to `out` with a kernel. Both are uint8 and a multiple of `UNIT` bytes."""
    words = out.numel() // 4
    if words:
        _copy[(triton.cdiv(words, BLOCK),)](source.view(torch.int32), out.view(torch.int32), words, BLOCK=BLOCK)


def _buffer(size: int) -> Tensor:
    """Return a page-locked buffer of `size` bytes that no kernel reads. It drops those too small."""
    while _staged and _staged[0][1].query():
        staged, _ = _staged.popleft()
        if staged.numel() >= size:
            return staged
    with torch.inference_mode(False):  # the next user may not be in that mode
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@triton.jit
def _copy(source, out, words, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(source + index, mask=index < words), mask=index < words)
