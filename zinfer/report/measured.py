"""Sections about measurements: the answer, the question, the machine and its studies, every point, the traced steps,
and whether offload pays."""

from collections.abc import Iterator, Sequence
from math import floor, log10

from zinfer.analysis import rates, reproduce, study
from zinfer.analysis.best import known_cost
from zinfer.analysis.economics import DAY_S
from zinfer.analysis.group import Points, by_load
from zinfer.analysis.timeline import busy, busy_bandwidth, by_rank, hidden_share, length_ms, share, waits
from zinfer.core.machine import FIGURES, Machine
from zinfer.core.units import duration, gib
from zinfer.plan.published import PublishedCodec, codecs
from zinfer.record.measurement import Lane, Measurement, Span
from zinfer.record.study import Deviation, Study
from zinfer.report import requests
from zinfer.report.document import (
    Block,
    Command,
    Details,
    Heading,
    Items,
    Kind,
    Links,
    Picture,
    Plain,
    Recommendation,
    Row,
    Section,
    Signature,
    Table,
    Text,
)
from zinfer.report.findings import Findings, WorkloadFindings
from zinfer.report.plot import figures, style

_NAMES = {
    "gpu_bytes": "GPU memory, usable, each",
    "host_bytes": "host memory, usable",
    "nvme_bytes": "disk, free",
    "hbm_bandwidth": "GPU memory, copy",
    "h2d_bandwidth": "link, host to GPU, page-locked",
    "d2h_bandwidth": "link, GPU to host, page-locked",
    "duplex_bandwidth": "link, each way, both at once",
    "links_bandwidth": "links of all GPUs together, host to GPU, page-locked",
    "gather_bandwidth": "GPU to GPU, what each gets while all exchange",
    "pageable_bandwidth": "link, host to GPU, pageable",
    "host_bandwidth": "host memory, copy",
    "attention_bandwidth": "host memory, attention of the CPU",
    "grouped_attention_bandwidth": "host memory, attention of the CPU where eight heads share a key",
    "shared_attention_bandwidth": "host memory, attention of the CPU while the link copies",
    "shared_h2d_bandwidth": "link while the CPU attends",
    "nvme_bandwidth": "disk, read",
    "matmul_flops": "matrix product, bf16",
}


_COLUMNS = (
    "configuration", "#batch", "#tok/s", "#95% interval", "#prefill tok/s", "#decode tok/s", "#TTFT", "#TPOT",
    "#link share", "#GPU peak", "#host peak",
)  # fmt: skip
LOADS = 3  # loads of the model that a headline needs behind it, not to be called a single run


def answer(findings: Findings) -> Section:
    """Return the first page: a card for each whole model and machine, a table of the slices, and a place to sign.

    Where only slices were measured, they have the cards.
    """
    cards: dict[tuple[str, str], list[WorkloadFindings]] = {}
    for workload in findings.main:
        cards.setdefault((workload.group.machine, workload.group.model), []).append(workload)
    blocks: list[Block] = [_card(workloads, findings) for workloads in cards.values()]
    if not blocks:
        blocks = [
            Text("No sweep was measured yet: measure with `zinfer sweep`, then write this report again.", "missing"),
            Command("zinfer probe\nzinfer sweep --model bloom-176b --offload cpu\nzinfer report"),
        ]
    blocks.append(Signature(("Reviewed by", "Date", "Signature")))
    if findings.slices:
        blocks += [Heading("Slices: the first layers of a model"), _slices(findings.slices)]
    return Section("answer", "Answer", blocks)


def question(findings: Findings) -> Section:
    """Return the section with the workloads that were run and the question that they answer."""
    if not findings.workloads:
        return Section("question", "Question and workload", [Text("No workload has a record.", "missing")])
    rows = []
    for workload in findings.workloads:
        group, points = workload.group, workload.points
        sizes = sorted({point.case.workload.batch_size for point in points})
        timed, fitted = _count(points, "timed"), _count(points, "fits, not timed")
        rows.append(
            Row(
                (
                    group.model_name,
                    "all" if group.layers is None else f"{group.layers} of {group.total_layers or '?'}",
                    f"{group.input_len} / {group.output_len}",
                    f"{group.dtype}, {'dummy' if group.load_format == 'dummy' else 'checkpoint'}",
                    ", ".join(load.label() for load in by_load(points)),
                    _range(sizes),
                    str(timed),
                    str(fitted),
                    str(len(points) - timed - fitted),
                )
            )
        )
    columns = (
        "model", "#layers", "#tokens in / out", "weights", "configurations", "#batch", "#timed", "#only tried",
        "#failed",
    )  # fmt: skip
    words = (
        "Which engine, at which batch size, with the weights in which memory, gives the most tokens a second? A batch "
        "of equal prompts is prefilled, then decoded to its full length; tok/s counts generated tokens over both. "
        "TTFT is the time to the first token, TPOT the time per token after it. In the name of a configuration `none` "
        "means weights on the GPU, `cpu` weights in host memory, `nvme` weights on disk: the GPU computes in each."
    )
    return Section(
        "question", "Question and workload", [Text(words), Table("Measured points by workload.", columns, tuple(rows))]
    )


