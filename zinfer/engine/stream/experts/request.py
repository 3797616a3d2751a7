# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Kernels by which the device asks the CPU for experts.

The device writes what a call needs to pinned memory, then the call's number to `asked`, a word of it. A thread of the
CPU takes the number, and writes 1 to `done`, another word, when the result is in pinned memory. A host function of CUDA
would take 0.1 ms longer, and its copies wait for others.

One program sends, so that its barrier is behind all that it wrote; the fences are those of the whole system.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import rounded

SENT, RECEIVED = 4096, 1024  # values that a program moves at a time


def send(tensors: Sequence[Tensor], host: Sequence[Tensor], asked: Tensor, done: Tensor, number: int) -> None:
    """Queue a request for a call. It has the number `number`. `tensors` are hidden states ``[tokens, H]``, chosen
    experts, and their weights ``[tokens, k]``; `host` is their pinned memory, of the same type, int64 and float32.
    `asked` and `done` are int32."""
    states, chosen, weights = (tensor.contiguous() for tensor in tensors)
    _send[(1,)](
        states, chosen, weights, *host, asked, done, number, states.numel(), chosen.numel(),
        BLOCK=SENT, num_warps=8,
    )  # fmt: skip


def receive(host: Tensor, done: Tensor, states: Tensor, linked: Tensor | None = None) -> Tensor:
    """Return the result of the request sent before. It has the shape and type of `states`; `host` is its pinned memory.
    The current stream waits for it. The result of the link's experts, `linked`, is added."""
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _receive[(triton.cdiv(out.numel(), RECEIVED),)](host, done, linked, out, out.numel(), BLOCK=RECEIVED)
    return out


@triton.jit
def _fence():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["number", "values", "pairs"])
def _send(
    states,
    chosen,
    weights,
    host_states,
    host_chosen,
    host_weights,
    asked,
    done,
    number,
    values,
    pairs,
    BLOCK: tl.constexpr,
):
    tl.store(done, 0)
    for first in range(0, values, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(host_states + place, tl.load(states + place, mask=place < values), mask=place < values)
    for first in range(0, pairs, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < pairs
        tl.store(host_chosen + place, tl.load(chosen + place, mask=inside).to(tl.int64), mask=inside)
        tl.store(host_weights + place, tl.load(weights + place, mask=inside).to(tl.float32), mask=inside)
    _fence()
    tl.debug_barrier()
    tl.store(asked, number)


@triton.jit(do_not_specialize=["values"])
def _receive(host, done, linked, out, values, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    while tl.load(done, volatile=True) == 0:
        pass
    _fence()
    tl.debug_barrier()
    value = tl.load(host + place, mask=place < values, volatile=True)
    if linked is not None:
        total = value.to(tl.float32) + tl.load(linked + place, mask=place < values).to(tl.float32)
        value = rounded(total, out.dtype.element_ty)
    tl.store(out + place, value, mask=place < values)
