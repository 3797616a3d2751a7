"""Contents of a report: its sections in order, with the executive summary and evidence."""

from collections import Counter
from collections.abc import Iterator

from zinfer.analysis import rates
from zinfer.analysis.economics import DAY_S, Point, cost
from zinfer.analysis.group import Points, by_load
from zinfer.analysis.reproduce import commands
from zinfer.analysis.requests import groups, ranked
from zinfer.core.units import counted, duration, figures, milliseconds
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement
from zinfer.report import measured
from zinfer.report.document import Block, Command, Document, Heading, Items, Row, Section, Signature, Table, Text
from zinfer.report.measured import Findings, WorkloadFindings, titled

LOADS = 3  # loads of the model that a result needs behind it, not to be called a single run
HEADS = ("model", "machine", "configuration", "#tok/s", "#TTFT", "evidence", "verdict")


def document(findings: Findings) -> Document:
    """Return all sections that have content."""
    sections = (
        Section("summary", "Summary", _summary(findings)),
        Section("results", "Results", measured.results(findings)),
        Section("studies", "Studies", measured.studies(findings)),
        Section("system", "System under test", measured.system(findings)),
        Section("evidence", "Evidence", _evidence(findings)),
    )
    machines = dict.fromkeys(workload.group.machine for workload in findings.workloads)
    models = dict.fromkeys(workload.group.model_name for workload in findings.workloads)
    subject = f"{', '.join(models)} on {', '.join(machines)}. " if models else ""
    subtitle = subject + _measured_with(findings.points)
    return Document("Capacity report", subtitle, tuple(section for section in sections if section.blocks))


def _summary(findings: Findings) -> Iterator[Block]:
    """Yield a row for each workload, decision, risks, signature; without a workload, how to measure one."""
    rows = (*map(_row, findings.workloads), *_request_rows(findings))
    if not rows:
        yield Text("No sweep was measured yet: measure with `zinfer sweep`, then write this report again.")
        yield Command("zinfer probe\nzinfer sweep --model bloom-176b --offload cpu\nzinfer report")
        return
    yield Table("The fastest configuration of each workload; tok/s counts the output of the whole batch.", HEADS, rows)
    decided: dict[tuple[str, str], WorkloadFindings] = {}
    for workload in findings.main:
        if alternatives(workload.points):
            decided.setdefault((workload.group.machine, workload.group.model), workload)
    yield Heading("Decision")
    for workload in decided.values():
        yield from _decision(workload, findings)
    if not decided:
        yield Text("Nothing is recommended: no alternative was measured.")
    tops = [(workload, top) for workload in findings.workloads if (top := rates.winner(workload.points))]
    risks = Counter(risk for workload, top in tops for risk in _risks(workload, top, findings))
    of = f" of {len(tops)} rows)" * (len(tops) > 1)
    yield Heading("Risks")
    yield Items([risk + f" ({count}{of}" * bool(of) for risk, count in risks.items()] or ("None known.",))
    yield Signature(("Reviewed by", "Date", "Signature"))


def alternatives(points: Points) -> tuple[Measurement, ...]:
    """Return a point of each configuration that the winner beat."""
    top = rates.winner(points)
    if top is None:
        return ()
    others = (load_points for load, load_points in by_load(points).items() if load != top.case.load)
    outcomes = (
        rates.best(load_points) or next((point for point in load_points if point.status.startswith("oom")), None)
        for load_points in others
    )
    return tuple(outcome for outcome in outcomes if outcome is not None)


def verdict(points: Points) -> str:
    """Return how the fastest configuration of a workload compares with its alternatives."""
    top, others = rates.winner(points), alternatives(points)
    if top is None:
        return f"no point succeeded: {rates.statuses(points)}"
    if not others:
        return "no alternative measured"
    ties, ran = rates.ties(points, top), sum(point.usable for point in others)
    if ties:
        return f"as fast as {counted(len(ties), 'other')} within the noise, of {len(others) + 1} configurations"
    if not ran:
        return f"the only one of {len(others) + 1} configurations that fits"
    lossy = ", lossy ones apart" * (not top.case.lossy and any(point.case.lossy for point in others))
    return f"fastest of {len(others) + 1} configurations{lossy}"


