"""KV cache in host memory: the same tokens, and one read of the cache per step, beside the weights."""

import random
import weakref
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import Checkpoints, Patch, Spy, passes
from tests.grid import covering
from tests.running import decode, error, prefill
from tests.test_continuous import Words
from tests.test_parity import BATCHES, check_tokens, greedy, load, prompts, reference
from tests.test_passes import keep_here
from zinfer.core.case import Workload
from zinfer.core.engine import OptionError
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.engine.cache import QuantizedLayer, dequantize_kv
from zinfer.engine.stream.kv import cpu_kernel
from zinfer.engine.stream.kv.cpu import CpuStore
from zinfer.engine.stream.kv.pool import HostPool
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.sequence import Sequence
from zinfer.system.host import attending_cpus


@pytest.mark.parametrize(
    ("architecture", "attention", "device_rows", "at_once"),
    covering(["bloom", "opt", "llama", "gpt_neox", "qwen2", "mixtral"], ["gpu", "cpu"], [0, 1, 2, 3], [1, 8], times=3),
)
def test_tokens_are_those_of_transformers(
    architecture: str, attention: str, device_rows: int, at_once: int, checkpoint: Checkpoints
) -> None:
    directory = checkpoint(architecture)
    options: dict[str, Any] = {"kv_offload": "auto", "kv_attention": attention, "tokens": 9 * at_once}
    engine = load("stream", directory, "cpu", device_rows=device_rows, **options)
    for lengths, expected in zip(BATCHES, reference(directory), strict=True):
        assert torch.equal(greedy(engine, lengths), expected)
        effective = engine.effective()
        there = max(0, len(lengths) - device_rows)
        assert effective.settings["kv_host_rows"] == there
        read = max(lengths) + 10  # by the last step
        over_link = engine.plan.model.kv_bytes(there, read) if attention == "gpu" else 0
        assert effective.settings["kv_bytes_per_step"] == over_link
        assert there == 0 or effective.settings["kv_attention"] == attention
        assert effective.streamed_bytes_per_step >= 0.95 * engine.plan.model.streamed_bytes


def test_prompts_of_one_token_are_prompts(checkpoint: Checkpoints, spy: Spy) -> None:
    there = load("stream", checkpoint("llama"), "cpu", tokens=1, kv_offload="cpu", kv_attention="cpu")
    on_device = load("stream", checkpoint("llama"), "cpu", tokens=1, kv_offload="none")
    appended = spy(CpuStore, "append")
    assert torch.equal(greedy(there, (1, 1, 1)), greedy(on_device, (1, 1, 1)))
    layers, slices = there.plan.model.num_layers, [call.args[2] for call in appended.mock_calls]
    many = [rows.stop - rows.start for rows in slices]
    assert many[: 3 * layers] == [1] * 3 * layers, "prompts come a few rows at a time"
    assert set(many[3 * layers :]) == {3}, "and tokens for all rows at once"


def test_a_record_of_requests_tells_how_many_had_their_cache_in_host_memory(checkpoint: Checkpoints) -> None:
    engine = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu", kv_attention="cpu")

    def come_and_go(count: int) -> None:
        for _ in range(count):  # one by one, as requests do
            passes.prefill(engine, *prompts((5,)), 4)
        engine.clear()

    for rows in (3, 2):
        engine.expect(Workload(batch_size=3, input_len=5, output_len=4))
        come_and_go(1)
        come_and_go(rows)
        come_and_go(1)  # after a moment without any
        engine.expect(None)
        settings = engine.effective().settings
        assert (settings["kv_host_rows"], settings["kv_attention"]) == (rows, "cpu")
        assert settings["kv_threads"]
    come_and_go(1)
    assert engine.effective().settings["kv_host_rows"] == 1


