"""Code paths that only a GPU has: the tokens equal those of `transformers`, wherever weights and KV cache are.

These tests do not run by default (`pytest -m gpu`). `test_parity`, `test_stream` and `test_kv` check them on the CPU.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests import (
    Checkpoints,
    Patch,
    quantized,
    test_codec,
    test_continuous,
    test_cpu_experts,
    test_draft_model,
    test_drafts,
    test_experts,
    test_few_experts,
    test_graphs,
    test_low_bit,
    test_quantized,
    test_ragged,
    test_team_ways,
)
from tests import test_cache_kinds as kinds
from tests.checkpoints import save_checkpoint, save_config
from tests.running import decode, error, prefill
from tests.test_parity import BATCHES, OUTPUT_LEN, check_tokens, greedy, load, prompts, reference
from tests.test_passes import keep_here
from tests.test_state import GLM
from zinfer.core.case import Offload
from zinfer.core.model import ATTEND_THEMSELVES
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Work
from zinfer.engine.cache import RowCache, make_cache
from zinfer.engine.quantization.dequantize import expand
from zinfer.engine.stream import graphs
from zinfer.engine.stream.experts import few_experts
from zinfer.engine.stream.layer_graphs import BY_LAYER
from zinfer.engine.stream.weights import codec, low_bit
from zinfer.engine.stream.weights.codec import BLOCK, encode
from zinfer.engine.stream.weights.formats import encode_chunks, unpack
from zinfer.engine.transfer import to_device
from zinfer.engine.triton_check import trouble
from zinfer.generation import draft_model
from zinfer.plan.planner import make_plan

pytestmark = pytest.mark.gpu

kind = kinds.kind  # the fixture
mixture = test_experts.mixture  # the fixture
ARCHITECTURES = ("bloom", "opt", "llama", "gpt_neox", "falcon-old", "qwen2", "mixtral")
TURNS = 4  # copies that come too late show at some time


def follow(engine: Engine, given: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return a batch's logits under teacher forcing: ``[steps, B, V]``, on the CPU."""
    outputs = [prefill(engine, *prompts(lengths), reserve=OUTPUT_LEN)]
    outputs += [decode(engine, token.to(engine.device)) for token in given.unbind(1)[:-1]]
    return torch.stack(outputs).float().cpu()


def check(engine: Engine, directory: Path) -> None:
    for _ in range(TURNS):
        check_tokens(engine, directory)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device_rows", [0, 2])
@pytest.mark.parametrize("attention", ["gpu", "cpu"])
def test_a_kv_cache_in_host_memory_gives_the_same_tokens(
    architecture: str, attention: str, device_rows: int, checkpoint: Checkpoints
) -> None:
    directory = checkpoint(architecture)
    options: dict[str, Any] = {"kv_offload": "auto", "kv_attention": attention}
    check(load("stream", directory, "cpu", device_rows=device_rows, tokens=9, **options), directory)


@pytest.mark.parametrize("way", ["none", "weights", "rows", "cpu", "link"])
@pytest.mark.parametrize("name", kinds.KINDS)
def test_every_kind_of_layer_gives_the_same_tokens(name: str, way: str, kind: kinds.Kinds, tmp_path: Path) -> None:
    if way in ("cpu", "link") and name in (*kinds.STATES_ONLY, *ATTEND_THEMSELVES):
        pytest.skip("it has no keys and values, or attends to them itself")
    at_once = 1 if way == "rows" else None
    options: dict[str, Any] = {"cpu": {"kv_attention": "cpu"}, "link": {"kv_attention": "gpu"}}.get(way, {})
    if options:
        options |= {"kv_offload": "cpu"}
        config = AutoConfig.from_pretrained(kind(name))
        if not isinstance(make_cache(config, 1, 1), RowCache):
            pytest.skip("the cache that this transformers makes for it is not ours")
    engine = load("stream", kind(name), "none" if way == "none" else "cpu", tmp_path, tokens=at_once, **options)
    for _ in range(TURNS):
        assert torch.equal(greedy(engine, kinds.LENGTHS), kinds.expected(kind(name)))


