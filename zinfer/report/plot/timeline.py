"""Timeline of a decode step: lanes over time, and the link's waits.

The upper panel shows the whole step, the lower one the stretch in which the link waits longest, a few layers wide.
Hatched parts of the link's lane are time that the step takes beyond its bytes. The lanes of several GPUs stand below
each other, on one clock.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter

from zinfer.analysis.group import Group, Points
from zinfer.analysis.rates import best_by_load
from zinfer.analysis.timeline import (
    Interval,
    Spans,
    Waits,
    busy,
    busy_bandwidth,
    by_rank,
    focus,
    hidden_share,
    idle,
    length_ms,
    share,
    waits,
)
from zinfer.core.units import figures, gb
from zinfer.record.measurement import Carried, Lane, Measurement, Span
from zinfer.report.plot.style import DRAWN, GREY, INK, PALETTE, Sheet, lighter, shortened

_SHOWN = 3  # configurations in one figure, the fastest
_ORANGE, _SKY, _BLACK = PALETTE[5:8]  # colours that no engine has
_VERMILION = PALETTE[1]
_LOOKS: dict[Lane, tuple[str, str, str]] = {  # colour, name at the axis, meaning
    "disk": ("#8c6d31", "disk", "weights are read from disk"),
    "copy": (_SKY, "link", "weights cross the link"),
    "gather": ("#7a5195", "gather", "GPUs exchange their parts"),
    "unpack": (_ORANGE, "unpack", "a layer is unpacked"),
    "compute": (_BLACK, "compute", "the model computes"),
}
_CARRIES: dict[Carried, tuple[str, str]] = {  # colour and meaning of copies of experts on demand
    "expert": ("#2f6f95", "chosen experts cross the link"),
    "guess": (PALETTE[2], "guessed experts cross the link"),
}
_LANE, _WIDE_LANE = 0.2, 0.34  # inches, as are the next three: above the first block, above a further one, within one
_FIRST, _FURTHER, _WITHIN = 0.95, 1.4, 0.3
_LINE = 15  # points, a line of words above a block
_INDENT = -48  # points from the axes to the figure's notes
_COLUMNS = 300  # things next to each other that can be told apart in an inch
_BAR = 0.74  # height of a bar, as a share of its lane


def timeline(group: Group, points: Points) -> Figure | None:
    """Draw a traced step of each configuration's fastest batch; None without one."""
    tops = best_by_load([point for point in points if busy(point.timeline, "copy")])
    if not tops:
        return None
    shown = tops[:_SHOWN]
    which = "every configuration" if len(tops) == len(shown) else f"the fastest {_SHOWN} of {len(tops)} configurations"
    what = f"A decode step of {which}, each at its own best batch, traced after the timed ones."
    stack: list[tuple[float, float]] = []
    for point in shown:
        lanes, words = len(_lanes(point.timeline)), _LINE / 72 * (len(_words(point)) - 3)
        stack += [(words + (_FURTHER if stack else _FIRST), _LANE * lanes), (_WITHIN, _WIDE_LANE * (lanes + 0.45))]
    sheet = Sheet(group, "when does the link wait?", (what, group.conditions), stack=stack)
    longest = max(length_ms(point.timeline) for point in shown)
    for nth, point in enumerate(shown):
        whole, part = sheet.panels[2 * nth : 2 * nth + 2]
        _overview(whole, point, longest)
        _magnified(part, point.timeline)
        _join(whole, part, focus(_waiting(point.timeline)))
    sheet.panels[-1].set_xlabel("ms from the beginning of the step")
    return sheet.finish()


class _Lane(NamedTuple):
    """A lane of a GPU, and what happens in it."""

    lane: Lane
    spans: Spans
    name: str


def _lanes(spans: Spans) -> list[_Lane]:
    """Return the busy lanes of all GPUs, from the top."""
    ranks = by_rank(spans)
    return [
        _Lane(lane, rank_spans, _LOOKS[lane][1] + (f" {rank_spans[0].rank}" if len(ranks) > 1 else ""))
        for rank_spans in ranks
        for lane in get_args(Lane)
        if any(span.lane == lane for span in rank_spans)
    ]


