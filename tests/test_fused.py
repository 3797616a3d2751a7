"""Kernels of recorded decode steps: found by what modules compute, with the results of the model's own code.

The kernels run in a process of their own (`tests.interpreter`).
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM

from tests import Checkpoints, Patch
from tests.running import error
from tests.test_codec import compile_for_h100
from tests.test_graphs import Rerun, status
from tests.test_graphs import recorder as recorder  # the fixture
from tests.test_parity import check_tokens, load
from zinfer.engine.stream import graphs
from zinfer.engine.stream.fused import MAX_TOKENS, ROTATION, Kernels, Linears, Norms, Rotations, Routers
from zinfer.engine.stream.layer_graphs import DIFFERS

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
# Norms of two layers, and the last one. Gemma's are multiplied by 1 + weight, BLOOM's subtract the mean.
NORMS = {"llama": 5, "mixtral": 5, "qwen3": 9, "gpt_oss": 5, "gemma": 0, "bloom": 0}
# Parts of a head with angles that the kernel serves. Cohere turns neighbours against each other, BLOOM turns nothing.
FORMS = {"llama": {1}, "mixtral": {1}, "gpt_oss": {2}, "cohere": set[int](), "bloom": set[int]()}
TURNED = ((1, 32, 8, 1, 128), (3, 5, 1, 2, 24))  # rows, heads of queries and of keys, tokens, size
# Settings of models, and whether the kernel serves their routers: others have sigmoids or a bias of the choice alone.
ROUTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt_oss": ({"num_local_experts": 32}, True),
    "mixtral": ({"num_local_experts": 8}, True),
    "qwen3_moe": ({"num_experts": 24, "norm_topk_prob": True}, True),
    "olmoe": ({"num_experts": 16, "norm_topk_prob": False}, True),
    "deepseek_v3": ({"n_routed_experts": 8, "n_group": 2, "topk_group": 1}, False),
    "minimax_m2": ({"num_local_experts": 8}, False),
}
# Columns, and rows of matrices of one launch: fewer rows than a program has, and a number that no block divides.
SHAPES = ((64, (64,)), (288, (96, 32, 32)), (300, (37, 3)), (8200, (5,)))
PROGRAMS = 8  # so that programs of most shapes have several rows


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=dice).to(dtype)


def model_of(name: str, dtype: torch.dtype, **settings: Any) -> Any:
    """Return a small model of two layers with random norms."""
    shape: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    if name == "bloom":
        shape = {"n_layer": 2, "hidden_size": 64}
    else:
        shape |= {"head_dim": 16, "intermediate_size": 96, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        shape |= {"num_local_experts": 4} | settings
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape), dtype=dtype)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + drawn(len(parameter), dtype=torch.float32).to(parameter.dtype) / 2
    return model


def both(kernels: Kernels, *inputs: Tensor) -> list[tuple[Any, Any]]:
    """Return what each module gives for each input: by its own code, and by the kernel."""
    results = []
    for _, _, kernel in kernels.places:
        module = kernel.args[0]  # type: ignore[attr-defined]
        for states in inputs:
            expected = module(states[..., : module.weight.shape[-1]])
            with kernels.fused():
                results.append((expected, module(states[..., : module.weight.shape[-1]])))
        assert "forward" not in vars(module)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_found_and_give_the_same(name: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    pairs = by_kernel["norms of", name, dtype]
    assert len(pairs) == NORMS[name]
    for expected, output in pairs:
        assert output.dtype == expected.dtype
        assert torch.allclose(output, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


class Centered(nn.Module):
    """Norm that resembles an RMS norm by name and weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.layer_norm(states, (64,), self.weight, eps=self.variance_epsilon)


class Gated(Centered):
    """Norm of two tensors."""

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(states) * gate


def with_another(norm: type[nn.Module]) -> int:
    """Return how many norms are found where the last one is another."""
    model = model_of("llama", torch.float32)
    model.model.norm = norm()
    return len(Norms(model, CPU).places)


def test_what_computes_something_else_stays(by_kernel: dict[Any, Any]) -> None:
    assert by_kernel["others"] == [NORMS["llama"] - 1] * 2


