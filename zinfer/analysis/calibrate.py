"""What engines reach of the physics, fitted to records, and how far a prediction from them may be trusted.

Four factors an engine, each read off the points where it alone decides: the share of the link from offloaded decode
steps, the launch time of a layer and the share of the matmul rate from those without offload, the GPU memory from every
point that ran. A prediction for a point that took part in the fit proves nothing, so `table` predicts each point from
factors fitted without it.

    factors = fit(points, machines)
    predict(case, spec, machine, factors).output_tok_s
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median

from zinfer.analysis.group import Points
from zinfer.plan import cost
from zinfer.plan.cost import Efficiency, Placement
from zinfer.plan.plan import Plan, make_plan, placement_of
from zinfer.record.measurement import Measurement
from zinfer.record.store import files, read
from zinfer.spec import machine
from zinfer.spec.case import Case
from zinfer.spec.machine import Machine, MachineError
from zinfer.spec.model import ModelError, ModelSpec, resolve
from zinfer.spec.value import Frozen

BAND = 0.9  # of the cross-validated errors lie within `Efficiency.error`
LEAST_ERROR = 0.05  # no band is narrower: other machines differ in what no record shows
COMPUTE_BOUND = 2048  # prompt tokens in a pass from which compute alone sets its time, on every GPU of the catalogue
PLAIN = 1.5  # a prefill this much above what else it waits for is decided by compute alone
EVIDENT = 1.15  # a step this much above the next bottleneck is decided by the launches alone


class Row(Frozen):
    """A measured point and what is predicted for it by the records without it; None where that cannot be told."""

    case: Case
    machine: str
    predicted_tok_s: float | None = None
    measured_tok_s: float | None = None
    predicted_gpu_bytes: int | None = None
    measured_gpu_bytes: int | None = None

    @property
    def tok_s_error(self) -> float | None:
        """Predicted over measured throughput, less one."""
        return _error(self.predicted_tok_s, self.measured_tok_s)

    @property
    def gpu_error(self) -> float | None:
        """Predicted over measured peak of GPU memory that tensors hold, less one."""
        return _error(self.predicted_gpu_bytes, self.measured_gpu_bytes)


class _Seen(Frozen):
    """A point with all that a fit needs."""

    point: Measurement
    model: ModelSpec
    machine: Machine
    setup: Placement

    @property
    def place(self) -> Machine:
        """The machine with its link as it was measured just before the load: links differ from host to host."""
        link = self.point.link_bandwidth if self.setup.pinned else None
        return self.machine.model_copy(update={"h2d_bandwidth": link}) if link else self.machine

    @cached_property
    def told(self) -> Mapping[str, float | None]:
        """What the point tells of each factor, None where it tells nothing."""
        timed = {"link_share": _link_share, "layer_s": _layer_s, "mfu": _mfu}
        found = {name: read(self) if self.point.usable else None for name, read in timed.items()}
        return found | {"memory": _memory(self)}


def load_machines(results: Path = Path("sweeps/results")) -> dict[str, Machine]:
    """The machines described beside the result files under `results`, by name."""
    found: dict[str, Machine] = {}
    for file in files(results):
        try:
            described = machine.load(file.parent)
        except MachineError:
            continue
        found[described.name] = described
    return found


def load_points(results: Path = Path("sweeps/results")) -> tuple[Measurement, ...]:
    """The points of all result files under `results`; of a case measured twice on a machine, the last."""
    latest = {(point.machine, point.case): point for file in files(results) for point in read(file).points}
    return tuple(latest.values())


def fit(points: Points, machines: Mapping[str, Machine], rows: Sequence[Row] | None = None) -> dict[str, Efficiency]:
    """The factors of each engine that `points` tell something of, by its name, error bands included; `rows` is their
    `table`, where that is at hand.

    Points of machines that are not in `machines` or have no GPU (the CPU that stands in for one has no link), and of
    models that are not to be had, are left out.
    """
    seen = _seen(points, machines)
    rows = table(points, machines) if rows is None else rows
    found = {}
    for engine in sorted({one.point.case.engine for one in seen}):
        own = [one for one in seen if one.point.case.engine == engine]
        errors = [abs(row.tok_s_error) for row in rows if row.case.engine == engine and row.tok_s_error is not None]
        band = max(LEAST_ERROR, _quantile(errors, BAND)) if errors else None
        found[engine] = _fit(own).model_copy(update={"error": band})
    return found


def predict(
    case: Case, model: ModelSpec, machine: Machine, factors: Mapping[str, Efficiency], nvme_path: str | None = None
) -> Plan:
    """The plan of `case` with its engine's factors; with the defaults, and no error band, where there are none."""
    return make_plan(case, model, machine, nvme_path, factors.get(case.engine, Efficiency()))


