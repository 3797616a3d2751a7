"""Timeline of a decode step: busy lanes, and the link's waits.

A streamed step takes as long as its bytes need on the link, and longer by every moment in which the link is idle. Times
are ms from the beginning of a step. Each of several GPUs has a link and lanes: but for `by_rank`, functions take those
of one.
"""

from collections.abc import Iterable, Sequence

from zinfer.record.measurement import Lane, Measurement, Span

Spans = Sequence[Span]
Interval = tuple[float, float]


def by_rank(spans: Spans) -> tuple[Spans, ...]:
    """Return the spans of each GPU, by number."""
    ranks = sorted({span.rank for span in spans})
    return tuple(tuple(span for span in spans if span.rank == rank) for rank in ranks)


def length_ms(spans: Spans) -> float:
    """Return the end of the step, in ms: of its last computation if it found a copy under way, else of any span."""
    handed_on = any(span.lane == "copy" and span.start_ms < 0 < span.end_ms for span in spans)
    ends = [span.end_ms for span in spans if span.lane == "compute" or (not handed_on and span.lane != "disk")]
    return max(ends, default=0.0)


def busy(spans: Spans, lane: Lane) -> tuple[Interval, ...]:
    """Return the intervals in which a lane works, ascending and disjoint."""
    end = length_ms(spans)
    intervals = [(max(0.0, span.start_ms), min(end, span.end_ms)) for span in spans if span.lane == lane]
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
    return total_ms(busy(spans, lane)) / end if end > 0 else 0.0


def busy_bandwidth(point: Measurement, spans: Spans) -> float | None:
    """Return a link's bytes a second while it works; None if unknown."""
    seconds = total_ms(busy(spans, "copy")) / 1e3
    if point.effective is None or not seconds:
        return None
    return point.effective.wire_bytes / point.gpus / seconds


def total_ms(intervals: Iterable[Interval]) -> float:
    """Return the ms of all intervals together."""
    return sum(stop - start for start, stop in intervals)
