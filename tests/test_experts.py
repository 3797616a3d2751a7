"""Experts on demand: the tokens of whole layers, whichever experts come, stay, or make room; and the pool's protocol on
queues that record who waited for whom."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import test_cache_kinds, test_quantized, test_ragged
from tests import test_parity as parity
from tests.checkpoints import once, save_config
from tests.running import decode, equal, prefill
from tests.test_parity import check_tokens, prompts
from tests.test_passes import close
from tests.test_ring import CPU, FakeQueues, Race, plain
from tools.conformance.small import Subject, small_model
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Work
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.state import Entry
from zinfer.engine.stream.experts import modules
from zinfer.engine.stream.experts.pool import HALF_LIFE, ExpertCache, ExpertPool
from zinfer.engine.stream.weights import packed_experts
from zinfer.engine.stream.weights.chunk import ONCE, Chunk, PackedLayer, Repeat
from zinfer.engine.stream.weights.packed_experts import UNIT, Experts, Key
from zinfer.engine.stream.weights.ring import PrefetchRing, Transfer
from zinfer.engine.stream.weights.source import MemorySource
from zinfer.plan.placement import TUNING, WHOLE_EXPERTS

Patch = pytest.MonkeyPatch
Kinds = Callable[[str], Path]
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "qwen3_moe": {
        "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "num_hidden_layers": 4, "head_dim": 16, "norm_topk_prob": True,
    },
    "deepseek_v3": test_cache_kinds.KINDS["deepseek_v3"] | {"n_routed_experts": 8, "num_attention_heads": 4},
    "gpt_oss": {
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4,
        "head_dim": 16, "sliding_window": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Make the checkpoint of one of `MIXTURES`, once."""
    return once(tmp_path_factory, lambda name, folder: save_config(folder, name, **MIXTURES[name]))


def load(directory: Path, experts: str = "on-demand", share: str | None = None, **options: Any) -> Any:
    """Load a checkpoint with `experts`, `share` of its weights on the device."""
    return parity.load("stream", directory, gpu_weights=share, experts=experts, **options)


def poisoned(loaded: Any) -> None:
    """Fill the layer buffer with NaN before passes and calls of experts. Only what is brought may be read."""
    pool = loaded._pool

    def after_nan(call: Callable[..., None]) -> Callable[..., None]:
        def called(*args: Any) -> None:
            pool._filled = -1, set()
            pool.layer_buffer.fill_(255)
            call(*args)

        return called

    pool.begin, pool.bring = after_nan(pool.begin), after_nan(pool.bring)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: Patch) -> None:
    """Have the experts of small models come in several parts."""
    monkeypatch.setattr(packed_experts, "PART_BYTES", 40)


@pytest.fixture
def queued(monkeypatch: Patch) -> None:
    """Give engines queues without a GPU, so that buffers hold copies."""
    monkeypatch.setattr("zinfer.engine.stream.weights.load.PrefetchRing", partial(PrefetchRing, queues=FakeQueues()))


def steps(loaded: Engine, length: int = 7, count: int = 6) -> list[Tensor]:
    """Return the logits of a prompt and of its fixed continuation. With one sequence."""
    first = prefill(loaded, *prompts((length,)), reserve=count)
    return [first, *(decode(loaded, torch.tensor([9 * step + 4])) for step in range(count))]


@pytest.mark.parametrize(("name", "where"), [*((name, "auto") for name in MIXTURES), ("mixtral", "cpu")])
def test_tokens_are_those_of_transformers(name: str, where: str, mixture: Kinds, queued: None) -> None:
    """Rows that route differently, small and large prompts, a thrashing cache. One prompt needs all experts."""
    kv = {"kv_offload": "cpu", "kv_attention": "gpu"} if where == "cpu" else {}
    loaded = load(mixture(name), share="70%", **kv)
    poisoned(loaded)
    check_tokens(loaded, mixture(name))
    settings = loaded.effective().settings
    assert settings["experts"] == "on-demand"
    assert settings["cached_experts"] > 0
    assert settings["experts_hits_per_step"] > 0 < settings["experts_fetched_per_step"]


