"""CPU attention: a KV cache in host memory that the model uses as if it were on the GPU.

The cache stays in host memory and the operation moves to the CPU: any operation with a `Hosted` tensor runs there. Its
other operands (a query, a mask: small) are copied to the CPU, and its result is `Hosted` too, until an operation has a
parameter as operand: the output projection. That one runs on the GPU. Models need no change.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.utils._pytree import tree_map

from zinfer.engine.stream import stacked
from zinfer.engine.stream.cpu_kernel import dots, mix, suits, widened
from zinfer.engine.stream.stacked import RESHAPES, TURNS, NotStackedError, Stacked, stack
from zinfer.engine.transfer import fetched, landed

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's <malloc.h>


class Hosted(Tensor):
    """A CPU tensor whose operations run on the CPU. Made by `host`."""

    home: torch.device  # the device that finally gets the results

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = list(_tensors((args, kwargs)))
        home = next(operand.home for operand in operands if isinstance(operand, Hosted))
        lands = any(isinstance(operand, nn.Parameter) for operand in operands)
        name = getattr(func, "__name__", "")
        changed = args[0] if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else None
        changed = kwargs.get("out", changed)
        lands |= changed is not None and not isinstance(changed, Hosted)

        def bring(operand: Any) -> Any:
            if not isinstance(operand, Tensor):
                return operand
            if isinstance(operand, HostedRows):
                return operand
            if isinstance(operand, Hosted):
                operand = operand.as_subclass(Tensor)
                return landed(operand, home) if lands else operand
            return operand if lands else _fetched(operand)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _changed(bring, (args, kwargs))
            if not kwargs.keys() & {"out", "tensor2"}:
                func = OURS.get(func, func)
            if not lands:
                result = func(*args, **kwargs)
                if _is_plain(result):
                    return host(result, home)
                return tree_map(lambda one: host(one, home) if _is_plain(one) else one, result)
        return func(*args, **kwargs)  # a weight may have functions of its own


class HostedCoded(Hosted):
    """Tensor of 8-bit rows, made by `zinfer.engine.stream.cpu_kernel.coded`, that reports the type `wide`.

    Products of attention read the rows as they are; any other operation gets a copy in the type `wide`.
    """

    wide: torch.dtype
    width: int  # values in a row

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0].wide
        if (
            func in OURS
            and args
            and not isinstance(args[0], HostedCoded)
            and not isinstance(kwargs.get("batch1"), HostedCoded)
        ):
            return super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], HostedCoded) and (func in VIEWS or getattr(func, "__name__", "") in MEASURES):
            one = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                result = func(one.as_subclass(Tensor), *args[1:], **kwargs)
                if not isinstance(result, Tensor):
                    return result
                if result.data_ptr() == one.data_ptr() and _has_whole_rows(result, one.width):
                    return code(result, one.home, one.wide)
        args, kwargs = _changed(lambda one: one.widened() if isinstance(one, HostedCoded) else one, (args, kwargs))
        return func(*args, **kwargs)

    def widened(self) -> Hosted:
        """Return a copy in the type `wide`."""
        with torch._C.DisableTorchFunctionSubclass():
            content = self.as_subclass(Tensor)
            turned = content.stride(-1) != 1
            wide = widened(content.transpose(-1, -2) if turned else content, self.wide)
            return host(wide.transpose(-1, -2) if turned else wide, self.home)


class HostedRows(Stacked, Hosted):
    """Stacked rows in host memory, of a type of `FLOATS` or as `coded` made them. Products of attention read the blocks
    where they are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], cls) and (func in VIEWS or getattr(func, "__name__", "") in MEASURES):
            return args[0].seen(func, args[1:], kwargs or {})
        if func not in OURS or (args and isinstance(args[0], cls)):
            raise NotStackedError(f"{getattr(func, '__name__', func)} of keys or values")
        return super(Stacked, cls).__torch_function__(func, types, args, kwargs)

    def like(self, content: Tensor, turned: bool) -> "HostedRows":
        found = super().like(content, turned)
        found.home = self.home
        return found

    def dots(self, rows: Tensor) -> Tensor:
        """Return ``rows @ keys^T`` of ``[.., n, D]`` rows, with as many leading dimensions as this tensor."""
        apart = self._apart(rows)
        longest = max(block.shape[2] for block in self.blocks)
        out = torch.zeros((*apart.shape[:-1], longest))
        first = 0
        for block in self.blocks:
            last = first + len(block)
            out[first:last, ..., longest - block.shape[2] :] = dots(apart[first:last], block)
            first = last
        return out.view(*rows.shape[:-1], longest)

    def mix(self, chances: Tensor) -> Tensor:
        """Return ``chances @ values`` of ``[.., n, m]`` chances, with as many leading dimensions as this tensor."""
        apart = self._apart(chances)
        found, first = [], 0
        for block in self.blocks:
            last = first + len(block)
            found.append(mix(apart[first:last, ..., apart.shape[-1] - block.shape[2] :], block))
            first = last
        return torch.cat(found).view(*chances.shape[:-1], -1)

    def _apart(self, rows: Tensor) -> Tensor:
        if rows.shape[:-2] != self.shape[:-2]:
            raise NotStackedError(f"a product of {list(rows.shape)} and keys or values {list(self.shape)}")
        return rows.reshape(-1, self.blocks[0].shape[1], *rows.shape[-2:])


def hosted_rows(blocks: Sequence[Tensor], home: torch.device, dtype: torch.dtype) -> HostedRows:
    """Return `HostedRows` of `blocks`, each ``[b, heads, n, D]`` on the CPU, n its own; they report the type
    `dtype`."""
    found = stack(blocks, dtype).as_subclass(HostedRows)
    found.blocks, found.turned, found.home = tuple(blocks), False, home
    return found


