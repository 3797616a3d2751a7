"""Timeline of a decode step: lanes over time, and the link's waits.

Hatched parts of the link's lane are time that the step takes beyond its bytes. The lanes of several GPUs stand below
each other, on one clock.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter

from zinfer.analysis import timeline as step
from zinfer.analysis.group import Group, Points
from zinfer.analysis.rates import best_by_load
from zinfer.analysis.timeline import Interval, Spans, Waits
from zinfer.core.units import figures, gb
from zinfer.record.measurement import Carried, Lane, Measurement
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
_LANE, _FIRST, _FURTHER = 0.25, 0.75, 1.2  # inches: a lane, the room above the first step, and above a further one
_LINE = 15  # points, a line of words above a block
_INDENT = -48  # points from the axes to the figure's notes
_COLUMNS = 300  # things next to each other that can be told apart in an inch
_BAR = 0.74  # height of a bar, as a share of its lane


def timeline(group: Group, points: Points) -> Figure | None:
    """Draw a traced step of each configuration's fastest batch; None without one."""
    tops = best_by_load([point for point in points if step.busy(point.timeline, "copy")])
    if not tops:
        return None
    shown = tops[:_SHOWN]
    which = "every configuration" if len(tops) == len(shown) else f"the fastest {_SHOWN} of {len(tops)} configurations"
    what = f"A decode step of {which}, each at its own best batch, traced after the timed ones."
    stack: list[tuple[float, float]] = []
    for point in shown:
        words = _LINE / 72 * (len(_words(point)) - 3)
        stack.append((words + (_FURTHER if stack else _FIRST), _LANE * len(_lanes(point.timeline))))
    sheet = Sheet(group.title, "when does the link wait?", (what, group.conditions), stack=stack)
    longest = max(step.length_ms(point.timeline) for point in shown)
    for axes, point in zip(sheet.panels, shown, strict=True):
        _bars(axes, point.timeline, (-0.005 * longest, 1.005 * longest))
        lines = _words(point)
        for row, words_above in enumerate(lines):
            axes.annotate(
                words_above, (0, 1), xycoords="axes fraction", textcoords="offset points", size=9 if row else 10.5,
                xytext=(_INDENT, 8 + _LINE * (len(lines) - 1 - row) + 2 * (not row)), color=GREY if row else INK,
            )  # fmt: skip
    sheet.panels[-1].set_xlabel("ms from the beginning of the step")
    return sheet.finish()


class _Lane(NamedTuple):
    lane: Lane
    spans: Spans
    name: str


def _lanes(spans: Spans) -> list[_Lane]:
    ranks = step.by_rank(spans)
    return [
        _Lane(lane, rank_spans, _LOOKS[lane][1] + (f" {rank_spans[0].rank}" if len(ranks) > 1 else ""))
        for rank_spans in ranks
        for lane in get_args(Lane)
        if any(span.lane == lane for span in rank_spans)
    ]


def _words(point: Measurement) -> list[str]:
    label = f"{shortened(point.case.label(), 56)}, batch {point.case.workload.batch_size}"
    timed = f" (timed: {point.step_median_ms:,.1f} ms)" if point.step_median_ms else ""
    lines, ranks = [f"{label}: {step.length_ms(point.timeline):,.1f} ms{timed}"], step.by_rank(point.timeline)
    for spans in ranks:
        shares = ", ".join(f"{_LOOKS[lane][1]} {step.share(spans, lane):.1%}" for lane, *_ in _lanes(spans))
        which = f"GPU {spans[0].rank} busy" if len(ranks) > 1 else "Busy"
        lines.append(f"{which}: {shares}{_rate(point, spans)}.")
        lines.append(_idleness(step.waits(spans), step.length_ms(spans)))
        if step.busy(spans, "gather"):
            lines.append(f"The link works during {step.hidden_share(spans, 'gather'):.1%} of the gathers.")
    return lines


def _rate(point: Measurement, spans: Spans) -> str:
    rate, measured = step.busy_bandwidth(point, spans), point.link_bandwidth
    if not rate:
        return ""
    share = f", {rate / measured:.1%} of what it was measured at" if measured else ""
    return f"; the busy link carries {gb(rate)}/s{share}"


def _idleness(waits: Waits, end: float) -> str:
    if waits.total_ms < 0.0005 * end:
        return f"The link hardly waits: {_ms(waits.total_ms)} ms."
    places = "before its first copy", "between", "after its last"
    parts = zip((waits.before_ms, waits.between_ms, waits.after_ms), places, strict=True)
    where = ", ".join(f"{_ms(ms)} {words}" for ms, words in parts if ms > 0.02 * waits.total_ms)
    total = f"{_ms(waits.total_ms)} ms ({waits.total_ms / end:.1%})"
    reading = f", the disk in {_ms(waits.reading_ms)}" if waits.reading_ms else ""
    return f"The link waits {total}: {where}; the GPU works in {_ms(waits.working_ms)} of them{reading}."


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else figures(value, 2)


def _bars(axes: Axes, spans: Spans, limits: Interval) -> None:
    lanes = _lanes(spans)
    axes.set_xlim(*limits)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [kind.name for kind in lanes], size=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="y", visible=False)
    for row, (lane, spans_of, _) in enumerate(lanes):
        lane_spans = [span for span in spans_of if span.lane == lane and span.end_ms > 0]
        for carries in (None, *(kind for kind in _CARRIES if any(span.carries == kind for span in lane_spans))):
            colour, meaning = (_LOOKS[lane][0], _LOOKS[lane][2]) if carries is None else _CARRIES[carries]
            for odd in (False, True):  # layers next to each other differ in tone
                alike = [span for span in lane_spans if span.carries == carries and bool((span.layer or 0) % 2) is odd]
                # gaps that cannot be seen are left out: a trace may have a million intervals
                pairs = step.joined(((span.start_ms, span.end_ms) for span in alike), gap=_column(limits))
                tone = lighter(colour, 0.45 if odd else 0.0)
                _boxes(axes, pairs, row, None if odd else meaning, color=tone, linewidth=0.3)
        if lane == "copy":
            pauses = [(start, stop) for start, stop in step.idle(spans_of) if stop - start >= _column(limits)]
            _boxes(
                axes, pauses, row, "the link waits",
                facecolor=lighter(_VERMILION, 0.8), edgecolor=_VERMILION, hatch="//////", linewidth=0,
            )  # fmt: skip


def _column(limits: Interval) -> float:
    """Return the ms of the narrowest visible thing in an axis."""
    return (limits[1] - limits[0]) / (DRAWN * _COLUMNS)


def _boxes(axes: Axes, pairs: Sequence[Interval], row: int, label: str | None, **look: Any) -> None:
    low, high = row - _BAR / 2, row + _BAR / 2
    corners = [corner for start, end in pairs for corner in ((start, low), (start, high), (end, high), (end, low))]
    vertices = [corner for nth in range(0, len(corners), 4) for corner in (*corners[nth : nth + 4], corners[nth])]
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(pairs)
    path = Path(vertices, codes) if pairs else Path([(0.0, row)])  # an empty path draws nothing, but has its legend
    axes.add_artist(PathPatch(path, label=label, snap=False, **look))  # add_patch would look at every corner
