"""Calibration: fit each engine's efficiency to records, and estimate the error of predictions made with it.

Each factor of an engine is read off the points where it alone decides: the share of the link from offloaded decode
steps, the rate of unpacking from their timelines, the share of the GPU memory's bandwidth, the launch time of a layer
and the share of the matmul rate from points without offload, the GPU memory from every point that ran. Models with
routed experts have a share of the link and of the matmul rate of their own. A prediction for a point that took part in
the fit proves nothing, so `calibrate` predicts each point from factors fitted without it (leave-one-out
cross-validation), for the placement that it had and the links as they were then.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from zinfer.analysis.group import Points
from zinfer.checkpoint.resolve import resolve
from zinfer.core.machine import Machine, MachineError
from zinfer.core.model import ModelError, ModelSpec
from zinfer.core.value import group_by
from zinfer.plan.bytes import EAGER, Placement, Sizes, Tiers
from zinfer.plan.placement import Placer
from zinfer.plan.planner import e2e_s, times_of, tok_s
from zinfer.plan.times import RATES, Efficiency, Times, Timing, kind
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import files, read
from zinfer.system import atomic, machines
from zinfer.system.host import attending_cpus


@dataclass(frozen=True)
class Evidence:
    """Tuned numbers: when a point determines a factor, and how wide a band of errors is."""

    band: float = 0.9  # share of the cross-validated errors of a kind that lie within its band
    min_error: float = 0.05  # narrowest band: other machines differ in ways that no record shows
    kind_points: int = 3  # records of a kind, at least, for a band
    prompt_tokens: int = 2048  # in a pass that these make compute-bound on every GPU of the catalogue
    hidden: float = 1.1  # a step at most this many times longer than its copies shows the rate of the link
    computes: float = 1.5  # a prefill this many times longer than its other limits is decided by compute alone
    all_kept: float = 0.98  # of the layers' bytes: host memory that holds as many, rounding aside, holds all
    launches: float = 1.15  # a step this many times longer than bytes and products take is decided by launches alone


EVIDENCE = Evidence()
_ROUTED = ("link_share", "mfu")  # factors of which models with routed experts have their own
_EFFICIENCIES = ("hbm_share", "unpack_share", "layer_s", "expert_kernel_s", "memory", *_ROUTED)


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
        one_link, all_links = self.point.link_bandwidth, self.point.all_links_bandwidth
        rates = {"h2d_bandwidth": one_link} if one_link and self.placement.pinned else {}
        if all_links:  # all read one memory
            memory = max(all_links, self.machine.host_bandwidth or 0.0)
            rates |= {"links_bandwidth": all_links, "host_bandwidth": memory}
        return self.machine.model_copy(update=rates)

    @cached_property
    def step(self) -> Times:
        """Times of a decode step over the link's whole bandwidth."""
        workload = self.point.case.workload
        return self.timing(Efficiency(link_share=1.0)).step(workload.batch_size, workload.mean_context)

    def timing(self, efficiency: Efficiency) -> Timing:
        """Return the timing of passes as they were run."""
        return Timing(self.placement, self.model, self.linked_machine, efficiency)

    def tiers(self, efficiency: Efficiency) -> Tiers:
        """Return the bytes by tier as they were placed."""
        case, sizes = self.point.case, Sizes(self.placement, self.model)
        return sizes.tiers(case.workload, self.machine, efficiency.memory, case.load_format != "dummy")

    def error(self, efficiency: Efficiency) -> float | None:
        """Return output tok/s as predicted over measured, less one."""
        workload, measured = self.point.case.workload, self.point.output_tok_s
        prefill, step = (times.seconds for times in times_of(self.timing(efficiency), workload))
        predicted = tok_s(workload, e2e_s(workload, prefill, step))
        return predicted / measured - 1 if self.point.usable and predicted and measured else None

    @cached_property
    def efficiencies(self) -> Mapping[str, float | None]:
        """Value of each factor by this point alone."""
        usable = self.point.usable
        return {name: getattr(self, name)() if usable or name == "memory" else None for name in _EFFICIENCIES}

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
            without = replace(self, placement=placement.model_copy(update={"kv_host_share": 0.0}))
            lost = limits["link"] - without.step.limits["link"]
        after = 0.0 if placement.overlapped else (step.seconds or 0.0) - limits["link"]
        waited = step_ms / 1e3 - lost - after
        return (limits["link"] - lost) / waited if waited > 0 else None

    def hbm_share(self) -> float | None:
        """Return the share of the memory's bandwidth of a graphed step."""
        step_ms, limits, placement = self.point.step_median_ms, self.step.limits, self.placement
        if not step_ms or placement.tier != "gpu" or not placement.graphs or not limits:
            return None
        reading = step_ms / 1e3 - RATES.kernel_s * self.model.num_layers
        reading -= limits["compute"] if self.model.num_experts else 0.0
        return limits["hbm"] / reading if limits["hbm"] == max(limits.values()) and reading > 0 else None

    def expert_kernel_s(self) -> float | None:
        """Return a layer's kernels that read experts from codes, in a graph."""
        step_ms, placement = self.point.step_median_ms, self.placement
        tokens, sizes = self.point.case.workload.batch_size, Sizes(placement, self.model)
        if not step_ms or not self.model.num_experts or not placement.graphs or not sizes.reads_codes:
            return None
        rest = step_ms / 1e3 - (self.step.seconds or 0.0)
        return max(0.0, rest / self.model.num_layers) if not sizes.wire(tokens) else None

    def unpack_share(self) -> float | None:
        """Return the unpacking rate of a traced step over the memory's bandwidth. A trace is made without graphs."""
        placement, bandwidth = self.placement, self.machine.hbm_bandwidth
        sizes, batch_size = Sizes(placement, self.model), self.point.case.workload.batch_size
        if placement.wire_ratio == 1 or placement.kv_on_cpu or placement.experts != "all" or placement.graphs:
            return None
        spans = [span for span in self.point.timeline if span.lane == "unpack" and not span.rank]
        seconds = sum(span.end_ms - span.start_ms for span in spans) / 1e3
        if not bandwidth or not seconds or sizes.reads_codes:
            return None
        return sizes.unpacked(batch_size) / seconds / bandwidth or None

    def layer_s(self) -> float | None:
        """Return the launch time of a layer, where launches bound."""
        step_ms = self.point.step_median_ms
        if not step_ms or self.placement.tier != "gpu" or self.placement.graphs:
            return None
        explained = EVIDENCE.launches * (self.step.seconds or 0.0)
        return step_ms / 1e3 / self.model.num_layers if step_ms / 1e3 > explained else 0.0

    def mfu(self) -> float | None:
        """Return the share of the matmul rate of a compute-bound prefill."""
        load, flops = self.point.case.workload, self.machine.matmul_flops
        one_pass = self.placement.tier == "gpu" or self.placement.blocks
        if not flops or not one_pass or load.batch_size * load.input_len < EVIDENCE.prompt_tokens:
            return None
        reached = Efficiency(link_share=self.link_share() or 1.0)

        def seconds(mfu: float) -> float:
            timing = self.timing(reached.model_copy(update={"mfu": mfu}))
            return timing.prefill(load.batch_size, load.input_len).seconds or 0.0

        measured, low, high = median(self.point.ttft_ms) / 1e3, 0.01, 1.0
        if measured < EVIDENCE.computes * seconds(1e9) or measured <= seconds(high):
            return None
        for _ in range(14):  # a larger share takes less time
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(middle) > measured else (low, middle)
        return low

    def memory(self) -> float | None:
        """Return the ratio of measured to counted bytes of buffers and activations; all else is counted exactly."""
        measured = self.point.gpu_bytes
        gpu = self.tiers(Efficiency()).gpu
        working = gpu.buffers + gpu.activations
        return (measured - gpu.weights - gpu.kv_cache) / working if measured and working else None