def test_a_model_that_stays_can_have_its_cache_in_host_memory(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    engine = load("stream", directory, "none", kv_offload="cpu")
    check_tokens(engine, directory)
    assert engine.effective().settings["kv_host_rows"] == len(BATCHES[-1])
    with pytest.raises(OptionError, match=r"kv_attention=gpu .* needs offload cpu"):
        load("stream", directory, "none", kv_offload="cpu", kv_attention="gpu")


def test_as_many_threads_attend_as_the_plan_says(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    directory, before = checkpoint("llama"), torch.get_num_threads()
    seen = Mock(wraps=cpu_kernel.attend)
    monkeypatch.setattr("zinfer.engine.stream.kv.cpu.attend", seen)
    for share, threads in ((1.0, attending_cpus(before)), (1e-3, 1)):
        seen.reset_mock()
        engine: Any = load("stream", directory, "cpu", kv_offload="cpu", kv_attention="cpu")
        engine.given = engine.plan.placement.model_copy(update={"kv_cpu_share": share})
        assert torch.equal(greedy(engine, BATCHES[0]), reference(directory)[0])
        assert {call.args[4] for call in seen.mock_calls} == {threads}
        assert engine.effective().settings["kv_threads"] == threads
        engine.clear()
        assert engine.effective().settings["kv_threads"] == threads
        assert torch.get_num_threads() == before


def test_a_model_that_computes_attention_itself_keeps_its_cache_on_the_gpu(
    checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """A plan that does not know the type is made anew."""
    keep_here(monkeypatch, 1)
    directory = checkpoint("falcon")
    with pytest.raises(EngineError, match=r"falcon.* computes attention itself, .*: kv_offload=cpu is not for it"):
        load("stream", directory, "cpu", kv_offload="cpu")
    for with_counts in (True, False):
        if not with_counts:
            monkeypatch.setattr("zinfer.core.model.ATTEND_THEMSELVES", ())
        engine = load("stream", directory, "cpu", kv_offload="auto", kv_attention="cpu")
        assert torch.equal(greedy(engine, BATCHES[0]), reference(directory)[0])
        assert engine.effective().settings["kv_host_rows"] == 0


@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_a_quantised_cache_is_half_as_large_and_nearly_as_good(
    architecture: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("zinfer.engine.stream.passes.DEQUANTIZED_BYTES", 1)  # a row at a time
    directory = checkpoint(architecture)
    engine = load("stream", directory, "cpu", kv_cache_dtype="int8")
    exact = load("stream", directory, "cpu")
    logits = [prefill(model, *prompts((9, 5, 7)), reserve=8) for model in (engine, exact)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4), "the prompt's attention sees exact keys"
    for _ in range(6):
        token = logits[1].argmax(-1)
        logits = [decode(model, token) for model in (engine, exact)]
        # Weights twenty times wider than a fresh model's: attention is sharp, and magnifies what is rounded.
        assert 0 < error(*logits) < 0.1
    layers = (model.batches[0].cache.layers[0] for model in (engine, exact))
    kept, whole = (sum(part.nbytes for part in layer.memories) for layer in layers)
    assert kept < 0.35 * whole  # of float32, with a scale for 16 values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_any_size_are_quantised_alike(dtype: torch.dtype) -> None:
    """The error is relative to the largest value of the head: half a step, and the rounding of the model's own type."""
    states = torch.randn(1, 1, 6, 64)
    scales = [1.0, 0.0, 1e-4, 1e3, 1.0, 1.0] if dtype == torch.float16 else [1.0, 0.0, 1e-14, 1e30, 1e-35, 1e-22]
    states = (states / states.abs().amax(-1, keepdim=True) * torch.tensor(scales)[:, None]).to(dtype)
    if dtype == torch.float16:
        states[0, 0, 5] = torch.finfo(dtype).max * torch.tensor([1, -1]).repeat(32)  # the ends of the range
    layer = QuantizedLayer(1, 7)
    layer.update(states, states)
    for states_of_layer in layer.update(states[:, :, :1], states[:, :, :1]):
        assert states_of_layer.dtype == dtype
        wrong = (states_of_layer[:, :, :6].double() - states.double()).abs().amax(-1)
        assert bool((wrong <= 0.0065 * states.double().abs().amax(-1)).all())
        assert not states_of_layer[0, 0, 1].any()


@pytest.mark.parametrize(
    ("architecture", "device_rows", "compiler"),
    covering(["bloom", "llama", "gpt_neox"], [0, 1, 3], [True, False], times=2),
)
def test_in_8_bits_it_is_the_same_cache_wherever_it_is(
    architecture: str, device_rows: int, compiler: bool, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    if not compiler:
        monkeypatch.setattr("zinfer.engine.stream.kv.cpu_kernel.library", lambda: None)
    monkeypatch.setattr("zinfer.engine.stream.passes.DEQUANTIZED_BYTES", 1)
    directory = checkpoint(architecture)
    alone = load("stream", directory, "cpu", kv_cache_dtype="int8")
    split = load("stream", directory, "cpu", device_rows=device_rows, kv_cache_dtype="int8", kv_offload="auto")
    logits = [prefill(model, *prompts((9, 5, 7, 1)), reserve=8) for model in (alone, split)]
    for _ in range(6):
        assert torch.allclose(logits[0], logits[1], atol=2e-3)
        token = logits[0].argmax(-1)
        logits = [decode(model, token) for model in (alone, split)]
    assert split.effective().settings["kv_host_rows"] == 4 - device_rows
    spec, blocks = alone.plan.model, split.batches[0].host._blocks.values()
    kept = spec.kv_bytes(4 - device_rows, 17) * (1 + 4 / spec.head_dim) / 4
    assert sum(block.size for block in blocks) == pytest.approx(kept, abs=4096)


class SharedPass:
    """Micro-batches of other lengths, padded and not, and reference logits. The latter are of each alone."""

    def __init__(self, engine: Any, *lengths: tuple[int, ...]) -> None:
        self.engine, self.calls = engine, list[int]()  # rows in each forward pass of the model

        def note(_model: object, _args: object, given: dict[str, Any]) -> None:
            self.calls.append(len(given["input_ids"]))

        engine.model.register_forward_pre_hook(note, with_kwargs=True)
        self.prompts = [prompts(rows) for rows in lengths]
        sizes = [len(rows) for rows in lengths]
        self.shares = torch.arange(4, 4 + 3 * sum(sizes)).view(-1, 3).split(sizes)
        self.expected = [
            [prefill(engine, *prompt, reserve=8), *(decode(engine, rows[:, step]) for step in range(3))]
            for prompt, rows in zip(self.prompts, self.shares, strict=True)
        ]
        engine.clear()

    def check(self, on_host: list[int], sizes: list[int], within: float) -> None:
        """Decode together, in forward passes of `sizes` rows. `on_host` of each have rows in host memory."""
        batches = [passes.prefill(self.engine, *prompt, 8)[0] for prompt in self.prompts]
        assert [batch.host_rows for batch in batches] == on_host
        for step in range(1, 4):
            self.calls.clear()
            works = [Work(batch, rows[:, step - 1 : step]) for batch, rows in zip(batches, self.shares, strict=True)]
            for logits, steps in zip(self.engine.forward(works), self.expected, strict=True):
                assert torch.allclose(logits[:, -1], steps[step], atol=within)
            assert sorted(self.calls) == sizes


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "bloom"])
def test_rows_whose_cache_crosses_the_link_share_a_forward_pass(
    architecture: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    keep_here(monkeypatch, 3)
    options: dict[str, Any] = {"kv_offload": "auto", "kv_attention": "gpu", "tokens": 14}
    engine = load("stream", checkpoint(architecture), "cpu", **options)
    SharedPass(engine, (9, 5, 7, 4, 6), (7, 7, 7), (3,)).check([2, 3, 1], [9], 2e-4)


@pytest.mark.parametrize(("architecture", "device_rows"), covering(["bloom", "llama", "mixtral"], [9, 6]))
def test_rows_in_8_bits_share_a_forward_pass(
    architecture: str, device_rows: int, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """Dequantised keys of a row are freed before the next row's."""
    quantized_rows = device_rows < 9
    if quantized_rows:
        keep_here(monkeypatch, device_rows)
    on_cpu = {"kv_offload": "auto", "kv_attention": "cpu"}  # asked for: the machine has no rate of it
    options: dict[str, Any] = {"kv_cache_dtype": "int8"} | (on_cpu if quantized_rows else {})
    engine: Any = load("stream", checkpoint(architecture), "cpu", **options)
    live, counts = list[Any](), list[int]()

    def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        live[:] = [reference for reference in live if reference() is not None]
        counts.append(len(live))
        values = dequantize_kv(numbers, scales, dtype)
        assert len(values) == 1
        live.append(weakref.ref(values))
        return values

    rows = SharedPass(engine, (9, 5, 7, 4, 6), (7, 7, 7), (3,))
    monkeypatch.setattr("zinfer.engine.stream.passes.DEQUANTIZED_BYTES", 1)
    monkeypatch.setattr("zinfer.engine.cache.dequantize_kv", dequantize)
    assert engine.joins
    if quantized_rows:
        rows.check([0, 2, 1], [3, 6], 3e-2)
    else:
        rows.check([0, 0, 0], [9], 2e-4)
    assert len(counts) == 3 * device_rows * 2 * len(engine.batches[0].cache.layers)
    assert max(counts) <= 1, "a row's keys may still be there while its values are dequantized"


@pytest.mark.parametrize(
    ("architecture", "storage", "compiler"),
    covering(["bloom", "gpt_neox", "opt"], ["auto", "int8"], [True, False]),
)
def test_rows_that_the_cpu_attends_to_share_a_forward_pass(
    architecture: str, storage: str, compiler: bool, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    if not compiler:
        monkeypatch.setattr("zinfer.engine.stream.kv.cpu_kernel.library", lambda: None)
    keep_here(monkeypatch, 4)
    options: dict[str, Any] = {"kv_offload": "auto", "kv_attention": "cpu", "kv_cache_dtype": storage}
    engine: Any = load("stream", checkpoint(architecture), "cpu", **options)
    rows = SharedPass(engine, (9, 5, 7, 4, 6), (11, 11), (3,))
    quantised = Mock(wraps=cpu_kernel.quantize_rows)
    monkeypatch.setattr("zinfer.engine.stream.kv.cpu.quantize_rows", quantised)
    rows.check([1, 2, 1], [4, 4], 2e-4 if storage == "auto" else 3e-2)  # on the device, and in host memory
    steps = quantised.mock_calls[-3 * 2 * len(engine.batches[0].cache.layers) :]
    rows_of_steps = {len(call.args[0]) for call in steps}
    assert rows_of_steps == ({4} if storage == "int8" else set()), "keys of all micro-batches at once"


def test_a_pool_keeps_what_was_freed_and_joins_it() -> None:
    pool = HostPool(pin=False)
    pool.reserve(1 << 20)
    assert pool.size == pool.unused == 1 << 20
    first = [pool.allocate(size) for size in (300_000, 100_000, 1, 500_000)]
    ranges = sorted((block.start, block.start + block.size) for block in first)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for block in first:
        block.memory.fill_(block.size % 251)
    assert all(bool((block.memory == block.size % 251).all()) for block in first)
    for number in (0, 2, 1):
        pool.free(first[number])
    again = pool.allocate(400_000)  # of three blocks that were freed
    assert pool.size == 1 << 20
    assert again.start == 0
    pool.free(again)
    pool.free(first[3])
    assert pool.unused == 1 << 20
    pool.reserve(2 << 20)  # nobody uses it: one piece again
    assert pool.size == 2 << 20
    whole = pool.allocate(2 << 20)
    more = pool.allocate(1000)
    assert (2 << 20) + 1000 <= pool.size < 2.5 * (1 << 20)
    pool.free(more)
    pool.free(whole)
    pool.close()
    assert pool.size == 0


def test_host_memory_that_is_short_is_told_by_the_batch_that_needs_it(
    checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    engine: Any = load("stream", checkpoint("bloom"), "cpu", kv_offload="cpu", kv_attention="cpu")

    monkeypatch.setattr(HostPool, "reserve", Mock(side_effect=MemoryError("host memory is short")))
    engine.expect(Workload(batch_size=4, input_len=9, output_len=4))
    with pytest.raises(MemoryError, match="short"):
        passes.prefill(engine, *prompts((9, 5)), 4)


def test_rows_that_come_and_go_keep_to_the_host_memory_of_the_plan(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """Requests in groups of many sizes, a third in host memory. No row is moved off the device by a merge."""
    keep_here(monkeypatch, 26)
    monkeypatch.setattr(PassTimes, "room", lambda *_: 120)
    monkeypatch.setattr(PassTimes, "max_batches", property(lambda _: 6))
    engine: Any = load("stream", checkpoint("llama"), "cpu", kv_offload="auto", kv_attention="cpu")
    expected = Workload(batch_size=40, input_len=20, output_len=12)
    batch, _ = passes.prefill(engine, *prompts((20,) * 40), 12)
    assert batch.host_rows == 14
    engine.retire(batch)
    dice = random.Random(3)
    texts = ([dice.randint(4, 90) for _ in range(20)] for _ in range(100))
    rows = [Sequence(text, 12 - key % 4, key=key, ignore_eos=True) for key, text in enumerate(texts)]
    running = ContinuousScheduler(engine, Words(), expected, 40, arrivals=True)  # type: ignore[arg-type]
    running.add(rows)
    planned = engine.plan.model.kv_bytes(14, expected.total_len)
    highest, merged = 0, 0
    while running.running:
        before = sum(batch.host_rows for batch in engine.batches)
        running.step()
        merged = max(merged, running.schedule.tally.merged)
        quantized_rows = sum(batch.host_rows for batch in engine.batches)
        highest = max(highest, engine._kv.pool.size)
        assert quantized_rows <= 20, before
    assert merged > 0
    assert 0 < highest <= 1.5 * planned
    assert all(row.finish_reason == "length" for row in rows)
