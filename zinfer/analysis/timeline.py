"""Timeline of a decode step: busy lanes, and the link's waits.

A streamed step takes as long as its bytes need on the link, and longer by every moment in which the link is idle. Times
are ms from the beginning of a step. Each of several GPUs has a link and lanes: but for `by_rank`, functions take those
of one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from zinfer.record.measurement import Lane, Measurement, Span

Spans = Sequence[Span]
Interval = tuple[float, float]


class Waits(NamedTuple):
    """Idle time of the link in a step, by position and cause; what neither explains is launches and the CPU."""

    before_ms: float  # before the first copy
    between_ms: float
    after_ms: float  # after the last copy
    working_ms: float  # while the GPU works
    reading_ms: float = 0.0  # while the disk is read

    @property
    def total_ms(self) -> float:
        return self.before_ms + self.between_ms + self.after_ms


def by_rank(spans: Spans) -> tuple[Spans, ...]:
    """Return the spans of each GPU, by number."""
    ranks = sorted({span.rank for span in spans})
    return tuple(tuple(span for span in spans if span.rank == rank) for rank in ranks)


def length_ms(spans: Spans) -> float:
    """Return the end of the step, in ms: of its last computation if it found a copy under way, else of any span."""
    handed_on = any(span.lane == "copy" and span.start_ms < 0 < span.end_ms for span in spans)
    ends = [span.end_ms for span in spans if span.lane == "compute" or (not handed_on and span.lane != "disk")]
    return max(ends, default=0.0)


def busy(spans: Spans, *lanes: Lane) -> tuple[Interval, ...]:
    """Return the intervals in which any lane works, ascending and disjoint."""
    end = length_ms(spans)
    intervals = [(max(0.0, span.start_ms), min(end, span.end_ms)) for span in spans if span.lane in lanes]
    return tuple(joined(interval for interval in intervals if interval[0] < interval[1]))


def joined(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Join intervals with gaps of at most `gap` ms; ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def idle(spans: Spans, lane: Lane = "copy") -> tuple[Interval, ...]:
    """Return the intervals of the step in which `lane` does not work."""
    edges = [0.0, *(edge for interval in busy(spans, lane) for edge in interval), length_ms(spans)]
    return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def share(spans: Spans, lane: Lane) -> float:
    """Return the share of the step in which `lane` works."""
    end = length_ms(spans)
    return _total(busy(spans, lane)) / end if end > 0 else 0.0


def waits(spans: Spans) -> Waits:
    """Return the idle time of the link, by position in the step; all is before the first copy if it never works."""
    copies, pauses = busy(spans, "copy"), idle(spans)
    first, last = (copies[0][0], copies[-1][1]) if copies else (length_ms(spans),) * 2
    before, after = _overlap(pauses, [(0.0, first)]), _overlap(pauses, [(last, length_ms(spans))])
    working, reading = _overlap(pauses, busy(spans, "unpack", "compute")), _overlap(pauses, busy(spans, "disk"))
    return Waits(before, _total(pauses) - before - after, after, working, reading)


def hidden_share(spans: Spans, lane: Lane) -> float:
    """Return the share of a lane's time in which the link works."""
    lane_busy = busy(spans, lane)
    return _overlap(lane_busy, busy(spans, "copy")) / _total(lane_busy) if lane_busy else 1.0


def busy_bandwidth(point: Measurement, spans: Spans) -> float | None:
    """Return a link's bytes a second while it works; None if unknown."""
    seconds = _total(busy(spans, "copy")) / 1e3
    if point.effective is None or not seconds:
        return None
    return point.effective.wire_bytes / point.gpus / seconds


def _total(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the ms in which intervals of both overlap. Those of `second` are ascending and disjoint."""
    if not first or not second:
        return 0.0
    edges = np.array(second)  # [n, 2]
    ends = np.cumsum(lengths := edges[:, 1] - edges[:, 0])
    before = np.interp(np.array(first), edges.ravel(), np.stack([ends - lengths, ends], axis=1).ravel())
    return float(np.sum(before[:, 1] - before[:, 0]))