def test_a_step_brings_the_bytes_of_the_experts_that_were_chosen(mixture: Kinds) -> None:
    whole, few = load(mixture("mixtral"), "all"), load(mixture("mixtral"))
    assert all(close(*step) for step in zip(steps(whole), steps(few), strict=True))
    stream, spec, all_of_it = few.effective(), few.plan.model, whole.effective()
    dense = spec.streamed_bytes - spec.routed_bytes
    assert all_of_it.settings["experts"] == "all"
    assert all_of_it.wire_bytes_per_step == pytest.approx(spec.streamed_bytes, rel=0.02)
    assert stream.wire_bytes_per_step == stream.streamed_bytes_per_step
    assert stream.wire_bytes_per_step == pytest.approx(dense + 4 * 2 * spec.expert_bytes, rel=0.02)
    assert stream.settings["experts_fetched_per_step"] == stream.settings["experts_misses_per_step"] == 4 * 2
    assert stream.host_weight_bytes == pytest.approx(all_of_it.host_weight_bytes, rel=0.02)
    assert few.planner.at(few.plan.case.with_batch(1).workload).streamed_bytes == pytest.approx(
        dense + 4 * 2 * spec.expert_bytes, abs=4
    )


def test_everything_may_stay_and_nothing_comes_twice(mixture: Kinds, queued: None) -> None:
    loaded = load(mixture("mixtral"), share="100%")
    expected = steps(loaded)
    before = loaded._pool.counts.fetched
    assert equal(steps(loaded), expected)
    assert loaded._pool.counts.fetched == before <= 4 * 8
    effective = loaded.effective()
    assert effective.wire_bytes_per_step == 0
    assert effective.gpu_weight_bytes > effective.host_weight_bytes * before / 32


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_micro_batches_decode_together(name: str, mixture: Kinds, queued: None) -> None:
    """Prompts of one pass and steps of others; rows that share a pass, and passes that share a pass."""
    loaded = load(mixture(name), share="30%")
    poisoned(loaded)
    test_ragged.check(loaded, None)
    loaded._ragged.able = False  # each micro-batch has a pass of its own: a layer is called several times in a pass
    test_ragged.check(loaded, False)


def no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    ("short", "name", "run"),
    [(ExpertPool, "_retain", steps), (FakeQueues, "event", lambda loaded: loaded._pool.resize(3, 3))],
)
def test_a_lack_of_memory_leaves_an_engine_that_works(
    short: Any, name: str, run: Callable[[Any], object], mixture: Kinds, queued: None, monkeypatch: Patch
) -> None:
    """In a pass, and for buffers."""
    loaded = load(mixture("mixtral"), share="30%")
    expected = steps(loaded)
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(short, name, no_room)
        with pytest.raises(torch.OutOfMemoryError):
            run(loaded)
    assert equal(steps(loaded), expected)


@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_coded_experts_give_the_logits_of_whole_layers(
    source: str, mixture: Kinds, tmp_path: Path, monkeypatch: Patch, queued: None
) -> None:
    monkeypatch.setattr("zinfer.engine.stream.weights.codec.MIN_NUMEL", 1 << 12)
    monkeypatch.setattr("zinfer.engine.stream.weights.codec.BLOCK", 1 << 12)
    directory = mixture("mixtral") if source == "bf16" else test_quantized.FORMATS["fp8 of experts"](tmp_path / "m")
    logits, wire = [], []
    for experts in ("all", "on-demand"):
        loaded = load(directory, experts, dtype="bfloat16", weight_codec="lossless")
        logits.append(steps(loaded))
        wire.append(loaded.effective().wire_bytes_per_step)
    experts_of = (expert for packed in loaded._pool.layers.values() for expert in packed.experts)
    assert any(chunk.layout is not None for expert in experts_of for chunk in expert.chunks)
    assert loaded._pool.buffer_bytes < 0.8 * loaded.plan.model.expert_bytes
    assert loaded._ring.depth >= 2 * max(len(packed.chunks) for packed in loaded._ring.layers)
    assert equal(*logits)
    assert wire[1] < wire[0]


