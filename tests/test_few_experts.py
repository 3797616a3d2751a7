"""Experts of a few tokens by kernels of their own: the results of `transformers`' implementations, and the way back to
them.

The kernels run in a process of their own (`tests.interpreter`).
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from tests import Patch
from tests.checkpoints import save_config
from tests.running import error
from tests.test_codec import compile_for_h100
from tests.test_experts import MIXTURES, load, steps
from zinfer.core.progress import NOTE
from zinfer.engine.stream.experts import few_experts, modules
from zinfer.engine.stream.experts.few_experts import NAME, FewExperts, pays
from zinfer.engine.stream.experts.modules import through_interface

CPU = torch.device("cpu")
# Sizes that tiles do not divide, and some that they do.
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 72, "intermediate_size": 40},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 48},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 40},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 48},
}


def experts_of(name: str, **other: Any) -> tuple[Any, nn.Module]:
    """Return a small model, and its first experts with random weights."""
    options = MIXTURES[name] | SIZES[name] | other
    common = {"vocab_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **common | options)).eval()
    module = next(filter(through_interface, model.modules()))
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model.requires_grad_(False), module


def call(module: Any, tokens: int, dtype: torch.dtype, each: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, numbers of experts and their weights for `tokens` tokens."""
    generator = torch.Generator().manual_seed(tokens)
    columns = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    states = torch.randn((tokens, columns), generator=generator).to(dtype)
    chosen = torch.rand((tokens, module.num_experts), generator=generator).topk(each)
    # The router of Mixtral gives weights in float32, those of others are in the type of the states.
    weights = chosen.values if type(module).__name__.startswith("Mixtral") else chosen.values.to(dtype)
    return states, chosen.indices, weights


@pytest.mark.parametrize("name", SIZES)
def test_experts_are_those_of_transformers(name: str, by_kernel: dict[str, Any]) -> None:
    assert error(*by_kernel[f"{name} float32"][:2]) < 1e-5
    output, expected, same_steps = by_kernel[f"{name} bfloat16"]
    assert (output.dtype, output.shape) == (torch.bfloat16, expected.shape)
    assert error(output, expected) < 0.02
    assert error(output, same_steps) < 0.002, "results are rounded at other places"


def test_experts_without_a_gate_split_columns_and_numbers_of_no_expert(by_kernel: dict[str, Any]) -> None:
    assert by_kernel["splits"] > 1
    assert error(*by_kernel["no gate"]) < 1e-5
    assert error(*by_kernel["beyond"]) < 1e-5, "a number that names no expert adds nothing"


def test_an_engine_gives_the_same_logits(by_kernel: dict[str, Any]) -> None:
    """Run few tokens by the kernels, with NaN in absent experts. Tokens of the prompt and of the steps, experts on
    demand."""
    ran, statuses, logits, expected = by_kernel["engine"]
    assert ran > 0
    assert statuses == {"auto": "on", "off": "off"}
    assert all(error(*step) < 1e-5 for step in zip(logits, expected, strict=True))


def test_kernels_are_for_few_tokens() -> None:
    assert [pays(tokens, 2, 8) for tokens in (1, 2, 4, 8, 64)] == [True, True, True, False, False]
    assert [pays(tokens, 8, 128) for tokens in (1, 4, 8, 9, 64)] == [True, True, True, False, False]
    assert pays(1, 1, 1)
    assert not pays(0, 2, 8)


@pytest.fixture
def few(monkeypatch: Patch) -> FewExperts:
    """Dispatch to `few.module`, with kernels that count their calls."""
    monkeypatch.setattr(few_experts, "cannot_run", lambda device: None)
    model, module = experts_of("mixtral")
    lines = list[str]()
    dispatch: Any = FewExperts(model, CPU, lambda line, _share: lines.append(line))
    dispatch.model, dispatch.module, dispatch.calls, dispatch.lines = model, module, 0, lines

    def counted(module: Any, *args: Tensor) -> Tensor:
        dispatch.calls += 1
        return eager(module, *args)

    monkeypatch.setattr(few_experts, "compute", counted)
    return dispatch  # type: ignore[no-any-return]


def eager(module: Any, *args: Any) -> Tensor:
    output: Tensor = type(module).forward.__wrapped__(module, *args)
    return output


