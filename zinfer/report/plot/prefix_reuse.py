"""The figure of what a kept conversation is worth: the time to the first token over the context, and the break-even."""

from math import isfinite
from statistics import median

from matplotlib.figure import Figure

from zinfer.record.prefix_reuse import SOURCES, Run, break_even, verdict
from zinfer.report.plot.style import PALETTE, Sheet, batch_axis, log_axis, looks

_LOOKS = {"recompute": (PALETTE[1], "s"), "memory": (PALETTE[0], "o"), "disk": (PALETTE[2], "^")}


def reuse(run: Run, machine: str) -> Figure | None:
    """Medians of the time to the first token over the context, a line a way, with their ranges; None where nothing was
    measured."""
    points = run.measured
    if not points:
        return None
    contexts = [point.context for point in points]
    words = [f"{told}." for source in SOURCES if (told := verdict(points, source)) is not None]
    notes = (" ".join(word[0].upper() + word[1:] for word in words), f"{machine} · {run.conditions}")
    with looks():
        sheet = Sheet(run, "when does a reload pay?", notes)
        axes = sheet.panels[0]
        held: list[float] = []
        for way, (colour, marker) in _LOOKS.items():
            own = [(p.context, p.recompute_ms if way == "recompute" else getattr(p, f"{way}_ms")) for p in points]
            known = [(context, [ms / 1e3 for ms in samples]) for context, samples in own if samples]
            if not known:
                continue
            middle = [median(samples) for _, samples in known]
            label = "computed again" if way == "recompute" else f"reloaded from {way}"
            axes.plot([context for context, _ in known], middle, marker=marker, color=colour, label=label, zorder=3)
            low = [value - min(samples) for value, (_, samples) in zip(middle, known, strict=True)]
            high = [max(samples) - value for value, (_, samples) in zip(middle, known, strict=True)]
            axes.errorbar(
                [context for context, _ in known], middle, yerr=(low, high), fmt="none", ecolor=colour, capsize=3
            )
            held += [value for _, samples in known for value in samples]
        for source in SOURCES:
            even = break_even(points, source)
            if even is not None and even > 0 and isfinite(even):
                label = f"break-even from {source}: {round(even):,} tokens"
                axes.axvline(even, linestyle=":", color=_LOOKS[source][0], linewidth=1.3, label=label)
        log_axis(axes, held)
        batch_axis(axes, contexts)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("seconds to the first token")
        return sheet.finish()
