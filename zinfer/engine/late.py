"""Items that a thread loads while others are in use: layers, during the first pass.

Whoever reads one waits for it, and gets the exception of a failed load: no pass ends whose weights were not all loaded.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

from zinfer.core.progress import Progress

Item = TypeVar("Item")
Publish = Callable[[int, Item], None]  # gets each item, by number, once all of it is in place


class Late(Generic[Item]):
    """Sequence of `count` items that `load` publishes in a thread.

    It gets the function to publish with, and what reports its `progress`. Its work on a GPU is in a stream of its own,
    and done when an item is published.
    """

    def __init__(
        self, count: int, load: Callable[[Publish[Item], Progress], object], device: torch.device, progress: Progress
    ) -> None:
        self.ended, self.ended_at = False, 0.0  # the latter in s, of the monotonic clock
        self.fault: BaseException | None = None  # exception that ended the load
        self._items = [Future[Item]() for _ in range(count)]
        self._stopping = False
        self._device, self._progress = device, progress
        self._thread = threading.Thread(target=self._run, args=(load,), name="zinfer-load", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        """Wait for an item. Raises what the load has raised."""
        item = self._items[index].result()
        self._raise_fault()
        return item

    def __setitem__(self, index: int, item: Item) -> None:
        self._items[index] = Future()
        self._items[index].set_result(item)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def loaded(self, index: int) -> bool:
        """Tell whether an item, or what ended the load, is there."""
        return self._items[index].done()

    def join(self) -> None:
        """Wait for the end of the load. Raises what it has raised."""
        self._thread.join()
        self._raise_fault()

    def stop(self) -> None:
        """End the load, unless it has ended, and wait for its thread."""
        self._stopping = True
        self._thread.join()

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault

    def _run(self, load: Callable[[Publish[Item], Progress], object]) -> None:
        cuda = self._device.type == "cuda"
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext():
                load(self._publish, self._report)
        except BaseException as error:
            self.fault = error
            for item in self._items:
                if not item.done():
                    item.set_exception(error)
        self.ended_at, self.ended = time.monotonic(), True

    def _publish(self, index: int, item: Item) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._items[index].set_result(item)

    def _report(self, stage: str, share: float) -> None:
        if self._stopping:
            raise CancelledError
        self._progress(stage, share)
