"""RMS norms of recorded passes: found by what modules compute, and computed by PyTorch with the same results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.test_graphs import Rerun, status
from tests.test_parity import check, load
from zinfer.engine.stream import graphs
from zinfer.engine.stream.layer_graphs import DIFFERS
from zinfer.engine.stream.norms import Norms, weighted_after, weighted_before

CPU = torch.device("cpu")
Checkpoints = Callable[..., Path]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Norms of two layers, and the last one. Gemma's are multiplied by 1 + weight, BLOOM's subtract the mean.
KINDS: dict[str, tuple[int, Callable[..., Tensor] | None]] = {
    "llama": (5, weighted_after),
    "mixtral": (5, weighted_after),
    "qwen3": (9, weighted_after),
    "gpt_oss": (5, weighted_before),
    "gemma": (0, None),
    "bloom": (0, None),
}


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_norms_are_found_and_give_the_same(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    count, way = KINDS[name]
    norms = Norms(model, CPU)
    assert len(norms.modules) == count
    # In float32 both ways are the same.
    assert dtype == torch.float32 or all(norm is way for _, norm in norms.modules)
    dice = torch.Generator().manual_seed(2)
    for module, _ in norms.modules:
        (weight,) = module.parameters()
        states = torch.randn((3, 1, len(weight)), generator=dice).to(dtype)
        expected = module(states)
        with norms.fused():
            output = module(states)
        assert output.dtype == expected.dtype
        assert torch.allclose(output, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert "forward" not in vars(module)


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


@pytest.mark.parametrize("other", [Centered, Gated])
def test_what_computes_something_else_stays(other: type[nn.Module]) -> None:
    model = model_of("llama", torch.float32)
    model.model.norm = other()
    assert len(Norms(model, CPU).modules) == KINDS["llama"][0] - 1


@pytest.mark.parametrize("way", ["differs", "fails"])
def test_a_pass_that_goes_wrong_with_them_is_recorded_without(
    way: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Rerun()
    monkeypatch.setattr(graphs, "recorder_of", lambda _device: recorder)
    monkeypatch.setattr(graphs, "TUNED", replace(graphs.TUNED, bucket=4))

    def wrong(_weight: Tensor, _eps: float, states: Tensor) -> Tensor:
        if way == "fails":
            raise ValueError("no such kernel")
        return -states

    real = Norms.__init__

    def spoiled(self: Norms, *args: Any) -> None:
        real(self, *args)
        self.modules = [(module, wrong) for module, _ in self.modules]

    monkeypatch.setattr(Norms, "__init__", spoiled)
    directory = checkpoint("llama")
    engine = load("stream", directory, "none", tmp_path)
    for _ in range(3):
        check(engine, directory, "none")
    assert status(engine) == "on"
    reason = {"differs": DIFFERS, "fails": "a decode step cannot be recorded: no such kernel"}[way]
    assert engine.effective().settings["graph_kernels"] == f"off: {reason}"
    assert recorder.replayed > 0


def test_a_pass_that_goes_wrong_without_them_too_leaves_them_on(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Rerun()
    recorder.off = 1.0
    monkeypatch.setattr(graphs, "recorder_of", lambda _device: recorder)
    engine = load("stream", checkpoint("llama"), "none", tmp_path)
    for _ in range(3):
        check(engine, checkpoint("llama"), "none")
    assert status(engine) == DIFFERS
    assert engine.effective().settings["graph_kernels"] == "on"
