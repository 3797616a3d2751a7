"""Routers of recorded passes, by one kernel behind their matrix.

A router scores experts, chooses those with the largest scores, and weighs them by a softmax over all scores or over
theirs. Whether a module does is found by what it computes with random weights, as for `norms`. Others, with sigmoids or
groups of experts, stay as they are. Of equal scores the kernel takes the first expert's; torch.topk promises no order.
Of scores so close that a softmax over all rounds them to one share, it takes the larger.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import PreTrainedModel

from zinfer.engine.stream.norms import Kernels, replaced
from zinfer.engine.triton_check import alike

MAX_EXPERTS, MAX_CHOSEN = 1024, 32  # a program has the scores of a token's experts in registers
Kind = tuple[bool, torch.dtype]  # whether weights are shares of all experts, and their type


class Routers(Kernels):
    """Routers of a model whose choice the kernel makes, too."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        kinds: dict[tuple[object, ...], Kind | None] = {}
        for module in filter(_may_be, model.modules()):
            tensors = ((name, each.shape, each.dtype) for name, each in module.named_parameters())
            key = type(module), module.top_k, *tensors
            if key not in kinds:
                kinds[key] = _kind_of(module, model.dtype, device)
            if (kind := kinds[key]) is not None:
                self.modules.append((module, partial(_route, kind, module)))


def _may_be(module: nn.Module) -> bool:
    """Tell whether a module has a number of experts to choose. One matrix scores them, perhaps with a bias."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    count, weight = getattr(module, "top_k", None), tensors.get("weight")
    if not isinstance(count, int) or weight is None or weight.dim() != 2 or "forward" in vars(module):
        return False
    return tensors.keys() <= {"weight", "bias"} and 0 < count <= MAX_CHOSEN and count <= len(weight) <= MAX_EXPERTS


def _route(kind: Kind, module: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a router does: the experts' scores, the weights of those chosen, and their numbers.

    The tensors are looked up in each call. A layer that is streamed moves them.
    """
    from zinfer.engine.stream.step_kernels import route

    scores = linear(states.reshape(-1, module.weight.shape[1]), module.weight, getattr(module, "bias", None))
    return scores, *route(scores, module.top_k, *kind)


def _kind_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Kind | None:
    """Return the kind of router that a module is, or None."""
    dice, drawn = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, each in module.named_parameters():
        drawn[name] = (torch.randn(each.shape, generator=dice) / each.shape[-1] ** 0.5).to(device, each.dtype)
    states = torch.randn((8, drawn["weight"].shape[1]), generator=dice).to(device, dtype)
    errors = dict[Kind, float]()
    try:
        with torch.no_grad():
            scores, weights, numbers = functional_call(module, drawn, (states,))
            for kind in ((False, weights.dtype), (True, weights.dtype)):
                with replaced([(module, partial(_route, kind, module))]):
                    result, shares, chosen = functional_call(module, drawn, (states,))
                equal = torch.equal(result.gather(1, chosen), scores.gather(1, numbers))  # equal scores in any order
                if equal and result.dtype == scores.dtype and alike(shares, weights):
                    errors[kind] = float((shares - weights).norm())
    except Exception:  # no router of states alone
        return None
    return min(errors, key=errors.__getitem__, default=None)
