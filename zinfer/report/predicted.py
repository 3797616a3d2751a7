"""Sections of what was not measured: memory by what it is for, the bottleneck, and other machines.

Predictions come from `zinfer.analysis.calibrate`: the physics of a pass and a few factors an engine, fitted to these
records. Whatever stands here is drawn pale and named predicted.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from zinfer.analysis import calibrate, rates
from zinfer.analysis.group import by_load
from zinfer.plan.cost import Bytes, Efficiency
from zinfer.plan.plan import Plan, make_plan
from zinfer.plan.search import advice, best_batch
from zinfer.record.measurement import Measurement
from zinfer.report import figure
from zinfer.report.document import Block, Heading, Items, Picture, Row, Section, Swatch, Table, Text
from zinfer.report.measured import named, rate, rated
from zinfer.report.plot.style import PALETTE
from zinfer.report.study import Findings, Study, shape
from zinfer.spec import machine
from zinfer.spec.case import Case
from zinfer.spec.machine import Machine
from zinfer.spec.model import ModelSpec
from zinfer.spec.units import duration, gb, gib

MACHINES = ("a100-80gb", "h100-80gb", "h200", "gh200-96gb", "b200")
# what memory is for -> its colour
_PARTS = {
    "weights": PALETTE[0],
    "kv_cache": PALETTE[5],
    "buffers": PALETTE[2],
    "activations": PALETTE[3],
    "overhead": PALETTE[4],
}
_NAMES = {"kv_cache": "KV cache"}


class Forecast(NamedTuple):
    """Factors by engine, and each point as the others predict it."""

    factors: Mapping[str, Efficiency] = {}
    rows: tuple[calibrate.Row, ...] = ()


def forecast(findings: Findings) -> Forecast:
    """What the records tell of every engine; nothing where no model or machine of theirs is known."""
    points = [point for point in findings.points if shape(point.case) is not None]
    rows = calibrate.table(points, findings.machines)
    return Forecast(calibrate.fit(points, findings.machines, rows), rows)


def memory(findings: Findings) -> Section:
    """What every configuration keeps where, predicted from shapes before it ran, beside the measured peaks."""
    blocks: list[Block] = []
    for study in findings.studies:
        blocks.append(Heading(study.group.title))
        if study.machine is None:
            blocks.append(Text("The machine is not described: `zinfer probe` does it.", "missing"))
            continue
        plans = [(point, _planned(point.case, study.machine)) for point in _shown(study)]
        known = [(point, plan) for point, plan in plans if plan is not None]
        blocks += _memory(known, study.machine) if known else [_unknown(study)]
    intro = Text(
        "Predicted from the shapes of the model alone, each configuration at its own best batch, or at the smallest "
        "that was tried where none succeeded. Measured peaks are of what tensors held on the GPU, and of the process's "
        "memory."
    )
    return Section("memory", "Memory plan", [intro, *blocks] if blocks else [Text("No point to plan for.", "missing")])


def bottleneck(findings: Findings, known: Forecast) -> Section:
    """What limits a decode step, and what a link of twice the speed would change."""
    blocks: list[Block] = []
    for study in findings.studies:
        rows = tuple(_bottlenecks(study, known))
        blocks.append(Heading(study.group.title))
        if not rows:
            blocks.append(Text(_why_no_prediction(study), "missing"))
            continue
        columns = (
            "configuration", "#batch", "#decode step", "#of the link", "#tok/s", "~step predicted", "~bound by",
            "~tok/s predicted", "~at twice the link", "~gain", "~then bound by",
        )  # fmt: skip
        caption = (
            "Each configuration at its own best batch, as it is and behind a link of twice the measured bandwidth; "
            "copies out of pageable memory do not get faster with it."
        )
        blocks.append(Table(caption, columns, rows))
    return Section("bottleneck", "Bottleneck", blocks or [Text("No point was measured.", "missing")])


def machines(findings: Findings, known: Forecast) -> Section:
    """Predicted throughput of the whole models on machines that are not at hand, and how far to trust it."""
    blocks: list[Block] = []
    asked: dict[Case, Study] = {}
    for study in findings.studies:
        winner = rates.best(study.points)
        if winner is not None and winner.case.engine in known.factors:
            asked.setdefault(winner.case.load.model_copy(update={"layers": None, "gpu_weights": None}), study)
    for case, study in asked.items():
        spec = shape(case)
        if spec is not None:
            blocks += _elsewhere(case, spec, study, known)
    if not blocks:
        blocks = [Text("A prediction needs timed points, the machine's description and a known model.", "missing")]
    return Section("machines", "What-if machines", [*blocks, *_trust(known)])


def _unknown(study: Study) -> Text:
    return Text(f"The shape of {study.group.model_name} is not known on this machine.", "missing")


def _why_no_prediction(study: Study) -> str:
    if study.machine is None:
        return "The machine is not described: `zinfer probe` does it."
    if rates.best(study.points) is None:
        return f"No point succeeded ({rates.statuses(study.points)})."
    return "A prediction needs a known model and a machine whose link, memory and compute were measured."


def _planned(case: Case, machine: Machine) -> Plan | None:
    spec = shape(case)
    return None if spec is None else make_plan(case, spec, machine)


def _shown(study: Study) -> list[Measurement]:
    """The best point of each load, or the smallest one of a load without any."""
    return [rates.best(own) or own[0] for own in by_load(study.points).values()]


def _memory(known: list[tuple[Measurement, Plan]], place: Machine) -> list[Block]:
    blocks: list[Block] = []
    tiers = [("gpu", "GPU memory", place.gpu_bytes), ("host", "Host memory", place.host_bytes)][not place.gpu_count :]
    for tier, name, size in tiers:
        bars = list(_stacks(known, tier))
        parts = [part for part in _counted(tier) if any(getattr(getattr(plan, tier), part) for _, plan in known)]
        limit = (size / 2**30, f"{name} there is: {gib(size)}") if size else None
        told = "; ".join(f"{row.label} {row.tag} {row.text}" for row in bars)
        words = f"{name}, predicted and measured: {told}."
        drawn = [figure.bars(bars, width, words, limit) for width in (figure.WIDE, figure.NARROW)]
        legend = [Swatch(figure.block(_PARTS[part]), _NAMES.get(part, part)) for part in parts]
        legend.append(Swatch(figure.block(_REST), "measured, all but weights"))
        blocks.append(Picture(f"{name}: predicted pale, measured solid.", words, drawn[0], drawn[1], tuple(legend)))
    columns = (
        "configuration", "#batch", "tier", "~weights", "~KV cache", "~buffers", "~activations", "~overhead",
        "~predicted", "#measured", "#difference",
    )  # fmt: skip
    rows = tuple(_sizes(point, plan, tier) for point, plan in known for tier, _, _ in tiers)
    blocks.append(
        Table("The same as numbers. Overhead on the GPU, the CUDA context, is in no measured peak.", columns, rows)
    )
    return blocks


_REST = "#888888"


def _stacks(known: list[tuple[Measurement, Plan]], tier: str) -> Iterator[figure.Bar]:
    """A predicted and a measured bar a configuration, in GiB."""
    for point, plan in known:
        own: Bytes = getattr(plan, tier)
        parts = {part: getattr(own, part) for part in _counted(tier)}
        segments = tuple((size / 2**30, _PARTS[part]) for part, size in parts.items())
        yield figure.Bar(named(point), segments, gib(sum(parts.values())), "predicted", predicted=True)
        peak = _peak(point, tier)
        if peak:
            weights = min(peak, getattr(point.effective, f"{tier}_weight_bytes", 0) if point.effective else 0)
            split = ((weights / 2**30, _PARTS["weights"]), ((peak - weights) / 2**30, _REST))
            yield figure.Bar("", split, gib(peak) + ("" if point.status == "ok" else f", {point.status}"), "measured")
        else:
            yield figure.Bar("", (), f"none: {point.status}" if point.status != "ok" else "not recorded", "measured")


def _counted(tier: str) -> list[str]:
    """The parts of memory that a measured peak holds too: not the CUDA context."""
    return [part for part in _PARTS if (tier, part) != ("gpu", "overhead")]


def _peak(point: Measurement, tier: str) -> int | None:
    return point.gpu_peak_bytes if tier == "gpu" else point.host_peak_bytes


def _sizes(point: Measurement, plan: Plan, tier: str) -> Row:
    own: Bytes = getattr(plan, tier)
    predicted, peak = own.total - (own.overhead if tier == "gpu" else 0), _peak(point, tier)
    cells = (
        point.case.label(),
        str(point.case.workload.batch_size),
        "GPU" if tier == "gpu" else tier,
        *(gib(size) if (size := getattr(own, part)) else "" for part in _PARTS),
        gib(predicted),
        gib(peak) if peak else "",
        f"{predicted / peak - 1:+.0%}"
        if peak and point.status == "ok"
        else point.status
        if point.status != "ok"
        else "",
    )
    return Row(cells, "" if point.status == "ok" else "failed")


def _bottlenecks(study: Study, known: Forecast) -> Iterator[Row]:
    if study.machine is None:
        return
    for point in rates.best_by_load(study.points):
        spec, case = shape(point.case), point.case
        if spec is None or case.engine not in known.factors:
            continue
        now = calibrate.predict(case, spec, study.machine, known.factors)
        if now.step_s is None or not now.output_tok_s:
            continue
        link = study.machine.h2d_bandwidth
        faster = machine.override(study.machine, f"h2d_bandwidth={round(2 * link)}B/s") if link else study.machine
        then = calibrate.predict(case, spec, faster, known.factors)
        cells = (
            case.label(),
            str(case.workload.batch_size),
            duration(point.tpot_ms / 1e3) if point.tpot_ms else "",
            f"{point.link_share:.0%}" if point.link_share else "",
            rate(point)[0],
            duration(now.step_s),
            now.bound_by or "",
            rated(now.output_tok_s),
            rated(then.output_tok_s) if link and then.output_tok_s else "",
            f"{then.output_tok_s / now.output_tok_s:.2f}x" if link and then.output_tok_s else "",
            (then.bound_by or "") if link else "",
        )
        yield Row(cells)


def _elsewhere(case: Case, spec: ModelSpec, study: Study, known: Forecast) -> list[Block]:
    """The whole model on every machine of `MACHINES` and on the one it was measured on."""
    here = study.machine
    places = [*([here] if here is not None else []), *map(machine.load, MACHINES)]
    ways = [_ways(case, spec, place, known.factors) for place in places]
    plans = [max(own, key=_merit) for own in ways]
    base = _base(plans)
    load = case.workload
    title = f"{study.group.model_name}, all {spec.total_layers} layers, {load.input_len} in / {load.output_len} out"
    columns = (
        "machine", "#link", "configuration", "#batch", "#host memory", "#first token", "#each after", "bound by",
        "#tok/s", "#error band", f"#over {base.machine.name}" if base else "#",
    )  # fmt: skip
    caption = (
        f"Predicted, nothing was run: {case.engine} with its factors from these records, without offload or with "
        "offload cpu, whichever is faster, at its best batch. Host memory is what it takes, and is checked only where "
        "the machine's own is known."
    )
    rows = tuple(_place(plan, base) for plan in plans)
    bars = [
        figure.Bar(
            f"{plan.machine.name}: {plan.case.label()}, batch {plan.case.workload.batch_size}",
            ((plan.output_tok_s, PALETTE[0]),),
            f"{rated(plan.output_tok_s)} tok/s",
            "predicted",
            plan.output_tok_s * (plan.error or 0.0),
            predicted=True,
        )
        for plan in plans
        if plan.fits and plan.output_tok_s
    ]
    blocks: list[Block] = [Heading(title)]
    if bars:
        words = f"Predicted output tokens a second: {'; '.join(f'{bar.label}, {bar.text}' for bar in bars)}."
        drawn = [figure.bars(bars, width, words) for width in (figure.WIDE, figure.NARROW)]
        said = "Predicted output tokens a second; the bars of error hold nine of ten points of these records."
        blocks.append(Picture(said, words, drawn[0], drawn[1]))
    told = [f"{plan.machine.name}: {plan.why_not}" for plan in plans if plan.why_not]
    told += [
        f"Predicted for {plan.machine.name}: {advice(ways[nth])}" for nth, plan in enumerate(plans) if plan is base
    ]
    return [*blocks, Table(caption, columns, rows), Items(tuple(told))]


def _ways(case: Case, spec: ModelSpec, place: Machine, factors: Mapping[str, Efficiency]) -> list[Plan]:
    """Offload cpu and none, each at its best batch."""
    told = factors.get(case.engine, Efficiency())
    return [best_batch(case.model_copy(update={"offload": way}), spec, place, told) for way in ("cpu", "none")]


def _merit(plan: Plan) -> float:
    return plan.output_tok_s or 0.0 if plan.fits else -1.0


def _base(plans: list[Plan]) -> Plan | None:
    """What ratios are over: the measured machine if it fits there, else one with the same GPU, else the first."""
    able = [plan for plan in plans if plan.fits and plan.output_tok_s]
    same = [plan for plan in able if plan.machine.gpu_name == plans[0].machine.gpu_name]
    return next(iter([*same, *able]), None)


def _place(plan: Plan, base: Plan | None) -> Row:
    link = plan.machine.h2d_bandwidth
    speed = plan.output_tok_s if plan.fits else None
    cells = [
        plan.machine.name,
        f"{gb(link)}/s" if link else "unknown",
        plan.case.label() if plan.fits else "does not fit",
    ]
    if not plan.fits:
        return Row((*cells, "", gb(plan.host.total), *[""] * 6), "predicted")
    return Row(
        (
            *cells,
            str(plan.case.workload.batch_size),
            gb(plan.host.total),
            duration(plan.prefill_s) if plan.prefill_s else "unknown",
            duration(plan.step_s) if plan.step_s else "unknown",
            plan.bound_by or "",
            rated(speed) if speed else "unknown",
            f"± {plan.error:.0%}" if plan.error else "unknown",
            f"{speed / base.output_tok_s:.2f}x" if speed and base and base.output_tok_s else "",
        ),
        "predicted",
    )


def _trust(known: Forecast) -> list[Block]:
    """How well each point is predicted by the others."""
    if not known.rows:
        return []
    columns = (
        "configuration", "#layers", "#batch", "#tok/s", "~predicted", "#error", "#GPU peak", "~predicted", "#error",
    )  # fmt: skip
    rows = tuple(_checked(row) for row in known.rows)
    caption = "Every point that ran, predicted from all points but itself."
    parts = []
    for engine in known.factors:
        errors = [abs(r.tok_s_error) for r in known.rows if r.case.engine == engine and r.tok_s_error is not None]
        if errors:
            parts.append(
                f"{engine} to {median(errors):.1%} in the median and {max(errors):.1%} at worst of {len(errors)} points"
            )
    told = f"Throughput is predicted for {'; '.join(parts)}." if parts else "No point is predicted by another."
    limits = "These records come from few machines: another one adds errors that they do not show."
    return [Heading("How far predictions may be trusted"), Text(f"{told} {limits}"), Table(caption, columns, rows)]


def _checked(row: calibrate.Row) -> Row:
    def pair(predicted: float | None, measured: float | None, error: float | None, kind: str) -> tuple[str, str, str]:
        told = [("" if v is None else rated(v) if kind == "rate" else gib(v)) for v in (measured, predicted)]
        return told[0], told[1], "" if error is None else f"{error:+.1%}"

    cells = (
        row.case.label(),
        "all" if row.case.layers is None else str(row.case.layers),
        str(row.case.workload.batch_size),
        *pair(row.predicted_tok_s, row.measured_tok_s, row.tok_s_error, "rate"),
        *pair(row.predicted_gpu_bytes, row.measured_gpu_bytes, row.gpu_error, "bytes"),
    )
    return Row(cells)