def load_machines(results: Path = Path("sweeps/results")) -> dict[str, Machine]:
    """Return the machines described under `results`, by name."""
    described: dict[str, Machine] = {}
    for file in files(results):
        with suppress(MachineError):
            machine = machines.load(file.parent)
            described[machine.name] = machine
    return described


def calibrate(points: Points, machines: Mapping[str, Machine]) -> dict[str, Efficiency]:
    """Return each engine's efficiency, with the errors of points left out."""
    by_engine = group_by(fit_points(points, machines), lambda point: point.point.case.engine)
    return {
        engine: fit(alike).model_copy(update={"errors": _bands(alike)}) for engine, alike in sorted(by_engine.items())
    }


def write(path: Path, results: Path = Path("sweeps/results")) -> None:
    """Fit the records under `results`, and write the factors to `path`. Four digits depend on no order."""
    fitted = calibrate(latest(read(results).points), load_machines(results))

    def rounded(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [rounded(part) for part in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    efficiencies = {
        engine: {name: rounded(value) for name, value in efficiency.model_dump(exclude_defaults=True).items()}
        for engine, efficiency in sorted(fitted.items())
    }
    atomic.write(path, json.dumps(efficiencies, indent=1) + "\n")


def fit_points(points: Points, machines: Mapping[str, Machine]) -> list[FitPoint]:
    """Return the points that a fit may use: of a GPU and a model that are known, and of today's engine."""

    @cache
    def model_of(*key: Any) -> ModelSpec | None:
        with suppress(ModelError):
            return resolve(*key)
        return None

    usable = []
    for point in points:
        case, machine = point.case, machines.get(point.machine)
        if point.status != "ok" or machine is None or not machine.gpu_count or point.effective is None:  # of a server
            continue
        settings, kernel = point.effective.settings, dict(case.options).get("experts_kernel")
        # Plans do not count what the CPU computed by torch, nor what this kernel gained.
        if kernel == "off" or (settings.get("experts_on_cpu_per_step", 0) > 0 and "cpu_experts" not in settings):
            continue
        if (model := model_of(case.model, case.dtype, case.layers, case.weights)) is not None:
            usable.append(FitPoint(point, model, machine, _recorded_placement(point, model, machine)))
    return usable


def _recorded_placement(point: Measurement, model: ModelSpec, machine: Machine) -> Placement:
    """Return the placement of the point as the engine recorded it; as planned if it recorded none."""
    effective, workload, placer = point.effective, point.case.workload, Placer(point.case, model, machine)
    assert effective is not None
    settings: Mapping[str, Any] = effective.settings
    update: dict[str, Any] = {
        "graphs": str(settings.get("cuda_graphs")).startswith("on"),
        "kv_host_share": 0.0,
        "kv_on_cpu": False,
        "eager": model.architecture in EAGER and settings.get("attention") == "eager",
    }
    update["experts"] = "on-demand" if settings.get("experts") == "on-demand" else "all"  # older ones brought all
    update["cpu_tokens"] = settings.get("cpu_expert_tokens", 0) if settings.get("cpu_experts") == "on" else 0
    update["linked_share"] = settings.get("linked_share", 0.0)
    if "slot_bytes" in settings:
        depth, expert_buffers = settings["ring_depth"], settings.get("expert_buffers", 0)
        buffers = depth * settings["buffer_bytes"] + expert_buffers * settings.get("expert_buffer_bytes", 0)
        update["layer_buffers"] = (settings["slot_bytes"] + buffers) / model.layer_bytes
        update["kv_buffers"] = 1  # the KV cache's share of the buffers is included in `layer_buffers`
        update |= {"ring_depth": depth, "expert_buffers": expert_buffers}
    if "kv_host_rows" in settings:
        update["kv_host_share"] = settings["kv_host_rows"] / workload.batch_size
        update["kv_on_cpu"] = str(settings["kv_attention"]).startswith("cpu")
        cores, threads = machine.details.get("host", {}).get("cores", 0), settings.get("kv_threads")
        update["kv_cpu_share"] = min(1.0, threads / attending_cpus(cores)) if cores and threads else 1.0
    if effective.streamed_bytes_per_step and effective.wire_bytes_per_step:
        coded = effective.wire_bytes_per_step / effective.streamed_bytes_per_step
        update["wire_ratio"] = update["kept_ratio"] = min(1.0, coded)
    if "host_layers" in settings:
        update["held_bytes"] = round(effective.host_weight_bytes / update.get("kept_ratio", 1.0))
    ratio = update.get("kept_ratio") or placer.bare(workload).kept_ratio
    kept = max(0, effective.gpu_weight_bytes - model.other_bytes) / ratio
    mixtures = tuple(index for index, layer in enumerate(model.layers) if layer.expert_parameters)
    update["expert_layers"] = whole = mixtures[: int(settings.get("gpu_expert_layers", 0))]
    if "resident_layers" in settings and (update["experts"] == "all" or whole):
        on_demand = model.routed_bytes if whole else 0
        kept = (model.streamed_bytes - on_demand) * settings["resident_layers"] / model.num_layers
        kept += sum(model.layers[index].expert_parameters for index in whole) * model.dtype_bytes
    update["resident_bytes"] = min(model.streamed_bytes, round(kept))
    update["unpacked_layers"] = tuple(range(min(model.num_layers, int(settings.get("unpacked_layers", 0)))))
    # Earlier versions kept all layers in host memory.
    update["moved"] = effective.host_weight_bytes < EVIDENCE.all_kept * ratio * model.streamed_bytes
    return placer.bare(workload, round(kept)).model_copy(update=update)


def fit(points: Sequence[FitPoint], without: FitPoint | None = None) -> Efficiency:
    """Return each factor's median over points that tell it, or its default."""
    others = [point for point in points if point is not without]

    def fitted(name: str, *routed: bool) -> float | None:
        alike = (point for point in others if not routed or bool(point.model.num_experts) in routed)
        values = [value for point in alike if (value := point.efficiencies[name]) is not None]
        if name == "layer_s":  # the shortest step that launches may have bounded: others may have waited
            return min((value for value in values if value > 0), default=None)
        return median(values) if values else None

    shared = {name: fitted(name) for name in _EFFICIENCIES if name not in _ROUTED}
    dense, routed = ({name: fitted(name, routed) for name in _ROUTED} for routed in (False, True))
    update = {name: value for name, value in (shared | routed).items() if value}
    update |= {name: value for name, value in dense.items() if value}
    experts = {f"expert_{name}": value for name, value in routed.items()}
    return Efficiency().model_copy(update=update | experts | {"points": len(others)})


def _bands(points: Sequence[FitPoint]) -> tuple[tuple[str, float], ...]:
    """Return each kind's band of errors of points left out."""
    left_out = ((point, fit(points, point)) for point in points if len(points) > 1)
    named = ((kind(each.placement, each.model, each.machine), each.error(other)) for each, other in left_out)
    errors = sorted((name, abs(error)) for name, error in named if error is not None)
    by_kind = group_by(errors, lambda pair: pair[0]).items()
    many = ((name, missed) for name, missed in by_kind if len(missed) >= EVIDENCE.kind_points)
    return tuple((name, max(EVIDENCE.min_error, missed[int(EVIDENCE.band * len(missed))][1])) for name, missed in many)
