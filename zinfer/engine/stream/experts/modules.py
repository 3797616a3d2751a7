"""Modules of routed experts, found without code for architectures.

The classes of experts that `transformers` dispatches through its `ExpertsInterface` keep their weights stacked, ``[E,
..]``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zinfer.engine.state import Entry, ModelState
from zinfer.engine.stream.weights.packed_experts import UNIT, Experts


@dataclass(frozen=True)
class Gate:
    """Product of two halves of a row: ``gate * sigmoid(alpha * gate) * (up + offset)``, both clamped to `limit`. The
    halves follow each other, or are `interleaved`. That of SwiGLU is the default."""

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the products ``[.., I]`` of `rows` ``[.., 2 * I]``."""
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


def experts_of(layers: Iterable[nn.Module], state: ModelState, mixture: bool) -> dict[int, Experts] | str:
    """Return the routed experts by layer, or why none come on demand."""
    modules = {index: find_experts(layer, state.of_layer(index)) for index, layer in enumerate(layers)}
    if reasons := [reason for reason in modules.values() if isinstance(reason, str)]:
        return reasons[0]
    experts = {index: experts for index, experts in modules.items() if isinstance(experts, Experts)}
    why_not = "they do not go through the ExpertsInterface of transformers" if mixture else "it has none"
    return experts or why_not


def find_experts(layer: nn.Module, entries: Mapping[str, Entry]) -> Experts | str | None:
    """Return the routed experts of `layer`, or why none come on demand. `entries` go by their names within the layer.
    None if it has none."""
    modules = routed_experts(layer)
    if len(modules) != 1:
        return "a layer has several modules of experts" if modules else None
    ((path, module),) = modules
    count = max((weight.shape[0] for weight in module.parameters(recurse=False) if weight.dim() == 3), default=0)
    weights = {}
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2 or parameter.shape[0] != count:
            continue
        entry = entries.get(f"{path}.{leaf}")
        if entry is None:
            return f"{path}.{leaf} is shared between layers"
        if parameter.dim() == 3 and entry.tensor[0].nbytes % UNIT:
            return f"an expert's part of {path}.{leaf} is no multiple of {UNIT} bytes"
        weights[f"{path}.{leaf}"] = entry
    if sum(entry.tensor.dim() == 3 for entry in weights.values()) < 2:
        return f"{path} does not keep its matrices stacked"
    return Experts(module, weights, count)


def routed_experts(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of routed experts, by name within the layer."""
    return [(name, module) for name, module in layer.named_modules() if through_interface(module)]


def through_interface(module: nn.Module) -> bool:
    """Tell whether `transformers` dispatches a module through its `ExpertsInterface`. The interface's decorator gives
    the class these attributes."""
    dispatched = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")
    return dispatched and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def computes_more(module: nn.Module) -> bool:
    """Tell whether a module computes more than the kernels know. They know products, an activation, and a gate that can
    be called."""
    parallel, norm = (getattr(module, name, False) for name in ("_is_expert_parallel", "has_post_expert_norm"))
    return bool(parallel or norm or (module.has_gate and not hasattr(module, "_apply_gate")))


_gates: dict[tuple[object, ...], Gate | None] = {}  # by class, activation, and the numbers that modules name


def gate_of(module: nn.Module) -> Gate | None:
    """Return the gate that gives a module's own values in a trial; None if none does."""
    if not module.has_gate:
        return None
    values = {name: getattr(module, name, None) for name in ("alpha", "swiglu_alpha", "limit", "swiglu_limit")}
    key = type(module), type(getattr(module, "act_fn", None)), *values.values()
    if key not in _gates:
        alphas, limits = (
            [values[name] for name in names] for names in (("alpha", "swiglu_alpha"), ("limit", "swiglu_limit"))
        )
        rows = torch.linspace(-9, 9, 4 * 254).view(4, 254).roll(77)
        expected = module._apply_gate(rows)  # type: ignore[operator]
        trials = (
            Gate(interleaved, float(alpha), float(limit), offset)
            for interleaved in (False, True)
            for alpha in (1, *filter(None, alphas))
            for limit in (float("inf"), *filter(None, limits))
            for offset in (0.0, 1.0)
        )
        _gates[key] = next((gate for gate in trials if torch.allclose(gate(rows), expected, 1e-4, 1e-4)), None)
    return _gates[key]
