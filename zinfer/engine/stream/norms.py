"""RMS norms of recorded passes, by PyTorch's own kernel instead of the seven that models' code launches.

A decode step of a row or two spends as long on the launches of its norms as on reading a matrix, even in a CUDA graph.
Whether a module is an RMS norm is found by what it computes, not by its name: with random weights it has to give what
`torch.nn.functional.rms_norm` gives, multiplied by the weight before or after rounding. Others stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

Norm = Callable[[Tensor, float, Tensor], Tensor]  # of a weight, an epsilon and states
PLACES = 2  # last places of a value by which another order of the same sum may change it


def weighted_after(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """Return the RMS norm of `states`, rounded, then multiplied by the weight, as Llama has it."""
    return weight * rms_norm(states, states.shape[-1:], eps=eps)


def weighted_before(weight: Tensor, eps: float, states: Tensor) -> Tensor:
    """Return the RMS norm of `states`, multiplied by the weight, then rounded, as gpt-oss has it."""
    return rms_norm(states, states.shape[-1:], weight, eps)


class Norms:
    """RMS norms of a model, and the kernels that compute the same."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        kinds = dict[tuple[object, ...], Norm | None]()
        self.found: list[tuple[nn.Module, Norm]] = []
        for module in model.modules():
            if not _may_be(module):
                continue
            kind = type(module), _weight(module).shape, _weight(module).dtype, _eps(module)
            if kind not in kinds:
                kinds[kind] = _norm_of(module, model.dtype, device)
            if (norm := kinds[kind]) is not None:
                self.found.append((module, norm))

    def __len__(self) -> int:
        return len(self.found)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Have the norms computed by one kernel or two each within."""
        for module, norm in self.found:
            module.forward = _forward(module, norm)
        try:
            yield
        finally:
            for module, _ in self.found:
                del module.forward


def _forward(module: nn.Module, norm: Norm) -> Callable[[Tensor], Tensor]:
    """Return what takes the place of a module's forward pass: its weight is looked up in each call, since a layer that
    is streamed has it in another place each time."""
    return lambda states: norm(_weight(module), _eps(module), states)


def _eps(module: nn.Module) -> float:
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((one for one in named if isinstance(one, float)), 0.0)


def _weight(module: nn.Module) -> Tensor:
    found: Tensor = module.weight  # type: ignore[assignment]
    return found


def _may_be(module: nn.Module) -> bool:
    """Tell whether a module has an epsilon, and nothing but one vector of weights."""
    if _eps(module) <= 0 or "forward" in vars(module):
        return False
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return tensors.keys() == {"weight"} and tensors["weight"].dim() == 1


def _norm_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """Return the way that computes what a module does, by random states and weights; None if none does."""
    dice = torch.Generator().manual_seed(0)
    size, own = len(_weight(module)), _weight(module).dtype
    states = (4 * torch.randn((2, 1, size), generator=dice)).to(device, dtype)
    weight = (1 + torch.randn(size, generator=dice) / 2).to(device, own)
    eps = _eps(module)
    try:
        with torch.no_grad():
            expected = functional_call(module, {"weight": weight}, (states,))
            errors = {norm: _error(norm(weight, eps, states), expected) for norm in (weighted_after, weighted_before)}
    except Exception:  # no norm of one tensor
        return None
    norm = min(errors, key=errors.__getitem__)
    return norm if errors[norm] <= PLACES * torch.finfo(dtype).eps else None


def _error(found: Tensor, expected: object) -> float:
    """Return the largest difference from what is expected, relative to it; infinity for another kind of result."""
    if not isinstance(expected, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-6)).max())
