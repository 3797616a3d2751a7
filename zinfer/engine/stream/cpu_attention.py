"""CPU attention: a KV cache in host memory that the model uses as if it were on the GPU.

The cache stays in host memory and the operation moves to the CPU: any operation with a `HostTensor` runs there. Its
other operands (a query, a mask: small) are copied to the CPU, and its result is a `HostTensor`, too, until an operation
has a parameter as operand: the output projection. That one runs on the GPU. Models need no change.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax
from torch.utils._pytree import tree_map

from zinfer.engine.stream import stacked
from zinfer.engine.stream.cpu_kernel import attend, can_attend, can_multiply, dequantized, dots, mix
from zinfer.engine.stream.host_work import flush, run_async, to_host_async
from zinfer.engine.stream.stacked import RESHAPES, TURNS, NotStackedError, Stacked, stack
from zinfer.engine.transfer import to_device, to_host

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's <malloc.h>


class HostTensor(Tensor):
    """A CPU tensor whose operations run on the CPU. Made by `as_host_tensor`."""

    home: torch.device  # the device that finally gets the results

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = list(_tensors((args, kwargs)))
        home = next(operand.home for operand in operands if isinstance(operand, HostTensor))
        lands = any(isinstance(operand, nn.Parameter) for operand in operands)
        name = getattr(func, "__name__", "")
        changed = args[0] if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else None
        changed = kwargs.get("out", changed)
        query = _query(func, args, kwargs)
        if func not in OURS and func not in STAYS and name not in MEASURES:
            flush()
        lands |= changed is not None and not isinstance(changed, HostTensor)

        def bring(operand: Any) -> Any:
            if not isinstance(operand, Tensor):
                return operand
            if isinstance(operand, HostRowsTensor):
                return operand
            if operand is query:
                return to_host_async(operand)[0]
            if isinstance(operand, HostTensor):
                operand = operand.as_subclass(Tensor)
                return to_device(operand, home) if lands else operand
            return operand if lands else _copy_to_host(operand)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _changed(bring, (args, kwargs))
            if not kwargs.keys() & {"out", "tensor2"}:
                func = OURS.get(func, func)
            if not lands:
                result = func(*args, **kwargs)
                if isinstance(result, HostTensor):
                    return result
                if _is_plain(result):
                    return as_host_tensor(result, home)
                return tree_map(lambda item: as_host_tensor(item, home) if _is_plain(item) else item, result)
        return func(*args, **kwargs)  # a weight may have functions of its own


class HostInt8Tensor(HostTensor):
    """Tensor of 8-bit rows, made by `zinfer.engine.stream.cpu_kernel.quantize_rows`, that reports the type `wide`.
    Products of attention read the rows as they are; any other operation gets a copy in the type `wide`."""

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
            and not isinstance(args[0], HostInt8Tensor)
            and not isinstance(kwargs.get("batch1"), HostInt8Tensor)
        ):
            return super().__torch_function__(func, types, args, kwargs)
        if (
            args
            and isinstance(args[0], HostInt8Tensor)
            and (func in VIEWS or getattr(func, "__name__", "") in MEASURES)
        ):
            rows = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                result = func(rows.as_subclass(Tensor), *args[1:], **kwargs)
                if not isinstance(result, Tensor):
                    return result
                if result.data_ptr() == rows.data_ptr() and _has_whole_rows(result, rows.width):
                    return as_host_int8(result, rows.home, rows.wide)
        args, kwargs = _changed(
            lambda rows: rows.dequantized() if isinstance(rows, HostInt8Tensor) else rows, (args, kwargs)
        )
        return func(*args, **kwargs)

    def dequantized(self) -> HostTensor:
        """Return a copy in the type `wide`."""
        flush()
        with torch._C.DisableTorchFunctionSubclass():
            content = self.as_subclass(Tensor)
            turned = content.stride(-1) != 1
            dense = dequantized(content.transpose(-1, -2) if turned else content, self.wide)
            return as_host_tensor(dense.transpose(-1, -2) if turned else dense, self.home)


class HostRowsTensor(Stacked, HostTensor):
    """Stacked rows in host memory, of `FLOATS` or as `quantize_rows` returns them. Products of attention read the
    blocks where they are."""

    blocks: tuple[Tensor, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], cls) and (func in VIEWS or getattr(func, "__name__", "") in MEASURES):
            return args[0].seen(func, args[1:], kwargs or {})
        if func not in OURS or (args and isinstance(args[0], cls)):
            raise NotStackedError(f"{getattr(func, '__name__', func)} of keys or values")
        return super(Stacked, cls).__torch_function__(func, types, args, kwargs)

    def like(self, content: Tensor, turned: bool) -> "HostRowsTensor":
        view = super().like(content, turned)
        view.home = self.home
        return view

    def dots(self, queries: Tensor) -> Tensor:
        """Return ``rows @ keys^T`` of rows ``[B, heads, n, D]``, float32."""
        longest = max(block.shape[2] for block in self.blocks)
        out = torch.zeros((*queries.shape[:-1], longest))
        first = 0
        for block in self.blocks:
            last = first + len(block)
            out[first:last, ..., longest - block.shape[2] :] = dots(queries[first:last], block)
            first = last
        return out

    def mix(self, chances: Tensor) -> Tensor:
        """Return ``chances @ values``, with as many leading dimensions as this tensor. Chances are ``[.., n, m]``."""
        split = self.split_heads(chances)
        mixed, first = [], 0
        for block in self.blocks:
            last = first + len(block)
            mixed.append(mix(split[first:last, ..., split.shape[-1] - block.shape[2] :], block))
            first = last
        return torch.cat(mixed).view(*chances.shape[:-1], -1)

    def split_heads(self, rows: Tensor) -> Tensor:
        """Reshape ``[.., n, D]`` rows to ``[B, heads, n, D]``. They have as many leading dimensions as this tensor."""
        if rows.shape[:-2] != self.shape[:-2]:
            raise NotStackedError(f"a product of {list(rows.shape)} and keys or values {list(self.shape)}")
        return rows.reshape(-1, self.blocks[0].shape[1], *rows.shape[-2:])


class DeferredScores(HostTensor):
    """Lazy scores of queries for keys in host memory, or their softmax. They are computed together with the product
    that follows, by `attend`, or, if a model does anything else with them, when it does.
    """

    queries: Tensor  # [B, heads, n, D]
    keys: HostRowsTensor
    scale: float
    biases: tuple[Tensor, ...]  # float32, each expands to [B, heads, n, m]
    shares: bool  # True behind the softmax

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if args and isinstance(args[0], cls):
            result = args[0]._deferred(func, args[1:], kwargs)
        elif func in SUMS and len(args) == 2 and isinstance(args[1], cls):
            result = args[1]._deferred(func, args[:1], kwargs)
        if result is not None:
            return result
        args, kwargs = _changed(
            lambda operand: operand.computed() if isinstance(operand, cls) else operand, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _deferred(self, func: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Defer a function of these scores and `others`, if possible. The product that ends attention is computed; None
        stands for anything else.
        """
        other, name = others[0] if others else None, getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            raise NotStackedError(f"{name} changes scores in place")
        if func in RESHAPES or name in MEASURES:
            with torch._C.DisableTorchFunctionSubclass():
                seen = func(self.as_subclass(Tensor), *others, **kwargs)
            if func not in RESHAPES:
                return seen
            whole = seen.shape[-2:] == self.shape[-2:]
            return self._like(seen.shape) if whole and seen.shape[:-2] in self._leading else None
        if len(others) == 1 and not (kwargs or self.shares):
            if func in SUMS and isinstance(other, Tensor) and other.is_floating_point():
                with torch._C.DisableTorchFunctionSubclass():
                    bias = _bias(_copy_to_host(other), self.shape, self._leading[0])
                dtype = torch.promote_types(self.dtype, other.dtype)
                return self._like(self.shape, dtype, biases=(*self.biases, bias))
            if func in FACTORS and isinstance(other, int | float) and not self.biases:
                return self._like(self.shape, scale=self.scale * (1 / other if func in QUOTIENTS else other))
        if func in SOFTMAXES and not self.shares:
            kwargs = {"dim": other, "dtype": None} | kwargs
            last = kwargs["dim"] in (-1, self.dim() - 1) and len(others) < 2
            return self._like(self.shape, kwargs["dtype"] or self.dtype, shares=True) if last else None
        if func == Tensor.to and isinstance(other, torch.dtype) and len(others) == 1 and not kwargs:
            return self._like(self.shape, other)
        if func == Tensor.float:
            return self._like(self.shape, torch.float32)
        if func == dropout and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
            return self
        if (
            func in MATRIX_PRODUCTS
            and isinstance(other, HostRowsTensor)
            and self.shares
            and not (kwargs or other.turned)
        ):
            return self._mixed(other)
        return None

    @property
    def _leading(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that the leading dimensions may have."""
        rows, heads = self.queries.shape[:2]
        return (rows, heads), (rows * heads,)

    def _like(self, shape: Sequence[int], dtype: torch.dtype | None = None, **changed: Any) -> "DeferredScores":
        scores = torch.empty(1, dtype=dtype or self.dtype).expand(shape).as_subclass(DeferredScores)
        for name in ("home", "queries", "keys", "scale", "biases", "shares"):
            setattr(scores, name, changed.get(name, getattr(self, name)))
        return scores

    def _mixed(self, values: HostRowsTensor) -> Tensor | None:
        """Return the product of the shares with `values`; None if the compiled code does not compute it in one."""
        blocks = list(zip(self.keys.blocks, values.blocks, strict=True))
        if self.shape[:-2] != values.shape[:-2] or not can_attend(self.queries, blocks):
            return None
        mixed = run_async(_attend(self.queries, blocks, self.biases, self.scale))
        with torch._C.DisableTorchFunctionSubclass():
            return as_host_tensor(mixed.to(self.dtype).view(*self.shape[:-1], -1), self.home)

    def computed(self) -> HostTensor:
        """Return the scores, or shares, computed by themselves."""
        flush()
        with torch._C.DisableTorchFunctionSubclass():
            scores = self.keys.dots(self.queries).mul_(self.scale)
            for bias in self.biases:
                scores += bias
            scores = softmax(scores, dim=-1) if self.shares else scores
            return as_host_tensor(scores.to(self.dtype).view(self.shape), self.home)


def attend_all(
    queries: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Tensor], scale: float | None
) -> Tensor:
    """Return the float32 attention of `queries` to all `blocks`. It is what `cpu_kernel.attend` returns. Other passes
    go on meanwhile; torch computes what the compiled code cannot.
    """
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    if can_attend(queries, blocks):
        return run_async(_attend(queries, blocks, biases, factor))
    flush()
    mixed, first, longest = list[Tensor](), 0, max(keys.shape[2] for keys, _ in blocks)
    for keys, values in blocks:
        rows = slice(first, first + len(keys))
        first = rows.stop
        seen = biases[0][rows, ..., longest - keys.shape[2] :] if biases else None
        mixed.append(_attention(queries[rows], keys, values, seen, scale=factor).float())
    return torch.cat(mixed)


def _attend(
    queries: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Tensor], scale: float
) -> Callable[[], Tensor]:
    """Return a function that computes `attend` with the caller's thread count."""
    return partial(attend, queries, blocks, biases, scale, torch.get_num_threads())


def _query(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the query, on a GPU, that `to_host_async` brings; None of functions that do not begin attention."""
    if func in WITH_QUERY:
        name, index = WITH_QUERY[func]
        query = kwargs[name] if name in kwargs else args[index] if index < len(args) else None
        if isinstance(query, Tensor) and not isinstance(query, HostTensor) and query.is_cuda:
            return query
    return None


def _scores(rows: Tensor, keys: HostRowsTensor, scale: float = 1.0, added: Tensor | None = None) -> DeferredScores:
    """Return ``scale * rows @ keys^T + added``, to be computed later; `keys` are turned."""
    queries = keys.split_heads(rows)
    shape = (*rows.shape[:-1], keys.shape[-1])
    bias = () if added is None else (_bias(added, shape, queries.shape[:2]),)
    scores = torch.empty(1, dtype=rows.dtype).expand(shape).as_subclass(DeferredScores)
    scores.home, scores.queries, scores.keys = keys.home, queries, keys
    scores.scale, scores.biases, scores.shares = scale, bias, False
    return scores


def _bias(added: Tensor, shape: Sequence[int], leading: Sequence[int]) -> Tensor:
    """Return the bias of scores, as `attend` takes it. `leading` are the rows and heads of the scores' `shape`."""
    if torch.broadcast_shapes(added.shape, shape) != torch.Size(shape):
        raise NotStackedError(f"{list(added.shape)} added to scores {list(shape)}")
    bias = _as_float_once(added)
    if len(shape) == 4 or bias.dim() < 3:
        return bias
    return bias[None] if len(bias) == 1 else bias.view(*leading, *bias.shape[1:])


def _as_float_once(added: Tensor) -> Tensor:
    """Return a mask or bias in float32, -inf where False. Copies that `_copy_to_host` made, which nobody changes, are
    converted once.
    """
    if added.dtype == torch.float32:
        return added
    cached: Tensor | None = getattr(added, "_as_float", None)
    if cached is not None:
        return cached
    hidden = added.new_zeros(added.shape, dtype=torch.float32)
    converted = hidden.masked_fill_(~added, float("-inf")) if added.dtype == torch.bool else added.float()
    if getattr(added, "_is_copy", False):
        added._as_float = converted  # type: ignore[attr-defined]
    return converted


def stack_host_rows(blocks: Sequence[Tensor], home: torch.device, dtype: torch.dtype) -> HostRowsTensor:
    """Return `HostRowsTensor` of CPU `blocks`. Each is ``[b, heads, n, D]``, n its own; their type is `dtype`."""
    stacked_rows = stack(blocks, dtype).as_subclass(HostRowsTensor)
    stacked_rows.blocks, stacked_rows.turned, stacked_rows.home = tuple(blocks), False, home
    return stacked_rows


# Functions whose operand of that name, or at that place, is a query.
WITH_QUERY = {
    scaled_dot_product_attention: ("query", 0), torch.bmm: ("input", 0), Tensor.bmm: ("self", 0),
    torch.baddbmm: ("batch1", 1), Tensor.baddbmm: ("batch1", 1), torch.matmul: ("input", 0),
    Tensor.matmul: ("self", 0), Tensor.__matmul__: ("self", 0),
}  # fmt: skip
# Functions of scores that need not be computed for them.
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
QUOTIENTS = {torch.div, Tensor.div, Tensor.__truediv__}
FACTORS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__} | QUOTIENTS
SOFTMAXES = {softmax, torch.softmax, Tensor.softmax}
MATRIX_PRODUCTS = {torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}

# Functions that return views, and functions that only ask for a tensor's size or place.
VIEWS = RESHAPES | TURNS
STAYS = {Tensor.view, *TURNS}  # views that never copy
MEASURES = stacked.MEASURES | {"data_ptr"}


def as_host_tensor(tensor: Tensor, home: torch.device) -> HostTensor:
    """Return a view of `tensor` whose operations run on the CPU; their results belong on `home`."""
    view = tensor.as_subclass(HostTensor)
    view.home = home
    return view


def as_host_int8(content: Tensor, home: torch.device, dtype: torch.dtype) -> HostInt8Tensor:
    """Return a `HostInt8Tensor` view of `content` (int8, whole rows, possibly transposed)."""
    view = content.as_subclass(HostInt8Tensor)
    view.home, view.wide = home, dtype
    view.width = content.size(-1) if content.stride(-1) == 1 else content.size(-2)
    return view


@cache
def keep_freed_memory() -> None:
    """Make malloc keep freed memory in this process, up to 2 GiB; needs glibc. Otherwise attention's intermediate
    results, tens of MB, go back to the system at once, which hands out and clears their pages again in the next layer:
    that can take as long as attention itself."""
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
    """Map `change` over the operands of a function. This takes a fraction of the time of `torch.utils._pytree`, which
    knows other containers, too.
    """
    if type(operands) in (tuple, list):
        return type(operands)(_changed(change, operand) for operand in operands)
    if type(operands) is dict:
        return {name: _changed(change, operand) for name, operand in operands.items()}
    return change(operands)


def _has_whole_rows(content: Tensor, width: int) -> bool:
    if content.dim() < 2:
        return False
    return (content.stride(-1), content.size(-1)) == (1, width) or (content.stride(-2), content.size(-2)) == (1, width)


def _copy_to_host(operand: Tensor) -> Tensor:
    """Return `operand` on the CPU. A tensor that all layers share (a mask, a bias; never changed in place) is copied
    once."""
    if operand.device.type == "cpu":
        return operand
    if not hasattr(operand, "_on_host"):
        (operand._on_host,) = to_host(operand)  # type: ignore[attr-defined]
        operand._on_host._is_copy = True  # type: ignore[attr-defined]
    return operand._on_host  # type: ignore[attr-defined,no-any-return]


def _is_plain(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.device.type == "cpu"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` where query heads share key heads. Queries are ``[B, H, n, D]``, keys
    ``[B, K, m, D]``; the queries of a group are rows of one product, so that each key is read once.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * length, width)
    whole = (is_causal and length > 1) or (groups != heads and attn_mask is not None and attn_mask.shape[1] != 1)
    if whole or not (_can_multiply(rows, key) and _can_multiply(rows, value)):
        flush()
        if isinstance(key, HostRowsTensor) or isinstance(value, HostRowsTensor):
            raise NotStackedError("causal attention of several tokens, or of heads that share keys")
        key, value = dequantized(key, query.dtype), dequantized(value, query.dtype)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if isinstance(key, HostRowsTensor) and key.padded and attn_mask is None:
        raise NotStackedError("attention without a mask that hides padding")
    blocks = [(key, value)]
    if isinstance(key, HostRowsTensor) and isinstance(value, HostRowsTensor):
        blocks = list(zip(key.blocks, value.blocks, strict=True))
    factor = width**-0.5 if scale is None else scale
    if can_attend(rows, blocks):
        biases = [] if attn_mask is None else [_as_float_once(attn_mask)]
        if groups != heads and length > 1:  # queries of a group stand one behind the other
            biases = [bias.expand(*bias.shape[:2], length, -1).repeat(1, 1, heads // groups, 1) for bias in biases]
        mixed = run_async(_attend(rows, blocks, biases, factor))
        return mixed.to(query.dtype).view(batch, heads, length, -1)
    flush()
    scores = key.dots(rows) if isinstance(key, HostRowsTensor) else dots(rows, key)
    scores = scores.view(batch, heads, length, -1).mul_(factor)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    chances = softmax(scores, dim=-1)
    if length > 1 and attn_mask is not None:  # a padding's query sees nothing, and a NaN would go into its key
        chances = chances.masked_fill(scores.amax(-1, keepdim=True) == float("-inf"), 0)
    chances = chances.view(batch, groups, heads // groups * length, -1)
    mixed = value.mix(chances) if isinstance(value, HostRowsTensor) else mix(chances, value)
    return mixed.to(query.dtype).view(batch, heads, length, -1)


def _can_multiply(rows: Tensor, matrix: Tensor) -> bool:
    return isinstance(matrix, HostRowsTensor) or can_multiply(rows, matrix)


def _product(rows: Tensor, matrix: Tensor) -> Tensor | None:
    """Return ``rows @ matrix`` in float32 by the compiled code, or None. It is None unless the matrix or
    its transpose suits that code. Scores of stacked rows are computed later.
    """
    suited = rows.dim() == matrix.dim() > 1 and rows.shape[-1] == matrix.shape[-2]
    if isinstance(matrix, HostRowsTensor) and suited and matrix.turned and not isinstance(rows, HostRowsTensor):
        return _scores(rows, matrix)
    flush()
    if isinstance(matrix, HostRowsTensor) and suited and not isinstance(rows, HostRowsTensor):
        return matrix.mix(rows)
    if isinstance(matrix, HostRowsTensor) or isinstance(rows, HostRowsTensor):
        raise NotStackedError(f"a product of {list(rows.shape)} and {list(matrix.shape)}, keys or values")
    if not suited:
        return None
    turned = matrix.transpose(-1, -2)
    if can_multiply(rows, turned) or (matrix.dtype == torch.int8 and matrix.stride(-1) != 1):
        return dots(rows, turned)
    return mix(rows, matrix) if can_multiply(rows, matrix) or matrix.dtype == torch.int8 else None


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    product = _product(input, mat2)
    return torch.bmm(input, mat2) if product is None else _as(input.dtype, product)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _product(batch1, batch2)
    if product is None:
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    if isinstance(product, DeferredScores):
        return _scores(batch1, product.keys, alpha, input if beta == 1 else input * beta)
    return product.mul_(alpha).add_(input, alpha=beta).to(batch1.dtype)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    product = _product(input, other)
    return torch.matmul(input, other) if product is None else _as(input.dtype, product)


def _as(dtype: torch.dtype, product: Tensor) -> Tensor:
    return product if isinstance(product, DeferredScores) else product.to(dtype)


# Replacements for the operations that attention to one new token consists of: one fused operation, or products.
OURS: dict[Any, Any] = {
    scaled_dot_product_attention: _attention,
    torch.bmm: _bmm, Tensor.bmm: _bmm, torch.baddbmm: _baddbmm, Tensor.baddbmm: _baddbmm,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
}  # fmt: skip
