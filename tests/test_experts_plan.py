"""Plans of experts on demand: bytes of a step, room that they take, and when all come anyway."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import committed, invoke
from tests.checkpoints import save_config
from tests.inline_worker import InlineWorker
from tests.results import case, point
from tests.test_experts import MIXTURES
from tools import trained
from zinfer.analysis import calibrate
from zinfer.analysis.study import routing_of
from zinfer.checkpoint import resolve
from zinfer.core.engine import CHUNK_BYTES, LINKED_BYTES
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.plan.bytes import ALLOWANCES, Sizes, whole_tokens
from zinfer.plan.placement import TUNING
from zinfer.plan.planner import Plan, make_plan
from zinfer.plan.times import RATES, Efficiency, Timing, linked_share, shipped
from zinfer.record.measurement import Effective
from zinfer.record.store import read
from zinfer.record.study import Hits, Study, Touched
from zinfer.system import local, machines
from zinfer.worker import process
from zinfer.worker.session import not_as_asked

MIXTRAL = resolve.resolve("mixtral-8x7b")
OSS = resolve.resolve("gpt-oss-120b")
H100 = machines.load("h100-80gb")


def plan(
    batch_size: int = 1, model: ModelSpec = MIXTRAL, share: str | None = None, machine: Machine = H100,
    efficiency: Efficiency | None = None, **options: Any,
) -> Plan:  # fmt: skip
    settings = tuple(sorted(options.items()))
    asked = case(batch_size, model=model.name, layers=None, gpu_weights=share, options=settings)
    return make_plan(asked, model, machine, efficiency=efficiency)


def told(words: str) -> str:
    """Return what `zinfer plan` prints of gpt-oss-120b, in one line."""
    return " ".join(invoke("plan", "-m", "gpt-oss-120b", *words.split()).output.split())


def test_a_step_brings_the_experts_that_its_tokens_touch() -> None:
    dense, routed = MIXTRAL.streamed_bytes - MIXTRAL.routed_bytes, MIXTRAL.routed_bytes
    assert MIXTRAL.expert_bytes == 3 * 4096 * 14336 * 2
    assert MIXTRAL.dense_layer_bytes + 8 * MIXTRAL.expert_bytes == MIXTRAL.layer_bytes
    for batch_size, touched in ((1, 2 / 8), (2, 1 - (6 / 8) ** 2), (4, 1 - (6 / 8) ** 4)):
        planned = plan(batch_size, experts="on-demand", weight_codec="none")
        assert planned.streamed_bytes == pytest.approx(dense + touched * routed, abs=2)
        assert plan(batch_size, experts="all", weight_codec="none").streamed_bytes == MIXTRAL.streamed_bytes
    on_demand, all_of_it = plan(experts="on-demand"), plan(experts="all")
    share = (dense + routed / 4) / (dense + routed)
    assert on_demand.step_s == pytest.approx((all_of_it.step_s or 0) * share, rel=0.02)
    assert on_demand.prefill_s == pytest.approx(all_of_it.prefill_s, rel=0.05)


def test_from_some_batch_on_all_experts_come() -> None:
    placement = plan(experts="on-demand").placement
    assert placement.whole_tokens == 9
    assert MIXTRAL.touched_share(8) < ALLOWANCES.whole_share <= MIXTRAL.touched_share(9)
    assert plan(8, experts="on-demand").streamed_bytes < plan(8, experts="all").streamed_bytes
    for batch_size in (9, 64, 512):
        some, every = (plan(batch_size, experts=way) for way in ("on-demand", "all"))
        assert some.streamed_bytes == every.streamed_bytes
        assert some.output_tok_s == pytest.approx(every.output_tok_s, rel=0.01)
    many = MIXTRAL.model_copy(update={"num_experts": 128, "experts_per_token": 8})
    assert [round(many.touched_share(batch), 2) for batch in (16, 32)] == [0.64, 0.87]
    assert whole_tokens(many) == 36


def test_auto_brings_them_on_demand_where_that_is_clearly_less() -> None:
    assert plan().placement.experts == "on-demand"
    assert plan().placement == plan(experts="on-demand").placement
    assert plan(512).placement.experts == "on-demand", "a load has one layout, whatever the batch"
    few = MIXTRAL.model_copy(update={"experts_per_token": 6})
    assert plan(model=few).placement.experts == "all"
    assert plan(model=few, experts="on-demand").placement.experts == "on-demand"
    assert plan(packed="here").placement.experts == "all"
    small = tuple(layer.model_copy(update={"expert_parameters": 1 << 20}) for layer in MIXTRAL.layers)
    for change in ({"architecture": "llama4_text"}, {"layers": small}):
        assert plan(model=MIXTRAL.model_copy(update=change)).placement.experts == "all"
    dense = resolve.resolve("llama-3.1-70b")
    assert plan(model=dense, experts="on-demand").placement == plan(model=dense).placement


def test_experts_stay_with_their_layers_where_all_fit_as_products_read_them() -> None:
    """That is in their codes, or unpacked if they are coded losslessly. What does not all fit comes on demand."""

    def ways(model: ModelSpec, **options: Any) -> list[str]:
        return [plan(1, model, share, **options).placement.experts for share in ("auto", "100%", "50%")]

    assert ways(OSS) == ["all", "all", "on-demand"]
    assert ways(OSS, experts="on-demand") == ["on-demand"] * 3
    assert ways(OSS, machine=machines.load("a100-40gb")) == ways(MIXTRAL) == ["on-demand"] * 3
    for codec in ("auto", "none"):
        assert ways(MIXTRAL, machine=machines.load("h200"), weight_codec=codec) == ["all", "all", "on-demand"]
    assert len(plan(1, MIXTRAL, "100%", machines.load("h200")).placement.unpacked_layers) == 32
    assert plan(1, OSS, "auto").placement.graphs


def test_experts_that_stay_are_unpacked_when_they_are_chosen() -> None:
    machine = H100.model_copy(update={"hbm_bandwidth": 3e12})
    dense = MIXTRAL.streamed_bytes - MIXTRAL.routed_bytes
    for tokens, share in ((1, MIXTRAL.touched_share(1)), (200, 1.0)):
        kept = plan(tokens, share="100%", machine=machine)
        assert kept.streamed_bytes == 0
        assert not kept.placement.graphs, "the CPU gets to know what each router chose"
        unpacked = dense + MIXTRAL.routed_bytes * share
        assert Sizes(kept.placement, MIXTRAL).unpacked(tokens) == pytest.approx(unpacked, rel=1e-6)
        times = Timing(kept.placement, MIXTRAL, machine).step(tokens, 528)
        assert times.bound_by == "unpacking"
        assert times.limits["unpacking"] == pytest.approx(unpacked / (RATES.unpacking * 3e12), rel=1e-6)
    raw = plan(200, share="100%", machine=machine, weight_codec="none").placement
    assert Sizes(raw, MIXTRAL).unpacked(200) == MIXTRAL.routed_bytes, "copied from its buffer to its place"


def test_the_cpu_computes_experts_where_it_reads_them_sooner_than_the_link() -> None:
    def tokens(model: ModelSpec = OSS, way: str = "auto", **rates: Any) -> int:
        return plan(1, model, "0%", H100.model_copy(update=rates), experts=way).placement.cpu_tokens

    assert tokens() == tokens(way="cpu") == TUNING.max_cpu_tokens
    assert tokens(way="on-demand") == tokens(way="all") == 0
    assert tokens(attention_bandwidth=2e9) == tokens(attention_bandwidth=None, host_bandwidth=None) == 0
    assert tokens(attention_bandwidth=2e9, way="cpu") == TUNING.min_cpu_tokens
    assert 0 < tokens(resolve.resolve("mixtral-8x7b", None, None, "int4")) < TUNING.max_cpu_tokens, "many tokens each"
    assert tokens(MIXTRAL) == 0 < tokens(MIXTRAL, "cpu"), "coded experts take fewer bytes on the link"


def test_a_step_with_experts_on_the_cpu_brings_none_and_takes_as_long_as_they_are_read() -> None:
    good, dense = Efficiency(), OSS.streamed_bytes - OSS.routed_bytes
    alone = partial(plan, link_experts="0%")
    for batch_size in (1, 8, 33, 48):
        cpu, link = (alone(batch_size, OSS, "0%", efficiency=good, experts=way) for way in ("cpu", "on-demand"))
        computes = batch_size <= TUNING.max_cpu_tokens
        assert cpu.placement.computes(batch_size) is computes
        if batch_size == 48:  # all experts come: to launch 78% of them one by one takes longer
            assert cpu.placement.whole_tokens <= batch_size < link.placement.whole_tokens
            assert cpu.streamed_bytes > 1.2 * link.streamed_bytes
            assert (cpu.step_s or 1) < 0.95 * (link.step_s or 0)
            continue
        if not computes:
            assert cpu.streamed_bytes == link.streamed_bytes
            assert cpu.step_s == pytest.approx(link.step_s)
            continue
        assert cpu.streamed_bytes == pytest.approx(dense * cpu.placement.wire_ratio, rel=1e-6)
        touched = OSS.routed_bytes * OSS.touched_share(batch_size) * OSS.expert_ratio
        rate = min(RATES.cpu_codes * (H100.attention_bandwidth or 0), RATES.memory_codes * (H100.host_bandwidth or 0))
        read_s = touched / rate + 36 * RATES.cpu_layer_s
        assert cpu.bound_by == "cpu experts"
        assert read_s < (cpu.step_s or 0) < 1.3 * read_s
        assert (cpu.step_s or 1) < 0.6 * (link.step_s or 0)
        assert cpu.prefill_s == pytest.approx(link.prefill_s, rel=0.1)
        limit = alone(batch_size, OSS, "0%", experts="cpu").step_s or 0
        assert touched / H100.at_peak().host_bandwidth <= limit <= (cpu.step_s or 0)  # type: ignore[operator]
    output = told("--machine h100-80gb --offload cpu --gpu-weights 0% --batch-size 1,64")
    assert "batch 1: the CPU computes the experts of passes of up to 32 tokens; a step reads 3% of them" in output
    assert "batch 64: experts on demand" in output
    coded, plain = (plan(1, MIXTRAL, "0%", experts=way) for way in ("on-demand", "cpu"))
    assert plain.host.weights > 1.4 * coded.host.weights, "the CPU reads bf16 as released"


def test_cpu_and_link_share_the_experts_of_a_step() -> None:
    h200 = machines.load("h200")
    share = plan(1, OSS, "0%", h200, Efficiency(), experts="cpu").placement.linked_share
    assert share == linked_share(h200, OSS)
    assert 0.25 < share < 0.6
    assert plan(1, OSS, "0%", experts="on-demand").placement.linked_share == 0
    for batch_size, asked in product((1, 8), ("auto", "25%")):
        ways = [plan(batch_size, OSS, "0%", h200, Efficiency(), experts="cpu", link_experts=x) for x in ("0%", asked)]
        alone, both = (Timing(way.placement, OSS, h200).cpu_experts_s(batch_size) for way in ways)
        assert both < alone
        assert ways[1].step_s < ways[0].step_s  # type: ignore[operator]
        more = ways[1].gpu.buffers - ways[0].gpu.buffers
        assert 0 < more <= LINKED_BYTES
    quarter = plan(1, OSS, "0%", h200, experts="cpu", link_experts="25%").placement
    waits = 36 * RATES.cpu_layer_s
    one_of_four = Timing(quarter, OSS, h200).cpu_experts_s(1) - waits
    none = Timing(quarter.model_copy(update={"linked_share": 0.0}), OSS, h200).cpu_experts_s(1) - waits
    assert one_of_four == pytest.approx(0.75 * none)


def test_the_gpu_keeps_the_experts_of_whole_layers_beside_a_cpu_that_computes() -> None:
    routed, good = OSS.routed_bytes, Efficiency()
    assert OSS.expert_ratio == pytest.approx((4 + 8 / 32) / 16, rel=1e-3), "codes, and a scale for 32 of them"
    before = plan(8, OSS, "2GiB", efficiency=good, experts="cpu")
    assert before.placement.expert_layers == ()
    for share, layers in (("29%", 10), ("100%", 36)):
        made = plan(8, OSS, share, efficiency=good, experts="cpu")
        assert (len(made.placement.expert_layers), len(made.placement.resident_layers)) == (layers, 36)
        kept = routed * layers / 36 * OSS.expert_ratio
        assert made.gpu.weights - before.gpu.weights == pytest.approx(kept, rel=1e-6)
        assert before.host.weights - made.host.weights == pytest.approx(kept, rel=1e-6), "they lie on the GPU alone"
        cpu, all_of_it = (Timing(each.placement, OSS, H100, good).cpu_experts_s(8) for each in (made, before))
        assert cpu == pytest.approx(all_of_it * (36 - layers) / 36, rel=1e-6)
        assert made.placement.graphs
        assert (made.step_s or 0) < (before.step_s or 0) - (all_of_it - cpu) + 8e-3
        others = routed * (36 - layers) / 36 * made.placement.wire_ratio
        assert Sizes(made.placement, OSS).wire() == pytest.approx(others, rel=1e-6), "which prompts bring"
    small = H100.model_copy(update={"gpu_bytes": 24 << 30})
    auto, many = (plan(rows, OSS, "auto", small, good).placement for rows in (1, 64))
    assert 0 < len(auto.expert_layers) < 36
    assert not auto.moved, "larger batches need the memory: experts of all layers are in host memory"
    assert (many.expert_layers, many.cpu_tokens) == ((), auto.cpu_tokens)
    assert many.cached_experts > 0
    assert plan(1, resolve.resolve("deepseek-v3"), "40GiB", experts="cpu").placement.expert_layers == ()
    output = told("--machine h100-80gb --offload cpu --experts cpu --gpu-weights 29%,100% --batch-size 1,40")
    assert "batch 1: the CPU computes the experts of 26 of 36 layers in passes of up to 32 tokens" in output
    assert "the experts of 10 of 36 layers stay on the GPU, with 28% cache hits" in output
    assert "batch 1: the experts of all layers stay on the GPU" in output
    output = told("--machine rtx-4090 --experts on-demand --batch-size 1")
    assert "36 of 36 layers stay on the GPU, without their experts" in output
    output = told("--machine rtx-4090 --batch-size 1 --set host_bandwidth=80GB/s --calibrate")
    assert "Do not stream: the CPU computes experts" in output


@pytest.mark.parametrize("batch_size", [1, 160])
def test_room_that_is_left_holds_experts(batch_size: int) -> None:
    small = H100.model_copy(update={"gpu_bytes": 40 << 30})
    bare, auto = plan(batch_size), plan(batch_size, share="auto", machine=small)
    assert (bare.placement.cached_experts, bare.placement.resident_layers) == (0, ())
    placement, expert = auto.placement, round(MIXTRAL.expert_bytes * auto.placement.wire_ratio)
    assert placement.ring_depth == TUNING.dense_depth
    assert placement.resident_layers == tuple(range(32)), "each pass needs all of them but experts"
    assert placement.cached_experts > 20
    assert 0 <= small.gpu_bytes - auto.gpu.total < expert, "the plan's figures are those without a margin"
    assert placement.resident_bytes < auto.resident_bytes
    half = plan(batch_size, share="50%")
    dense = MIXTRAL.streamed_bytes - MIXTRAL.routed_bytes
    assert half.placement.cached_experts == (MIXTRAL.streamed_bytes // 2 - dense) // MIXTRAL.expert_bytes
    assert half.gpu.weights - bare.gpu.weights == pytest.approx(MIXTRAL.streamed_bytes / 2 * 0.67, rel=0.01)
    assert plan(batch_size, share="100%").gpu.buffers == bare.gpu.buffers > 0, "experts that stay are unpacked, too"
    little = plan(batch_size, share="1GiB").placement
    assert (len(little.resident_layers), little.cached_experts) == (12, 0)
    if batch_size == 1:
        touched = MIXTRAL.streamed_bytes / 2 * MIXTRAL.touched_share(1)
        assert half.streamed_bytes == pytest.approx(touched * 0.67, rel=0.01)


@pytest.mark.parametrize(
    ("name", "weights", "batch_size", "share", "step_ms"),
    [
        ("gpt-oss-20b", "as-released", 1, "0%", 108), ("gpt-oss-20b", "as-released", 1, "25%", 117),
        ("gpt-oss-20b", "as-released", 1, "50%", 112), ("gpt-oss-120b", "as-released", 8, "0%", 485),
        ("gpt-oss-120b", "as-released", 8, "18GiB", 432), ("mixtral-8x7b", "int4", 1, "0%", 133),
        ("mixtral-8x7b", "int4", 8, "0%", 447),
    ],
)  # fmt: skip
def test_steps_take_as_long_as_measured(name: str, weights: Any, batch_size: int, share: str, step_ms: float) -> None:
    """Measured on H100s. Launches bound small experts, whatever share of them stays; the link bounds large ones."""
    machine = machines.load(str(committed.RESULTS / "nvidia-h100-80gb-hbm3"))
    model = resolve.resolve(name, weights=weights)
    made = plan(batch_size, model, share, machine, shipped()["stream"], experts="on-demand", kv_offload="none")
    assert made.step_s == pytest.approx(step_ms / 1e3, rel=0.1)


def test_buffers_for_experts_grow_up_to_a_layer() -> None:
    for batch_size in (1, 512, 900):
        placement = (planned := plan(batch_size)).placement
        assert 6 <= placement.expert_buffers <= placement.layer_experts == 8
        assert planned.gpu.total <= H100.gpu_bytes
        assert placement.holds_layer == (placement.expert_buffers == 8)
    assert plan(1).placement.holds_layer
    assert plan(machine=H100.model_copy(update={"gpu_count": 0, "gpu_bytes": 0})).placement.kv_buffers == 1


def test_the_ring_holds_two_layers_without_their_routed_experts() -> None:
    """The next layer arrives before this one's experts. The link brings the one behind it meanwhile."""
    layers = (layer.model_copy(update={"parameters": layer.parameters + (1 << 28)}) for layer in MIXTRAL.layers)
    large = MIXTRAL.model_copy(update={"layers": tuple(layers)})
    placement = plan(model=large, experts="on-demand").placement
    assert placement.layer_chunks == -(-large.dense_layer_bytes // CHUNK_BYTES) > TUNING.dense_depth
    assert placement.ring_depth == 2 * placement.layer_chunks


def traced(name: str = "mixtral-8x7b", **fields: Any) -> Study:
    rows = Hits(policy="lru", experts=64, hits=0.1), Hits(policy="lfu", experts=64, hits=0.6)
    base: dict[str, Any] = {
        "study": "routing", "machine": "h", "device": "d", "model": name, "text": {"name": "a book", "tokens": 9},
        "num_layers": 32, "num_experts": 8, "experts_per_token": 2, "rows": (*rows, *fields.pop("touched", ())),
    }  # fmt: skip
    return Study.model_validate(base | fields)


def test_a_step_is_planned_by_the_recorded_routing() -> None:
    """Beyond its last trace, a mixture routes evenly."""
    touched = (Touched(batch_size=2, share=0.4), Touched(batch_size=8, share=0.7))
    run = traced(touched=touched)
    routing = routing_of(MIXTRAL, [run, traced(num_layers=4), traced("other")])
    assert routing is not None
    recorded = MIXTRAL.model_copy(update={"routing": routing})
    shares = [recorded.touched_share(tokens) for tokens in (1, 2, 5, 8)]
    assert shares == pytest.approx([0.25, 0.4, 0.55, 0.7])
    assert recorded.touched_share(16) == pytest.approx(1 - 0.3**2), "beyond what was recorded, as if tokens were alike"
    assert [recorded.hits(share, 1) for share in (0, 0.125, 0.25, 0.625, 1)] == pytest.approx([0, 0.3, 0.6, 0.8, 1])
    even, routed = plan(2, share="50%", weight_codec="none"), plan(2, model=recorded, share="50%", weight_codec="none")
    assert even.placement == routed.placement, "an engine knows no record, and obeys the plan"
    cached = Sizes(routed.placement, MIXTRAL).cached_share
    assert routed.streamed_bytes == round(MIXTRAL.routed_bytes * 0.4 * (1 - recorded.hits(cached, 2)))
    assert even.streamed_bytes == round(MIXTRAL.routed_bytes * (1 - 0.75**2) * (1 - cached))
    less = routed.streamed_bytes / even.streamed_bytes
    assert (routed.step_s or 0) / (even.step_s or 0) == pytest.approx(less, rel=0.01)
    old = routing_of(MIXTRAL, [traced()])
    assert old is not None
    assert old.touched == (), "of a run of before"
    assert routing_of(resolve.resolve("llama-3.1-70b"), [traced()]) is None


def test_real_records_of_routing_predict_the_bytes_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace and a sweep of one checkpoint: the trace predicts roughly what its steps brought."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "Worker", InlineWorker)
    shape = MIXTURES["qwen3_moe"] | {"vocab_size": 256, "max_position_embeddings": 128}
    trained.tokenizer().save_pretrained(save_config(tmp_path / "mix", "qwen3_moe", **shape))
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1  # a function\n" * 20)
    local_machine = tmp_path / "sweeps" / "results" / local.name() / "machine.json"
    local_machine.parent.mkdir(parents=True)
    ours = H100.model_copy(update={"name": local.name(), "gpu_count": 0, "gpu_bytes": 0})
    local_machine.write_text(ours.model_dump_json())
    where = "-m mix --dtype float32 --offload cpu --experts on-demand --gpu-weights 60% --engine stream"
    where += " --batch-size 1,2,4 --input-len 8 --output-len 20"

    def run(words: str) -> str:
        done = invoke(*words.split())
        assert done.exit_code == 0, done.output
        return done.stdout

    def planned() -> tuple[list[int], str]:
        rows = json.loads(run(f"plan {where} --machine h100-80gb --json"))
        return [row["streamed_bytes"] for row in rows], rows[1]["routing_from"]

    even, source = planned()
    assert source.startswith("predicted as if tokens chose evenly")
    run(f"sweep {where} --load-format safetensors -o sweeps/results/mix.jsonl")
    points = read(Path("sweeps/results")).points
    brought = [point.effective.wire_bytes_per_step for point in points if point.effective is not None]
    assert planned()[1] == source, "prompts of random tokens tell nothing of texts"
    run("study routing -m mix --prompt-file text.txt --samples 3 --length 40")
    by_trace, source = planned()
    assert source.startswith("predicted by the routing recorded on text.txt;")
    for bytes_, evenly, measured in zip(by_trace, even, brought, strict=True):
        assert max(bytes_, measured or 0) < 0.8 * evenly, "experts are not alike"


def test_records_of_before_brought_all_experts() -> None:
    """Their options are the defaults, and the default was to bring all."""
    asked = case(model="mixtral-8x7b", layers=None, output_len=3)
    for settings, experts in (({}, "all"), ({"experts": "on-demand"}, "on-demand")):
        points = []
        for more in ({}, {"experts_on_cpu_per_step": 3.0}):  # plans do not count what the CPU computed
            effective = Effective(gpu_weight_bytes=0, streamed_bytes_per_step=1, settings=settings | more)
            points.append(point(asked, machine=H100.name, effective=effective))
        (seen,) = calibrate.fit_points(points, {H100.name: H100})
        assert seen.placement.experts == experts


def test_a_step_whose_experts_all_stayed_did_what_was_asked() -> None:
    asked = case(gpu_weights="50%")
    assert not_as_asked(asked, Effective(gpu_weight_bytes=50, host_weight_bytes=100)) is not None
    for name in ("hits", "on_cpu"):
        settings = {f"experts_{name}_per_step": 4.0}
        assert not_as_asked(asked, Effective(gpu_weight_bytes=50, host_weight_bytes=100, settings=settings)) is None
