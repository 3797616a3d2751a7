"""RMS norms of recorded passes, by one kernel instead of models' seven.

A decode step of a row or two spends as long on the launches of its norms as on reading a matrix, even in a CUDA graph.
Whether a module is an RMS norm is found by what it computes, not by its name: with random weights it has to give what
the kernel gives, multiplied by the weight before or after rounding. Others stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

MAX_ULPS = 4  # units in the last place by which another order of the same sum may change a value
MAX_SIZE = 1 << 15  # values of a row: a program has them in registers


class Kernels:
    """Modules of a model, and kernels that compute the same."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, Callable[..., Any]]] = []

    def __len__(self) -> int:
        return len(self.modules)

    def fused(self) -> AbstractContextManager[None]:
        """Compute the modules by the kernels within the ``with`` block."""
        return replaced(self.modules)


class Norms(Kernels):
    """RMS norms of a model."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        kinds: dict[tuple[object, ...], bool | None] = {}
        for module in model.modules():
            if not _may_be(module):
                continue
            kind = type(module), _weight(module).shape, _weight(module).dtype, _eps(module)
            if kind not in kinds:
                kinds[kind] = _rounds_first(module, model.dtype, device)
            if (after := kinds[kind]) is not None:
                self.modules.append((module, partial(_norm, module, after)))


@contextmanager
def replaced(modules: Sequence[tuple[nn.Module, Callable[..., object]]]) -> Iterator[None]:
    """Compute modules by other functions within the ``with`` block."""
    for module, forward in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in modules:
            del module.forward


def _norm(module: nn.Module, after: bool, states: Tensor) -> Tensor:
    """Return a norm. The weight is looked up in each call: a layer that is streamed moves it."""
    from zinfer.engine.stream.step_kernels import normed

    return normed(states, _weight(module), _eps(module), after)


def _eps(module: nn.Module) -> float:
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if isinstance(value, float)), 0.0)


def _weight(module: nn.Module) -> Tensor:
    return cast("Tensor", module.weight)


def _may_be(module: nn.Module) -> bool:
    """Tell whether a module has an epsilon and one vector of weights."""
    if _eps(module) <= 0 or "forward" in vars(module):
        return False
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return tensors.keys() == {"weight"} and tensors["weight"].dim() == 1 and len(tensors["weight"]) <= MAX_SIZE


def _rounds_first(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Tell whether an RMS norm rounds before it multiplies by the weight. None for what is no RMS norm."""
    from zinfer.engine.stream.step_kernels import normed

    dice = torch.Generator().manual_seed(0)
    size = len(_weight(module))
    states = (4 * torch.randn((2, 1, size), generator=dice)).to(device, dtype)
    weight = (1 + torch.randn(size, generator=dice) / 2).to(device, _weight(module).dtype)
    try:
        with torch.no_grad():
            expected = functional_call(module, {"weight": weight}, (states,))
            errors = {after: _error(normed(states, weight, _eps(module), after), expected) for after in (True, False)}
    except Exception:  # no norm of one tensor
        return None
    after = min(errors, key=errors.__getitem__)
    return after if errors[after] <= MAX_ULPS * torch.finfo(dtype).eps else None


def _error(result: Tensor, expected: object) -> float:
    """Return the largest relative difference; infinity for another kind of result."""
    if not isinstance(expected, Tensor) or (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    return float(((result - expected).abs() / expected.abs().clamp(min=1e-6)).max())
