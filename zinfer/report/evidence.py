"""Section on evidence: lines left out, commands, versions."""

from zinfer.analysis import rates
from zinfer.analysis.economics import Point
from zinfer.analysis.group import Points
from zinfer.analysis.reproduce import commands
from zinfer.analysis.requests import groups, ranked
from zinfer.report.document import Block, Command, Heading, Items, Section, Text, section
from zinfer.report.findings import Findings


def evidence(findings: Findings) -> Section:
    """Return the section on omitted lines, and how to repeat."""
    blocks: list[Block] = []
    if findings.damaged:
        blocks += [Heading("Lines left out"), Items(findings.damaged)]
    tops = [rates.winner(workload.points) for workload in (*findings.main, *findings.slices)]
    served = [ranking[0].point for points in groups(findings.requests).values() if (ranking := ranked(points))]
    best: list[Point] = [*filter(None, tops), *served]
    again = dict.fromkeys(commands(point)[0] for point in best)
    blocks += [Heading("To measure the best again"), Command("\n".join(["zinfer probe", *again]))]
    if versions := _versions(findings.points):
        text = "; ".join(f"{name} {', '.join(sorted(numbers))}" for name, numbers in versions.items())
        blocks.append(Text(f"Versions: {text}. Equal records give this report byte by byte."))
    return section("evidence", "Evidence", blocks)


def measured_with(points: Points) -> str:
    """Return the sentence with days and versions; empty if unknown."""
    versions = _versions(points)
    names = [f"{name} {', '.join(sorted(versions[name]))}" for name in ("zinfer", "torch") if name in versions]
    words = [part for part in (_days(points), f"with {', '.join(names)}" if names else "") if part]
    return f"Measured {' '.join(words)}." if words else ""


def _versions(points: Points) -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    for point in points:
        for name, version in point.versions.items():
            versions.setdefault(name, set()).add(version)
        if point.model_revision:
            versions.setdefault(f"revision of {point.case.model}", set()).add(point.model_revision)
    return dict(sorted(versions.items()))


def _days(points: Points) -> str:
    days = sorted({point.started_at[:10] for point in points if point.started_at})
    return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}" if days else ""
