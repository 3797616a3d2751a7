"""Matrix products of few tokens, one launch for the same states.

Recorded decode steps have such products. A model calls its matrices one by one. Which of them follow each other with
the same states shows when a pass runs: from the second pass on, the first of them computes all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from zinfer.engine.stream.norms import Kernels

MAX_TOKENS = 2  # the kernel has the products of all tokens in registers; more of them are work for tensor cores
TYPES = torch.float32, torch.float16, torch.bfloat16


class Linears(Kernels):
    """Matrices of decoder layers, and the kernel that multiplies with them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        modules = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
        self.modules = [(each, partial(self._multiply, each)) for each in modules if "forward" not in vars(each)]
        self._followers = dict[nn.Linear, list[nn.Linear]]()  # of a module: those called next with the same states
        self._states: Tensor | None = None  # of the last call
        self._first: nn.Linear | None = None  # module that was called with them first
        self._results = dict[nn.Linear, Tensor]()  # of modules that follow

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Multiply by the kernel within the ``with`` block."""
        try:
            with super().fused():
                yield
        finally:
            self._states = self._first = None
            self._results.clear()

    def _multiply(self, module: nn.Linear, states: Tensor) -> Tensor:
        if self._first is not None and states is self._states:
            followers = self._followers.setdefault(self._first, [])
            if module not in followers:
                followers.append(module)
            if (result := self._results.pop(module, None)) is not None:
                return result
        else:
            self._states, self._first = states, module
            self._results.clear()
        if not _serves(module, states):
            return linear(states, module.weight, module.bias)
        from zinfer.engine.stream.step_kernels import MAX_FUSED, products

        first = module is self._first
        others = [each for each in self._followers.get(module, ()) if first and _alike(each, module)]
        fused = [module, *others[: MAX_FUSED - 1]]
        flat = states.reshape(-1, states.shape[-1])
        results = products(flat, [each.weight for each in fused], [each.bias for each in fused])
        shaped = [result.view(*states.shape[:-1], -1) for result in results]
        self._results.update(zip(fused[1:], shaped[1:], strict=True))
        return shaped[0]


def _serves(module: nn.Linear, states: Tensor) -> bool:
    """Tell whether the kernel multiplies `states` ``[.., K]`` with a matrix: few tokens, plain contiguous weights."""
    tensors = [tensor for tensor in (module.weight, module.bias) if tensor is not None]
    plain = all(type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in tensors)
    same = all((each.dtype, each.device) == (states.dtype, states.device) for each in tensors)
    few = 0 < states.numel() <= MAX_TOKENS * states.shape[-1]
    return plain and same and few and states.dtype in TYPES


def _alike(module: nn.Linear, first: nn.Linear) -> bool:
    """Tell whether a launch that multiplies with `first` takes another matrix, too."""
    tensors, others = ((each.weight, each.bias) for each in (module, first))
    return all(
        (a is None) == (b is None) and (a is None or (type(a), a.dtype, a.device) == (type(b), b.dtype, b.device))
        for a, b in zip(tensors, others, strict=True)
    ) and all(each is None or each.is_contiguous() for each in tensors)
