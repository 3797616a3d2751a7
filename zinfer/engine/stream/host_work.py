"""CPU work of a pass, in another thread while other passes launch.

A pass whose rows the CPU attends to waits, in each layer, for the device's query, then for attention. Both take longer
than launching what the device computes for other passes. So the pass hands its work over and pauses (`run_async`);
`zinfer.engine.stream.passes.interleave` goes on with the other passes, and comes back to it.

What the device sends to host memory (`to_host_async`) is not there yet when attention is called. Work that reads it is
deferred (`defer`, `defer_store`), and the thread does that first. Code that reads host memory otherwise calls `flush`
before.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from zinfer.engine.stream.kv.cpu_kernel import store
from zinfer.engine.transfer import to_host

PAUSED = object()  # what a pass hands to its parent when it pauses


class Deferred:
    """Work that a forward pass has put off: functions, then copies to host memory (target, states)."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []
        self.stores: list[tuple[Tensor, Tensor]] = []

    def take(self) -> "Deferred":
        """Return all that is deferred; nothing is left."""
        taken = Deferred()
        taken.works, taken.stores, self.works, self.stores = self.works, self.stores, [], []
        return taken

    def run(self, threads: int | None = None) -> None:
        for work in self.works:
            work()
        if self.stores:
            store(self.stores, threads)


class PausingPass(greenlet):  # type: ignore[misc]
    """Forward pass that may pause; its parent then gets `PAUSED`, and switches to it again."""

    def __init__(self, forward: Callable[[], object]) -> None:
        super().__init__()
        self._forward, self.deferred = forward, Deferred()

    def run(self) -> None:
        self._forward()
        flush()  # stored positions without attention yet


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "zinfer-attention")


def _deferred() -> Deferred | None:
    """Return the deferred work of the running pass; None if it does everything at once."""
    deferred: Deferred | None = getattr(getcurrent(), "deferred", None)
    return deferred


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
    deferred = _deferred()
    if deferred is not None and may_pause():
        deferred.works.append(work)
    else:
        work()


def defer_store(target: Tensor, states: Tensor) -> None:
    """Copy `states` to `target` in host memory, after all deferred work."""
    deferred = _deferred()
    if deferred is not None:
        deferred.stores.append((target, states))
    else:
        target.copy_(states)


@contextmanager
def gathered_stores() -> Iterator[None]:
    """Batch the block's stores into one call, at its end or later."""
    if may_pause():
        yield
        return
    current = getcurrent()
    current.deferred = Deferred()
    try:
        yield
        flush()
    finally:
        del current.deferred


def flush() -> None:
    """Do all deferred work of the running pass now."""
    deferred = _deferred()
    if deferred is not None:
        deferred.take().run()


def run_async(work: Callable[[], Tensor]) -> Tensor:
    """Return the result of `work`, after all deferred work; other passes go on meanwhile, if this one may pause."""
    if not may_pause():
        flush()
        return work()
    deferred, threads, inference = (
        getcurrent().deferred.take(),
        torch.get_num_threads(),
        torch.is_inference_mode_enabled(),
    )

    def run() -> Tensor:
        with torch.inference_mode(inference):
            deferred.run(threads)
            return work()

    done = _thread().submit(run)
    try:
        getcurrent().parent.switch(PAUSED)
    finally:
        result = done.result()
    return result