@pytest.mark.parametrize("way", ["differs", "fails"])
def test_a_pass_that_goes_wrong_with_them_is_not_recorded(
    way: str, checkpoint: Checkpoints, monkeypatch: Patch, recorder: Rerun
) -> None:
    def wrong(states: Tensor) -> Tensor:
        if way == "fails":
            raise ValueError("no such kernel")
        return -states

    def find(self: Any, _device: torch.device) -> None:
        kernels = Kernels()
        for name, module in self._model.named_modules():
            kernels.places += [(vars(module), "forward", wrong)] if name.endswith("norm") else []
        self._replaced, self.kernels = [kernels], "on"

    monkeypatch.setattr(graphs.Graphs, "_find_kernels", find)
    engine = load("stream", checkpoint("llama"), "none")
    for _ in range(3):
        check_tokens(engine, checkpoint("llama"))
    assert status(engine) == {"differs": DIFFERS, "fails": "a decode step cannot be recorded: no such kernel"}[way]
    assert engine.effective().settings["graph_kernels"] == "on"


def inputs(shape: tuple[int, ...], part: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys as models have them, cosines and sines."""
    rows, heads, key_heads, count, size = shape
    query = drawn(rows, count, heads, size, dtype=dtype).transpose(1, 2)
    keys = drawn(rows, count, 2 * key_heads, size, dtype=dtype)[:, :, :key_heads].transpose(1, 2)
    angles = drawn(rows, count, size // 2, dtype=torch.float32)
    angles = torch.cat((angles, angles), -1) if part == 1 else angles
    return query, keys, angles.cos().to(dtype), angles.sin().to(dtype)


def turned(name: str, dtype: torch.dtype) -> list[Any]:
    """Return forms, equal results, and whether the function is back."""
    model = model_of(name, dtype)
    scope = vars(sys.modules[type(model).__module__])
    function: Any = scope.get(ROTATION)
    rotations = Rotations(model, CPU)
    forms = {part for *_, kernel in rotations.places for part in kernel.args[1]}  # type: ignore[attr-defined]
    equal = list[bool]()
    for shape in TURNED:
        for part in forms:
            given, limit = inputs(shape, part, dtype), 0.0 if dtype.itemsize == 2 else 1e-6
            with rotations.fused():
                results, other = scope[ROTATION](*given), scope[ROTATION](*given, unsqueeze_dim=1)
            expected = function(*given)
            pairs = [*zip(results, expected, strict=True), (other[0], expected[0])]
            equal += [float((a - b).abs().max()) <= limit for a, b in pairs]
    return [forms, equal, len(rotations.places), scope.get(ROTATION) is function]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_rotations_are_found_and_give_the_same(name: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    forms = FORMS[name]
    assert by_kernel["turned", name, dtype] == [forms, 3 * len(TURNED) * len(forms) * [True], bool(forms), True]


def routed(kind: str, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Return what each router gives for 1 and 7 tokens: by the model's own code, and by the kernel."""
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "intermediate_size": 32, "num_experts_per_tok": 4}
    settings = sizes | {"first_k_dense_replace": 0} | ROUTERS[kind][0]
    model = model_of(kind, dtype, **settings).to(device)
    routers = Routers(model, torch.device(device))
    for scope, *_ in routers.places:
        for parameter in scope["_parameters"].values():
            parameter.data = (drawn(*parameter.shape, dtype=torch.float32) / 4).to(device, dtype)
    return both(routers, *(drawn(tokens, 64, dtype=dtype).to(device) for tokens in (1, 7)))


def first_of_equal(scores: Tensor, count: int) -> Tensor:
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]


