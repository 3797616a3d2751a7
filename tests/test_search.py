"""The choice of a configuration: no explicit setting is predicted to be much faster than none."""

from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest

from zinfer.checkpoint import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.machine import Machine
from zinfer.core.model import Weights
from zinfer.plan.bytes import Placement
from zinfer.plan.placement import CAUTIOUS
from zinfer.plan.planner import Planner
from zinfer.plan.search import powers
from zinfer.plan.times import shipped
from zinfer.system import machines

RESULTS = Path(__file__).parent.parent / "sweeps" / "results"
MODELS: tuple[tuple[str, Weights], ...] = (
    *((name, "as-released") for name in (
        "bloom-176b", "opt-30b", "opt-66b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b",
        "mixtral-8x22b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3",
    )),
    ("llama-3.1-70b", "int4"), ("mixtral-8x7b", "int4"),
)  # fmt: skip
H100, H200 = (str(RESULTS / name / "machine.json") for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200"))
# with the GiB of their GPU, if these are fewer than it has
MACHINES = (
    *((name, None) for name in (
        "rtx-3090", "rtx-4090", "a100-80gb", "h100-80gb", "h200", "gh200-96gb", "dgx-spark", H100,
        *(str(RESULTS / name / "machine.json") for name in ("nvidia-h100-80gb-hbm3-x2", "nvidia-h200-x4")),
    )),
    ("h100-80gb", 24), ("h100-80gb", 48), (H100, 24), (H100, 48),
)  # fmt: skip
LENGTHS = ((512, 32), (512, 256), (64, 16), (4096, 512))
COMBINATIONS = tuple(product(MODELS, MACHINES, LENGTHS))
BATCHES = (1, 8, 32, 64, 128)
GRID = ("0%", "10%", "25%", "50%", "75%", "100%", "auto")


def load(name: str, gpu_gib: int | None = None) -> Machine:
    machine = machines.load(name)
    return machine if gpu_gib is None else machine.model_copy(update={"gpu_bytes": gpu_gib << 30})


def planner_of(name: str, machine: Machine, shape: tuple[int, int, int], share: Any = "auto", **fields: Any) -> Planner:
    """Return the calibrated planner of a load by `stream`. `shape` is its batch size and lengths."""
    workload = Workload(batch_size=shape[0], input_len=shape[1], output_len=shape[2])
    fields["options"] = tuple(sorted(fields.pop("options", {}).items()))
    given = {"offload": "cpu", "gpu_weights": share, "workload": workload}
    case = Case(**given | fields, model=name, engine="stream")
    return Planner(case, resolve.resolve(name, weights=case.weights), machine, shipped()["stream"])


def rates(model: tuple[str, Weights], machine: Machine, lengths: tuple[int, int]) -> list[tuple[float, float, str]]:
    """Return tokens a second, planned and best of a grid.

    The first are those of the best batches, the others those of `BATCHES`; each with the label of the best.
    """
    name, weights = model

    def planner(offload: Any, share: str | None, **options: str) -> Planner:
        fields = {"weights": weights, "offload": offload, "options": options}
        return planner_of(name, machine, (1, *lengths), share, **fields)

    def rate(planner: Planner, size: int) -> float:
        able = planner.at(workload).fits and 0 < size <= planner.max_batch(workload)
        return (planner.rate(workload.with_batch(size)) or 0.0) if able else 0.0

    bare = planner("none", None), planner("cpu", "auto")
    spec, workload = bare[0].model, bare[0].case.workload
    chosen = [each.searched(workload) for each in bare]
    default = [max(rate(each, each.best_size(workload)) for each in chosen)]
    default += [max(rate(each.searched(workload, size, exact=True), size) for each in bare) for size in BATCHES]
    # Without its rate no plan may trust a CPU with attention or experts, but a user may.
    known = machine.attention_bandwidth is not None
    places = ("auto", "none", "cpu") if known else ("auto", "none")
    experts = ("auto", "all", "on-demand", *["cpu"] * known) if spec.num_experts else ("auto",)
    grid = [planner("none", None, kv_offload=place) for place in places]
    grid += [
        planner("cpu", share, kv_offload=place, experts=way) for share, place, way in product(GRID, places, experts)
    ]
    best = [max((rate(each, size), each.case.label()) for each in grid) for size in BATCHES]
    own = max(max((rate(each, size), each.case.label()) for size in [1, *powers(each.max_batch(workload))])
              for each in grid)  # fmt: skip
    return [(planned, *found) for planned, found in zip(default, [own, *best], strict=True)]


@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_no_setting_is_much_faster_than_what_is_chosen_without_any(every: int) -> None:
    gains = []
    for model, machine, lengths in COMBINATIONS[::every]:
        for size, (default, best, way) in zip((0, *BATCHES), rates(model, load(*machine), lengths), strict=True):
            where = f"{model} on {machine}, {lengths}, batch {size or 'best'}: {way}"
            assert default > 0 or not best, where
            gains += [(best / default - 1, where)] if best else []
    assert len(gains) > 2000 / every
    assert max(gains)[0] <= 0.03, max(gains)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_finer_grid_of_shares_finds_little_more(calibrated: bool) -> None:
    """Host memory is short here: what stays on the GPU leaves it to the KV cache."""

    def best(share: str) -> float:
        planner = planner_of("bloom-176b", load(H200), (1, 512, 512), share)
        if not calibrated:
            planner = Planner(planner.case, planner.model, planner.machine)
        return planner.searched(planner.case.workload).best(planner.case.workload).output_tok_s or 0.0

    assert best("auto") >= 0.95 * max(best(f"{share}%") for share in range(5, 70, 5))


@pytest.mark.parametrize(
    ("name", "machine", "rows"),
    [("opt-30b", ("a100-80gb", None), 64), ("mixtral-8x7b", ("h100-80gb", 24), 64),
     ("qwen3-30b-a3b", ("h100-80gb", 24), 32), ("gpt-oss-120b", ("h100-80gb", 48), 128)],
)  # fmt: skip
def test_memory_is_filled_up_to_the_margin(name: str, machine: tuple[str, int | None], rows: int) -> None:
    """Layers take the place of KV cache. Rings have a margin, too."""
    planner = planner_of(name, there := load(*machine), (rows, 512, 256))
    placement = planner.placement(workload := planner.case.workload)
    tiers = planner.placer.tiers(placement, workload, CAUTIOUS)
    assert 0.97 * there.gpu_bytes < tiers.gpu.total <= there.gpu_bytes
    assert placement.kv_host_share > 0


@pytest.mark.parametrize(("name", "asked"), [("qwen3-30b-a3b", "cpu"), ("gpt-oss-120b", None)])
def test_a_cpu_computes_experts_unasked_where_its_code_is_fast(name: str, asked: str | None) -> None:
    """Many rows bring experts on demand, so that the load decides."""

    def chosen(*vectors: str, rows: int = 1) -> tuple[Placement, object]:
        details = {"host": {"cores": 16} | {each: each in vectors for each in ("avx512", "avx2")}}
        machine = load("h100-80gb", 24).model_copy(update={"details": details})
        workload = (planner := planner_of(name, machine, (1, 512, 256))).case.workload
        planner = planner.searched(workload, rows, exact=True)
        return planner.placement(workload.with_batch(rows)), dict(planner.case.options).get("experts")

    (able, experts), (many, others) = chosen("avx512", "avx2"), chosen("avx512", rows=64)
    assert (able.computes(1), experts) == (True, asked)
    assert not chosen()[0].cpu_tokens
    assert bool(chosen("avx2")[0].cpu_tokens) == (name == "gpt-oss-120b")  # bf16 is slow without AVX-512
    assert (many.computes(64), others) == (False, None)


@pytest.mark.parametrize(
    ("name", "machine", "shape", "share", "offload"),
    [
        ("gpt-oss-120b", "h100-80gb", (1, 64, 16), None, "none"),
        *(("bloom-176b", H200, (1, 512, 512), share, "cpu") for share in ("40%", "45%", "50%", "55%")),
    ],
)
def test_no_larger_batch_fits_than_the_largest(name: str, machine: str, shape: Any, share: Any, offload: str) -> None:
    """The search goes on where the cache begins to leave the GPU."""
    fields = [{"offload": offload, "options": {"kv_offload": place}} for place in ("auto", "cpu", "none")]
    planners = [planner_of(name, load(machine), shape, share, **each) for each in fields]
    auto, cpu, none = (planner.max_batch(planner.case.workload) for planner in planners)
    assert auto >= max(cpu, none, 91)
    assert auto > none or offload == "cpu"


CPU_EXPERTS = ("mixtral-8x7b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3-235b-a22b")
HOSTS: list[tuple[str, int | None]] = [*(("h100-80gb", gib) for gib in (None, 48, 24)), ("rtx-4090", None)]
BUDGETS = ("0%", "256MiB", "1GiB", "4GiB", "7GiB", "10GiB", "20GiB", "40GiB", "60GiB")


@pytest.mark.parametrize("rows", [1, 8, 32, 48])
@pytest.mark.parametrize(
    ("name", "experts", "machine"),
    [(name, "auto", HOSTS[0]) for name in ("bloom-176b", "llama-3.1-70b", "mixtral-8x7b", "gpt-oss-120b")]
    + [(name, "cpu", machine) for name in CPU_EXPERTS for machine in HOSTS]
    + [("deepseek-v3", "cpu", machine) for machine in HOSTS[:2]],
)
def test_a_larger_budget_never_makes_a_step_slower(name: str, experts: str, rows: int, machine: Any) -> None:
    """Experts of layers on the GPU, beside the CPU, too."""
    there, shares = load(*machine), (*BUDGETS, "auto")
    every = (planner_of(name, there, (rows, 512, 32), share, options={"experts": experts}) for share in shares)
    *plans, auto = (planner.plan for planner in every)
    plans = [made for made in plans if made.holds]
    steps = [made.step_s or inf for made in plans]
    assert len(steps) >= 5
    assert all(larger <= smaller * (1 + 1e-9) for smaller, larger in pairwise(steps)), steps
    layers = [len(made.placement.expert_layers) for made in plans]
    assert layers == sorted(layers)
    most = 0.5 * auto.model.streamed_bytes
    readable = experts == "cpu" and name != "deepseek-v3" and plans[-1].resident_bytes > most
    assert not readable or layers[-1] > 0, layers
    assert auto.holds
    assert (auto.step_s or inf) <= min(steps) * (1.03 if machine == ("h100-80gb", None) else 1.1), "it leaves a margin"
