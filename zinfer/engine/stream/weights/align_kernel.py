# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels around grouped products: sort pairs, add parts.

A grouped product takes `block` rows of one expert at a time. Here the numbers of pairs of a token and an expert are put
in the order of their experts, and each expert's are padded to whole blocks. One program does so without the host, so
that a CUDA graph can hold it. `summed` adds the products of parts of the columns. With TRITON_INTERPRET=1 in the
environment the kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

SUMMED = 256  # sums of a program
VALUES = 8192  # comparisons of pairs with experts that the program does at a time
MAX_PAIRS = 2048  # of the program, which takes them a few at a time; torch sorts the pairs of prompts


def align(experts: Tensor, count: int, block: int, splits: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs' numbers in blocks of an expert, owners, and total.

    `experts` are int64 ``[tokens, k]``; a pair whose expert is not below `count` is left out. The results are int32:
    ``[blocks * block]``, padded with the number of pairs; ``[blocks]``; ``[1]``, a multiple of `block`. With `splits`
    each pair and each expert stand for as many of their own, which follow each other.
    """
    pairs, count = experts.numel() * splits, count * splits
    blocks = min(pairs, -(-pairs // block) + count)
    if pairs > MAX_PAIRS:
        parts = experts.reshape(-1, 1) * splits + torch.arange(splits, device=experts.device)
        return _sorted(parts.flatten(), count, block, blocks)
    numbers = torch.empty(blocks * block, dtype=torch.int32, device=experts.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    total = torch.empty(1, dtype=torch.int32, device=experts.device)
    width = max(16, triton.next_power_of_2(count))
    step = max(16, min(VALUES // width, triton.next_power_of_2(pairs)))
    _align[(1,)](
        experts.contiguous(),
        numbers,
        owners,
        total,
        pairs,
        blocks,
        COUNT=count,
        SPLITS=splits,
        BLOCK=block,
        WIDTH=width,
        STEP=step,
        num_warps=8,
    )
    return numbers, owners, total


def summed(partial: Tensor, bias: Tensor | None) -> Tensor:
    """Return sums ``[tokens, N]`` of partial products.

    These are ``[tokens, splits, N]``; a bias ``[N]`` is added.
    """
    tokens, splits, rows = partial.shape
    out = partial.new_empty(tokens, rows)
    _summed[(tokens, triton.cdiv(rows, SUMMED))](
        partial, bias, out, splits, rows, SPLITS=triton.next_power_of_2(splits), BLOCK=SUMMED, num_warps=4
    )
    return out


def _sorted(experts: Tensor, count: int, block: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `align` does, by operations of torch, in `blocks` blocks."""
    pairs, device = len(experts), experts.device
    owner = torch.where((experts >= 0) & (experts < count), experts, count)
    ordered, order = owner.sort(stable=True)
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add_(0, owner, torch.ones_like(owner))
    sizes = sizes[:count]
    ends = (-(-sizes // block)).cumsum(0)
    shifts = (ends + sizes // -block) * block - sizes.cumsum(0) + sizes  # from a place in the order to one in blocks
    places = torch.arange(pairs, device=device) + shifts[ordered.clamp(max=count - 1)]
    numbers = torch.full((blocks * block + 1,), pairs, dtype=torch.int32, device=device)
    numbers.scatter_(0, torch.where(ordered < count, places, blocks * block), order.to(torch.int32))
    owners = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True).clamp(max=count - 1)
    return numbers[:-1], owners.to(torch.int32), (ends[-1:] * block).to(torch.int32)


@triton.jit(do_not_specialize=["pairs", "room"])
def _align(
    experts,
    numbers,
    owners,
    total,
    pairs,
    room,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """Put pairs in the order of their experts. `room` blocks are written, each place of them once."""
    expert = tl.arange(0, WIDTH)
    pair = tl.arange(0, STEP)
    sizes = tl.zeros([WIDTH], tl.int32)
    for first in range(0, pairs, STEP):
        sizes += tl.sum(_chosen(experts, first + pair, expert, pairs, COUNT, SPLITS), 0)
    blocks = (sizes + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    next_index = (ends - blocks) * BLOCK  # where the next pair of each expert goes
    last = tl.sum(blocks, 0)
    tl.store(total, last * BLOCK)
    for first in range(last, room, STEP):
        tl.store(owners + first + pair, 0, mask=first + pair < room)
    for first in range(last * BLOCK, room * BLOCK, STEP):
        tl.store(numbers + first + pair, pairs, mask=first + pair < room * BLOCK)
    for number in range(0, tl.max(blocks, 0)):
        tl.store(owners + ends - blocks + number, expert, mask=number < blocks)
    for first in range(0, pairs, STEP):
        chosen = _chosen(experts, first + pair, expert, pairs, COUNT, SPLITS)
        before = tl.cumsum(chosen, 0) - chosen
        target = tl.sum(chosen * (before + next_index[None, :]), 1)
        tl.store(numbers + target, first + pair, mask=tl.sum(chosen, 1) > 0)
        next_index += tl.sum(chosen, 0)
    for number in range(BLOCK - 1):
        tl.store(numbers + next_index + number, pairs, mask=next_index + number < ends * BLOCK)


@triton.jit
def _chosen(experts, pair, expert, pairs, COUNT: tl.constexpr, SPLITS: tl.constexpr):
    """Return 1 where a pair has an expert, int32 ``[pairs, experts]``."""
    number = tl.load(experts + pair // SPLITS, mask=pair < pairs, other=-1).to(tl.int32) * SPLITS + pair % SPLITS
    return ((number[:, None] == expert[None, :]) & (expert[None, :] < COUNT)).to(tl.int32)


@triton.jit(do_not_specialize=["splits", "rows"])
def _summed(partial, bias, out, splits, rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of a token's products."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (row < rows)[None, :]
    parts = tl.load(partial + (token * splits + split)[:, None] * rows + row[None, :], mask=inside, other=0.0)
    value = tl.sum(parts.to(tl.float32), 0)
    if bias is not None:
        value += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + token * rows + row, rounded(value, out.dtype.element_ty), mask=row < rows)