def test_a_limit_of_the_gpu_memory_holds() -> None:
    """A process of its own, for the limit is its allocator's."""
    code = """
import torch
from types import SimpleNamespace
from zinfer.core.machine import Machine
from zinfer.engine import gpu_memory
total = torch.cuda.mem_get_info()[1]
whole = Machine(name="x", source="measured", gpu_count=1, gpu_bytes=total)
def limit(machine):
    gpu_memory.limit(SimpleNamespace(machine=machine, gpu=SimpleNamespace(overhead=600 << 20)))
limit(whole)
assert gpu_memory.free_and_total()[1] == total
limit(whole.limited(3 << 30))
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
free, limited = gpu_memory.free_and_total()
assert 1 << 30 < free <= limited - (1 << 30) < 2 << 30
try:
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("held")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "held\n"


@pytest.mark.parametrize(("name", "offload"), [("stream", "none"), ("stream", "cpu"), ("accelerate", "cpu")])
def test_persistent_buffers_keep_the_values_of_their_layers(name: str, offload: Offload, tmp_path: Path) -> None:
    directory = save_config(tmp_path / "glm", "glm4_moe", **GLM)
    check(load(name, directory, offload, tmp_path), directory)


@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_a_model_that_stays_can_have_its_cache_in_host_memory(architecture: str, checkpoint: Checkpoints) -> None:
    check(load("stream", checkpoint(architecture), "none", kv_offload="cpu"), checkpoint(architecture))


@pytest.mark.parametrize("device_rows", [0, 2])
@pytest.mark.parametrize("architecture", ["bloom", "llama", "gpt_neox"])
def test_in_8_bits_the_cache_is_the_same_wherever_it_is(
    architecture: str, device_rows: int, checkpoint: Checkpoints
) -> None:
    directory, lengths = checkpoint(architecture), BATCHES[0]
    given = reference(directory)[0]
    alone = load("stream", directory, "cpu", kv_cache_dtype="int8")
    expected = follow(alone, given, lengths)
    split = load("stream", directory, "cpu", device_rows=device_rows, kv_cache_dtype="int8", kv_offload="auto")
    for _ in range(TURNS):
        for actual, wanted in zip(follow(split, given, lengths), expected, strict=True):
            assert torch.allclose(actual, wanted, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("weight_codec", ["none", "lossless"])
@pytest.mark.parametrize("share", ["0%", "40%", "100%"])
def test_layers_that_stay_give_the_same_logits(
    share: str, weight_codec: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    directory, lengths = checkpoint("llama", hidden_size=256), BATCHES[0]
    given = reference(directory)[0]
    plain = load("stream", directory, "none", dtype="bfloat16", cuda_graphs="off")
    expected = follow(plain, given, lengths)
    options: dict[str, Any] = {"dtype": "bfloat16", "weight_codec": weight_codec, "cuda_graphs": "off"}
    either = load("stream", directory, "cpu", **options)
    plan, everything = either.plan, either.effective().host_weight_bytes
    either.plan = make_plan(plan.case.model_copy(update={"gpu_weights": share}), plan.model, plan.machine)
    alone = load("stream", directory, "cpu", gpu_weights=share, **options)
    assert (alone.effective().host_weight_bytes < everything) == (share != "0%")
    for engine in (either, alone):
        for unpacked in unpacked_ways(engine):
            for _ in range(TURNS):
                assert torch.equal(follow(engine, given, lengths), expected)
            assert engine.effective().settings["unpacked_layers"] == (0 if weight_codec == "none" else unpacked)


def unpacked_ways(engine: Any) -> Iterator[int]:
    """Keep none, all, one and none of the resident layers unpacked. Yields how many."""
    placement = engine.planner.plan.placement
    stay = placement.resident_layers
    for unpacked in ((), stay, stay[:1], ()):
        engine.apply_placement(placement.model_copy(update={"unpacked_layers": unpacked}))
        yield len(unpacked)


def test_a_batch_that_ran_out_of_memory_leaves_the_engine_usable(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    directory = checkpoint("llama")
    engine = load("stream", directory, "cpu", kv_offload="cpu", kv_attention="gpu")
    lengths, expected = BATCHES[0], reference(directory)[0]
    assert torch.equal(greedy(engine, lengths), expected)
    many = torch.ones((64, 9), dtype=torch.int64)
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr("zinfer.engine.stream.kv.link.LinkStore.append", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            prefill(engine, many, many, reserve=OUTPUT_LEN)
    assert torch.equal(greedy(engine, lengths), expected)


def no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def test_without_a_compiler_coded_weights_are_refused(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """Other tensors for the GPU are copied without a kernel then."""
    assert trouble() is None
    for name in ("zinfer.engine.stream.engine.trouble", "zinfer.engine.transfer.trouble"):
        monkeypatch.setattr(name, lambda: "no compiler")
    with pytest.raises(EngineError, match=r"none runs here: no compiler; install .*--weight-codec none"):
        load("stream", checkpoint("llama"), "cpu", dtype="bfloat16", weight_codec="lossless")
    assert torch.equal(to_device(torch.arange(3), torch.device("cuda")).cpu(), torch.arange(3))


@pytest.mark.parametrize("architecture", ["llama", "opt", "mixtral", "bloom"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_rows_of_several_micro_batches_share_a_pass(
    architecture: str, offload: Offload, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    test_ragged.check(load("stream", checkpoint(architecture), offload, tmp_path, cuda_graphs="off"), True)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_layers_of_other_kinds_share_a_pass_or_not(name: str, kind: kinds.Kinds) -> None:
    test_ragged.check(load("stream", kind(name), "cpu"), None)


WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "on the device": {},
    "over the link": {"kv_offload": "cpu", "kv_attention": "gpu"},
    "by the CPU": {"kv_offload": "cpu", "kv_attention": "cpu"},
    "some by the CPU": {"kv_offload": "auto", "kv_attention": "cpu"},
}
WAYS_OF_DRAFTS = [way for way in WAYS if way != "by the CPU"]


def load_small(way: str, directory: Path, patch: Patch, **options: Any) -> Any:
    """Load `stream` in one of `WAYS`, for passes of few rows."""
    test_continuous.small(patch)
    if way == "some by the CPU":
        keep_here(patch, 3)
    return load("stream", directory, "none" if way == "resident" else "cpu", **WAYS[way], **options)


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "resident"])
def test_sequences_that_come_and_go_get_the_tokens_of_each_alone(
    way: str, architecture: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    engine = load_small(way, checkpoint(architecture), monkeypatch)
    finished, limits, _ = test_continuous.come_and_go(engine)
    test_continuous.check(engine, finished, limits)


@pytest.mark.parametrize("wrong", [0, 0.4])
@pytest.mark.parametrize("architecture", ["llama", "bloom"])
@pytest.mark.parametrize("way", WAYS_OF_DRAFTS)
def test_drafts_leave_the_tokens_as_they_are(
    way: str, architecture: str, wrong: float, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    engine = load_small(way, checkpoint(architecture), monkeypatch)
    rows = test_continuous.sequences(14, 3)
    expected = test_drafts.answers(engine, rows)
    running = test_drafts.drafting(engine, monkeypatch, expected, wrong)
    finished = test_continuous.run(running, [rows[:5], rows[5:6], rows[6:]])
    assert running.drafts.accepted > 10
    running.end()
    test_drafts.check(finished, expected)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("architecture", ["llama", "bloom"])
@pytest.mark.parametrize("way", WAYS_OF_DRAFTS)
def test_a_model_that_drafts_leaves_the_tokens_as_they_are(
    way: str, architecture: str, noise: float, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A model that drafts has its own CUDA stream and graphs."""
    small_one = test_draft_model.like(checkpoint(architecture), tmp_path / "small", noise)
    engine = load_small(way, checkpoint(architecture), monkeypatch, draft=str(small_one))
    rows = test_continuous.sequences(14, 3)
    expected = test_drafts.answers(engine, rows)
    running = test_draft_model.drafting(engine, monkeypatch)
    finished = test_continuous.run(running, [rows[:5], rows[5:6], rows[6:]])
    drafted, accepted = running.drafts.drafted, running.drafts.accepted
    drafter = running.drafts.drafter
    assert isinstance(drafter, draft_model.ModelDrafter)
    assert drafter._stream not in (None, torch.cuda.default_stream())
    running.end()
    test_drafts.check(finished, expected)
    assert drafted > 20
    assert accepted > 0.9 * drafted if noise == 0 else 0 < accepted < drafted


