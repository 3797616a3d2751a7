"""RMS norms of recorded passes: found by what modules compute, with the results of the model's own code.

The kernel runs in a process of its own (`tests.interpreter`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import Checkpoints, Patch
from tests.test_graphs import Rerun, status
from tests.test_parity import check, load
from zinfer.engine.stream import graphs
from zinfer.engine.stream.layer_graphs import DIFFERS
from zinfer.engine.stream.norms import Norms, replaced

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Norms of two layers, and the last one. Gemma's are multiplied by 1 + weight, BLOOM's subtract the mean.
KINDS: dict[str, int] = {"llama": 5, "mixtral": 5, "qwen3": 9, "gpt_oss": 5, "gemma": 0, "bloom": 0}


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a small model of two layers whose norms have random weights."""
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 16}
    others = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(name, **(shape | others if name != "bloom" else {"n_layer": 2, "hidden_size": 64}))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    dice = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = (1 + torch.randn(parameter.shape, generator=dice) / 2).to(parameter.dtype)
    return model


def both(name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return what each norm gives: by the model's own code, and by the kernel."""
    norms, results = Norms(model_of(name, dtype), CPU), []
    dice = torch.Generator().manual_seed(2)
    for module, _ in norms.modules:
        (weight,) = module.parameters()
        states = torch.randn((3, 1, len(weight)), generator=dice).to(dtype)
        expected = module(states)
        with norms.fused():
            results.append((expected, module(states)))
        assert "forward" not in vars(module)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_norms_are_found_and_give_the_same(name: str, dtype: torch.dtype, by_kernel: dict[Any, Any]) -> None:
    assert len(by_kernel[name, dtype]) == KINDS[name]
    for expected, output in by_kernel[name, dtype]:
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
    return len(Norms(model, CPU).modules)


def test_what_computes_something_else_stays(by_kernel: dict[Any, Any]) -> None:
    assert by_kernel["others"] == [KINDS["llama"] - 1] * 2


class Replaced:
    """Norms that a function computes."""

    def __init__(self, modules: list[tuple[nn.Module, Any]]) -> None:
        self.fused = partial(replaced, modules)


def replace_norms(function: Callable[[Tensor], Tensor], self: Any, _device: torch.device) -> None:
    """Choose a function for a model's norms, in the place of `Graphs._find_kernels`."""
    norms = [module for name, module in self._model.named_modules() if name.endswith("norm")]
    self._replaced = [Replaced([(module, function) for module in norms])]
    self.kernels = "on"


@pytest.mark.parametrize("way", ["differs", "fails"])
def test_a_pass_that_goes_wrong_with_them_is_not_recorded(
    way: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    recorder = Rerun()
    monkeypatch.setattr(graphs, "recorder_of", lambda _device: recorder)
    monkeypatch.setattr(graphs, "TUNED", replace(graphs.TUNED, bucket=4))

    def wrong(states: Tensor) -> Tensor:
        if way == "fails":
            raise ValueError("no such kernel")
        return -states

    monkeypatch.setattr(graphs.Graphs, "_find_kernels", lambda *args: replace_norms(wrong, *args))
    directory = checkpoint("llama")
    engine = load("stream", directory, "none")
    for _ in range(3):
        check(engine, directory, "none")
    assert status(engine) == {"differs": DIFFERS, "fails": "a decode step cannot be recorded: no such kernel"}[way]
    assert engine.effective().settings["graph_kernels"] == "on"


def main(path: Path) -> None:
    """Save what norms give by their own code and by the kernel."""
    results: dict[Any, Any] = {(name, dtype): both(name, dtype) for name in KINDS for dtype in DTYPES}
    results["others"] = [with_another(norm) for norm in (Centered, Gated)]
    torch.save(results, path)