def _row(workload: WorkloadFindings) -> Row:
    group, top = workload.group, rates.winner(workload.points)
    if top is None:
        return Row((group.title, group.machine, *[""] * 4, verdict(workload.points)), "failed")
    name, first = top.case.batch_label + " (lossy)" * top.case.lossy, milliseconds(top.mean_ttft_ms)
    cells = rates.rate_text(top), first, _loads(workload, top), verdict(workload.points)
    return Row((group.title, group.machine, name, *cells))


def _request_rows(findings: Findings) -> Iterator[Row]:
    for group, points in groups(findings.requests).items():
        ranking = ranked(points)
        if not ranking:
            yield Row((group.title, group.machine, *[""] * 4, f"no load succeeded: {points[-1].status}"), "failed")
            continue
        top, times = ranking[0], ranking[0].point.summary("ttft_ms")
        against = f"fastest of {len(ranking)} configurations" if len(ranking) > 1 else "no alternative measured"
        if len(ranking) > 1 and top.differs(ranking[1]) is not True:
            against = f"first of {len(ranking)} configurations, its lead unsure"
        yield Row((
            group.title, group.machine, titled(top.point), figures(top.mean),
            "" if times is None else f"{duration(times.p50 / 1e3)} median", counted(len(top.rates), "load"), against,
        ))  # fmt: skip


def _loads(workload: WorkloadFindings, point: Measurement) -> str:
    loads, repeats = workload.loads.get(point.case, (0.0,)), counted(len(point.ttft_ms), "repeat")
    if len(loads) == 1:
        return f"single run, {repeats}"
    return f"{len(loads)} loads, {figures(min(loads))} to {figures(max(loads))} tok/s, {repeats} each"


def _decision(workload: WorkloadFindings, findings: Findings) -> Iterator[Block]:
    top = rates.winner(workload.points)
    assert top is not None  # it has alternatives
    case = top.case
    batch = f"at batch {case.workload.batch_size}: {rates.rate_text(top)} tok/s"
    lines = [f"{workload.name}: use {titled(top)} {batch}."]
    lines += filter(None, [rates.tied(workload.points, top)])
    lines += [verdict.text for verdict in rates.offload_verdicts(workload.points)[:1] if verdict.compares]
    other = rates.best(rates.lossy(workload.points))
    if other is not None and not case.lossy:
        lines.append(f"Lossy, apart: {rates.rate_text(other)} tok/s with {other.case.batch_label}; {rates.ACCURACY}.")
    if (usd := cost(top, findings.gpu_hour_usd).usd_per_mtok) is not None:
        day = usd * (top.output_tok_s or 0.0) * DAY_S / 1e6
        lines.append(f"Cost: {usd:,.2f} USD a million output tokens, {day:,.2f} USD a day at full load.")
    yield Items(lines)
    yield Command(commands(top)[1])


def _risks(workload: WorkloadFindings, point: Measurement, findings: Findings) -> Iterator[str]:
    group = workload.group
    if len(workload.loads.get(point.case, ())) < LOADS:
        yield f"Fewer than {LOADS} loads of the model: another load may differ."
    if len(point.ttft_ms) == 1:
        yield "One repeat: the noise is unknown."
    if group.load_format == "dummy":
        yield "Random weights (dummy): the speed is that of real ones, the text is not checked."
    if group.layers is not None:
        yield "A slice of the layers: the whole model is slower in proportion, and its memory and largest batch differ."
    if point.case.lossy:
        yield f"A lossy setting: {rates.ACCURACY}."
    if point.gpu.get("throttle_reasons"):
        yield "The driver held the GPU's clocks back."
    if point.effective is not None and point.effective.shortfall:
        yield f"Asked for and not done: {point.effective.shortfall}."
    if group.machine not in findings.machines:
        yield "The machine is not described: `zinfer probe` does it."


def _evidence(findings: Findings) -> Iterator[Block]:
    if findings.damaged:
        yield from (Heading("Lines left out"), Items(findings.damaged))
    tops = [rates.winner(workload.points) for workload in findings.workloads]
    served = [ranking[0].point for points in groups(findings.requests).values() if (ranking := ranked(points))]
    best: list[Point] = [*filter(None, tops), *served]
    again = dict.fromkeys(commands(point)[0] for point in best)
    yield from (Heading("To measure the best again"), Command("\n".join(["zinfer probe", *again])))
    if versions := _versions(findings.points):
        text = "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in versions.items())
        yield Text(f"Versions: {text}. Equal records give this report byte by byte.")


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
