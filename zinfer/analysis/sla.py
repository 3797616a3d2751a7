"""Service levels: bounds over every sample of a point, and the best configuration within them.

A percentile needs samples: the 99th of fewer than a hundred is their maximum, and is reported as that. TPOT has a
sample a decode step, every other metric a sample a repeat.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import fmean
from typing import Any, Literal

from zinfer.analysis import group
from zinfer.analysis.economics import Cost, EconomicsError, Fleet, Point, cost, parse_quantity, parse_seconds
from zinfer.analysis.rates import exact, lossy
from zinfer.core.errors import ZinferError
from zinfer.core.units import duration, figures
from zinfer.core.value import Frozen
from zinfer.record.requests import RequestMetric, RequestPoint, RequestSample
from zinfer.record.stats import nearest_rank

Metric = Literal["ttft", "tpot", "e2e", "output_tok_s", "decode_tok_s", "user_tok_s"]
Objective = Literal["throughput", "cost", "latency"]
TIMES: tuple[Metric, ...] = ("ttft", "tpot", "e2e")
RATES: tuple[Metric, ...] = ("output_tok_s", "decode_tok_s", "user_tok_s")
REQUEST_TIMES: dict[Metric, RequestMetric]
REQUEST_TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "user_tok_s": "tpot_ms"}
STATISTICS = ("mean", "max", "min", "p50", "p90", "p95", "p99")
_WANTED = re.compile(r"\s*(\d[\d.]*)\s*tok/s(/user)?\s*")
_FORM = re.compile(r"\s*(\w+)(?:[\s:]+(\w+))?[\s:]*(<=|>=)[\s:]*([^:]*)")


class SlaError(ZinferError):
    """Service level that cannot be parsed."""


class Sla(Frozen):
    """One condition; `bound` in seconds or tokens a second."""

    metric: Metric
    statistic: str
    at_most: bool
    bound: float

    def describe(self) -> str:
        """Return the condition as text: ``ttft p99 <= 2 s``."""
        return f"{self.metric} {self.statistic} {'<=' if self.at_most else '>='} {_amount(self.metric, self.bound)}"


class SlaCheck(Frozen):
    """Condition with a point's value; None without a sample."""

    sla: Sla
    actual: float | None
    samples: int

    @property
    def ok(self) -> bool:
        """True if the point keeps the condition; False without a sample."""
        if self.actual is None:
            return False
        return self.actual <= self.sla.bound if self.sla.at_most else self.actual >= self.sla.bound

    @property
    def miss(self) -> float:
        """Share by which the bound is missed; infinite without a sample."""
        if self.ok:
            return 0.0
        return abs(self.actual - self.sla.bound) / self.sla.bound if self.actual is not None else float("inf")

    @property
    def missed(self) -> str:
        """Text of the amount by which the bound is missed, or empty."""
        if self.ok or self.actual is None:
            return ""
        amount = _amount(self.sla.metric, abs(self.actual - self.sla.bound))
        return f", missed by {amount} ({figures(self.miss * 100, 2)}%)"

    @property
    def value(self) -> str:
        """Text of the actual value, in the metric's unit."""
        return "unknown" if self.actual is None else _amount(self.sla.metric, self.actual)

    def describe(self) -> str:
        """Describe the value measured, and how far it may be trusted."""
        if self.actual is None:
            return f"{self.sla.describe()}: not measured"
        few = self.sla.statistic.startswith("p") and self.samples < needed(self.sla.statistic)
        worst = ", the only sample" if self.samples == 1 else f", the worst of {self.samples} samples"
        return f"{self.sla.describe()}: {self.value}{worst * few}"


def parse(text: str) -> Sla:
    """Return the condition of a text. Raises SlaError.

    ``ttft:p99:<=:2s``, or ``ttft<=2s`` (p99 of a time, the mean of a rate), ``20 tok/s`` of a batch, ``5 tok/s/user``.
    """
    wanted = _WANTED.fullmatch(text)
    match = _FORM.fullmatch(f"{'user' if wanted[2] else 'output'}_tok_s>={wanted[1]}" if wanted else text)
    name, stated, sign, value = match.groups() if match is not None else ("", "", "", "")
    metric: Metric | None = next((metric for metric in TIMES + RATES if metric == name), None)
    statistic = stated or ("p99" if metric in TIMES else "mean")
    if metric is None or statistic not in STATISTICS:
        names = f"{', '.join(TIMES + RATES)} and {', '.join(STATISTICS)}"
        forms = f"ttft<=2s, '20 tok/s', '5 tok/s/user', or METRIC:STATISTIC:<= or >=:VALUE with {names}"
        raise SlaError(f"{text!r} is not a service level: write {forms}")
    if statistic == ("max" if sign == ">=" else "min"):
        worst = "min" if sign == ">=" else "max"
        raise SlaError(f"{text!r} would hold for the best sample alone: write {worst}, mean, or p50 to p99")
    try:
        rate = {"": 1.0, "tok/s": 1.0}, "a rate: write 30 or 30tok/s"
        bound = parse_seconds(value) if metric in TIMES else parse_quantity(value, *rate)
    except ValueError as error:
        raise SlaError(f"{text!r}: {error}") from None
    return Sla(metric=metric, statistic=statistic, at_most=sign == "<=", bound=bound)


