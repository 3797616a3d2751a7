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
            return operand if lands else operand.cpu()

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(bring, (args, kwargs))
            if func is scaled_dot_product_attention and kwargs.get("enable_gqa"):
                func, kwargs = _grouped, {key: value for key, value in kwargs.items() if key != "enable_gqa"}
            result = func(*args, **kwargs)
            return result if lands else tree_map(lambda one: host(one, home) if _is_plain(one) else one, result)


def host(tensor: Tensor, home: torch.device) -> Tensor:
    """`tensor`, on the CPU, as one that draws operations there, and whose results belong on `home`. No copy."""
    hosted = tensor.as_subclass(Hosted)
    hosted.home = home
    return hosted


def _is_plain(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "cpu"


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of query heads that share key heads, ``[B, H, n, D]`` and ``[B, K, m, D]``. torch's own repeats the
    keys for every query head; here those of a group are rows of one product, and a key is read once."""
    batch, heads, length, width = query.shape
    if is_causal or (attn_mask is not None and attn_mask.shape[1] != 1):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * length, width)
    scores = (rows @ key.transpose(-1, -2)).float() * (width**-0.5 if scale is None else scale)
    if attn_mask is not None:
        split = scores.view(batch, heads, length, -1)
        scores = split.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else split + attn_mask
        scores = scores.view(batch, groups, heads // groups * length, -1)
    found = softmax(scores, dim=-1).to(value.dtype) @ value
    return found.view(batch, heads, length, -1)
