"""Comparison of two sets of records, point by point, with noise.

Each side's mean is known to within the half-width of its own 95% confidence interval; a difference of two means is
known to within the two half-widths in quadrature. A change inside that is noise, whatever its sign. One repeat has no
spread: its noise is unknown, which is not the same as small, and no such change is called better or worse::

    for change in compare(read(a).points, read(b).points).changes:
        print(change.label, change.relative, change.verdict)
"""

from collections.abc import Callable, Iterable, Sequence
from math import hypot
from typing import Any, Literal, NamedTuple, get_args

from zinfer.analysis.group import order, samples
from zinfer.core.case import Case
from zinfer.core.errors import ZinferError
from zinfer.core.units import figures
from zinfer.core.value import Frozen
from zinfer.record.measurement import Measurement, Status, latest
from zinfer.record.stats import Spread, ci95_half_width

Metric = Literal["output_tok_s", "prefill_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms", "gpu_peak_bytes"]
HIGHER_IS_BETTER: dict[Metric, bool] = {metric: metric.endswith("tok_s") for metric in get_args(Metric)}

# same: equal to the last digit; noise: a change within the noise; unknown: a change whose noise is not known; untimed:
# a side ran and has no value; broken: failed after only; fixed: failed before only; failed: on both sides
Verdict = Literal["better", "worse", "same", "noise", "unknown", "untimed", "broken", "fixed", "failed"]


class CompareError(ZinferError):
    """Records that cannot be compared; the message says why."""


class Change(Frozen):
    """Case before and after; two cases if compared across an axis. A value that is not known is None."""

    before_case: Case
    after_case: Case
    before_status: Status
    after_status: Status
    before: Spread | None
    after: Spread | None
    higher_is_better: bool

    @property
    def label(self) -> str:
        """Engine, offload and options; of both sides if they differ."""
        before, after = self.before_case.label(), self.after_case.label()
        return before if before == after else f"{before} → {after}"

    @property
    def delta(self) -> float | None:
        """Difference after - before, in the metric's unit."""
        return self.after.mean - self.before.mean if self.before and self.after else None

    @property
    def relative(self) -> float | None:
        """Difference as a share of the value before."""
        return None if self.ratio is None else self.ratio - 1

    @property
    def noise(self) -> float | None:
        """Noise of `delta` in the metric's unit: both half-widths in quadrature."""
        widths = [side.half_width for side in (self.before, self.after) if side and side.half_width is not None]
        return hypot(*widths) if len(widths) == 2 else None

    @property
    def ratio(self) -> float | None:
        """Ratio after / before; None where unknown."""
        return self.after.mean / self.before.mean if self.after and self.before and self.before.mean else None

    @property
    def times(self) -> str:
        """Text of `ratio` and its noise: ``1.13x ± 0.04``; empty where unknown."""
        if self.ratio is None:
            return ""
        if self.verdict == "unknown":
            return f"{self.ratio:.2f}x, single run"
        if self.verdict in ("noise", "same"):
            return "within the noise"
        shares = [side.half_width / side.mean for side in (self.before, self.after) if side and side.half_width]
        return f"{self.ratio:.2f}x ± {figures(self.ratio * hypot(*shares), 2)}"

    @property
    def loss(self) -> float:
        """Share by which after is worse than before, or 0."""
        return max(0.0, (self.relative or 0.0) * (-1 if self.higher_is_better else 1))

    @property
    def verdict(self) -> Verdict:
        if "ok" not in (self.before_status, self.after_status):
            return "failed"
        if self.before_status != self.after_status:
            return "broken" if self.before_status == "ok" else "fixed"
        if self.delta is None:
            return "untimed"
        if self.delta == 0:
            return "same"
        if self.noise is None:
            return "unknown"
        if abs(self.delta) <= self.noise:
            return "noise"
        return "worse" if self.loss else "better"

    def cells(self, text: Callable[[float], str]) -> tuple[str, ...]:
        """Return both values (by `text`) or statuses, the change, and its noise."""
        sides = (self.before_status, self.before), (self.after_status, self.after)
        noise = self.noise / self.before.mean if self.noise is not None and self.before else None
        return (
            *(status if status != "ok" else text(value.mean) if value else "" for status, value in sides),
            "" if self.relative is None else f"{self.relative:+.1%}",
            "" if noise is None else f"± {noise:.1%}",
        )

    def regressed(self, share: float) -> bool:
        """Tell whether the case broke, or lost over `share` beyond its noise."""
        return self.verdict == "broken" or (self.verdict in ("worse", "unknown") and self.loss > share)


