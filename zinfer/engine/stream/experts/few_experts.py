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
        output = self.checked(_kind(module, *args), lambda: compute(module, *args), lambda: chosen(module, *args))
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


def _matrices(module: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Return a module's two matrices with their biases; nothing if it has others."""
    matrices = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weights: Any = getattr(module, name, None)
        bias = getattr(module, f"{name}_bias", None) if getattr(module, "has_bias", False) else None
        given = [weights] if bias is None else [weights, bias]
        if not all(isinstance(each, Tensor) for each in given) or weights.dim() != 3 or _exchanged(weights) is None:
            return []
        if bias is not None and not bias.is_contiguous():
            return []
        matrices.append((weights, bias))
    return matrices


def _exchanged(weights: Tensor) -> bool | None:
    """Tell whether a stack's last dimensions are exchanged in memory; None if it has gaps."""
    if weights.is_contiguous():
        return False
    rows, columns = weights.shape[1:]
    return True if weights.stride() == (rows * columns, 1, rows) else None


def _serves(module: nn.Module, *args: Any) -> bool:
    """Tell whether the kernels serve a call, and are faster."""
    if len(args) != 3 or args[0].dim() != 2 or computes_more(module) or not (matrices := _matrices(module)):
        return False
    (states, experts, weights), ((up, _), (down, _)) = args, matrices
    kinds = {(each.dtype, each.device) for pair in matrices for each in pair if each is not None}
    supported = kinds == {(states.dtype, states.device)} and weights.dtype in (states.dtype, torch.float32)
    if _from_codes(up, down) is not None:
        return supported and experts.numel() > 0
    small = max(up.numel(), down.numel()) // len(up) < 1 << 31  # places within a matrix have 32 bits
    known = states.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return supported and small and known and pays(len(experts), experts.shape[1], len(up))


def _kind(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> tuple[object, ...]:
    (up, _), (down, _) = _matrices(module)
    kind = type(module), up.shape, down.shape, states.dtype, weights.dtype
    return (*kind, None if _from_codes(up, down) is not None else tuple(experts.shape))


def compute(module: nn.Module, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum ``[tokens, H]`` of a module's experts by the kernels. They take hidden states ``[tokens, H]``, and
    numbers of experts and their weights, ``[tokens, k]`` each. Numbers that name none of them add nothing."""
    from zinfer.engine.stream.experts.expert_kernel import activate, combine, multiply

    (up, up_bias), (down, down_bias) = _matrices(module)
    states, experts, weights, count = states.contiguous(), experts.contiguous(), weights.contiguous(), up.shape[0]
    aligned: dict[int, Aligned] = {}
    codes, gate = _from_codes(up, down) or (None, None), gate_of(module)

    def product(states: Tensor, matrix: Matrix | None, weight: Tensor) -> Tensor:
        if matrix is not None:
            return matrix.multiply_pairs(states, experts, aligned)
        if isinstance(weight, LazyWeight):  # kernels get its address alone
            weight.fill()
        exchanged = bool(_exchanged(weight))
        return multiply(states, weight.mT if exchanged else weight, experts, bool(module.is_transposed) != exchanged)

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
