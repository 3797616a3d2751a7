"""Contents of a report: its sections in order, cost and evidence among them."""

from collections.abc import Callable

from zinfer.analysis import rates
from zinfer.analysis.economics import Cost, Point, cost
from zinfer.analysis.group import Points
from zinfer.analysis.reproduce import commands
from zinfer.analysis.requests import groups, ranked
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement
from zinfer.report import measured, predicted, summary
from zinfer.report.document import Block, Command, Document, Heading, Items, Section, Table, Text, section, table
from zinfer.report.findings import Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled


def document(findings: Findings) -> Document:
    """Return all sections that have content."""
    sections = (
        summary.summary(findings),
        measured.results(findings),
        predicted.predictions(findings),
        _costs(findings),
        measured.studies(findings),
        measured.system(findings),
        _evidence(findings),
    )
    machines = dict.fromkeys(workload.group.machine for workload in findings.workloads)
    models = dict.fromkeys(workload.group.model_name for workload in findings.workloads)
    subject = f"{', '.join(models)} on {', '.join(machines)}. " if models else ""
    subtitle = f"{subject}{_measured_with(findings.points)} Measured numbers are plain, predictions shaded."
    return Document("Capacity report", subtitle, tuple(section for section in sections if section.blocks))


def _costs(findings: Findings) -> Section:
    if (price := findings.gpu_hour_usd) is None:
        return section("cost", "Cost", ())
    text = Text(f"Price as given: an hour of a GPU {price:g} USD. Nothing else is counted.")
    return section("cost", "Cost", (text, *(_cost_table(workload, price) for workload in findings.ordered)))


def _cost_table(workload: WorkloadFindings, gpu_hour_usd: float) -> Table:
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


def _evidence(findings: Findings) -> Section:
    blocks: list[Block] = []
    if findings.damaged:
        blocks += [Heading("Lines left out"), Items(findings.damaged)]
    tops = [rates.winner(workload.points) for workload in findings.ordered]
    served = [ranking[0].point for points in groups(findings.requests).values() if (ranking := ranked(points))]
    best: list[Point] = [*filter(None, tops), *served]
    again = dict.fromkeys(commands(point)[0] for point in best)
    blocks += [Heading("To measure the best again"), Command("\n".join(["zinfer probe", *again]))]
    if versions := _versions(findings.points):
        text = "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in versions.items())
        blocks.append(Text(f"Versions: {text}. Equal records give this report byte by byte."))
    return section("evidence", "Evidence", blocks)


def _measured_with(points: Points) -> str:
    versions, days = _versions(points), sorted({point.started_at[:10] for point in points if point.started_at})
    names = [f"{name} {', '.join(versions[name])}" for name in ("zinfer", "torch") if name in versions]
    parts = [f"from {days[0]} to {days[-1]}" if len(days) > 1 else f"on {days[0]}"] if days else []
    parts += [f"with {', '.join(names)}"] if names else []
    return f"Measured {' '.join(parts)}." if parts else ""


def _versions(points: Points) -> dict[str, list[str]]:
    """Return the versions of packages and models, by name."""
    named = {pair for point in points for pair in point.versions.items()}
    named |= {(f"revision of {point.case.model}", point.model_revision) for point in points if point.model_revision}
    by_name = group_by(sorted(named), lambda pair: pair[0])
    return {name: [version for _, version in pairs] for name, pairs in by_name.items()}
