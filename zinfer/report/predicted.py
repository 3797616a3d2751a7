"""Section on predictions: memory, bottleneck, and other machines.

Predictions come from `zinfer.analysis.calibrate`: the physics of a pass and a few factors for each engine, fitted to
these records; of other machines, from the calibration that ships, as those of `zinfer plan`. Everything predicted looks
so and is named so.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from statistics import median

from zinfer.analysis import calibrate, rates
from zinfer.analysis.group import Points
from zinfer.core.case import Case
from zinfer.core.engine import Offload, read_options
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import duration, gb, gib
from zinfer.core.value import group_by
from zinfer.plan.advice import advice, host_needed
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.times import Efficiency, shipped
from zinfer.record.measurement import Measurement
from zinfer.report.document import Block, Items, Row, Table, Text
from zinfer.report.findings import Findings, WorkloadFindings, shape
from zinfer.report.measured import rate, rated
from zinfer.system.machines import load as load_machine

CALIBRATING = 50  # points of an engine: each takes 3 ms, and the medians of more hardly differ
ELSEWHERE = 3  # models that are predicted for other machines: `zinfer plan` predicts all
MACHINES = ("a100-80gb", "h100-80gb", "h200", "gh200-96gb", "b200")
_NAMES = ("model", "machine")
_MEMORY = ("configuration", "#batch", "~GPU predicted", "#GPU measured", "~host predicted", "#host measured")
_SPEED = ("#decode step", "~step predicted", "~bound by", "#tok/s", "~tok/s predicted")
_MACHINE_COLUMNS = (
    "machine", "#link", "configuration", "#batch", "#host memory", "#TTFT", "#TPOT", "bound by", "#tok/s",
    "#error band", "#over the first that fits",
)  # fmt: skip

Winners = list[tuple[WorkloadFindings, Measurement, ModelSpec]]


def predictions(findings: Findings) -> Iterator[Block]:
    """Yield what is predicted, and how right it is; nothing without a known model and machine."""
    efficiency, rows = calibrate.calibrate(_thinned(findings.points), findings.machines)
    main, slices = (
        [
            (workload, top, spec)
            for workload in workloads
            if workload.machine and (top := rates.winner(workload.points)) and (spec := shape(top.case))
        ]
        for workloads in (findings.main, findings.slices)
    )
    yield from _measured(main + slices, efficiency)
    yield from _elsewhere(main)
    if main + slices:
        yield Text(_trust(efficiency, rows))


def _thinned(points: Points) -> list[Measurement]:
    """Return the points to calibrate with: at most `CALIBRATING` of each engine, evenly spaced."""
    kept: list[Measurement] = []
    for alike in group_by((point for point in points if shape(point.case)), lambda point: point.case.engine).values():
        count = min(CALIBRATING, len(alike))
        kept += [alike[nth * len(alike) // count] for nth in range(count)]
    return kept


def _measured(winners: Winners, efficiency: Mapping[str, Efficiency]) -> Iterator[Table]:
    """Yield the fastest configurations' memory and speed, as predicted and as measured."""
    memory, speed = [], []
    for workload, point, spec in winners:
        assert workload.machine is not None
        plan = Planner(point.case, spec, workload.machine, efficiency.get(point.case.engine, Efficiency())).plan
        sizes = (plan.gpu.total - plan.gpu.overhead, point.gpu_bytes, plan.host.total, point.host_peak_bytes)
        names, batch = (workload.group.title, workload.group.machine), str(point.case.workload.batch_size)
        memory.append(Row((*names, point.case.label(), batch, *(gib(size) if size else "" for size in sizes))))
        steps = (point.tpot_ms and point.tpot_ms / 1e3, plan.step_s)
        predicted = rated(plan.output_tok_s) if plan.output_tok_s else ""
        times = (duration(seconds) if seconds else "" for seconds in steps)
        speed.append(Row((*names, *times, plan.bound_by or "", rate(point)[0], predicted)))
    what = "the fastest configuration of each workload, predicted with the factors of these records"
    peaks = "Measured peaks are of tensors on the GPU, and of the process."
    yield Table(f"Memory of {what}. {peaks}", (*_NAMES, *_MEMORY), tuple(memory))
    yield Table(f"Speed of {what}.", (*_NAMES, *_SPEED), tuple(speed))


