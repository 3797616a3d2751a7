"""Experts that the device brings beside the CPU: which they are, their bytes, and the sums of both.

The kernels run in a process of their own (`tests.interpreter`).
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpreted
from tests.running import equal, error
from tests.test_attend import compiler, fresh
from tests.test_codec import compile_for_h100
from tests.test_cpu_experts import FORMATS, Clamped, Swiglu, call, exact, made, quantised
from tests.test_experts import load, poisoned, steps
from zinfer.checkpoint.resolve import resolve
from zinfer.core.engine import OptionError, resolve_options
from zinfer.engine.stream.experts import expert_kernel, link
from zinfer.plan.times import linked_share
from zinfer.system import machines

FIXTURES = compiler, fresh
FP32 = torch.float32
SIZE = 5, 256, 256  # experts, hidden values, and values between
UNLIKE = ("nvfp4",)  # formats with a factor for each expert
ENGINES = ("gpt_oss mxfp4", "mixtral int4", "qwen3_moe")
# Tokens, choices of each, experts, share, slots.
SPLITS = [(1, 4, 128, 0.5, 2), (5, 4, 128, 0.5, 6), (3, 2, 5, 1.0, 9), (2, 3, 8, 0.4, 3), (33, 8, 512, 0.3, 40)]


def chosen_of(tokens: int, each: int, count: int) -> Tensor:
    """Return choices. Tokens share some, some name no expert, and the last rows are padding."""
    dice = torch.Generator().manual_seed(tokens * count)
    chosen = torch.stack([torch.randperm(count, generator=dice)[:each] for _ in range(tokens)])
    if tokens > 1:
        chosen[1] = chosen[0]
        chosen[-1] = count
        chosen[0, 0] = -1
    return chosen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run `main`, once."""
    path = tmp_path_factory.mktemp("link") / "results.pt"
    interpreted("tests.test_link_experts", path)
    return dict(torch.load(path, weights_only=False))


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_the_most_wanted_experts_come(case: Any, results: dict[str, Any]) -> None:
    (_tokens, _each, count, share, slots), chosen = case, chosen_of(*case[:3])
    experts, places, others, done = results[f"split {case}"]
    valid = chosen[(chosen >= 0) & (chosen < count)]
    uses = torch.bincount(valid, minlength=count)
    taken = experts[experts >= 0]
    assert len(taken) == min(slots, int(share * len(valid.unique()) + 0.5))
    assert len(experts) == slots
    assert torch.equal(experts[: len(taken)], taken), "slots without an expert come last"
    assert uses[taken].tolist() == uses.sort(descending=True).values[: len(taken)].tolist()
    known = torch.where(places >= 0, experts[places.clamp(min=0)], others)
    assert torch.equal(known, chosen), "each choice is the link's or the CPU's"
    assert not torch.isin(others[others >= 0], taken).any()
    assert (others[places >= 0] == -1).all()
    assert done.tolist() == [100 + len(taken), 200 + int(((others >= 0) & (others < count)).sum())]


def test_slots_get_the_bytes_of_their_experts(results: dict[str, Any]) -> None:
    source, experts, size, stride, slots = results["fill"]
    for number, expert in enumerate(experts.tolist()):
        slot = slots[number * stride :][:stride]
        assert equal(slot[size:], torch.full_like(slot[size:], 7)), "what follows an expert is spared"
        assert equal(slot[:size], slot.new_full((size,), 7) if expert < 0 else source[expert * stride :][:size])


@pytest.mark.parametrize("name", [*FORMATS, "turned mxfp4"])
def test_cpu_and_link_give_what_the_cpu_gives(name: str, results: dict[str, Any], compiler: None) -> None:
    if name not in results:
        pytest.skip("pip install 'zinfer[gguf]'")
    status, calls = results[name]
    assert status == ("experts of a layer are not stored alike" if name in UNLIKE else "on")
    for number, (spared, shared, alone, expected) in enumerate(calls):
        assert number == 0 or (spared > 0) == (name not in UNLIKE), "the CPU computes the others"
        assert error(shared, alone) < 2e-6
        assert error(shared, expected) < 4e-6
    assert torch.equal(calls[0][1], calls[2][1])


@pytest.mark.parametrize("name", ENGINES)
def test_engines_give_the_logits_of_experts_on_the_cpu(name: str, results: dict[str, Any], compiler: None) -> None:
    settings, alone, both = results[f"engine {name}"]
    assert all(error(*step) < 1e-4 for step in zip(both, alone, strict=True))
    assert (settings["cpu_experts"], settings["cpu_expert_link"]) == ("on", "on")
    assert settings["linked_share"] == 0.5
    each = 3 if name.startswith("qwen3") else 2
    linked = round(each / 2)
    assert settings["experts_fetched_per_step"] == linked
    assert settings["experts_on_cpu_per_step"] == each - linked


def test_a_link_that_computes_something_else_is_given_up(results: dict[str, Any], compiler: None) -> None:
    first, second, status = results["wrong"]
    assert status == "the kernel's results differ from those of the CPU's experts alone"
    assert torch.equal(first, second)


