"""Costs of a token in money and energy, and GPUs for a demand: `zinfer.analysis.economics` on measured points."""

from zinfer.analysis import rates
from zinfer.analysis.economics import Cost, EconomicsError, Prices, cost, fleet
from zinfer.core.units import duration
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Command, Details, Plain, Row, Section, Table, Text
from zinfer.report.findings import Demand, Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled

_SLICE = "A slice: the whole model is slower in proportion and its largest batch smaller, so it costs more than this."


def sizing(findings: Findings) -> Section:
    """Return the section on the cost of every configuration at its own best batch, and the fleet for the demand if one
    is given."""
    blocks: list[Block] = _given(findings)
    asked = findings.prices.known or findings.demand is not None
    for workload in (*findings.main, *findings.slices):
        if rates.best(workload.points) is None:
            if workload in findings.main:
                blocks.append(
                    Text(f"{workload.name}: no point succeeded ({rates.statuses(workload.points)}).", "missing")
                )
            continue
        tables: list[Plain] = [_costs(workload, findings.prices)]
        if findings.demand is not None:
            tables.append(_fleets(workload, findings.demand, findings.prices))
        if workload.group.layers is not None:
            tables.append(Text(_SLICE, "caution"))
        if asked and workload in findings.main:
            blocks += tables
        else:
            blocks.append(
                Details(f"{'Cost' if asked else 'Energy'} of every configuration: {workload.name}", tuple(tables))
            )
    return Section("cost", "Sizing and cost", blocks)


def _given(findings: Findings) -> list[Block]:
    """Return the prices and the demand, and the options that give those that are missing."""
    prices = findings.prices
    told = {
        "an hour of a GPU": prices.gpu_hour_usd,
        "an hour of the host around it": prices.host_hour_usd,
        "a kWh": prices.power_usd_kwh,
    }
    words = [f"{name} {value:g} USD" for name, value in told.items() if value is not None]
    blocks: list[Block] = []
    if words:
        blocks.append(Text(f"Prices as given: {', '.join(words)}. What is not named is not counted."))
    else:
        lack = "No price was given, so no cost: `--gpu-hour-usd`, `--host-hour-usd` and `--power-usd-kwh` take them."
        blocks.append(Text(lack, "missing"))
    if findings.demand is None:
        lack = "No demand was given, so no number of GPUs: `--demand` takes it, and `--deadline` the time it is due in."
        blocks.append(Text(lack, "missing"))
    if findings.demand is None or not words:
        options = "--gpu-hour-usd 2.50 --power-usd-kwh 0.12 --demand 2Mtok/day --deadline 8h"
        blocks.append(Command(f"zinfer report {options}"))
    return blocks


def _costs(workload: WorkloadFindings, prices: Prices) -> Table:
    known = [(point, *_cost(point, prices)) for point in rates.ranked(workload.points)]
    costs = [(point, found.usd_per_mtok) for point, found, _ in known if found and found.usd_per_mtok is not None]
    cheapest = min(costs, key=lambda one: (one[0].case.lossy, one[1]), default=(None, None))[0]
    rows = []
    for point, found, why in known:
        usd, joules = (found.usd_per_mtok, found.j_per_token) if found else (None, None)
        cells = (
            *_named(point),
            f"{usd:,.2f}" if usd is not None else "",
            f"{rated(joules)} J" if joules else "",
            why or (found.method if found and found.method else "not read"),
        )
        rows.append(Row(cells, "best" if point is cheapest else ""))
    columns = ("configuration", "#batch", "#tok/s", "#USD a million tokens", "#GPU energy a token", "energy from")
    caption = f"{workload.name}: each configuration at its own best batch, on one GPU that always has work."
    return Table(caption, columns, tuple(rows))


def _cost(point: Measurement, prices: Prices) -> tuple[Cost | None, str]:
    """Return the cost, or None and the reason why it is not known."""
    try:
        return cost(point, prices), ""
    except EconomicsError as error:
        return cost(point, Prices()), str(error)


def _fleets(workload: WorkloadFindings, demand: Demand, prices: Prices) -> Table:
    rows = []
    for point in rates.ranked(workload.points):
        found = fleet(point, demand.tokens, demand.seconds, demand.utilisation, demand.spare, prices.gpus_per_server)
        amounts = (
            f"{found.working:,}", str(found.spare), f"{found.gpus:,}", f"{found.servers:,}", f"{found.load:.0%}",
        )  # fmt: skip
        rows.append(Row((*_named(point), *amounts)))
    columns = (
        "configuration",
        "#batch",
        "#tok/s",
        "#GPUs at work",
        "#spare",
        "#GPUs",
        "#servers",
        "#load of those at work",
    )
    caption = (
        f"{workload.name}: GPUs for {demand.text}, {demand.tokens:,.0f} output tokens within "
        f"{duration(demand.seconds)}, counting on {demand.utilisation:.0%} of the throughput of each; "
        f"{prices.gpus_per_server} to a server."
    )
    return Table(caption, columns, tuple(rows))


def _named(point: Measurement) -> tuple[str, str, str]:
    return titled(point), str(point.case.workload.batch_size), rate(point)[0]
