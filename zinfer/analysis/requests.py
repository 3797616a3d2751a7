"""Goodput of loads of requests, and their rates by load: the requests that keep all service levels.

A service level holds for each request by itself here, with its own TTFT, TPOT or E2E, as in `vllm bench serve` and
DistServe (arXiv:2401.09670); `check` compares the statistic of the level over all requests. Rates of the whole load
(`output_tok_s`, `decode_tok_s`) are no property of a request, and only `check` sees them.
"""

from collections.abc import Iterable
from pathlib import PurePath

from zinfer.analysis.sla import Sla, SlaCheck, parse, statistic
from zinfer.record.requests import RequestKey, RequestMetric, RequestPoint, RequestSample

_TIMES: dict[str, RequestMetric] = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "user_tok_s": "tpot_ms"}


def levels(point: RequestPoint) -> tuple[Sla, ...]:
    """Return the service levels that a load was measured with. Raises SlaError for a record with other texts."""
    return tuple(map(parse, point.sla))


def goodput(point: RequestPoint, slas: Iterable[Sla] | None = None) -> float | None:
    """Return the requests a second that keep each of `slas`, by default the record's own; None without samples or
    service levels of requests."""
    share = share_within(point, slas)
    return None if share is None or point.request_s is None else share * point.request_s


def share_within(point: RequestPoint, slas: Iterable[Sla] | None = None) -> float | None:
    """Return the share of the requests that keep each of `slas`, by default the record's own; None as `goodput`."""
    wanted = [sla for sla in (levels(point) if slas is None else slas) if sla.metric in _TIMES]
    if not point.usable or not wanted:
        return None
    return sum(all(_keeps(point, sample, sla) for sla in wanted) for sample in point.samples) / len(point.samples)


def check(point: RequestPoint, slas: Iterable[Sla] | None = None) -> tuple[SlaCheck, ...]:
    """Check a load against the statistic of each service level, over all its requests."""
    found = []
    for sla in levels(point) if slas is None else slas:
        samples = _samples(point, sla)
        value = statistic(samples, sla.statistic, worst_high=sla.metric in ("ttft", "tpot", "e2e")) if samples else None
        found.append(SlaCheck(sla=sla, actual=value, samples=len(samples)))
    return tuple(found)


def acceptance(points: Iterable[RequestPoint], model: str, draft: str) -> tuple[int, int]:
    """Return the drafts of `draft` that were right for `model` in loads of requests, and all that were verified, up to
    the first wrong one of each pass and row: their ratio is how often a draft is right if those before it were."""
    alike = [
        point.counts
        for point in points
        if point.case.model == model and dict(point.case.options).get("draft", "none") == draft
    ]
    return sum(counts.accepted for counts in alike), sum(counts.checked for counts in alike)


def _samples(point: RequestPoint, sla: Sla) -> list[float]:
    """Return the samples of a level's metric, in seconds or tokens a second."""
    if not point.usable:
        return []
    if sla.metric in _TIMES:
        return [value for sample in point.samples if (value := _value(point, sample, sla)) is not None]
    return [point.output_tok_s] if sla.metric == "output_tok_s" and point.output_tok_s is not None else []


def _value(point: RequestPoint, sample: RequestSample, sla: Sla) -> float | None:
    ms = point.one(sample, _TIMES[sla.metric])
    if ms is None or sla.metric != "user_tok_s":
        return None if ms is None else ms / 1e3
    return 1e3 / ms if ms else None


def _keeps(point: RequestPoint, sample: RequestSample, sla: Sla) -> bool:
    """Tell whether a request keeps a level; one of a single token has no TPOT to miss."""
    value = _value(point, sample, sla)
    return value is None or (value <= sla.bound if sla.at_most else value >= sla.bound)


Loads = dict[tuple[str, RequestKey], tuple[RequestPoint, ...]]  # by machine and key


def loads_of(points: Iterable[RequestPoint]) -> Loads:
    """Return all records of each load of requests on each machine, in order: each load of the model gives it one."""
    found: Loads = {}
    for point in points:
        key = point.machine, point.key
        found[key] = (*found.get(key, ()), point)
    return found


def title(point: RequestPoint) -> str:
    """Return the model and slice of a load, for tables: ``llama-2-70b, 8 of 80 layers``."""
    case = point.case
    name = PurePath(case.model).name if case.model.startswith((".", "/", "~")) else case.model
    return name if case.layers is None else f"{name}, {case.layers} of {point.total_layers or '?'} layers"
