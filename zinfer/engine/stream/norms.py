"""RMS norms of recorded passes, by PyTorch's kernel instead of models' seven.

A decode step of a row or two spends as long on the launches of its norms as on reading a matrix, even in a CUDA graph.
Whether a module is an RMS norm is found by what it computes, not by its name: with random weights it has to give what
`torch.nn.functional.rms_norm` gives, multiplied by the weight before or after rounding. Others stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

Norm = Callable[[Tensor, float, Tensor], Tensor]  # of a weight, an epsilon and states
MAX_ULPS = 2  # units in the last place by which another order of the same sum may change a value


def weighted_after(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """Return the RMS norm, rounded, then multiplied by the weight."""
    return weight * rms_norm(states, states.shape[-1:], eps=eps)


def weighted_before(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """Return the RMS norm, multiplied by the weight, then rounded."""
    return rms_norm(states, states.shape[-1:], weight, eps)


class Norms:
    """RMS norms of a model, and the kernels that compute the same."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        kinds: dict[tuple[object, ...], Norm | None] = {}
        self.modules: list[tuple[nn.Module, Norm]] = []
        for module in model.modules():
            if not _may_be(module):
                continue
            kind = type(module), _weight(module).shape, _weight(module).dtype, _eps(module)
            if kind not in kinds:
                kinds[kind] = _norm_of(module, model.dtype, device)
            if (norm := kinds[kind]) is not None:
                self.modules.append((module, norm))

    def __len__(self) -> int:
        return len(self.modules)

    def fused(self) -> AbstractContextManager[None]:
        """Compute the norms by fused kernels within the ``with`` block."""
        return replaced([(module, _forward(module, norm)) for module, norm in self.modules])


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


def _forward(module: nn.Module, norm: Norm) -> Callable[[Tensor], Tensor]:
    """Return a forward pass that looks the weight up in each call. A layer that is streamed moves it."""
    return lambda states: norm(_weight(module), _eps(module), states)


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
    return tensors.keys() == {"weight"} and tensors["weight"].dim() == 1


def _norm_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """Return the norm that computes what a module does, or None. Both get random states and weights."""
    dice = torch.Generator().manual_seed(0)
    size = len(_weight(module))
    states = (4 * torch.randn((2, 1, size), generator=dice)).to(device, dtype)
    weight = (1 + torch.randn(size, generator=dice) / 2).to(device, _weight(module).dtype)
    eps = _eps(module)
    try:
        with torch.no_grad():
            expected = functional_call(module, {"weight": weight}, (states,))
            errors = {norm: _error(norm(weight, eps, states), expected) for norm in (weighted_after, weighted_before)}
    except Exception:  # no norm of one tensor
        return None
    norm = min(errors, key=errors.__getitem__)
    return norm if errors[norm] <= MAX_ULPS * torch.finfo(dtype).eps else None


def _error(result: Tensor, expected: object) -> float:
    """Return the largest relative difference; infinity for another kind of result."""
    if not isinstance(expected, Tensor) or (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    return float(((result - expected).abs() / expected.abs().clamp(min=1e-6)).max())
