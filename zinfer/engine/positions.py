"""Models whose code takes positions from the cache, not from position ids.

Layers may ask the cache for its length, which counts padding. Llama 4 scales queries by it: here it does so by the
position ids.
"""

import inspect
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


def _scale_by_positions(layer: nn.Module, attention: Any) -> None:
    """Scale the queries of `attention` by the position ids of its `layer`."""
    forward, positions = layer.forward, torch.empty(0)

    def scale(_module: nn.Module, _args: tuple[Any, ...], queries: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        scale: Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
        return (queries * scale[..., None]).to(queries.dtype)

    @wraps(forward)
    def noting_positions(*args: Any, **named: Any) -> Any:  # behind the hooks, where another pass may take turns
        nonlocal positions
        positions = named["position_ids"]
        return forward(*args, **named)

    attention.attn_temperature_tuning = False
    attention.q_proj.register_forward_hook(scale)
    layer.forward = noting_positions


def scale_by_positions(layers: Iterable[nn.Module]) -> None:
    """Scale queries by positions, not by columns of the cache."""
    for layer in layers:
        for module in layer.modules():
            plain = not getattr(module, "use_rope", True) and not hasattr(module, "qk_norm")
            if plain and getattr(module, "attn_temperature_tuning", False):
                _scale_by_positions(layer, module)


def asks_length(layers: Iterable[nn.Module]) -> bool:
    """Tell whether code of the layers asks the cache for its length."""

    def asks(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return "get_seq_length" in getattr(code, "co_names", ()) and not hasattr(module, "attn_temperature_tuning")

    return any(asks(module) for layer in layers for module in layer.modules())
