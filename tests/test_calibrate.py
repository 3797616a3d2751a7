"""Leave-one-out predictions against the committed records, and fits of known factors."""

from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from tests import committed
from tests.results import case, point
from zinfer.analysis import calibrate
from zinfer.analysis.group import Points
from zinfer.checkpoint import resolve
from zinfer.core.case import Case
from zinfer.core.engine import plan_options
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.value import group_by
from zinfer.plan.bytes import Sizes
from zinfer.plan.placement import Placer
from zinfer.plan.planner import Plan, Planner, make_plan, times_of
from zinfer.plan.times import Efficiency, kind, shipped
from zinfer.record.measurement import Effective, Measurement
from zinfer.system import machines

H100 = machines.load("h100-80gb").model_copy(update={"name": "h100", "host_bytes": 1 << 40})
# Configurations and models whose records plans miss by more than a tenth. Experts that stayed were those of the first
# layers when the first was recorded, so that the last ones brought all of theirs, which the link could not do ahead.
# One of three loads on two GPUs took a third longer a step than the others, for a reason that no record tells.
# Accelerate's copies of small layers ran at 32 of the link's 55 GB/s, slower than those of the larger models' layers.
MISSED = {
    ("accelerate cpu gpu-weights=0%", "llama-3.1-8b"),
    ("accelerate cpu gpu-weights=50%", "llama-3.1-8b"),
    ("stream cpu gpu-weights=70% kv_offload=none", "mixtral-8x7b"),
    ("stream cpu gpu-weights=16% gpus=2", "bloom-176b"),
    ("stream none", "gpt-oss-120b"),  # a prompt of one row took 119 ms on this host, 76 on the one before: launches
    ("stream cpu gpu-weights=0% experts=cpu", "deepseek-v3"),  # the link brings dense layers and experts at once
    ("tensorrt cpu gpu-weights=100%", "llama-3.1-8b"),  # with all weights on the GPU it takes twice the memory's time
}


class PredictedPoint(NamedTuple):
    """Measured point, and what the other records predict of it."""

    case: Case
    machine: str
    kind: str
    predicted: dict[str, float]
    measured: dict[str, float]

    def error(self, quantity: str) -> float | None:
        predicted, measured = self.predicted.get(quantity), self.measured.get(quantity)
        return predicted / measured - 1 if predicted is not None and measured else None


def predicted_point(fit_point: calibrate.FitPoint, efficiency: Efficiency | None) -> PredictedPoint:
    """Return a point with what `efficiency` predicts of it; None predicts nothing."""
    point, predicted = fit_point.point, dict[str, float | None]()
    measured: dict[str, float | None] = {"gpu_bytes": point.gpu_bytes, "host_bytes": point.host_peak_bytes}
    if point.usable:
        step_s = point.step_median_ms and point.step_median_ms / 1e3
        measured |= {"tok_s": point.output_tok_s, "ttft_s": median(point.ttft_ms) / 1e3, "step_s": step_s}
    if efficiency is not None:
        tiers = fit_point.tiers(efficiency)
        predicted |= {"gpu_bytes": tiers.gpu.total - tiers.gpu.overhead, "host_bytes": tiers.host.total}
        if (error := fit_point.error(efficiency)) is not None:
            prefill, step = times_of(fit_point.timing(efficiency), point.case.workload)
            rate = (1 + error) * (point.output_tok_s or 0.0)
            predicted |= {"ttft_s": prefill.seconds, "step_s": step.seconds, "tok_s": rate}
    known = ({name: value for name, value in each.items() if value is not None} for each in (predicted, measured))
    name = kind(fit_point.placement, fit_point.model, fit_point.machine)
    return PredictedPoint(point.case, point.machine, name, *known)


def predict(case: Case, model: ModelSpec, machine: Machine, efficiencies: Mapping[str, Efficiency]) -> Plan:
    return Planner(case, model, machine, efficiencies.get(case.engine, Efficiency())).plan


@pytest.fixture(scope="module")
def rows() -> tuple[PredictedPoint, ...]:
    return table(committed.points(), committed.machines())