def system(findings: Findings) -> Section:
    """Return the section on the machines, with their links as measured and the studies made on them."""
    blocks: list[Block] = []
    for name in dict.fromkeys(workload.group.machine for workload in findings.workloads):
        machine = findings.machines.get(name)
        blocks.append(Heading(name))
        if machine is None:
            blocks.append(Text("No description lies beside the results: `zinfer probe` writes one.", "missing"))
        else:
            blocks += _machine(machine)
    if not blocks:
        blocks.append(Text("No machine has a record.", "missing"))
    return Section("system", "System under test", [*blocks, *_studies(findings)])


def results(findings: Findings) -> Section:
    """Return the section with each workload's throughput, the best point of each configuration, and every point."""
    blocks: list[Block] = []
    for workload in (*findings.main, *findings.slices):
        blocks += [Heading(workload.name), Text(f"{workload.group.conditions}. Sweep: {workload.sweep}.")]
        drawn, every = (_throughput(workload), Links(workload.figures)), _points(workload)
        if workload in findings.slices:
            blocks += [_tops(workload), *_losses(workload, findings)]
            blocks.append(Details(f"Figure and every point: {workload.name}", (*drawn, *every)))
        else:
            blocks += [*drawn, _tops(workload), *_losses(workload, findings)]
            blocks.append(Details(f"Every point: {workload.name}", every))
        if workload.group.caution:
            blocks.append(Text(workload.group.caution, "caution"))
    blocks += requests.section(findings.requests)
    return Section("results", "Results", blocks or [Text("No point was measured.", "missing")])


def offload(findings: Findings) -> Section:
    """Return the section on the cost and the gain of offload, engine by engine."""
    blocks: list[Block] = []
    for workload in (*findings.main, *findings.slices):
        blocks.append(Heading(workload.name))
        verdicts = rates.offload_verdicts(workload.points)
        lines = [f"{verdict.engine or 'Any engine'}: {verdict.text}" for verdict in verdicts]
        blocks.append(Items(tuple(lines)) if lines else Text("No point with offload was measured.", "missing"))
    return Section("offload", "Does offload pay?", blocks or [Text("No point was measured.", "missing")])


def link_waits(findings: Findings) -> tuple[Block, ...]:
    """Return a table for each workload with traced points: the parts of a decode step's time."""
    tables: list[Plain] = []
    for workload in findings.workloads:
        if points := rates.best_by_load([point for point in workload.points if busy(point.timeline, "copy")]):
            lanes = _lanes(points)
            columns = (
                "configuration", "#batch", "#traced", "#timed", *(_LANES[lane] for lane in lanes), "#link waits",
                "#busy link",
            )  # fmt: skip
            caption = (
                f"{workload.name}: when the link waits. One decode step, traced after the timed ones, at each "
                "configuration's own best batch. While the link does not wait, it carries bytes."
            )
            if "gather" in lanes:
                caption += " In brackets: the share of the gathers that the link works beside."
            tables.append(Table(caption, columns, tuple(row for point in points for row in _steps(point, lanes))))
    return (Details("One traced decode step of each configuration", tuple(tables)),) if tables else ()


def rate(point: Measurement) -> tuple[str, str]:
    """Return mean output tokens a second and half its 95% confidence interval, as text; empty where unknown."""
    spread = rates.spread(point.output_tok_s_samples) if point.usable else None
    if spread is None:
        return "", ""
    return rated(spread.mean), f"± {rated(spread.half_width, 2)}" if spread.half_width else ""


