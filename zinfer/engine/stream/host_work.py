"""CPU work of a pass, in another thread while other passes launch.

A pass whose rows the CPU attends to waits, in each layer, for the device's query, then for attention. Both take longer
than launching what the device computes for other passes. So the pass hands its work over and pauses (`run_async`);
`zinfer.engine.stream.passes.interleave` goes on with the other passes, and comes back to it.

What the device sends to host memory (`to_host_async`) is not there yet when attention is called. Work that reads it is
deferred (`defer`), and the thread does that first. Code that reads host memory otherwise calls `flush` before.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from zinfer.engine.transfer import to_host

PAUSED = object()  # what a pass hands to its parent when it pauses


class PausingPass(greenlet):  # type: ignore[misc]
    """Forward pass that may pause; its parent then gets `PAUSED`, and switches to it again."""

    def __init__(self, forward: Callable[[], object]) -> None:
        super().__init__()
        self._forward = forward
        self.deferred: list[Callable[[], object]] = []

    def run(self) -> None:
        self._forward()
        flush()  # stored positions without attention yet


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "zinfer-attention")


def may_pause() -> bool:
    """Tell whether the forward pass that runs now may pause."""
    return isinstance(getcurrent(), PausingPass)


def to_host_async(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors to host memory; in a pass that may pause, complete after `flush` or in `run_async`."""
    if not (may_pause() and tensors[0].is_cuda):
        return to_host(*tensors)
    copies = [tensor.contiguous().to("cpu", non_blocking=True) for tensor in tensors]
    event = torch.cuda.Event()
    event.record()
    defer(event.synchronize)
    return copies


def defer(work: Callable[[], object]) -> None:
    """Defer `work` until `run_async` or `flush`; do it now in a pass that may not pause."""
    if may_pause():
        getcurrent().deferred.append(work)
    else:
        work()


def flush() -> None:
    """Do all deferred work of the running pass now."""
    for work in _taken() if may_pause() else ():
        work()


def _taken() -> list[Callable[[], object]]:
    current: Any = getcurrent()
    taken: list[Callable[[], object]] = current.deferred
    current.deferred = []
    return taken


def run_async(work: Callable[[], Tensor]) -> Tensor:
    """Return the result of `work`, after all deferred work; other passes go on meanwhile, if this one may pause."""
    if not may_pause():
        return work()
    deferred, threads, inference = _taken(), torch.get_num_threads(), torch.is_inference_mode_enabled()

    def run() -> Tensor:
        torch.set_num_threads(threads)  # teams of two sizes in turn end and start threads each time
        with torch.inference_mode(inference):
            for each in deferred:
                each()
            return work()

    done = _thread().submit(run)
    try:
        getcurrent().parent.switch(PAUSED)
    finally:
        result = done.result()
    return result
