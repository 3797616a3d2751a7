"""Cost model of a pass: golden figures, and properties that hold for all shapes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import mentions
from zinfer.checkpoint import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.engine import CHUNK_BYTES
from zinfer.core.machine import FIGURES, Machine, override
from zinfer.plan.cost import (
    CODED_BOUND,
    FP8_BOUND,
    LIMITS,
    LINK_KEEPS,
    TORCH_RATE,
    UNPACKING,
    Efficiency,
    Placement,
    Times,
    chunk_bytes,
    contended_rates,
    prefill,
    step,
    tiers,
    unpacked_bytes,
    wire_bytes,
    with_cores,
)
from zinfer.plan.plan import CAUTIOUS, LOSSLESS_RATIO, Plan, largest_batch, make_plan, placement_of, split_free_memory
from zinfer.plan.search import advice, best_batch
from zinfer.system import machines

BLOOM = resolve.resolve("bloom-176b", None, None)
INT4 = resolve.resolve("bloom-176b", None, None, "int4")
# Without sources and a name no peaks are known, so that limits are those of the figures below.
H100 = machines.load("h100-80gb").model_copy(
    update={"host_bytes": 1 << 40, "sources": {}, "peaks": {}, "gpu_name": "test"}
)
RAW, CODED = (("weight_codec", "none"),), (("weight_codec", "auto"),)
PHYSICS = Efficiency(link_share=1.0)
FULL_RING = 2e-3  # share of the bytes of a run's steps that a full ring may save it
NAMES = ("bloom-176b", "opt-30b", "llama-3.1-70b", "mixtral-8x22b")


def linked(bandwidth: float, place: Machine = H100) -> Machine:
    return place.model_copy(update={"h2d_bandwidth": bandwidth, "host_bandwidth": None})


def rows_on_host(case: Case, place: Machine, factors: Efficiency | None = None) -> int:
    """Return the number of sequences of a case of BLOOM whose KV cache is in host memory."""
    return round(placement_of(case, BLOOM, place, factors=factors).kv_host_share * case.workload.batch_size)


def asked(name: str = "bloom-176b", offload: Any = "cpu", batch_size: int = 1, **fields: Any) -> Case:
    workload = Workload(batch_size=batch_size, input_len=512, output_len=32)
    options = tuple(sorted((dict(RAW) | dict(fields.pop("options", ()))).items()))
    return Case(**{"model": name, "engine": "stream", **fields}, options=options, offload=offload, workload=workload)


def seconds(times: Times) -> float:
    assert times.seconds is not None
    return times.seconds


@pytest.mark.parametrize(("bandwidth", "expected"), [(25e9, 14.1), (55e9, 6.41), (375e9, 0.94)])
def test_a_step_at_full_offload_takes_all_weights_over_the_link(bandwidth: float, expected: float) -> None:
    everything = Placement(tier="host", also_streamed=BLOOM.other_bytes)
    assert wire_bytes(everything, BLOOM) == BLOOM.weight_bytes
    found = step(everything, BLOOM, linked(bandwidth), 32, 528, PHYSICS)
    assert seconds(found) == pytest.approx(expected, rel=0.005)
    assert found.bound_by == "link"
    assert 32 / seconds(found) == pytest.approx({25e9: 2.27, 55e9: 4.99, 375e9: 34.0}[bandwidth], rel=0.005)


def test_golden_sizes_of_bloom() -> None:
    assert BLOOM.weight_bytes / 1e9 == pytest.approx(352.5, abs=0.1)
    assert BLOOM.kv_bytes(1, 544) / 1e9 == pytest.approx(2.18, abs=0.01)
    coded = placement_of(asked(weights="int4", options=CODED), INT4, H100)
    _, host, _ = tiers(coded, INT4, H100, 1, 512, 32)
    assert host.weights / 1e9 == pytest.approx(89.1, abs=0.1)
    assert wire_bytes(coded, INT4) == host.weights


@pytest.mark.parametrize(("name", "batch"), [("h100-80gb", 9800), ("gh200-96gb", 1400)])
def test_decode_is_link_bound_until_compute_catches_up(name: str, batch: int) -> None:
    place = machines.load(name).model_copy(update={"matmul_flops": 990e12, "host_bandwidth": None})
    told = Efficiency(link_share=1.0, mfu=0.55)
    setup = Placement(tier="host", also_streamed=BLOOM.other_bytes)
    few, many = (step(setup, BLOOM, place, int(batch * part), 1, told).bound_by for part in (0.9, 1.1))
    assert (few, many) == ("link", "compute")


def test_int4_fits_one_h200_and_then_nothing_crosses_the_link() -> None:
    h200 = machines.load("h200")
    kept = make_plan(asked(weights="int4", gpu_weights="auto", options=CODED, batch_size=8), INT4, h200)
    assert kept.holds
    assert kept.streamed_bytes == 0
    assert kept.gpu.weights / 1e9 == pytest.approx(96.3, abs=0.1)
    assert kept.resident_bytes == INT4.streamed_bytes
    raw = [best_batch(asked(offload=offload), BLOOM, h200) for offload in ("none", "cpu")]
    assert mentions(advice(raw), "Stream:", "stream cpu")
    small = resolve.resolve("bloom-560m", None, None)
    assert advice([best_batch(asked("bloom-560m", "none"), small, h200)]).startswith("Do not stream: ")
    assert "planned" in advice([])
    assert advice(raw[:1]).startswith("Nothing fits")


def test_residency_takes_bytes_off_the_link_at_a_given_batch() -> None:
    opt = resolve.resolve("opt-66b", None, None)
    full, some = (make_plan(asked("opt-66b", batch_size=4, gpu_weights=share), opt, H100) for share in ("0%", "auto"))
    assert some.resident_bytes == split_free_memory(asked("opt-66b", batch_size=4), opt, H100)[1] > 0
    assert some.resident_bytes % opt.layer_bytes == 0
    assert some.gpu.total <= H100.gpu_bytes
    assert some.gpu.total + opt.layer_bytes > H100.gpu_bytes
    weights = opt.streamed_bytes
    gain = weights / (weights - some.resident_bytes)
    assert (full.step_s or 0) / (some.step_s or 1) == pytest.approx(gain, rel=FULL_RING)


def test_what_accelerate_keeps_leaves_host_memory_and_is_read_after_the_copies() -> None:
    opt = resolve.resolve("opt-66b", None, None)
    none, half = (
        make_plan(asked("opt-66b", batch_size=4, engine="accelerate", gpu_weights=share), opt, H100, factors=PHYSICS)
        for share in ("0%", "50%")
    )
    assert half.placement.resident_layers == tuple(range(32))
    assert half.resident_bytes == half.streamed_bytes == none.host.weights - half.host.weights == 32 * opt.layer_bytes
    assert half.gpu.weights - none.gpu.weights == half.resident_bytes
    copies, read = (half.resident_bytes / rate for rate in (H100.h2d_bandwidth or 1, H100.hbm_bandwidth or 1))
    assert half.step_s == pytest.approx(copies + read, rel=0.005)
    assert not make_plan(asked("opt-66b", engine="accelerate", gpu_weights="90%"), opt, H100).fits


def test_layers_that_stay_with_every_batch_leave_room_in_host_memory() -> None:
    place = H100.model_copy(update={"host_bytes": 270_000_000_000, "attention_bandwidth": 100e9})
    options = (*CODED, ("kv_offload", "auto"))
    shares = "0%", "20%", "auto"
    streamed, kept, either = (best_batch(asked(gpu_weights=one, options=options), BLOOM, place) for one in shares)
    assert len(kept.placement.resident_layers) == 14
    assert streamed.host.weights - kept.host.weights == round(14 * BLOOM.layer_bytes * LOSSLESS_RATIO)
    assert either.host.weights == streamed.host.weights, "the next batch may stream them"
    on_host, on_host_kept = (plan.placement.host_rows(plan.case.workload.batch_size) for plan in (streamed, kept))
    assert on_host_kept > on_host + 10
    assert abs(kept.case.workload.batch_size - streamed.case.workload.batch_size) < 3, "the same bytes hold it"
    assert (kept.output_tok_s or 0) > 1.15 * (streamed.output_tok_s or 0)
    two = make_plan(asked(gpu_weights="20%", options=(*CODED, ("gpus", 2))), BLOOM, place)
    assert two.host.weights == kept.host.weights


def test_a_model_larger_than_host_memory_fits_if_the_gpu_keeps_a_share() -> None:
    place = H100.model_copy(update={"gpu_bytes": 150_000_000_000, "host_bytes": 134_000_000_000})
    refused = make_plan(asked(options=CODED), BLOOM, place)
    assert "host memory" in (refused.why_not or "")
    share = (refused.why_not or "").split("--gpu-weights ")[1].split(";")[0]
    assert make_plan(asked(options=CODED, gpu_weights=share), BLOOM, place).fits
    small = H100.model_copy(update={"host_bytes": 134_000_000_000})
    less = f"{int(share.removesuffix('%')) - 5}%"
    assert not make_plan(asked(options=CODED, gpu_weights=less), BLOOM, place).fits
    assert "--gpu-weights" not in (make_plan(asked(options=CODED), BLOOM, small).why_not or "--gpu-weights")


def test_with_the_batch_free_the_cache_is_worth_more_than_resident_weights() -> None:
    full = best_batch(asked(), BLOOM, H100)
    half = best_batch(asked(gpu_weights="10%"), BLOOM, H100)
    auto = best_batch(asked(gpu_weights="auto"), BLOOM, H100)
    assert (full.output_tok_s or 0) > (half.output_tok_s or 0)
    assert (auto.output_tok_s or 0) >= (full.output_tok_s or 0)
    assert full.case.workload.batch_size == full.max_batch_size == largest_batch(asked(), BLOOM, H100)


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_no_other_batch_is_better_than_the_best(codec: str) -> None:
    """With slow attention on the CPU, the best batch is neither a power of two nor the largest.

    (The GPU holds whole rows, which makes throughput uneven by some thousandths.)
    """
    place, slice_ = linked(55e9), BLOOM.slice(14)
    place = place.model_copy(update={"attention_bandwidth": 24e9, "host_bytes": 128 << 30})
    options = (("kv_attention", "cpu"), ("kv_offload", "auto"), ("weight_codec", codec))
    case = asked(options=options, layers=14)
    best = best_batch(case, slice_, place)
    rates = {
        size: make_plan(case.with_batch(size), slice_, place).output_tok_s or 0
        for size in (*range(1, 278, 9), 128, 256)
    }
    assert (best.output_tok_s or 0) > 0.997 * max(rates.values())
    assert best.max_batch_size > 256
    if codec == "lossless":
        assert 128 < best.case.workload.batch_size < 256
        assert (best.output_tok_s or 0) > 1.02 * max(rates[128], rates[256])


def test_cpu_and_link_share_the_hosts_memory() -> None:
    """If the memory gives less than both could take, the CPU gets its share and the link a twentieth less. Fewer cores
    take nothing from the link, and have the whole time of a layer."""
    place = linked(50e9).model_copy(update={"attention_bandwidth": 100e9, "host_bytes": 800 << 30})
    place = place.model_copy(update={"details": {"host": {"cores": 32}}})
    tight = place.model_copy(update={"host_bandwidth": 120e9})
    all_cores = (("kv_attention", "cpu"), ("kv_offload", "cpu"), ("kv_threads", 32))
    case = asked(batch_size=64, options=all_cores)
    alone = make_plan(case, BLOOM, place, factors=PHYSICS).step_s or 0.0
    wide = place.model_copy(update={"host_bandwidth": 150e9})
    assert make_plan(case, BLOOM, wide, factors=PHYSICS).step_s == alone
    lost = BLOOM.kv_bytes(64, 528) / 80e9 * (1 - LINK_KEEPS)
    assert (make_plan(case, BLOOM, tight, factors=PHYSICS).step_s or 0.0) - alone == pytest.approx(lost)
    on_gpu = asked(batch_size=16)
    assert make_plan(on_gpu, BLOOM, tight).step_s == make_plan(on_gpu, BLOOM, place).step_s
    fewer = asked(batch_size=64, options=all_cores[:2])
    assert placement_of(fewer, BLOOM, tight).kv_cpu_share == 0.625  # 63 of 120 GB/s beside the link's 50
    assert make_plan(fewer, BLOOM, tight, factors=PHYSICS).step_s == alone
    assert placement_of(fewer, BLOOM, place).kv_cpu_share == 1
    many = asked(batch_size=260, options=all_cores[:2])  # fewer cores would finish late
    assert placement_of(many, BLOOM, tight).kv_cpu_share == 1


def test_link_and_cpu_slow_each_other_as_measured() -> None:
    """Once one is done, the other has its full rate again."""
    place = linked(50e9).model_copy(update={"attention_bandwidth": 100e9, "host_bandwidth": 120e9})
    there = Placement(tier="host", kv_host_share=1.0, kv_on_cpu=True)
    assert contended_rates(there, place, 100e9, round(40e9), 1.0) == pytest.approx((0.5, 1.025))  # 80 GB/s beside 47.5
    assert contended_rates(there, place, 100e9, round(400e9), 1.0) == pytest.approx((4 + 0.2 / 0.95, 1 / 0.95))
    seen = place.model_copy(update={"shared_attention_bandwidth": 60e9, "shared_h2d_bandwidth": 50e9})
    assert contended_rates(there, seen, 100e9, round(120e9), 1.0) == pytest.approx((1.0 + 0.6, 1.0))
    half = there.model_copy(update={"kv_cpu_share": 0.5})
    # 50 of 110 GB/s: the link is no slower, but each core waits for memory as if all attended
    assert contended_rates(half, seen, 100e9, round(50e9), 2.0) == pytest.approx((50 / 30, 2.0))
    assert contended_rates(half, place, 100e9, round(120e9), 2.0) == pytest.approx((2.0 + 0.8, 2.0))
    assert contended_rates(Placement(tier="gpu"), seen, 100e9, round(50e9), 0.0) == pytest.approx((0.5, 0.0))
    alone = place.model_copy(update={"host_bandwidth": None})
    assert contended_rates(there, alone, 100e9, round(50e9), 1.0) == pytest.approx((0.5, 1.0))


def test_a_value_in_8_bits_keeps_the_cpu_as_long_as_one_in_16() -> None:
    """Memory gives half the bytes; the rate of the cores, measured in 16 bits, is one of values."""
    place = linked(50e9).model_copy(update={"attention_bandwidth": 50e9, "host_bandwidth": 120e9})
    wide = Placement(tier="host", kv_host_share=1.0, kv_on_cpu=True)
    narrow = wide.model_copy(update={"kv_ratio": 0.5})
    one, other = (step(setup, BLOOM, place, 200, 528).limits for setup in (wide, narrow))
    kv = BLOOM.kv_bytes(200, 528)
    assert other["cpu attention"] == pytest.approx(one["cpu attention"])
    assert one["host memory"] - other["host memory"] == pytest.approx(kv / 2 / 120e9)


def test_cores_are_enough_to_attend_in_half_the_time_of_the_link() -> None:
    """The share of the cores grows with the rows; all of them attend where fewer would take longer than that."""
    place = linked(50e9).model_copy(update={"attention_bandwidth": 72e9, "host_bandwidth": 81e9})
    setup = Placement(tier="host", kv_on_cpu=True)
    shares = []
    for rows in (8, 32, 56, 96):
        found = with_cores(setup.model_copy(update={"kv_host_share": rows / 100}), BLOOM, place, 100, 528)
        limits = step(found, BLOOM, place, 100, 528).limits
        assert found.kv_cpu_share == 1 or limits["cpu attention"] <= limits["link"] / 2
        shares.append(found.kv_cpu_share)
    assert shares == [0.375, 0.5, 0.75, 1.0]


def test_heads_that_share_a_key_keep_the_cpu_longer_at_it() -> None:
    """The bytes of a shared key take as many products; if few heads share it, memory alone sets the time."""
    place = linked(50e9).model_copy(update={"attention_bandwidth": 100e9})
    assert [place.attention_rate(sharing) for sharing in (1, 8)] == [100e9, 100e9]
    told = place.model_copy(update={"grouped_attention_bandwidth": 40e9, "host_bytes": 800 << 30})
    assert [told.attention_rate(sharing) for sharing in (1, 2, 4, 8, 16)] == [100e9, 100e9, 80e9, 40e9, 20e9]
    early = told.model_copy(update={"attention_bandwidth": 30e9, "shared_attention_bandwidth": 60e9})
    assert [early.attention_rate(sharing) for sharing in (1, 8)] == [60e9, 40e9], "it was faster beside the link"
    llama, options = resolve.resolve("llama-3.1-70b"), (("kv_attention", "cpu"), ("kv_offload", "cpu"))
    case = asked(batch_size=2048, options=options).model_copy(update={"model": "llama-3.1-70b"})
    slow, quick = (make_plan(case, llama, one) for one in (told, place.model_copy(update={"host_bytes": 800 << 30})))
    assert slow.bound_by == quick.bound_by == "cpu attention"
    assert (slow.step_s or 0.0) - (quick.step_s or 0.0) == pytest.approx(
        llama.kv_bytes(2048, 528) * (1 / 40e9 - 1 / 100e9)
    )
    assert override(told, "attention_bandwidth=90GB/s").attention_rate(8) == 90e9


def test_a_rate_set_by_hand_voids_those_measured_together() -> None:
    seen = linked(50e9).model_copy(update={"shared_attention_bandwidth": 60e9, "shared_h2d_bandwidth": 40e9})
    assert override(seen, "h2d_bandwidth=200GB/s").shared_h2d_bandwidth is None
    assert override(seen, "hbm_bandwidth=200GB/s").shared_h2d_bandwidth == 40e9
    assert override(seen, "shared_h2d_bandwidth=30GB/s").shared_attention_bandwidth == 60e9


def test_a_prefill_also_waits_for_its_intermediate_results() -> None:
    """Attention that stores its scores, like BLOOM's, reads and writes memory with the square of the length."""
    flops = {length: BLOOM.prefill_flops(1, length) / (0.6 * (H100.matmul_flops or 1)) for length in (1024, 4096)}
    fast = H100.model_copy(update={"h2d_bandwidth": 1e15, "host_bandwidth": None})
    limits = {length: prefill(Placement(), BLOOM, fast, 1, length).limits["compute"] for length in flops}
    between = {length: limits[length] - seconds for length, seconds in flops.items()}
    assert all(0.05 * limits[length] < seconds < 0.5 * limits[length] for length, seconds in between.items())
    assert between[4096] > 5 * between[1024]
    opt = resolve.resolve("opt-175b", None, None)
    flat = [
        prefill(Placement(), opt, fast, 1, length).limits["compute"]
        - opt.prefill_flops(1, length) / (0.6 * (H100.matmul_flops or 1))
        for length in (1024, 2048)
    ]
    assert flat[1] == pytest.approx(2 * flat[0])


