"""Routers of recorded passes: found by what modules compute, and the experts that they choose.

The kernel runs in a process of its own (`tests.interpreter`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.running import error
from tests.test_codec import compile_for_h100, need_triton
from zinfer.engine.stream.routers import Routers

# Settings of models, and whether the kernel serves their routers: others have sigmoids or a bias of the choice alone.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt_oss": ("gpt_oss", {"num_local_experts": 32}, True),
    "mixtral": ("mixtral", {"num_local_experts": 8}, True),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 24, "norm_topk_prob": True}, True),
    "olmoe": ("olmoe", {"num_experts": 16, "norm_topk_prob": False}, True),
    "deepseek_v3": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}, False),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8}, False),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def routers_of(kind: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Routers, nn.Module]:
    """Return a small model with random weights, and its routers."""
    name, settings, _ = KINDS[kind]
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 16}
    others = {
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
    }
    config = AutoConfig.for_model(name, **(shape | others | settings), num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False).to(device)
    dice = torch.Generator().manual_seed(3)
    routers = Routers(model, torch.device(device))
    for module, _ in routers.modules:
        for parameter in module.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=dice) / 4).to(device, dtype)
    return routers, model


def both(kind: str, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Return what each router gives for each number of tokens: by the model's own code, and by the kernel."""
    routers, _ = routers_of(kind, dtype, device)
    results = []
    for module, _ in routers.modules:
        for tokens in (1, 7):
            states = torch.randn((tokens, 64), generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
            expected = module(states)
            with routers.fused():
                results.append((expected, module(states)))
    return results


def first_of_equal(scores: Tensor, count: int) -> Tensor:
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]


def check(pairs: list[Any], dtype: torch.dtype) -> None:
    """Compare results of routers; two experts with one score may stand in any order, or be chosen one for the other."""
    for (scores, weights, numbers), actual in pairs:
        assert torch.equal(actual[0], scores)
        assert [each.dtype for each in actual] == [scores.dtype, weights.dtype, numbers.dtype]
        assert torch.equal(scores.gather(1, actual[2]), scores.gather(1, numbers))
        assert torch.equal(actual[2], first_of_equal(scores, numbers.shape[1]))
        assert error(actual[1], weights) < (1e-6 if weights.dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_routers_are_found_and_choose_the_same(kind: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    assert len(by_kernel[kind, dtype]) == (4 if KINDS[kind][2] else 0)
    check(by_kernel[kind, dtype], dtype)


def test_of_equal_scores_the_first_expert_is_chosen(by_kernel: dict[Any, Any]) -> None:
    """Scores that repeat, of both signs, infinite; NaN is the largest."""
    scores, weights, numbers = by_kernel["ties"]
    assert torch.equal(numbers, first_of_equal(scores, numbers.shape[1]))
    assert error(weights, scores.gather(1, numbers).softmax(-1)) < 1e-6
    scores, weights, numbers = by_kernel["nan"]
    assert numbers.tolist() == [[2, 5, 1]]
    assert weights.isnan().all()


def test_the_kernel_compiles_for_an_h100() -> None:
    need_triton()
    from zinfer.engine.stream import step_kernels as kernel

    constants = {"EXPERTS": 128, "COUNT": 4, "OF_ALL": True, "BLOCK": 128, "CHOSEN": 4}
    compile_for_h100(kernel._route, constants, {"scores": "*bf16", "weights": "*fp32", "numbers": "*i64"}, num_warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][2]])
def test_the_gpu_chooses_the_same(kind: str, dtype: torch.dtype) -> None:
    pairs = both(kind, dtype, "cuda")
    assert len(pairs) == 4
    check(pairs, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "count"), [(8, 2), (32, 4), (128, 8), (384, 8)])
def test_torch_takes_the_first_of_equal_scores_on_a_gpu(experts: int, count: int) -> None:
    """The experts are those of torch.topk, also where scores are equal."""
    from zinfer.engine.stream.step_kernels import route

    dice = torch.Generator().manual_seed(experts)
    scores = torch.randint(-3, 4, (500, experts), generator=dice).cuda().bfloat16()
    weights, numbers = route(scores, count, False, torch.float32)
    values, expected = scores.topk(count, -1)
    assert torch.equal(numbers.sort(-1).values, expected.sort(-1).values)
    assert error(weights, values.float().softmax(-1)) < 1e-6


def main(path: Path) -> None:
    """Save what routers choose by their own code and by the kernel."""
    from zinfer.engine.stream.step_kernels import route

    results: dict[Any, Any] = {(kind, dtype): both(kind, dtype) for kind in KINDS for dtype in DTYPES}
    scores = torch.randint(-3, 4, (20, 24), generator=torch.Generator().manual_seed(1)).float()
    scores[0, ::2], scores[1, 4:], scores[2] = -0.5, -torch.inf, 0
    results["ties"] = scores, *route(scores, 6, False, torch.float32)
    scores = torch.tensor([[0.0, 4.0, torch.nan, -1.0, 3.0, torch.nan, 1.0]])
    results["nan"] = scores, *route(scores, 3, False, torch.float32)
    torch.save(results, path)
