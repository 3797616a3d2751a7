"""Items that a thread loads while others are in use: layers, during the first pass.

Whoever reads one waits for it. Once the load has failed, each read raises its exception: so no pass ends whose weights
were not all loaded, checked and found right.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from zinfer.core.progress import Progress

Item = TypeVar("Item")
Publish = Callable[[int, Item], None]  # gets each item, by number, once all of it is in place


class _StoppedError(Exception):
    """Raised in a load that is to end."""


class Late(Generic[Item]):
    """Sequence of `count` items that `load` publishes in a thread.

    It gets the function to publish with, and what reports its `progress`. Its work on a GPU is in a stream of its own,
    and done when an item is published.
    """

    def __init__(
        self,
        count: int,
        load: Callable[[Publish[Item], Progress], object],
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.ended, self.ended_at = False, 0.0  # the latter in s, of the monotonic clock
        self.fault: BaseException | None = None  # exception that ended the load
        self._count, self._items = count, dict[int, Item]()
        self._changed = threading.Condition()
        self._stopping = False
        self._device, self._progress = device, progress
        self._thread = threading.Thread(target=self._run, args=(load,), name="zinfer-load", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        """Wait for an item. Raises what the load has raised."""
        if index >= self._count:
            raise IndexError(index)
        with self._changed:
            self._changed.wait_for(lambda: index in self._items or self.ended)
            if self.fault is not None:
                raise self.fault
            return self._items[index]

    def __setitem__(self, index: int, item: Item) -> None:
        self._items[index] = item

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(self._count))

    def loaded(self, index: int) -> bool:
        """Tell whether an item, or what ended the load, is there."""
        return index in self._items or self.ended

    def join(self) -> None:
        """Wait for the end of the load. Raises what it has raised."""
        self._thread.join()
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        """End the load, unless it has ended, and wait for its thread."""
        self._stopping = True
        self._thread.join()

    def _run(self, load: Callable[[Publish[Item], Progress], object]) -> None:
        fault: BaseException | None = None
        try:
            if self._device.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream(self._device)):
                    load(self._publish, self._report)
            else:
                load(self._publish, self._report)
        except BaseException as error:
            fault = error
        with self._changed:
            self.fault, self.ended_at, self.ended = fault, time.monotonic(), True
            self._changed.notify_all()

    def _publish(self, index: int, item: Item) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        with self._changed:
            self._items[index] = item
            self._changed.notify_all()

    def _report(self, stage: str, share: float) -> None:
        if self._stopping:
            raise _StoppedError
        self._progress(stage, share)