def test_throughput_of_the_records_is_predicted_within_a_tenth(rows: tuple[PredictedPoint, ...]) -> None:
    """Holds for all points with offload but `MISSED`. The misses of the peers are known: DeepSpeed's
    prefill at its edge, where its allocator is short of memory; Accelerate's pageable copies, whose rate differs
    between hosts, and its prefill beside layers that stay, which took a quarter longer than copies and products do."""
    everything = {row.case: error for row in rows if (error := row.error("tok_s")) is not None}
    measured = {row.case for row in rows if "tok_s" in row.measured}
    assert {case.offload for case in measured - everything.keys()} == {"nvme"}, "of a disk whose rate is not known"
    missed = {case for case in everything if (case.label(), case.model) in MISSED and everything[case] > 0.10}
    assert {(case.label(), case.model) for case in missed} == MISSED, "measured anew, it is no exception"
    errors = {case: error for case, error in everything.items() if case.offload != "none" and case not in missed}
    assert median(map(abs, errors.values())) <= 0.05
    ours = {case: error for case, error in errors.items() if case.engine == "stream"}
    assert max(map(abs, ours.values())) <= 0.17
    assert median(map(abs, ours.values())) <= 0.03
    wrong = {case.label() for case, error in errors.items() if abs(error) > 0.15}
    peers = {"deepspeed cpu", "accelerate cpu pin_memory=False", "accelerate cpu gpu-weights=70%"}
    assert wrong == {*peers, "stream cpu gpu-weights=100%"}, "two of its 32 steps record graphs, of 8 ms each"
    assert max(map(abs, errors.values())) <= 0.27
    resident = {case: error for case, error in everything.items() if case.offload == "none" and case not in missed}
    assert max(map(abs, resident.values())) <= 0.25


def test_times_and_host_memory_of_ours_are_predicted_within_a_tenth(rows: tuple[PredictedPoint, ...]) -> None:
    """Nine of ten lie within a fifth. Memory is the peak over the load, at most 45 times what passes need."""
    ours = [row for row in rows if row.case.engine == "stream" and row.case.offload != "nvme"]
    steps, ttfts, hosts = (
        sorted(abs(error) for row in ours if (error := row.error(name)) is not None)
        for name in ("step_s", "ttft_s", "host_bytes")
    )
    assert min(map(len, (steps, ttfts, hosts))) > 80
    for errors, middle, nine_of_ten in ((steps, 0.05, 0.15), (ttfts, 0.05, 0.2), (hosts, 0.05, 0.1)):
        assert median(errors) <= middle
        assert errors[int(0.9 * len(errors))] <= nine_of_ten
    assert max(hosts) <= 0.35, "1 to 3 GB of a small model"
    mixtures = [row.error("step_s") or 0.0 for row in ours if "experts, resident" in row.kind]
    assert len(mixtures) >= 5
    assert max(map(abs, mixtures)) <= 0.3


def test_the_best_by_prediction_was_nearly_the_fastest(rows: tuple[PredictedPoint, ...]) -> None:
    """It loses 6% at most of what was measured. Equal loads differ by as much."""
    groups = defaultdict[tuple[object, ...], list[PredictedPoint]](list)
    for row in rows:
        if row.error("tok_s") is not None:
            load = row.case.workload
            groups[row.machine, row.case.model, row.case.layers, load.input_len, load.output_len].append(row)
    choices = [candidates for candidates in groups.values() if len(candidates) > 2]
    assert len(choices) >= 5
    for group in choices:
        chosen = max(group, key=lambda row: row.predicted["tok_s"])
        assert chosen.measured["tok_s"] >= 0.94 * max(row.measured["tok_s"] for row in group)


def test_the_way_to_attend_that_plans_choose_was_the_fastest() -> None:
    """Records with a host KV cache, over the link and on CPU."""
    machines = committed.machines()
    seconds: dict[tuple[str, Case], dict[str, float]] = {}
    for measured in committed.points():
        options = dict(measured.case.options)
        if measured.usable and options.get("kv_offload", "auto") != "none" and "kv_attention" in options:
            way = str(options.pop("kv_attention"))
            case = measured.case.model_copy(update={"options": tuple(sorted(options.items()))})
            seconds.setdefault((measured.machine, case), {})[way] = measured.step_median_ms or 0.0
    compared = {key: ways for key, ways in seconds.items() if len(ways) == 2}
    assert compared
    for (machine, case), ways in compared.items():
        spec = resolve.resolve(case.model, case.dtype, case.layers)
        on_cpu = Placer(case, spec, machines[machine]).bare(case.workload).kv_on_cpu
        assert ("cpu" if on_cpu else "gpu") == min(ways, key=lambda way: ways[way])


def test_memory_of_the_records_is_predicted_and_ours_never_much_too_low(rows: tuple[PredictedPoint, ...]) -> None:
    """DeepSpeed holds one layer of BLOOM, and two of smaller models. Ours counts as a share of the GPU's memory."""
    errors = {row.case: error for row in rows if (error := row.error("gpu_bytes")) is not None}
    assert len(errors) == len({row.case for row in rows})
    assert median(map(abs, errors.values())) <= 0.05
    machines = committed.machines()
    for row in rows:
        if row.case.engine == "stream":
            lacking = row.measured["gpu_bytes"] - row.predicted["gpu_bytes"]
            assert lacking <= 0.05 * machines[row.machine].gpu_bytes, row.case
    assert min(errors.values()) >= -0.25