def test_calls_that_kernels_do_not_serve_go_to_transformers(few: Any) -> None:
    module = few.module
    served = call(module, 1, torch.float32)
    assert error(module(*served), eager(module, *served)) < 1e-6
    assert few.calls == 1
    many = call(module, 9, torch.float32)
    assert error(module(*many), eager(module, *many)) < 1e-5
    states, chosen, weights = served
    assert module(states, top_k_index=chosen, top_k_weights=weights).shape == states.shape
    for attribute in ("_is_expert_parallel", "has_post_expert_norm"):
        before = getattr(module, attribute, False)
        setattr(module, attribute, True)
        assert not few_experts._serves(module, *served)
        setattr(module, attribute, before)
    assert not few_experts._serves(module, states.double(), chosen, weights)
    assert few_experts._serves(module, *served)
    module.down_proj.data = module.down_proj.data.repeat(1, 1, 2)[..., ::2]
    assert not few_experts._serves(module, *served), "its weights have gaps"
    assert few.calls == 1
    assert few.status == "on"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (RuntimeError("no code for\nthis GPU"), "the kernel failed: RuntimeError: no code for this GPU"),
        (None, "the kernel's results differ from those of transformers"),
    ],
)
def test_kernels_that_fail_are_given_up(fault: Exception | None, reason: str, few: Any, monkeypatch: Patch) -> None:
    wrong = Mock(side_effect=fault or (lambda *args: 1.2 * eager(*args)))
    monkeypatch.setattr(few_experts, "compute", wrong)
    served = call(few.module, 2, torch.float32)
    for _ in range(2):
        assert error(few.module(*served), eager(few.module, *served)) < 1e-5
    assert few.status == reason
    assert wrong.call_count == 1
    assert few.lines == [f"{NOTE}using transformers instead of a faster kernel: {reason}"], "once, whatever comes later"


def test_without_a_gpu_models_are_left_as_they_are() -> None:
    model, _ = experts_of("mixtral")
    before = model.config._experts_implementation
    assert FewExperts(model, CPU).status == "no GPU"
    assert model.config._experts_implementation == before != NAME
    assert FewExperts(nn.Linear(2, 2), CPU).status is None


def test_the_kernels_compile_for_an_h100() -> None:
    """Weights are read 16 bytes a thread, whichever side is contiguous."""
    import triton.language as tl

    from zinfer.engine.stream.experts import expert_kernel as kernel

    pointers = dict.fromkeys(("states", "weights", "bias"), "*bf16") | {"experts": "*i64", "out": "*fp32"}
    for rows, columns, transposed in ((14336, 4096, False), (5760, 2880, True)):
        tiles = kernel.Tiles.of(rows, columns, 2, transposed)
        constants: dict[str, Any] = {
            "EXPERTS": 8, "ROWS": rows, "COLUMNS": columns, "EACH": 2, "ONCE": True,
            "TRANSPOSED": transposed, "BLOCK_ROWS": tiles.rows, "BLOCK_COLUMNS": tiles.columns,
        }  # fmt: skip
        compile_for_h100(kernel._multiply, constants, pointers, num_warps=kernel.WARPS)
    constants = {"EXPERTS": 8, "ROWS": 4096, "EACH": 2, "PRODUCT": tl.float32, "SPLITS": 16, "BLOCK": kernel.COMBINED}
    types = pointers | {"partial": "*fp32", "weights": "*fp32", "out": "*bf16"}
    compile_for_h100(kernel._combine, constants, types, num_warps=kernel.WARPS)


def main(path: Path) -> None:
    """Compute calls by the kernels and by transformers, and save both."""
    from zinfer.engine.stream.experts import expert_kernel as kernel

    torch.set_grad_enabled(False)
    results: dict[str, Any] = {}

    def both(module: Any, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert few_experts._serves(module, *args)
        output = few_experts.compute(module, *args)
        return output, eager(module, *args), moe.batched_mm_experts_forward(module, *args)

    kernel.TILE, min_read, tile = 1 << 14, kernel.MIN_READ, kernel.TILE  # the interpreter is slow for each tile
    for name in SIZES:
        module: Any = experts_of(name)[1]
        gate = modules.Gate(True, 1.702, 7.0, 1.0) if name == "gpt_oss" else modules.Gate()
        assert modules.gate_of(module) == gate
        for dtype in (torch.float32, torch.bfloat16):
            results[f"{name} {str(dtype)[6:]}"] = both(module.to(dtype), *call(module, 2, dtype))
    kernel.TILE = tile
    module = experts_of("mixtral")[1]
    states, chosen, weights = call(module, 2, torch.float32)
    expected = eager(module, states, chosen, weights * torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    chosen = chosen.clone()
    chosen[0, 1] = len(module.down_proj)
    results["beyond"] = few_experts.compute(module, states, chosen, weights), expected

    kernel.MIN_READ = 64
    results["splits"] = kernel.Tiles.of(72, 192, 2, False).splits
    module = experts_of("mixtral", intermediate_size=192)[1]
    module.has_gate, module.up_proj = False, nn.Parameter(module.gate_up_proj[:, :192].contiguous())
    args = call(module, 1, torch.float32)
    results["no gate"] = few_experts.compute(module, *args), moe.batched_mm_experts_forward(module, *args)

    kernel.MIN_READ, kernel.TILE = min_read, 1 << 14
    few_experts.compute = counted = Mock(wraps=few_experts.compute)
    directory = save_config(path.parent, "mixtral", **MIXTURES["mixtral"] | {"num_hidden_layers": 1})
    statuses, logits = {}, []
    for option in ("auto", "off"):
        loaded = load(directory, share="40%", experts_kernel=option)
        logits.append(steps(loaded, 2, 1))
        statuses[option] = loaded.effective().settings["experts_kernel"]
    results["engine"] = counted.call_count, statuses, *logits
    torch.save(results, path)
