"""Section on evidence: conduct of the runs, versions, commands."""

import shlex
from collections.abc import Iterable
from itertools import chain
from statistics import fmean
from typing import Any

from zinfer.analysis.group import Points, by_load
from zinfer.record.measurement import Measurement
from zinfer.record.stats import relative_half_width, stdev
from zinfer.report.document import Block, Command, Heading, Items, Row, Section, Table, Text, section
from zinfer.report.findings import Findings

_REPEATED = ("request_lengths", "sla")  # keys whose values are options of their own
_UNUSUAL = {"seed": 0, "rounds": 1, "request_order": "given"}  # keys that are left out at these values
# a recipe's keys in the order of `zinfer sweep --help`; its tolerance and timeout have no part in what is measured
_AXES = (
    "model", "engine", "offload", "batch_size", "input_len", "output_len", "dtype", "load_format", "layers",
    "gpu_weights", "weights", "repeats", "requests", "num_requests", "in_flight", "request_rate", "request_order",
    "seed", "rounds",
)  # fmt: skip
_CONDUCT = (
    "configuration", "#timed", "#repeats", "#spread", "#steps", "#step varies", "#GPU clock", "#power", "#hottest",
    "#link", "throttled",
)  # fmt: skip


def evidence(findings: Findings) -> Section:
    """Return the section on conduct, omitted lines, and how to repeat."""
    blocks: list[Block] = []
    for workload in (*findings.main, *findings.slices):
        rows = tuple(_conduct(load.label(), load_points) for load, load_points in by_load(workload.points).items())
        caption = (
            f"How it ran: {workload.name}. Spread: the widest 95% confidence of a point's throughput; step varies: "
            "standard deviation of decode steps over their mean, at most; link: as measured in the process of the load."
        )
        blocks.append(Table(caption, _CONDUCT, rows, folded=True))
    if findings.damaged:
        blocks += [Heading("Lines left out"), Items(findings.damaged)]
    sweeps = dict.fromkeys(_sweep(header.recipe) for header in findings.headers)
    blocks += [Heading("To measure it again"), Command("\n".join(["zinfer probe", *sweeps, "zinfer report"]))]
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


def _conduct(label: str, points: Points) -> Row:
    timed = [point for point in points if point.usable]
    spreads = [share for point in timed if (share := relative_half_width(point.output_tok_s_samples)) is not None]
    steps = [step for point in timed for repeat in point.step_ms for step in repeat]
    varies = [
        stdev(steps_ms) / fmean(steps_ms)
        for point in timed
        if len(steps_ms := list(chain(*point.step_ms))) > 1 and fmean(steps_ms)
    ]
    links = [point.link_bandwidth / 1e9 for point in timed if point.link_bandwidth]
    reasons: dict[str, int] = {}
    for point in timed:
        for reason in _listed(point.gpu.get("throttle_reasons")):
            reasons[reason] = reasons.get(reason, 0) + 1
    cells = (
        label,
        str(len(timed)),
        _span([str(count) for count in sorted({len(point.ttft_ms) for point in timed})]),
        f"± {max(spreads):.1%}" if spreads else "unknown" if timed else "",
        str(len(steps)) if steps else "",
        f"{max(varies):.1%}" if varies else "",
        _gauge([*_all(timed, "sm_clock_mhz_min"), *_all(timed, "sm_clock_mhz_max")], "MHz"),
        _gauge(_all(timed, "power_w_mean"), "W"),
        _gauge(_all(timed, "temperature_c_max")[-1:] and [max(_all(timed, "temperature_c_max"))], "°C"),
        _span([f"{min(links):.1f}", f"{max(links):.1f}"]) + " GB/s" if links else "",
        ", ".join(f"{reason}, {count} of {len(timed)}" for reason, count in sorted(reasons.items())),
    )
    return Row(cells)


def _all(points: Iterable[Measurement], key: str) -> list[float]:
    readings = [point.gpu.get(key) for point in points]
    return [value for value in readings if isinstance(value, int | float)]


def _gauge(values: list[float], unit: str) -> str:
    return f"{_span([f'{min(values):.0f}', f'{max(values):.0f}'])} {unit}" if values else ""


def _span(texts: list[str]) -> str:
    return "" if not texts else texts[0] if texts[0] == texts[-1] else f"{texts[0]}–{texts[-1]}"


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _sweep(recipe: dict[str, Any]) -> str:
    """Return the command of a recipe as its file's header has it."""
    words = ["zinfer", "sweep"]
    for key in _AXES:
        text = _axis(recipe.get(key))
        if text and recipe[key] != _UNUSUAL.get(key):
            words += [f"--{key.replace('_', '-')}", text]
    for key in _REPEATED:
        given = recipe.get(key)
        for text in given if isinstance(given, list | tuple) else ():
            words += [f"--{key.replace('_', '-')}", str(text)]
    options = recipe.get("options")
    for key, value in options.items() if isinstance(options, dict) else ():
        words += ["-O", f"{key}={_axis(value)}"]
    return shlex.join([*words, "--minutes", "none"])


def _axis(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return ",".join(str(item).lower() if isinstance(item, bool) else str(item) for item in values if item is not None)


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
