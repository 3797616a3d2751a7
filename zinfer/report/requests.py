"""Tables of loads of requests: their rates, and how long requests waited. They stand apart from equal sequences, whose
rates leave out that requests come and end at different times."""

from collections.abc import Iterable
from statistics import fmean

from zinfer.analysis.group import Setting
from zinfer.analysis.requests import goodput, loads_of
from zinfer.analysis.sla import check, parse
from zinfer.core.units import figures, milliseconds
from zinfer.core.value import group_by
from zinfer.record.requests import METRICS, RequestPoint
from zinfer.report.document import Block, Heading, Items, Row, Table, Text

RATES = (
    "configuration", "requests", "arrival", "#tokens in / out", "#loads", "#output tok/s", "#range",
    "#tok/s while others waited", "#steady tok/s", "#goodput, requests/s", "#link busy", "outcome",
)  # fmt: skip
TIMES = ("configuration", "arrival", "time", "#mean", "#p50", "#p90", "#p99")
WORDS = (
    "Requests of different lengths that come and end at any time, unlike the equal sequences of other tables, with "
    "which they are not compared. Output tok/s are the tokens of answers over the time of the whole load, its end "
    "included, in which few requests are left; steady tok/s leave out the time before all places were taken and that "
    "after the last request began. Prompts are computed in the same passes as answers: the rates of both are over the "
    "same time. Link busy: the weights' bytes of a pass at the link's measured rate, over the time of the passes."
)


def section(points: Iterable[RequestPoint]) -> tuple[Block, ...]:
    """Return the tables for each model or slice and machine."""

    def name_of(point: RequestPoint) -> str:
        return f"{Setting.of(point, total_layers=point.total_layers).part}, {point.machine}"

    groups = group_by(points, name_of)
    blocks: list[Block] = [Heading("Loads of requests"), Text(WORDS)]
    for name, records in groups.items():
        usable = loads_of(record for record in records if record.usable)
        last = [loads[-1] for loads in usable.values()]
        blocks.append(_rates(name, records))
        blocks += [_times(name, last)] if last else []
        levels = (
            f"{record.case.label()}, {record.requests.loop}: {level.describe()}."
            for record in last
            for level in check(record, map(parse, record.sla))
        )
        blocks.append(Items(tuple(levels)))
    return tuple(blocks) if groups else ()


def _rates(name: str, points: Iterable[RequestPoint]) -> Table:
    rows, loads = [], loads_of(points)
    sources = [f" of {key.requests.source.replace(',', ', ')}" for _, key in loads]
    common = sources[0] if len(set(sources)) == 1 else ""
    for ((_, key), records), source in zip(loads.items(), sources, strict=True):
        last, good = records[-1], [record for record in records if record.usable]
        measured = [record.output_tok_s or 0.0 for record in good]
        shown = good[-1] if good else last
        lengths, waiting = shown.mean_lengths, shown.waiting_tok_s
        steady = [rate for record in good if (rate := record.steady_tok_s) is not None]
        outcome = shown.status if shown.usable else f"{shown.status}: {shown.error or ''}".rstrip(": ")[:120]
        cells = (
            key.case.label(), f"{key.requests.requests:,}{'' if common else source}", key.requests.loop,
            "" if lengths is None else " / ".join(f"{length:.0f}" for length in lengths),
            str(len(good)) if good else "", figures(fmean(measured), 4) if good else "",
            f"{figures(min(measured), 4)} to {figures(max(measured), 4)}" if len(good) > 1 else "",
            "" if waiting is None else figures(waiting, 4), figures(fmean(steady), 4) if steady else "",
            "" if (rate := goodput(shown)) is None else figures(rate),
            "" if shown.link_busy is None else f"{shown.link_busy:.0%}", outcome,
        )  # fmt: skip
        rows.append(Row(cells, "" if shown.status == "ok" else "failed"))
    return Table(f"{name}: loads of requests{common}, the mean over all loads of the model.", RATES, tuple(rows))


def _times(name: str, points: Iterable[RequestPoint]) -> Table:
    rows = [
        Row((point.case.label(), point.requests.loop, metric.removesuffix("_ms").upper(), *map(milliseconds, times)))
        for point in points
        for metric in METRICS
        for times in (point.summary(metric) or (None,) * 4,)
    ]
    return Table(f"{name}: times of requests in the last load.", TIMES, tuple(rows))
