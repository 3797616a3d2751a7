"""Calibration: fit each engine's efficiency factors to records, and estimate the error of predictions made with them.

Each of the six factors of an engine is read off the points where it alone decides: the share of the link from offloaded
decode steps, the rate of unpacking from their timelines, the share of the GPU memory's bandwidth, the launch time of a
layer and the share of the matmul rate from points without offload, the GPU memory from every point that ran. Models
with routed experts have a share of the link and of the matmul rate of their own, so that they do not spoil those of
others. A prediction for a point that took part in the fit proves nothing, so `table` predicts each point from factors
fitted without it (leave-one-out cross-validation)::

    factors = fit(points, machines)
    predict(case, spec, machine, factors).output_tok_s
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from zinfer.analysis.group import Points
from zinfer.checkpoint.resolve import resolve
from zinfer.core.case import Case
from zinfer.core.machine import Machine, MachineError
from zinfer.core.model import ModelError, ModelSpec
from zinfer.core.value import Frozen
from zinfer.plan import cost
from zinfer.plan.cost import Efficiency, Placement
from zinfer.plan.plan import Plan, estimate, make_plan, placement_of
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import files, read
from zinfer.system import machines
from zinfer.system.host import attending_cpus

BAND = 0.9  # share of the cross-validated errors that lie within `Efficiency.error`
LEAST_ERROR = 0.05  # narrowest band: other machines differ in ways that no record shows
COMPUTE_BOUND = 2048  # prompt tokens in a pass that make it compute-bound on every GPU of the catalogue
HIDDEN = 1.1  # a step at most this many times longer than its copies shows the rate of the link
PLAIN = 1.5  # a prefill this many times longer than its other limits is decided by compute alone
_APART = ("link_share", "mfu")  # factors of which models with routed experts have their own
EVIDENT = 1.15  # a step this many times longer than its physical limits is decided by launches alone


class PredictedPoint(Frozen):
    """Measured point beside its prediction from the other records; None if there is no prediction or measurement."""

    case: Case
    machine: str
    predicted_tok_s: float | None = None
    measured_tok_s: float | None = None
    predicted_gpu_bytes: int | None = None
    measured_gpu_bytes: int | None = None

    @property
    def tok_s_error(self) -> float | None:
        """Relative error of the throughput: predicted over measured, less one."""
        return _error(self.predicted_tok_s, self.measured_tok_s)

    @property
    def gpu_error(self) -> float | None:
        """Relative error of the peak GPU memory that tensors hold: predicted over measured, less one."""
        return _error(self.predicted_gpu_bytes, self.measured_gpu_bytes)


class _Seen(Frozen):
    """Point with its model, machine and placement: all that a fit needs."""

    point: Measurement
    model: ModelSpec
    machine: Machine
    setup: Placement

    @property
    def place(self) -> Machine:
        """Machine with the link bandwidths that were measured just before and after the load, since links differ from
        host to host, and so does the memory that all of them read."""
        one = self.point.link_bandwidth if self.setup.pinned else None
        every = self.point.all_links_bandwidth
        found: dict[str, float] = {"h2d_bandwidth": one} if one else {}
        if every:
            found |= {"links_bandwidth": every, "host_bandwidth": max(every, self.machine.host_bandwidth or 0.0)}
        return self.machine.model_copy(update=found)

    @cached_property
    def step(self) -> cost.Times:
        """Times of a decode step over the link's whole bandwidth."""
        load = self.point.case.workload
        context = load.input_len + load.output_len // 2
        return cost.step(self.setup, self.model, self.place, load.batch_size, context, Efficiency(link_share=1.0))

    @property
    def limits(self) -> Mapping[str, float]:
        """Seconds of a decode step by physical limit; empty if the machine's figures are not known."""
        return {str(bound): seconds for bound, seconds in self.step.limits.items()}

    @cached_property
    def factors(self) -> Mapping[str, float | None]:
        """Value of each factor by this point alone, None for a factor that it does not determine."""
        timed = {
            "link_share": _link_share, "hbm_share": _hbm_share, "unpack_share": _unpack_share, "layer_s": _layer_s,
            "mfu": _mfu,
        }  # fmt: skip
        found = {name: read(self) if self.point.usable else None for name, read in timed.items()}
        return found | {"memory": _memory(self)}


def load_machines(results: Path = Path("sweeps/results")) -> dict[str, Machine]:
    """Return the machine descriptions beside the result files under `results`, by name."""
    found: dict[str, Machine] = {}
    for file in files(results):
        try:
            described = machines.load(file.parent)
        except MachineError:
            continue
        found[described.name] = described
    return found


