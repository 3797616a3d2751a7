"""Rotary positions of recorded passes, by one kernel instead of models' ten.

Each model turns queries and keys by a function of its own, and most of these compute the same. Whether one does is
found by what it computes for random states, not by its text. Others stay as they are.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.engine.triton_check import alike

FUNCTION = "apply_rotary_pos_emb"  # its name in the modules of transformers
Function = Callable[..., tuple[Tensor, Tensor]]


class Rotations:
    """Functions that turn a model's queries and keys, and their kernel."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        names = {type(module).__module__ for module in model.modules()}
        self._replaced: list[tuple[dict[str, Any], Function, Function]] = []
        for scope in (vars(sys.modules[name]) for name in sorted(names)):
            function = scope.get(FUNCTION)
            if callable(function) and (forms := _forms(function, model.dtype, device)):
                self._replaced.append((scope, function, partial(_rotate, function, forms)))

    def __len__(self) -> int:
        return len(self._replaced)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Turn queries and keys by the kernel within the ``with`` block."""
        for scope, _, fused in self._replaced:
            scope[FUNCTION] = fused
        try:
            yield
        finally:
            for scope, function, _ in self._replaced:
                scope[FUNCTION] = function


def _rotate(function: Function, forms: frozenset[int], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if kwargs or len(args) != 4 or not _serves(forms, *args):
        return function(*args, **kwargs)
    from zinfer.engine.stream.step_kernels import rotate

    return rotate(*args)


def _serves(forms: frozenset[int], query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tell whether the kernel serves a call. `forms` are parts of a head that may have angles."""
    if query.dim() != 4 or keys.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    rows, _, count, size = query.shape
    same = (keys.shape[0], *keys.shape[2:]) == (rows, count, size) and cos.shape[:2] == (rows, count)
    part, rest = divmod(size, cos.shape[2])
    dense = all(tensor.stride(-1) == 1 for tensor in (query, keys, cos, sin))
    one_type = query.dtype == keys.dtype == cos.dtype == sin.dtype and query.is_floating_point()
    return same and not rest and part in forms and dense and one_type


def _forms(function: Function, dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Return the forms in which the kernel computes what `function` does.

    A form is 1 if all of a head has angles, 2 if they are those of both halves.
    """
    from zinfer.engine.stream.step_kernels import rotate

    dice, forms = torch.Generator().manual_seed(0), set[int]()
    query, keys = (torch.randn((2, 3, heads, 32), generator=dice).to(device, dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn((2, 3, 16), generator=dice).to(device)
    for part, turn in (1, torch.cat((angles, angles), -1)), (2, angles):
        cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
        try:
            expected, result = function(query, keys, cos, sin), rotate(query, keys, cos, sin)
        except Exception:  # a function of other arguments
            continue
        if all(a.shape == b.shape and alike(a, b) for a, b in zip(result, expected, strict=True)):
            forms.add(part)
    return frozenset(forms)
