"""Experts on the CPU: the tokens of whole layers, whichever experts the CPU computes; its share by measured rates; and
what it does not compute."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations import moe

from tests import test_experts, test_quantized, test_ragged
from tests.conformance.small import Subject, small_model
from tests.running import error, prefill
from tests.test_experts import MIXTURES, Bench, Kinds, load, poison, poisoned, steps
from tests.test_few_experts import call, experts_of
from tests.test_parity import BATCHES, greedy, prompts, reference
from tests.test_passes import close
from tests.test_ring import CPU, FakeQueues
from zinfer.engine import EngineError
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.state import Entry
from zinfer.engine.stream import Stream, cpu_experts, expert_images
from zinfer.engine.stream import experts as on_demand
from zinfer.engine.stream.cpu_experts import GAIN, TRIAL, Call, CpuExperts, Rates
from zinfer.engine.stream.expert_images import Experts, Key, through_interface
from zinfer.engine.stream.experts import ExpertPool

Patch = pytest.MonkeyPatch
mixture, queued, waiting = test_experts.mixture, test_experts.queued, test_experts.waiting
small_parts = test_experts.small_parts
TYPES = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
    "aria_text",
    "beam",
    "deepseek_v4",
    "glm4_moe",
)


def sharing(patch: Patch, *counts: int) -> None:
    """Give the CPU so many of the experts asked for, call by call, in turn; -1 stands for all of them."""
    turns = cycle(counts)

    def share(_cpu: CpuExperts, asked: int, _size: int, _besides: int, most: int) -> int:
        count = next(turns)
        return min(most, asked if count < 0 else count)

    patch.setattr(CpuExperts, "share", share)


def per_step(loaded: Stream, name: str) -> Any:
    return loaded.effective().settings[f"experts_{name}_per_step"]


@pytest.mark.parametrize("counts", [(-1,), (1,), (0, 1, -1, 2)])
@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_those_of_transformers(
    name: str, counts: Sequence[int], mixture: Kinds, queued: None, monkeypatch: Patch
) -> None:
    """With all, one or some of the experts on the CPU; rows that route apart, and prompts that need all experts; what
    the device does not have is NaN."""
    sharing(monkeypatch, *counts)
    loaded = load(mixture(name), experts_cpu="on")
    poisoned(loaded)
    for lengths, expected in zip(BATCHES, reference(mixture(name)), strict=True):
        assert torch.equal(greedy(loaded, lengths), expected)
        loaded.clear()
    assert per_step(loaded, "on_cpu") > 0
    assert per_step(loaded, "on_cpu") + per_step(loaded, "fetched") == pytest.approx(
        per_step(loaded, "misses"), abs=0.01
    )
    assert (per_step(loaded, "fetched") == 0) == (counts == (-1,))
    loaded.close()


@pytest.mark.parametrize("cache", ["lru", "lfu"])
def test_a_cache_that_thrashes_and_guesses_of_any_kind_change_no_token(
    cache: str, mixture: Kinds, waiting: None, monkeypatch: Patch
) -> None:
    sharing(monkeypatch, 1, 0, 2, -1)
    loaded = load(mixture("mixtral"), share="40%", expert_cache=cache, experts_cpu="on")
    monkeypatch.setattr(on_demand, "TRIALS", 1 << 30)  # wrong guesses do not end
    calls = test_experts.Brought()
    assert loaded._pool is not None
    for wrong in (None, False, True):
        before = loaded._pool.counts
        with monkeypatch.context() as patch:
            seen = test_experts.foretold(loaded, calls, wrong is True, patch)
            for lengths, expected in zip(BATCHES, reference(mixture("mixtral")), strict=True):
                poison(loaded)
                assert torch.equal(greedy(loaded, lengths), expected)
                loaded.clear()
            calls = seen
        found = loaded._pool.counts.since(before)
        assert found.on_cpu > 8
        assert found.hits > 8
        assert wrong is not False or found.right > 8
        assert wrong is not True or found.guessed > 8 > found.right == 0
    loaded.close()


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_micro_batches_decode_together(name: str, mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    """Rows that share a pass, and passes that share a trip: a layer is called several times, by each of them."""
    sharing(monkeypatch, 1, -1, 2)
    loaded = load(mixture(name), share="30%", experts_cpu="on")
    poisoned(loaded)
    test_ragged.check(loaded, None)
    loaded._ragged.able = False
    test_ragged.check(loaded, False)
    assert loaded._pool is not None
    assert loaded._pool.counts.on_cpu > 0
    loaded.close()


def test_the_cpu_attends_and_computes_experts(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    sharing(monkeypatch, 1, 2)
    loaded = load(mixture("mixtral"), kv_offload="cpu", kv_attention="cpu", kv_threads=1, experts_cpu="on")
    for lengths, expected in zip(BATCHES, reference(mixture("mixtral")), strict=True):
        assert torch.equal(greedy(loaded, lengths), expected)
        assert loaded._kv_place.startswith("cpu")
        loaded.clear()
    assert per_step(loaded, "on_cpu") > 0
    loaded.close()


def test_a_pass_of_many_tokens_leaves_nothing_to_the_cpu(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    sharing(monkeypatch, -1)
    loaded = load(mixture("mixtral"), experts_cpu="on")
    assert loaded._pool is not None
    prefill(loaded, *prompts((9, 5)), reserve=1)
    assert loaded.plan.placement.whole_tokens <= 18
    assert loaded._pool.counts.on_cpu == 0
    loaded.close()


def test_quantised_experts_are_computed_by_what_they_stand_for(tmp_path: Path, monkeypatch: Patch) -> None:
    """If the CPU is asked for, a plan has them uncoded in host memory."""
    sharing(monkeypatch, -1)
    directory = test_quantized.FORMATS["fp8 of experts"](tmp_path / "m")
    whole, shared = load(directory, "all"), load(directory, experts_cpu="on")
    assert shared.plan.model.fp8_ratio > 0
    for one, other in zip(steps(shared), steps(whole), strict=True):
        assert close(one, other)
    assert per_step(shared, "on_cpu") > 0
    whole.close()
    shared.close()


def test_a_product_that_fails_leaves_an_engine_that_works(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    sharing(monkeypatch, 1, 2)
    loaded = load(mixture("mixtral"), share="30%", experts_cpu="on")
    expected = steps(loaded)
    with monkeypatch.context() as broken:
        broken.setattr(CpuExperts, "product", test_experts.no_room)
        with pytest.raises(torch.OutOfMemoryError):
            steps(loaded)
    for one, other in zip(steps(loaded), expected, strict=True):
        assert close(one, other)
    loaded.close()


# How experts compute


def shared_call(module: Any, given: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Return what a module of experts computes, the experts `numbers` on the CPU, and the others by `transformers` with
    weights that are NaN but for those that the call chose."""
    stacked = dict(module.named_parameters(recurse=False))
    experts = Experts(
        module, {f"e.{name}": Entry((name,), (), one, 0) for name, one in stacked.items()}, module.num_experts
    )
    images, end = expert_images.plain_experts(experts, 0)
    arena = PinnedArena(end, pin=False)
    for name, one in stacked.items():
        expert_images.fill_plain(images, f"e.{name}", one, arena.memory)
    cpu = CpuExperts(arena.memory, {0: images}, {0: experts}, CPU, True)
    assert cpu.cannot() is None
    found = cpu.offer(0, *given)
    assert found is not None
    found.take(numbers, given[1])
    found.fetch()
    for one in stacked.values():
        there = set(given[1].unique().tolist()) - set(numbers)
        one.data[[number for number in range(len(one)) if number not in there]] = float("nan")
    return found.together(found.on_device(type(module).forward.__get__(module)), found.on_cpu())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", TYPES)