class Comparison(NamedTuple):
    """Changes of common cases, and points of one side alone."""

    changes: tuple[Change, ...]
    only_before: tuple[Measurement, ...] = ()
    only_after: tuple[Measurement, ...] = ()
    differences: tuple[tuple[str, str, str], ...] = ()  # name, before, after; "" is not recorded


def compare(
    before: Iterable[Measurement],
    after: Iterable[Measurement],
    metric: Metric = "output_tok_s",
    across: Sequence[str] = (),
) -> Comparison:
    """Match cases by all fields but `across`; compare the last points. Raises CompareError."""
    first, second = _by_key(before, across), _by_key(after, across)
    common = [(first[key], second[key]) for key in first.keys() & second.keys()]
    return Comparison(
        changes=tuple(
            change(ours, theirs, metric) for ours, theirs in sorted(common, key=lambda pair: _order(pair[0]))
        ),
        only_before=tuple(sorted((first[key] for key in first.keys() - second.keys()), key=_order)),
        only_after=tuple(sorted((second[key] for key in second.keys() - first.keys()), key=_order)),
        differences=_differences(tuple(first.values()), tuple(second.values())),
    )


def value(point: Measurement, metric: Metric) -> Spread | None:
    """Return a point's metric, in its own unit, and its noise; None where unknown."""
    if metric == "gpu_peak_bytes":
        return Spread(point.gpu_peak_bytes) if point.usable and point.gpu_peak_bytes is not None else None
    repeats = samples(point, metric)
    # rates count all repeats together, as everywhere; a mean of rates would weigh the slow repeats less
    mean: float = getattr(point, "mean_ttft_ms" if metric == "ttft_ms" else metric)
    return Spread(mean, ci95_half_width(repeats)) if repeats else None


def change(before: Measurement, after: Measurement, metric: Metric = "output_tok_s") -> Change:
    """Compare two points by one metric, whatever their cases."""
    return Change(
        before_case=before.case,
        after_case=after.case,
        before_status=before.status,
        after_status=after.status,
        before=value(before, metric),
        after=value(after, metric),
        higher_is_better=HIGHER_IS_BETTER[metric],
    )


def _by_key(points: Iterable[Measurement], across: Sequence[str]) -> dict[tuple[Any, ...], Measurement]:
    points = latest(points)
    machines = sorted({point.machine for point in points})
    if len(machines) > 1:
        raise CompareError(f"holds points of {' and '.join(machines)}: compare files of one machine each")
    fields = [field for field in Case.model_fields if field not in across]
    points_by_key: dict[tuple[Any, ...], Measurement] = {}
    for point in points:
        if point.status == "cancelled":
            continue
        key = tuple(getattr(point.case, field) for field in fields)
        if key in points_by_key:
            same = f"{points_by_key[key].case.label()} and {point.case.label()}"
            raise CompareError(f"holds {same}, which are one case without {', '.join(across)}: compare across fewer")
        points_by_key[key] = point
    return points_by_key


def _order(point: Measurement) -> tuple[str | int, ...]:
    return *order(point.case), point.case.gpu_weights or "", point.case.weights, point.case.workload.batch_size


def _differences(before: Sequence[Measurement], after: Sequence[Measurement]) -> tuple[tuple[str, str, str], ...]:
    first, second = _properties(before), _properties(after)
    names = [*dict.fromkeys(["machine", "model revision", *sorted(first.keys() | second.keys())])]
    return tuple(
        (name, first.get(name, ""), second.get(name, "")) for name in names if first.get(name) != second.get(name)
    )


def _properties(points: Sequence[Measurement]) -> dict[str, str]:
    properties: dict[str, set[str]] = {}
    for point in points:
        named = {"machine": point.machine, "model revision": point.model_revision} | point.versions
        for name, text in named.items():
            if text:
                properties.setdefault(name, set()).add(text)
    return {name: " and ".join(sorted(texts)) for name, texts in properties.items()}
