"""Limits are limits: no committed record beats the plan's, and no plan says `fits` where memory ran out."""

from itertools import chain
from statistics import mean
from typing import Any

import pytest

from tests import committed
from zinfer.analysis import calibrate, rates
from zinfer.analysis.group import groups
from zinfer.checkpoint.resolve import resolve
from zinfer.core.engine import ENGINES
from zinfer.core.machine import PCIE_BANDWIDTH, Machine, catalogue, override
from zinfer.plan.planner import Planner, make_plan
from zinfer.record.measurement import Measurement
from zinfer.system import machines


@pytest.fixture(scope="module")
def usable() -> list[Any]:
    """Return the measured committed points. Each has its model, machine and placement."""
    return [point for point in calibrate.fit_points(committed.points(), committed.machines()) if point.point.usable]


@pytest.mark.long
def test_no_measured_point_beats_its_limit(usable: list[Any]) -> None:
    assert len(usable) > 50
    faster = []
    for seen in usable:
        point: Measurement = seen.point
        plan: Any = make_plan(point.case, seen.model, seen.linked_machine)
        if point.case.offload == "nvme" and seen.machine.nvme_bandwidth is None:
            assert plan.step_s is None, "the rate of that disk is not known"
            continue
        limits = {"ttft": plan.prefill_s, "tpot": plan.step_s, "1 / tok/s": 1 / plan.output_tok_s}
        measured = {"ttft": mean(point.ttft_ms) / 1e3, "tpot": (point.tpot_ms or 0) / 1e3}
        measured["1 / tok/s"] = 1 / (point.output_tok_s or 1)
        label = f"{point.case.model} {point.case.label()} batch {point.case.workload.batch_size}"
        faster += [f"{label}: {name}" for name in limits if measured[name] < limits[name]]
    assert faster == []


@pytest.mark.long
def test_a_limit_is_near_what_the_best_engine_reaches(usable: list[Any]) -> None:
    """A limit that nothing comes near is worthless: decode steps that stream come within a quarter. Where most layers
    stay, coded, the GPU is busy unpacking them, at a rate that no limit knows, and so is the CPU with the arithmetic of
    attention, or of experts; and a host that was slow in some of the steps says nothing."""

    def busy(seen: Any) -> bool:
        settings = seen.point.effective.settings
        attends = settings.get("kv_attention") == "cpu" and bool(settings["kv_host_rows"])
        return attends or settings.get("cpu_experts") == "on"

    shares = [
        (make_plan(seen.point.case, seen.model, seen.linked_machine).step_s or 0) * 1e3 / (seen.point.tpot_ms or 1)
        for seen in usable
        if seen.point.case.engine == "stream" and seen.point.case.offload == "cpu" and seen.placement.pinned
        if 2 * seen.placement.resident_bytes < seen.model.streamed_bytes and not busy(seen)
        if max(chain.from_iterable(seen.point.step_ms)) < 1.6 * min(chain.from_iterable(seen.point.step_ms))
    ]
    assert len(shares) > 40
    assert min(shares) > 0.75


@pytest.mark.parametrize("calibrated", [False, True])
def test_no_plan_says_that_a_batch_fits_which_ran_out_of_memory(calibrated: bool) -> None:
    efficiencies = calibrate.calibrate(committed.points(), committed.machines()) if calibrated else {}
    seen = 0
    for group in groups(committed.points()).values():
        for edge in rates.edges(group):
            if edge.smallest_oom is None or edge.largest_ok is None:
                continue
            spec = resolve(edge.load.model, edge.load.dtype, edge.load.layers)
            if spec.architecture in ENGINES[edge.load.engine].options().transport().fuses:
                continue  # its scores took memory when it was recorded
            machine, efficiency = committed.machines()[group[0].machine], efficiencies.get(edge.load.engine)
            largest = Planner(edge.load, spec, machine, efficiency).max_batch(edge.load.workload)
            assert 0.8 * edge.largest_ok < largest < edge.smallest_oom, edge.load.label()
            seen += 1
    assert seen >= 4


def test_peaks_are_of_the_datasheet_the_wire_or_the_user() -> None:
    h100 = machines.load("h100-80gb").at_peak()
    assert (h100.matmul_flops, h100.hbm_bandwidth) == pytest.approx((989.4e12, 3.35e12))
    assert h100.h2d_bandwidth == PCIE_BANDWIDTH[5]
    measured = next(value for value in committed.machines().values() if value.gpu_name == "NVIDIA H200").at_peak()
    assert (measured.matmul_flops, measured.h2d_bandwidth) == (989.4e12, PCIE_BANDWIDTH[5])
    h100 = override(machines.load("h100-80gb"), "h2d_bandwidth=20GB/s").at_peak()
    assert h100.h2d_bandwidth == 20e9
    bare = Machine(name="laptop", source="measured", h2d_bandwidth=8e9, matmul_flops=1e12)
    assert bare.at_peak() == bare
    coherent = machines.load("gh200-96gb")
    assert coherent.at_peak().h2d_bandwidth == coherent.h2d_bandwidth


def test_the_catalogue_is_below_its_peaks() -> None:
    for name in catalogue():
        machine = machines.load(name)
        peak = machine.at_peak()
        for field in ("h2d_bandwidth", "hbm_bandwidth", "matmul_flops"):
            assert (getattr(machine, field) or 0) <= (getattr(peak, field) or 0), (name, field)
