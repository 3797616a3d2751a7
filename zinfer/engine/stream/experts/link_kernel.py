# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels that divide chosen experts between CPU and link.

One program chooses; a few copy the link's experts from pinned memory, which keeps enough bytes on their way. The host
never learns the choice, so that a CUDA graph can hold both. With TRITON_INTERPRET=1 in the environment the kernels run
on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 64  # bytes of which copies are multiples, so that every thread reads 16 at a time
PROGRAMS, WORDS = 16, 4096  # programs that copy, and the words of 4 bytes that each reads at a time
PARTS = 1 << 10  # in which a share is counted
VALUES = 8192  # comparisons of choices with experts that the program does at a time


def split(chosen: Tensor, count: int, slots: int, share: float, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a `share` of the distinct experts of `chosen`.

    The most wanted come first, and at most `slots`. `chosen` is int64 ``[tokens, k]``; numbers that are not below
    `count` name no expert. Returns, as int64, the experts ``[slots]``, -1 where there are fewer; each choice's slot
    ``[tokens, k]``, or -1; and the choices that have none, ``[tokens, k]``, -1 where they have. `done`, int64 ``[2]``,
    perhaps in pinned memory, counts experts that come and choices of the CPU.
    """
    chosen, width = chosen.contiguous(), max(16, triton.next_power_of_2(max(count, slots)))
    experts = torch.empty(slots, dtype=torch.int64, device=chosen.device)
    places, others = torch.empty_like(chosen), torch.empty_like(chosen)
    step = max(16, min(VALUES // width, triton.next_power_of_2(chosen.numel())))
    _split[(1,)](
        chosen, experts, places, others, done, chosen.numel(), round(share * PARTS), slots,
        COUNT=count, WIDTH=width, STEP=step, PARTS=PARTS, num_warps=8,
    )  # fmt: skip
    return experts, places, others


def fill(source: Tensor, experts: Tensor, out: Tensor, size: int, stride: int, programs: int = PROGRAMS) -> None:
    """Copy the first `size` bytes of `experts` to their slots.

    Experts and slots are `stride` bytes from each other, in `source` (pinned memory) and in `out`, both uint8; `size`
    and `stride` are multiples of `UNIT`. Slots of experts below 0 stay as they are.
    """
    words, step = size // 4, stride // 4
    _fill[(programs,)](
        source.view(torch.int32), experts, out.view(torch.int32), len(experts), words, step,
        BLOCK=min(WORDS, triton.next_power_of_2(words)), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "share", "slots"])
def _split(
    chosen,
    experts,
    places,
    others,
    done,
    pairs,
    share,
    slots,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    number = tl.arange(0, WIDTH)
    uses = tl.zeros([WIDTH], tl.int32)
    for first in range(0, pairs, STEP):
        pair = first + tl.arange(0, STEP)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        uses += tl.sum(((choice[:, None] == number[None, :]) & (number[None, :] < COUNT)).to(tl.int32), 0)
    distinct = tl.sum((uses > 0).to(tl.int32), 0)
    taken = tl.minimum((distinct * share + PARTS // 2) // PARTS, slots)
    order = tl.sort((pairs - uses) * WIDTH + number)  # unused experts come last
    taken = tl.where(number < taken, order % WIDTH, -1)
    tl.store(experts + number, taken.to(tl.int64), mask=number < slots)
    tl.store(done, tl.load(done) + tl.sum((taken >= 0).to(tl.int64), 0))
    left = tl.zeros([], tl.int64)
    for first in range(0, pairs, STEP):
        pair = first + tl.arange(0, STEP)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        found = (choice[:, None] == taken[None, :]) & (taken[None, :] >= 0)
        place = tl.max(tl.where(found, number[None, :], -1), 1)
        tl.store(places + pair, place.to(tl.int64), mask=pair < pairs)
        choice = tl.where(place < 0, choice, -1)
        tl.store(others + pair, choice, mask=pair < pairs)
        left += tl.sum(((choice >= 0) & (choice < COUNT)).to(tl.int64), 0)
    tl.store(done + 1, tl.load(done + 1) + left)


@triton.jit(do_not_specialize=["slots"])
def _fill(source, experts, out, slots, words, stride, BLOCK: tl.constexpr):
    """Copy experts one after the other, each by all programs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for slot in range(0, slots):
        expert = tl.load(experts + slot)
        first = source + expert * stride
        target = out + slot * stride
        for begin in range(program * BLOCK, tl.where(expert < 0, 0, words), programs * BLOCK):
            place = begin + tl.arange(0, BLOCK)
            tl.store(target + place, tl.load(first + place, mask=place < words), mask=place < words)
