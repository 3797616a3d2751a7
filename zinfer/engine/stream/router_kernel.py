# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernel that chooses experts by their scores, and weighs them.

The largest scores are taken one after the other; of equal ones, the one of the first expert. With TRITON_INTERPRET=1 in
the environment it runs on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

LOWEST = tl.constexpr(-(1 << 63))  # key of an expert that is not there, or chosen


def route(scores: Tensor, count: int, of_all: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of the `count` best experts.

    `scores` are contiguous ``[tokens, E]``. The weights are shares of a softmax over the chosen experts, or `of_all`,
    in `dtype`, the numbers int64, both ``[tokens, count]``, the largest first.
    """
    tokens, experts = scores.shape
    weights = torch.empty((tokens, count), dtype=dtype, device=scores.device)
    numbers = torch.empty((tokens, count), dtype=torch.int64, device=scores.device)
    _route[(tokens,)](
        scores,
        weights,
        numbers,
        EXPERTS=experts,
        COUNT=count,
        OF_ALL=of_all,
        BLOCK=triton.next_power_of_2(experts),
        CHOSEN=triton.next_power_of_2(count),
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, numbers


@triton.jit
def _route(
    scores,
    weights,
    numbers,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    OF_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose and weigh the experts of a token. The upper half of a key has a score's bits, in the order of integers,
    with NaN as the largest one, as in torch; the lower half counts experts from the end."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    rank = tl.arange(0, CHOSEN)
    score = tl.load(scores + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = tl.where(expert < EXPERTS, order.to(tl.int64) * 4294967296 + (BLOCK - expert), LOWEST)
    value = tl.full([CHOSEN], float("-inf"), tl.float32)
    number = tl.zeros([CHOSEN], tl.int64)
    for turn in range(COUNT):
        taken = key == tl.max(key, 0)
        value = tl.where(rank == turn, tl.sum(tl.where(taken, score, 0.0), 0), value)
        number = tl.where(rank == turn, tl.sum(tl.where(taken, expert, 0), 0), number)
        key = tl.where(taken, LOWEST, key)
    largest = tl.sum(tl.where(rank == 0, value, 0.0), 0)
    share = tl.exp(value - largest)
    if OF_ALL:
        share /= tl.sum(tl.exp(score - largest), 0)
    else:
        share /= tl.sum(share, 0)
    element = token * COUNT + rank
    tl.store(weights + element, rounded(share, weights.dtype.element_ty), mask=rank < COUNT)
    tl.store(numbers + element, number, mask=rank < COUNT)
