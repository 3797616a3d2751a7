"""Rates: the fastest engine and batch size, and whether offload pays. Pure functions over `Measurement`s.

Offload costs speed at a given batch and makes room for a larger one, so a setting is judged at its **own best batch**,
with the price at equal batch beside it. Functions take the points of one group, as `zinfer.analysis.group.groups` gives
them; nothing here compares across groups.
"""

import shlex
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Literal

from zinfer.analysis.group import Points, by_load
from zinfer.record.measurement import Measurement
from zinfer.record.stats import ci95_half_width
from zinfer.spec.case import Case, Offload
from zinfer.spec.resolve import catalogue_names, from_catalogue
from zinfer.spec.units import figures
from zinfer.spec.value import Frozen

RateObjective = Literal["output_tok_s", "decode_tok_s"]
OFFLOADS: tuple[Offload, ...] = ("cpu", "nvme")  # offloads that are compared with none


class Spread(Frozen):
    """Statistics of samples of one quantity, in its own unit; one sample has no deviation (None, not zero)."""

    mean: float
    stdev: float | None = None
    half_width: float | None = None  # half the 95% confidence interval of the mean
    count: int = 1


class Edge(Frozen):
    """Largest batch size that fitted and smallest that did not, of a load (a case at batch size 1); None if not
    seen."""

    load: Case
    largest_ok: int | None = None
    smallest_oom: int | None = None


class BaselineComparison(Frozen):
    """Points against a baseline: each at its own best batch, then at every batch size that both have."""

    best: Measurement | None = None
    baseline: Measurement | None = None
    equal: tuple[tuple[int, float], ...] = ()  # batch size, ratio of throughputs

    @property
    def gain(self) -> float | None:
        """Ratio of the throughputs at each side's own best batch."""
        return _ratio(self.best, self.baseline) if self.best and self.baseline else None


class OffloadVerdict(Frozen):
    """Verdict on an offload for one engine; for all engines together if `engine` is None."""

    engine: str | None
    offload: Offload
    comparison: BaselineComparison
    text: str


def best(points: Points, objective: RateObjective = "output_tok_s") -> Measurement | None:
    """Return the fastest usable point, the smaller batch if two are equal; None if none is usable."""
    usable = [point for point in points if point.usable and getattr(point, objective) is not None]
    return max(usable, key=lambda p: (getattr(p, objective), -p.case.workload.batch_size), default=None)


def best_by_load(points: Points, objective: RateObjective = "output_tok_s") -> tuple[Measurement, ...]:
    """Return the best point of each load that has a usable one, the fastest first."""
    found = [point for own in by_load(points).values() if (point := best(own, objective))]
    return tuple(sorted(found, key=lambda point: -getattr(point, objective)))


def compare_with_baseline(points: Points, baseline: Points) -> BaselineComparison:
    """Compare `points` with `baseline` by `output_tok_s`; at equal batch the fastest point of each side counts."""
    ours, theirs = _by_batch(points), _by_batch(baseline)
    return BaselineComparison(
        best=best(points),
        baseline=best(baseline),
        equal=tuple((size, _ratio(ours[size], theirs[size])) for size in sorted(ours.keys() & theirs.keys())),
    )


def offload_verdicts(points: Points) -> tuple[OffloadVerdict, ...]:
    """Return the verdicts on each offload against none: over all engines first if there are several, then by engine."""
    engines = sorted({point.case.engine for point in points})
    verdicts = []
    for engine in [*([None] if len(engines) > 1 else []), *engines]:
        own = [point for point in points if engine in (None, point.case.engine)]
        without = [point for point in own if point.case.offload == "none"]
        for offload in OFFLOADS:
            if using := [point for point in own if point.case.offload == offload]:
                comparison = compare_with_baseline(using, without)
                text = _sentence(offload, comparison, using, without)
                verdicts.append(OffloadVerdict(engine=engine, offload=offload, comparison=comparison, text=text))
    return tuple(verdicts)


