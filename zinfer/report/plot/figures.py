"""Figures of records, one function a figure. `FIGURES` are those of the points of one group.

Measured values are solid with markers, limits are dashed, a batch that ran out of memory is a ×, and unknown values are
not drawn. In a timeline the lanes of a decode step stand below each other, those of several GPUs on one clock; hatched
parts of the link's lane are time that the step takes beyond its bytes.
"""

from collections.abc import Callable, Collection, Sequence
from math import isfinite
from statistics import median
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter

from zinfer.analysis import study
from zinfer.analysis import timeline as step
from zinfer.analysis.group import Group, Metric, Points, by_load, samples
from zinfer.analysis.rates import best_by_load, rate_text, tied, winner
from zinfer.analysis.rates import edges as find_edges
from zinfer.analysis.timeline import Interval, Spans
from zinfer.core.units import figures, gb
from zinfer.core.value import group_by
from zinfer.record.measurement import Carried, Lane, Measurement
from zinfer.record.stats import Spread, spread
from zinfer.record.study import Study
from zinfer.report.plot import style
from zinfer.report.plot.style import DRAWN, GREY, INK, PALETTE, Sheet, batch_axis, lighter, log_axis, looks, series

_SAME_LIMIT = 1.1  # limits closer than this are drawn as one
_WAYS = {"recompute": (PALETTE[1], "s"), "memory": (PALETTE[0], "o")}
_TIMELINES = 3  # configurations in one figure, the fastest
_ORANGE, _SKY, _BLACK = PALETTE[5:8]  # colours that no engine has
_VERMILION = PALETTE[1]
_LANES: dict[Lane, tuple[str, str, str]] = {  # colour, name at the axis, meaning
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


def draw(group: Group, points: Points, names: Collection[str] | None = None) -> dict[str, Figure]:
    """Return the figures of a group by name, without empty ones."""
    with looks():
        drawn = {name: figure(group, points) for name, figure in FIGURES.items() if names is None or name in names}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def throughput(group: Group, points: Points) -> Figure | None:
    """Draw output tokens a second over batch size, and failures."""
    top = winner(points)
    if top is None or top.output_tok_s is None:
        return None
    others = tied(points, top)
    points = _shown(points)
    alone = ", one repeat" * (len(top.ttft_ms) == 1) + ", a lossy setting" * top.case.lossy
    answer = f"Ringed, the fastest: {top.case.label()}, batch {_batch(top)}, {rate_text(top)} tok/s{alone}."
    answer += f" {others}" * bool(others)
    notes = (answer, f"{group.conditions}{_bars(points)}")
    sheet = Sheet(group.title, "which engine, at which batch?", notes)
    axes = sheet.panels[0]
    values = _lines(axes, points, lambda point: spread(samples(point, "output_tok_s")))
    values += _link_limits(axes, points)
    axes.plot([_batch(top)], [top.output_tok_s], "o", markersize=15, color="none", markeredgecolor=GREY, zorder=1)
    log_axis(axes, values)
    _failed(axes, points)
    axes.set_ylabel("output tokens a second")
    batch_axis(axes, map(_batch, points))
    return sheet.finish()


def latency(group: Group, points: Points) -> Figure | None:
    """Draw TTFT and TPOT over output tokens a second, by configuration."""
    usable = [point for point in points if point.usable and point.output_tok_s]
    if not usable:
        return None
    notes = (f"{group.conditions}{_bars(points)}", "Numbers are batch sizes; lower and further right is better.")
    panels = 2 if any(point.tpot_ms for point in usable) else 1
    sheet = Sheet(group.title, "how long does a user wait?", notes, panels=panels)
    titles = "to the first token (TTFT)", "for each token after it (TPOT)"
    metrics: tuple[Metric, ...] = ("ttft_ms", "tpot_ms")
    for axes, title, metric in zip(sheet.panels, titles, metrics, strict=False):
        axes.set_title(title, loc="left", size=10)
        log_axis(axes, _tradeoff(axes, usable, metric))
        rates = [point.output_tok_s or 0.0 for point in usable]
        log_axis(axes, rates, "x")
        axes.set_xlabel("output tokens a second")
    sheet.panels[0].set_ylabel("seconds")
    return sheet.finish()


def budget(group: Group, points: Points) -> Figure | None:
    """Draw output tokens a second over weights on the GPU; None below three budgets.

    At one batch size: the largest of those at which most budgets were measured.
    """
    usable = [point for point in points if point.usable and point.output_tok_s and point.effective]
    lines = group_by(usable, lambda point: (_batch(point), point.case.load.model_copy(update={"gpu_weights": None})))
    batch, most = max(((key[0], len(line)) for key, line in lines.items()), key=lambda pair: pair[::-1], default=(0, 0))
    if most < 3:
        return None
    shown = {case: line for (size, case), line in lines.items() if size == batch}
    notes = (f"Batch {batch}; each point is a budget, by the weights that were counted on the GPU.", group.conditions)
    sheet = Sheet(group.title, "what does GPU memory buy?", notes)
    axes = sheet.panels[0]
    for case, look in series(shown).items():
        line = ((point.effective, point.output_tok_s or 0.0) for point in shown[case])
        held = sorted((effective.gpu_weight_bytes, rate) for effective, rate in line if effective)
        axes.plot([size / 1e9 for size, _ in held], [rate for _, rate in held], **look, zorder=3)
    log_axis(axes, [point.output_tok_s or 0.0 for line in shown.values() for point in line])
    axes.set_xlim(left=0)
    axes.set_xlabel("weights on the GPU, GB")
    axes.set_ylabel("output tokens a second")
    return sheet.finish()


def _tradeoff(axes: Axes, points: Points, metric: Metric) -> list[float]:
    held: list[float] = []
    loads = by_load(points)
    for load, look in series(loads).items():
        timed = [(point, wait) for point in loads[load] if (wait := spread(samples(point, metric)))]
        rates, waits = [point.output_tok_s or 0.0 for point, _ in timed], [wait.mean / 1e3 for _, wait in timed]
        axes.plot(rates, waits, **look, zorder=3)
        for nth in sorted({0, len(timed) - 1}) if timed else ():
            axes.annotate(
                str(_batch(timed[nth][0])), (rates[nth], waits[nth]), xytext=(0, 7), textcoords="offset points",
                ha="center", size=8, color=look["color"],
            )  # fmt: skip
        held += waits
    return held


def reuse(run: Study) -> Figure | None:
    """Draw TTFT over the context, computed again and reloaded; None if empty."""
    points = study.measured(run)
    if not points:
        return None
    contexts = [point.context for point in points]
    words = study.verdict(points) or ""
    notes = (f"{words[:1].upper()}{words[1:]}." * bool(words), f"{run.machine} · {study.conditions(run)}")
    with looks():
        sheet = Sheet(study.show(run).title, "when does a reload pay?", notes)
        axes = sheet.panels[0]
        held: list[float] = []
        for way, (colour, marker) in _WAYS.items():
            timed = {p.context: [ms / 1e3 for ms in getattr(p, f"{way}_ms")] for p in points if getattr(p, f"{way}_ms")}
            middle = [median(seconds) for seconds in timed.values()]
            spans = [(median(each) - min(each), max(each) - median(each)) for each in timed.values()]
            label = "computed again" if way == "recompute" else f"reloaded from {way}"
            if timed:
                bars = [*zip(*spans, strict=True)]
                axes.errorbar(
                    [*timed], middle, yerr=bars, marker=marker, color=colour, capsize=3, label=label, zorder=3
                )
            held += [value for seconds in timed.values() for value in seconds]
        even = study.break_even(points)
        if even is not None and even > 0 and isfinite(even):
            label = f"break-even: {round(even):,} tokens"
            axes.axvline(even, linestyle=":", color=_WAYS["memory"][0], linewidth=1.3, label=label)
        log_axis(axes, held)
        batch_axis(axes, contexts)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("seconds to the first token")
        return sheet.finish()


def _batch(point: Measurement) -> int:
    return point.case.workload.batch_size


def _bars(points: Points) -> str:
    repeated = any(point.usable and len(point.ttft_ms) > 1 for point in points)
    return " · means of the repeats, bars their 95% confidence" if repeated else ""


def _lines(axes: Axes, points: Points, value: Callable[[Measurement], Spread | None]) -> list[float]:
    """Draw a line for each load; return the values that the y axis has to hold."""
    held: list[float] = []
    loads = by_load(points)
    for load, look in series(loads).items():
        timed = [(_batch(point), rate) for point in loads[load] if point.usable and (rate := value(point))]
        if not timed:
            continue
        sizes, means = [size for size, _ in timed], [rate.mean for _, rate in timed]
        # a bar never reaches zero, which a log axis does not have
        below = [min(rate.half_width or 0, 0.5 * rate.mean) for _, rate in timed]
        above = [rate.half_width or 0 for _, rate in timed]
        axes.plot(sizes, means, **look, zorder=3)
        if any(above):
            axes.errorbar(sizes, means, yerr=(below, above), fmt="none", ecolor=look["color"], capsize=3, zorder=2)
        held += means + [a - b for a, b in zip(means, below, strict=True)]
        held += [a + b for a, b in zip(means, above, strict=True)]
    return held


def _link_limits(axes: Axes, points: Points) -> list[float]:
    """Draw the link's limits for the fewest and the most bytes.

    Returns the values that the y axis has to hold.
    """
    limits = sorted(
        (bandwidth / wire, wire, bandwidth, wire < effective.streamed_bytes_per_step)
        for point in points
        if point.usable and (effective := point.effective) and (wire := effective.wire_bytes)
        if (bandwidth := point.links_bandwidth)
    )
    if limits and limits[-1][0] < _SAME_LIMIT * limits[0][0]:
        del limits[:-1]
    sizes = [_batch(point) for point in points if point.usable]
    extremes = dict.fromkeys(limits[-1:] + limits[:1])
    held = []
    for line, (rate, wire, bandwidth, coded) in zip(("--", ":"), extremes, strict=False):
        ends = [min(sizes) / 2**0.25, max(sizes) * 2**0.25]
        text = f"link limit: {gb(wire)} a step{', coded' * coded}, {gb(bandwidth)}/s"
        axes.plot(ends, [size * rate for size in ends], line, color=GREY, linewidth=1.3, label=text, zorder=2)
        held += [size * rate for size in ends]
    return held


def _shown(points: Points) -> Points:
    edges = {edge.load: edge.smallest_oom for edge in find_edges(points)}
    return tuple(
        point
        for point in points
        if point.usable
        or (_batch(point) == edges[point.case.load] if point.status.startswith("oom") else point.status != "ok")
    )


def _failed(axes: Axes, points: Points) -> None:
    """Draw failed batches above the x axis, a row for each load: × for want of memory, + for other reasons."""
    look = series(by_load(points))
    failed = by_load([point for point in points if point.status != "ok"])
    for row, (load, load_points) in enumerate(failed.items()):
        for mark, oom, words in (("x", True, "out of memory"), ("+", False, "failed")):
            sizes = [_batch(point) for point in load_points if point.status.startswith("oom") is oom]
            axes.plot(
                sizes, [0.03 + 0.035 * row] * len(sizes), mark, transform=axes.get_xaxis_transform(), markersize=7,
                markeredgewidth=2, color=look[load]["color"],
                label=f"{words}: {style.shortened(load.label(), 70)}" if sizes else None,
            )  # fmt: skip


def timeline(group: Group, points: Points) -> Figure | None:
    """Draw a traced step of each configuration's fastest batch; None without one."""
    tops = best_by_load([point for point in points if step.busy(point.timeline, "copy")])
    if not tops:
        return None
    shown, of = tops[:_TIMELINES], f"the fastest {_TIMELINES} of {len(tops)} configurations"
    which = "every configuration" if len(tops) == len(shown) else of
    what = f"A decode step of {which}, each at its own best batch, traced after the timed ones."
    stack: list[tuple[float, float]] = []
    for point in shown:
        words = _LINE / 72 * (len(_words(point)) - 3)
        stack.append((words + (_FURTHER if stack else _FIRST), _LANE * len(_lanes(point.timeline))))
    sheet = Sheet(group.title, "when does the link wait?", (what, group.conditions), stack=stack)
    longest = max(step.length_ms(point.timeline) for point in shown)
    for axes, point in zip(sheet.panels, shown, strict=True):
        _draw_lanes(axes, point.timeline, (-0.005 * longest, 1.005 * longest))
        lines = _words(point)
        for row, words_above in enumerate(lines):
            axes.annotate(
                words_above, (0, 1), xycoords="axes fraction", textcoords="offset points", size=9 if row else 10.5,
                xytext=(_INDENT, 8 + _LINE * (len(lines) - 1 - row) + 2 * (not row)), color=GREY if row else INK,
            )  # fmt: skip
    sheet.panels[-1].set_xlabel("ms from the beginning of the step")
    return sheet.finish()


def _lanes(spans: Spans) -> list[tuple[Lane, Spans, str]]:
    """Return the lanes that work, with their spans and names."""
    ranks = step.by_rank(spans)
    return [
        (lane, rank_spans, _LANES[lane][1] + (f" {rank_spans[0].rank}" if len(ranks) > 1 else ""))
        for rank_spans in ranks
        for lane in get_args(Lane)
        if any(span.lane == lane for span in rank_spans)
    ]


def _words(point: Measurement) -> list[str]:
    label = f"{style.shortened(point.case.label(), 56)}, batch {point.case.workload.batch_size}"
    timed = f" (timed: {point.step_median_ms:,.1f} ms)" if point.step_median_ms else ""
    lines, ranks = [f"{label}: {step.length_ms(point.timeline):,.1f} ms{timed}"], step.by_rank(point.timeline)
    for spans in ranks:
        shares = ", ".join(f"{_LANES[lane][1]} {step.share(spans, lane):.1%}" for lane, *_ in _lanes(spans))
        which = f"GPU {spans[0].rank} busy" if len(ranks) > 1 else "Busy"
        lines.append(f"{which}: {shares}{_rate(point, spans)}.")
        waits = step.total_ms(step.idle(spans))
        lines.append(f"The link waits {_ms(waits)} ms ({waits / step.length_ms(spans):.1%}), where it is hatched.")
    return lines


def _rate(point: Measurement, spans: Spans) -> str:
    rate, measured = step.busy_bandwidth(point, spans), point.link_bandwidth
    if not rate:
        return ""
    share = f", {rate / measured:.1%} of what it was measured at" if measured else ""
    return f"; the busy link carries {gb(rate)}/s{share}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else figures(value, 2)


def _draw_lanes(axes: Axes, spans: Spans, limits: Interval) -> None:
    lanes = _lanes(spans)
    axes.set_xlim(*limits)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [name for *_, name in lanes], size=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="y", visible=False)
    for row, (lane, spans_of, _) in enumerate(lanes):
        lane_spans = [span for span in spans_of if span.lane == lane and span.end_ms > 0]
        for carries in (None, *(kind for kind in _CARRIES if any(span.carries == kind for span in lane_spans))):
            colour, meaning = (_LANES[lane][0], _LANES[lane][2]) if carries is None else _CARRIES[carries]
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


FIGURES: dict[str, Callable[[Group, Points], Figure | None]] = {
    figure.__name__: figure for figure in (throughput, latency, budget, timeline)
}
