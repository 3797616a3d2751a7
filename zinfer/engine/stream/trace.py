"""Timeline of a step: spans of copies, unpacking and computation, timed on the device that runs them, and of reads from
disk, timed by the host's clock."""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import get_args

import torch

from zinfer.record.measurement import Carried, Lane, Span

Mark = torch.cuda.Event | float
Copy = tuple[int, Mark, Mark, Carried | None]  # layer, begin, end, and the experts that it carries, if any
Reads = Iterable[tuple[int, float, float]]  # layer, begin and end by the host's clock, in the order of the begins


def clock() -> float:
    """Return the time by the host's clock, in seconds."""
    return perf_counter()


def mark(cuda: bool) -> Mark:
    """Return the current time: on a GPU an event on the current stream, which the device stamps when it gets there;
    elsewhere the clock, in seconds."""
    if not cuda:
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(begin: Mark, end: Mark) -> float | None:
    """Return the seconds between two marks; None as long as the device has not come to the second one."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return float(begin.elapsed_time(end)) / 1e3 if end.query() else None


class Trace:
    """Spans collected from the creation of the trace on. `copies` were issued before it; some may still be under way.
    `reads` returns the latest reads from disk, those under way included."""

    def __init__(self, cuda: bool, copies: Iterable[Copy] = (), reads: Callable[[], Reads] = tuple) -> None:
        self._cuda, self._reads = cuda, reads
        self._zero = mark(cuda)
        if isinstance(self._zero, torch.cuda.Event):
            self._zero.synchronize()
        self._clock = clock()  # the host's clock at the beginning
        self._open: dict[tuple[Lane, int | None], Mark] = {}
        self._spans: list[tuple[Lane, int | None, Mark, Mark, Carried | None]] = [("copy", *copy) for copy in copies]

    def begin(self, lane: Lane, layer: int | None) -> None:
        self._open[lane, layer] = mark(self._cuda)

    def end(self, lane: Lane, layer: int | None) -> None:
        self.add(lane, layer, self._open.pop((lane, layer)), mark(self._cuda))

    def add(self, lane: Lane, layer: int | None, begin: Mark, end: Mark, carries: Carried | None = None) -> None:
        self._spans.append((lane, layer, begin, end, carries))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of each lane in order, in ms; adjacent spans of a layer are merged. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        self._spans += [("disk", *read, None) for read in self._reads()]
        merged: dict[Lane, list[Span]] = {lane: [] for lane in get_args(Lane)}
        for lane, layer, begin, end, carries in self._spans:
            span = Span(lane=lane, layer=layer, start_ms=self._ms(begin), end_ms=self._ms(end), carries=carries)
            if span.end_ms <= 0:
                continue  # before the trace
            last = merged[lane][-1] if merged[lane] else None
            alike = last is not None and (last.layer, last.carries) == (layer, carries)
            if last is not None and alike and span.start_ms - last.end_ms < 0.05:
                merged[lane][-1] = last.model_copy(update={"end_ms": max(last.end_ms, span.end_ms)})
            else:
                merged[lane].append(span)
        return tuple(span for spans in merged.values() for span in spans)

    def _ms(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return round((mark - self._clock) * 1e3, 3)
        return round(float(self._zero.elapsed_time(mark)), 3)  # type: ignore[union-attr]