def load_points(results: Path = Path("sweeps/results")) -> tuple[Measurement, ...]:
    """Return the latest point of each case and machine in all result files under `results`."""
    return latest(read(results).points)


def fit(points: Points, machines: Mapping[str, Machine]) -> dict[str, Efficiency]:
    """Fit the factors of each engine in `points`, error bands included, by engine name.

    Points are left out if their machine is not in `machines` or has no GPU (a CPU in its place has no link), if their
    model cannot be resolved, or if today's engine is known to be faster.
    """
    return calibrate(points, machines)[0]


def predict(
    case: Case, model: ModelSpec, machine: Machine, factors: Mapping[str, Efficiency], nvme_path: str | None = None
) -> Plan:
    """Plan `case` with its engine's factors; with default factors, and no error band, if it has none."""
    return make_plan(case, model, machine, nvme_path, factors.get(case.engine, Efficiency()))


def table(points: Points, machines: Mapping[str, Machine]) -> tuple[PredictedPoint, ...]:
    """Predict each point that ran from all other points of its engine, beside its measurement.

    A point has no prediction if its engine has no other point.
    """
    return calibrate(points, machines)[1]


def calibrate(
    points: Points, machines: Mapping[str, Machine]
) -> tuple[dict[str, Efficiency], tuple[PredictedPoint, ...]]:
    """Return the factors of each engine (`fit`) and the cross-validated points (`table`)."""
    seen = _seen(points, machines)
    engines = sorted({one.point.case.engine for one in seen})
    factors = {engine: _Factors([one for one in seen if one.point.case.engine == engine]) for engine in engines}
    rows = tuple(_predicted(one, factors[one.point.case.engine]) for one in seen)
    found = {}
    for engine, own in factors.items():
        known = [row for row in rows if row.case.engine == engine and row.tok_s_error is not None]
        here = _band([row for row in known if row.case.offload == "none"])
        away = _band([row for row in known if row.case.offload != "none"])
        found[engine] = own.fit().model_copy(update={"error": away, "error_here": here})
    return found, rows


def _predicted(one: _Seen, factors: "_Factors") -> PredictedPoint:
    """Return the row of a point, predicted from the other points of its engine."""
    point = one.point
    row = PredictedPoint(
        case=point.case,
        machine=point.machine,
        measured_tok_s=point.output_tok_s if point.usable else None,
        measured_gpu_bytes=point.gpu_peak_bytes,
    )
    if factors.points == 1:
        return row
    rate, gpu = estimate(_as_run(one), one.model, one.machine, factors.fit(without=one))
    return row.model_copy(
        update={
            "predicted_tok_s": rate if point.usable else None,
            "predicted_gpu_bytes": gpu.total - gpu.overhead,
        }
    )


def _seen(points: Points, machines: Mapping[str, Machine]) -> list[_Seen]:
    @cache
    def model_of(*key: Any) -> ModelSpec | None:
        try:
            return resolve(*key)
        except ModelError:
            return None

    found = []
    for point in points:
        case, place = point.case, machines.get(point.machine)
        if point.status != "ok" or place is None or not place.gpu_count:
            continue
        if _slower_than_today(point) or _shared_with_cpu(point):
            continue
        model = model_of(case.model, case.dtype, case.layers, case.weights)
        if model is not None:
            found.append(_Seen(point=point, model=model, machine=place, setup=_setup(point, model, place)))
    return found


def _slower_than_today(point: Measurement) -> bool:
    """Tell whether `stream` measured a point without offload before it had CUDA graphs, which records name since: its
    attention took longer to launch than the rest of the step."""
    if point.case.engine != "stream" or point.case.offload != "none" or point.effective is None:
        return False
    return "cuda_graphs" not in point.effective.settings


def _shared_with_cpu(point: Measurement) -> bool:
    """Tell whether the CPU computed experts of a point, which plans do not count."""
    return point.effective is not None and point.effective.settings.get("experts_on_cpu_per_step", 0) > 0