def check_routers(pairs: list[Any], dtype: torch.dtype) -> None:
    """Compare results of routers; two experts with one score may stand in any order, or be chosen one for the other."""
    for (scores, weights, numbers), actual in pairs:
        assert torch.equal(actual[0], scores)
        assert [each.dtype for each in actual] == [scores.dtype, weights.dtype, numbers.dtype]
        assert torch.equal(scores.gather(1, actual[2]), scores.gather(1, numbers))
        assert torch.equal(actual[2], first_of_equal(scores, numbers.shape[1]))
        assert error(actual[1], weights) < (1e-6 if weights.dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_are_found_and_choose_the_same(kind: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    pairs = by_kernel["routed", kind, dtype]
    assert len(pairs) == (4 if ROUTERS[kind][1] else 0)
    check_routers(pairs, dtype)


def test_of_equal_scores_the_first_expert_is_chosen(by_kernel: dict[Any, Any]) -> None:
    """Scores that repeat, of both signs, infinite; NaN is the largest."""
    scores, weights, numbers = by_kernel["ties"]
    assert torch.equal(numbers, first_of_equal(scores, numbers.shape[1]))
    assert error(weights, scores.gather(1, numbers).softmax(-1)) < 1e-6
    scores, weights, numbers = by_kernel["nan"]
    assert numbers.tolist() == [[2, 5, 1]]
    assert weights.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in ROUTERS if ROUTERS[kind][1]])
def test_the_gpu_chooses_the_same(kind: str, dtype: torch.dtype) -> None:
    pairs = routed(kind, dtype, "cuda")
    assert len(pairs) == 4
    check_routers(pairs, dtype)


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