def test_experts_that_all_stay_are_unpacked_before_the_cpu_knows_the_choice(
    mixture: Kinds, monkeypatch: Patch, queued: None
) -> None:
    for name in ("MIN_NUMEL", "BLOCK"):  # divides every matrix of an expert
        monkeypatch.setattr(f"zinfer.engine.stream.weights.codec.{name}", 1 << 11)
    expected = load(mixture("mixtral"), "all", dtype="bfloat16", weight_codec="lossless")
    loaded = load(mixture("mixtral"), share="100%", dtype="bfloat16", weight_codec="lossless")
    poisoned(loaded)
    pool, waited = loaded._pool, list[int]()
    read = pool._read

    def wait(chosen: Tensor) -> Any:
        waited.append(chosen.numel())
        return read(chosen)

    monkeypatch.setattr(pool, "_read", wait)
    steps(loaded)  # makes the buffers
    with torch.inference_mode():
        pool.begin(False)
        for layer in range(4):
            pool.bring(layer, torch.arange(8)[:, None])  # eight tokens: it waits, and all experts stay from now on
        waited.clear()
        before = pool.counts
        assert equal(steps(loaded), steps(expected))
        assert set(waited) == {7 * 2}, "the prompt of seven tokens waits, its steps do not"
        assert loaded.effective().settings["experts_hits_per_step"] == 4 * 2
        assert [pool.stays(tokens) for tokens in (1, 2)] == [True, False]
        assert pool.counts.since(before).fetched == 0
        pool.bring(1, torch.tensor([[3, 8, -1, 3]]))  # two numbers of no expert
        for block in pool.layers[1].blocks.values():
            poison = [(part.view(torch.uint8) == 255).all() for part in block.view(pool.layer_buffer)]
            assert [number for number in range(8) if not poison[number]] == [3]


def test_the_timeline_tells_chosen_experts_apart(mixture: Kinds, monkeypatch: Patch) -> None:
    """Choices are late and early, in turn: an event shows one after three looks, or after one."""
    queues = FakeQueues(passed=cycle([False, True, True, False, True, False, True, True, True, True]))
    monkeypatch.setattr("zinfer.engine.stream.weights.load.PrefetchRing", partial(PrefetchRing, queues=queues))
    loaded = load(mixture("mixtral"))
    prefill(loaded, *prompts((5,)), reserve=9)
    copies = set[tuple[str | None, bool]]()
    for token in range(6):
        spans = loaded.timeline([Work(loaded.batches[-1], torch.tensor([[token]]))])
        copies |= {(span.carries, span.layer == 0) for span in spans if span.lane == "copy" and span.start_ms > 0}
        assert all(span.carries is None for span in spans if span.lane != "copy")
        assert {span.layer for span in spans if span.lane == "unpack"} == {0, 1, 2, 3}
    assert copies == {(None, True), (None, False), ("expert", True), ("expert", False)}


def test_models_without_such_experts_are_refused_or_streamed_whole(
    mixture: Kinds, checkpoint: Callable[..., Path], monkeypatch: Patch
) -> None:
    with pytest.raises(EngineError, match="cannot come on demand: it has none; take experts=all"):
        load(checkpoint("llama"))
    with monkeypatch.context() as unsupported_kind:
        unsupported_kind.setattr(modules, "through_interface", lambda module: False)
        with pytest.raises(EngineError, match=r"do not go through the ExpertsInterface .*experts=all"):
            load(mixture("mixtral"))
        monkeypatch.setattr("zinfer.plan.placement.TUNING", replace(TUNING, min_expert_bytes=1))
        loaded = load(mixture("mixtral"), "auto")
        assert loaded.effective().settings["experts"] == loaded.plan.placement.experts == "all"
    loaded = load(mixture("mixtral"), "auto")
    assert loaded.effective().settings["experts"] == "on-demand"