def _setup(point: Measurement, model: ModelSpec, place: Machine) -> Placement:
    """Return the placement of the point as the engine recorded it; as planned if it recorded none."""
    effective = point.effective
    if effective is None:
        return placement_of(point.case, model, place)
    settings: Mapping[str, Any] = effective.settings
    update: dict[str, Any] = {"graphs": settings.get("cuda_graphs") == "on"}
    update["experts"] = "on-demand" if settings.get("experts") == "on-demand" else "all"  # older ones brought all
    if "slot_bytes" in settings:  # without buffers between link and slot, the slots themselves are the ring
        slots = 1 if "buffer_bytes" in settings else settings["ring_depth"]
        buffers = settings["ring_depth"] * settings.get("buffer_bytes", 0)
        buffers += settings.get("expert_buffers", 0) * settings.get("expert_buffer_bytes", 0)
        update["slots"] = (slots * settings["slot_bytes"] + buffers) / model.layer_bytes
        update["buffers"] = 1  # the KV cache's share of the buffers is included in `slots`
        if "buffer_bytes" in settings and settings["ring_depth"]:
            update["ring_depth"] = settings["ring_depth"]
            update["expert_buffers"] = settings.get("expert_buffers", 0)
    if "kv_host_rows" in settings:
        update["kv_host_share"] = settings["kv_host_rows"] / point.case.workload.batch_size
        update["kv_on_cpu"] = str(settings["kv_attention"]).startswith("cpu")
        cores, threads = place.details.get("host", {}).get("cores", 0), settings.get("kv_threads")
        update["kv_cpu_share"] = min(1.0, threads / attending_cpus(cores)) if cores and threads else 1.0
    if effective.streamed_bytes_per_step:
        wire = effective.wire_bytes_per_step or effective.streamed_bytes_per_step
        update["wire_ratio"] = update["kept_ratio"] = min(1.0, wire / effective.streamed_bytes_per_step)
    if "host_layers" in settings:
        update["held_bytes"] = round(effective.host_weight_bytes / update.get("kept_ratio", 1.0))
    ratio = update.get("kept_ratio") or placement_of(point.case, model, place).kept_ratio
    kept = max(0, effective.gpu_weight_bytes - model.other_bytes) / ratio
    return placement_of(point.case, model, place, round(kept)).model_copy(update=update)


def _as_run(one: _Seen) -> Case:
    """Return the point's case with what the engine chose and today's plan may not: the number of CPU threads that
    attend, the way of experts, and steps without CUDA graphs."""
    host, case = one.machine.details.get("host", {}), one.point.case
    if not one.setup.graphs:
        case = case.model_copy(update={"options": (*case.options, ("cuda_graphs", "off"))})
    if one.model.num_experts:
        case = case.model_copy(update={"options": (*case.options, ("experts", one.setup.experts))})
    if not one.setup.kv_on_cpu or not host.get("cores"):
        return case
    threads = round(one.setup.kv_cpu_share * attending_cpus(host["cores"]))
    return case.model_copy(update={"options": (*case.options, ("kv_threads", threads))})


