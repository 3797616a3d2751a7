"""The choice of a configuration: no explicit setting is predicted to be much faster than none."""

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest

from zinfer.checkpoint import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.machine import Machine
from zinfer.plan.planner import Planner
from zinfer.plan.search import powers
from zinfer.plan.times import shipped
from zinfer.system import machines

RESULTS = Path(__file__).parent.parent / "sweeps" / "results"
MODELS = (
    "bloom-176b", "opt-30b", "opt-66b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "mixtral-8x22b",
    "gpt-oss-20b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3",
)  # fmt: skip
MACHINES = (
    "rtx-3090", "rtx-4090", "a100-80gb", "h100-80gb", "h200", "gh200-96gb", "dgx-spark",
    *(str(RESULTS / name / "machine.json") for name in ("nvidia-h100-80gb-hbm3", "nvidia-h100-80gb-hbm3-x2",
                                                         "nvidia-h200-x4")),
)  # fmt: skip
LENGTHS = ((512, 32), (512, 256), (64, 16), (4096, 512))
COMBINATIONS = tuple(product(MODELS, MACHINES, LENGTHS))


def rates(name: str, machine: Machine, lengths: tuple[int, int]) -> tuple[float, float]:
    """Return tokens a second, planned without options and best of a grid."""
    workload = Workload(batch_size=1, input_len=lengths[0], output_len=lengths[1])
    spec = resolve.resolve(name)

    def planner(offload: Any, share: str | None, **options: str) -> Planner:
        case = Case(model=name, engine="stream", offload=offload, gpu_weights=share, workload=workload,
                    options=tuple(sorted(options.items())))  # fmt: skip
        return Planner(case, spec, machine, shipped()["stream"])

    def rate(planner: Planner, sizes: Iterable[int]) -> float:
        at = (workload.model_copy(update={"batch_size": size}) for size in sizes)
        return max((planner.rate(load) or 0.0 for load in at), default=0.0) if planner.at(workload).fits else 0.0

    chosen = [planner("none", None).searched(workload), planner("cpu", "auto").searched(workload)]
    default = max(
        rate(planner, [planner.best_size(workload)] if planner.max_batch(workload) else []) for planner in chosen
    )
    # Without its rate no plan may trust a CPU with attention, but a user may.
    places = ("none", "auto", "cpu") if machine.attention_bandwidth is not None else ("none", "auto")
    experts: tuple[str, ...] = ("auto", "all", "on-demand") if spec.num_experts else ("auto",)
    experts += ("cpu",) if spec.num_experts and machine.attention_bandwidth is not None else ()
    grid = [planner("none", None, kv_offload=kv_offload) for kv_offload in places]
    grid += [
        planner("cpu", share, kv_offload=kv_offload, experts=choice)
        for share, kv_offload, choice in product(("0%", "20%", "40%", "60%", "80%", "100%"), places, experts)
    ]
    return default, max(rate(planner, powers(planner.max_batch(workload))) for planner in grid)


def compare(combinations: Sequence[tuple[str, str, tuple[int, int]]]) -> list[float]:
    """Return the gains of the grid over the plan, as shares."""
    gains = []
    for name, machine, lengths in combinations:
        default, best = rates(name, machines.load(machine), lengths)
        assert default > 0 or not best, (name, machine, lengths)
        if best:
            gains.append(best / default - 1)
    return gains


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_no_setting_is_much_faster_than_what_is_chosen_without_any(every: int) -> None:
    gains = compare(COMBINATIONS[::every])
    assert len(gains) > 300 / every
    assert max(gains) <= 0.03


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_finer_grid_of_shares_finds_little_more(calibrated: bool) -> None:
    """Host memory is short here: what stays on the GPU leaves it to the KV cache."""
    spec, machine = resolve.resolve("bloom-176b"), machines.load(str(RESULTS / "nvidia-h200" / "machine.json"))
    workload = Workload(batch_size=1, input_len=512, output_len=512)

    def best(share: str) -> float:
        case = Case(model=spec.name, engine="stream", offload="cpu", gpu_weights=share, workload=workload)
        planner = Planner(case, spec, machine, shipped()["stream"] if calibrated else None)
        return planner.searched(workload).best(workload).output_tok_s or 0.0

    assert best("auto") >= 0.95 * max(best(f"{share}%") for share in range(5, 70, 5))


def test_the_search_for_the_largest_batch_goes_on_where_the_cache_begins_to_leave_the_gpu() -> None:
    spec, workload = resolve.resolve("gpt-oss-120b"), Workload(batch_size=1, input_len=64, output_len=16)
    largest = []
    for kv_offload in ("none", "auto", "cpu"):
        case = Case(
            model=spec.name, engine="stream", offload="none", workload=workload, options=(("kv_offload", kv_offload),)
        )
        planner = Planner(case, spec, machines.load("h100-80gb"), shipped()["stream"])
        largest.append(planner.max_batch(workload))
    assert largest[0] < largest[1] >= largest[2]


@pytest.mark.parametrize("share", ["40%", "45%", "50%", "55%"])
def test_no_larger_batch_fits_than_the_largest(share: str) -> None:
    spec, machine = resolve.resolve("bloom-176b"), machines.load(str(RESULTS / "nvidia-h200" / "machine.json"))
    workload = Workload(batch_size=1, input_len=512, output_len=512)
    case = Case(model=spec.name, engine="stream", offload="cpu", gpu_weights=share, workload=workload)
    largest = [
        Planner(case.model_copy(update={"options": options}), spec, machine, shipped()["stream"]).max_batch(workload)
        for options in ((), (("kv_offload", "cpu"),), (("kv_offload", "none"),))
    ]
    assert largest[0] == max(largest) > 90


@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize(
    ("name", "experts", "machine"),
    [(name, "auto", "h100-80gb") for name in ("bloom-176b", "llama-3.1-70b", "mixtral-8x7b", "gpt-oss-120b")]
    + [(name, "cpu", machine) for name in ("mixtral-8x7b", "gpt-oss-120b", "qwen3-235b-a22b")
       for machine in ("h100-80gb", "rtx-4090")],
)  # fmt: skip
def test_a_larger_budget_never_makes_a_step_slower(name: str, experts: str, rows: int, machine: str) -> None:
    there, spec = machines.load(machine), resolve.resolve(name)
    workload = Workload(batch_size=rows, input_len=512, output_len=32)
    options = () if experts == "auto" else (("experts", experts),)

    def step(budget: str) -> float | None:
        case = Case(
            model=name, engine="stream", offload="cpu", gpu_weights=budget, workload=workload, options=options
        )  # fmt: skip
        plan = Planner(case, spec, there, shipped()["stream"]).plan
        return plan.step_s if plan.holds else None

    budgets = "0%", "256MiB", "1GiB", "4GiB", "10GiB", "20GiB", "30GiB", "40GiB"
    steps = [seconds for seconds in map(step, budgets) if seconds is not None]
    assert len(steps) >= 5
    assert all(larger <= smaller * (1 + 1e-9) for smaller, larger in pairwise(steps)), steps
    assert (step("auto") or inf) <= min(steps) * (1.03 if machine == "h100-80gb" else 1.1), "it leaves a margin"
