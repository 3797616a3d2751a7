"""Report section on a token's cost and energy."""

from collections.abc import Callable

from zinfer.analysis import rates
from zinfer.analysis.economics import Cost, cost
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Section, Table, Text, section, table
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
    cheapest = min(costed, key=lambda pair: (pair[0].case.lossy, pair[1].usd_per_mtok or 0.0), default=None)
    columns: dict[str, Callable[[tuple[Measurement, Cost]], str]] = {
        "configuration": lambda pair: titled(pair[0]),
        "#batch": lambda pair: str(pair[0].case.workload.batch_size),
        "#tok/s": lambda pair: rate(pair[0])[0],
        "#USD a million tokens": lambda pair: "" if pair[1].usd_per_mtok is None else f"{pair[1].usd_per_mtok:,.2f}",
        "#GPU energy a token": lambda pair: f"{rated(pair[1].j_per_token)} J" if pair[1].j_per_token else "",
        "energy from": lambda pair: pair[1].method or "not read",
    }
    caption = f"{workload.name}: each configuration at its own best batch, on one GPU that always has work."
    return table(caption, columns, costed, lambda pair: "best" if pair is cheapest else "")
