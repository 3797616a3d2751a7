"""Records to a Markdown document: the answer first, then what it rests on, failures included."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from zinfer import analysis
from zinfer.group import Group, Points
from zinfer.machine import Machine
from zinfer.record import Measurement
from zinfer.units import duration, figures, gb, gib


class Section(NamedTuple):
    """One group of one sweep. `machine` is what was probed there; `figures` are links by the figure's name."""

    sweep: str
    group: Group
    points: Points
    machine: Machine | None = None
    figures: Mapping[str, str] = {}


def markdown(sections: Sequence[Section], damaged: Sequence[str] = ()) -> str:
    """The whole report. Says what is missing, and holds no date of its own: equal results give equal text.

    `damaged` names the lines of result files that could not be used.
    """
    parts = ["# What was measured"]
    if sections:
        parts.append(
            "Every number is measured. Tokens a second count prefill too; ± is the 95% confidence of the mean."
        )
        parts.append(_table(("sweep", "machine", "workload", "answer"), map(_answer_row, sections)))
    else:
        parts.append("Nothing yet: measure with `zinfer sweep`, then write this report again.")
    for section in sections:
        parts += _section(section)
    if damaged:
        parts += ["## Lines left out", "\n".join(f"- {cell(line)}" for line in damaged)]
    return "\n\n".join(parts) + "\n"


def cell(text: str, length: int = 200) -> str:
    """`text` on one line and safe in a Markdown table: no markup, no HTML, cut after `length` characters."""
    flat = " ".join(text.split())
    flat = flat if len(flat) <= length else f"{flat[: length - 1]}…"
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", escape(flat, quote=False))


def _section(section: Section) -> list[str]:
    group, points = section.group, section.points
    parts = [f"## {cell(group.title)}", f"{cell(group.conditions)}. Sweep: {cell(section.sweep)}."]
    winner = analysis.best(points)
    if winner is None:
        parts.append(f"**No point succeeded**: {cell(analysis.statuses(points))}.")
    else:
        parts += [f"**{cell(_answer(winner))}**", f"```sh\n{analysis.command(winner.case)}\n```"]
    if group.caution:
        parts.append(group.caution)
    verdicts = analysis.offload_verdicts(points)
    lines = [f"- {cell(verdict.engine or 'Any engine')}: {cell(verdict.words, 600)}" for verdict in verdicts]
    parts += ["### Does offload pay?", "\n".join(lines) or "No point with offload was measured."]
    pictures = [f"![{name}]({link})" for name, link in section.figures.items()]
    parts += ["### Figures", "\n\n".join(pictures) or "None drawn yet: `zinfer plot`."]
    head = (
        "configuration",
        "batch",
        "status",
        "tok/s",
        "first token",
        "each after",
        "link",
        "GPU peak",
        "host peak",
        "error",
    )
    parts += ["### Every point", _table(head, map(_point_row, points))]
    parts += ["### System under test", _system(section.machine), _versions(points)]
    return parts


def _answer(point: Measurement) -> str:
    return f"{point.case.label()}, batch {point.case.workload.batch_size}: {_rate(point)} tok/s"


def _answer_row(section: Section) -> tuple[str, ...]:
    winner = analysis.best(section.points)
    answer = _answer(winner) if winner else f"no point succeeded ({analysis.statuses(section.points)})"
    return section.sweep, section.group.machine, section.group.title, answer


def _rate(point: Measurement) -> str:
    rate = analysis.spread(point.output_tok_s_samples) if point.usable else None
    if rate is None:
        return ""
    return figures(rate.mean) + (f" ± {figures(rate.half_width, 2)}" if rate.half_width else "")


def _point_row(point: Measurement) -> tuple[str, ...]:
    ok = point.usable
    return (
        point.case.label(),
        str(point.case.workload.batch_size),
        ("fits, not timed" if point.status == "ok" and not ok else point.status)
        + (f" in {point.stage}" if point.stage else ""),
        _rate(point),
        duration(sum(point.ttft_ms) / len(point.ttft_ms) / 1e3) if ok else "",
        duration(point.tpot_ms / 1e3) if ok and point.tpot_ms else "",
        f"{point.link_share:.0%}" if ok and point.link_share else "",
        gib(point.gpu_peak_bytes) if point.gpu_peak_bytes else "",
        gib(point.host_peak_bytes) if point.host_peak_bytes else "",
        point.error or "",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(map(cell, row))} |" for row in rows])


def _system(machine: Machine | None) -> str:
    if machine is None:
        return "No description of the machine lies beside the results: `zinfer probe` writes one."
    gpu = f"{machine.gpu_count} × {machine.gpu_name} with {gib(machine.gpu_bytes)}" if machine.gpu_count else "none"
    facts = {
        "GPU": gpu,
        "host memory": machine.host_bytes and gib(machine.host_bytes),
        "host to device, pinned": machine.h2d_bandwidth and f"{gb(machine.h2d_bandwidth)}/s",
        "device to host": machine.d2h_bandwidth and f"{gb(machine.d2h_bandwidth)}/s",
        "device memory": machine.hbm_bandwidth and f"{gb(machine.hbm_bandwidth)}/s",
        "NVMe read": machine.nvme_bandwidth and f"{gb(machine.nvme_bandwidth)}/s",
        "bf16 matrix product": machine.matmul_flops and f"{machine.matmul_flops / 1e12:.0f} TFLOP/s",
    }
    lines = [f"- {name}: {cell(str(value))}" for name, value in facts.items() if value]
    return "\n".join([f"{cell(machine.name)}, {machine.source}:\n", *lines])


def _versions(points: Points) -> str:
    found: dict[str, set[str]] = {}
    for point in points:
        for name, version in point.versions.items():
            found.setdefault(name, set()).add(version)
        if point.model_revision:
            found.setdefault("model revision", set()).add(point.model_revision)
    listed = [f"{name} {' and '.join(sorted(versions))}" for name, versions in sorted(found.items())]
    return f"Versions: {cell(', '.join(listed), 2000)}." if listed else "Versions were not recorded."
