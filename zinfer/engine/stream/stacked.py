"""Stacked rows: keys or values of several micro-batches as one tensor, for models that attend in a way of their own.

To the model the rows of all micro-batches are one rectangle, left-padded to the longest; its mask hides the padding.
The memory of the rectangle does not exist: views of a `Stacked` tensor are followed, and the products that attention
consists of are computed block by block, as they would be for each micro-batch alone. Blocks in 8 bits are
dequantised in turn. Anything else that a model does with its keys raises `NotStackedError`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zinfer.engine.cache import QuantizedKV

RESHAPES = {Tensor.reshape, Tensor.view, torch.reshape}
TURNS = {Tensor.transpose, torch.transpose, Tensor.mT.__get__}  # type: ignore[attr-defined]
MEASURES = {"size", "dim", "stride", "numel", "is_contiguous", "__get__", "__len__"}  # ask for size or place alone


class NotStackedError(RuntimeError):
    """The model uses keys in a way that blocks cannot. Caches may hold part of the pass."""


class Stacked(Tensor):
    """Keys or values ``[B, heads, n, D]`` of several micro-batches. Each of `blocks`, ``[b, heads, up to n, D]``,
    stands at the end of its rows; n is that of the longest. Made by `stack`."""

    blocks: tuple[Tensor | QuantizedKV, ...]
    turned: bool  # True if the last two dimensions are exchanged

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stacked = args[0] if args else None
        if isinstance(stacked, cls) and (
            func in RESHAPES or func in TURNS or getattr(func, "__name__", "") in MEASURES
        ):
            return stacked.seen(func, args[1:], kwargs)
        if func not in PRODUCTS:
            raise NotStackedError(f"{getattr(func, '__name__', func)} of keys or values")
        with torch._C.DisableTorchFunctionSubclass():
            return PRODUCTS[func](*args, **kwargs)

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a view, or the tensor's size or place."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(self.as_subclass(Tensor), *args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        turned = self.turned != (func in TURNS)
        rows, heads = sum(len(block) for block in self.blocks), self.blocks[0].shape[1]
        matrix = (max(block.shape[2] for block in self.blocks), self.blocks[0].shape[3])
        whole = tuple(result.shape[-2:]) == (matrix[::-1] if turned else matrix)
        if not whole or tuple(result.shape[:-2]) not in ((rows, heads), (rows * heads,)):
            raise NotStackedError(f"a view {list(result.shape)} of keys or values {list(self.shape)}")
        return self.like(result, turned)

    def like(self, content: Tensor, turned: bool) -> Self:
        """Return a tensor of the same blocks, with the shape of `content`."""
        stacked = content.as_subclass(type(self))
        stacked.blocks, stacked.turned = self.blocks, turned
        return stacked

    @property
    def padded(self) -> bool:
        return len({block.shape[2] for block in self.blocks}) > 1

    def parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each block in `rows`, and the block. The blocks get as many leading dimensions as `rows`
        has."""
        flat = rows.dim() == 3
        heads, first = self.blocks[0].shape[1], 0
        for block in self.blocks:
            last = first + len(block) * (heads if flat else 1)
            dequantized = block.dequantize() if isinstance(block, QuantizedKV) else block
            shaped = dequantized.flatten(0, 1) if flat else dequantized
            yield slice(first, last), shaped.transpose(-1, -2) if self.turned else shaped
            del dequantized, shaped
            first = last


def stack(blocks: Sequence[Tensor | QuantizedKV], dtype: torch.dtype) -> Stacked:
    """Return `Stacked` of `blocks`, each ``[b, heads, n, D]``. Each has its own n."""
    rows, longest = sum(len(block) for block in blocks), max(block.shape[2] for block in blocks)
    shape = (rows, blocks[0].shape[1], longest, blocks[0].shape[3])
    stacked = torch.empty(1, dtype=dtype, device=blocks[0].device).expand(shape).as_subclass(Stacked)
    stacked.blocks, stacked.turned = tuple(blocks), False
    return stacked


def _product(of: Callable[[slice, slice, Tensor], Tensor], rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply `rows` with a stacked matrix; columns of padding are zeros. `of` does so for a block, from the block's
    rows, its columns and the block."""
    if not isinstance(matrix, Stacked) or isinstance(rows, Stacked) or rows.shape[:-2] != matrix.shape[:-2]:
        raise NotStackedError(f"a product of {list(rows.shape)} and keys or values {list(matrix.shape)}")
    if not matrix.turned:  # values
        columns = rows.shape[-1]
        return torch.cat(
            [of(part, slice(columns - block.shape[-2], None), block) for part, block in matrix.parts(rows)]
        )
    longest = matrix.shape[-1]
    out: Tensor | None = None
    for part, block in matrix.parts(rows):
        scores = of(part, slice(longest - block.shape[-1], None), block)
        if out is None:
            out = scores.new_zeros((*rows.shape[:-1], longest))
        out[part, ..., longest - block.shape[-1] :] = scores
    assert out is not None
    return out


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    turned = isinstance(other, Stacked) and other.turned
    return _product(
        lambda part, columns, block: input[part] @ block if turned else input[part][..., columns] @ block, input, other
    )


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    added = input.expand(*batch1.shape[:-1], batch2.shape[-1])

    def of(part: slice, columns: slice, block: Tensor) -> Tensor:
        return torch.baddbmm(added[part, :, columns], batch1[part], block, beta=beta, alpha=alpha)

    if not (isinstance(batch2, Stacked) and batch2.turned):
        raise NotStackedError("a sum with a product of values")
    return _product(of, batch1, batch2)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if not (isinstance(key, Stacked) and isinstance(value, Stacked)) or key.turned or value.turned or query.dim() != 4:
        raise NotStackedError("attention to keys and values of several kinds")
    if is_causal or (attn_mask is None and key.padded):
        raise NotStackedError("attention without a mask that hides padding")
    outputs = []
    mask = None if attn_mask is None else attn_mask.expand(len(query), *attn_mask.shape[1:])
    for (part, keys), (_, values) in zip(key.parts(query), value.parts(query), strict=True):
        bias = None if mask is None else mask[part, ..., mask.shape[-1] - keys.shape[2] :]
        outputs.append(
            scaled_dot_product_attention(query[part], keys, values, bias, dropout_p, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat(outputs)


PRODUCTS: dict[Any, Any] = {
    scaled_dot_product_attention: _attention,
    torch.bmm: _matmul, Tensor.bmm: _matmul, torch.baddbmm: _baddbmm, Tensor.baddbmm: _baddbmm,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
}  # fmt: skip