def test_the_largest_batch_is_predicted() -> None:
    """The tolerance is an eighth: the plan leaves out gaps of the allocator and short-lived tensors of a step."""
    machines, points = committed.machines(), committed.points()
    fitted = calibrate.calibrate(points, machines)
    for name, layers, offload in (("bloom-176b", 14, "cpu"), ("opt-30b", None, "none"), ("opt-30b", None, "cpu")):
        group = [p for p in points if (p.case.model, p.case.layers, p.case.offload) == (name, layers, offload)]
        group = [p for p in group if p.case.engine == "stream" and p.case.workload.output_len == 32]
        group = [p for p in group if plan_options("stream", p.case.options).kv_offload == "none"]
        edge = max(p.case.workload.batch_size for p in group if p.status == "ok")
        spec = resolve.resolve(name, None, layers)
        plan = predict(group[0].case, spec, machines[group[0].machine], fitted)
        assert plan.max_batch_size == pytest.approx(edge, rel=0.125)


def table(points: Points, machines: Mapping[str, Machine]) -> tuple[PredictedPoint, ...]:
    engines = group_by(calibrate.fit_points(points, machines), lambda point: point.point.case.engine)
    return tuple(
        predicted_point(point, calibrate.fit(alike, point) if len(alike) > 1 else None)
        for alike in engines.values()
        for point in alike
    )


def fabricated(efficiency: Efficiency, size: int, offload: str) -> Measurement:
    """Return a point of OPT-30B whose engine has exactly this efficiency."""
    chosen = (("cuda_graphs", "off"), ("weight_codec", "none"))
    asked = case(size, model="opt-30b", layers=None, offload=offload, options=chosen)
    spec = resolve.resolve("opt-30b")
    plan = make_plan(asked, spec, H100, efficiency=efficiency)
    assert plan.prefill_s is not None
    assert plan.step_s is not None
    return point(
        asked,
        ttft_ms=[plan.prefill_s * 1e3] * 2,
        step_ms=[[plan.step_s * 1e3] * 31] * 2,
        gpu_peak_bytes=plan.gpu.total - plan.gpu.overhead,
        link_bandwidth=H100.h2d_bandwidth,
        num_layers=spec.num_layers,
        total_layers=spec.num_layers,
        effective=Effective(
            gpu_weight_bytes=plan.gpu.weights, host_weight_bytes=plan.host.weights,
            streamed_bytes_per_step=round(plan.streamed_bytes / plan.placement.wire_ratio),
            wire_bytes_per_step=plan.streamed_bytes,
            settings={"slot_bytes": spec.layer_bytes, "buffer_bytes": Sizes(plan.placement, spec).chunk,
                      "ring_depth": plan.placement.ring_depth, "cuda_graphs": "off"},
        ),
    )  # fmt: skip


def test_a_fit_finds_the_factors_that_made_the_records() -> None:
    factors = {"link_share": 0.83, "layer_s": 1.5e-3, "mfu": 0.7, "memory": 1.2}
    made = Efficiency.model_validate(factors)
    points = [fabricated(made, size, offload) for size in (1, 8, 16) for offload in ("none", "cpu")]
    fitted = calibrate.calibrate(points, {"h100": H100})["stream"]
    assert {name: getattr(fitted, name) for name in factors} == pytest.approx(factors, rel=1e-3)
    assert fitted.points == 6
    assert [band for _, band in fitted.errors] == [calibrate.EVIDENCE.min_error] * 2, "streamed and resident"
    errors = [row.error("tok_s") for row in table(points, {"h100": H100})]
    assert errors == pytest.approx([0.0] * 6, abs=1e-3)


def test_records_tell_whether_attention_was_fused() -> None:
    """BLOOM's was eager; `stream` has fused it since."""
    points = [point for point in committed.points() if point.usable and point.case.model == "bloom-176b"]
    measured = next(point for point in points if point.case.engine == "stream" and point.effective is not None)
    assert measured.effective is not None
    effective = measured.effective.model_copy(update={"settings": measured.effective.settings | {"attention": "sdpa"}})
    fused = measured.model_copy(update={"effective": effective})
    before, after = calibrate.fit_points([measured, fused], committed.machines())
    assert (before.placement.eager, after.placement.eager) == (True, False)
    ours, theirs = (make_plan(case(32, engine, layers=None), before.model, H100) for engine in ("stream", "deepspeed"))
    assert (ours.placement.eager, theirs.placement.eager) == (False, True)
    assert ours.gpu.activations < theirs.gpu.activations