def test_a_weight_that_is_not_stacked_or_shared_is_not_taken_apart() -> None:
    class Mixture(nn.Module):
        has_gate, is_transposed, config = True, False, None

        def __init__(self, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            for number, shape in enumerate(shapes):
                self.register_parameter(f"w{number}", nn.Parameter(torch.empty(shape, device="meta")))

        def forward(self, states: Tensor) -> Tensor:
            return states

        forward.__wrapped__ = None  # type: ignore[attr-defined]

    def entries(module: nn.Module) -> dict[str, Entry]:
        return {f"0.{name}": Entry((name,), ((module, name),), weight, 0) for name, weight in module.named_parameters()}

    def find(module: nn.Module, given: dict[str, Entry] | None = None) -> Any:
        return modules.find_experts(nn.Sequential(module), entries(module) if given is None else given)

    good = Mixture((4, 8, 8), (4, 8, 8), (4, 3), (8, 8))
    several = nn.Sequential(Mixture((4, 8, 8), (4, 8, 8)), Mixture((4, 8, 8), (4, 8, 8)))
    assert list(find(good).weights) == ["0.w0", "0.w1", "0.w2"]
    assert find(nn.Linear(2, 2)) is None
    assert "stacked" in find(Mixture((4, 8, 8)))
    assert "no multiple of 16" in find(Mixture((4, 1, 3), (4, 8, 8)))
    assert "shared between layers" in find(good, {})
    assert modules.find_experts(several, {}) == "a layer has several modules of experts"


@pytest.mark.parametrize("name", sorted(WHOLE_EXPERTS))
def test_plans_know_the_experts_that_come_with_their_layer(name: str) -> None:
    assert not any(map(modules.through_interface, small_model(Subject(name)).modules()))


# The cache's order


def test_experts_used_most_stay_until_their_uses_are_old() -> None:
    cached = ExpertCache()
    often, seldom, new = (0, 0), (0, 1), (0, 2)
    for key in (*[often] * 5, *[seldom] * 2):
        assert cached.insert(key, 2) is None
    assert cached.insert(new, 2) == new, "used once, all others more"
    assert cached.insert(new, 2, counts=False) == new
    assert cached.insert(new, 2) == seldom
    for _ in range(4 * HALF_LIFE):
        cached.next_pass()
    assert cached.insert(seldom, 2) == new
    assert cached.insert(new, 2) == often, "one use now is more than five long ago"


@settings(max_examples=30, deadline=None)
@given(uses=st.lists(st.integers(0, 9), max_size=400))
def test_the_order_survives_any_use(uses: list[int]) -> None:
    cached = ExpertCache()
    for number, expert in enumerate(uses):
        key = (0, expert)
        evicted = cached.insert(key, 4)
        assert (evicted == key) == (key not in cached)
        if number % 7 == 0:
            cached.next_pass()
        assert len(cached) <= 4
        assert len(cached._order) <= 64 + 4 * len(cached) + 1


# The protocol, on queues that record who waited for whom


class Bench:
    """Pool for `layers` layers of `count` experts. `queues` watches its copies and reads."""

    def __init__(self, layers: int, count: int, queues: FakeQueues, patch: Patch) -> None:
        self.queues, self.layers, self.count = queues, layers, count
        self.modules = [nn.Module() for _ in range(layers)]
        self.weights: list[dict[str, Tensor]] = []
        packed, experts, dense = {}, {}, list[PackedLayer]()
        self.arena = PinnedArena(1 << 20, pin=False, grow=True)
        for layer, module in enumerate(self.modules):
            weights = {name: torch.randint(0, 255, (count, 3, 16), dtype=torch.uint8) for name in ("up", "down")}
            weights["bias"] = torch.randint(0, 255, (count, 5), dtype=torch.uint8)
            self.weights.append(weights)
            for name, tensor in weights.items():
                module.register_parameter(name, nn.Parameter(tensor.to("meta"), requires_grad=False))
            entries = {name: Entry((name,), ((module, name),), tensor, layer) for name, tensor in weights.items()}
            dense.append(plain([("dense", torch.empty(40, dtype=torch.uint8))], self.arena.used))
            self.arena.allocate(dense[-1].size)
            experts[layer] = Experts(module, entries, count)
            packed[layer] = packed_experts.pack_experts(experts[layer], weights, {}, self.arena, plain=True)
        source = MemorySource(self.arena, dense, packed)
        self.ring = PrefetchRing(source, 3, CPU, queues)
        self.pool = ExpertPool(source, CPU, self.ring)
        real_write, real_unpack, pool = ExpertPool._write, Chunk.unpack, self.pool

        self.writes = self.unpacked = 0  # calls

        def write(pool: ExpertPool, layer: int, source: int, target: int, size: int) -> None:
            self.writes += 1
            for unit in range(target, target + size, UNIT):
                queues.write(pool._memory[unit : unit + UNIT])
            real_write(pool, layer, source, target, size)

        def unpack(chunk: Chunk, content: Tensor, layer_buffer: Tensor, repeat: Repeat = ONCE) -> None:
            if layer_buffer is pool.layer_buffer:
                self.unpacked += 1
                assert content.data_ptr() >= pool._memory.data_ptr()
                for time, unit in product(range(repeat.times), range(0, chunk.size, UNIT)):
                    queues.read(content[time * repeat.packed + unit :][:UNIT])
            real_unpack(chunk, content, layer_buffer, repeat)

        patch.setattr(ExpertPool, "_write", write)
        patch.setattr(Chunk, "unpack", unpack)
        for layer, routed in experts.items():
            for name, block in packed[layer].blocks.items():
                routed.weights[name].put(block.view(self.pool.layer_buffer))

    def use(self, layer: int, chosen: list[int]) -> None:
        """Bring experts and check that they are in their places."""
        self.pool.bring(layer, torch.tensor(chosen))
        for name, tensor in self.weights[layer].items():
            held = getattr(self.modules[layer], name)
            for expert in range(self.count) if self.pool.scanning else chosen:
                assert torch.equal(held[expert], tensor[expert])
        assert len(self.pool._free) + len(self.pool._at) == self.pool.staging + self.pool.cached

    def whole_pass(self) -> None:
        for layer in range(self.layers):
            self.use(layer, [*range(self.count)])

    def close(self) -> None:
        self.pool.close()
        self.ring.close()
        self.arena.close()


@pytest.mark.parametrize("staging", [2, 3, 5, 12])
def test_a_pass_that_brings_all_brings_each_once(staging: int, monkeypatch: Patch) -> None:
    bench = Bench(3, 6, FakeQueues(), monkeypatch)
    bench.pool.resize(staging, 0)
    for number in range(1, 3):
        bench.pool.begin(True)
        for layer in range(3):
            for chosen in ([1, 5], [0]):  # two calls of the layer
                bench.use(layer, chosen)
        assert bench.pool.counts.fetched == 18 * number
    bench.pool.begin(True)
    for layer in (2, 0, 2, 1, 0):  # in no order: experts that are ahead are dropped, and asked for again
        bench.use(layer, [3])
    bench.pool.begin(False)
    before = bench.pool.counts
    for layer in range(3):
        bench.use(layer, [4, 2, 4])
    since = bench.pool.counts.since(before)
    assert since.fetched == since.misses == 4, "layer 0 is still in the slot"
    bench.close()


@pytest.mark.parametrize("cached", [0, 4, 9, 18])
def test_passes_that_bring_all_keep_as_many_experts_of_each_layer(cached: int, monkeypatch: Patch) -> None:
    """Otherwise the link would idle while layers without missing experts are computed."""
    bench = Bench(3, 6, FakeQueues(), monkeypatch)
    bench.pool.resize(2, cached)
    for number in range(2):
        before = bench.pool.counts
        bench.pool.begin(True)
        bench.whole_pass()
        assert bench.pool.counts.since(before).fetched == (18 - cached if number else 18)
    kept = Counter(layer for layer, _ in bench.pool._cache)
    assert kept.total() == cached
    assert max(kept.values(), default=0) - min(kept.values(), default=0) <= 1
    bench.close()


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(2, 6),
    staging=st.integers(1, 5),
    cached=st.integers(0, 9),
    run=st.integers(1, 4),
    passed=st.lists(st.booleans(), max_size=90),
    passes=st.lists(
        st.tuples(st.booleans(), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=4)), max_size=8
    ),
)
def test_no_buffer_is_read_early_or_overwritten_late(
    count: int, staging: int, cached: int, run: int, passed: list[bool], passes: list[tuple[bool, list[list[int]]]]
) -> None:
    """Passes of any mixture: that bring all experts or those chosen, end early, and call a layer several times."""
    with Patch.context() as patch:
        patch.setattr(packed_experts, "PART_BYTES", 40)
        patch.setattr(packed_experts, "RUN_BYTES", run * 768)
        bench = Bench(3, count, FakeQueues(passed=passed), patch)
        bench.pool.resize(staging, cached)
        for scanning, calls in passes:
            bench.pool.begin(scanning)
            for number, chosen in enumerate(calls):
                bench.use(number * 3 // max(1, len(calls)), [expert % count for expert in chosen])
        bench.close()


@pytest.mark.parametrize(
    ("skipped_wait", "message"), [("compute", "before its content"), ("copy", "overwritten before")]
)
def test_the_clocks_see_a_wait_that_is_missing(skipped_wait: str, message: str, monkeypatch: Patch) -> None:
    bench = Bench(3, 4, FakeQueues(skip_waits=skipped_wait), monkeypatch)
    bench.pool.begin(False)
    with pytest.raises(Race, match=message):
        bench.whole_pass()


def test_a_pass_that_brings_all_runs_ahead_and_never_beyond_its_buffers(monkeypatch: Patch) -> None:
    monkeypatch.setattr(packed_experts, "RUN_BYTES", 1)
    bench = Bench(3, 4, FakeQueues(), monkeypatch)
    bench.pool.resize(5, 2)
    bench.pool.begin(True)
    assert list(bench.pool._coming) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)], "before any router has chosen"
    for layer in range(3):
        bench.use(layer, [1])
    assert bench.pool.counts.fetched == 12
    bench.pool.begin(True)
    for layer in range(3):
        bench.use(layer, [2])
    assert bench.pool.counts.fetched == 22, "two of them stayed"
    assert bench.pool.counts.hits == bench.pool.counts.misses == 0
    bench.close()


