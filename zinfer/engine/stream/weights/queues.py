"""Queues of a device, and events: CUDA's streams and events, or none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a queue, as `torch.cuda.Event`."""

    def record(self) -> None: ...  # behind all work of the current queue
    def wait(self) -> None: ...  # make the current queue wait until the point is passed
    def query(self) -> bool: ...  # tell whether the point is passed
    def synchronize(self) -> None: ...  # make the CPU wait until the point is passed


class _Passed:
    """Event that is passed."""

    def record(self) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


PASSED: Event = _Passed()


class Queues(Protocol):
    """Queues of a device; the compute queue is the current one."""

    def event(self) -> Event: ...
    def copying(self) -> AbstractContextManager[Any]: ...  # makes the copy queue the current one
    def gathering(self) -> AbstractContextManager[Any]: ...  # makes the queue between GPUs the current one
    def finish(self) -> None: ...  # makes the CPU wait for all of them


class HostQueues:
    """Queues of a CPU, which does all work at once: every point is passed."""

    def event(self) -> Event:
        return PASSED

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    gathering = copying

    def finish(self) -> None:
        pass


class CudaQueues:
    """CUDA streams: the current one, and one for copies; gathers go first."""

    def __init__(self, device: torch.device) -> None:
        self._copying = torch.cuda.Stream(device)
        self._gathering = torch.cuda.Stream(device, priority=-1)

    def event(self) -> Event:
        return torch.cuda.Event()

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copying)

    def gathering(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._gathering)

    def finish(self) -> None:
        torch.cuda.synchronize()
