"""CPU work of a forward pass, done by a thread of its own while others launch the device's work.

A pass whose rows the CPU attends to waits, in each layer, for the device's query, then for attention. Both take longer
than launching what the device computes for other passes, which would have to wait in turn if one thread did all. So the
pass hands its work over and pauses (`meanwhile`); `zinfer.engine.stream.interleave` goes on with the other passes, and
comes back to it.

What the device sends to host memory is not there yet when attention is called. It comes by `arriving`, and what reads
it by then is put off (`later`, `store_later`); the thread does that first. Whoever reads host memory otherwise calls
`settle` before.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from zinfer.engine.stream.cpu_kernel import store
from zinfer.engine.transfer import to_host

PAUSED = object()  # what a pass hands to its parent when it pauses
_put_off: list[Callable[[], object]] = []  # of the pass that runs now, until it pauses or settles
_stores: list[tuple[Tensor, Tensor]] = []  # of that pass, too: what is stored then, and where
_gathering = False  # True while stores wait for others, in a pass that may not pause


class PausingPass(greenlet):  # type: ignore[misc]
    """Forward pass that may pause. Its parent gets PAUSED then, and switches to it again."""


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "zinfer-attention")


def may_pause() -> bool:
    """Tell whether the forward pass that runs now may pause."""
    return isinstance(getcurrent(), PausingPass)


def arriving(*tensors: Tensor) -> list[Tensor]:
    """Return copies of `tensors` in host memory. Those from a GPU are contiguous in a pass that may pause, and complete
    once the work that was put off is done."""
    if not (may_pause() and tensors[0].is_cuda):
        return to_host(*tensors)
    found = [tensor.contiguous().to("cpu", non_blocking=True) for tensor in tensors]
    event = torch.cuda.Event()
    event.record()
    later(event.synchronize)
    return found


def later(work: Callable[[], object]) -> None:
    """Put `work` off until `meanwhile` or `settle`; do it now in a pass that may not pause."""
    if may_pause():
        _put_off.append(work)
    else:
        work()


def store_later(target: Tensor, states: Tensor) -> None:
    """Copy `states` to `target`, of its shape, in host memory, behind all that was put off: as `later` has it."""
    if may_pause() or _gathering:
        _stores.append((target, states))
    else:
        target.copy_(states)


@contextmanager
def stored_together() -> Iterator[None]:
    """Have all that is stored within stored at once, at the end of it or later."""
    global _gathering
    _gathering = True
    try:
        yield
    finally:
        _gathering = False
    if not may_pause():
        settle()


def settle() -> None:
    """Do now what was put off."""
    while _put_off:
        _put_off.pop(0)()
    if _stores:
        stores = list(_stores)
        _stores.clear()
        store(stores)


def forget() -> None:
    """Forget what was put off by passes that have failed."""
    _put_off.clear()
    _stores.clear()


def meanwhile(work: Callable[[], Tensor]) -> Tensor:
    """Return what `work` returns, done behind all that was put off: in a thread, while other passes go on, if this one
    may pause."""
    if not may_pause():
        settle()
        return work()
    before, stores, threads = list(_put_off), list(_stores), torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    forget()

    def run() -> Tensor:
        with torch.inference_mode(inference):
            for one in before:
                one()
            if stores:
                store(stores, threads)
            return work()

    done = _thread().submit(run)
    try:
        with torch._C._EnableTorchFunction():  # for the others: this one may be within a function of a subclass
            getcurrent().parent.switch(PAUSED)
    finally:
        found = done.result()
    return found