# Functions that return views, and functions that only ask for a tensor's size or place.
VIEWS = RESHAPES | TURNS
MEASURES = stacked.MEASURES | {"data_ptr"}


def host(tensor: Tensor, home: torch.device) -> Hosted:
    """Return a view of the CPU tensor `tensor` whose operations run on the CPU; their results belong on `home`."""
    hosted = tensor.as_subclass(Hosted)
    hosted.home = home
    return hosted


def code(content: Tensor, home: torch.device, wide: torch.dtype) -> HostedCoded:
    """Return a `HostedCoded` view of `content` (int8, whole rows, possibly transposed)."""
    found = content.as_subclass(HostedCoded)
    found.home, found.wide = home, wide
    found.width = content.size(-1) if content.stride(-1) == 1 else content.size(-2)
    return found


@cache
def keep_freed() -> None:
    """Make malloc keep freed memory in this process, up to 2 GiB; needs glibc.

    Otherwise attention's intermediate results, tens of MB, go back to the system at once, which hands out and clears
    their pages again in the next layer: that can take as long as attention itself.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def _tensors(operands: Any) -> Iterator[Tensor]:
    """Yield the tensors among the operands of a function."""
    if isinstance(operands, Tensor):
        yield operands
    elif isinstance(operands, tuple | list):
        for operand in operands:
            yield from _tensors(operand)
    elif isinstance(operands, dict):
        yield from _tensors(tuple(operands.values()))


def _changed(change: Callable[[Any], Any], operands: Any) -> Any:
    """Return the operands of a function, each replaced by what `change` returns of it. This takes a fraction of the
    time of `torch.utils._pytree`, which knows other containers, too."""
    if type(operands) in (tuple, list):
        return type(operands)(_changed(change, operand) for operand in operands)
    if type(operands) is dict:
        return {name: _changed(change, operand) for name, operand in operands.items()}
    return change(operands)


def _has_whole_rows(content: Tensor, width: int) -> bool:
    if content.dim() < 2:
        return False
    return (content.stride(-1), content.size(-1)) == (1, width) or (content.stride(-2), content.size(-2)) == (1, width)


def _fetched(operand: Tensor) -> Tensor:
    """Return `operand` on the CPU. A tensor that all layers share (a mask, a bias; never changed in place) is copied
    once."""
    if operand.device.type == "cpu":
        return operand
    if not hasattr(operand, "_on_host"):
        (operand._on_host,) = fetched(operand)  # type: ignore[attr-defined]
    return operand._on_host  # type: ignore[attr-defined,no-any-return]


def _is_plain(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "cpu"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` of query heads ``[B, H, n, D]`` that may share key heads ``[B, K, m, D]``:
    the queries of a group are rows of one product, so that each key is read once."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * length, width)
    whole = (is_causal and length > 1) or (groups != heads and attn_mask is not None and attn_mask.shape[1] != 1)
    if whole or not (_suits(rows, key) and _suits(rows, value)):
        if isinstance(key, HostedRows) or isinstance(value, HostedRows):
            raise NotStackedError("causal attention of several tokens, or of heads that share keys")
        key, value = widened(key, query.dtype), widened(value, query.dtype)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if isinstance(key, HostedRows) and key.padded and attn_mask is None:
        raise NotStackedError("attention without a mask that hides padding")
    found = key.dots(rows) if isinstance(key, HostedRows) else dots(rows, key)
    scores = found.view(batch, heads, length, -1).mul_(width**-0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    chances = softmax(scores, dim=-1)
    if length > 1 and attn_mask is not None:  # a padding's query sees nothing, and a NaN would go into its key
        chances = chances.masked_fill(scores.amax(-1, keepdim=True) == float("-inf"), 0)
    chances = chances.view(batch, groups, heads // groups * length, -1)
    mixed = value.mix(chances) if isinstance(value, HostedRows) else mix(chances, value)
    return mixed.to(query.dtype).view(batch, heads, length, -1)


def _suits(rows: Tensor, matrix: Tensor) -> bool:
    """Tell whether the compiled code can compute a product of `rows` with keys or values."""
    return isinstance(matrix, HostedRows) or suits(rows, matrix)


def _product(rows: Tensor, matrix: Tensor) -> Tensor | None:
    """Return ``rows @ matrix`` in float32 if the matrix, or its transpose, suits the compiled code; else None."""
    suited = rows.dim() == matrix.dim() > 1 and rows.shape[-1] == matrix.shape[-2]
    if isinstance(matrix, HostedRows) and suited and not isinstance(rows, HostedRows):
        return matrix.dots(rows) if matrix.turned else matrix.mix(rows)
    if isinstance(matrix, HostedRows) or isinstance(rows, HostedRows):
        raise NotStackedError(f"a product of {list(rows.shape)} and {list(matrix.shape)}, keys or values")
    if not suited:
        return None
    turned = matrix.transpose(-1, -2)
    if suits(rows, turned) or (matrix.dtype == torch.int8 and matrix.stride(-1) != 1):
        return dots(rows, turned)
    return mix(rows, matrix) if suits(rows, matrix) or matrix.dtype == torch.int8 else None


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


# Replacements for the operations that attention to one new token consists of: one fused operation, or products.
OURS: dict[Any, Any] = {
    scaled_dot_product_attention: _attention,
    torch.bmm: _bmm, Tensor.bmm: _bmm, torch.baddbmm: _baddbmm, Tensor.baddbmm: _baddbmm,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
}  # fmt: skip