@pytest.mark.parametrize("cached", [0, 4])
def test_small_experts_come_and_are_unpacked_together(cached: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(packed_experts, "PART_BYTES", 16 << 20)
    bench = Bench(3, 8, FakeQueues(), monkeypatch)
    bench.pool.resize(8, cached)
    fetched = []
    for _ in range(2):
        before, writes, unpacked = bench.pool.counts.fetched, bench.writes, bench.unpacked
        bench.pool.begin(True)
        for layer in range(3):
            bench.use(layer, [1])
        fetched.append(bench.pool.counts.fetched - before)
        assert fetched[-1] / 4 <= bench.writes - writes < fetched[-1]
        assert 3 * 6 <= bench.unpacked - unpacked < 3 * 24, "of three weights each"
        if not cached:
            assert (bench.writes - writes, bench.unpacked - unpacked) == (6, 6 * 3), "four at a time"
    assert fetched == [24, 24 - cached]
    bench.close()


class Reading(nn.Module):
    """A layer of a ring, whose experts are brought while it computes."""

    def __init__(self, layer: int, bench: Bench, log: list[str]) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.empty(0), requires_grad=False)
        self.layer, self.bench, self.log = layer, bench, log

    def forward(self) -> Tensor:
        self.log.append(f"router of {self.layer}")
        self.bench.use(self.layer, [0, 3])
        return self.dense


