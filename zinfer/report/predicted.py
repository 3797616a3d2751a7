"""Section on predictions: memory and bottleneck, beside what was measured.

Predictions come from `zinfer.analysis.calibrate`: the physics of a pass and a few factors for each engine, fitted to
these records. Everything predicted looks so and is named so. `zinfer plan` predicts other machines.
"""

from collections.abc import Iterator, Mapping
from statistics import median

from zinfer.analysis import calibrate, rates
from zinfer.analysis.group import Points
from zinfer.core.model import ModelSpec
from zinfer.core.units import duration, gib
from zinfer.core.value import group_by
from zinfer.plan.planner import Planner
from zinfer.plan.times import Efficiency
from zinfer.record.measurement import Measurement
from zinfer.report.document import Row, Section, Table, Text, section
from zinfer.report.findings import Findings, WorkloadFindings, shape
from zinfer.report.measured import rate, rated

CALIBRATING = 50  # points of an engine: each takes 3 ms, and the medians of more hardly differ
TITLE = "Memory and bottleneck"
_NAMES = ("model", "machine")
_MEMORY = ("configuration", "#batch", "~GPU predicted", "#GPU measured", "~host predicted", "#host measured")
_SPEED = ("#decode step", "~step predicted", "~bound by", "#tok/s", "~tok/s predicted")

Winners = list[tuple[WorkloadFindings, Measurement, ModelSpec]]


def predictions(findings: Findings) -> Section:
    """Return the section; empty without a known model and machine."""
    efficiency, rows = calibrate.calibrate(_thinned(findings.points), findings.machines)
    winners = [
        (workload, top, spec)
        for workload in findings.ordered
        if workload.machine and (top := rates.winner(workload.points)) and (spec := shape(top.case))
    ]
    if not winners:
        return section("predictions", TITLE, ())
    models = ",".join(dict.fromkeys(workload.group.model for workload, *_ in winners))
    elsewhere = f"Other machines: `zinfer plan --model {models} --machine all --calibrate`."
    return section(
        "predictions", TITLE, (*_measured(winners, efficiency), Text(f"{_trust(efficiency, rows)} {elsewhere}"))
    )


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
        sizes = (plan.gpu.total - plan.gpu.overhead, point.gpu_peak_bytes, plan.host.total, point.host_peak_bytes)
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