def edges(points: Points) -> tuple[Edge, ...]:
    """Return the edge of each load: the largest batch size that ran, timed or only tried, and the smallest out of
    memory."""
    return tuple(
        Edge(
            load=load,
            largest_ok=max((p.case.workload.batch_size for p in own if p.status == "ok"), default=None),
            smallest_oom=min((p.case.workload.batch_size for p in own if p.status.startswith("oom")), default=None),
        )
        for load, own in by_load(points).items()
    )


def pareto(points: Points) -> tuple[Measurement, ...]:
    """Return the Pareto front: usable points that no other beats in both output tok/s and tok/s of one user (1000 /
    tpot_ms), by ascending throughput."""
    front: list[Measurement] = []
    usable = [point for point in points if point.usable and point.tpot_ms]
    for point in sorted(usable, key=lambda p: (-(p.output_tok_s or 0), p.tpot_ms or 0)):
        if not front or (point.tpot_ms or 0) < (front[-1].tpot_ms or 0):
            front.append(point)
    return tuple(reversed(front))


def spread(samples: Sequence[float]) -> Spread | None:
    """Return the mean, sample standard deviation and half the 95% confidence interval of samples; None without
    samples."""
    if not samples:
        return None
    deviation = stdev(samples) if len(samples) > 1 else None
    return Spread(mean=mean(samples), stdev=deviation, half_width=ci95_half_width(samples), count=len(samples))


def statuses(points: Points) -> str:
    """Return the statuses of points, each with the smallest batch size that ended so: ``oom_gpu from batch 16``."""
    smallest: dict[str, int] = {}
    for point in sorted(points, key=lambda point: -point.case.workload.batch_size):
        smallest[point.status] = point.case.workload.batch_size
    return ", ".join(f"{status} from batch {size}" for status, size in sorted(smallest.items()))


def command(case: Case) -> str:
    """Return the shell command that runs `case`, quoted: with the model's real weights, or with random ones for a model
    that has no others."""
    arguments = ["zinfer", "run", "--model", case.model, "--engine", case.engine, "--offload", case.offload]
    arguments += ["--batch-size", str(case.workload.batch_size), "--dtype", case.dtype]
    arguments += ["--output-len", str(case.workload.output_len)]
    if case.model in catalogue_names() and from_catalogue(case.model).hub_id is None:
        arguments += ["--load-format", "dummy"]
    if case.layers is not None:
        arguments += ["--layers", str(case.layers)]
    if case.gpu_weights is not None:
        arguments += ["--gpu-weights", case.gpu_weights]
    for key, value in case.options:
        arguments += ["--option", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return shlex.join([*arguments, "--prompt", "Once upon a time"])


def _by_batch(points: Points) -> dict[int, Measurement]:
    """Return the fastest usable point of each batch size."""
    ascending = sorted((point for point in points if point.usable), key=lambda point: point.output_tok_s or 0)
    return {point.case.workload.batch_size: point for point in ascending}


def _ratio(point: Measurement, baseline: Measurement) -> float:
    return (point.output_tok_s or 0) / (baseline.output_tok_s or 1)  # usable points have both


def _sentence(offload: Offload, comparison: BaselineComparison, using: Points, without: Points) -> str:
    """Return the verdict in one or two sentences, also if a side has no usable point."""
    ours, theirs = comparison.best, comparison.baseline
    if theirs is not None:
        other = f"without it {_rate(theirs)}"
    else:
        other = f"without it every point failed ({statuses(without)})" if without else "nothing was measured without it"
    if ours is None:
        return f"Nothing succeeded with offload {offload} ({statuses(using)}); {other}."
    if theirs is None:
        return f"Offload {offload} reaches {_rate(ours)}; {other}."
    text = f"Offload {offload} gives {comparison.gain:.2f}x at each side's own best batch: {_rate(ours)}, {other}."
    if not comparison.equal:
        return f"{text} No batch size was measured on both sides."
    sizes, ratios = zip(*comparison.equal, strict=True)
    batches, shares = _range(sizes, "{}"), _range(ratios, "{:.0%}")
    return f"{text} At equal batch ({batches}) it runs at {shares} of the speed without."


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _rate(point: Measurement) -> str:
    return f"{figures(point.output_tok_s or 0)} tok/s at batch {point.case.workload.batch_size}"
