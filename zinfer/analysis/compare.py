"""Comparison of two sets of records, point by point, with noise.

Each side's mean is known to within the half-width of its own 95% confidence interval; a difference of two means is
known to within the two half-widths in quadrature. A change inside that is noise, whatever its sign. One repeat has no
spread: its noise is unknown, which is not the same as small, and no such change is called better or worse.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot
from typing import Any, Literal, NamedTuple, get_args

from zinfer.analysis.group import order, samples
from zinfer.core.case import Case
from zinfer.core.errors import ZinferError
from zinfer.core.units import figures
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement, latest
from zinfer.record.stats import Spread, ci95_half_width

Metric = Literal["output_tok_s", "prefill_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms", "gpu_peak_bytes"]
HIGHER_IS_BETTER: dict[Metric, bool] = {metric: metric.endswith("tok_s") for metric in get_args(Metric)}

# same: equal to the last digit; noise: a change within the noise; unknown: a change whose noise is not known; untimed:
# a side ran and has no value; broken: failed after only; fixed: failed before only; failed: on both sides
Verdict = Literal["better", "worse", "same", "noise", "unknown", "untimed", "broken", "fixed", "failed"]


class CompareError(ZinferError):
    """Records that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Change:
    """Two points by one metric, whatever their cases. A value that is not known is None."""

    first: Measurement
    second: Measurement
    metric: Metric = "output_tok_s"

    @cached_property
    def before(self) -> Spread | None:
        return value(self.first, self.metric)

    @cached_property
    def after(self) -> Spread | None:
        return value(self.second, self.metric)

    @property
    def batch_size(self) -> int:
        return self.second.case.workload.batch_size

    @property
    def label(self) -> str:
        """Engine, offload and options; of both sides if they differ."""
        return " → ".join(dict.fromkeys((self.first.case.label(), self.second.case.label())))

    @property
    def relative(self) -> float | None:
        """Difference as a share of the value before."""
        return None if self.ratio is None else self.ratio - 1

    @property
    def noise(self) -> float | None:
        """Noise of the difference in the metric's unit: both half-widths in quadrature."""
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
        if not self.clear:
            return "within the noise"
        shares = [side.half_width / side.mean for side in (self.before, self.after) if side and side.half_width]
        return f"{self.ratio:.2f}x ± {figures(self.ratio * hypot(*shares), 2)}"

    @property
    def loss(self) -> float:
        """Share by which after is worse than before, or 0."""
        return max(0.0, (self.relative or 0.0) * (-1 if HIGHER_IS_BETTER[self.metric] else 1))

    @property
    def verdict(self) -> Verdict:
        statuses = self.first.status, self.second.status
        if "ok" not in statuses:
            return "failed"
        if statuses[0] != statuses[1]:
            return "broken" if statuses[0] == "ok" else "fixed"
        if self.before is None or self.after is None:
            return "untimed"
        delta = self.after.mean - self.before.mean
        if delta == 0 or self.noise is None:
            return "same" if delta == 0 else "unknown"
        return "noise" if abs(delta) <= self.noise else "worse" if self.loss else "better"

    @property
    def clear(self) -> bool:
        """True if it is beyond the noise, or of unknown noise."""
        return self.verdict not in ("noise", "same")

    def cells(self, text: Callable[[float], str]) -> tuple[str, ...]:
        """Return both values (by `text`) or statuses, the change, and its noise."""
        sides = (self.first.status, self.before), (self.second.status, self.after)
        values = (status if status != "ok" else text(value.mean) if value else "" for status, value in sides)
        noise = f"± {self.noise / self.before.mean:.1%}" if self.noise is not None and self.before else ""
        return *values, "" if self.relative is None else f"{self.relative:+.1%}", noise

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

    def rank(item: tuple[object, Measurement]) -> tuple[str | int, ...]:
        case = item[1].case
        *load, batch_size = order(case)
        return *load, case.gpu_weights or "", case.weights, batch_size

    first, second = (dict(sorted(_by_key(points, across).items(), key=rank)) for points in (before, after))
    properties = [_properties(points.values()) for points in (first, second)]
    names = dict.fromkeys(["machine", "model revision", *sorted({name for named in properties for name in named})])
    rows = ((name, *(named.get(name, "") for named in properties)) for name in names)
    return Comparison(
        changes=tuple(Change(point, second[key], metric) for key, point in first.items() if key in second),
        only_before=tuple(point for key, point in first.items() if key not in second),
        only_after=tuple(point for key, point in second.items() if key not in first),
        differences=tuple((name, ours, theirs) for name, ours, theirs in rows if ours != theirs),
    )


def value(point: Measurement, metric: Metric) -> Spread | None:
    """Return a point's metric, in its own unit, and its noise; None where unknown."""
    if metric == "gpu_peak_bytes":
        return Spread(point.gpu_peak_bytes) if point.usable and point.gpu_peak_bytes is not None else None
    repeats = samples(point, metric)
    # rates count all repeats together, as everywhere; a mean of rates would weigh the slow repeats less
    mean: float = getattr(point, "mean_ttft_ms" if metric == "ttft_ms" else metric)
    return Spread(mean, ci95_half_width(repeats)) if repeats else None


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


def _properties(points: Iterable[Measurement]) -> dict[str, str]:
    named = ({"machine": point.machine, "model revision": point.model_revision} | point.versions for point in points)
    by_name = group_by({pair for names in named for pair in names.items() if pair[1]}, lambda pair: pair[0])
    return {name: " and ".join(sorted(text for _, text in pairs)) for name, pairs in by_name.items()}