@pytest.fixture
def small_buckets(monkeypatch: Patch) -> None:
    """Have lengths of CUDA graphs grow in small steps."""
    monkeypatch.setattr(graphs, "TUNED", replace(graphs.TUNED, bucket=8))


@pytest.mark.usefixtures("small_buckets")
def test_kernels_take_the_place_of_the_models_own(kind: kinds.Kinds) -> None:
    """Norms, products, positions, routers, new keys, and attention with sinks."""
    engine: Any = load("stream", kind("gpt_oss"), "none", dtype="float32", cuda_graphs="auto")
    lengths = kinds.LENGTHS[:1]  # for more pairs of a token and one of two experts transformers' code waits for the GPU
    assert torch.equal(greedy(engine, lengths), kinds.expected(kind("gpt_oss"), lengths))
    settings = engine.effective().settings
    assert (settings["cuda_graphs"], settings["graph_kernels"]) == ("on", "on")
    assert all(kernels.places for kernels in engine._graphs._replaced)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_graphs_give_the_same_tokens(architecture: str, checkpoint: Checkpoints) -> None:
    engine = load("stream", checkpoint(architecture), "none", cuda_graphs="auto")
    for _ in range(TURNS):
        check_tokens(engine, checkpoint(architecture))
    state = str(engine.effective().settings["cuda_graphs"])
    # Experts in float32 that no kernel takes are computed one after the other, by numbers that the CPU waits for;
    # Falcon waits for its mask.
    waits = architecture in ("mixtral", "falcon-old")
    assert state == "on" or (waits and state.startswith("a decode step cannot be recorded")), state


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "bloom"])
@pytest.mark.parametrize(("offload", "share"), [("none", None), ("cpu", "100%"), ("cpu", "34%")])
def test_cuda_graphs_give_the_same_logits(
    offload: Offload, share: str | None, architecture: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Experts' dispatch is recorded, as is the unpacking of resident coded layers."""
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    directory, lengths = checkpoint(architecture, hidden_size=256), BATCHES[0]
    given, runs = reference(directory)[0], []
    for option in ("off", "auto"):
        options: dict[str, Any] = {"cuda_graphs": option, "weight_codec": "none" if offload == "none" else "lossless"}
        engine = load("stream", directory, offload, tmp_path, dtype="bfloat16", experts="all", **options)
        plan = engine.plan
        if share is not None:
            engine.plan = make_plan(plan.case.model_copy(update={"gpu_weights": share}), plan.model, plan.machine)
        on = BY_LAYER if share == "34%" else "on"
        for _ in unpacked_ways(engine) if share is not None else (0,):
            runs += [follow(engine, given, lengths) for _ in range(TURNS)]
            assert engine.effective().settings["cuda_graphs"] == {"off": "off", "auto": on}[option]
    for run in runs[1:]:
        for actual, expected in zip(run, runs[0], strict=True):
            assert graphs.alike(actual.bfloat16(), expected.bfloat16())


@pytest.mark.usefixtures("small_buckets")
def test_cuda_graphs_of_micro_batches_that_come_and_go(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    test_continuous.small(monkeypatch)
    engine = load("stream", checkpoint("llama"), "none", cuda_graphs="auto")
    finished, limits, _ = test_continuous.come_and_go(engine)
    assert engine.effective().settings["cuda_graphs"] == "on"
    test_continuous.check(engine, finished, limits)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("keep_all", [True, False])
def test_cuda_graphs_of_steps_with_several_tokens(keep_all: bool, checkpoint: Checkpoints) -> None:
    runs = []
    for option in ("off", "auto"):
        engine = load("stream", checkpoint("llama"), "none", cuda_graphs=option)
        runs.append(test_graphs.verified(engine, keep_all))
        assert engine.effective().settings["cuda_graphs"] == {"off": "off", "auto": "on"}[option]
        assert engine._graphs.takes_several, "none failed"  # type: ignore[attr-defined]
    assert all(graphs.alike(actual, expected) for actual, expected in zip(*runs, strict=True))


def test_a_step_that_waits_for_the_gpu_is_not_recorded(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """The device, its memory and its random numbers are as before; so are tokens."""
    for rehearsed in (True, False):
        if not rehearsed:  # recorded all the same: it fails
            monkeypatch.setattr(graphs.CudaRecorder, "_rehearse", lambda _self, run: run())
        engine: Any = load("stream", checkpoint("llama"), "none", cuda_graphs="auto")
        engine.model.register_forward_hook(lambda _module, _args, output: float(output.logits.sum()) and None)
        check_tokens(engine, checkpoint("llama"))
        assert str(engine.effective().settings["cuda_graphs"]).startswith("a decode step cannot be recorded")
        torch.cuda.empty_cache()
        assert bool(torch.rand(9, device="cuda").isfinite().all())


@pytest.mark.parametrize("name", test_quantized.FORMATS)
def test_quantised_weights_are_unpacked_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    if name in quantized.COMPRESSED:
        pytest.importorskip("compressed_tensors")
    directory = test_quantized.FORMATS[name](tmp_path / "m")
    device = torch.device("cuda")
    for entry, expected, several in test_quantized.matrices(directory):
        out, offset = torch.full_like(expected, float("nan"), device=device).view(-1), 0
        for codes in several or ():
            for layout, data in encode_chunks(codes.to(device), expected.dtype, 4000):
                unpack(data, layout, out[offset : offset + layout.numel])
                offset += layout.numel
        assert torch.equal(out.view(expected.shape).cpu(), expected), entry


@pytest.mark.parametrize("name", test_codec.MATRICES)
def test_coded_rows_in_fp8_are_unpacked_as_on_the_cpu(name: str) -> None:
    layout, data, expected = test_codec.matrix(name)
    out = torch.full_like(expected, float("nan"), device="cuda")
    unpack(data.cuda(), layout, out)
    assert test_codec.equal(out.cpu(), expected)


def test_codes_in_fp8_are_coded_as_on_the_cpu() -> None:
    values = test_codec.fp8(3 * BLOCK + 5)
    on_cpu, there = encode(values), encode(values.cuda())
    assert on_cpu is not None
    assert there is not None
    assert test_codec.same(test_codec.decoded(on_cpu), values)
    assert test_codec.same(test_codec.decoded(replace(there, data=there.data.cpu())), values)


@pytest.fixture
def humming() -> None:
    if (why_not := low_bit.cannot_run(torch.device("cuda"))) is not None:
        pytest.skip(why_not)


@pytest.mark.usefixtures("humming")
@pytest.mark.parametrize("name", test_low_bit.CASES | test_low_bit.LARGE)
def test_products_from_codes_are_those_of_unpacked_weights(name: str) -> None:
    """One token up to a prompt; experts with two of them a token."""
    shape, dtype = (test_low_bit.CASES | test_low_bit.LARGE)[name][0], test_low_bit.type_of(name)
    codes, dice = test_low_bit.codes_of(name).to(torch.device("cuda")), torch.Generator("cuda").manual_seed(3)
    form = low_bit.form_of(test_low_bit.parts_of(codes, 3), shape, dtype)
    assert form is not None
    matrix, weights = low_bit.prepare(form, dtype), expand(codes, dtype).view(shape)
    unpacked = torch.empty_like(weights)
    matrix.unpack(unpacked)
    print(f"{name}, unpacked: error {error(unpacked, weights):.1e}")
    assert error(unpacked, weights) < (0.008 if codes.minimums else 0.004)
    for count in (1, 3, 16, 64, 300) if name in test_low_bit.CASES else (1, 3, 16):
        states = torch.randn((count, form.columns), generator=dice, device="cuda").to(dtype)
        if not form.experts:
            actual, expected = matrix.multiply(states), states.double() @ weights.double().t()
        else:
            experts = torch.rand((count, form.experts), generator=dice, device="cuda").topk(2, 1).indices
            each = states.double().repeat_interleave(2, 0)
            inputs = states if count % 2 else each.to(dtype)  # a row for each token, or for each pair
            actual = matrix.multiply_pairs(inputs, experts, {}).double().sum(1)
            expected = torch.einsum("pi,poi->po", each, weights.double()[experts.flatten()])
        print(f"{name}, {count} tokens: error {error(actual, expected):.1e}")
        assert error(actual, expected) < (0.008 if codes.minimums else 0.006)


@pytest.mark.usefixtures("humming")
@pytest.mark.parametrize("share", ["60%", "100%"])
@pytest.mark.parametrize("name", ["int4 asymmetric", "nvfp4", "gptq of 8 bits", "mxfp4 of experts"])
def test_layers_that_stay_packed_give_the_same_logits(name: str, share: str, tmp_path: Path) -> None:
    """With CUDA graphs where all of them stay; the layer buffer holds NaN before a layer is put there."""
    if name in quantized.COMPRESSED:
        pytest.importorskip("compressed_tensors")
    directory, outputs, given = test_quantized.FORMATS[name](tmp_path / "m"), list[Tensor](), dict[int, Tensor]()
    for option in ("off", "auto"):
        settings = {"cuda_graphs": "auto", "dtype": "bfloat16", "experts": "all"}
        engine = test_low_bit.start(directory, share, kernel=option == "auto", **settings)
        for lengths in ((9, 5, 7), (6,), (9, 5, 7)):
            given.setdefault(len(lengths), greedy(engine, lengths))
            outputs.append(follow(engine, given[len(lengths)], lengths))
        assert test_low_bit.status_of(engine) == {"off": "no packed weights", "auto": "on"}[option]
        if share == "100%" and (option == "auto" or "experts" not in name):  # transformers' experts wait for the GPU
            assert not re.search("cannot be recorded|differ", str(engine.effective().settings["cuda_graphs"]))
    for actual, other in zip(outputs[3:], outputs[:3], strict=True):
        assert error(actual, other) < 0.05


@pytest.mark.parametrize("name", ["fp8 of experts", "gptq"])
def test_streamed_codes_give_the_tokens_of_dequantised_weights(name: str, tmp_path: Path) -> None:
    directory = test_quantized.FORMATS[name](tmp_path / "m")
    ways = (load("stream", directory, "cpu", dtype="bfloat16", weight_codec=way) for way in ("none", "lossless"))
    assert torch.equal(*(greedy(engine, (5, 9, 3)) for engine in ways))


@pytest.mark.parametrize("share", [None, "60%", "100%"])
@pytest.mark.parametrize("name", test_experts.MIXTURES)
def test_experts_on_demand_give_the_tokens_of_whole_layers(
    name: str, share: str | None, mixture: kinds.Kinds, monkeypatch: Patch
) -> None:
    """Passes that bring all experts alternate with passes that bring some. Nothing else in the slot is read."""
    engine = test_experts.load(mixture(name), share=share)
    test_experts.poisoned(engine)
    check(engine, mixture(name))
    test_ragged.check(engine, None)
    assert engine.effective().settings["experts"] == "on-demand"


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("share", "state"), [("100%", "on"), ("0%", BY_LAYER)])
@pytest.mark.parametrize("linked", ["0%", "50%"])
@pytest.mark.parametrize("name", ["gpt_oss mxfp4", "mixtral int4", "qwen3_moe fp8", "qwen3_moe"])
def test_experts_on_the_cpu_are_part_of_cuda_graphs(
    name: str, linked: str, share: str, state: str, tmp_path: Path
) -> None:
    """The device may bring a share of them beside the CPU."""
    directory, options = test_cpu_experts.quantised(name, tmp_path / "m")
    runs = list[list[Tensor]]()
    for experts in ("on-demand", "cpu"):
        engine = test_experts.load(directory, experts, share, link_experts=linked, **options)
        runs += [[greedy(engine, lengths) for lengths in BATCHES] for _ in range(TURNS)]
        settings = engine.effective().settings
    assert (settings["cpu_experts"], settings["cuda_graphs"]) == ("on", state)
    assert settings["cpu_expert_link"] == ("off" if linked == "0%" else "on")
    assert (settings["experts_fetched_per_step"] > 0) == (linked != "0%" and settings["cpu_expert_layers"] > 0)
    for run in runs:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("name", ["gpt_oss mxfp4", "mixtral int4", "qwen3_moe"])
def test_experts_of_layers_that_stay_are_computed_beside_the_cpu(name: str, tmp_path: Path) -> None:
    """Its kernels read their codes, in prompts and in CUDA graphs; each kind of call is compared with transformers."""
    # As many heads of keys as of queries: kernels pad a matrix of fewer than 128 rows, which the plan does not count.
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
    directory, options = test_cpu_experts.quantised(name, tmp_path / "m", **sizes)
    for count in (0, 2, 4):
        share = test_cpu_experts.share_of(directory, count)
        engine = test_experts.load(directory, "cpu", share, dtype="bfloat16", link_experts="0%", **options)
        for _ in range(TURNS):
            for lengths in BATCHES:
                assert greedy(engine, lengths).shape == (len(lengths), OUTPUT_LEN)
        settings, planned = engine.effective().settings, engine.plan.gpu.weights
        assert (settings["gpu_expert_layers"], settings["cpu_expert_layers"]) == (count, 4 - count)
        assert (settings["cpu_experts"], settings["experts_fetched_per_step"]) == ("on", 0)
        assert not re.search("cannot be recorded|cross the link", str(settings["cuda_graphs"]))
        if count and name != "qwen3_moe":
            assert (settings["packed_kernel"], settings["experts_kernel"]) == ("on", "on")
        assert engine.effective().gpu_weight_bytes == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("name", ["mixtral int4", "qwen3_moe"])
def test_experts_on_the_cpu_serve_rows_of_two_streams(name: str, tmp_path: Path) -> None:
    """The CPU attends to host rows in a stream of their own; device rows ask for experts meanwhile."""
    directory, options = test_cpu_experts.quantised(name, tmp_path / "m")
    expected = test_experts.load(directory, **options)
    wanted = [greedy(expected, lengths) for lengths in BATCHES]
    options |= {"kv_offload": "auto", "kv_attention": "cpu", "cuda_graphs": "off"}
    engine = load("stream", directory, "cpu", device_rows=1, dtype="float32", experts="cpu", **options)
    for _ in range(TURNS):
        assert all(map(torch.equal, [greedy(engine, lengths) for lengths in BATCHES], wanted))
    assert engine.effective().settings["cpu_experts"] == "on"


@pytest.mark.parametrize("name", test_cpu_experts.NAMES)
def test_every_call_of_experts_on_the_cpu_gives_what_the_model_computes(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    test_cpu_experts.check_calls(name, tmp_path / "m", monkeypatch, lambda engine: greedy(engine, BATCHES[0]))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("name", test_experts.MIXTURES)
def test_experts_of_few_tokens_give_the_same_tokens(name: str, mixture: kinds.Kinds) -> None:
    """Kernels for them and CUDA graphs: steps of one and of three rows, which are believed only if nothing differs."""
    lengths, runs = ((9, 5, 7), (6,)), list[list[Tensor]]()
    for option in ("off", "auto"):
        engine: Any = load("stream", mixture(name), "none", dtype="float32", cuda_graphs="auto", experts_kernel=option)
        runs += [[greedy(engine, batch) for batch in lengths] for _ in range(TURNS)]
        settings = engine.effective().settings
        assert settings["experts_kernel"] == {"off": "off", "auto": "on"}[option]
        if option == "auto":
            assert {kind[-1][0] for kind in engine._few_experts._checked} >= {1}
            assert not re.search("cannot be recorded|differ", str(settings["cuda_graphs"]))
    for run in runs:
        assert all(map(torch.equal, run, runs[0]))


def test_kernels_for_few_tokens_round_as_transformers_does() -> None:
    """Tiles as on a GPU, in shapes of Mixtral and gpt-oss."""
    sizes: dict[str, dict[str, Any]] = {
        "mixtral": {"hidden_size": 1024, "intermediate_size": 3584},
        "gpt_oss": {"hidden_size": 720, "intermediate_size": 720},
    }
    for name, size in sizes.items():
        _, module = test_few_experts.experts_of(name, **size)
        for dtype in (torch.bfloat16, torch.float32):
            module.to("cuda", dtype)
            for count in (1, 2, 4):
                states = [tensor.cuda() for tensor in test_few_experts.call(module, count, dtype)]
                assert few_experts._serves(module, *states)
                actual = few_experts.compute(module, *states)
                expected = test_few_experts.eager(module, *states)
                bound = 1e-5 if dtype == torch.float32 else 0.02
                assert error(actual, expected) < bound
                assert torch.equal(actual, few_experts.compute(module, *states))


@pytest.mark.parametrize("source", ["bf16", "fp8"])
@pytest.mark.parametrize("share", [None, "50%"])
def test_coded_experts_on_demand_give_the_logits_of_whole_layers(
    source: str, share: str | None, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    if source == "bf16":  # an expert's matrices are large enough to be encoded
        sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 2048}
        directory = save_config(tmp_path / "m", "mixtral", num_local_experts=4, **sizes)
    else:
        directory = test_quantized.FORMATS["fp8 of experts"](tmp_path / "m")
    given, outputs = torch.arange(5, 5 + OUTPUT_LEN).expand(2, -1), list[Tensor]()
    for experts in ("all", "on-demand"):
        settings = {"dtype": "bfloat16", "weight_codec": "lossless", "cuda_graphs": "off"}  # graphs round elsewhere
        engine = test_experts.load(directory, experts, share, **settings)
        outputs += [follow(engine, given, (5, 9)) for _ in range(TURNS)]
    assert all(torch.equal(actual, outputs[0]) for actual in outputs)


def test_deepspeed_reads_page_locked_memory_of_the_arena(checkpoint: Checkpoints) -> None:
    pytest.importorskip("deepspeed")
    engine: Any = load("deepspeed", checkpoint("bloom"), "cpu")
    parts = [engine._parameters[name].ds_tensor for name in engine._offloaded]
    assert all(part.is_pinned() for part in parts)
    assert engine.effective().pinned_bytes >= sum(part.nbytes for part in parts)
    check(engine, checkpoint("bloom"))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "over the link": ("llama", {"device_rows": 1, "kv_offload": "auto", "kv_attention": "gpu"}),
    "by the CPU": ("bloom", {"device_rows": 1, "kv_offload": "auto", "kv_attention": "cpu"}),
    "mixture": ("mixtral", {}),
}


@two_gpus
@pytest.mark.parametrize("way", SHARED)
def test_two_gpus_give_the_same_tokens(way: str, checkpoint: Checkpoints) -> None:
    architecture, options = SHARED[way]
    engine = load("stream", checkpoint(architecture), "cpu", gpus=2, **options)
    assert engine.effective().pinned_bytes == engine.effective().host_weight_bytes
    check(engine, checkpoint(architecture))


@two_gpus
@pytest.mark.parametrize("way", test_team_ways.WAYS)
def test_two_gpus_give_the_logits_of_one(way: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    name, options = test_team_ways.WAYS[way]
    folder = quantized.fp8(save_checkpoint("llama", tmp_path, 512)) if name == "fp8" else checkpoint(name, 512)
    by_cpu = options.get("kv_attention") == "cpu"
    options = {"dtype": "float32" if by_cpu else "bfloat16"} | options
    single = load("stream", folder, "cpu", **options)
    team = load("stream", folder, "cpu", **options, gpus=2)
    for _ in range(TURNS):
        test_team_ways.check_alike(team, single, 1e-4 * by_cpu)


@two_gpus
def test_sequences_that_come_and_go_on_two_gpus(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    test_continuous.small(monkeypatch)
    team = load("stream", checkpoint("llama"), "cpu", gpus=2)
    single = load("stream", checkpoint("llama"), "cpu")
    finished, limits, _ = test_continuous.come_and_go(team)
    test_continuous.check(single, finished, limits)


@two_gpus
def test_the_gather_of_two_gpus_has_a_queue_of_its_own(checkpoint: Checkpoints) -> None:
    engine = load("stream", checkpoint("llama", 512), "cpu", gpus=2)
    tokens = prefill(engine, *prompts(BATCHES[0]), reserve=OUTPUT_LEN).argmax(-1)
    spans = engine.timeline([Work(engine.batches[-1], tokens[:, None])])
    assert {"copy", "gather", "unpack", "compute"} == {span.lane for span in spans}


@two_gpus
def test_a_process_of_two_gpus_that_is_killed_ends_the_worker(checkpoint: Checkpoints) -> None:
    test_team_ways.test_a_rank_that_is_killed_ends_the_worker(checkpoint)