def _waiting(spans: Spans) -> Spans:
    """Return the spans of the GPU whose link waits longest."""
    return max(by_rank(spans), key=lambda rank_spans: waits(rank_spans).total_ms)


def _overview(axes: Axes, point: Measurement, longest: float) -> None:
    """Draw the whole step on a common scale, with words above it."""
    _bars(axes, point.timeline, (-0.005 * longest, 1.005 * longest), named=True)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, pad=2)
    axes.spines["bottom"].set_visible(False)
    lines = _words(point)
    for row, words in enumerate(lines):
        axes.annotate(
            words, (0, 1), xycoords="axes fraction", textcoords="offset points", size=9 if row else 10.5,
            xytext=(_INDENT, 24 + _LINE * (len(lines) - 1 - row) + 2 * (not row)), color=GREY if row else INK,
        )  # fmt: skip


def _words(point: Measurement) -> list[str]:
    """Return the lines above a step: length, busy shares, the link's waits."""
    label = f"{shortened(point.case.label(), 56)}, batch {point.case.workload.batch_size}"
    timed = f" (timed: {point.step_median_ms:,.1f} ms)" if point.step_median_ms else ""
    lines, ranks = [f"{label}: {length_ms(point.timeline):,.1f} ms{timed}"], by_rank(point.timeline)
    for spans in ranks:
        shares = ", ".join(f"{_LOOKS[lane][1]} {share(spans, lane):.1%}" for lane, *_ in _lanes(spans))
        which = f"GPU {spans[0].rank} busy" if len(ranks) > 1 else "Busy"
        lines.append(f"{which}: {shares}{_rate(point, spans)}.")
        lines.append(_idleness(waits(spans), length_ms(spans)))
        if busy(spans, "gather"):
            lines.append(f"The link works during {hidden_share(spans, 'gather'):.1%} of the gathers.")
    return lines


def _rate(point: Measurement, spans: Spans) -> str:
    rate, measured = busy_bandwidth(point, spans), point.link_bandwidth
    if not rate:
        return ""
    return f"; the busy link carries {gb(rate)}/s" + (
        f", {rate / measured:.1%} of what it was measured at" if measured else ""
    )


def _idleness(waits: Waits, end: float) -> str:
    if waits.total_ms < 0.0005 * end:
        return f"The link hardly waits: {_ms(waits.total_ms)} ms."
    parts = (
        (waits.before_ms, "before its first copy"),
        (waits.between_ms, "between"),
        (waits.after_ms, "after its last"),
    )
    where = ", ".join(f"{_ms(ms)} {words}" for ms, words in parts if ms > 0.02 * waits.total_ms)
    total = f"{_ms(waits.total_ms)} ms ({waits.total_ms / end:.1%})"
    reading = f", the disk in {_ms(waits.reading_ms)}" if waits.reading_ms else ""
    return f"The link waits {total}: {where}; the GPU works in {_ms(waits.working_ms)} of them{reading}."


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else figures(value, 2)


def _magnified(axes: Axes, spans: Spans) -> None:
    """Draw the stretch in which a link waits longest."""
    worst = _waiting(spans)
    low, high = focus(worst)
    margin, end = 0.02 * (high - low), length_ms(spans)
    limits = low - margin, high + margin
    _bars(axes, spans, limits, inches=DRAWN)
    lanes = _lanes(spans)
    axes.set_ylim(len(lanes) - 0.5, -0.95)
    for outside in ((limits[0], 0.0), (end, limits[1])):
        if outside[0] < outside[1]:
            axes.axvspan(*outside, facecolor="#F1F1F1", zorder=0)
    gaps = [(max(start, low), min(stop, high)) for start, stop in idle(worst)]
    start, stop = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))
    if stop - start >= 0.002 * (high - low):
        late = start > (low + high) / 2
        which = f" {worst[0].rank}" if len(by_rank(spans)) > 1 else ""
        who = "" if lanes[0].lane == "copy" and not which else f"the link{which} "
        axes.text(
            stop if late else start, -0.47, f"{who}waits {_ms(stop - start)} ms", size=8, color=_VERMILION,
            ha="right" if late else "left", va="bottom",
        )  # fmt: skip