def phases(point: Measurement) -> tuple[str, str]:
    """Return prompt tokens a second of the prefill, and output tokens a second of the decode steps, as text; empty
    where unknown."""
    prefill, decode = (point.prefill_tok_s, point.decode_tok_s) if point.usable else (None, None)
    return rated(prefill) if prefill else "", rated(decode) if decode else ""


def rated(value: float, digits: int = 3) -> str:
    """Return `value` with that many significant digits, also where they are zeros, to align in a column: 76.0."""
    places = digits - 1 - floor(log10(value)) if value > 0 else 0
    return f"{round(value, places):,.{max(places, 0)}f}"


def named(point: Measurement) -> str:
    """Return the point's name, as in ``stream cpu, batch 64``."""
    return f"{point.case.label()}, batch {point.case.workload.batch_size}"


def titled(point: Measurement) -> str:
    """Return the name of the point's configuration in a table that ranks; lossy ones are marked."""
    return point.case.label() + " (lossy)" * point.case.lossy


def _card(workloads: Sequence[WorkloadFindings], findings: Findings) -> Recommendation:
    """Return the card of one model on one machine: the first pair of lengths in large, the others in a line each."""
    first = next((one for one in workloads if rates.winner(one.points)), workloads[0])
    group, winner = first.group, rates.winner(first.points)
    part = "" if group.layers is None else f", {group.layers} of {group.total_layers or '?'} layers"
    asked = f"{group.model_name}{part} on {group.machine}"
    if winner is None:
        return Recommendation(asked, "", "", f"No point succeeded: {rates.statuses(first.points)}.")
    waits = f"TTFT {duration(sum(winner.ttft_ms) / len(winner.ttft_ms) / 1e3)}"
    if winner.tpot_ms:
        waits += f", TPOT {duration(winner.tpot_ms / 1e3)}"
    facts = [
        ("Measured", f"{lengths(first)}, {group.dtype}: {waits}. {_evidence(first, winner)}."),
        *(("Offload", verdict.text) for verdict in rates.offload_verdicts(first.points)[:1] if _judged(verdict)),
        *_apart(first, winner, findings),
        *_costs(winner, findings),
        ("Risks", "; ".join(_risks(first, winner, findings)) or "none known"),
    ]
    for other in workloads:
        if other is not first:
            top = rates.winner(other.points)
            told = "no point succeeded"
            if top is not None:
                told = f"{rate(top)[0]} tok/s{_single(other, top)}: {named(top)}" + " (lossy)" * top.case.lossy
            facts.append((lengths(other), told))
    where = {"none": "on the GPU", "cpu": "in host memory", "nvme": "on the drive"}[winner.case.offload]
    size = winner.case.workload.batch_size
    lines = [f"Recommended: engine {winner.case.engine} with the weights {where}, at batch {size}."]
    if tied := rates.tied(first.points, winner):
        lines.append(tied)
    unit = f"tok/s{_single(first, winner)}"
    use = reproduce.batch_command(winner.case)
    return Recommendation(asked, rate(winner)[0], unit, named(winner), tuple(lines), tuple(facts), use)


def lengths(workload: WorkloadFindings) -> str:
    """Return the tokens of a prompt and of an answer: ``512 in / 32 out``."""
    return f"{workload.group.input_len} in / {workload.group.output_len} out"


def _judged(verdict: rates.OffloadVerdict) -> bool:
    """Return whether points with and without offload were tried, so that the verdict compares something."""
    return verdict.comparison.change is not None or "failed" in verdict.text


def _single(workload: WorkloadFindings, point: Measurement) -> str:
    """Return the words for a headline with fewer than three loads of the model behind it."""
    loads = len(workload.loads.get(point.case, (0.0,)))
    return "" if loads >= LOADS else ", single run" if loads == 1 else f", {loads} single runs"


def _evidence(workload: WorkloadFindings, point: Measurement) -> str:
    found = workload.loads.get(point.case, (point.output_tok_s or 0.0,))
    repeats, spread = len(point.ttft_ms), rate(point)[1]
    noise = f"{spread} tok/s at 95% confidence" if spread else "noise unknown"
    own = f"{repeats} repeat{'s' * (repeats > 1)} in one load, {noise}"
    if len(found) == 1:
        return f"Single run: {own}"
    return f"{len(found)} loads of the model, {rated(min(found))} to {rated(max(found))} tok/s; the last: {own}"