class _Factors:
    """Factors of an engine by all of its points, or by all but one.

    The values are sorted once, so that each point can be left out without a look at all others.
    """

    def __init__(self, seen: Sequence[_Seen]) -> None:
        self.points = len(seen)
        self._values: dict[tuple[str, bool], list[float]] = {}
        for one in seen:
            for name, value in one.factors.items():
                if value is not None:
                    self._values.setdefault((name, _routed(name, one)), []).append(value)
        for values in self._values.values():
            values.sort()

    def fit(self, without: _Seen | None = None) -> Efficiency:
        """Return each factor as the median over the points that determine it; its default if none does.

        What differs with routed experts is fitted to points with and without them apart, or to all of the other kind
        if there are none.
        """
        default = Efficiency()
        found: dict[str, float | None] = {}
        for name in ("hbm_share", "unpack_share", "layer_s", "memory", *_APART):
            found[name] = self._median(name, False, without) or self._median(name, True, without)
            found[name] = found[name] or getattr(default, name)
        found |= {f"expert_{name}": self._median(name, True, without) for name in _APART}
        return default.model_copy(update=found | {"points": self.points - (without is not None)})

    def _median(self, name: str, routed: bool, without: _Seen | None) -> float | None:
        values = self._values.get((name, routed), [])
        left_out = without.factors[name] if without and _routed(name, without) is routed else None
        gap = len(values) if left_out is None else bisect_left(values, left_out)
        count = len(values) - (left_out is not None)
        middle = [values[nth + (nth >= gap)] for nth in ((count - 1) // 2, count // 2)] if count else []
        return sum(middle) / 2 if middle else None


def _routed(name: str, one: _Seen) -> bool:
    """Return whether the point determines the factor for models with routed experts alone."""
    return name in _APART and bool(one.model.num_experts)


def _link_share(one: _Seen) -> float | None:
    """Return the share of the machine's link bandwidth that a decode step reached which the link bounds."""
    seconds, limits = one.point.step_median_ms, one.limits
    if not seconds or "link" not in limits or one.setup.tier != "host":
        return None
    step = one.step
    on_gpu = step.bound_by in ("unpacking", "hbm", "compute") or (step.seconds or 0.0) > HIDDEN * limits["link"]
    if (one.setup.overlapped and on_gpu) or limits.get("cpu attention", 0.0) > limits["link"]:
        return None
    lost = 0.0
    if one.setup.kv_on_cpu:  # CPU attention takes host memory bandwidth from the link
        setup = one.setup.model_copy(update={"kv_host_share": 0.0})
        alone = _Seen(point=one.point, model=one.model, machine=one.machine, setup=setup)
        lost = limits["link"] - alone.limits["link"]
    after = 0.0 if one.setup.overlapped else (step.seconds or 0.0) - limits["link"]
    waited = seconds / 1e3 - lost - after
    return (limits["link"] - lost) / waited if waited > 0 else None


def _hbm_share(one: _Seen) -> float | None:
    """Return the share of the GPU memory's bandwidth that a decode step without offload reached, which CUDA graphs
    launched at once, so that nothing else is its limit."""
    seconds, limits = one.point.step_median_ms, one.limits
    slower = dict(one.point.case.options).get("experts_kernel") == "off"  # by what no plan knows
    if not seconds or one.setup.tier != "gpu" or not one.setup.graphs or not limits or slower:
        return None
    return limits["hbm"] / (seconds / 1e3) if limits["hbm"] == max(limits.values()) else None


def _unpack_share(one: _Seen) -> float | None:
    """Return the rate at which a traced decode step unpacked coded weights, those that stay included, over the GPU
    memory's bandwidth. Steps with a second queue, those with experts of a router's choice, and those that multiply what
    stays from its codes do not tell it."""
    bandwidth, load = one.machine.hbm_bandwidth, one.point.case.workload
    spans = [span for span in one.point.timeline if span.lane == "unpack" and not span.rank]
    seconds = sum(span.end_ms - span.start_ms for span in spans) / 1e3
    if one.setup.wire_ratio == 1 or one.setup.kv_on_cpu or one.setup.experts != "all" or not bandwidth or not seconds:
        return None
    if cost.reads_codes(one.setup, one.model, load.batch_size):
        return None
    return cost.unpacked_bytes(one.setup, one.model, load.batch_size) / seconds / bandwidth or None


def _layer_s(one: _Seen) -> float | None:
    """Return the launch time of a layer in s, from a decode step without offload that no physical limit explains."""
    seconds = one.point.step_median_ms
    if not seconds or one.setup.tier != "gpu" or one.setup.graphs:
        return None
    physical = max(one.limits.values(), default=0.0)
    return seconds / 1e3 / one.model.num_layers if seconds / 1e3 > EVIDENT * physical else 0.0


def _mfu(one: _Seen) -> float | None:
    """Return the share of the matmul rate reached in a prefill with enough tokens to be bound by compute: without
    offload, or in one pass over the weights that took much longer than its other limits."""
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
    between = limits["compute"] - products + limits.get("unpacking", 0.0)
    if seconds <= between:
        return None
    least = reached.model_copy(update={"mfu": products / (seconds - between)})
    times = cost.prefill(one.setup, one.model, one.machine, load.batch_size, load.input_len, least)
    between += max(0.0, (times.seconds or 0.0) - seconds)  # seconds in which the GPU waited for layers
    return products / (seconds - between) if seconds > between else None


def _memory(one: _Seen) -> float | None:
    """Return the ratio of measured to estimated GPU bytes of buffers and activations; weights and KV cache are counted
    exactly."""
    load, measured = one.point.case.workload, one.point.gpu_peak_bytes
    if not measured or not one.machine.gpu_count:
        return None
    gpu = cost.tiers(one.setup, one.model, one.machine, load.batch_size, load.input_len, load.output_len)[0]
    working = gpu.buffers + gpu.activations
    return (measured - gpu.weights - gpu.kv_cache) / working if working else None


def _band(rows: Sequence[PredictedPoint]) -> float | None:
    errors = [abs(row.tok_s_error) for row in rows if row.tok_s_error is not None]
    return max(LEAST_ERROR, _quantile(errors, BAND)) if errors else None


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None
