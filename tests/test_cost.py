"""Cost model of a pass: golden figures, and properties that hold for all shapes."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import mentions
from zinfer.checkpoint import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.engine import CHUNK_BYTES
from zinfer.core.machine import FIGURES, Machine, override
from zinfer.core.model import ModelSpec, Weights
from zinfer.plan.advice import advice, peers
from zinfer.plan.bytes import Placement, Sizes
from zinfer.plan.placement import CAUTIOUS, TUNING, Placer
from zinfer.plan.planner import Plan, Planner, make_plan
from zinfer.plan.times import LIMITS, RATES, Efficiency, Times, Timing, shipped
from zinfer.system import machines

BLOOM = resolve.resolve("bloom-176b")
INT4 = resolve.resolve("bloom-176b", weights="int4")
# Without sources and a name no peaks are known, so that limits are those of the figures below.
H100 = machines.load("h100-80gb").model_copy(
    update={"host_bytes": 1 << 40, "sources": {}, "peaks": {}, "gpu_name": "test"}
)
PLAIN = {"kv_offload": "none", "weight_codec": "none"}
ON_CPU: Any = {"kv_attention": "cpu", "kv_offload": "cpu"}
CODED = (("weight_codec", "auto"),)
PHYSICS, GOOD = Efficiency(link_share=1.0), Efficiency()
near: Any = pytest.approx
FULL_RING = 2e-3  # share of the bytes of a run's steps that a full ring may save it
NAMES = ("bloom-176b", "opt-30b", "llama-3.1-70b", "mixtral-8x22b")


def linked(bandwidth: float, **figures: Any) -> Machine:
    return H100.model_copy(update={"h2d_bandwidth": bandwidth, "host_bandwidth": None} | figures)


def placed(case: Case, machine: Machine, efficiency: Efficiency | None = None, spec: ModelSpec = BLOOM) -> Placement:
    """Return the placement of a case before free memory is given away."""
    return Placer(case, spec, machine, efficiency).bare(case.workload)


def rows_on_host(case: Case, machine: Machine) -> int:
    return placed(case, machine).host_rows(case.workload.batch_size)


def best_batch(case: Case, spec: ModelSpec, machine: Machine) -> Plan:
    return Planner(case, spec, machine).best(case.workload)


def largest_batch(case: Case, machine: Machine, efficiency: Efficiency | None = None) -> int:
    return Planner(case, BLOOM, machine, efficiency).max_batch(case.workload)


def load(batch_size: int, input_len: int = 512, output_len: int = 32) -> Workload:
    return Workload(batch_size=batch_size, input_len=input_len, output_len=output_len)


def asked(name: str = "bloom-176b", offload: Any = "cpu", batch_size: int = 1, **fields: Any) -> Case:
    options = tuple(sorted((PLAIN | dict(fields.pop("options", ()))).items()))
    given = {"model": name, "engine": "stream", "workload": load(batch_size), **fields}
    return Case(**given, options=options, offload=offload)


def bloom(machine: Machine, batch_size: int = 1, efficiency: Efficiency | None = None, **options: Any) -> Plan:
    """Plan BLOOM with all weights in host memory."""
    return make_plan(asked(batch_size=batch_size, options=options), BLOOM, machine, efficiency=efficiency)


def seconds(times: Times) -> float:
    assert times.seconds is not None
    return times.seconds


@pytest.mark.parametrize(("bandwidth", "step_s"), [(25e9, 14.1), (55e9, 6.41), (375e9, 0.94)])
def test_a_step_at_full_offload_takes_all_weights_over_the_link(bandwidth: float, step_s: float) -> None:
    everything = Placement(tier="host", also_streamed=BLOOM.other_bytes)
    assert Sizes(everything, BLOOM).wire() == BLOOM.weight_bytes
    times = Timing(everything, BLOOM, linked(bandwidth), PHYSICS).step(32, 528)
    assert (seconds(times), times.bound_by) == (near(step_s, rel=0.005), "link")


def test_golden_sizes_of_bloom() -> None:
    assert BLOOM.weight_bytes / 1e9 == pytest.approx(352.5, abs=0.1)
    assert BLOOM.kv_bytes(1, 544) / 1e9 == pytest.approx(2.18, abs=0.01)
    coded = placed(asked(weights="int4", options=CODED), H100, spec=INT4)
    _, host, _ = Sizes(coded, INT4).tiers(asked().workload)
    assert host.weights / 1e9 == pytest.approx(89.1, abs=0.1)
    assert Sizes(coded, INT4).wire() == host.weights


@pytest.mark.parametrize(("name", "batch"), [("h100-80gb", 9800), ("gh200-96gb", 1400)])
def test_decode_is_link_bound_until_compute_catches_up(name: str, batch: int) -> None:
    machine = machines.load(name).model_copy(update={"matmul_flops": 990e12, "host_bandwidth": None})
    placement = Placement(tier="host", also_streamed=BLOOM.other_bytes)
    timing = Timing(placement, BLOOM, machine, Efficiency(link_share=1.0, mfu=0.55))
    assert [timing.step(int(batch * part), 1).bound_by for part in (0.9, 1.1)] == ["link", "compute"]


def test_int4_fits_one_h200_and_then_nothing_crosses_the_link() -> None:
    h200 = machines.load("h200")
    kept = make_plan(asked(weights="int4", gpu_weights="auto", options=CODED, batch_size=8), INT4, h200)
    assert (kept.holds, kept.streamed_bytes) == (True, 0)
    assert kept.gpu.weights / 1e9 == pytest.approx(96.3, abs=0.1)
    assert kept.resident_bytes == INT4.streamed_bytes
    raw = [best_batch(asked(offload=offload), BLOOM, h200) for offload in ("none", "cpu")]
    assert mentions(advice(raw), "Stream:", "stream cpu")
    small = resolve.resolve("bloom-560m")
    assert advice([best_batch(asked("bloom-560m", "none"), small, h200)]).startswith("Do not stream: ")
    assert "planned" in advice([])
    assert advice(raw[:1]).startswith("Nothing fits")


def test_another_engine_is_named_where_it_is_faster() -> None:
    def said(machine: Machine, spec: ModelSpec, offload: Any = "cpu") -> str:
        return "\n".join(peers([Planner(asked(spec.name, offload, options=CODED), spec, machine).at(load(8))]))

    four = H100.model_copy(update={"gpu_bytes": 150 * 10**9, "gpu_count": 4})
    assert mentions(said(four, BLOOM), "4 GPUs", "tensor parallel in vLLM", "352.5 GB of weights", "50% of 4 x 2970")
    (rate,) = re.findall(r"about (\d+) tok/s", said(four, BLOOM))
    step_s = (352.5e9 + BLOOM.kv_bytes(8, 528)) / (2 * 2.97e12) + 70e-4
    prefill_s = BLOOM.prefill_flops(8, 512) / (2 * 772e12)
    assert float(rate) == pytest.approx(8 * 32 / (prefill_s + 31 * step_s), rel=0.02)
    assert said(four.model_copy(update={"gpu_count": 2}), BLOOM) == "", "two do not hold it"
    assert said(four, resolve.resolve("opt-30b"), "none") == "", "one GPU holds it"


def test_residency_takes_bytes_off_the_link_at_a_given_batch() -> None:
    opt = resolve.resolve("opt-66b")
    full, some = (make_plan(asked("opt-66b", batch_size=4, gpu_weights=share), opt, H100) for share in ("0%", "auto"))
    assert some.resident_bytes == Placer(asked("opt-66b"), opt, H100).split_free_memory(load(4))[1] > 0
    assert some.resident_bytes % opt.layer_bytes == 0
    assert some.gpu.total <= H100.gpu_bytes < some.gpu.total + opt.layer_bytes
    gain = opt.streamed_bytes / (opt.streamed_bytes - some.resident_bytes)
    assert (full.step_s or 0) / (some.step_s or 1) == pytest.approx(gain, rel=FULL_RING)


def test_what_accelerate_keeps_leaves_host_memory_and_is_read_after_the_copies() -> None:
    opt = resolve.resolve("opt-66b")
    cases = (asked("opt-66b", batch_size=4, engine="accelerate", gpu_weights=share) for share in ("0%", "50%"))
    none, half = (make_plan(case, opt, H100, efficiency=PHYSICS) for case in cases)
    assert half.placement.resident_layers == tuple(range(32))
    assert half.resident_bytes == half.streamed_bytes == none.host.weights - half.host.weights == 32 * opt.layer_bytes
    assert half.gpu.weights - none.gpu.weights == half.resident_bytes
    copies, read = (half.resident_bytes / rate for rate in (H100.h2d_bandwidth or 1, H100.hbm_bandwidth or 1))
    assert half.step_s == pytest.approx(copies + read, rel=0.005)
    assert not make_plan(asked("opt-66b", engine="accelerate", gpu_weights="90%"), opt, H100).fits
    mixtral = resolve.resolve("mixtral-8x7b")
    experts = make_plan(asked("mixtral-8x7b", engine="accelerate", options=()), mixtral, H100).gpu.buffers
    assert experts == mixtral.num_experts * mixtral.expert_bytes, "all of a layer at once"


def test_layers_that_stay_with_every_batch_leave_room_in_host_memory() -> None:
    machine = H100.model_copy(update={"host_bytes": 270_000_000_000, "attention_bandwidth": 100e9})
    options = (*CODED, ("kv_offload", "auto"))
    shares = "0%", "20%", "auto"
    streamed, kept, either = (best_batch(asked(gpu_weights=share, options=options), BLOOM, machine) for share in shares)
    assert len(kept.placement.resident_layers) == 14
    assert streamed.host.weights - kept.host.weights == round(14 * BLOOM.layer_bytes * TUNING.lossless_ratio)
    assert either.host.weights == streamed.host.weights, "the next batch may stream them"
    on_host, on_host_kept = (plan.placement.host_rows(plan.case.workload.batch_size) for plan in (streamed, kept))
    assert on_host_kept > on_host + 10
    assert abs(kept.case.workload.batch_size - streamed.case.workload.batch_size) < 3, "the same bytes hold it"
    assert (kept.output_tok_s or 0) > 1.15 * (streamed.output_tok_s or 0)
    two = make_plan(asked(gpu_weights="20%", options=(*CODED, ("gpus", 2))), BLOOM, machine)
    assert two.host.weights == kept.host.weights


def test_a_model_larger_than_host_memory_fits_if_the_gpu_keeps_a_share() -> None:
    machine = H100.model_copy(update={"gpu_bytes": 150_000_000_000, "host_bytes": 134_000_000_000})
    refused = make_plan(asked(options=CODED), BLOOM, machine)
    assert "host memory" in (refused.why_not or "")
    share = (refused.why_not or "").split("--gpu-weights ")[1].split(";")[0]
    assert make_plan(asked(options=CODED, gpu_weights=share), BLOOM, machine).fits
    small = H100.model_copy(update={"host_bytes": 134_000_000_000})
    less = f"{int(share.removesuffix('%')) - 5}%"
    assert not make_plan(asked(options=CODED, gpu_weights=less), BLOOM, machine).fits
    assert "--gpu-weights" not in (make_plan(asked(options=CODED), BLOOM, small).why_not or "--gpu-weights")


def test_with_the_batch_free_the_cache_is_worth_more_than_resident_weights() -> None:
    full, some, auto = (best_batch(asked(gpu_weights=share), BLOOM, H100) for share in (None, "10%", "auto"))
    assert (auto.output_tok_s or 0) >= (full.output_tok_s or 0) > (some.output_tok_s or 0)
    assert full.case.workload.batch_size == full.max_batch_size == largest_batch(asked(), H100)


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_no_other_batch_is_better_than_the_best(codec: str) -> None:
    """It is neither a power of two nor the largest. Whole rows make rates a little uneven."""
    machine, slice_ = linked(55e9, attention_bandwidth=24e9, host_bytes=128 << 30), BLOOM.slice(14)
    case = asked(options={"kv_attention": "cpu", "kv_offload": "auto", "weight_codec": codec}, layers=14)
    best = Planner(case, slice_, machine, GOOD).best(case.workload)
    sizes = (*range(1, 278, 9), 128, 256)
    plans = (make_plan(case.with_batch(size), slice_, machine, efficiency=GOOD) for size in sizes)
    rates = {plan.case.workload.batch_size: plan.output_tok_s or 0 for plan in plans}
    assert (best.output_tok_s or 0) > 0.997 * max(rates.values())
    assert best.max_batch_size > 256
    if codec == "lossless":
        assert 128 < best.case.workload.batch_size < 256
        assert (best.output_tok_s or 0) > 1.02 * max(rates[128], rates[256])


def test_cpu_and_link_share_the_hosts_memory() -> None:
    """Scarce, it leaves the CPU its share, the link a twentieth less. Fewer cores take nothing from it."""
    machine = linked(50e9, attention_bandwidth=100e9, host_bytes=800 << 30, details={"host": {"cores": 32}})
    tight = machine.model_copy(update={"host_bandwidth": 120e9})
    case = asked(batch_size=64, options=ON_CPU)

    def step_s(machine: Machine) -> float:
        all_cores = placed(case, machine).model_copy(update={"kv_cpu_share": 1.0})
        return Timing(all_cores, BLOOM, machine, PHYSICS).step(64, 528).seconds or 0.0

    alone = step_s(machine)
    assert step_s(machine.model_copy(update={"host_bandwidth": 150e9})) == alone
    lost = BLOOM.kv_bytes(64, 528) / 80e9 * (1 - RATES.link_keeps)
    assert step_s(tight) - alone == pytest.approx(lost)
    assert bloom(tight, 16).step_s == bloom(machine, 16).step_s, "attention on the GPU"
    assert placed(case, tight).kv_cpu_share == 0.625  # 63 of 120 GB/s beside the link's 50
    assert make_plan(case, BLOOM, tight, efficiency=PHYSICS).step_s == alone
    assert placed(case, machine).kv_cpu_share == 1
    assert placed(asked(batch_size=260, options=ON_CPU), tight).kv_cpu_share == 1, "fewer cores would finish late"


def test_link_and_cpu_slow_each_other_as_measured() -> None:
    """Once one is done, the other has its full rate again."""
    machine = linked(50e9, attention_bandwidth=100e9, host_bandwidth=120e9)
    there = Placement(tier="host", kv_host_share=1.0, kv_on_cpu=True)

    def rates(machine: Machine, host_kv: float, copying: float, placement: Placement = there) -> Any:
        return pytest.approx(Timing(placement, BLOOM, machine).contended_rates(100e9, round(host_kv), copying))

    assert rates(machine, 40e9, 1.0) == (0.5, 1.025)  # 80 GB/s beside 47.5
    assert rates(machine, 400e9, 1.0) == (4 + 0.2 / 0.95, 1 / 0.95)
    seen = machine.model_copy(update={"shared_attention_bandwidth": 60e9, "shared_h2d_bandwidth": 50e9})
    assert rates(seen, 120e9, 1.0) == (1.0 + 0.6, 1.0)
    half = there.model_copy(update={"kv_cpu_share": 0.5})
    # 50 of 110 GB/s: the link is no slower, but each core waits for memory as if all attended
    assert rates(seen, 50e9, 2.0, half) == (50 / 30, 2.0)
    assert rates(machine, 120e9, 2.0, half) == (2.0 + 0.8, 2.0)
    assert rates(seen, 50e9, 0.0, Placement(tier="gpu")) == (0.5, 0.0)
    assert rates(machine.model_copy(update={"host_bandwidth": None}), 50e9, 1.0) == (0.5, 1.0)


def test_cores_are_enough_to_attend_in_half_the_time_of_the_link() -> None:
    """The share of the cores grows with the rows; all of them attend where fewer would take longer than that."""
    machine = linked(50e9, attention_bandwidth=72e9, host_bandwidth=81e9)
    placement = Placement(tier="host", kv_on_cpu=True)
    shares = []
    for rows in (8, 32, 56, 96):
        split = placement.model_copy(update={"kv_host_share": rows / 100})
        times = Timing(split, BLOOM, machine).with_best_cores(100, 528)
        limits = Timing(times, BLOOM, machine).step(100, 528).limits
        assert times.kv_cpu_share == 1 or limits["cpu attention"] <= limits["link"] / 2
        shares.append(times.kv_cpu_share)
    assert shares == [0.375, 0.5, 0.75, 1.0]


def test_heads_that_share_a_key_keep_the_cpu_longer_at_it() -> None:
    """The bytes of a shared key take as many products; if few heads share it, memory alone sets the time."""
    machine = linked(50e9, attention_bandwidth=100e9)
    assert [machine.attention_rate(sharing) for sharing in (1, 8)] == [100e9, 43e9], "assumed"
    grouped = machine.model_copy(update={"grouped_attention_bandwidth": 40e9, "host_bytes": 800 << 30})
    assert [grouped.attention_rate(sharing) for sharing in (1, 2, 4, 8, 16)] == [100e9, 100e9, 80e9, 40e9, 20e9]
    early = grouped.model_copy(update={"attention_bandwidth": 30e9, "shared_attention_bandwidth": 60e9})
    assert [early.attention_rate(sharing) for sharing in (1, 8)] == [60e9, 40e9], "it was faster beside the link"
    llama, case = resolve.resolve("llama-3.1-70b"), asked("llama-3.1-70b", batch_size=2048, options=ON_CPU)
    alone = grouped.model_copy(update={"grouped_attention_bandwidth": 100e9})
    slow, quick = (make_plan(case, llama, machine, efficiency=PHYSICS) for machine in (grouped, alone))
    assert slow.bound_by == quick.bound_by == "cpu attention"
    lost = llama.kv_bytes(2048, 528) * (1 / 40e9 - 1 / 100e9)
    assert (slow.step_s or 0.0) - (quick.step_s or 0.0) == pytest.approx(lost)


def test_a_rate_set_by_hand_voids_those_measured_with_it() -> None:
    grouped = H100.model_copy(update={"grouped_attention_bandwidth": 40e9})
    assert override(grouped, "attention_bandwidth=90GB/s").attention_rate(8) == 90e9
    seen = linked(50e9, shared_attention_bandwidth=60e9, shared_h2d_bandwidth=40e9)
    assert override(seen, "h2d_bandwidth=200GB/s").shared_h2d_bandwidth is None
    assert override(seen, "hbm_bandwidth=200GB/s").shared_h2d_bandwidth == 40e9
    assert override(seen, "shared_h2d_bandwidth=30GB/s").shared_attention_bandwidth == 60e9


def test_a_codec_takes_its_share_off_the_link_and_nothing_else() -> None:
    machine, case = linked(55e9), asked(options={"weight_codec": "lossless"})
    raw, coded = bloom(machine, efficiency=PHYSICS), make_plan(case, BLOOM, machine, efficiency=PHYSICS)
    assert coded.streamed_bytes == pytest.approx(0.67 * raw.streamed_bytes)
    assert (coded.step_s or 0) == pytest.approx(0.67 * (raw.step_s or 0))
    assert make_plan(case, BLOOM, machine).step_s == pytest.approx(RATES.coded_bound * (raw.step_s or 0), rel=FULL_RING)
    fp8 = resolve.resolve("bloom-176b", weights="fp8")
    coded, bound = (make_plan(case, fp8, machine, efficiency=each) for each in (PHYSICS, None))
    assert coded.step_s == pytest.approx(0.83 / 2 * (raw.step_s or 0), rel=0.01)
    assert bound.step_s == pytest.approx(RATES.fp8_bound / 2 * (raw.step_s or 0), rel=0.01)


def test_coded_weights_that_stay_are_unpacked_in_each_pass_and_then_computed() -> None:
    opt, bandwidth = resolve.resolve("opt-30b"), H100.hbm_bandwidth or 1
    machine = H100.model_copy(update={"gpu_bytes": 140 << 30})
    cases = (asked("opt-30b", gpu_weights="100%", options={"weight_codec": codec}) for codec in ("auto", "none"))
    coded, raw = (make_plan(case, opt, machine, efficiency=PHYSICS) for case in cases)
    assert coded.streamed_bytes == raw.streamed_bytes == 0
    weights = opt.streamed_bytes
    read = (opt.active_parameters * opt.dtype_bytes + opt.kv_bytes(1, 528)) / bandwidth
    kernels = RATES.kernel_s * opt.num_layers
    assert raw.step_s == coded.step_s == pytest.approx(read + kernels), "there is room to keep them unpacked"
    assert (coded.gpu.weights, coded.bound_by) == (raw.gpu.weights, "hbm")
    packed = coded.placement.model_copy(update={"unpacked_layers": ()})
    times = Timing(packed, opt, machine, PHYSICS).step(1, 528)
    unpacking = near(weights / (RATES.unpacking * bandwidth) + read + kernels)
    assert (times.bound_by, times.seconds) == ("unpacking", unpacking)
    limit = Timing(packed, opt, machine, LIMITS).step(1, 528)
    assert limit.bound_by == "hbm"
    assert limit.seconds == pytest.approx(read - (1 - RATES.coded_bound) * weights / bandwidth), "read as they are"
    assert limit.limits.keys() == {"hbm", "compute"}, "unpacking and launches are no physics"
    long = Timing(packed, opt, machine, PHYSICS).prefill(64, 2048)
    assert long.bound_by == "compute"
    assert seconds(long) == pytest.approx(long.limits["compute"] + long.limits["unpacking"])


def test_whatever_comes_through_the_ring_is_unpacked_and_what_several_gpus_share() -> None:
    layers = BLOOM.streamed_bytes
    ring = Placement(tier="host", ring_depth=6, resident_bytes=layers // 4)
    assert Sizes(ring, BLOOM).unpacked() == layers - layers // 4, "uncoded layers that stay are computed where they are"
    assert Sizes(ring.model_copy(update={"wire_ratio": 0.67}), BLOOM).unpacked() == layers
    assert Sizes(ring.model_copy(update={"gpus": 2}), BLOOM).unpacked() == layers
    assert Sizes(ring.model_copy(update={"ring_depth": 0}), BLOOM).unpacked() == 0
    assert Sizes(Placement(ring_depth=6), BLOOM).unpacked() == 0, "all weights are on the GPU"
    machines = (linked(1e15), linked(1e15, gpu_count=0))
    with_gpu, without = (Timing(ring, BLOOM, each, LIMITS).step(1, 528).limits["hbm"] for each in machines)
    assert with_gpu - without == pytest.approx(Sizes(ring, BLOOM).wire() / (H100.hbm_bandwidth or 1)), "no ring to fill"
    copied = Timing(ring, BLOOM, linked(1e15), PHYSICS).step(1, 528)
    assert copied.limits["unpacking"] == pytest.approx(2 * 3 / 4 * layers / (H100.hbm_bandwidth or 1), rel=1e-6)
    kernels = RATES.kernel_s * BLOOM.num_layers
    assert seconds(copied) == pytest.approx(copied.limits["unpacking"] + copied.limits["hbm"] + kernels)


@pytest.mark.parametrize(("name", "factor"), [("mixtral-8x7b", 2), ("qwen3-235b-a22b", 8)])
def test_a_prefill_holds_a_row_for_each_expert_of_a_token(name: str, factor: int) -> None:
    """Products hold hidden values, gate and up, their activation, their product."""
    spec = resolve.resolve(name)
    assert spec.experts_per_token == factor
    rows = factor * (4 * spec.ffn_size + spec.hidden_size)
    logits = spec.vocab_size * (spec.dtype_bytes + 4)
    activations = Sizes(Placement(tier="host"), spec).activations(spec, 1, 512)
    assert activations == (4 * spec.hidden_size + rows) * 512 * spec.dtype_bytes + logits


def test_predictions_are_those_of_the_placement_that_is_obeyed() -> None:
    """Which has a margin, here of a deep ring; limits have none."""
    case = asked(batch_size=8, gpu_weights="auto", options=CODED)
    plan, limit = (make_plan(case, BLOOM, H100, efficiency=each) for each in (GOOD, None))
    assert plan.placement == limit.placement
    assert plan.step_s == Timing(plan.placement, BLOOM, H100).step(8, 528).seconds
    assert plan.resident_bytes == plan.placement.resident_bytes < limit.resident_bytes


def test_a_cache_on_the_host_frees_the_gpu_and_loads_the_link() -> None:
    on_gpu = bloom(linked(55e9), 16)
    on_host = bloom(linked(55e9), 16, kv_attention="gpu", kv_offload="cpu")
    assert on_host.gpu.kv_cache == 0
    assert on_host.host.kv_cache == on_gpu.gpu.kv_cache
    assert on_host.max_batch_size > 4 * on_gpu.max_batch_size
    assert on_host.step_s == pytest.approx((BLOOM.streamed_bytes + BLOOM.kv_bytes(16, 528)) / 55e9, rel=FULL_RING)
    assert on_host.host.total * 0.97 < (H100.host_bytes or 0)
    slow = linked(55e9, duplex_bandwidth=1e9, host_bytes=800 << 30)
    assert bloom(slow, 64, kv_offload="cpu").prefill_s == pytest.approx(BLOOM.kv_bytes(64, 512) / 1e9), "prompts, too"


def test_attention_on_the_cpu_reads_the_cache_beside_the_link() -> None:
    machine = linked(55e9, host_bandwidth=100e9, host_bytes=800 << 30)
    few, many = (bloom(machine, size, **ON_CPU) for size in (16, 200))
    assert (few.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / 55e9, rel=FULL_RING)
    assert (few.bound_by, many.bound_by) == ("link", "host memory")
    read = BLOOM.streamed_bytes + BLOOM.kv_bytes(200, 528)
    assert (many.step_s or 0) == pytest.approx(read / 100e9, rel=FULL_RING)
    assert many.gpu.kv_cache == 0
    slow = linked(55e9, attention_bandwidth=50e9, host_bytes=800 << 30)
    at_rest, plan = (bloom(slow, size, PHYSICS, **ON_CPU) for size in (1, 200))
    assert plan.bound_by == "cpu attention"
    cpu_s = BLOOM.kv_bytes(200, 528) / 50e9
    assert cpu_s < (plan.step_s or 0) < cpu_s + (at_rest.step_s or 0), "CPU and GPU wait for each other"


@pytest.mark.parametrize(("cpu_reads", "read_over"), [(120e9, 0), (20e9, 1), (None, 1)])
def test_the_faster_way_to_a_cache_in_host_memory_is_taken(cpu_reads: float | None, read_over: int) -> None:
    """A CPU that was not measured is not trusted with attention."""
    machine = linked(55e9, attention_bandwidth=cpu_reads, host_bytes=800 << 30)
    plan = bloom(machine, 100, kv_offload="cpu")
    over_link = BLOOM.streamed_bytes + read_over * BLOOM.kv_bytes(100, 528)
    assert (plan.placement.kv_on_cpu, plan.bound_by) == (read_over == 0, "link")
    assert (plan.step_s or 0) == pytest.approx(over_link / 55e9, rel=FULL_RING)


def test_auto_puts_only_rows_that_do_not_fit_the_gpu_into_host_memory() -> None:
    machine = linked(55e9, attention_bandwidth=120e9, host_bytes=800 << 30)
    largest = largest_batch(asked(), machine, CAUTIOUS)
    small, large = (bloom(machine, size, kv_offload="auto") for size in (largest, 2 * largest))
    assert small.host.kv_cache == 0
    assert small.gpu == bloom(machine, largest).gpu
    rows = rows_on_host(large.case, machine)
    assert largest <= rows <= largest + 4  # a layer that waits in the ring while the CPU attends takes room too
    assert large.host.kv_cache == pytest.approx(BLOOM.kv_bytes(rows, 544), rel=1e-6)
    cautious = make_plan(large.case, BLOOM, machine, efficiency=CAUTIOUS)
    assert cautious.gpu.total <= machine.gpu_bytes < cautious.gpu.total + 2 * BLOOM.kv_bytes(1, 544)
    assert cautious.host == large.host  # for any caller
    assert large.max_batch_size > 3 * largest
    assert large.step_s == small.step_s
    for case, deep in ((small.case, False), (large.case, True)):  # the ring holds a layer while the CPU attends
        placement = placed(case, machine)
        assert (placement.kv_buffers * Sizes(placement, BLOOM).chunk >= BLOOM.layer_bytes) is deep
        assert placement.kv_on_cpu is deep


@pytest.mark.parametrize("lengths", [(512, 32), (128, 512), (64, 512)])
@pytest.mark.parametrize("offload", ["cpu", "auto"])
@pytest.mark.parametrize("gpu_weights", [None, "auto"])
def test_the_cache_pays_for_the_ring(lengths: tuple[int, int], offload: str, gpu_weights: str | None) -> None:
    machine = linked(55e9, host_bytes=800 << 30)
    options = {"kv_attention": "gpu", "kv_offload": offload, "weight_codec": "auto"}
    case = asked(workload=load(200, *lengths), options=options, gpu_weights=gpu_weights)
    placement = placed(case, machine)
    depth, resident = Placer(case, BLOOM, machine).split_free_memory(case.workload)
    part = BLOOM.kv_bytes(placement.prefill_rows(200, lengths[0]), sum(lengths)) // BLOOM.num_layers
    buffer = max(part, round(CHUNK_BYTES * placement.wire_ratio))
    device_rows = 200 - rows_on_host(case, machine)
    others = Sizes(placement, BLOOM).tiers(case.workload).gpu.total - placement.kv_buffers * buffer
    assert others + depth * buffer + (resident if gpu_weights else 0) * placement.kept_ratio <= machine.gpu_bytes
    assert device_rows == 0 or offload == "auto"


@pytest.mark.parametrize("rate", [None, 120e9])
@pytest.mark.parametrize("way", [{}, {"kv_cache_dtype": "int8"}], ids=str)
def test_only_a_measured_cpu_is_given_what_no_other_could_attend_to(rate: float | None, way: dict[str, str]) -> None:
    """It comes without weights, or in 8 bits."""
    machine = linked(55e9, attention_bandwidth=rate, host_bytes=800 << 30)
    model, offload = BLOOM if way else resolve.resolve("opt-30b"), "cpu" if way else "none"

    def on_host(**options: str) -> bool:
        case = asked(model.name, offload, 400, options={"kv_offload": "auto", "weight_codec": "auto"} | way | options)
        placement = Placer(case, model, machine).choose(case.workload)
        return placement.kv_on_cpu and placement.host_rows(400) > 0

    assert on_host() is (rate is not None)
    assert on_host(kv_attention="cpu")


@pytest.mark.parametrize("rate", [None, 120e9])
def test_no_row_is_in_host_memory_if_all_fit_the_gpu(rate: float | None) -> None:
    """Holds also where all rows but one would not fit. The cause is the buffers that one row in transit needs."""
    machine = linked(55e9, attention_bandwidth=rate, host_bytes=800 << 30)

    def short(size: int, place: str) -> Case:
        return asked(workload=load(size, 32), options={"kv_offload": place, "weight_codec": "auto"})

    largest = largest_batch(short(1, "none"), machine)
    rows = [rows_on_host(short(size, "auto"), machine) for size in range(largest - 4, largest + 2)]
    assert rows[:-1] == [0] * 5
    assert rows[-1] > 0


def test_no_row_is_in_host_memory_while_the_gpu_holds_all_with_the_margin_of_the_engine() -> None:
    """Small buffers need less margin than the share that else stays free."""
    machine, model = machines.load("h100-80gb"), resolve.resolve("opt-30b")
    between_margins = 0
    for size in range(12, 24):
        case = Case(model="opt-30b", engine="stream", offload="none", workload=(workload := load(size, 512, 256)))
        alone = Placer(case.model_copy(update={"options": (("kv_offload", "none"),)}), model, machine)
        counted, cautious = (alone.tiers(alone.choose(workload), workload, each) for each in (None, CAUTIOUS))
        planner = Planner(case, model, machine)
        if cautious.gpu.total <= machine.gpu_bytes:
            between_margins += counted.gpu.total > TUNING.max_device_share * machine.gpu_bytes
            assert planner.placement(workload).host_rows(size) == 0
            assert planner.max_batch(workload) >= size
        else:
            assert planner.placement(workload).host_rows(size) > 0
    assert between_margins


def test_every_gpu_brings_its_own_link() -> None:
    single, four = (bloom(linked(55e9), 8, gpus=gpus) for gpus in (1, 4))
    assert (single.step_s or 0) == pytest.approx(4 * (four.step_s or 0), rel=FULL_RING)
    assert four.gpu.kv_cache == single.gpu.kv_cache // 4
    several = linked(55e9, links_bandwidth=120e9, gather_bandwidth=1e12, gpu_count=4)
    for machine, gpus, rate, bound_by in (
        (H100.model_copy(update={"host_bandwidth": 100e9}), 4, 100e9, "host memory"),
        (several, 4, 120e9, "link"),
        (several, 8, 240e9, "link"),  # further links
        (several.model_copy(update={"host_bandwidth": 150e9}), 8, 150e9, "host memory"),
        (several.model_copy(update={"gather_bandwidth": 60e9}), 4, 60e9 * 4 / 3, "gather"),
    ):
        plan = bloom(machine, gpus=gpus)
        assert (plan.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / rate, rel=FULL_RING)
        assert plan.bound_by == bound_by


def test_unpacking_by_operations_of_torch_bounds_a_step_of_deepspeed() -> None:
    """Its float16 is unpacked by a kernel."""

    def planned(weights: Any, dtype: Any = "bfloat16") -> Plan:
        fields: dict[str, Any] = {"workload": load(1), "weights": weights, "dtype": dtype}
        case = Case(model="b", engine="deepspeed", offload="cpu", **fields)
        return make_plan(case, BLOOM.with_dtype(dtype), linked(55e9), efficiency=GOOD)

    plan, half, weights = planned("int4"), planned("int4", "float16"), BLOOM.streamed_bytes // 2
    assert (plan.bound_by, plan.placement.dequantised_bytes) == ("unpacking", 18 * weights)
    assert (plan.step_s or 0) > 18 * weights / (RATES.torch_unpacking * (H100.hbm_bandwidth or 0))
    assert planned("int8").placement.dequantised_bytes == 13 * weights
    assert (half.bound_by, half.placement.dequantised_bytes) == ("link", 0)


@pytest.mark.parametrize("tuned", [True, False])
def test_deepspeed_on_several_gpus_divides_what_it_gathers(tuned: bool) -> None:
    roomy = linked(55e9, host_bytes=800 << 30, gather_bandwidth=1e12)

    def planned(gpus: int, machine: Machine = roomy) -> Plan:
        fields: dict[str, Any] = {"workload": load(8), "options": (("gpus", gpus), ("tuned", tuned))}
        return make_plan(Case(model="b", engine="deepspeed", offload="cpu", **fields), BLOOM, machine)

    single, four = planned(1), planned(4)
    assert (single.step_s or 0) == pytest.approx(4 * (four.step_s or 0))
    assert single.bound_by == four.bound_by == "link"
    assert single.host.weights == four.host.weights, "one copy"
    assert single.streamed_bytes == four.streamed_bytes, "crossing once"
    assert four.gpu.kv_cache == single.gpu.kv_cache // 4
    assert four.gpu.weights == single.gpu.weights // 4 == (BLOOM.other_bytes // 4 if tuned else 0)
    gathered = BLOOM.other_bytes if tuned else 0
    assert four.gpu.buffers == pytest.approx((2 + 1 / 4) * BLOOM.layer_bytes + gathered, rel=0.01)
    slow = planned(4, roomy.model_copy(update={"gather_bandwidth": 10e9}))
    assert (slow.bound_by, slow.step_s) == ("gather", near(BLOOM.weight_bytes * 3 / 4 / 10e9, rel=0.001))


def test_deepspeed_copies_a_part_after_the_gather_of_the_layer_before() -> None:
    link, gather = BLOOM.streamed_bytes / 100e9, BLOOM.weight_bytes / 2 / 100e9
    for divided, efficiency, gathers, expected, bound_by in (
        (True, PHYSICS, 100e9, link + gather, "link"),
        (True, PHYSICS, 25e9, link + 4 * gather, "gather"),
        (False, PHYSICS, 100e9, link, "link"),
        (True, LIMITS, 100e9, link, "link"),
    ):
        placement = Placement(tier="host", gpus=2, divided=divided)
        times = Timing(placement, BLOOM, linked(50e9, gather_bandwidth=gathers), efficiency).step(8, 512)
        assert (times.seconds, times.bound_by) == (near(expected), bound_by)


def test_a_small_batch_reads_few_experts_and_the_link_carries_all() -> None:
    mixtral = resolve.resolve("mixtral-8x22b")
    single, many = (Timing(Placement(), mixtral, H100, PHYSICS).step(size, 512) for size in (1, 256))
    read = single.limits["hbm"] * (H100.hbm_bandwidth or 0) - mixtral.kv_bytes(1, 512)
    embedding = mixtral.vocab_size * mixtral.hidden_size * mixtral.dtype_bytes  # a look-up
    assert read == pytest.approx(mixtral.active_parameters * mixtral.dtype_bytes - embedding, rel=1e-6)
    everything = many.limits["hbm"] * (H100.hbm_bandwidth or 0) - mixtral.kv_bytes(256, 512)
    assert everything == pytest.approx(mixtral.weight_bytes - embedding, rel=1e-6)
    assert Sizes(Placement(tier="host"), mixtral).wire() == mixtral.streamed_bytes


def test_launches_are_a_floor_and_nvme_is_a_link() -> None:
    opt = resolve.resolve("opt-30b")
    times = Timing(Placement(), opt, H100, Efficiency(link_share=1.0, layer_s=2e-3)).step(1, 512)
    assert (times.bound_by, times.seconds) == ("launch", near(2e-3 * opt.num_layers))
    disk = H100.model_copy(update={"nvme_bandwidth": 5e9})
    on_disk = Timing(Placement(tier="nvme"), opt, disk, PHYSICS).step(1, 512)
    assert (on_disk.bound_by, on_disk.seconds) == ("nvme", near(opt.streamed_bytes / 5e9))


@pytest.mark.parametrize("unknown", ["hbm_bandwidth", "h2d_bandwidth", "matmul_flops"])
def test_an_unknown_figure_makes_times_unknown_never_zero(unknown: str) -> None:
    machine = H100.model_copy(update={unknown: None})
    timing = Timing(Placement(tier="host"), BLOOM, machine)
    assert timing.step(1, 512).seconds is timing.prefill(1, 512).seconds is None
    plan = make_plan(asked(), BLOOM, machine)
    assert (plan.output_tok_s, plan.e2e_s, plan.bound_by) == (None, None, None)
    assert plan.gpu.total > 0


PLACEMENTS = st.builds(
    Placement,
    tier=st.sampled_from(["gpu", "host"]),
    gpus=st.integers(1, 8),
    resident_bytes=st.integers(0, 100 << 30),
    wire_ratio=st.sampled_from([1.0, 0.67, 0.26]),
    ring_depth=st.sampled_from([0, 6]),
    kv_host_share=st.floats(0, 1),
    overlapped=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(PLACEMENTS, st.sampled_from(NAMES), st.integers(1, 512), st.sampled_from(FIGURES), st.floats(1.0, 8.0))
def test_a_better_machine_and_the_limit_are_as_fast(
    placement: Placement, name: str, batch: int, figure: str, factor: float
) -> None:
    better = H100.model_copy(update={figure: (getattr(H100, figure) or 0) * factor or None})
    ways = ((H100, GOOD), (better, GOOD), (H100, LIMITS))
    timings = [Timing(placement, resolve.resolve(name), machine, way) for machine, way in ways]
    predicted, quick, limit = (seconds(timing.step(batch, 512)) for timing in timings)
    assert max(quick, limit) <= predicted * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(PLACEMENTS, st.sampled_from(NAMES), st.integers(1, 500), st.integers(1, 500))
def test_larger_batches_need_no_less_and_lose_no_weight(placement: Placement, name: str, batch: int, more: int) -> None:
    spec = resolve.resolve(name)
    small, large = (Sizes(placement, spec).tiers(load(size, 256)) for size in (batch, batch + more))
    assert all(low.total <= other.total for low, other in zip(small, large, strict=True))
    stored = spec.streamed_bytes
    gpu, host, nvme = small
    kept = stored if placement.tier == "gpu" else min(placement.resident_bytes, stored)
    assert gpu.weights == kept // placement.gpus + spec.other_bytes
    assert host.weights + nvme.weights == (0 if placement.tier == "gpu" else stored)
    assert sum(getattr(gpu, part) for part in type(gpu).model_fields) == gpu.total


@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("weights", ["as-released", "int4"])
def test_a_budget_costs_what_the_link_takes(weights: Weights, batch_size: int) -> None:
    """There is no step on the way. All resident is as fast as without offload."""
    spec, efficiency = resolve.resolve("llama-3.1-8b", weights=weights), shipped()["stream"]

    def planned(offload: str, budget: str | None) -> Plan:
        case = asked("llama-3.1-8b", offload, batch_size, weights=weights, gpu_weights=budget, options=CODED)
        return make_plan(case, spec, H100, efficiency=efficiency)

    whole, curve = planned("none", None), [planned("cpu", f"{share}%") for share in range(0, 101, 2)]
    seconds = [plan.step_s or 0.0 for plan in curve]
    assert all(more <= less for less, more in pairwise(seconds))
    for plan, step_s in zip(curve, seconds, strict=True):
        copying = plan.streamed_bytes / (efficiency.link_share * (H100.h2d_bandwidth or 1))
        assert step_s <= 1.05 * ((whole.step_s or 0.0) + copying)
        assert {*plan.placement.unpacked_layers} <= {*plan.placement.resident_layers}
        assert plan.gpu.weights - spec.other_bytes <= plan.resident_bytes, "a budget counts bytes of the checkpoint"
    for plan in (curve[-1], planned("cpu", "auto")):
        assert plan.step_s == pytest.approx(whole.step_s)
        assert plan.max_batch_size >= whole.max_batch_size


def test_with_little_room_fewer_layers_stay_and_more_of_them_unpacked() -> None:
    """Streaming one makes room for two of the others. A larger batch leaves none of them any."""
    spec = resolve.resolve("opt-30b")
    case = asked("opt-30b", batch_size=32, gpu_weights="auto", options=CODED)
    planner = Planner(case, spec, H100, shipped()["stream"])
    alone, some, crowd = map(planner.at, map(load, (1, 32, 60)))
    assert len(alone.placement.unpacked_layers) == spec.num_layers
    assert 0 < len(some.placement.unpacked_layers) < len(some.placement.resident_layers) < spec.num_layers
    assert not crowd.placement.unpacked_layers
    for share in ("90%", "94%", "98%", "100%"):
        other = make_plan(case.model_copy(update={"gpu_weights": share}), spec, H100, efficiency=shipped()["stream"])
        assert (some.step_s or 0.0) <= (other.step_s or 0.0)
    for plan in (alone, some, crowd):
        assert plan.gpu.total <= H100.gpu_bytes