def _apart(workload: WorkloadFindings, winner: Measurement, findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield the fastest lossy setting, which is ranked apart."""
    other = rates.best(rates.lossy(workload.points))
    if other is not None and not winner.case.lossy:
        yield (
            "Lossy, apart",
            f"{rate(other)[0]} tok/s: {named(other)}; "
            + (_loss(other, findings) or "`zinfer study accuracy` tells how far its text differs"),
        )


def _loss(point: Measurement, findings: Findings) -> str:
    """Return how far the point's lossy settings change the output of its model, as measured; empty if they were not."""
    for run in _accuracies(findings):
        for one in study.deviations(run, point.case):
            share = f"{one.agreement:.2%} of {one.positions:,} positions"
            return f"`zinfer study accuracy`: the same most likely token at {share}"
    return ""


def _accuracies(findings: Findings) -> list[Study]:
    return [run for run in findings.studies if run.study == "accuracy"]


def _losses(workload: WorkloadFindings, findings: Findings) -> Iterator[Table]:
    """Yield the measured accuracy of the workload's lossy settings."""
    cases = [point.case for point in rates.lossy(workload.points)]
    for run in _accuracies(findings):
        found = [one for one in run.of(Deviation) if any(one in study.deviations(run, case) for case in cases)]
        if found:
            shown = study.show(run)
            caption = f"{workload.name}: accuracy of the lossy settings. {shown.title}."
            yield Table(caption, shown.columns, tuple(map(Row, study.accuracy_cells(run, found))))


def _costs(point: Measurement, findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield the cost of a million tokens, and of a day at full load, where prices were given."""
    found = known_cost(point, findings.prices)
    if findings.prices.known and found.usd_per_mtok is None:
        yield "Cost", "unknown: energy has a price and was not measured"
    elif found.usd_per_mtok is not None:
        tokens = (point.output_tok_s or 0.0) * DAY_S / 1e6
        day = f"{found.usd_per_mtok * tokens:,.2f} USD a day, at full load {rated(tokens)} million output tokens"
        yield "Cost", f"{found.usd_per_mtok:,.2f} USD a million output tokens; {day}"


def _risks(workload: WorkloadFindings, point: Measurement, findings: Findings) -> Iterator[str]:
    """Yield what speaks against relying on the headline."""
    group = workload.group
    if len(workload.loads.get(point.case, ())) < LOADS:
        repeats = "one repeat" if len(point.ttft_ms) == 1 else f"{len(point.ttft_ms)} repeats"
        yield f"fewer than {LOADS} loads with {repeats} each, and another load may differ"
    if group.load_format == "dummy":
        yield "random weights (dummy): the text is not checked"
    if group.layers is not None:
        yield "a slice: the whole model is slower and its memory differs"
    if point.case.lossy:
        yield f"a lossy setting: {_loss(point, findings) or 'check the text with `zinfer study accuracy`'}"
    if point.gpu.get("throttle_reasons"):
        yield "the driver held the GPU's clocks back"
    if point.effective is not None and point.effective.shortfall:
        yield f"asked for and not done: {point.effective.shortfall}"
    if workload.machine is None:
        yield "the machine is not described"


def _slices(workloads: Sequence[WorkloadFindings]) -> Table:
    """Return a table with the fastest configuration of each slice."""
    rows = []
    for workload in workloads:
        group, winner = workload.group, rates.winner(workload.points)
        asked = (
            f"{group.model_name}, {group.layers} of {group.total_layers or '?'} layers; {group.machine}",
            f"{group.input_len} / {group.output_len}",
        )  # fmt: skip
        if winner is None:
            rows.append(Row((*asked, f"none: {rates.statuses(workload.points)}", *[""] * 6), "failed"))
            continue
        gains = [one.comparison.change for one in rates.offload_verdicts(workload.points)]
        gain = next((change.times for change in gains if change is not None), "")
        runs = len(workload.loads.get(winner.case, (0.0,)))
        first = duration(sum(winner.ttft_ms) / len(winner.ttft_ms) / 1e3)
        cells = (
            titled(winner), str(winner.case.workload.batch_size), " ".join(rate(winner)).strip(),
            " / ".join(filter(None, phases(winner))),
            f"{first} / {duration(winner.tpot_ms / 1e3)}" if winner.tpot_ms else first, gain,
            "single run" if runs == 1 else f"{runs} loads",
        )  # fmt: skip
        rows.append(Row((*asked, *cells)))
    columns = (
        "model; machine", "#tokens in / out", "fastest configuration", "#batch", "#tok/s",
        "#prefill / decode tok/s", "#TTFT / TPOT", "offload against none", "evidence",
    )  # fmt: skip
    caption = (
        "A slice shows which configuration is the fastest. Its throughput and its memory are not the model's: a step "
        "of the whole model takes longer in proportion to its layers, and its largest batch is another."
    )
    return Table(caption, columns, tuple(rows))


def _count(points: Points, outcome: str) -> int:
    return sum(_outcome(point) == outcome for point in points)


def _outcome(point: Measurement) -> str:
    if point.usable:
        return "timed"
    return "fits, not timed" if point.status == "ok" else point.status


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _machine(machine: Machine) -> list[Block]:
    gpu = f"{machine.gpu_count} × {machine.gpu_name}" if machine.gpu_count else "none: the CPU is the device"
    rows = [Row(("GPU", gpu, machine.source))]
    for field in FIGURES:
        if getattr(machine, field):
            value, _, source = machine.describe(field).partition(" (")
            rows.append(Row((_NAMES.get(field, field), value, source.removesuffix(")"))))
    if machine.gpu_count and machine.coherent:
        rows.append(Row(("link, kind", "cache-coherent", machine.source)))
    rows += [Row((name, value, "read")) for name, value in _details(machine)]
    several = machine.gpu_count > 1
    known = [field for field in FIGURES if several or field not in ("links_bandwidth", "gather_bandwidth")]
    missing = [_NAMES.get(field, field) for field in known if not getattr(machine, field)]
    blocks: list[Block] = [
        Table(f"{machine.name}: capacities and rates, and the source of each.", ("", "#", "source"), tuple(rows))
    ]
    if missing:
        blocks.append(Text(f"{', '.join(missing)}: `zinfer probe` finds out what it can.", "missing"))
    return blocks


def _details(machine: Machine) -> list[tuple[str, str]]:
    """Return facts that the probe read from the system, as far as they are known."""
    gpu, host = (found if isinstance(found := machine.details.get(key), dict) else {} for key in ("gpu", "host"))
    told = {
        "PCIe": f"generation {gpu.get('pcie_generation')}, {gpu.get('pcie_width')} lanes"
        if "pcie_width" in gpu
        else "",
        "power limit": f"{gpu['power_limit_w']:g} W" if isinstance(gpu.get("power_limit_w"), int | float) else "",
        "driver": str(gpu.get("driver") or ""),
        "CPU": str(host.get("cpu") or ""),
        "CPU cores, NUMA nodes": f"{host['cores']}, {host.get('numa_nodes', '?')}" if "cores" in host else "",
        "torch": str(machine.details.get("torch") or ""),
    }
    return [(name, value) for name, value in told.items() if value]


def _studies(findings: Findings) -> Iterator[Block]:
    """Yield each study as measured on each machine, and the codecs that others published."""
    for run in findings.studies:
        shown = study.show(run)
        heading = f"{shown.subject}, {run.machine}"
        yield Heading(heading)
        caption = f"{shown.title}. Measured by zinfer study {run.study} on {run.device}. {shown.method}"
        failed = study.wrong(run)
        rows = tuple(Row(cells, "failed" if cells[0] in failed else "") for cells in shown.cells)
        yield Details(heading, (Table(caption, shown.columns, rows),))
        yield Items(shown.notes)
    if any(run.study == "codec" for run in findings.studies):
        others = tuple(Row(one.cells) for one in codecs())
        caption = "Published by others, not measured here."
        yield Details("Codecs of others", (Table(caption, PublishedCodec.columns, others),))


def _throughput(workload: WorkloadFindings) -> Plain:
    """Return the figure of throughput over batch size, as `zinfer plot` draws it."""
    drawn = figures.draw(workload.group, workload.points, ("throughput",))
    if not drawn:
        return Text(f"No figure: no point succeeded ({rates.statuses(workload.points)}).", "missing")
    found = [
        f"{load.label()}: {'; '.join(f'batch {p.case.workload.batch_size}, {rate(p)[0]} tok/s' for p in own)}"
        for load, points in by_load(workload.points).items()
        if (own := [point for point in points if point.usable])
    ]
    title = "Output tok/s over batch size; × ran out of memory, + failed otherwise. A hollow sign: no offload."
    return Picture(title, f"{title} {'. '.join(found)}.", style.render(drawn["throughput"], "svg").decode())


def _tops(workload: WorkloadFindings) -> Table:
    """Return a table of each configuration at its own best batch, and where its memory ends."""
    winner = rates.winner(workload.points)
    edges = {edge.load: edge for edge in rates.edges(workload.points)}
    rows = []
    for point in rates.ranked(workload.points):
        cells = _cells(point)[1:-1]
        end = str(edges[point.case.load].smallest_oom or "")
        rows.append(Row((titled(point), *cells, end), _kind(point, winner)))
    caption = f"{workload.name}: each configuration at its own best batch" + (
        "; lossy settings last, see `zinfer study accuracy`." if rates.lossy(workload.points) else "."
    )
    return Table(caption, (*_COLUMNS, "#OOM at"), tuple(rows))


def _points(workload: WorkloadFindings) -> tuple[Plain, ...]:
    winner = rates.winner(workload.points)
    rows = tuple(Row(_cells(point), _kind(point, winner)) for point in workload.points)
    caption = f"{workload.name}: every point. Peaks are of memory that tensors and processes held."
    blocks: list[Plain] = [Table(caption, (*_COLUMNS, "outcome"), rows)]
    failures = _failures(workload.points)
    if failures:
        heads = ("configuration", "#batch", "outcome", "in", "message")
        caption = f"{workload.name}: failed points, and how the smallest such batch ended."
        blocks.append(Table(caption, heads, failures))
    return tuple(blocks)


def _kind(point: Measurement, winner: Measurement | None) -> Kind:
    return "best" if point is winner else "" if point.status == "ok" else "failed"


def _cells(point: Measurement) -> tuple[str, ...]:
    ok = point.usable
    return (
        point.case.label(),
        str(point.case.workload.batch_size),
        *rate(point),
        *phases(point),
        duration(sum(point.ttft_ms) / len(point.ttft_ms) / 1e3) if ok else "",
        duration(point.tpot_ms / 1e3) if ok and point.tpot_ms else "",
        f"{point.link_share:.0%}" if ok and point.link_share else "",
        gib(point.gpu_peak_bytes) if point.gpu_peak_bytes else "",
        gib(point.host_peak_bytes) if point.host_peak_bytes else "",
        _outcome(point),
    )


def _failures(points: Points) -> tuple[Row, ...]:
    """Return a row for the failed points that share load, status and stage."""
    found: dict[tuple[str, str, str], list[Measurement]] = {}
    for point in points:
        if point.status != "ok":
            found.setdefault((point.case.label(), point.status, point.stage or ""), []).append(point)
    rows = []
    for (label, status, stage), own in found.items():
        sizes = [str(point.case.workload.batch_size) for point in own]
        said = " ".join((own[0].error or "").split())
        rows.append(Row((label, ", ".join(sizes), status, stage, said if len(said) <= 160 else f"{said[:159]}…")))
    return tuple(rows)


_LANES: dict[Lane, str] = {
    "disk": "#disk busy", "copy": "#link busy", "gather": "#gathering", "unpack": "#unpacking", "compute": "#computing",
}  # fmt: skip


def _lanes(points: Points) -> list[Lane]:
    """Return the lanes of a table of traced steps; those of disk and gathers are among them if there were any."""
    seldom = ("disk", "gather")
    return [lane for lane in _LANES if lane not in seldom or any(busy(point.timeline, lane) for point in points)]


def _steps(point: Measurement, lanes: Sequence[Lane]) -> Iterator[Row]:
    """Yield a row for each GPU of a traced point."""
    several = len(ranks := by_rank(point.timeline)) > 1
    for spans in ranks:
        bandwidth = busy_bandwidth(point, spans)
        yield Row((
            point.case.label() + (f", GPU {spans[0].rank}" if several else ""),
            str(point.case.workload.batch_size),
            f"{length_ms(spans):,.1f} ms",
            f"{point.step_median_ms:,.1f} ms" if point.step_median_ms else "",
            *(_busy(spans, lane) for lane in lanes),
            f"{waits(spans).total_ms:,.2f} ms",
            f"{bandwidth / 1e9:.1f} GB/s" if bandwidth else "unknown",
        ))  # fmt: skip


def _busy(spans: Sequence[Span], lane: Lane) -> str:
    """Return a lane's share of a step; of gathers also the part beside which the link works."""
    found = share(spans, lane)
    if lane != "gather":
        return f"{found:.1%}"
    return f"{found:.1%} ({hidden_share(spans, lane):.0%})" if found else ""