def test_without_kernels_the_cpu_computes_all(compiler: None) -> None:
    computed, values = made(Swiglu(), "mxfp4", SIZE, FP32, linked=0.5)
    given = call(3, SIZE[1], SIZE[0], FP32)
    assert error(computed.compute(0, *given), exact(Swiglu(), values, *given)) < 2e-6
    assert (computed.settings["cpu_expert_link"], computed.settings["linked_share"]) == ("no GPU", 0.0)
    assert computed.linked(0, 9) == 0


def test_experts_that_are_larger_than_all_slots_are_left_to_the_cpu(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "cannot_run", lambda _device: None)
    monkeypatch.setattr(link, "LINKED_BYTES", 1 << 10)
    computed, _ = made(Swiglu(), "mxfp4", SIZE, FP32, linked=0.5)
    assert computed.settings["cpu_expert_link"] == "an expert is larger than 0.00 GiB"
    assert computed.linked(0, 9) == 0


def test_shares_are_percentages_and_planned_where_there_is_a_link() -> None:
    h200, codes, fp8 = machines.load("h200"), resolve("gpt-oss-120b"), resolve("deepseek-v3")
    assert 0.25 < linked_share(h200, codes) < linked_share(h200, fp8) < 0.6, "the CPU is slower with FP8"
    assert linked_share(h200.model_copy(update={"h2d_bandwidth": None}), codes) == 0
    assert resolve_options("stream", {"link_experts": "25%"}) == (("link_experts", "25%"),)
    for wrong in ("4GB", "120%", "two"):
        with pytest.raises(OptionError, match=r"link_experts=.*choose from auto, 50%"):
            resolve_options("stream", {"link_experts": wrong})


def test_the_kernels_compile_for_an_h100() -> None:
    from zinfer.engine.stream.experts import link_kernel, request

    pointers = dict.fromkeys(("chosen", "experts", "places", "others", "done"), "*i64")
    constants = {"COUNT": 128, "WIDTH": 128, "STEP": 64, "PARTS": link_kernel.PARTS}
    compile_for_h100(link_kernel._split, constants, pointers, num_warps=8)
    pointers = {"source": "*i32", "experts": "*i64", "out": "*i32"}
    compile_for_h100(link_kernel._fill, {"BLOCK": link_kernel.WORDS}, pointers, num_warps=8)
    received = {"host": "*bf16", "done": "*i32", "linked": "*bf16", "out": "*bf16"}
    compile_for_h100(request._receive, {"BLOCK": request.RECEIVED}, received, num_warps=4)


def main(path: Path) -> None:
    """Run the kernels alone, beside the CPU, and in engines. Save what they give."""
    from zinfer.engine.stream.experts.link_kernel import fill, split

    torch.set_grad_enabled(False)
    results: dict[str, Any] = {}
    for case in SPLITS:
        tokens, each, count, share, slots = case
        done = torch.tensor([100, 200])
        results[f"split {case}"] = *split(chosen_of(tokens, each, count), count, slots, share, done), done
    size, stride = 20 * 1024 + 64, 24 * 1024
    source, experts = torch.randint(256, (6 * stride,), dtype=torch.uint8), torch.tensor([5, -1, 0, 3])
    out = torch.full((4 * stride,), 7, dtype=torch.uint8)
    fill(source, experts, out, size, stride, programs=3)
    results["fill"] = source, experts, size, stride, out

    expert_kernel.TILE = 1 << 18  # the interpreter is slow for each tile
    for name in FORMATS:
        with suppress(pytest.skip.Exception):
            results[name] = both(Swiglu(), name)
    results["turned mxfp4"] = both(Clamped(), "mxfp4")
    right = link.LinkExperts.compute
    link.LinkExperts.compute = lambda *given: 2 * right(*given)  # type: ignore[method-assign]
    computed, _ = made(Swiglu(), "mxfp4", SIZE, FP32, linked=0.5)
    given = call(3, SIZE[1], SIZE[0], FP32, each=2)
    results["wrong"] = computed.compute(0, *given), computed.compute(0, *given), computed._link.status
    link.LinkExperts.compute = right  # type: ignore[method-assign]

    for name in ENGINES:
        directory, options = quantised(name, path.parent / name.replace(" ", "-"), num_hidden_layers=1)
        logits = []
        for linked in ("0%", "50%"):
            loaded = load(directory, "cpu", link_experts=linked, **options)
            poisoned(loaded)
            logits.append(steps(loaded, 3, 2))
        results[f"engine {name}"] = loaded.effective().settings, *logits
    torch.save(results, path)


def both(module: Swiglu | Clamped, name: str) -> tuple[str, list[tuple[object, ...]]]:
    """Return the link's status, and for each call what it gave. That is the choices that the CPU was spared, and the
    results of both, of the CPU alone, and exact."""
    computed, values = made(module, name, SIZE, FP32, linked=0.5)
    calls, status = list[tuple[object, ...]](), str(computed._link.status)
    for tokens in (3, 1, 3):  # the first call is also computed by the CPU alone
        given = call(tokens, SIZE[1], SIZE[0], FP32, each=2)
        computed._link.status = status
        shared = computed.compute(0, *given)
        spared = int((computed._buffers[1][: given[1].numel()] < 0).sum())
        computed._link.status = "off"
        calls.append((spared, shared, computed.compute(0, *given), exact(module, values, *given)))
    return status, calls
