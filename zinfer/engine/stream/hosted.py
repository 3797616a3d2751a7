"""Tensors in host memory that a model computes with as if they were on the GPU.

A KV cache that stays where it is cannot move to the operation, so the operation moves to it: whatever is computed with
a `Hosted` tensor is computed on the CPU, to which the other operands (a query, a mask: small) are brought, and gives a
`Hosted` one, until that meets a parameter: the output projection's. There it goes to the GPU. No model needs to know.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.utils._pytree import tree_flatten, tree_map

from zinfer.engine.stream.attend import dots, mix, suits, widened


class Hosted(Tensor):
    """A CPU tensor (a view of it) that keeps what is computed with it on the CPU. Made by `host`."""

    home: torch.device  # where results go in the end

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [operand for operand in tree_flatten((args, kwargs))[0] if isinstance(operand, Tensor)]
        home = next(operand.home for operand in operands if isinstance(operand, Hosted))
        in_place = getattr(func, "__name__", "").endswith("_") and not getattr(func, "__name__", "").endswith("__")
        lands = any(isinstance(operand, nn.Parameter) for operand in operands)
        lands |= in_place and not isinstance(args[0], Hosted)

        def bring(operand: Any) -> Any:
            if not isinstance(operand, Tensor):
                return operand
            if isinstance(operand, Hosted):
                operand = operand.as_subclass(Tensor)
                return operand.to(home) if lands else operand
            return operand if lands else _fetched(operand)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(bring, (args, kwargs))
            func = OURS.get(func, func)
            result = func(*args, **kwargs)
            return result if lands else tree_map(lambda one: host(one, home) if _is_plain(one) else one, result)


def host(tensor: Tensor, home: torch.device) -> Tensor:
    """`tensor`, on the CPU, as one that draws operations there, and whose results belong on `home`. No copy."""
    hosted = tensor.as_subclass(Hosted)
    hosted.home = home
    return hosted


def _fetched(operand: Tensor) -> Tensor:
    """`operand` on the CPU. What all layers share (a mask, a bias: nobody changes it in place) comes once."""
    if operand.device.type == "cpu":
        return operand
    if not hasattr(operand, "_on_host"):
        operand._on_host = operand.cpu()  # type: ignore[attr-defined]
    return operand._on_host  # type: ignore[attr-defined,no-any-return]


def _is_plain(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "cpu"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of query heads that may share key heads, ``[B, H, n, D]`` and ``[B, K, m, D]``:
    the queries of a group are rows of one product, and a key is read once."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * length, width)
    whole = (is_causal and length > 1) or (groups != heads and attn_mask is not None and attn_mask.shape[1] != 1)
    if whole or not (suits(rows, key) and suits(rows, value)):
        key, value = widened(key, query.dtype), widened(value, query.dtype)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scores = dots(rows, key).view(batch, heads, length, -1).mul_(width**-0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    chances = softmax(scores, dim=-1).view(batch, groups, heads // groups * length, -1)
    return mix(chances, value).to(query.dtype).view(batch, heads, length, -1)


def _product(rows: Tensor, matrix: Tensor) -> Tensor | None:
    """``rows @ matrix`` in float32, where one of the two ways to lie in memory is good for that."""
    turned = matrix.transpose(-1, -2)
    if suits(rows, turned):
        return dots(rows, turned)
    if suits(rows, matrix):
        return mix(rows, matrix)
    if matrix.dtype != torch.int8:
        return None
    return dots(rows, turned) if matrix.stride(-1) != 1 else mix(rows, matrix)


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    found = _product(input, mat2)
    return torch.bmm(input, mat2) if found is None else found.to(input.dtype)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    found = _product(batch1, batch2)
    if found is None:
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    return found.mul_(alpha).add_(input, alpha=beta).to(batch1.dtype)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    found = _product(input, other)
    return torch.matmul(input, other) if found is None else found.to(input.dtype)


# What attention to one new token is made of, wherever a model does not leave it to one operation.
OURS: dict[Any, Any] = {
    scaled_dot_product_attention: _attention,
    torch.bmm: _bmm, Tensor.bmm: _bmm, torch.baddbmm: _baddbmm, Tensor.baddbmm: _baddbmm,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
}  # fmt: skip