def test_an_expert_computes_as_its_class_does(name: str, implementation: str) -> None:
    """With a gate of its own or none, biases, transposed weights; tokens with all, some or none of their experts on
    the CPU, or with one expert twice."""
    model = small_model(Subject(name)).requires_grad_(False)
    module: Any = next(filter(through_interface, model.modules()))
    module.config._experts_implementation = implementation
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    generator = torch.Generator().manual_seed(3)
    states, weights = torch.randn((5, hidden), generator=generator), torch.rand((5, 2), generator=generator)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 2], [1, 0], [2, 0]])
    expected = module(states, chosen, weights)
    kept = [one.clone() for one in module.parameters()]
    for numbers in ([0], [0, 1], [2], [0, 1, 2]):
        assert error(shared_call(module, (states, chosen, weights), numbers), expected) < 1e-5
        for one, before in zip(module.parameters(), kept, strict=True):
            one.data.copy_(before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 0.0015)])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_results_in_16_bits_differ_by_rounding(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compared with float32, relative to the norm, for the same choice of experts."""
    _, module = experts_of(name)
    module.to(dtype)
    given = call(module, 6, dtype)
    numbers = sorted(set(given[1][:4].flatten().tolist()))
    assert {1, 2} <= set(given[1].flatten().bincount()[numbers].tolist()), "experts of one token, and of two"
    rounded = shared_call(deepcopy(module), given, numbers)
    assert rounded.dtype == dtype
    states, chosen, weights = given
    assert 0 < error(rounded, eager(module.float(), states.float(), chosen, weights.float())) < tolerance


def test_padding_that_is_not_a_number_stays_in_its_row() -> None:
    _, module = experts_of("mixtral")
    states, chosen, weights = call(module, 3, torch.float32)
    states[1] = float("nan")
    expected = eager(module, states, chosen, weights)
    found = shared_call(module, (states, chosen, weights), chosen[1].tolist())
    assert torch.isnan(found[1]).all()
    assert error(found[[0, 2]], expected[[0, 2]]) < 1e-5


def eager(module: Any, *given: Tensor) -> Tensor:
    found: Tensor = moe.batched_mm_experts_forward(module, *given)
    return found


def test_calls_of_other_kinds_are_left_to_the_device() -> None:
    _, module = experts_of("mixtral")
    given = call(module, 2, torch.float32)
    experts = Experts(module, {f"e.{name}": Entry((name,), (), one, 0) for name, one in module.named_parameters()}, 8)
    images, end = expert_images.plain_experts(experts, 0)
    cpu = CpuExperts(torch.zeros(end, dtype=torch.uint8), {0: images}, {0: experts}, CPU, True)
    states, chosen, weights = given
    assert isinstance(cpu.offer(0, *given), Call)
    assert cpu.offer(0, *given, None) is None
    assert cpu.offer(0, states.bfloat16(), chosen, weights) is None
    assert cpu.offer(0, states[None], chosen, weights) is None
    assert cpu.offer(0, states, chosen, weights[:, :1]) is None
    assert cpu.offer(0, states, chosen, None) is None


# What the CPU does not compute


def test_experts_that_the_cpu_cannot_compute_are_refused_or_left_to_the_link(
    mixture: Kinds, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.raises(EngineError, match="cannot come on demand: it has none; take experts_cpu=off"):
        load(checkpoint("llama"), "auto", experts_cpu="on")

    def why(**options: Any) -> Any:
        loaded = load(mixture("mixtral"), **options)
        assert loaded._pool is not None
        assert (loaded._pool.cpu is None) == (loaded.effective().settings["experts_cpu"] != "on")
        found = loaded.effective().settings["experts_cpu"]
        loaded.close()
        return found

    assert why(experts_cpu="on") == "on"
    assert why(experts_cpu="off") == "off"
    assert why() == "no GPU"

    def fails(*_: object) -> Tensor:
        raise RuntimeError("not implemented\nfor 'Half'")

    for place, name, value, reason in (
        (cpu_experts, "unknown", lambda module: "a norm is behind each expert", "a norm is behind each expert"),
        (cpu_experts, "linear", fails, "their computation fails on the CPU: RuntimeError: not implemented for 'Half'"),
        (nn.Module, "named_buffers", lambda _: [("scale", torch.ones(1))], "MixtralExperts has other weights than two"),
    ):
        with monkeypatch.context() as patch:
            load_again = mixture("mixtral")
            patch.setattr(place, name, value)
            with pytest.raises(EngineError, match=f"experts_cpu=on is not for .*: {reason}"):
                load(load_again, experts_cpu="on")


def test_coded_experts_stay_on_the_link(mixture: Kinds, monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.engine.stream.codec.MIN_NUMEL", 1 << 12)
    monkeypatch.setattr("zinfer.engine.stream.codec.BLOCK", 1 << 12)
    loaded = load(mixture("mixtral"), dtype="bfloat16", weight_codec="lossless")
    assert loaded._pool is not None
    cpu = CpuExperts(torch.empty(0), loaded._pool.images, loaded._experts, CPU, False)
    assert cpu.cannot() == "they are coded in host memory, which weight_codec=none avoids"
    loaded.close()


# Its share


@settings(max_examples=200, deadline=None)
@given(
    asked=st.integers(1, 12),
    besides=st.integers(0, 40),
    link=st.floats(0.5, 64),
    beside=st.floats(0.5, 64),
    cpu=st.floats(0.5, 64),
)
def test_the_share_makes_the_longer_of_both_times_the_shortest(
    asked: int, besides: int, link: float, beside: float, cpu: float
) -> None:
    size, rates = 8, Rates()
    for rate, value in ((rates.alone, link), (rates.beside, beside), (rates.cpu, cpu)):
        rate.add(1000, 1000 / value)
    found = rates.best(asked, size, besides)

    def seconds(count: int) -> float:
        speed = beside if count else link
        return max((besides + (asked - count) * size) / speed, count * size / cpu)

    assert seconds(found) == pytest.approx(min(map(seconds, range(asked + 1))))
    assert all(seconds(fewer) > 0.999 * seconds(found) for fewer in range(found))


def test_rates_follow_what_is_measured() -> None:
    rate = Rates().cpu
    assert rate.bandwidth == 0
    rate.add(100, 10)
    assert rate.bandwidth == 10
    for _ in range(60):
        rate.add(100, 1)
    assert rate.bandwidth == pytest.approx(100, rel=0.05)


def measured(cpu: CpuExperts, alone: float, beside: float, own: float) -> None:
    """Set the rates of link and CPU."""
    cpu.rates = Rates()
    for rate, value in ((cpu.rates.alone, alone), (cpu.rates.beside, beside), (cpu.rates.cpu, own)):
        rate.add(1 << 30, (1 << 30) / value)


def test_auto_computes_where_that_gains_and_tries_the_other_way_now_and_then() -> None:
    auto, always = (CpuExperts(torch.empty(0), {}, {}, CPU, asked) for asked in (False, True))
    for cpu in (auto, always):
        measured(cpu, 10, 10, 30)
        assert cpu.share(4, 8, 0, 4) == 3
        assert cpu.share(4, 8, 0, 2) == 2, "no more than it may"
        assert cpu.status == "on"
        measured(cpu, 10, 10, 4)
        assert cpu.share(1, 8, 0, 1) == 0, "the link alone is faster"
    assert auto.status.startswith("waits")
    for cpu, expected in ((auto, 0), (always, 4)):
        measured(cpu, 10, 10, 3.5)
        assert cpu.share(12, 8, 0, 12) == 3, "at three quarters of the time"
        measured(cpu, 10, 7, 3.5)
        assert GAIN < cpu.rates.seconds(4, 12, 8, 0) / cpu.rates.seconds(0, 12, 8, 0) < 1
        assert cpu.share(12, 8, 0, 12) == expected
        measured(cpu, 10, 5, 3.5)
        assert cpu.share(12, 8, 0, 12) == 0, "what the CPU gains, the link loses"
    for own, usual in ((100, 2), (1, 0)):
        measured(auto, 10, 10, own)
        found = [auto.share(2, 8, 0, 2) for _ in range(2 * TRIAL)]
        assert found.count(usual) == 2 * TRIAL - 2
        assert {one for one in found if one != usual} == {0 if usual else 1}


def test_it_turns_itself_off_and_on(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    """By what is measured in passes: the CPU becomes slow, and fast again."""
    monkeypatch.setattr(cpu_experts, "TRIAL", 3)
    monkeypatch.setattr(cpu_experts, "FADING", 0.5)
    monkeypatch.setattr(on_demand, "elapsed", lambda begin, end: 0.004)  # the link's seconds for an expert
    now = 0.0
    monkeypatch.setattr(cpu_experts, "clock", lambda: now)
    loaded = load(mixture("mixtral"), experts_cpu="on")
    pool, product = loaded._pool, CpuExperts.product
    assert pool is not None
    assert pool.cpu is not None
    pool.cpu._always = False
    for seconds, status in ((0.02, "waits"), (0.0001, "on"), (0.02, "waits")):

        def slow(cpu: CpuExperts, key: Key, states: Tensor, seconds: float = seconds) -> Tensor:
            nonlocal now
            now += seconds
            return product(cpu, key, states)

        monkeypatch.setattr(CpuExperts, "product", slow)
        steps(loaded)
        before = pool.counts
        steps(loaded)
        shared = pool.counts.since(before)
        assert str(loaded.effective().settings["experts_cpu"]).startswith(status)
        assert (shared.on_cpu > shared.fetched) == (status == "on")
        assert shared.on_cpu > 0, "it is tried now and then"
    loaded.close()


def test_rates_are_measured_at_load_and_in_passes(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(on_demand, "elapsed", lambda begin, end: 1e-3)
    sharing(monkeypatch, 1)
    loaded = load(mixture("mixtral"), experts_cpu="on")
    pool = loaded._pool
    assert pool is not None
    assert pool.cpu is not None
    size, rates = pool.images[0].experts[0].size, pool.cpu.rates
    assert rates.alone.bandwidth == rates.beside.bandwidth == pytest.approx(size / 1e-3)
    assert rates.cpu.bandwidth > 0
    assert pool.counts == on_demand.ExpertCounts(), "nothing was needed"
    told = loaded.effective().settings
    assert told["expert_link_bandwidth"] == round(rates.alone.bandwidth)
    assert told["expert_cpu_bandwidth"] == round(rates.cpu.bandwidth)
    monkeypatch.setattr(on_demand, "elapsed", lambda begin, end: 1e-4)
    for _ in range(9):
        steps(loaded)
    assert rates.beside.bandwidth == pytest.approx(size / 1e-4, rel=0.05), "the CPU computed in each call"
    assert rates.alone.bandwidth < 2 * size / 1e-3
    on_device, now = Call.on_device, 0.0

    def waiting(call: Call, computed: Any) -> Tensor | None:
        nonlocal now
        now += 1e-2
        return on_device(call, computed)

    monkeypatch.setattr(Call, "on_device", waiting)
    monkeypatch.setattr(cpu_experts, "clock", lambda: now)
    for _ in range(9):
        steps(loaded)
    assert rates.cpu.bandwidth == pytest.approx(size / 1e-2, rel=0.05), "what delays the CPU is counted"
    loaded.close()


def test_all_that_the_link_still_brings_for_a_layer_counts(mixture: Kinds, waiting: None, monkeypatch: Patch) -> None:
    """Attention and router of a layer, if they do not stay on the device, and the rest of guesses."""
    found: list[int] = []

    def counted(_cpu: CpuExperts, asked: int, size: int, besides: int, most: int) -> int:
        found.append(besides)
        return 0

    monkeypatch.setattr(CpuExperts, "share", counted)
    for share, guess in ((None, "off"), (None, "auto"), ("60%", "off")):
        loaded = load(mixture("mixtral"), share=share, expert_guess=guess, experts_cpu="on")
        found.clear()
        steps(loaded)
        spec, ring = loaded.plan.model, loaded._ring
        assert ring is not None
        assert bool(ring.streamed) == (share is None)
        assert min(found) == pytest.approx(spec.dense_layer_bytes if ring.streamed else 0, rel=0.02)
        assert (max(found) > min(found)) == (guess == "auto")
        loaded.close()


def test_copies_come_first_and_the_device_works_meanwhile(mixture: Kinds, queued: None, monkeypatch: Patch) -> None:
    log: list[str] = []

    def logged(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    sharing(monkeypatch, 1)
    loaded = load(mixture("mixtral"), experts_cpu="on")
    for owner, name in (
        (ExpertPool, "_copy"),
        (ExpertPool, "_use"),
        (Call, "fetch"),
        (Call, "on_device"),
        (Call, "on_cpu"),
    ):
        logged(owner, name)
    steps(loaded, count=1)
    assert log[-20:] == ["_copy", "fetch", "_use", "on_device", "on_cpu"] * 4
    loaded.close()


class Taking(Call):
    """A call without states, which is only told what it takes."""

    def __init__(self) -> None:
        self.taken = ()

    def take(self, numbers: Sequence[int], table: Tensor) -> None:
        self.taken = sorted(numbers)

    def fetch(self) -> None:
        pass


@settings(max_examples=60, deadline=None)
@given(
    cached=st.integers(0, 9),
    guesses=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=16),
    passed=st.lists(st.booleans(), max_size=90),
    counts=st.lists(st.integers(-1, 4), min_size=1, max_size=9),
    passes=st.lists(
        st.tuples(st.booleans(), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=4)), max_size=8
    ),
)
def test_no_buffer_is_read_early_or_overwritten_late_beside_the_cpu(
    cached: int,
    guesses: list[list[int]],
    passed: list[bool],
    counts: list[int],
    passes: list[tuple[bool, list[list[int]]]],
) -> None:
    """Whatever the CPU takes, all others are in their places, and each expert that is needed is counted once."""
    with Patch.context() as patch:
        patch.setattr(on_demand, "GUESSED", 32)
        sharing(patch, *counts)
        bench = Bench(3, 6, FakeQueues(passed=passed), patch)
        bench.pool._cpu = CpuExperts(torch.empty(0), {}, {}, CPU, True)
        bench.pool.resize(3, cached)
        bench.foretell(guesses)
        for scanning, calls in passes:
            bench.pool.begin(scanning)
            for number, chosen in enumerate(calls):
                layer, asked = number * 3 // max(1, len(calls)), Taking()
                bench.pool.bring(layer, torch.tensor([chosen]), None if scanning else asked)
                for name, tensor in bench.weights[layer].items():
                    for expert in set(chosen) - set(asked.taken):
                        assert torch.equal(getattr(bench.modules[layer], name)[expert], tensor[expert])
                assert len(bench.pool._free) + len(bench.pool._at) == 3 + bench.pool.cached
        found = bench.pool.counts
        assert found.on_cpu <= found.misses
        if not any(scanning for scanning, _ in passes):
            assert found.on_cpu + found.fetched == found.misses
        bench.pool._cpu = None
        bench.close()


def test_the_cpu_gets_the_experts_used_least_and_a_cache_fills(monkeypatch: Patch) -> None:
    bench, first, second = Bench(2, 6, FakeQueues(), monkeypatch), Taking(), Taking()
    sharing(monkeypatch, -1)
    bench.pool._cpu = CpuExperts(torch.empty(0), {}, {}, CPU, True)
    bench.pool.resize(3, 1)
    bench.pool.begin(False)
    for _ in range(3):
        bench.pool._cache.use((0, 4))
    bench.pool.bring(0, torch.tensor([[1, 4, 2]]), first)
    assert first.taken == [1, 2], "the one used most comes, since the cache has room"
    assert set(bench.pool._cache) == {(0, 4)}
    bench.pool.bring(0, torch.tensor([[1, 4]]), second)
    assert second.taken == [1]
    counts = bench.pool.counts
    assert (counts.on_cpu, counts.fetched, counts.misses) == (3, 1, 4)
    bench.pool._cpu = None
    bench.close()