def check(point: Point, slas: Iterable[Sla]) -> tuple[SlaCheck, ...]:
    """Check a point's samples against each condition; bad ones are low rates and long times."""
    pairs = ((sla, samples(point, sla.metric)) for sla in slas)
    return tuple(
        SlaCheck(
            sla=sla,
            actual=statistic(values, sla.statistic, worst_high=sla.metric in TIMES) if values else None,
            samples=len(values),
        )
        for sla, values in pairs
    )


def statistic(samples: Sequence[float], name: str, worst_high: bool = True) -> float:
    """Return a statistic of at least one sample; percentiles by nearest rank from the good end."""
    if name == "mean":
        return fmean(samples)
    if name in ("max", "min"):
        return max(samples) if name == "max" else min(samples)
    return nearest_rank(sorted(samples, reverse=not worst_high), int(name[1:]))


def request_value(point: RequestPoint, sample: RequestSample, metric: Metric) -> float | None:
    """Return a metric of one request, in seconds or tokens a second; None where undefined."""
    ms = point.value_ms(sample, REQUEST_TIMES[metric])
    if metric == "user_tok_s":
        return 1e3 / ms if ms else None
    return None if ms is None else ms / 1e3


def samples(point: Point, metric: Metric) -> Sequence[float]:
    """Return the samples of a metric, in seconds or tokens a second; of requests, one each."""
    if isinstance(point, RequestPoint):
        every = [point.output_tok_s] if metric == "output_tok_s" else []
        if point.usable and metric in REQUEST_TIMES:
            every = [request_value(point, sample, metric) for sample in point.samples]
        return [value for value in every if value is not None]
    if metric == "ttft" or metric == "tpot" or metric == "e2e":
        times_ms = {"ttft": point.ttft_ms, "tpot": point.steps_ms, "e2e": point.e2e_ms}[metric]
        return [ms / 1e3 for ms in times_ms] if point.usable else ()
    return group.samples(point, metric)


def needed(statistic: str) -> int:
    """Return the smallest number of samples whose percentile is not their worst."""
    return ceil(1 / (1 - int(statistic[1:]) / 100) - 1e-9)


def _amount(metric: Metric, value: float) -> str:
    return duration(value) if metric in TIMES else f"{figures(value)} tok/s"


class Decision(Frozen):
    """Decision for one group of points; those with lossy settings are ranked by themselves."""

    objective: Objective
    point: Point | None = None  # None if no point keeps every level
    kept: tuple[SlaCheck, ...] = ()  # the levels, checked on `point`, or else on `nearest`
    cost: Cost | None = None
    nearest: Point | None = None  # point that misses by least, where none keeps every level
    keeping: int = 0  # points that keep the levels
    usable: int = 0
    lossy: Point | None = None  # best of the points with lossy settings
    gpu_hour_usd: float | None = None
    fleet: Fleet | None = None  # for a demand, if one was asked for
    too_slow: float | None = None  # seconds of one batch, or of a mean request, if that alone exceeds the deadline


def decide(
    points: Sequence[Point],
    slas: Sequence[Sla],
    objective: Objective,
    gpu_hour_usd: float | None = None,
    rate: Callable[[Point], float | None] = lambda point: point.output_tok_s,
) -> Decision:
    """Choose the best of `points`, the smaller batch if two are equal. Raises EconomicsError without a price."""
    if objective == "cost" and gpu_hour_usd is None:
        raise EconomicsError("--objective cost needs a price: give --gpu-hour-usd")
    usable = [point for point in points if point.usable]
    if exact(usable) and lossy(usable):
        best, apart = (decide(kind(usable), slas, objective, gpu_hour_usd, rate) for kind in (exact, lossy))
        return best.model_copy(update={"lossy": apart.point})
    keeping = [point for point in usable if all(kept.ok for kept in check(point, slas))]
    counts: dict[str, Any] = {"keeping": len(keeping), "usable": len(usable), "gpu_hour_usd": gpu_hour_usd}
    counts["objective"] = objective
    if not keeping:
        nearest = min(usable, key=lambda point: sum(kept.miss for kept in check(point, slas)), default=None)
        return Decision(**counts, kept=check(nearest, slas) if nearest else (), nearest=nearest)

    def rank(point: Point) -> tuple[float, int]:
        value = {
            "throughput": -(rate(point) or 0.0),
            "latency": point.tpot_ms or point.mean_ttft_ms or 0.0,
            "cost": cost(point, gpu_hour_usd).usd_per_mtok or 0.0,
        }[objective]
        return value, point.case.workload.batch_size

    point = min(keeping, key=rank)
    return Decision(**counts, point=point, kept=check(point, slas), cost=cost(point, gpu_hour_usd))