def multiplied(tokens: int, columns: int, rows: tuple[int, ...], biased: bool, dtype: torch.dtype) -> list[Any]:
    """Return products of one launch, each with that in double precision."""
    from zinfer.engine.stream.step_kernels import products

    states = drawn(tokens, columns, dtype=dtype)
    weights = [drawn(count, columns, dtype=dtype) / 16 for count in rows]
    biases = [drawn(count, dtype=dtype) if biased else None for count in rows]
    expected = [
        linear(states.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return list(zip(products(states, weights, biases), expected, strict=True))


def normed_states(dtype: torch.dtype) -> list[Any]:
    from zinfer.engine.stream.step_kernels import normed

    results = []
    for shape in ((1, 1, 288), (3, 2, 64)):
        states, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
        plain, turned = rms_norm(states.double(), shape[-1:], eps=1e-5), states.transpose(0, 1)
        results.append((normed(states, weight, 1e-5, False), plain * weight))
        results.append((normed(turned, weight, 1e-5, True), (plain.to(dtype) * weight).transpose(0, 1)))
    return results


def appended(dtype: torch.dtype) -> list[Any]:
    """Return memories with new keys and values, by kernel and torch."""
    from zinfer.engine.stream.step_kernels import append

    memories = [torch.zeros(2, 3, 9, size, dtype=dtype) for size in (16, 12)]
    new = [drawn(2, 2, 3, size, dtype=dtype).transpose(1, 2) for size in (16, 12)]
    slots = torch.tensor([5, 2])
    expected = [memory.clone().index_copy_(2, slots, each) for memory, each in zip(memories, new, strict=True)]
    append(memories[0][:, :, :7], memories[1][:, :, :7], new[0], new[1], slots)
    return list(zip(memories, expected, strict=True))


def summed_parts(dtype: torch.dtype) -> list[Any]:
    from zinfer.engine.stream.weights.align_kernel import summed

    partial, bias = drawn(3, 5, 300, dtype=dtype), drawn(300, dtype=dtype)
    return [(summed(partial, None), partial.double().sum(1)), (summed(partial, bias), partial.double().sum(1) + bias)]


class Attention(nn.Module):
    """Matrices as models call them: three with the same states, one with others, and one of equal width."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, rows, dtype=dtype) for rows in (64, 16, 16, 64))
        self.up = nn.Linear(64, 48, bias=False, dtype=dtype)

    def forward(self, states: Tensor) -> list[Tensor]:
        mixed = self.q(states)
        outputs = [mixed, self.k(states), self.v(states)]
        other = self.o(mixed)
        return [*outputs, other, self.up(other), self.q(other)]


def called(dtype: torch.dtype) -> list[Any]:
    """Return results of a module and of the kernel, and its launches."""
    from zinfer.engine.stream import step_kernels

    torch.manual_seed(1)
    module, launches = Attention(dtype).requires_grad_(False), list[int]()
    linears, kernel = Linears([module]), step_kernels.products

    def counted(states: Tensor, weights: Any, biases: Any) -> list[Tensor]:
        launches.append(len(weights))
        return kernel(states, weights, biases)

    step_kernels.products = counted
    results = []
    for tokens in (1, 1, MAX_TOKENS, MAX_TOKENS + 1):
        states = drawn(tokens, 1, 64, dtype=dtype)
        launches.clear()
        with linears.fused():
            output = module(states)
        results.append((module(states), output, tuple(launches)))
    step_kernels.products = kernel
    return results


@pytest.mark.parametrize("kernel", ["products", "norms", "sums", "append"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_those_of_double_precision(kernel: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    pairs = by_kernel[kernel, dtype]
    counts = {"products": 4 * sum(len(rows) for _, rows in SHAPES), "norms": 4, "sums": 2, "append": 2}
    assert len(pairs) == counts[kernel]
    for actual, expected in pairs:
        assert (actual.dtype, actual.shape) == (dtype, expected.shape)
        assert expected.count_nonzero() > 0
        assert torch.equal(actual, expected) if kernel == "append" else error(actual, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_that_read_the_same_states_are_one_launch(dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    passes = by_kernel["module", dtype]
    # The second call of q follows one of another kind, without a bias.
    assert [launches for *_, launches in passes] == [(1,) * 6, (3, 1, 1, 1), (3, 1, 1, 1), ()]
    for expected, actual, _ in passes:
        assert all(error(*both) < BOUNDS[dtype] * 4 for both in zip(actual, expected, strict=True))


def test_the_kernels_compile_for_an_h100() -> None:
    from zinfer.engine.stream import step_kernels as kernel

    constants: dict[str, Any] = {"EXPERTS": 128, "COUNT": 4, "OF_ALL": True, "BLOCK": 128, "CHOSEN": 4}
    compile_for_h100(kernel._route, constants, {"scores": "*bf16", "weights": "*fp32", "numbers": "*i64"}, num_warps=1)
    constants = {"COLUMNS": 2880, "TOKENS": 1, "BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024}
    types: dict[str, Any] = dict.fromkeys(("weights", "biases", "outputs"), ("*bf16",) * 3)
    compile_for_h100(kernel._products, constants, types | {"states": "*bf16", "counts": ("i32",) * 3}, num_warps=4)


def main(path: Path) -> None:
    """Save results of models, of modules, and of kernels."""
    from zinfer.engine.stream import step_kernels

    results: dict[Any, Any] = {"others": [with_another(norm) for norm in (Centered, Gated)]}
    for dtype in DTYPES:
        for name in NORMS:
            norms = Norms(model_of(name, dtype), CPU)
            results["norms of", name, dtype] = both(norms, drawn(3, 1, 64, dtype=dtype))
        results |= {("turned", name, dtype): turned(name, dtype) for name in FORMS}
        results |= {("routed", kind, dtype): routed(kind, dtype) for kind in ROUTERS}
    scores = torch.randint(-3, 4, (20, 24), generator=torch.Generator().manual_seed(1)).float()
    scores[0, ::2], scores[1, 4:], scores[2] = -0.5, -torch.inf, 0
    results["ties"] = scores, *step_kernels.route(scores, 6, False, torch.float32)
    scores = torch.tensor([[0.0, 4.0, torch.nan, -1.0, 3.0, torch.nan, 1.0]])
    results["nan"] = scores, *step_kernels.route(scores, 3, False, torch.float32)
    step_kernels.PROGRAMS = PROGRAMS
    for dtype in DTYPES:
        results["products", dtype] = [
            pair
            for columns, rows in SHAPES
            for tokens, biased in ((1, True), (2, False), (1, False), (2, True))
            for pair in multiplied(tokens, columns, rows, biased, dtype)
        ]
        results["norms", dtype], results["append", dtype] = normed_states(dtype), appended(dtype)
        results["sums", dtype], results["module", dtype] = summed_parts(dtype), called(dtype)
    torch.save(results, path)