def table(points: Points, machines: Mapping[str, Machine]) -> tuple[Row, ...]:
    """Predicted against measured, a row for each point that ran, each predicted from all points but itself.

    A point that no other point of its engine helps to predict has no prediction.
    """
    seen = _seen(points, machines)
    rows = []
    for one in seen:
        point, case = one.point, one.point.case
        others = [other for other in seen if other is not one and other.point.case.engine == case.engine]
        row = Row(
            case=case,
            machine=point.machine,
            measured_tok_s=point.output_tok_s if point.usable else None,
            measured_gpu_bytes=point.gpu_peak_bytes,
        )
        if others:
            plan = make_plan(_as_run(one), one.model, one.machine, factors=_fit(others))
            row = row.model_copy(
                update={
                    "predicted_tok_s": plan.output_tok_s if point.usable else None,
                    "predicted_gpu_bytes": plan.gpu.total - plan.gpu.overhead,
                }
            )
        rows.append(row)
    return tuple(rows)


def _seen(points: Points, machines: Mapping[str, Machine]) -> list[_Seen]:
    found = []
    for point in points:
        if point.status != "ok" or point.machine not in machines or not machines[point.machine].gpu_count:
            continue
        try:
            model = resolve(point.case.model, point.case.dtype, point.case.layers)
        except ModelError:
            continue
        place = machines[point.machine]
        found.append(_Seen(point=point, model=model, machine=place, setup=_setup(point, model, place)))
    return found


def _setup(point: Measurement, model: ModelSpec, place: Machine) -> Placement:
    """The point's setup as it was, where the engine said so."""
    effective = point.effective
    if effective is None:
        return placement_of(point.case, model, place)
    told, update = effective.settings, {}
    if "slot_bytes" in told:  # without buffers between link and slot, the slots themselves are the ring
        slots = 1 if "buffer_bytes" in told else told["ring_depth"]
        buffers = told["ring_depth"] * told.get("buffer_bytes", 0)
        update["slots"] = (slots * told["slot_bytes"] + buffers) / model.layer_bytes
        update["buffers"] = 1  # what the KV cache adds to them is counted
    if "kv_host_rows" in told:
        update["kv_host_share"] = told["kv_host_rows"] / point.case.workload.batch_size
        update["kv_on_cpu"] = str(told["kv_attention"]).startswith("cpu")
        cores = place.details.get("host", {}).get("cores", 0)
        update["kv_cpu_share"] = min(1.0, told["kv_threads"] / cores) if cores and told.get("kv_threads") else 1.0
    if effective.streamed_bytes_per_step:
        wire = effective.wire_bytes_per_step or effective.streamed_bytes_per_step
        update["wire_ratio"] = update["kept_ratio"] = min(1.0, wire / effective.streamed_bytes_per_step)
    kept = max(0, effective.gpu_weight_bytes - model.other_bytes) / update.get("kept_ratio", 1.0)
    return placement_of(point.case, model, place, round(kept)).model_copy(update=update)


