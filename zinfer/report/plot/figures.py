"""Figures of records, one function a figure. `FIGURES` are those of the points of one group.

Measured values are solid with markers, limits are dashed, a batch that ran out of memory is a ×, and unknown values are
not drawn.
"""

from collections.abc import Callable, Collection
from math import isfinite
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zinfer.analysis import study
from zinfer.analysis.group import Group, Metric, Points, by_load, samples
from zinfer.analysis.rates import edges as find_edges
from zinfer.analysis.rates import rate_text, tied, winner
from zinfer.core.case import Case
from zinfer.core.units import gb
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement
from zinfer.record.stats import Spread, spread
from zinfer.record.study import Study
from zinfer.report.plot.style import GREY, PALETTE, Sheet, batch_axis, log_axis, looks, series, shortened
from zinfer.report.plot.timeline import timeline

_SAME_LIMIT = 1.1  # limits closer than this are drawn as one
_WAYS = {"recompute": (PALETTE[1], "s"), "memory": (PALETTE[0], "o")}


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
    lines = group_by(usable, lambda point: (_batch(point), _without_budget(point)))
    batch, most = max(((key[0], len(line)) for key, line in lines.items()), key=lambda pair: pair[::-1], default=(0, 0))
    if most < 3:
        return None
    shown = {case: line for (size, case), line in lines.items() if size == batch}
    notes = (f"Batch {batch}; each point is a budget, by the weights that were counted on the GPU.", group.conditions)
    sheet = Sheet(group.title, "what does GPU memory buy?", notes)
    axes = sheet.panels[0]
    for case, look in series(shown).items():
        held = sorted((_on_gpu(point), point.output_tok_s or 0.0) for point in shown[case])
        axes.plot([size / 1e9 for size, _ in held], [rate for _, rate in held], **look, zorder=3)
    log_axis(axes, [point.output_tok_s or 0.0 for line in shown.values() for point in line])
    axes.set_xlim(left=0)
    axes.set_xlabel("weights on the GPU, GB")
    axes.set_ylabel("output tokens a second")
    return sheet.finish()


def _without_budget(point: Measurement) -> Case:
    return point.case.load.model_copy(update={"gpu_weights": None})


def _on_gpu(point: Measurement) -> int:
    return point.effective.gpu_weight_bytes if point.effective else 0


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
            bars = [
                [value - min(seconds) for value, seconds in zip(middle, timed.values(), strict=True)],
                [max(seconds) - value for value, seconds in zip(middle, timed.values(), strict=True)],
            ]
            label = "computed again" if way == "recompute" else f"reloaded from {way}"
            if timed:
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
        (bandwidth / wire, wire, bandwidth, wire < _streamed(point))
        for point in points
        if point.usable and (wire := _wire(point)) and (bandwidth := point.links_bandwidth)
    )
    if limits and limits[-1][0] < _SAME_LIMIT * limits[0][0]:
        del limits[:-1]
    sizes = [_batch(point) for point in points if point.usable]
    extremes = dict.fromkeys(limits[-1:] + limits[:1])
    held = []
    for style, (rate, wire, bandwidth, coded) in zip(("--", ":"), extremes, strict=False):
        ends = [min(sizes) / 2**0.25, max(sizes) * 2**0.25]
        text = f"link limit: {gb(wire)} a step{', coded' * coded}, {gb(bandwidth)}/s"
        axes.plot(ends, [size * rate for size in ends], style, color=GREY, linewidth=1.3, label=text, zorder=2)
        held += [size * rate for size in ends]
    return held


def _wire(point: Measurement) -> int:
    return point.effective.wire_bytes if point.effective else 0


def _streamed(point: Measurement) -> int:
    return point.effective.streamed_bytes_per_step if point.effective else 0


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
                label=f"{words}: {shortened(load.label(), 70)}" if sizes else None,
            )  # fmt: skip


FIGURES: dict[str, Callable[[Group, Points], Figure | None]] = {
    figure.__name__: figure for figure in (throughput, latency, budget, timeline)
}
