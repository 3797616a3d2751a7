"""Timeline of a step: spans of copies, unpacking and computation, timed on the device that runs them, and of reads from
disk, timed by the host's clock.

Each of several GPUs has its own clock. Their timelines are put together (`joined`) by the clock of the host, which all
of its processes share: each trace notes what that shows at its beginning.
"""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import get_args

import torch

from zinfer.record.measurement import Carried, Lane, Span

Mark = torch.cuda.Event | float
# Lane, layer, begin, end, and the experts that a copy carries, if any
Timed = tuple[Lane, int | None, Mark, Mark, Carried | None]
Reads = Iterable[tuple[int, float, float]]  # layer, begin and end by the host's clock, in the order of the begins


def clock() -> float:
    return perf_counter()


def mark(cuda: bool) -> Mark:
    """Return the current time: on a GPU an event on the current stream, which the device stamps when it gets there;
    elsewhere the clock, in seconds."""
    if not cuda:
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


Recording = tuple[float, tuple[Span, ...]]  # a trace's beginning by the host's clock, in s, and its spans


class Trace:
    """Spans of a pass, collected from the creation of the trace on. `earlier` was issued before it; some of that may
    still be under way. `reads` returns the latest reads from disk, those under way included. `begun` is the time of its
    beginning by the host's clock, in s."""

    def __init__(self, cuda: bool, earlier: Iterable[Timed] = (), reads: Callable[[], Reads] = tuple) -> None:
        self._cuda, self._reads = cuda, reads
        if cuda:
            torch.cuda.current_stream().synchronize()
        before = clock()
        self._zero = mark(cuda)
        if isinstance(self._zero, float):
            self.begun = self._zero
        else:
            self._zero.synchronize()
            self.begun = (before + clock()) / 2
        self._open: dict[tuple[Lane, int | None], list[Mark]] = {}  # begun and not ended, the last one last
        self._spans = list(earlier)

    def begin(self, lane: Lane, layer: int | None) -> None:
        self._open.setdefault((lane, layer), []).append(mark(self._cuda))

    def end(self, lane: Lane, layer: int | None) -> None:
        self.add(lane, layer, self._open[lane, layer].pop(), mark(self._cuda))

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
                start_ms, end_ms = min(last.start_ms, span.start_ms), max(last.end_ms, span.end_ms)
                merged[lane][-1] = last._replace(start_ms=start_ms, end_ms=end_ms)
            else:
                merged[lane].append(span)
        return tuple(span for spans in merged.values() for span in spans)

    def _ms(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return round((mark - self.begun) * 1e3, 3)
        return round(float(self._zero.elapsed_time(mark)), 3)  # type: ignore[union-attr]


def joined(recordings: Sequence[Recording]) -> tuple[Span, ...]:
    """Return all ranks' spans, from the begin of the first rank's trace; earlier spans are left out."""
    joined_spans = []
    for rank, (begun, spans) in enumerate(recordings):
        delay_ms = (begun - recordings[0][0]) * 1e3
        for span in spans:
            start_ms, end_ms = span.start_ms + delay_ms, span.end_ms + delay_ms
            if end_ms > 0:
                joined_spans.append(span._replace(rank=rank, start_ms=start_ms, end_ms=end_ms))
    return tuple(joined_spans)
