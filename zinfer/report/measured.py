"""Sections of what was measured: the answer, the question, the machine, every point, and whether offload pays."""

from collections.abc import Sequence
from math import floor, log10

from zinfer.analysis import rates
from zinfer.analysis.group import Points, by_load
from zinfer.record.measurement import Measurement
from zinfer.report import figure
from zinfer.report.document import (
    Answer,
    Block,
    Command,
    Heading,
    Items,
    Kind,
    Links,
    Picture,
    Row,
    Section,
    Swatch,
    Table,
    Text,
)
from zinfer.report.plot import style
from zinfer.report.study import Findings, Study
from zinfer.spec.machine import FIGURES, Machine
from zinfer.spec.units import duration, gib

_NAMES = {
    "gpu_bytes": "GPU memory, usable, each",
    "host_bytes": "host memory, usable",
    "nvme_bytes": "disk, free",
    "hbm_bandwidth": "GPU memory, copy",
    "h2d_bandwidth": "link, host to GPU, page-locked",
    "d2h_bandwidth": "link, GPU to host, page-locked",
    "duplex_bandwidth": "link, each way, both at once",
    "pageable_bandwidth": "link, host to GPU, pageable",
    "host_bandwidth": "host memory, copy",
    "attention_bandwidth": "host memory, attention of the CPU",
    "grouped_attention_bandwidth": "host memory, attention of the CPU where eight heads share a key",
    "shared_attention_bandwidth": "host memory, attention of the CPU while the link copies",
    "shared_h2d_bandwidth": "link while the CPU attends",
    "nvme_bandwidth": "disk, read",
    "matmul_flops": "matrix product, bf16",
}


def answer(findings: Findings) -> Section:
    """The fastest configuration of each workload, with the command that runs it."""
    blocks: list[Block] = [_answer(study) for study in findings.studies]
    if not blocks:
        blocks = [
            Text("Nothing was measured yet: measure with `zinfer sweep`, then write this report again.", "missing"),
            Command("zinfer probe\nzinfer sweep --model bloom-176b --offload cpu\nzinfer report"),
        ]
    return Section("answer", "Answer", blocks)


def question(findings: Findings) -> Section:
    """What was run, on what, to learn what."""
    if not findings.studies:
        return Section("question", "Question and workload", [Text("No workload has a record.", "missing")])
    rows = []
    for study in findings.studies:
        group, points = study.group, study.points
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
        "of equal prompts is prefilled, then decoded to its full length; tokens a second count generated tokens over "
        "both."
    )
    return Section(
        "question", "Question and workload", [Text(words), Table("What was measured.", columns, tuple(rows))]
    )


def system(findings: Findings) -> Section:
    """The machines, their links as measured."""
    blocks: list[Block] = []
    for name in dict.fromkeys(study.group.machine for study in findings.studies):
        machine = findings.machines.get(name)
        blocks.append(Heading(name))
        if machine is None:
            blocks.append(Text("No description lies beside the results: `zinfer probe` writes one.", "missing"))
        else:
            blocks += _machine(machine)
    return Section("system", "System under test", blocks or [Text("No machine has a record.", "missing")])


def results(findings: Findings) -> Section:
    """Every point of every workload, with a figure."""
    blocks: list[Block] = []
    for study in findings.studies:
        blocks += [Heading(study.group.title), Text(f"{study.group.conditions}. Sweep: {study.sweep}.")]
        if study.group.caution:
            blocks.append(Text(study.group.caution, "caution"))
        blocks += _throughput(study.points)
        blocks.append(Links(study.figures))
        blocks += _points(study.points)
    return Section("results", "Results", blocks or [Text("No point was measured.", "missing")])


def offload(findings: Findings) -> Section:
    """What offload costs and gains, engine by engine."""
    blocks: list[Block] = []
    for study in findings.studies:
        blocks.append(Heading(study.group.title))
        verdicts = rates.offload_verdicts(study.points)
        lines = [f"{verdict.engine or 'Any engine'}: {verdict.words}" for verdict in verdicts]
        blocks.append(Items(tuple(lines)) if lines else Text("No point with offload was measured.", "missing"))
    return Section("offload", "Does offload pay?", blocks or [Text("No point was measured.", "missing")])


def rate(point: Measurement) -> tuple[str, str]:
    """Mean output tokens a second and half its 95% confidence interval, as text; empty where unknown."""
    spread = rates.spread(point.output_tok_s_samples) if point.usable else None
    if spread is None:
        return "", ""
    return rated(spread.mean), f"± {rated(spread.half_width, 2)}" if spread.half_width else ""


def rated(value: float, digits: int = 3) -> str:
    """`value` with that many significant digits, zeros at its end included, so that they align in a column: 76.0."""
    places = digits - 1 - floor(log10(value)) if value > 0 else 0
    return f"{round(value, places):,.{max(places, 0)}f}"


def named(point: Measurement) -> str:
    """``stream cpu, batch 64``."""
    return f"{point.case.label()}, batch {point.case.workload.batch_size}"