def test_a_point_is_never_predicted_from_itself() -> None:
    (row,) = table([fabricated(Efficiency(link_share=0.5), 8, "cpu")], {"h100": H100})
    assert (row.predicted, row.error("tok_s")) == ({}, None)
    odd = [fabricated(Efficiency(link_share=share), 8 * n, "cpu") for n, share in enumerate((0.5, 0.5, 0.5, 0.9), 1)]
    errors = [row.error("tok_s") or 0.0 for row in table(odd, {"h100": H100})]
    assert errors[-1] < -0.3  # the odd one out is missed by what it differs in
    assert max(map(abs, errors[:3])) < 0.01
    ((named, band),) = calibrate.calibrate(odd, {"h100": H100})["stream"].errors
    assert band > 0.3
    assert named == f"uncoded dense, streamed, {H100.gpu_name}"
    assert calibrate.calibrate(odd[:2], {"h100": H100})["stream"].errors == (), "too few to tell"


@pytest.mark.long
def test_leaving_a_point_out_is_a_fit_without_it() -> None:
    """Leave-one-out factors equal those fitted to all other points."""
    points, machines = committed.points()[::5], committed.machines()
    fitted = calibrate.fit_points(points, machines)
    rows = {(row.case, row.machine): row for row in table(points, machines)}
    assert len(rows) == len(fitted) > 20
    assert any(fit_point.model.num_experts for fit_point in fitted)
    for left_out in fitted:
        case, row = left_out.point.case, rows[left_out.point.case, left_out.point.machine]
        rest = [point for point in points if point is not left_out.point]
        others = calibrate.calibrate(rest, machines).get(case.engine)
        assert (row.predicted == {}) is (others is None), "no other point of this engine"
        assert row.predicted == predicted_point(left_out, others).predicted


def test_unusable_points_are_left_out() -> None:
    good = fabricated(Efficiency(), 8, "cpu")
    nameless = good.case.model_copy(update={"model": "no-such-model"})
    changes = ({"machine": "unknown"}, {"machine": "laptop"}, {"status": "oom_gpu"}, {"case": nameless})
    others = [good.model_copy(update=change) for change in changes]
    machines = {"h100": H100, "laptop": H100.model_copy(update={"gpu_count": 0})}
    assert len(table([good, *others], machines)) == 1
    assert calibrate.calibrate(others, machines) == {}
    assert calibrate.calibrate([], {}) == {}


def test_an_engine_without_records_is_planned_with_defaults_and_no_band() -> None:
    asked = case(1, "accelerate", model="opt-30b", layers=None)
    plan = predict(asked, resolve.resolve("opt-30b"), H100, {"stream": Efficiency(link_share=0.1)})
    assert plan.error is None
    assert plan.output_tok_s is not None


def test_a_band_is_that_of_records_of_the_same_kind() -> None:
    """Another format, experts, residence or GPU has none."""
    fitted, spec = shipped(), resolve.resolve("bloom-176b")
    asked = case(8, layers=None, options=())
    assert 0.05 <= (predict(asked, spec, H100, fitted).error or 0) < 0.2
    assert predict(asked, spec, machines.load("h200"), fitted).error is not None
    for other in ("a100-80gb", "rtx-4090"):
        assert predict(asked, spec, machines.load(other), fitted).error is None
    mixture = asked.model_copy(update={"model": "gpt-oss-120b"})
    assert predict(mixture, resolve.resolve("gpt-oss-120b"), H100, fitted).error is None
    raw = predict(case(8, layers=None), spec, H100, fitted)
    assert (raw.placement.codec, raw.error) != ("none", predict(asked, spec, H100, fitted).error)


def test_what_ships_is_the_fit_of_the_records(tmp_path: Path) -> None:
    """``make calibration`` writes the same file."""
    calibrate.write(tmp_path / "new.json", committed.RESULTS)
    assert (tmp_path / "new.json").read_text() == (files("zinfer") / "catalog" / "calibration.json").read_text()


def test_factors_of_the_committed_records_are_physical() -> None:
    fitted = calibrate.calibrate(committed.points(), committed.machines())
    assert set(fitted) >= {"stream", "deepspeed", "accelerate"}
    for efficiency in fitted.values():
        assert 0.5 < efficiency.link_share <= 1.01
        assert 0 < efficiency.mfu < 1
        assert 0.2 < efficiency.unpack_share < 0.5
        assert 0.5 < efficiency.memory < 1.5
        assert efficiency.errors
    assert max(band for _, band in fitted["stream"].errors) <= 0.4
    assert Efficiency().errors == ()
