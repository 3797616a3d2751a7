"""Loads of a batch job: the rows that fit, and the fastest way that fits them, from the plan alone."""

from tests.inline_batch import CASE
from zinfer.checkpoint.resolve import from_catalogue
from zinfer.job.batch.packing import best_plan, fitting
from zinfer.plan.planner import Planner
from zinfer.system import machines

H100 = machines.load("h100-80gb").model_copy(update={"host_bytes": 1 << 40})


def test_the_faster_of_the_loads_that_fit_is_chosen() -> None:
    opt = from_catalogue("opt-30b")
    cases = [CASE.model_copy(update={"model": "opt-30b", "offload": offload}) for offload in ("none", "cpu")]
    typical = [(300, 100)] * 10
    assert best_plan(cases, typical, opt, H100).case.offload == "none"  # PCIe 5 is too slow for it to pay
    long = [*typical, (2000, 48)] * 2
    assert best_plan(cases, long, opt, H100).case.workload.total_len == 2048
    small = H100.model_copy(update={"gpu_bytes": 62 << 30})
    planner = Planner(cases[0], opt, small)
    assert fitting(planner, long) == [True] * 22
    huge = (30_000, 100)
    assert fitting(planner, [*typical, huge]) == [True] * 10 + [False]
    assert best_plan(cases, [*typical, huge], opt, small).case.offload == "cpu"
    refused = best_plan(cases, typical, opt, small.model_copy(update={"gpu_bytes": 4 << 30, "host_bytes": 1 << 30}))
    assert not refused.fits
