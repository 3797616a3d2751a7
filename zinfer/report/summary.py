"""Executive summary: a row for each workload, decision, risks, signature."""

from collections import Counter
from collections.abc import Iterator

from zinfer.analysis import rates, reproduce, study
from zinfer.analysis.economics import DAY_S, cost
from zinfer.analysis.group import Points, by_load
from zinfer.analysis.requests import groups, ranked
from zinfer.core.units import counted, duration
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Command, Heading, Items, Row, Section, Signature, Table, Text, section
from zinfer.report.findings import Findings, WorkloadFindings
from zinfer.report.measured import rate, rated, titled

LOADS = 3  # loads of the model that a result needs behind it, not to be called a single run
COLUMNS = ("model", "machine", "configuration", "#tok/s", "#TTFT", "evidence", "verdict")


def summary(findings: Findings) -> Section:
    """Return the executive summary; without a workload, the commands that measure one."""
    rows = (*map(_row, findings.ordered), *_request_rows(findings))
    if not rows:
        text = Text("No sweep was measured yet: measure with `zinfer sweep`, then write this report again.")
        commands = Command("zinfer probe\nzinfer sweep --model bloom-176b --offload cpu\nzinfer report")
        return section("summary", "Summary", (text, commands))
    caption = "The fastest configuration of each workload; tok/s counts the output of the whole batch."
    decided: dict[tuple[str, str], WorkloadFindings] = {}
    for workload in findings.main:
        if alternatives(workload.points):
            decided.setdefault((workload.group.machine, workload.group.model), workload)
    blocks: list[Block] = [Table(caption, COLUMNS, rows), Heading("Decision")]
    for workload in decided.values():
        blocks += _decision(workload, findings)
    if not decided:
        blocks.append(Text("Nothing is recommended: no alternative was measured."))
    blocks += [Heading("Risks"), Items(_risks(findings) or ("None known.",))]
    return section("summary", "Summary", (*blocks, Signature(("Reviewed by", "Date", "Signature"))))


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
    tok_s, first = " ".join(rate(top)).strip(), duration((top.mean_ttft_ms or 0.0) / 1e3)
    name = top.case.batch_label + " (lossy)" * top.case.lossy
    return Row((group.title, group.machine, name, tok_s, first, _loads(workload, top), verdict(workload.points)))


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
            group.title, group.machine, titled(top.point), rated(top.mean),
            "" if times is None else f"{duration(times.p50 / 1e3)} median", counted(len(top.rates), "load"), against,
        ))  # fmt: skip


def _loads(workload: WorkloadFindings, point: Measurement) -> str:
    loads, repeats = workload.loads.get(point.case, (0.0,)), counted(len(point.ttft_ms), "repeat")
    if len(loads) == 1:
        return f"single run, {repeats}"
    return f"{len(loads)} loads, {rated(min(loads))} to {rated(max(loads))} tok/s, {repeats} each"


def _decision(workload: WorkloadFindings, findings: Findings) -> Iterator[Block]:
    top = rates.winner(workload.points)
    assert top is not None  # it has alternatives
    case = top.case
    lines = [
        f"{workload.name}: use {titled(top)} at batch {case.workload.batch_size}: {' '.join(rate(top)).strip()} tok/s."
    ]
    lines += filter(None, [rates.tied(workload.points, top)])
    lines += [verdict.text for verdict in rates.offload_verdicts(workload.points)[:1] if verdict.compares]
    other = rates.best(rates.lossy(workload.points))
    if other is not None and not case.lossy:
        lines.append(f"Lossy, apart: {rate(other)[0]} tok/s with {other.case.batch_label}; {loss(other, findings)}.")
    if (usd := cost(top, findings.gpu_hour_usd).usd_per_mtok) is not None:
        day = usd * (top.output_tok_s or 0.0) * DAY_S / 1e6
        lines.append(f"Cost: {usd:,.2f} USD a million output tokens, {day:,.2f} USD a day at full load.")
    yield Items(tuple(lines))
    yield Command(reproduce.commands(top)[1])


def loss(point: Measurement, findings: Findings) -> str:
    """Return what is known of the loss by lossy settings."""
    for run in findings.studies:
        for deviation in study.deviations(run, point.case) if run.study == "accuracy" else ():
            return f"the same most likely token at {deviation.agreement:.2%} of {deviation.positions:,} positions"
    return "`zinfer study accuracy` tells how far its text differs"


def _risks(findings: Findings) -> tuple[str, ...]:
    rows = [(workload, top) for workload in findings.workloads if (top := rates.winner(workload.points))]
    counts = Counter(risk for workload, top in rows for risk in _risks_of(workload, top, findings))
    return tuple(risk + (f" ({count} of {len(rows)} rows)" if len(rows) > 1 else "") for risk, count in counts.items())


def _risks_of(workload: WorkloadFindings, point: Measurement, findings: Findings) -> Iterator[str]:
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
        yield f"A lossy setting: {loss(point, findings)}."
    if point.gpu.get("throttle_reasons"):
        yield "The driver held the GPU's clocks back."
    if point.effective is not None and point.effective.shortfall:
        yield f"Asked for and not done: {point.effective.shortfall}."
    if workload.machine is None:
        yield "The machine is not described: `zinfer probe` does it."