def test_a_codec_takes_its_share_off_the_link_and_nothing_else() -> None:
    lossless = (("weight_codec", "lossless"),)
    raw, coded = (make_plan(asked(options=o), BLOOM, linked(55e9), factors=PHYSICS) for o in ((), lossless))
    assert coded.streamed_bytes == pytest.approx(0.67 * raw.streamed_bytes)
    assert (coded.step_s or 0) == pytest.approx(0.67 * (raw.step_s or 0))
    bound = make_plan(asked(options=lossless), BLOOM, linked(55e9)).step_s
    assert bound == pytest.approx(CODED_BOUND * (raw.step_s or 0), rel=FULL_RING)
    fp8 = resolve.resolve("bloom-176b", weights="fp8")
    coded = make_plan(asked(options=lossless), fp8, linked(55e9), factors=PHYSICS)
    assert coded.step_s == pytest.approx(0.83 / 2 * (raw.step_s or 0), rel=0.01)
    bound = make_plan(asked(options=lossless), fp8, linked(55e9)).step_s
    assert bound == pytest.approx(FP8_BOUND / 2 * (raw.step_s or 0), rel=0.01)


def test_coded_weights_that_stay_are_unpacked_in_each_pass_and_then_computed() -> None:
    opt, bandwidth = resolve.resolve("opt-30b", None, None), H100.hbm_bandwidth or 1
    place = H100.model_copy(update={"gpu_bytes": 140 << 30})
    coded, raw = (
        make_plan(asked("opt-30b", gpu_weights="100%", options=options), opt, place, factors=PHYSICS)
        for options in (CODED, RAW)
    )
    assert coded.streamed_bytes == raw.streamed_bytes == 0
    weights = opt.streamed_bytes
    read = (opt.active_parameters * opt.dtype_bytes + opt.kv_bytes(1, 528)) / bandwidth
    assert (raw.bound_by, coded.bound_by) == ("hbm", "unpacking")
    assert raw.step_s == pytest.approx(read)
    assert coded.step_s == pytest.approx(weights / (UNPACKING * bandwidth) + read)
    limit = step(coded.placement, opt, place, 1, 528, LIMITS)
    assert limit.bound_by == "hbm"
    assert limit.seconds == pytest.approx(read + (1 + CODED_BOUND) * weights / bandwidth)
    small = resolve.resolve("bloom-560m", None, None)
    caches = [step(plan.placement, small, place, 1, 528, LIMITS).seconds for plan in (coded, raw)]
    assert caches[0] == caches[1], "layers that a cache holds"
    long = prefill(coded.placement, opt, place, 64, 2048, PHYSICS)
    assert long.bound_by == "compute"
    assert seconds(long) == pytest.approx(long.limits["compute"] + long.limits["unpacking"])


