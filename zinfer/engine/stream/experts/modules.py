"""Modules of routed experts, found without code for architectures.

The classes of experts that `transformers` dispatches through its `ExpertsInterface` keep their weights stacked, ``[E,
..]``.
"""

from collections.abc import Iterable, Mapping

from torch import nn

from zinfer.engine.state import Entry, ModelState
from zinfer.engine.stream.weights.packed_experts import UNIT, Experts


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