def test_experts_that_are_asked_for_come_before_what_later_layers_need(monkeypatch: Patch) -> None:
    log = list[str]()
    bench = Bench(6, 4, FakeQueues(), monkeypatch)
    bench.pool.resize(4, 0)
    copy, real = PrefetchRing._copy, ExpertPool._copy

    def copied(ring: PrefetchRing, transfer: Transfer) -> None:
        log.append(f"layer {transfer.layer}")
        copy(ring, transfer)

    def logged_copy(pool: ExpertPool, run: Sequence[Key]) -> None:
        log.extend(f"expert {key}" for key in run)
        real(pool, run)

    monkeypatch.setattr(PrefetchRing, "_copy", copied)
    monkeypatch.setattr(ExpertPool, "_copy", logged_copy)
    layers = [Reading(layer, bench, log) for layer in range(6)]
    for layer in layers:
        shape = torch.empty(40, dtype=torch.uint8)
        bench.ring.attach(layer.layer, layer, {"dense": Entry(("dense",), ((layer, "dense"),), shape, layer.layer)})
    bench.ring.start()
    bench.pool.begin(False)
    assert log == ["layer 0", "layer 1", "layer 2"]
    log.clear()
    with bench.ring.weight_pass():
        for layer in layers:
            layer()
    assert log[:4] == ["router of 0", "expert (0, 0)", "expert (0, 3)", "layer 3"]
    assert log[-4:] == ["router of 5", "expert (5, 0)", "expert (5, 3)", "layer 2"], "of the next pass"
    bench.close()
