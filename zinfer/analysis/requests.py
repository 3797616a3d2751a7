"""Loads of requests: groups, the fastest configuration, and goodput.

A service level holds for each request by itself here, with its own TTFT, TPOT or E2E, as in `vllm bench serve` and
DistServe (arXiv:2401.09670); `zinfer.analysis.sla.check` compares the statistic of the level over all requests.
"""

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

from zinfer.analysis.group import Setting, grouped
from zinfer.analysis.sla import REQUEST_TIMES, Sla, parse, request_value
from zinfer.core.engine import draft_of
from zinfer.core.requests import RequestLoad
from zinfer.core.units import figures
from zinfer.core.value import group_by
from zinfer.record.measurement import in_time
from zinfer.record.requests import RequestPoint, RequestSample


def goodput(point: RequestPoint) -> float | None:
    """Return the requests a second within the record's service levels; None without samples."""
    share = share_within(point)
    return None if share is None or point.request_s is None else share * point.request_s


def share_within(point: RequestPoint) -> float | None:
    """Return the share of requests within the record's service levels."""
    wanted = [level for level in map(parse, point.sla) if level.metric in REQUEST_TIMES]
    if not point.usable or not wanted:
        return None

    def keeps(sample: RequestSample, sla: Sla) -> bool:
        value = request_value(point, sample, sla.metric)
        return value is None or (value <= sla.bound if sla.at_most else value >= sla.bound)

    return sum(all(keeps(sample, sla) for sla in wanted) for sample in point.samples) / len(point.samples)


def acceptance(points: Iterable[RequestPoint], model: str, draft: str) -> tuple[int, int]:
    """Return accepted and checked drafts of `draft` for `model`."""
    alike = [point.counts for point in points if (point.case.model, draft_of(point.case.options)) == (model, draft)]
    return sum(counts.accepted for counts in alike), sum(counts.checked for counts in alike)


class RequestGroup(Setting):
    """Setting and requests of comparable loads."""

    requests: RequestLoad

    @property
    def rank(self) -> tuple[Any, ...]:
        asked = self.requests
        loop = asked.in_flight if isinstance(asked.in_flight, int) else float("inf")
        name = asked.source.rpartition(" ")[0] or asked.source  # of a file without its checksum
        return *super().rank, self.dtype, name, asked.request_rate is not None, loop, float(asked.request_rate or 0)

    @property
    def title(self) -> str:
        """Title of a table: ``llama-2-70b, 200 requests of chats.jsonl, 64 in flight``."""
        return f"{self.part}, {self.requests.describe()}"


class RequestRates(NamedTuple):
    """Configuration under a load: its last record, and all output tok/s."""

    point: RequestPoint
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.rates)

    @property
    def range(self) -> str:
        """Text of the lowest and the highest rate; empty for a single load."""
        return f"{figures(min(self.rates))} to {figures(max(self.rates))}" if len(self.rates) > 1 else ""

    def differs(self, other: "RequestRates") -> bool | None:
        """Return whether the ranges of rates are disjoint; None if unknown."""
        if min(len(self.rates), len(other.rates)) < 2:
            return None
        return min(self.rates) > max(other.rates) or max(self.rates) < min(other.rates)


def groups(points: Iterable[RequestPoint]) -> dict[RequestGroup, tuple[RequestPoint, ...]]:
    """Return all records by group, sorted, whole models first; those of a group in the order of their times."""

    return grouped(in_time(points), lambda point: RequestGroup.of(point, requests=point.requests))


def ranked(points: Iterable[RequestPoint]) -> list[RequestRates]:
    """Return the configurations, lossy ones last: by mean output tok/s, or by mean E2E at a rate."""
    by_key = group_by((point for point in points if point.usable), lambda point: point.key)
    rates = (tuple(record.output_tok_s or 0.0 for record in records) for records in by_key.values())
    rows = [RequestRates(records[-1], of) for records, of in zip(by_key.values(), rates, strict=True)]

    def sort_key(row: RequestRates) -> tuple[bool, float]:
        e2e = row.point.summary("e2e_ms") if isinstance(row.point.requests.request_rate, float) else None
        return row.point.case.lossy, -row.mean if e2e is None else e2e.mean

    return sorted(rows, key=sort_key)
