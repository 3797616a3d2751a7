"""Routed experts: kernels that read each once, in passes of few tokens, or quantised in passes of any.

`transformers` computes experts by grouped matrix products, made for many rows, so that a token or two takes twice as
long as reading its experts. The kernels (`zinfer.engine.stream.experts.expert_kernel`) read each chosen expert once and
nothing else. Experts that stay on the GPU quantised are multiplied from their codes
(`zinfer.engine.stream.weights.low_bit`), whatever the number of tokens.

A call that the kernels do not serve goes to the implementation that `transformers` chose: one with many tokens, with
experts on other devices, or with a norm behind each expert. The first call of each kind is computed both ways: kernels
that do not compile, or give other results, are not used any more, and the record has the reason.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from zinfer.core.progress import Progress, silent
from zinfer.engine.stream.experts.modules import computes_more, gate_of, through_interface
from zinfer.engine.stream.weights.low_bit import Aligned, Matrix
from zinfer.engine.stream.weights.products import CheckedKernel, LazyWeight
from zinfer.engine.triton_check import cannot_run

NAME = "zinfer_few"  # name of the implementation
ATTRIBUTE = "zinfer_few_experts"  # of a module of experts

# Largest number of pairs of a token and an expert. Each pair reads its expert, from the L2 cache if another one just
# did. That cache of an H100 gives some 1.6 times the bytes of its memory; grouped products read an expert once, at
# about half of the memory's speed. So up to 1.5 reads of an expert the kernels are faster by far.
MAX_PAIRS = 64
MAX_READS = 1.5
Implementation = Callable[..., Tensor]


def pays(tokens: int, each: int, experts: int) -> bool:
    """Tell whether the kernels are faster, with evenly routed tokens. Each of `tokens` tokens has `each` of `experts`
    experts."""
    pairs, touched = tokens * each, experts * (1 - (1 - min(1.0, each / experts)) ** tokens)
    return 0 < pairs <= min(MAX_PAIRS, MAX_READS * touched)


class FewExperts(CheckedKernel):
    """Dispatch of a model's experts: to the kernels in passes of few tokens, else to transformers."""

    def __init__(self, model: PreTrainedModel, device: torch.device, progress: Progress = silent) -> None:
        modules = [module for module in model.modules() if through_interface(module)]
        super().__init__((cannot_run(device) or "on") if modules else None, "transformers", progress)
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
        """Compute the experts of a call; the result is ``[tokens, H]``. It gets hidden states ``[tokens, H]``, numbers
        of the chosen experts and their weights, ``[tokens, k]`` each."""
        chosen = self._implementation(module)
        if self.status != "on" or kwargs or not _serves(module, *args):
            return chosen(module, *args, **kwargs)
        output = self.checked(_kind(module, *args), lambda: _compute(module, *args), lambda: chosen(module, *args))
        return chosen(module, *args) if output is None else output

    def _implementation(self, module: nn.Module) -> Implementation:
        name = self._chosen[id(module.config)]
        chosen: Implementation = (
            type(module).forward.__wrapped__  # type: ignore[attr-defined]
            if name is None or name == "eager"
            else moe.ALL_EXPERTS_FUNCTIONS[name]
        )
        return chosen


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Forward pass of a module of experts, as transformers' `ExpertsInterface` calls it."""
    output: Tensor = getattr(module, ATTRIBUTE).compute(module, *args, **kwargs)
    return output


def _matrices(module: nn.Module) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None:
    """Return a module's matrices with their biases; None if it has others."""
    matrices = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weights = getattr(module, name, None)
        bias = getattr(module, f"{name}_bias", None) if getattr(module, "has_bias", False) else None
        if not isinstance(weights, Tensor) or weights.dim() != 3 or not weights.is_contiguous():
            return None
        rows = weights.shape[2] if module.is_transposed else weights.shape[1]
        if getattr(module, "has_bias", False) and (
            not isinstance(bias, Tensor) or bias.shape != (weights.shape[0], rows) or not bias.is_contiguous()
        ):
            return None
        matrices.append((weights, bias))
    return matrices[0], matrices[1]


def _serves(module: nn.Module, *args: Any) -> bool:
    """Tell whether the kernels serve a call, and are faster."""
    if len(args) != 3 or not all(isinstance(arg, Tensor) and arg.dim() == 2 for arg in args) or computes_more(module):
        return False
    states, experts, weights = args
    if experts.shape != weights.shape or len(experts) != len(states) or experts.is_floating_point():
        return False
    matrices = _matrices(module)
    if matrices is None or states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    ((up, up_bias), (down, down_bias)), columns = matrices, 1 if module.is_transposed else 2
    tensors = [tensor for tensor in (up, down, up_bias, down_bias) if tensor is not None]
    same = all(tensor.dtype == states.dtype and tensor.device == states.device for tensor in tensors)
    count = up.shape[0]
    fits = up.shape[columns] == states.shape[1] == down.shape[3 - columns] and count == down.shape[0]
    small = max(up.numel(), down.numel()) // count < 1 << 31  # places within a matrix have 32 bits
    supported = weights.dtype in (states.dtype, torch.float32)
    if _from_codes(up, down) is not None:
        served = experts.numel() > 0
    else:
        served = small and pays(len(experts), experts.shape[1], count)
    return same and fits and supported and served


def _kind(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> tuple[object, ...]:
    matrices = _matrices(module)
    assert matrices is not None
    (up, _), (down, _) = matrices
    kind = type(module), up.shape, down.shape, states.dtype, weights.dtype
    return (*kind, None if _from_codes(up, down) is not None else tuple(experts.shape))


def _compute(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    from zinfer.engine.stream.experts.expert_kernel import activate, combine, multiply

    matrices = _matrices(module)
    assert matrices is not None
    (up, up_bias), (down, down_bias) = matrices
    states, experts, weights, count = states.contiguous(), experts.contiguous(), weights.contiguous(), up.shape[0]
    aligned: dict[int, Aligned] = {}
    codes, gate = _from_codes(up, down) or (None, None), gate_of(module)

    def product(states: Tensor, matrix: Matrix | None, weight: Tensor) -> Tensor:
        if matrix is not None:
            return matrix.multiply_pairs(states, experts, aligned)
        if isinstance(weight, LazyWeight):  # kernels get its address alone
            weight.fill()
        return multiply(states, weight, experts, bool(module.is_transposed))

    partial = product(states, codes[0], up)
    if gate is not None:
        inner = states.new_empty(len(partial), partial.shape[2] // 2)
        activate(partial, experts, count, up_bias, gate, inner)
    else:
        first: Any = combine(partial, experts, count, up_bias, None, states.dtype)
        inner = module._apply_gate(first) if module.has_gate else module.act_fn(first)  # type: ignore[operator]
        inner = inner.contiguous()
    return combine(product(inner, codes[1], down), experts, count, down_bias, weights, states.dtype)


def _from_codes(up: Tensor, down: Tensor) -> tuple[Matrix, Matrix] | None:
    """Return two stacked weights as kernels read their codes; None if they are multiplied unpacked."""
    first, second = (weight.matrix() if isinstance(weight, LazyWeight) else None for weight in (up, down))
    return None if first is None or second is None else (first, second)
