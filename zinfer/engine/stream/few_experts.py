"""Routed experts in passes of few tokens, by kernels that read the chosen experts at the speed of the GPU's memory.

`transformers` computes experts by grouped matrix products. Their tiles are made for many rows, and around them rows are
sorted, counted, moved and moved back, so that a token or two takes twice as long as reading its experts. The kernels
(`zinfer.engine.stream.expert_kernel`) read each chosen expert once and nothing else. Of experts that stay on the GPU
quantised they read the codes (`zinfer.engine.stream.packed_product`).

The classes of experts that `transformers` dispatches through its `ExpertsInterface` give the place for it, without code
for architectures. A call that the kernels do not serve goes to the implementation that `transformers` chose: one with
many tokens, with experts on other devices, or with a norm behind each expert. The first call of each kind is computed
both ways: kernels that do not compile, or give other results, are not used any more, and the reason is told.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from zinfer.core.engine import CODED_PAIRS
from zinfer.core.errors import error_line
from zinfer.engine.stream.expert_images import through_interface
from zinfer.engine.stream.packed_product import LazyWeight, StackedCodes
from zinfer.engine.triton_check import alike, cannot_run

NAME = "zinfer_few"  # name of the implementation
ATTRIBUTE = "zinfer_few_experts"  # of a module of experts

# Pairs of a token and an expert, at most. Each pair reads its expert, from the L2 cache if another one just did. That
# cache of an H100 gives some 1.6 times the bytes of its memory; grouped products read an expert once, at about half of
# the memory's speed. So up to 1.5 reads of an expert the kernels are faster by far.
MOST_PAIRS = 64
MOST_READS = 1.5
Implementation = Callable[..., Tensor]


def pays(tokens: int, each: int, experts: int) -> bool:
    """Tell whether the kernels are faster for `tokens` tokens with `each` of `experts` experts, evenly routed."""
    pairs, touched = tokens * each, experts * (1 - (1 - min(1.0, each / experts)) ** tokens)
    return 0 < pairs <= min(MOST_PAIRS, MOST_READS * touched)


class FewExperts:
    """Dispatch of a model's experts: to the kernels in passes of few tokens, else to what `transformers` chose.

    `status` is ``on``, the reason why the kernels are not used, or None for a model without such experts.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        modules = [module for module in model.modules() if through_interface(module)]
        self.status = (cannot_run(device) or "on") if modules else None
        self._checked = set[tuple[object, ...]]()
        self._chosen: dict[int, str | None] = {}  # the implementation that transformers chose, by the id of its config
        if self.status != "on":
            return
        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _dispatch)
        for module in modules:
            setattr(module, ATTRIBUTE, self)
            if id(module.config) not in self._chosen:
                self._chosen[id(module.config)] = module.config._experts_implementation
                module.config._experts_implementation = NAME

    def compute(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts of a call: hidden states ``[tokens, H]``, numbers of the chosen experts and their weights
        ``[tokens, k]`` each; the result is ``[tokens, H]``."""
        chosen = self._implementation(module)
        if self.status != "on" or kwargs or not _serves(module, *args):
            return chosen(module, *args, **kwargs)
        kind = _kind(module, *args)
        try:
            found = _compute(module, *args)
            if kind in self._checked:
                return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.status = f"the kernels failed: {error_line(error)[:120]}"
            return chosen(module, *args)
        expected = chosen(module, *args)
        if alike(found, expected):
            self._checked.add(kind)
            return found
        self.status = "the kernels' results differ from those of transformers"
        return expected

    def _implementation(self, module: nn.Module) -> Implementation:
        """Return the implementation that transformers chose for a module of experts."""
        name = self._chosen[id(module.config)]
        found: Implementation = (
            type(module).forward.__wrapped__  # type: ignore[attr-defined]
            if name is None or name == "eager"
            else moe.ALL_EXPERTS_FUNCTIONS[name]
        )
        return found


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Forward pass of a module of experts, as transformers' `ExpertsInterface` calls it."""
    found: Tensor = getattr(module, ATTRIBUTE).compute(module, *args, **kwargs)
    return found


def matrix_names(module: nn.Module) -> tuple[str, str]:
    """Return the names of the stacked weights of a module's first and second matrices; those of biases end in
    ``_bias``."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def activated(module: nn.Module, product: Tensor) -> Tensor:
    """Apply the gate of a module of experts, or the activation of one without, to products of its first matrix."""
    found: Tensor = module._apply_gate(product) if module.has_gate else module.act_fn(product)  # type: ignore[operator]
    return found


def _unknown(module: nn.Module) -> str | None:
    """Return the reason why it is not known what a module of experts computes beside its products; None if it is."""
    if getattr(module, "_is_expert_parallel", False):
        return "the experts are shared out among processes"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm is behind each expert"
    return None if not module.has_gate or hasattr(module, "_apply_gate") else "the gate of the experts is not known"


def _matrices(module: nn.Module) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None:
    """Return the stacked weights of a module's first and second matrices, with their biases; None if it has others."""
    found = []
    for name in matrix_names(module):
        weights = getattr(module, name, None)
        bias = getattr(module, f"{name}_bias", None) if getattr(module, "has_bias", False) else None
        if not isinstance(weights, Tensor) or weights.dim() != 3 or not weights.is_contiguous():
            return None
        rows = weights.shape[2] if module.is_transposed else weights.shape[1]
        if getattr(module, "has_bias", False) and (
            not isinstance(bias, Tensor) or bias.shape != (weights.shape[0], rows) or not bias.is_contiguous()
        ):
            return None
        found.append((weights, bias))
    return found[0], found[1]


def _serves(module: nn.Module, *args: Any) -> bool:
    """Tell whether the kernels serve a call, and are faster."""
    if len(args) != 3 or not all(isinstance(one, Tensor) and one.dim() == 2 for one in args):
        return False
    states, experts, weights = args
    if _unknown(module) is not None:
        return False
    if experts.shape != weights.shape or len(experts) != len(states) or experts.is_floating_point():
        return False
    matrices = _matrices(module)
    if matrices is None or states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    ((up, up_bias), (down, down_bias)), columns = matrices, 1 if module.is_transposed else 2
    tensors = [one for one in (up, down, up_bias, down_bias) if one is not None]
    same = all(one.dtype == states.dtype and one.device == states.device for one in tensors)
    count = up.shape[0]
    fits = up.shape[columns] == states.shape[1] == down.shape[3 - columns] and count == down.shape[0]
    small = max(up.numel(), down.numel()) // count < 1 << 31  # places within a matrix have 32 bits
    known = weights.dtype in (states.dtype, torch.float32)
    if all(_codes(one, bool(module.is_transposed)) is not None for one in (up, down)):
        few = 0 < experts.numel() <= CODED_PAIRS * count
    else:
        few = pays(len(experts), experts.shape[1], count)
    return same and fits and small and known and few


def _kind(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> tuple[object, ...]:
    """Return what the kernels are compiled for: calls of one kind differ in numbers only."""
    stacks = [getattr(module, name) for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(module, name)]
    from_codes = tuple(_codes(one, bool(module.is_transposed)) is not None for one in stacks)
    shapes = tuple(one.shape for one in stacks)
    return type(module), shapes, from_codes, states.dtype, weights.dtype, tuple(experts.shape)


def _compute(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Compute a call that `_serves` by the kernels."""
    from zinfer.engine.stream.expert_kernel import combined, gated

    matrices = _matrices(module)
    assert matrices is not None
    ((up, up_bias), (down, down_bias)), transposed = matrices, bool(module.is_transposed)
    states, experts, weights, count = states.contiguous(), experts.contiguous(), weights.contiguous(), up.shape[0]
    if _plain_gate(module) and up_bias is None and not transposed and _codes(up, transposed) is None:
        inner = gated(states, _in_slot(up), experts)
    else:
        partial = _products(states, up, experts, transposed)
        inner = combined(partial, experts, count, up_bias, None, states.dtype)
        inner = activated(module, inner)
    partial = _products(inner.contiguous(), down, experts, transposed)
    return combined(partial, experts, count, down_bias, weights, states.dtype)


def _codes(weights: Tensor, transposed: bool) -> StackedCodes | None:
    """Return the codes that a stacked weight is multiplied from; None if it is multiplied as it lies in the slot."""
    found = weights.stacked if isinstance(weights, LazyWeight) else None
    return found if found is not None and found.ready(transposed) else None


def _products(states: Tensor, weights: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Return the partial products of each pair, from codes where the weights have some."""
    from zinfer.engine.stream.expert_kernel import multiplied

    codes = _codes(weights, transposed)
    if codes is not None:
        return codes.multiply(states, experts, transposed)
    return multiplied(states, _in_slot(weights), experts, transposed)


def _in_slot(weights: Tensor) -> Tensor:
    """Return a stacked weight, whose values are in the slot from now on: kernels get its place alone."""
    if isinstance(weights, LazyWeight):
        weights.fill()
    return weights


def _plain_gate(module: nn.Module) -> bool:
    """Tell whether a module's gate is that of SwiGLU, which a kernel applies."""
    default = getattr(moe, "_default_apply_gate", None)
    own = getattr(type(module), "_apply_gate", None)
    activation = type(getattr(module, "act_fn", None)).__name__
    return bool(module.has_gate) and own is not None and own is default and activation in ("SiLU", "SiLUActivation")
