"""Report section on a token's cost and energy."""

from zinfer.analysis import rates
from zinfer.analysis.economics import cost
from zinfer.report.document import Block, Row, Section, Table, Text, section
from zinfer.report.findings import Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled


def costs(findings: Findings) -> Section:
    """Return the section on costs; empty without a price."""
    blocks: list[Block] = []
    if (price := findings.gpu_hour_usd) is not None:
        blocks.append(Text(f"Price as given: an hour of a GPU {price:g} USD. Nothing else is counted."))
        blocks += [_costs(workload, price) for workload in (*findings.main, *findings.slices)]
    return section("cost", "Cost", blocks)


def _costs(workload: WorkloadFindings, gpu_hour_usd: float) -> Table:
    costed = [(point, cost(point, gpu_hour_usd)) for point in rates.ranked(workload.points)]
    cheapest = min(costed, key=lambda pair: (pair[0].case.lossy, pair[1].usd_per_mtok or 0.0), default=(None,))[0]
    rows = []
    for point, paid in costed:
        usd = "" if paid.usd_per_mtok is None else f"{paid.usd_per_mtok:,.2f}"
        joules = f"{rated(paid.j_per_token)} J" if paid.j_per_token else ""
        cells = (
            titled(point),
            str(point.case.workload.batch_size),
            rate(point)[0],
            usd,
            joules,
            paid.method or "not read",
        )
        rows.append(Row(cells, "best" if point is cheapest else ""))
    columns = ("configuration", "#batch", "#tok/s", "#USD a million tokens", "#GPU energy a token", "energy from")
    caption = f"{workload.name}: each configuration at its own best batch, on one GPU that always has work."
    return Table(caption, columns, tuple(rows))
