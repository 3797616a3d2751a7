"""Calibration: fit each engine's efficiency to records, and estimate the error of predictions made with it.

Each factor of an engine is read off the points where it alone decides: the share of the link from offloaded decode
steps, the rate of unpacking from their timelines, the share of the GPU memory's bandwidth, the launch time of a layer
and the share of the matmul rate from points without offload, the GPU memory from every point that ran. Models with
routed experts have a share of the link and of the matmul rate of their own, so that they do not spoil others' shares.
A prediction for a point that took part in the fit proves nothing, so `calibrate` predicts each point from factors
fitted without it (leave-one-out cross-validation)::

    efficiencies = fit(points, machines)
    predict(case, model, machine, efficiencies).output_tok_s
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from zinfer.plan.bytes import Placement, Sizes
from zinfer.plan.placement import Placer
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.times import Efficiency, Times, Timing
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import files, read
from zinfer.system import machines
from zinfer.system.host import attending_cpus


@dataclass(frozen=True)
class Evidence:
    """Tuned numbers: when a point determines a factor, and how wide a band of errors is."""

    band: float = 0.9  # share of the cross-validated errors that lie within `Efficiency.error`
    min_error: float = 0.05  # narrowest band: other machines differ in ways that no record shows
    prompt_tokens: int = 2048  # in a pass that these make compute-bound on every GPU of the catalogue
    hidden: float = 1.1  # a step at most this many times longer than its copies shows the rate of the link
    computes: float = 1.5  # a prefill this many times longer than its other limits is decided by compute alone
    launches: float = 1.15  # a step this many times longer than its physical limits is decided by launches alone


EVIDENCE = Evidence()
_ROUTED = ("link_share", "mfu")  # factors of which models with routed experts have their own
_FACTORS = ("hbm_share", "unpack_share", "layer_s", "memory", *_ROUTED)


class PredictedPoint(Frozen):
    """Measured point with its prediction from the other records; None if there is no prediction or measurement."""

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


@dataclass(frozen=True)
class FitPoint:
    """Point with its model, machine and placement: all that a fit needs. A factor is None if it does not tell it."""

    point: Measurement
    model: ModelSpec
    machine: Machine
    placement: Placement

    @cached_property
    def linked_machine(self) -> Machine:
        """Machine with the link bandwidths measured just before and after the load: links differ from host to host."""
        one_link = self.point.link_bandwidth if self.placement.pinned else None
        all_links = self.point.all_links_bandwidth
        rates = {"h2d_bandwidth": one_link} if one_link else {}
        if all_links:
            rates |= {"links_bandwidth": all_links}
            rates |= {"host_bandwidth": max(all_links, self.machine.host_bandwidth or 0.0)}  # all read one memory
        return self.machine.model_copy(update=rates)

    @cached_property
    def step(self) -> Times:
        """Times of a decode step over the link's whole bandwidth."""
        return self._step(self.placement)

    def _step(self, placement: Placement) -> Times:
        load = self.point.case.workload
        timing = Timing(placement, self.model, self.linked_machine, Efficiency(link_share=1.0))
        return timing.step(load.batch_size, load.input_len + load.output_len // 2)

    @cached_property
    def factors(self) -> Mapping[str, float | None]:
        """Value of each factor by this point alone."""
        return {name: getattr(self, name)() if self.point.usable or name == "memory" else None for name in _FACTORS}

    @cached_property
    def case_as_run(self) -> Case:
        """Case with what the engine chose and today's plan may not: CPU threads, way of experts, no CUDA graphs."""
        cores, options = self.machine.details.get("host", {}).get("cores"), self.point.case.options
        if not self.placement.graphs:
            options = (*options, ("cuda_graphs", "off"))
        if self.model.num_experts:
            options = (*options, ("experts", self.placement.experts))
        if self.placement.kv_on_cpu and cores:
            options = (*options, ("kv_threads", round(self.placement.kv_cpu_share * attending_cpus(cores))))
        return self.point.case.model_copy(update={"options": options})

    def link_share(self) -> float | None:
        """Return the share of the link that a link-bound step reached."""
        step, limits, placement, step_ms = self.step, self.step.limits, self.placement, self.point.step_median_ms
        if not step_ms or "link" not in limits or placement.tier != "host":
            return None
        on_gpu = step.bound_by in ("unpacking", "hbm", "compute")
        on_gpu = on_gpu or (step.seconds or 0.0) > EVIDENCE.hidden * limits["link"]
        if (placement.overlapped and on_gpu) or limits.get("cpu attention", 0.0) > limits["link"]:
            return None
        lost = 0.0
        if placement.kv_on_cpu:  # CPU attention takes host memory bandwidth from the link
            lost = limits["link"] - self._step(placement.model_copy(update={"kv_host_share": 0.0})).limits["link"]
        after = 0.0 if placement.overlapped else (step.seconds or 0.0) - limits["link"]
        waited = step_ms / 1e3 - lost - after
        return (limits["link"] - lost) / waited if waited > 0 else None

    def hbm_share(self) -> float | None:
        """Return the share of the GPU memory's bandwidth without offload.

        CUDA graphs launched it at once, so that nothing else is its limit.
        """
        step_ms, limits, placement = self.point.step_median_ms, self.step.limits, self.placement
        slower = dict(self.point.case.options).get("experts_kernel") == "off"  # by what no plan knows
        if not step_ms or placement.tier != "gpu" or not placement.graphs or not limits or slower:
            return None
        return limits["hbm"] / (step_ms / 1e3) if limits["hbm"] == max(limits.values()) else None

    def unpack_share(self) -> float | None:
        """Return the unpacking rate of a traced step over the memory's bandwidth.

        Resident ones are included. Steps with a second queue, those with experts on demand, and steps that multiply
        resident layers from their codes do not tell it.
        """
        placement, bandwidth = self.placement, self.machine.hbm_bandwidth
        spans = [span for span in self.point.timeline if span.lane == "unpack" and not span.rank]
        seconds = sum(span.end_ms - span.start_ms for span in spans) / 1e3
        if placement.wire_ratio == 1 or placement.kv_on_cpu or placement.experts != "all" or not bandwidth:
            return None
        sizes, batch_size = Sizes(placement, self.model), self.point.case.workload.batch_size
        if not seconds or sizes.reads_codes(batch_size):
            return None
        return sizes.unpacked(batch_size) / seconds / bandwidth or None

    def layer_s(self) -> float | None:
        """Return the launch time of a layer, where launches bound."""
        step_ms = self.point.step_median_ms
        if not step_ms or self.placement.tier != "gpu" or self.placement.graphs:
            return None
        physical = max(self.step.limits.values(), default=0.0)
        return step_ms / 1e3 / self.model.num_layers if step_ms / 1e3 > EVIDENCE.launches * physical else 0.0

    def mfu(self) -> float | None:
        """Return the share of the matmul rate of a compute-bound prefill.

        The prefill is one without offload, or one pass over the weights that took much longer than its other limits.
        """
        load, flops = self.point.case.workload, self.machine.matmul_flops
        one_pass = self.placement.tier == "gpu" or self.placement.blocks
        if not flops or not one_pass or load.batch_size * load.input_len < EVIDENCE.prompt_tokens:
            return None

        def prefill(mfu: float) -> Times:
            reached = Efficiency(link_share=self.link_share() or 1.0, mfu=mfu)
            return Timing(self.placement, self.model, self.machine, reached).prefill(load.batch_size, load.input_len)

        limits, seconds = prefill(1.0).limits, median(self.point.ttft_ms) / 1e3
        others = [limit for bound, limit in limits.items() if bound != "compute"]
        if not limits or seconds < EVIDENCE.computes * max(others, default=0.0):
            return None
        products = self.model.prefill_flops(load.batch_size, load.input_len) / flops
        between = limits["compute"] - products + limits.get("unpacking", 0.0)
        if seconds <= between:
            return None
        times = prefill(products / (seconds - between))
        between += max(0.0, (times.seconds or 0.0) - seconds)  # seconds in which the GPU waited for layers
        return products / (seconds - between) if seconds > between else None

    def memory(self) -> float | None:
        """Return the ratio of measured to counted bytes of buffers and activations; all else is counted exactly."""
        measured = self.point.gpu_peak_bytes
        gpu = Sizes(self.placement, self.model).tiers(self.point.case.workload).gpu
        working = gpu.buffers + gpu.activations
        return (measured - gpu.weights - gpu.kv_cache) / working if measured and working else None


def load_machines(results: Path = Path("sweeps/results")) -> dict[str, Machine]:
    """Return the machines described under `results`, by name."""
    described: dict[str, Machine] = {}
    for file in files(results):
        try:
            machine = machines.load(file.parent)
        except MachineError:
            continue
        described[machine.name] = machine
    return described


def load_points(results: Path = Path("sweeps/results")) -> tuple[Measurement, ...]:
    """Return the latest point of each case and machine under `results`."""
    return latest(read(results).points)


def fit(points: Points, machines: Mapping[str, Machine]) -> dict[str, Efficiency]:
    """Fit the efficiency of each engine, error bands included, by name.

    Points are left out if their machine is not in `machines` or has no GPU (a CPU in its place has no link), if their
    model cannot be resolved, or if today's engine is known to be faster.
    """
    return calibrate(points, machines)[0]


def predict(case: Case, model: ModelSpec, machine: Machine, efficiencies: Mapping[str, Efficiency]) -> Plan:
    """Plan `case` with its engine's efficiency; with the default, and no error band, if it has none."""
    return Planner(case, model, machine, efficiencies.get(case.engine, Efficiency())).plan


def calibrate(
    points: Points, machines: Mapping[str, Machine]
) -> tuple[dict[str, Efficiency], tuple[PredictedPoint, ...]]:
    """Return the efficiency of each engine, and each point with its prediction.

    A point is predicted from the others; it has no prediction if its engine has no other point.
    """
    usable = fit_points(points, machines)
    engines = sorted({point.point.case.engine for point in usable})
    fits = {engine: _Fit([point for point in usable if point.point.case.engine == engine]) for engine in engines}
    rows = tuple(_predicted(point, fits[point.point.case.engine]) for point in usable)
    efficiencies = {}
    for engine, fitted in fits.items():
        of_engine = [row for row in rows if row.case.engine == engine]
        bands = {
            "error": _band([row for row in of_engine if row.case.offload != "none"]),
            "resident_error": _band([row for row in of_engine if row.case.offload == "none"]),
        }
        efficiencies[engine] = fitted.efficiency().model_copy(update=bands)
    return efficiencies, rows


def fit_points(points: Points, machines: Mapping[str, Machine]) -> list[FitPoint]:
    """Return the points that a fit may use."""

    @cache
    def model_of(*key: Any) -> ModelSpec | None:
        try:
            return resolve(*key)
        except ModelError:
            return None

    usable = []
    for point in points:
        case, machine, effective = point.case, machines.get(point.machine), point.effective
        if point.status != "ok" or machine is None or not machine.gpu_count:
            continue
        if effective is not None:
            # Before `stream` had CUDA graphs, which records name since, attention took longer to launch than the rest.
            resident = case.engine == "stream" and case.offload == "none"
            if resident and "cuda_graphs" not in effective.settings:
                continue
            if effective.settings.get("experts_on_cpu_per_step", 0) > 0:  # plans do not count what the CPU computed
                continue
        model = model_of(case.model, case.dtype, case.layers, case.weights)
        if model is not None:
            usable.append(FitPoint(point, model, machine, _recorded_placement(point, model, machine)))
    return usable


def _recorded_placement(point: Measurement, model: ModelSpec, machine: Machine) -> Placement:
    """Return the placement of the point as the engine recorded it; as planned if it recorded none."""
    effective, workload, placer = point.effective, point.case.workload, Placer(point.case, model, machine)
    if effective is None:
        return placer.bare(workload)
    settings: Mapping[str, Any] = effective.settings
    update: dict[str, Any] = {"graphs": settings.get("cuda_graphs") == "on"}
    update["experts"] = "on-demand" if settings.get("experts") == "on-demand" else "all"  # older ones brought all
    if "slot_bytes" in settings:  # without ring buffers the layer buffers themselves are the ring
        layers = 1 if "buffer_bytes" in settings else settings["ring_depth"]
        buffers = settings["ring_depth"] * settings.get("buffer_bytes", 0)
        buffers += settings.get("expert_buffers", 0) * settings.get("expert_buffer_bytes", 0)
        update["layer_buffers"] = (layers * settings["slot_bytes"] + buffers) / model.layer_bytes
        update["kv_buffers"] = 1  # the KV cache's share of the buffers is included in `layer_buffers`
        if "buffer_bytes" in settings and settings["ring_depth"]:
            update["ring_depth"] = settings["ring_depth"]
            update["expert_buffers"] = settings.get("expert_buffers", 0)
    if "kv_host_rows" in settings:
        update["kv_host_share"] = settings["kv_host_rows"] / workload.batch_size
        update["kv_on_cpu"] = str(settings["kv_attention"]).startswith("cpu")
        cores, threads = machine.details.get("host", {}).get("cores", 0), settings.get("kv_threads")
        update["kv_cpu_share"] = min(1.0, threads / attending_cpus(cores)) if cores and threads else 1.0
    if effective.streamed_bytes_per_step:
        wire = effective.wire_bytes_per_step or effective.streamed_bytes_per_step
        update["wire_ratio"] = update["kept_ratio"] = min(1.0, wire / effective.streamed_bytes_per_step)
    if "host_layers" in settings:
        update["held_bytes"] = round(effective.host_weight_bytes / update.get("kept_ratio", 1.0))
    ratio = update.get("kept_ratio") or placer.bare(workload).kept_ratio
    kept = max(0, effective.gpu_weight_bytes - model.other_bytes) / ratio
    return placer.bare(workload, round(kept)).model_copy(update=update)


class _Fit:
    """Efficiency of an engine by all of its points but one.

    The values are sorted once, so that each point can be left out without a look at all others.
    """

    def __init__(self, points: Sequence[FitPoint]) -> None:
        self.points = len(points)
        self._values: dict[tuple[str, bool], list[float]] = {}
        for point in points:
            for name, value in point.factors.items():
                if value is not None:
                    self._values.setdefault((name, _is_routed(name, point)), []).append(value)
        for values in self._values.values():
            values.sort()

    def efficiency(self, without: FitPoint | None = None) -> Efficiency:
        """Return each factor as the median over the points that determine it; its default if none does.

        What differs with routed experts is fitted to points with and without them separately, or to all of the other
        kind if there are none.
        """
        default = Efficiency()
        medians: dict[str, float | None] = {}
        for name in _FACTORS:
            value = self._median(name, False, without) or self._median(name, True, without)
            medians[name] = value or getattr(default, name)
        medians |= {f"expert_{name}": self._median(name, True, without) for name in _ROUTED}
        return default.model_copy(update=medians | {"points": self.points - (without is not None)})

    def _median(self, name: str, routed: bool, without: FitPoint | None) -> float | None:
        values = self._values.get((name, routed), [])
        left_out = without.factors[name] if without and _is_routed(name, without) is routed else None
        gap = len(values) if left_out is None else bisect_left(values, left_out)
        count = len(values) - (left_out is not None)
        middle = [values[index + (index >= gap)] for index in ((count - 1) // 2, count // 2)] if count else []
        return sum(middle) / 2 if middle else None


def _is_routed(name: str, point: FitPoint) -> bool:
    return name in _ROUTED and bool(point.model.num_experts)


def _predicted(fit_point: FitPoint, fitted: _Fit) -> PredictedPoint:
    point = fit_point.point
    fields: dict[str, Any] = {"case": point.case, "machine": point.machine, "measured_gpu_bytes": point.gpu_peak_bytes}
    fields["measured_tok_s"] = point.output_tok_s if point.usable else None
    if fitted.points > 1:
        case, efficiency = fit_point.case_as_run, fitted.efficiency(without=fit_point)
        planner = Planner(case, fit_point.model, fit_point.machine, efficiency)
        gpu = planner.tiers(case.workload).gpu
        fields["predicted_tok_s"] = planner.rate(case.workload) if point.usable else None
        fields["predicted_gpu_bytes"] = gpu.total - gpu.overhead
    return PredictedPoint(**fields)


def _band(rows: Sequence[PredictedPoint]) -> float | None:
    """Return the error that `EVIDENCE.band` of the rows stay within; None without one."""
    errors = sorted(abs(row.tok_s_error) for row in rows if row.tok_s_error is not None)
    if not errors:
        return None
    return max(EVIDENCE.min_error, errors[min(len(errors) - 1, int(EVIDENCE.band * len(errors)))])


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None
