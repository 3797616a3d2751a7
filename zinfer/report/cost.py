"""Report section on a token's cost and energy, and on GPU counts."""

from collections.abc import Iterator

from zinfer.analysis import rates
from zinfer.analysis.economics import cost, fleet
from zinfer.core.units import duration
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Row, Section, Table, Text, section
from zinfer.report.findings import Demand, Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled


def costs(findings: Findings) -> Section:
    """Return the section on costs and the fleet; empty without prices or demand."""
    return section("cost", "Sizing and cost", _blocks(findings))


def _blocks(findings: Findings) -> Iterator[Block]:
    price = findings.gpu_hour_usd
    if price is not None:
        yield Text(f"Price as given: an hour of a GPU {price:g} USD. Nothing else is counted.")
    for workload in (*findings.main, *findings.slices):
        if price is not None:
            yield _costs(workload, price)
        if findings.demand is not None:
            yield _fleets(workload, findings.demand)


def _costs(workload: WorkloadFindings, gpu_hour_usd: float) -> Table:
    costed = [(point, cost(point, gpu_hour_usd)) for point in rates.ranked(workload.points)]
    cheapest = min(costed, key=lambda pair: (pair[0].case.lossy, pair[1].usd_per_mtok or 0.0), default=(None,))[0]
    rows = []
    for point, paid in costed:
        usd = "" if paid.usd_per_mtok is None else f"{paid.usd_per_mtok:,.2f}"
        joules = f"{rated(paid.j_per_token)} J" if paid.j_per_token else ""
        cells = (*_named(point), usd, joules, paid.method or "not read")
        rows.append(Row(cells, "best" if point is cheapest else ""))
    columns = ("configuration", "#batch", "#tok/s", "#USD a million tokens", "#GPU energy a token", "energy from")
    caption = f"{workload.name}: each configuration at its own best batch, on one GPU that always has work."
    return Table(caption, columns, tuple(rows))


def _fleets(workload: WorkloadFindings, demand: Demand) -> Table:
    rows = []
    for point in rates.ranked(workload.points):
        sized = fleet(point, demand.tokens, demand.seconds, demand.utilisation, demand.spare)
        amounts = (f"{sized.working:,}", str(sized.spare), f"{sized.gpus:,}", f"{sized.load:.0%}")
        rows.append(Row((*_named(point), *amounts)))
    columns = (
        "configuration", "#batch", "#tok/s", "#GPUs at work", "#spare", "#GPUs", "#load of GPUs at work",
    )  # fmt: skip
    caption = (
        f"{workload.name}: GPUs for {demand.text}, {demand.tokens:,.0f} output tokens within "
        f"{duration(demand.seconds)}, counting on {demand.utilisation:.0%} of the throughput of each."
    )
    return Table(caption, columns, tuple(rows))


def _named(point: Measurement) -> tuple[str, str, str]:
    return titled(point), str(point.case.workload.batch_size), rate(point)[0]
