"""Plan arithmetic against published figures, and planning calls of a sweep."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import Checkpoints, Spy, mentions
from tests.inline_worker import InlineWorker
from tests.results import case
from zinfer.checkpoint import resolve
from zinfer.core.case import Case, resident_bytes
from zinfer.core.engine import ENGINES
from zinfer.core.machine import Machine
from zinfer.job.forecast import LoadJob
from zinfer.job.recipe import Sweep
from zinfer.job.sweep import prepare, run, source_of
from zinfer.plan.placement import Placer
from zinfer.plan.planner import Planner, make_plan
from zinfer.record.store import Header, Store
from zinfer.system import machines

# Without sources no peak of the link is known, so that limits are those of the figures below.
BIG = machines.load("h100-80gb").model_copy(update={"host_bytes": 512 << 30, "sources": {}})


def asked_of(name: str, engine: str = "stream", options: tuple[Any, ...] = (), **fields: Any) -> Case:
    chosen = tuple(sorted((({"kv_offload": "none"} if engine == "stream" else {}) | dict(options)).items()))
    return case(**{"model": name, "layers": None, **fields}, engine=engine, options=chosen)


def planned(name: str, machine: Machine = BIG, **fields: Any) -> Any:
    asked = asked_of(name, **fields)
    return make_plan(asked, resolve.resolve(name, layers=asked.layers), machine)


def test_a_model_that_does_not_fit_is_refused_with_a_way_out() -> None:
    assert mentions(planned("bloom-176b", offload="none").why_not, "GPU memory", "--offload cpu")
    small = BIG.model_copy(update={"host_bytes": 128 << 30})
    plan = planned("bloom-176b", small)
    assert "host memory (h100-80gb has 137.4 GB)" in plan.why_not
    layers = int(plan.why_not.split("--layers ")[1].split(",")[0])
    assert planned("bloom-176b", small, layers=layers).fits
    assert not planned("bloom-176b", small, layers=layers + 1).fits
    assert "\n" not in plan.why_not
    laptop = Machine(name="laptop", source="measured", host_bytes=16 << 30, h2d_bandwidth=1e10)  # memory of both
    assert planned("opt-1.3b", laptop, offload="none").fits
    assert not planned("opt-13b", laptop, offload="none").fits


def test_a_model_that_drafts_takes_its_weights_and_cache_on_the_gpu() -> None:
    small = resolve.resolve("bloom-560m")
    spec = resolve.resolve("bloom-176b").model_copy(update={"draft": small})
    asked = asked_of("bloom-176b", batch_size=64)
    alone, both = planned("bloom-176b", batch_size=64), make_plan(asked, spec, BIG)
    assert both.gpu.weights - alone.gpu.weights == small.weight_bytes
    assert both.gpu.kv_cache - alone.gpu.kv_cache == small.kv_bytes(64, 680 + 256)
    assert both.gpu.total - alone.gpu.total > small.weight_bytes + small.kv_bytes(64, 544)
    assert both.max_batch_size < alone.max_batch_size
    assert both.placement.ring_depth <= alone.placement.ring_depth
    drafting = both.planner().draft(asked.workload)
    assert drafting is not None
    assert (drafting.case.offload, drafting.model) == ("none", small)
    assert alone.planner().draft(asked.workload) is None
    full = make_plan(asked, spec, BIG.model_copy(update={"gpu_bytes": 14 << 30}))
    assert "GPU memory" in str(full.why_not)


@pytest.mark.parametrize(("gpus", "chunks", "depth"), [(1, 19, 19), (2, 19, 22), (4, 10, 13), (8, 10, 13)])
def test_several_gpus_copy_larger_pieces_and_have_buffers_for_layers_that_stay(
    gpus: int, chunks: int, depth: int
) -> None:
    machine = BIG.model_copy(update={"gpu_count": 8})
    placement = planned("bloom-176b", machine, gpu_weights="10%", options=(("gpus", gpus),)).placement
    assert (placement.layer_chunks, placement.ring_depth) == (chunks, depth)


def test_weights_that_stay_on_the_gpu_are_not_streamed() -> None:
    bytes_of = {None: 0, "auto": 300, "0%": 0, "25%": 250, "100%": 1000, "500B": 500, "4GB": 1000}
    assert {text: resident_bytes(text, 1000, 300) for text in bytes_of} == bytes_of
    all_streamed, half = (planned("opt-30b", engine="tensorrt", gpu_weights=share) for share in ("0%", "50%"))
    assert half.step_s == pytest.approx(all_streamed.step_s / 2)
    assert half.gpu.weights - all_streamed.gpu.weights == half.model.streamed_bytes // 2
    assert half.max_batch_size < all_streamed.max_batch_size


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["bloom-7b1", "opt-30b", "llama-2-70b", "mixtral-8x7b"]),
    st.sampled_from(["none", "cpu", "nvme"]),
    st.sampled_from(["stream", "deepspeed", "accelerate"]),
    st.integers(1, 256),
    st.floats(1.0, 20.0),
)
def test_more_never_hurts(name: str, offload: Any, engine: str, batch: int, factor: float) -> None:
    machine = BIG.model_copy(update={"nvme_bandwidth": 3e9, "nvme_bytes": 4 << 40})
    rates = {rate: getattr(machine, rate) * factor for rate in ("h2d_bandwidth", "nvme_bandwidth", "hbm_bandwidth")}
    ways = ((machine, batch), (machine, batch + 1), (machine.model_copy(update=rates), batch))
    plan, larger, quick = (planned(name, on, offload=offload, engine=engine, batch_size=size) for on, size in ways)
    assert larger.gpu.total >= plan.gpu.total
    assert larger.step_s >= plan.step_s
    assert larger.max_batch_size == plan.max_batch_size
    assert quick.step_s <= plan.step_s
    assert quick.prefill_s <= plan.prefill_s
    assert plan.gpu.total == sum(getattr(plan.gpu, part) for part in type(plan.gpu).model_fields)


def jobs_of(sweep: Sweep, machine: Machine) -> list[LoadJob]:
    return prepare(sweep, machine, partial(source_of, sweep), lambda load: ENGINES[load.engine].target)


@pytest.mark.parametrize(
    ("asked", "shares"),
    [
        ({}, ["auto", "40%"]),  # so that `zinfer best` is no slower than `zinfer plan`
        ({"batch_size": "1,auto"}, ["auto", "40%"]),
        ({"batch_size": (1, 8)}, ["auto"]),
        ({"gpu_weights": ("auto",)}, ["auto"]),
        ({"gpu_weights": ("25%",)}, ["25%"]),
        ({"model": ("opt-30b",)}, ["auto"]),
        ({"engine": ("accelerate",)}, [None]),
    ],
)
def test_a_sweep_measures_the_share_too_that_is_predicted_to_be_faster(asked: Any, shares: list[str | None]) -> None:
    sweep = Sweep.model_validate({"model": ("bloom-176b",), "offload": ("cpu",), "output_len": (256,)} | asked)
    jobs = jobs_of(sweep, machines.load("sweeps/results/nvidia-h200"))
    assert [job.planner.case.gpu_weights for job in jobs] == shares
    assert [job.planner.case for job in jobs] == [case for job in jobs for case in job.cases]
    best = [job.planner.best(job.planner.case.workload).expected_tok_s or 0.0 for job in jobs]
    assert best[0] <= best[-1]


def test_a_sweep_plans_every_workload_once(checkpoint: Checkpoints, tmp_path: Path, spy: Spy) -> None:
    """Parent and worker share a process here, and nothing else: each has a planner of its own."""
    choose, find = spy(Placer, "_choose"), spy(Planner, "_find_largest")
    lengths = {"batch_size": (1, 2), "input_len": (8, 16), "output_len": (4,), "repeats": 2, "rounds": 2}
    fields = {"model": (str(checkpoint("opt")),), "offload": ("cpu",), "options": {"kv_offload": ("auto",)}}
    jobs = jobs_of(sweep := Sweep.model_validate(fields | lengths), BIG)
    with Store(tmp_path / "r.jsonl") as store:
        store.append(Header(machine=BIG.name))
        points = run(sweep, jobs, store, make_worker=InlineWorker).points
    assert [(point.status, point.error) for point in points] == [("ok", None)] * 8
    placed = [call.args for call in choose.mock_calls]
    assert len({workload for _, workload in placed}) == 4
    assert len(set(placed)) == len(placed)
    assert sorted(call.args[1:3] for call in find.mock_calls) == [(8, 4), (16, 4)], (
        "a worker obeys placements and searches nothing"
    )