def _elsewhere(winners: Winners) -> Iterator[Block]:
    """Yield what `zinfer plan` predicts for the first whole models, also elsewhere."""
    seen: set[str] = set()
    for workload, point, _ in winners:
        # As `zinfer plan` plans it: no host memory for reading a checkpoint, for it may be elsewhere.
        plain = {"layers": None, "options": (), "load_format": "dummy", "allow_nan": False}
        case = point.case.load.model_copy(update=plain)
        spec = shape(case) if len(seen) < ELSEWHERE else None
        if case.model in seen or case.engine not in shipped() or spec is None or workload.machine is None:
            continue
        seen.add(case.model)
        ways = [_ways(case, spec, workload.machine), *(_ways_there(case, machine) for machine in MACHINES)]
        plans = [max(plans, key=lambda plan: (plan.output_tok_s or 0.0) if plan.holds else -1.0) for plans in ways]
        base = next((nth for nth, plan in enumerate(plans) if plan.holds and plan.output_tok_s), None)
        first = None if base is None else plans[base].output_tok_s
        load = case.workload
        caption = (
            f"{workload.group.model_name}, all {spec.total_layers} layers, {load.input_len} in / {load.output_len} "
            f"out: {case.engine} as `zinfer plan --machine all --calibrate` predicts it, with the settings and the "
            "batch that are fastest on each machine, lossy ones left out. No record: none that ships is of this kind "
            "(weights, experts, GPU)."
        )
        yield Table(caption, _MACHINE_COLUMNS, tuple(_machine_row(plan, first) for plan in plans))
        lines = [f"{plan.machine.name}: {plan.why_not}" for plan in plans if plan.why_not]
        if base is not None:
            lines.append(f"Predicted for {plans[base].machine.name}: {advice(ways[base])}")
        yield Items(lines)


@cache  # most of the time of a report, and the same in the next one of a live page
def _ways_there(case: Case, machine: str) -> list[Plan]:
    spec = shape(case)
    assert spec is not None
    return _ways(case, spec, load_machine(machine))


def _ways(case: Case, spec: ModelSpec, machine: Machine) -> list[Plan]:
    """Return the best plan of each offload, as `zinfer plan` finds it."""
    budget = "auto" if read_options(case.engine, ()).transport().shares_memory else None
    places: tuple[tuple[Offload, str | None], ...] = (("none", None), ("cpu", budget))
    cases = (case.model_copy(update={"offload": offload, "gpu_weights": share}) for offload, share in places)
    planners = (Planner(each, spec, machine, shipped()[case.engine]).searched(case.workload) for each in cases)
    return [planner.best(case.workload) for planner in planners]


def _machine_row(plan: Plan, base: float | None) -> Row:
    link, speed = plan.machine.h2d_bandwidth, plan.output_tok_s
    cells = (plan.machine.name, f"{gb(link)}/s" if link else "unknown")
    if not plan.holds:
        return Row((*cells, "does not fit", "", host_needed(plan), *[""] * 6), "predicted")
    return Row((
        *cells, plan.case.label(), str(plan.case.workload.batch_size), host_needed(plan),
        duration(plan.prefill_s) if plan.prefill_s else "unknown", duration(plan.step_s) if plan.step_s else "unknown",
        plan.bound_by or "", rated(speed) if speed else "unknown",
        f"± {plan.error:.0%}" if plan.error else "no record",
        f"{speed / base:.2f}x" if speed and base else "",
    ), "predicted")  # fmt: skip


def _trust(efficiency: Mapping[str, Efficiency], rows: tuple[calibrate.PredictedPoint, ...]) -> str:
    parts = []
    for engine in efficiency:
        of_engine = (row.error("tok_s") for row in rows if row.case.engine == engine)
        errors = [abs(error) for error in of_engine if error is not None]
        if errors:
            parts.append(
                f"{engine} to {median(errors):.1%} in the median and {max(errors):.1%} at worst of {len(errors)} points"
            )
    text = f"Predicted from all other points, throughput is right for {'; '.join(parts)}." if parts else ""
    text = text or "No point is predicted by another."
    return f"{text} These records come from few machines: another one adds errors that they do not show."