def _bars(axes: Axes, spans: Spans, limits: Interval, named: bool = False, inches: float = 0.0) -> None:
    """Draw every span as a bar in its lane, numbered given `inches`."""
    lanes = _lanes(spans)
    axes.set_xlim(*limits)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [kind.name for kind in lanes], size=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="y", visible=False)
    for row, (lane, spans_of, _) in enumerate(lanes):
        lane_spans = [
            span for span in spans_of if span.lane == lane and limits[0] < span.end_ms and span.start_ms < limits[1]
        ]
        for carries in (None, *(kind for kind in _CARRIES if any(span.carries == kind for span in lane_spans))):
            alike = [span for span in lane_spans if span.carries == carries]
            meaning = _LOOKS[lane][2] if carries is None else _CARRIES[carries][1]
            for odd in (False, True):
                label = meaning if named and not odd else None
                pairs = _joined([(span.start_ms, span.end_ms) for span in alike if _odd(span) is odd], limits)
                _boxes(axes, pairs, row, label, color=_tone(lane, odd, carries), linewidth=0 if inches else 0.3)
        for span in lane_spans if inches else ():
            _name(axes, span, row, limits, inches)
    for row, (lane, spans_of, _) in enumerate(lanes):
        if lane == "copy":
            inside = ((max(start, limits[0]), min(stop, limits[1])) for start, stop in idle(spans_of))
            gaps = [(start, stop) for start, stop in inside if stop - start >= _column(limits)]
            _boxes(
                axes, gaps, row, "the link waits" if named else None,
                facecolor=lighter(_VERMILION, 0.8), edgecolor=_VERMILION, hatch="//////", linewidth=0,
            )  # fmt: skip


def _column(limits: Interval) -> float:
    """Return the ms of the narrowest visible thing in an axis."""
    return (limits[1] - limits[0]) / (DRAWN * _COLUMNS)


def _joined(pairs: Sequence[Interval], limits: Interval) -> list[Interval]:
    """Join intervals with invisible gaps: a trace may have a million."""
    column = _column(limits)
    joined: list[Interval] = []
    for start, end in sorted(pairs):
        if joined and start - joined[-1][1] < column:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _boxes(axes: Axes, pairs: Sequence[Interval], row: int, label: str | None, **look: Any) -> None:
    """Draw intervals as boxes in a row, all as one path."""
    low, high = row - _BAR / 2, row + _BAR / 2
    corners = [corner for start, end in pairs for corner in ((start, low), (start, high), (end, high), (end, low))]
    vertices = [corner for nth in range(0, len(corners), 4) for corner in (*corners[nth : nth + 4], corners[nth])]
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(pairs)
    path = Path(vertices, codes) if pairs else Path([(0.0, row)])  # an empty path draws nothing, but has its legend
    axes.add_artist(PathPatch(path, label=label, snap=False, **look))  # add_patch would look at every corner


def _odd(span: Span) -> bool:
    return span.layer is not None and span.layer % 2 == 1


def _tone(lane: Lane, odd: bool, carries: Carried | None) -> str:
    return lighter(_LOOKS[lane][0] if carries is None else _CARRIES[carries][0], 0.45 if odd else 0.0)


def _name(axes: Axes, span: Span, row: int, limits: Interval, inches: float) -> None:
    """Write the layer's number into its bar, or "other", where that fits."""
    start, stop = max(span.start_ms, limits[0]), min(span.end_ms, limits[1])
    room = (stop - start) / (limits[1] - limits[0]) * inches
    names = ("other",) if span.layer is None else (f"layer {span.layer}", f"{span.layer}")
    if text := next((name for name in names if 0.075 * len(name) + 0.05 < room), ""):
        ink = "white" if sum(to_rgb(_tone(span.lane, _odd(span), span.carries))) < 1.5 else INK
        axes.text((start + stop) / 2, row, text, ha="center", va="center", size=8, color=ink)


def _join(whole: Axes, part: Axes, stretch: Interval) -> None:
    """Mark in `whole` the stretch that `part` shows."""
    whole.axvspan(*stretch, facecolor="none", edgecolor=GREY, linewidth=1, zorder=4)
    for x, corner in zip(stretch, (0, 1), strict=True):
        patch = ConnectionPatch(
            (x, 0), (corner, 1), whole.get_xaxis_transform(), part.transAxes, color=GREY, linewidth=0.7
        )
        whole.figure.add_artist(patch)