def test_whatever_comes_through_the_ring_is_unpacked_and_what_several_gpus_share() -> None:
    layers = BLOOM.streamed_bytes
    ring = Placement(tier="host", ring_depth=6, resident_bytes=layers // 4)
    assert unpacked_bytes(ring, BLOOM) == layers - layers // 4, "uncoded layers that stay are computed where they are"
    assert unpacked_bytes(ring.model_copy(update={"wire_ratio": 0.67}), BLOOM) == layers
    assert unpacked_bytes(ring.model_copy(update={"gpus": 2}), BLOOM) == layers
    assert unpacked_bytes(ring.model_copy(update={"ring_depth": 0}), BLOOM) == 0
    assert unpacked_bytes(Placement(ring_depth=6), BLOOM) == 0, "all weights are on the GPU"
    none = linked(1e15).model_copy(update={"gpu_count": 0})
    with_gpu, without = (step(ring, BLOOM, place, 1, 528, LIMITS).limits["hbm"] for place in (linked(1e15), none))
    assert with_gpu - without == pytest.approx(wire_bytes(ring, BLOOM) / (H100.hbm_bandwidth or 1)), "no ring to fill"
    copied = step(ring, BLOOM, linked(1e15), 1, 528, PHYSICS)
    assert copied.limits["unpacking"] == pytest.approx(2 * 3 / 4 * layers / (H100.hbm_bandwidth or 1), rel=1e-6)
    assert seconds(copied) == pytest.approx(copied.limits["unpacking"] + copied.limits["hbm"])


def test_what_the_ring_cannot_hold_while_layers_that_stay_compute_comes_late() -> None:
    """Coded layers, so that the GPU is busy with those that stay, too, and longer than the link with two others."""
    kept, layer = 68, BLOOM.layer_bytes
    ring = Placement(tier="host", wire_ratio=0.67, kept_ratio=0.67, layer_chunks=-(-layer // CHUNK_BYTES), ring_depth=6,
                     resident_bytes=kept * layer)  # fmt: skip

    def times(depth: int, batch_size: int = 8, **fields: Any) -> Times:
        setup = ring.model_copy(update={"ring_depth": depth, **fields})
        return step(setup, BLOOM, linked(20e9), batch_size, 528, PHYSICS)

    shallow, deep = times(6), times(ring.layer_chunks)
    on_gpu = deep.limits["unpacking"] + deep.limits["hbm"]
    assert seconds(deep) == pytest.approx(max(on_gpu, deep.limits["link"]))
    each = deep.limits["link"] / 2
    held = 6 * chunk_bytes(ring, BLOOM) / 20e9 + deep.limits["unpacking"] / 70
    assert held < each / 2
    assert seconds(shallow) == pytest.approx(on_gpu + 2 * (each - held), rel=1e-3)
    assert shallow.bound_by == "link"
    assert seconds(step(ring, BLOOM, linked(20e9), 8, 528, LIMITS)) <= seconds(deep)
    none = times(6, resident_bytes=0)
    assert seconds(none) == pytest.approx(none.limits["link"]), "the ring holds what comes while one layer computes"
    cached = times(6, batch_size=2, kv_host_share=1.0)  # one copy a layer takes a buffer as well
    on_gpu = cached.limits["unpacking"] + cached.limits["hbm"]
    cache = (cached.limits["link"] - deep.limits["link"]) / 70
    less = held - chunk_bytes(ring, BLOOM) / 20e9
    assert seconds(cached) == pytest.approx(on_gpu + 2 * (each + cache - less), rel=1e-3)
    ring = ring.model_copy(update={"blocks": True})
    apart = prefill(ring, BLOOM, linked(20e9), 64, 2048, PHYSICS)
    whole = prefill(ring.model_copy(update={"ring_depth": ring.layer_chunks}), BLOOM, linked(20e9), 64, 2048, PHYSICS)
    assert seconds(apart) - seconds(whole) == pytest.approx(2 * (each - held), rel=0.01)


@pytest.mark.parametrize(("name", "factor"), [("mixtral-8x7b", 2), ("qwen3-235b-a22b", 8)])
def test_a_prefill_holds_a_row_for_each_expert_of_a_token(name: str, factor: int) -> None:
    """Hidden values, gate and up, the activation of the gate, and their product: what grouped products hold."""
    spec = resolve.resolve(name, None, None)
    assert spec.experts_per_token == factor
    tokens, setup = 512, Placement(tier="host")
    rows = factor * (4 * spec.ffn_size + spec.hidden_size)
    found = tiers(setup, spec, H100, 1, tokens, 1)[0].activations
    logits = spec.vocab_size * (spec.dtype_bytes + 4)
    assert found == (4 * spec.hidden_size + rows) * tokens * spec.dtype_bytes + logits


def test_predictions_are_those_of_the_placement_that_is_obeyed() -> None:
    """Which has a margin, here of a deep ring; limits have none."""
    case, told = asked(batch_size=8, gpu_weights="auto", options=CODED), Efficiency()
    plan, limit = make_plan(case, BLOOM, H100, factors=told), make_plan(case, BLOOM, H100)
    assert plan.placement == limit.placement
    assert plan.step_s == step(plan.placement, BLOOM, H100, 8, 528, told).seconds
    assert plan.resident_bytes == plan.placement.resident_bytes < limit.resident_bytes


def test_accelerate_fetches_all_experts_of_a_layer_at_once() -> None:
    mixtral = resolve.resolve("mixtral-8x7b", None, None)
    plan = make_plan(asked("mixtral-8x7b", engine="accelerate", options=()), mixtral, H100)
    assert plan.gpu.buffers == mixtral.num_experts * mixtral.expert_bytes


def test_a_cache_on_the_host_frees_the_gpu_and_loads_the_link() -> None:
    over_link = (("kv_attention", "gpu"), ("kv_offload", "cpu"))
    here, there = (asked(batch_size=16, options=o) for o in ((), over_link))
    on_gpu, on_host = (make_plan(case, BLOOM, linked(55e9)) for case in (here, there))
    assert on_host.gpu.kv_cache == 0
    assert on_host.host.kv_cache == on_gpu.gpu.kv_cache
    assert on_host.max_batch_size > 4 * on_gpu.max_batch_size
    kv = BLOOM.kv_bytes(16, 528)
    assert (on_host.step_s or 0) == pytest.approx((BLOOM.streamed_bytes + kv) / 55e9, rel=FULL_RING)
    assert on_host.host.total * 0.97 < (H100.host_bytes or 0)


def test_attention_on_the_cpu_reads_the_cache_beside_the_link() -> None:
    cpu = (("kv_attention", "cpu"), ("kv_offload", "cpu"))
    place = linked(55e9).model_copy(update={"host_bandwidth": 100e9, "host_bytes": 800 << 30})
    few, many = (make_plan(asked(batch_size=size, options=cpu), BLOOM, place) for size in (16, 200))
    assert (few.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / 55e9, rel=FULL_RING)
    assert few.bound_by == "link"
    assert many.bound_by == "host memory"
    read = BLOOM.streamed_bytes + BLOOM.kv_bytes(200, 528)
    assert (many.step_s or 0) == pytest.approx(read / 100e9, rel=FULL_RING)
    assert many.gpu.kv_cache == 0


@pytest.mark.parametrize(("cpu_reads", "bound", "read_over"), [(120e9, "link", 0), (20e9, "link", 1)])
def test_the_faster_way_to_a_cache_in_host_memory_is_taken(cpu_reads: float, bound: str, read_over: int) -> None:
    place = linked(55e9).model_copy(update={"attention_bandwidth": cpu_reads, "host_bytes": 800 << 30})
    found = make_plan(asked(batch_size=100, options=(("kv_offload", "cpu"),)), BLOOM, place)
    kv = BLOOM.kv_bytes(100, 528)
    assert found.bound_by == bound
    assert (found.step_s or 0) == pytest.approx((BLOOM.streamed_bytes + read_over * kv) / 55e9, rel=FULL_RING)


def test_attention_on_the_cpu_and_the_gpu_wait_for_each_other() -> None:
    place = linked(55e9).model_copy(update={"attention_bandwidth": 50e9, "host_bytes": 800 << 30})
    there = (("kv_attention", "cpu"), ("kv_offload", "cpu"))
    found = make_plan(asked(batch_size=200, options=there), BLOOM, place, factors=PHYSICS)
    assert found.bound_by == "cpu attention"
    at_rest = make_plan(asked(batch_size=1, options=there), BLOOM, place, factors=PHYSICS)
    assert (found.step_s or 0) > BLOOM.kv_bytes(200, 528) / 50e9
    assert (found.step_s or 0) < BLOOM.kv_bytes(200, 528) / 50e9 + (at_rest.step_s or 0)


def test_auto_puts_only_rows_that_do_not_fit_the_gpu_into_host_memory() -> None:
    place = linked(55e9).model_copy(update={"attention_bandwidth": 120e9, "host_bytes": 800 << 30})
    split = (("kv_offload", "auto"),)
    most = largest_batch(asked(), BLOOM, place, CAUTIOUS)
    small, large = (make_plan(asked(batch_size=size, options=split), BLOOM, place) for size in (most, 2 * most))
    assert small.host.kv_cache == 0
    assert small.gpu == make_plan(asked(batch_size=most), BLOOM, place).gpu
    rows = rows_on_host(large.case, place)
    assert most <= rows <= most + 4  # a layer that waits in the ring while the CPU attends takes room too
    assert placement_of(large.case, BLOOM, place).kv_on_cpu
    assert large.host.kv_cache == pytest.approx(BLOOM.kv_bytes(rows, 544), rel=1e-6)
    cautious = make_plan(large.case, BLOOM, place, factors=CAUTIOUS)
    assert cautious.gpu.total <= place.gpu_bytes < cautious.gpu.total + 2 * BLOOM.kv_bytes(1, 544)
    assert cautious.host == large.host  # for any caller
    assert large.max_batch_size > 3 * most
    assert large.step_s == small.step_s


@pytest.mark.parametrize("lengths", [(512, 32), (128, 512), (64, 512)])
@pytest.mark.parametrize("offload", ["cpu", "auto"])
@pytest.mark.parametrize("gpu_weights", [None, "auto"])
def test_a_ring_that_the_cache_comes_through_is_paid_for(
    lengths: tuple[int, int], offload: str, gpu_weights: str | None
) -> None:
    place = linked(55e9).model_copy(update={"host_bytes": 800 << 30})
    options = (("kv_attention", "gpu"), ("kv_offload", offload))
    workload = Workload(batch_size=200, input_len=lengths[0], output_len=lengths[1])
    case = Case(
        model="bloom-176b", engine="stream", offload="cpu", workload=workload, options=options, gpu_weights=gpu_weights
    )
    setup = placement_of(case, BLOOM, place)
    depth, resident = split_free_memory(case, BLOOM, place)
    part = BLOOM.kv_bytes(setup.prefill_rows(200, lengths[0]), sum(lengths)) // BLOOM.num_layers
    ring = depth * max(part, round(CHUNK_BYTES * setup.wire_ratio))
    here = 200 - rows_on_host(case, place)
    others = cost_of(setup, case, place) - setup.buffers * max(part, round(CHUNK_BYTES * setup.wire_ratio))
    assert others + ring + (resident if gpu_weights else 0) * setup.kept_ratio <= place.gpu_bytes
    assert here == 0 or offload == "auto"


def cost_of(setup: Placement, case: Case, place: Machine) -> int:
    load = case.workload
    return tiers(setup, BLOOM, place, load.batch_size, load.input_len, load.output_len)[0].total


def test_the_ring_holds_a_layer_while_the_cpu_attends() -> None:
    place = linked(55e9).model_copy(update={"attention_bandwidth": 120e9, "host_bytes": 800 << 30})
    split = (("kv_offload", "auto"),)
    for size, deep in ((8, False), (100, True)):
        setup = placement_of(asked(batch_size=size, options=split), BLOOM, place)
        assert (setup.buffers * chunk_bytes(setup, BLOOM) >= BLOOM.layer_bytes) is deep
        assert setup.kv_on_cpu is deep


def test_a_cpu_that_was_not_measured_is_not_trusted_with_attention() -> None:
    place = linked(55e9).model_copy(update={"attention_bandwidth": None, "host_bytes": 800 << 30})
    assert not placement_of(asked(batch_size=100, options=(("kv_offload", "cpu"),)), BLOOM, place).kv_on_cpu


def test_a_host_whose_memory_is_not_known_gets_no_cache() -> None:
    place = H100.model_copy(update={"host_bytes": None})
    all_of_it = make_plan(asked(options=(("kv_offload", "cpu"),)), BLOOM, place)
    assert all_of_it.max_batch_size == 0
    assert "--set host_bytes=512GiB" in (all_of_it.why_not or "")
    excess = make_plan(asked(options=(("kv_offload", "auto"),)), BLOOM, place)
    assert excess.fits
    assert 0 < excess.max_batch_size <= largest_batch(asked(), BLOOM, place)


@pytest.mark.parametrize("attention_bandwidth", [None, 120e9])
def test_no_row_is_in_host_memory_if_all_fit_the_gpu(attention_bandwidth: float | None) -> None:
    """Holds also where all but one would not fit, because of the buffers that one row in transit needs."""
    place = linked(55e9).model_copy(update={"attention_bandwidth": attention_bandwidth, "host_bytes": 800 << 30})

    def short(size: int, *options: tuple[str, str]) -> Case:
        workload = Workload(batch_size=size, input_len=32, output_len=32)
        return Case(model="bloom-176b", engine="stream", offload="cpu", workload=workload, options=options)

    most = largest_batch(short(1), BLOOM, place, CAUTIOUS)
    rows = [rows_on_host(short(size, ("kv_offload", "auto")), place) for size in range(most - 4, most + 2)]
    assert rows[:-1] == [0] * 5
    assert rows[-1] > 0


@pytest.mark.parametrize("attention", ["gpu", "cpu"])
@pytest.mark.parametrize("factors", [None, Efficiency(memory=1.05), CAUTIOUS])
def test_the_cache_comes_before_resident_layers_and_a_deep_ring(attention: str, factors: Efficiency | None) -> None:
    place = linked(55e9).model_copy(update={"host_bytes": 800 << 30})
    workload = Workload(batch_size=64, input_len=512, output_len=32)
    options = (("kv_attention", attention), ("kv_offload", "auto"))
    case = Case(
        model="bloom-176b", engine="stream", offload="cpu", workload=workload, options=options, gpu_weights="auto"
    )
    rows = rows_on_host(case, place, CAUTIOUS)  # as in the engine
    assert rows > 0
    assert make_plan(case, BLOOM, place, factors=factors).host.kv_cache == BLOOM.kv_bytes(rows, 544)


def test_prompts_to_a_cache_on_the_host_cross_the_link_too() -> None:
    slow = linked(55e9).model_copy(update={"duplex_bandwidth": 1e9, "host_bytes": 800 << 30})
    found = make_plan(asked(batch_size=64, options=(("kv_offload", "cpu"),)), BLOOM, slow)
    assert (found.prefill_s or 0) == pytest.approx(BLOOM.kv_bytes(64, 512) / 1e9)


def test_every_gpu_brings_its_own_link() -> None:
    one, four = (make_plan(asked(batch_size=8, options=(("gpus", n),)), BLOOM, linked(55e9)) for n in (1, 4))
    assert (one.step_s or 0) == pytest.approx(4 * (four.step_s or 0), rel=FULL_RING)
    assert four.gpu.kv_cache == one.gpu.kv_cache // 4
    shared = H100.model_copy(update={"host_bandwidth": 100e9})
    capped = make_plan(asked(options=(("gpus", 4),)), BLOOM, shared)
    assert capped.bound_by == "host memory"
    together = linked(55e9).model_copy(update={"links_bandwidth": 120e9, "gather_bandwidth": 1e12, "gpu_count": 4})
    found = make_plan(asked(options=(("gpus", 4), ("weight_codec", "none"))), BLOOM, together)
    assert (found.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / 120e9, rel=FULL_RING)
    more = make_plan(asked(options=(("gpus", 8), ("weight_codec", "none"))), BLOOM, together)
    assert (more.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / 240e9, rel=FULL_RING), "further links"
    bounded = together.model_copy(update={"host_bandwidth": 150e9})
    more = make_plan(asked(options=(("gpus", 8), ("weight_codec", "none"))), BLOOM, bounded)
    assert more.bound_by == "host memory"
    slow = together.model_copy(update={"gather_bandwidth": 60e9})
    found = make_plan(asked(options=(("gpus", 4), ("weight_codec", "none"))), BLOOM, slow)
    assert found.bound_by == "gather"
    assert (found.step_s or 0) == pytest.approx(BLOOM.streamed_bytes * 3 / 4 / 60e9, rel=FULL_RING)
    assert (capped.step_s or 0) == pytest.approx(BLOOM.streamed_bytes / 100e9, rel=FULL_RING)


def test_unpacking_by_operations_of_torch_bounds_a_step_of_deepspeed() -> None:
    """Its float16 is unpacked by a kernel, and other engines' formats are multiplied as they are."""

    def planned(engine: str, weights: Any, dtype: Any = "bfloat16") -> Plan:
        load = Workload(batch_size=1, input_len=512, output_len=32)
        case = Case(model="b", engine=engine, offload="cpu", workload=load, weights=weights, dtype=dtype)
        return make_plan(case, BLOOM.with_dtype(dtype), linked(55e9), factors=Efficiency())

    found = planned("deepspeed", "int4")
    assert found.bound_by == "unpacking"
    weights = BLOOM.streamed_bytes // 2
    assert found.placement.dequantised_bytes == 18 * weights
    assert (found.step_s or 0) > 18 * weights / (TORCH_RATE * (H100.hbm_bandwidth or 0))
    assert planned("deepspeed", "int8").placement.dequantised_bytes == 13 * weights
    for other in (planned("deepspeed", "int4", "float16"), planned("accelerate", "int4")):
        assert other.bound_by == "link"
        assert not other.placement.dequantised_bytes


@pytest.mark.parametrize("tuned", [True, False])
def test_deepspeed_on_several_gpus_divides_what_it_gathers(tuned: bool) -> None:
    place = linked(55e9).model_copy(update={"host_bytes": 800 << 30, "gather_bandwidth": 1e12})

    def planned(gpus: int, machine: Machine = place) -> Plan:
        options = tuple({"gpus": gpus, "tuned": tuned}.items())
        load = Workload(batch_size=8, input_len=512, output_len=32)
        return make_plan(
            Case(model="b", engine="deepspeed", offload="cpu", workload=load, options=options), BLOOM, machine
        )

    one, four = planned(1), planned(4)
    assert (one.step_s or 0) == pytest.approx(4 * (four.step_s or 0))
    assert one.bound_by == four.bound_by == "link"
    assert (one.host.weights, one.streamed_bytes) == (four.host.weights, four.streamed_bytes), "one copy, crossing once"
    assert four.gpu.kv_cache == one.gpu.kv_cache // 4
    assert four.gpu.weights == one.gpu.weights // 4 == (BLOOM.other_bytes // 4 if tuned else 0)
    gathered = BLOOM.other_bytes if tuned else 0
    assert four.gpu.buffers == pytest.approx((2 + 1 / 4) * BLOOM.layer_bytes + gathered, rel=0.01)
    slow = planned(4, place.model_copy(update={"gather_bandwidth": 10e9}))
    assert slow.bound_by == "gather"
    assert (slow.step_s or 0) == pytest.approx(BLOOM.weight_bytes * 3 / 4 / 10e9, rel=0.001)


def test_deepspeed_copies_a_part_after_the_gather_of_the_layer_before() -> None:
    setup, full = Placement(tier="host", gpus=2, divided=True), Efficiency(link_share=1.0)

    def timed(placed: Placement, factors: Efficiency, gathers: float = 100e9) -> tuple[Any, Any]:
        place = linked(50e9).model_copy(update={"gather_bandwidth": gathers})
        found = step(placed, BLOOM, place, 8, 512, factors)
        return found.seconds, found.bound_by

    link, gather = BLOOM.streamed_bytes / 100e9, BLOOM.weight_bytes / 2 / 100e9
    assert timed(setup, full) == (pytest.approx(link + gather), "link")
    assert timed(setup, full, 25e9) == (pytest.approx(link + 4 * gather), "gather")
    assert timed(setup.model_copy(update={"divided": False}), full) == (pytest.approx(link), "link")
    assert timed(setup, LIMITS) == (pytest.approx(link), "link")


@pytest.mark.parametrize(("batch_size", "passes"), [(64, 1), (65, 2), (128, 2)])
def test_each_gpu_prefills_its_own_rows(batch_size: int, passes: int) -> None:
    place = linked(1e9)  # so slow that weights take longer than all else
    setup = Placement(tier="host", gpus=4, pass_tokens=16 * 512)
    found = prefill(setup, BLOOM, place, batch_size, 512, Efficiency(link_share=1.0))
    assert found.seconds == pytest.approx(passes * BLOOM.streamed_bytes / 4e9)


def test_a_small_batch_reads_few_experts_and_the_link_carries_all() -> None:
    mixtral = resolve.resolve("mixtral-8x22b", None, None)
    one, many = (step(Placement(), mixtral, H100, size, 512, PHYSICS) for size in (1, 256))
    read = one.limits["hbm"] * (H100.hbm_bandwidth or 0) - mixtral.kv_bytes(1, 512)
    assert read == pytest.approx(mixtral.active_parameters * mixtral.dtype_bytes, rel=1e-6)
    everything = many.limits["hbm"] * (H100.hbm_bandwidth or 0) - mixtral.kv_bytes(256, 512)
    assert everything == pytest.approx(mixtral.weight_bytes, rel=1e-6)
    assert wire_bytes(Placement(tier="host"), mixtral) == mixtral.streamed_bytes


def test_a_prefill_streams_the_weights_once_a_pass() -> None:
    one, four = (seconds(prefill(Placement(tier="host"), BLOOM, linked(25e9), size, 512, PHYSICS)) for size in (16, 64))
    assert four == pytest.approx(4 * one) == pytest.approx(4 * BLOOM.streamed_bytes / 25e9)


def test_times_without_overlap_add_up() -> None:
    together, apart = (
        step(Placement(tier="host", overlapped=o), BLOOM, linked(55e9), 512, 512, PHYSICS) for o in (True, False)
    )
    assert seconds(apart) == pytest.approx(seconds(together) + together.limits["compute"])


def test_launches_are_a_floor_and_nvme_is_a_link() -> None:
    slow = Efficiency(link_share=1.0, layer_s=2e-3)
    opt = resolve.resolve("opt-30b", None, None)
    found = step(Placement(), opt, H100, 1, 512, slow)
    assert found.bound_by == "launch"
    assert found.seconds == pytest.approx(2e-3 * opt.num_layers)
    disk = H100.model_copy(update={"nvme_bandwidth": 5e9})
    on_disk = step(Placement(tier="nvme"), opt, disk, 1, 512, PHYSICS)
    assert on_disk.bound_by == "nvme"
    assert on_disk.seconds == pytest.approx(opt.streamed_bytes / 5e9)


@pytest.mark.parametrize("unknown", ["hbm_bandwidth", "h2d_bandwidth", "matmul_flops"])
def test_an_unknown_figure_makes_times_unknown_never_zero(unknown: str) -> None:
    place = H100.model_copy(update={unknown: None})
    assert step(Placement(tier="host"), BLOOM, place, 1, 512).seconds is None
    assert prefill(Placement(tier="host"), BLOOM, place, 1, 512).seconds is None
    plan = make_plan(asked(), BLOOM, place)
    assert (plan.output_tok_s, plan.e2e_s, plan.bound_by) == (None, None, None)
    assert plan.gpu.total > 0


SETUPS = st.builds(
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
@given(SETUPS, st.sampled_from(NAMES), st.integers(1, 512), st.sampled_from(FIGURES), st.floats(1.0, 8.0))
def test_a_better_machine_is_never_slower(setup: Placement, name: str, batch: int, figure: str, factor: float) -> None:
    spec = resolve.resolve(name, None, None)
    better = H100.model_copy(update={figure: (getattr(H100, figure) or 0) * factor or None})
    before, after = (seconds(step(setup, spec, place, batch, 512)) for place in (H100, better))
    assert after <= before * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(SETUPS, st.sampled_from(NAMES), st.integers(1, 512))
def test_no_prediction_is_below_the_limit(setup: Placement, name: str, batch: int) -> None:
    spec = resolve.resolve(name, None, None)
    limit, told = (seconds(step(setup, spec, H100, batch, 512, factors)) for factors in (LIMITS, Efficiency()))
    assert limit <= told * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(SETUPS, st.sampled_from(NAMES), st.integers(1, 500), st.integers(1, 500))
def test_a_larger_batch_never_needs_less_memory_and_no_weight_is_lost(
    setup: Placement, name: str, batch: int, more: int
) -> None:
    spec = resolve.resolve(name, None, None)
    small, large = (tiers(setup, spec, H100, size, 256, 32) for size in (batch, batch + more))
    assert all(one.total <= other.total for one, other in zip(small, large, strict=True))
    stored = spec.streamed_bytes
    gpu, host, nvme = small
    others = spec.other_bytes
    kept = stored if setup.tier == "gpu" else min(setup.resident_bytes, stored)
    assert gpu.weights == kept // setup.gpus + others
    assert host.weights + nvme.weights == (0 if setup.tier == "gpu" else stored)
    assert sum(getattr(gpu, part) for part in type(gpu).model_fields) == gpu.total


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 100), st.integers(0, 100))
def test_more_on_the_gpu_means_less_over_the_link(name: str, one: int, other: int) -> None:
    spec = resolve.resolve(name, None, None)
    low, high = sorted((one, other))
    less, more = (make_plan(asked(name, gpu_weights=f"{share}%"), spec, H100) for share in (low, high))
    assert more.streamed_bytes <= less.streamed_bytes
    assert more.gpu.weights >= less.gpu.weights
    assert (more.step_s or 0) <= (less.step_s or 0)
