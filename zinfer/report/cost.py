"""Report section on a token's cost and energy, and on GPU counts."""

from collections.abc import Iterator

from zinfer.analysis import rates
from zinfer.analysis.economics import Cost, EconomicsError, Prices, cost, fleet
from zinfer.core.units import duration
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Row, Section, Table, Text, section
from zinfer.report.findings import Demand, Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled


def costs(findings: Findings) -> Section:
    """Return the section on costs and the fleet; empty without prices or demand."""
    return section("cost", "Sizing and cost", _blocks(findings))


def _blocks(findings: Findings) -> Iterator[Block]:
    prices = findings.prices
    given = {
        "an hour of a GPU": prices.gpu_hour_usd,
        "an hour of the host around it": prices.host_hour_usd,
        "a kWh": prices.power_usd_kwh,
    }
    words = [f"{name} {value:g} USD" for name, value in given.items() if value is not None]
    if words:
        yield Text(f"Prices as given: {', '.join(words)}. What is not named is not counted.")
    for workload in (*findings.main, *findings.slices) if words or findings.demand else ():
        if words:
            yield _costs(workload, prices)
        if findings.demand is not None:
            yield _fleets(workload, findings.demand, prices)


def _costs(workload: WorkloadFindings, prices: Prices) -> Table:
    costed = [(point, *_cost(point, prices)) for point in rates.ranked(workload.points)]
    costs = [(point, paid.usd_per_mtok) for point, paid, _ in costed if paid and paid.usd_per_mtok is not None]
    cheapest = min(costs, key=lambda pair: (pair[0].case.lossy, pair[1]), default=(None, None))[0]
    rows = []
    for point, paid, why in costed:
        usd, joules = (paid.usd_per_mtok, paid.j_per_token) if paid else (None, None)
        cells = (
            *_named(point),
            f"{usd:,.2f}" if usd is not None else "",
            f"{rated(joules)} J" if joules else "",
            why or (paid.method if paid and paid.method else "not read"),
        )
        rows.append(Row(cells, "best" if point is cheapest else ""))
    columns = ("configuration", "#batch", "#tok/s", "#USD a million tokens", "#GPU energy a token", "energy from")
    caption = f"{workload.name}: each configuration at its own best batch, on one GPU that always has work."
    return Table(caption, columns, tuple(rows))


def _cost(point: Measurement, prices: Prices) -> tuple[Cost | None, str]:
    try:
        return cost(point, prices), ""
    except EconomicsError as error:
        return cost(point, Prices()), str(error)


def _fleets(workload: WorkloadFindings, demand: Demand, prices: Prices) -> Table:
    rows = []
    for point in rates.ranked(workload.points):
        sized = fleet(point, demand.tokens, demand.seconds, demand.utilisation, demand.spare, prices.gpus_per_server)
        amounts = (f"{sized.working:,}", str(sized.spare), f"{sized.gpus:,}", f"{sized.servers:,}", f"{sized.load:.0%}")
        rows.append(Row((*_named(point), *amounts)))
    columns = (
        "configuration", "#batch", "#tok/s", "#GPUs at work", "#spare", "#GPUs", "#servers", "#load of GPUs at work",
    )  # fmt: skip
    caption = (
        f"{workload.name}: GPUs for {demand.text}, {demand.tokens:,.0f} output tokens within "
        f"{duration(demand.seconds)}, counting on {demand.utilisation:.0%} of the throughput of each; "
        f"{prices.gpus_per_server} to a server."
    )
    return Table(caption, columns, tuple(rows))


def _named(point: Measurement) -> tuple[str, str, str]:
    return titled(point), str(point.case.workload.batch_size), rate(point)[0]