def _answer(study: Study) -> Answer:
    group, winner = study.group, rates.best(study.points)
    asked = f"{group.title} · {group.conditions}"
    if winner is None:
        return Answer(asked, "", "", f"No point succeeded: {rates.statuses(study.points)}.")
    waits = f"First token after {duration(sum(winner.ttft_ms) / len(winner.ttft_ms) / 1e3)}"
    if winner.tpot_ms:
        waits += f", each after it {duration(winner.tpot_ms / 1e3)}"
    spread = rate(winner)[1] or "one repeat, so its spread is unknown"
    lines = [f"{waits}. {spread[:1].upper()}{spread[1:]}{' tok/s at 95% confidence' * spread.startswith('±')}."]
    lines += [verdict.words for verdict in rates.offload_verdicts(study.points)[:1]]
    return Answer(asked, rate(winner)[0], "tok/s", named(winner), tuple(lines), rates.command(winner.case))


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
            value, _, source = machine.told(field).partition(" (")
            rows.append(Row((_NAMES.get(field, field), value, source.removesuffix(")"))))
    if machine.gpu_count and machine.coherent:
        rows.append(Row(("link, kind", "cache-coherent", machine.source)))
    rows += [Row((name, value, "read")) for name, value in _details(machine)]
    missing = [_NAMES.get(field, field) for field in FIGURES if not getattr(machine, field)]
    blocks: list[Block] = [
        Table("What the machine has, and where each figure is from.", ("", "#", "source"), tuple(rows))
    ]
    if missing:
        blocks.append(Text(f"{', '.join(missing)}: `zinfer probe` finds out what it can.", "missing"))
    return blocks


def _details(machine: Machine) -> list[tuple[str, str]]:
    """What the probe read from the system, where it is plain."""
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


def _throughput(points: Points) -> list[Block]:
    """Curves over batch size, or bars where only one batch was timed."""
    timed = [point for point in points if point.usable]
    if not timed:
        return [Text(f"No figure: no point succeeded ({rates.statuses(points)}).", "missing")]
    lines = _lines(points)
    if len({point.case.workload.batch_size for point in timed}) > 1:
        title = "Output tokens a second over batch size; × ran out of memory, + failed otherwise."
        told = [
            f"{line.label}: {'; '.join(f'batch {s}, {rated(v)} tok/s' for s, v, _ in line.points)}" for line in lines
        ]
        words = f"{title} {'. '.join(told)}."
        drawn = [figure.curves(lines, width, words) for width in (figure.WIDE, figure.NARROW)]
        legend = tuple(Swatch(figure.swatch(line), line.label) for line in lines)
        return [Picture(f"{title} A hollow sign: no offload.", words, drawn[0], drawn[1], legend)]
    bars = [
        figure.Bar(line.label, ((value, line.colour),), f"{rated(value)} tok/s", band=half or 0.0)
        for line in lines
        for _, value, half in line.points
    ]
    title = f"Output tokens a second at batch {timed[0].case.workload.batch_size}."
    words = f"{title} {'; '.join(f'{bar.label}: {bar.text}' for bar in bars)}."
    drawn = [figure.bars(bars, width, words) for width in (figure.WIDE, figure.NARROW)]
    return [Picture(title, words, drawn[0], drawn[1])]


def _lines(points: Points) -> list[figure.Line]:
    loads = by_load(points)
    edges = {edge.load: edge.smallest_oom for edge in rates.edges(points)}
    lines = []
    for load, look in style.series(loads).items():
        known = [
            (point.case.workload.batch_size, spread.mean, spread.half_width)
            for point in loads[load]
            if point.usable and (spread := rates.spread(point.output_tok_s_samples))
        ]
        failed = [
            (size, "×" if point.status.startswith("oom") else "+")
            for point in loads[load]
            if point.status != "ok"
            and ((size := point.case.workload.batch_size) == edges[load] or not point.status.startswith("oom"))
        ]
        hollow = load.offload == "none"
        lines.append(figure.Line(look["label"], look["color"], look["marker"], hollow, tuple(known), tuple(failed)))
    return lines


def _points(points: Points) -> list[Block]:
    winner = rates.best(points)
    columns = (
        "configuration", "#batch", "#tok/s", "#95% interval", "#first token", "#each after", "#of the link",
        "#GPU peak", "#host peak", "outcome",
    )  # fmt: skip
    rows = tuple(Row(_cells(point), _kind(point, winner)) for point in points)
    blocks: list[Block] = [Table("Every point. Peaks are of memory that tensors and processes held.", columns, rows)]
    failures = _failures(points)
    if failures:
        heads = ("configuration", "#batch", "outcome", "in", "what it said")
        blocks.append(Table("What failed, and how the smallest such batch ended.", heads, failures))
    return blocks


def _kind(point: Measurement, winner: Measurement | None) -> Kind:
    return "best" if point is winner else "" if point.status == "ok" else "failed"


def _cells(point: Measurement) -> tuple[str, ...]:
    ok = point.usable
    return (
        point.case.label(),
        str(point.case.workload.batch_size),
        *rate(point),
        duration(sum(point.ttft_ms) / len(point.ttft_ms) / 1e3) if ok else "",
        duration(point.tpot_ms / 1e3) if ok and point.tpot_ms else "",
        f"{point.link_share:.0%}" if ok and point.link_share else "",
        gib(point.gpu_peak_bytes) if point.gpu_peak_bytes else "",
        gib(point.host_peak_bytes) if point.host_peak_bytes else "",
        _outcome(point),
    )


def _failures(points: Points) -> tuple[Row, ...]:
    """Failed points of one load, status and stage in one row."""
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