def _as_run(one: _Seen) -> Case:
    """The point's case with what the engine chose where it chose by another plan than today's."""
    host, case = one.machine.details.get("host", {}), one.point.case
    if not one.setup.kv_on_cpu or not host.get("cores"):
        return case
    threads = round(one.setup.kv_cpu_share * host["cores"])
    return case.model_copy(update={"options": (*case.options, ("kv_threads", threads))})


def _fit(seen: Sequence[_Seen]) -> Efficiency:
    """Each factor from the points that tell it, and its default from none."""
    default = Efficiency()
    names = ("link_share", "layer_s", "mfu", "memory")
    found = {name: _median((one.told[name] for one in seen), getattr(default, name)) for name in names}
    return default.model_copy(update=found | {"points": len(seen)})


def _link_share(one: _Seen) -> float | None:
    """Of the machine's link, from a decode step that waits for nothing else."""
    seconds, limits = one.point.step_median_ms, _limits(one)
    if not seconds or "link" not in limits or one.setup.tier != "host":
        return None
    if limits.get("cpu attention", 0.0) > limits["link"]:
        return None
    lost = 0.0
    if one.setup.kv_on_cpu:  # to the CPU, at the host's memory
        alone = one.model_copy(update={"setup": one.setup.model_copy(update={"kv_host_share": 0.0})})
        lost = limits["link"] - _limits(alone)["link"]
    waited = seconds / 1e3 - lost - (0.0 if one.setup.overlapped else limits["compute"])
    return (limits["link"] - lost) / waited if waited > 0 else None


def _layer_s(one: _Seen) -> float | None:
    """From a decode step without offload that nothing but launching its layers explains."""
    seconds = one.point.step_median_ms
    if not seconds or one.setup.tier != "gpu":
        return None
    physical = max(_limits(one).values(), default=0.0)
    return seconds / 1e3 / one.model.num_layers if seconds / 1e3 > EVIDENT * physical else 0.0


def _limits(one: _Seen) -> Mapping[str, float]:
    """Seconds of a decode step, for each physical limit; empty where the machine's figures are not known."""
    load = one.point.case.workload
    context = load.input_len + load.output_len // 2
    times = cost.step(one.setup, one.model, one.place, load.batch_size, context, Efficiency(link_share=1.0))
    return {str(bound): seconds for bound, seconds in times.limits.items()}


def _mfu(one: _Seen) -> float | None:
    """From a prefill of enough tokens to be bound by compute: without offload, or in one pass over the weights that
    evidently waited for nothing else."""
    load, flops = one.point.case.workload, one.machine.matmul_flops
    one_pass = one.setup.tier == "gpu" or one.setup.blocks
    if not flops or not one_pass or load.batch_size * load.input_len < COMPUTE_BOUND:
        return None
    reached = Efficiency(link_share=_link_share(one) or 1.0, mfu=1.0)
    limits = cost.prefill(one.setup, one.model, one.machine, load.batch_size, load.input_len, reached).limits
    seconds = median(one.point.ttft_ms) / 1e3
    others = [limit for bound, limit in limits.items() if bound != "compute"]
    if not limits or seconds < PLAIN * max(others, default=0.0):
        return None
    products = one.model.prefill_flops(load.batch_size, load.input_len) / flops
    between = limits["compute"] - products
    return products / (seconds - between) if seconds > between else None


def _memory(one: _Seen) -> float | None:
    """Measured over counted bytes, of what is neither weights nor KV cache and so is an estimate."""
    load, measured = one.point.case.workload, one.point.gpu_peak_bytes
    if not measured or not one.machine.gpu_count:
        return None
    gpu = cost.tiers(one.setup, one.model, one.machine, load.batch_size, load.input_len, load.output_len)[0]
    working = gpu.buffers + gpu.activations
    return (measured - gpu.weights - gpu.kv_cache) / working if working else None


def _median(values: Iterable[float | None], otherwise: float) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else otherwise


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None
