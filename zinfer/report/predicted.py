"""Sections about predictions: memory by its use, the bottleneck, other machines, and the questions of planning recipes.

Predictions come from `zinfer.analysis.calibrate`: the physics of a pass and a few factors for each engine, fitted to
these records. Everything predicted is drawn pale and named so.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from zinfer.analysis import calibrate, rates
from zinfer.analysis.group import by_load
from zinfer.core.case import Case
from zinfer.core.machine import Machine, override
from zinfer.core.model import ModelSpec
from zinfer.core.units import duration, gb, gib
from zinfer.plan.cost import Bytes, Efficiency
from zinfer.plan.plan import Plan, make_plan
from zinfer.plan.published import beside
from zinfer.plan.search import advice, best_batch
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Details, Heading, Items, Picture, Plain, Row, Section, Table, Text
from zinfer.report.findings import Findings, WorkloadFindings, shape
from zinfer.report.measured import lengths, named, rate, rated
from zinfer.report.plot import style
from zinfer.report.plot.figures import Bar, bars
from zinfer.report.plot.style import PALETTE
from zinfer.system.machines import load as load_machine

MACHINES = ("a100-80gb", "h100-80gb", "h200", "gh200-96gb", "b200")
# use of memory -> its colour
_PARTS = {
    "weights": PALETTE[0],
    "kv_cache": PALETTE[5],
    "buffers": PALETTE[2],
    "activations": PALETTE[3],
    "overhead": PALETTE[4],
}
_NAMES = {"kv_cache": "KV cache"}
_REST = "measured, all but weights"
_COLOURS = {_NAMES.get(part, part): colour for part, colour in _PARTS.items()} | {_REST: "#888888"}


class Forecast(NamedTuple):
    """Factors by engine, and each point as the others predict it."""

    factors: Mapping[str, Efficiency] = {}
    rows: tuple[calibrate.PredictedPoint, ...] = ()


def forecast(findings: Findings) -> Forecast:
    """Fit the factors of every engine to the records; empty where none of their models or machines is known."""
    points = [point for point in findings.points if shape(point.case) is not None]
    rows = calibrate.table(points, findings.machines)
    return Forecast(calibrate.fit(points, findings.machines, rows), rows)


def memory(findings: Findings) -> Section:
    """Return the section on the bytes of every configuration by tier and use, predicted from shapes, beside the
    measured peaks."""
    rows: list[Row] = []
    details: list[Block] = []
    for workload in (*findings.main, *findings.slices):
        if workload.machine is None:
            details.append(Text(f"{workload.name}: the machine is not described; `zinfer probe` does it.", "missing"))
            continue
        plans = [(point, _planned(point.case, workload.machine)) for point in _shown(workload)]
        known = [(point, plan) for point, plan in plans if plan is not None]
        if not known:
            details.append(_unknown(workload))
            continue
        rows += _needs(workload, known)
        drawn = workload in findings.main
        blocks = tuple(_memory(workload, known, workload.machine, drawn))
        details.append(Details(f"Memory of every configuration: {workload.name}", blocks))
    if not details:
        return Section("memory", "Memory plan", [Text("No point to plan for.", "missing")])
    intro = Text(
        "Predicted from the shapes of the model alone, each configuration at its own best batch, or at the smallest "
        "that was tried where none succeeded. Measured peaks are of what tensors held on the GPU, and of the process's "
        "memory."
    )
    columns = (
        "model", "machine", "configuration", "#batch", "~GPU predicted", "#GPU measured", "~host predicted",
        "#host measured",
    )  # fmt: skip
    table = [Table("Memory of the fastest configuration of each workload.", columns, tuple(rows))] if rows else []
    return Section("memory", "Memory plan", [intro, *table, *details])


def bottleneck(findings: Findings, known: Forecast) -> Section:
    """Return the section on the limit of a decode step, and the gain from a link of twice the speed."""
    first: list[Row] = []
    tables: list[Plain] = []
    lacking: list[Block] = []
    columns = (
        "configuration", "#batch", "#decode step", "#link share", "#tok/s", "~step predicted", "~bound by",
        "~tok/s predicted", "~at twice the link", "~gain", "~then bound by",
    )  # fmt: skip
    brief = (0, 1, 4, 6, 8, 9, 10)  # columns that fit beside the names of model and machine
    for workload in (*findings.main, *findings.slices):
        rows = tuple(_bottlenecks(workload, known))
        if not rows:
            lacking.append(Text(f"{workload.name}: {_why_no_prediction(workload)}", "missing"))
            continue
        group = workload.group
        part = "" if group.layers is None else f", {group.layers} layers"
        winner = rates.winner(workload.points)
        row = next((row for row in rows if winner and row.cells[0] == winner.case.label()), rows[0])
        told = tuple(cell for nth, cell in enumerate(row.cells) if nth in brief)
        first.append(Row((f"{group.model_name}{part}, {lengths(workload)}", group.machine, *told)))
        tables.append(Table(f"{workload.name}: each configuration at its own best batch.", columns, rows))
    caption = (
        "The fastest configuration of each workload, as it is and behind a link of twice the measured bandwidth; "
        "copies out of pageable memory do not get faster with it."
    )
    blocks: list[Block] = []
    if first:
        heads = ("model", "machine", *(columns[nth] for nth in brief))
        blocks.append(Table(caption, heads, tuple(first)))
        blocks.append(Details("Every configuration, and a link of twice the speed", tuple(tables)))
    blocks += lacking
    return Section("bottleneck", "Bottleneck", blocks or [Text("No point was measured.", "missing")])


def machines(findings: Findings, known: Forecast) -> Section:
    """Return the section on the predicted throughput of whole models on other machines, and how far to trust it."""
    blocks: list[Block] = []
    asked: dict[Case, WorkloadFindings] = {}
    whole = {workload.group.model for workload in findings.main}
    for workload in (*findings.main, *(one for one in findings.slices if one.group.model not in whole)):
        winner = rates.winner(workload.points)
        if winner is not None and winner.case.engine in known.factors:
            asked.setdefault(winner.case.load.model_copy(update={"layers": None, "gpu_weights": None}), workload)
    seen: set[str] = set()
    others: list[Plain] = []
    for case, workload in asked.items():
        spec = shape(case)
        if spec is None:
            continue
        drawn = case.model not in seen
        (blocks if drawn else others).extend(_elsewhere(case, spec, workload, known, drawn))
        seen.add(case.model)
    if others:
        blocks.append(Details("Other lengths and configurations of these models", tuple(others)))
    if not blocks:
        blocks = [Text("A prediction needs timed points, the machine's description and a known model.", "missing")]
    return Section("machines", "What-if machines", [*blocks, *_trust(known)])


def claims(findings: Findings, known: Forecast) -> Iterator[Block]:
    """Yield the plans of each planning recipe at their best batch, beside ratios that others have published.

    An engine's factors are those of these records where it has any.
    """
    for question in findings.questions:
        plans = [
            best_batch(case, spec, place, known.factors.get(case.engine))
            for place in question.machines
            for case in question.cases
            if (spec := shape(case)) is not None
        ]
        if not plans:
            continue
        yield Heading(question.title)
        columns = ("machine", "configuration", "#batch", "#TTFT", "#TPOT", "bound by", "#tok/s", "#error band")
        caption = "Predicted, nothing was run: each engine with its factors from these records, at its best batch."
        yield Details("Every machine and configuration", (Table(caption, columns, tuple(map(_claim, plans))),))
        told = [f"{place.name}: {advice([p for p in plans if p.machine == place])}" for place in question.machines]
        yield Items((*told, *(found.describe() for found in beside(question.published, plans, known.factors))))


def _unknown(workload: WorkloadFindings) -> Text:
    return Text(f"The shape of {workload.group.model_name} is not known on this machine.", "missing")


def _why_no_prediction(workload: WorkloadFindings) -> str:
    if workload.machine is None:
        return "The machine is not described: `zinfer probe` does it."
    if rates.best(workload.points) is None:
        return f"No point succeeded ({rates.statuses(workload.points)})."
    return "A prediction needs a known model and a machine whose link, memory and compute were measured."


def _planned(case: Case, machine: Machine) -> Plan | None:
    spec = shape(case)
    return None if spec is None else make_plan(case, spec, machine)


def _shown(workload: WorkloadFindings) -> list[Measurement]:
    """Return the best point of each load, or the smallest one of a load without any."""
    return [rates.best(own) or own[0] for own in by_load(workload.points).values()]


def _needs(workload: WorkloadFindings, known: list[tuple[Measurement, Plan]]) -> Iterator[Row]:
    """Yield the row of the fastest configuration: bytes of each tier, predicted and measured."""
    winner = rates.winner(workload.points)
    for point, plan in known:
        if point is winner:
            group = workload.group
            part = "" if group.layers is None else f", {group.layers} layers"
            gpu = plan.gpu.total - plan.gpu.overhead
            yield Row((
                f"{group.model_name}{part}, {lengths(workload)}",
                group.machine, point.case.label(), str(point.case.workload.batch_size),
                gib(gpu) if gpu else "", gib(peak) if (peak := point.gpu_peak_bytes) else "",
                gib(plan.host.total) if plan.host.total else "", gib(host) if (host := point.host_peak_bytes) else "",
            ))  # fmt: skip


def _memory(
    workload: WorkloadFindings, known: list[tuple[Measurement, Plan]], place: Machine, drawn: bool
) -> list[Plain]:
    blocks: list[Plain] = []
    tiers = [("gpu", "GPU memory", place.gpu_bytes), ("host", "host memory", place.host_bytes)][not place.gpu_count :]
    for tier, name, size in tiers if drawn else ():
        rows = list(_stacks(known, tier))
        limit = (size / 2**30, f"{name} of the machine: {gib(size)}") if size else None
        told = "; ".join(" ".join(filter(None, (row.label, row.tag, row.text))) for row in rows)
        notes = (workload.group.conditions, "Predicted pale, measured solid; each configuration at its own best batch.")
        figure = bars(workload.group, f"how much {name} does it take?", notes, rows, _COLOURS, "GiB", limit)
        title = f"{name[:1].upper()}{name[1:]}: predicted pale, measured solid."
        blocks.append(Picture(title, f"{title} {told}.", style.render(figure, "svg").decode()))
    columns = (
        "configuration", "#batch", "tier", "~weights", "~KV cache", "~buffers", "~activations", "~overhead",
        "~predicted", "#measured", "#difference",
    )  # fmt: skip
    cells = tuple(_sizes(point, plan, tier) for point, plan in known for tier, _, _ in tiers)
    caption = f"{workload.name}: bytes by use. Overhead on the GPU, the CUDA context, is in no measured peak."
    return [*blocks, Table(caption, columns, cells)]


def _stacks(known: list[tuple[Measurement, Plan]], tier: str) -> Iterator[Bar]:
    """Yield a predicted and a measured bar for each configuration, in GiB."""
    for point, plan in known:
        own: Bytes = getattr(plan, tier)
        parts = {part: getattr(own, part) for part in _counted(tier)}
        segments = tuple((_NAMES.get(part, part), size / 2**30) for part, size in parts.items())
        yield Bar(named(point), segments, gib(sum(parts.values())), "predicted", predicted=True)
        peak = _peak(point, tier)
        if peak:
            weights = min(peak, getattr(point.effective, f"{tier}_weight_bytes", 0) if point.effective else 0)
            split = (("weights", weights / 2**30), (_REST, (peak - weights) / 2**30))
            yield Bar("", split, gib(peak) + ("" if point.status == "ok" else f", {point.status}"), "measured")
        else:
            yield Bar("", (), f"none: {point.status}" if point.status != "ok" else "not recorded", "measured")


def _counted(tier: str) -> list[str]:
    """Return the uses of memory that a measured peak counts too, so not the CUDA context."""
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


def _bottlenecks(workload: WorkloadFindings, known: Forecast) -> Iterator[Row]:
    if workload.machine is None:
        return
    for point in rates.best_by_load(workload.points):
        spec, case = shape(point.case), point.case
        if spec is None or case.engine not in known.factors:
            continue
        now = calibrate.predict(case, spec, workload.machine, known.factors)
        if now.step_s is None or not now.output_tok_s:
            continue
        link = workload.machine.h2d_bandwidth
        faster = override(workload.machine, f"h2d_bandwidth={round(2 * link)}B/s") if link else workload.machine
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


def _elsewhere(case: Case, spec: ModelSpec, workload: WorkloadFindings, known: Forecast, drawn: bool) -> list[Plain]:
    """Predict the whole model on every machine of `MACHINES` and on the one it was measured on; with a figure if
    `drawn`."""
    here = workload.machine
    places = [*([here] if here is not None else []), *map(load_machine, MACHINES)]
    ways = [_ways(case, spec, place, known.factors) for place in places]
    plans = [max(own, key=_merit) for own in ways]
    base = _base(plans)
    load = case.workload
    title = f"{workload.group.model_name}, all {spec.total_layers} layers, {load.input_len} in / {load.output_len} out"
    columns = (
        "machine", "#link", "configuration", "#batch", "#host memory", "#TTFT", "#TPOT", "bound by",
        "#tok/s", "#error band", f"#over {base.machine.name}" if base else "#",
    )  # fmt: skip
    caption = (
        f"{title}: predicted, nothing was run. {case.engine} with its factors from these records, without offload or "
        "with weights in host memory (cpu), whichever is faster, at its best batch. Host memory is the need; it is "
        "checked only where the machine's own is known."
    )
    rows = tuple(_place(plan, base) for plan in plans)
    drawing = [
        Bar(
            f"{plan.machine.name}: {plan.case.label()}, batch {plan.case.workload.batch_size}",
            (("predicted", plan.output_tok_s),),
            f"{rated(plan.output_tok_s)} tok/s",
            "predicted",
            plan.output_tok_s * (plan.error or 0.0),
            predicted=True,
        )
        for plan in plans
        if drawn and plan.fits and plan.output_tok_s
    ]
    blocks: list[Plain] = [Heading(title)] if drawn else []
    if drawing:
        said = "Predicted output tokens a second; the bars of error hold nine of ten points of these records."
        whole = workload.group.model_copy(update={"layers": None})
        picture = bars(whole, "what would other machines do?", (said,), drawing, {"predicted": PALETTE[0]}, "tok/s")
        words = f"Predicted output tokens a second: {'; '.join(f'{bar.label}, {bar.text}' for bar in drawing)}."
        blocks.append(Picture(said, words, style.render(picture, "svg").decode()))
    told = [f"{plan.machine.name}: {plan.why_not}" for plan in plans if plan.why_not]
    told += [
        f"Predicted for {plan.machine.name}: {advice(ways[nth])}" for nth, plan in enumerate(plans) if plan is base
    ]
    return [*blocks, Table(caption, columns, rows), Items(tuple(told))]


def _ways(case: Case, spec: ModelSpec, place: Machine, factors: Mapping[str, Efficiency]) -> list[Plan]:
    """Return plans with weights in host memory and with none offloaded, each at its best batch."""
    told = factors.get(case.engine, Efficiency())
    return [best_batch(case.model_copy(update={"offload": way}), spec, place, told) for way in ("cpu", "none")]


def _merit(plan: Plan) -> float:
    return plan.output_tok_s or 0.0 if plan.fits else -1.0


def _base(plans: list[Plan]) -> Plan | None:
    """Return the plan that ratios refer to: on the measured machine if it fits there, else on one with the same GPU,
    else the first that fits."""
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
    """Return blocks that tell how well each point is predicted by the others."""
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
    details = Details("Every point, predicted from the others", (Table(caption, columns, rows),))
    return [Heading("How far predictions may be trusted"), Text(f"{told} {limits}"), details]


def _checked(row: calibrate.PredictedPoint) -> Row:
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


def _claim(plan: Plan) -> Row:
    if not plan.fits or plan.prefill_s is None or plan.step_s is None or plan.output_tok_s is None:
        return Row((plan.machine.name, plan.case.label(), *[""] * 3, "does not fit", *[""] * 2), "predicted")
    cells = (
        plan.machine.name,
        plan.case.label(),
        str(plan.case.workload.batch_size),
        duration(plan.prefill_s),
        duration(plan.step_s),
        plan.bound_by or "",
        rated(plan.output_tok_s),
        f"± {plan.error:.0%}" if plan.error else "a limit, not fitted",
    )
    return Row(cells, "predicted")
