"""Sections on the evidence: comparisons, how far the numbers may be trusted, and how to get them again."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import mean, stdev
from typing import Any

from zinfer.analysis import compare, rates
from zinfer.analysis.group import Points, by_load
from zinfer.record.measurement import Measurement
from zinfer.record.stats import relative_half_width
from zinfer.report.document import Block, Command, Details, Heading, Items, Kind, Plain, Row, Section, Table, Text
from zinfer.report.findings import Findings, WorkloadFindings
from zinfer.report.measured import rated

_WORDS: dict[compare.Verdict, str] = {
    "noise": "within the noise",
    "unknown": "noise unknown, one repeat",
    "untimed": "not timed on both sides",
}
_KINDS: dict[compare.Verdict, Kind] = {"worse": "failed", "broken": "failed", "better": "best", "fixed": "best"}
_REPEATED = ("request_lengths", "sla")  # keys whose values are options of their own
_UNUSUAL = {"seed": 0, "rounds": 1, "request_order": "given"}  # keys that are left out at these values
# a recipe's keys in the order of `zinfer sweep --help`; its tolerance and timeout have no part in what is measured
_AXES = (
    "model", "engine", "offload", "batch_size", "input_len", "output_len", "dtype", "load_format", "layers",
    "gpu_weights", "weights", "repeats", "requests", "num_requests", "in_flight", "request_rate", "request_order",
    "seed", "rounds",
)  # fmt: skip


def comparison(findings: Findings) -> Section:
    """Return the section that compares with the baseline, and the fastest configuration with the others measured."""
    blocks: list[Block] = []
    if findings.baseline is None:
        blocks.append(
            Text("No baseline was named: `zinfer report --baseline FILE` compares with its records.", "missing")
        )
    else:
        blocks += _against(*findings.baseline, findings.points)
    tables: dict[bool, list[Plain]] = {True: [], False: []}
    for workload in findings.workloads:
        rows = _others(workload.points)
        if rows:
            columns = (
                "the fastest against",
                "#own best batch",
                "#of the fastest",
                "#ratio",
                "#equal batch",
                "#ratio there",
            )
            caption = f"{workload.name}: output tok/s of the fastest configuration over those of each other one."
            tables[workload in findings.main].append(Table(caption, columns, rows))
    blocks += tables[True]
    if tables[False]:
        blocks.append(Details("Slices: the fastest configuration against each other one", tuple(tables[False])))
    return Section("comparison", "Comparison", blocks)


def validity(findings: Findings) -> Section:
    """Return the section on repeats, spread, clocks and throttling, kind of weights, slices, and lines that could not
    be read."""
    blocks: list[Block] = []
    tables: list[Plain] = []
    for workload in (*findings.main, *findings.slices):
        blocks += [Heading(workload.name), Items(tuple(_limits(workload)))]
        rows = tuple(_conduct(load.label(), own) for load, own in by_load(workload.points).items())
        columns = (
            "configuration", "#timed", "#repeats", "#spread", "#steps", "#step varies", "#GPU clock", "#power",
            "#hottest", "#link", "throttled",
        )  # fmt: skip
        caption = (
            f"{workload.name}: how it ran. Spread: the widest 95% confidence of a point's throughput; step varies: "
            "standard deviation of decode steps over their mean, at most; link: as measured in the process of the load."
        )
        tables.append(Table(caption, columns, rows))
    if tables:
        blocks.append(Details("How each configuration ran: repeats, spread, clocks, power", tuple(tables)))
    if not findings.workloads:
        blocks.append(Text("There is no point to judge.", "missing"))
    if findings.damaged:
        blocks += [Heading("Lines left out"), Items(findings.damaged)]
    elif findings.workloads:
        blocks.append(Text("Every line of the result files was whole; none was left out."))
    return Section("validity", "Validity", blocks)


def reproduce(findings: Findings) -> Section:
    """Return the section with the commands that measure all of it again, and the versions that were measured."""
    headers = [header for workload in findings.workloads for header in workload.headers]
    sweeps = dict.fromkeys(_sweep(header.recipe) for header in (*headers, *findings.request_headers))
    blocks: list[Block] = [Command("\n".join(["zinfer probe", *sweeps, "zinfer report"]))]
    if findings.workloads and not sweeps:
        blocks.append(Text("The result files hold no start of a sweep, so its command is unknown.", "missing"))
    versions = _versions(findings.points)
    if versions:
        blocks.append(Table("Versions that the points were measured with.", ("", "version"), versions))
    elif findings.workloads:
        blocks.append(Text("Versions were not recorded.", "missing"))
    days = _days(findings.points)
    if days:
        blocks.append(Text(f"Measured {days}, UTC. Equal records give this report byte by byte."))
    return Section("reproduce", "How to reproduce", blocks)


def measured_with(points: Points) -> str:
    """Return the sentence with the days of the measurements and the versions of zinfer and torch; empty if unknown."""
    versions = {row.cells[0]: row.cells[1] for row in _versions(points)}
    told = [f"{name} {versions[name]}" for name in ("zinfer", "torch") if name in versions]
    words = [part for part in (_days(points), f"with {', '.join(told)}" if told else "") if part]
    return f"Measured {' '.join(words)}." if words else ""


def _against(name: str, before: Points, after: Points) -> list[Block]:
    try:
        found = compare.compare(before, after)
    except compare.CompareError as error:
        return [Text(f"The baseline {name} could not be compared with: it, or what was measured, {error}.", "missing")]
    rows = tuple(_change(change) for change in found.changes)
    if not rows:
        return [Text(f"The baseline {name} has no case in common with what was measured.", "missing")]
    columns = ("configuration", "#batch", "#baseline tok/s", "#now tok/s", "#change", "#noise", "verdict")
    blocks: list[Block] = [Table(f"Output tokens a second against {name}.", columns, rows)]
    lines = [
        f"{part.name}: {part.before or 'not recorded'}, now {part.after or 'not recorded'}"
        for part in found.differences
    ]
    if found.only_before or found.only_after:
        lines.append(f"{len(found.only_before)} points only in the baseline, {len(found.only_after)} only here.")
    return [*blocks, Items(tuple(lines))] if lines else blocks


def _change(change: compare.Change) -> Row:
    case, noise = change.after_case, change.noise
    sides = [
        status if status != "ok" else "" if value.mean is None else rated(value.mean)
        for status, value in ((change.before_status, change.before), (change.after_status, change.after))
    ]
    cells = (
        f"{case.model} {change.label}",
        str(case.workload.batch_size),
        *sides,
        "" if change.relative is None else f"{change.relative:+.1%}",
        "" if noise is None or not change.before.mean else f"± {noise / change.before.mean:.1%}",
        _WORDS.get(change.verdict, change.verdict),
    )
    return Row(cells, _KINDS.get(change.verdict, ""))


def _others(points: Points) -> tuple[Row, ...]:
    winner = rates.winner(points)
    if winner is None:
        return ()
    loads = by_load(points)
    rows = []
    for load, own in loads.items():
        found = rates.compare_with_baseline(loads[winner.case.load], own)
        if load == winner.case.load or found.baseline is None or found.change is None:
            continue
        sizes = [str(change.after_case.workload.batch_size) for change in found.equal]
        cells = (
            load.label(),
            str(found.baseline.case.workload.batch_size),
            str(winner.case.workload.batch_size),
            found.change.times,
            ", ".join(sizes),
            _ratios(found.equal),
        )
        rows.append(Row(cells))
    return tuple(rows)


def _ratios(changes: Sequence[compare.Change]) -> str:
    """Return the range of the ratios that are beyond the noise, or that none is."""
    ratios = [change.ratio for change in changes if change.ratio and change.verdict not in ("noise", "same")]
    if not ratios:
        return "within the noise" if changes else ""
    return _span([f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"])


def _limits(workload: WorkloadFindings) -> list[str]:
    """Return sentences with the facts that a reader has to know before trusting the numbers."""
    group, points = workload.group, workload.points
    lines = []
    if group.load_format == "dummy":
        lines.append("Dummy weights: random ones of the same size. Speed does not depend on their values; text does.")
    if group.layers is not None:
        whole = f"{group.layers} of {group.total_layers or '?'} layers"
        lines.append(f"A slice: {whole}. A step of the whole model takes longer in proportion, its memory differs.")
    single = [point for point in points if point.usable and len(point.ttft_ms) == 1]
    if single:
        lines.append(
            f"{len(single)} of {sum(p.usable for p in points)} timed points have one repeat: their noise is unknown."
        )
    hot = [point for point in points if point.gpu.get("throttle_reasons")]
    if hot:
        lines.append(f"{len(hot)} points ran while the GPU's driver held its clocks back; the table says why.")
    short = {point.effective.shortfall for point in points if point.effective and point.effective.shortfall}
    lines += [f"Asked for and not done: {text}" for text in sorted(short)]
    return lines or ["Whole model, its own weights, repeated, clocks not held back."]


def _conduct(label: str, points: Points) -> Row:
    timed = [point for point in points if point.usable]
    spreads = [share for point in timed if (share := relative_half_width(point.output_tok_s_samples)) is not None]
    steps = [step for point in timed for repeat in point.step_ms for step in repeat]
    varies = [stdev(own) / mean(own) for point in timed if len(own := list(chain(*point.step_ms))) > 1 and mean(own)]
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
    found = [point.gpu.get(key) for point in points]
    return [value for value in found if isinstance(value, int | float)]


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
    return shlex.join(words)


def _axis(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return ",".join(str(item).lower() if isinstance(item, bool) else str(item) for item in values if item is not None)


def _versions(points: Points) -> tuple[Row, ...]:
    found: dict[str, set[str]] = {}
    for point in points:
        for name, version in point.versions.items():
            found.setdefault(name, set()).add(version)
        if point.model_revision:
            found.setdefault(f"revision of {point.case.model}", set()).add(point.model_revision)
    return tuple(Row((name, ", ".join(sorted(versions)))) for name, versions in sorted(found.items()))


def _days(points: Points) -> str:
    days = sorted({point.started_at[:10] for point in points if point.started_at})
    return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}" if days else ""
