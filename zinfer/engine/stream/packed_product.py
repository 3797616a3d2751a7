"""Products of few tokens with weights that stay on the GPU quantised, from their codes.

Unpacking such a weight first writes it to the slot in 16 bits and reads it again, six to eight times the bytes of codes
of 4 bits. Many tokens are worth that; for few, a kernel (`zinfer.engine.stream.product_kernel`) reads the codes once.

A weight that the kernel serves is a `LazyWeight`: a parameter in the slot, as others are, but its values are put there
when something first reads them. `torch.nn.functional.linear` for few tokens does not. All else that torch is given the
weight for does: a product of many tokens, a view, a copy. So no module and no architecture has to be known, and what
reads a weight beside its module reads the right values.

Stacked experts are multiplied pair by pair, as `zinfer.engine.stream.few_experts` does with experts of 16 bits.

Ordinary unpacking serves columns in an order of their own (GPTQ with `desc_act`), and codes that are coded losslessly
(FP8). The first product of each kind is computed both ways: kernels that do not compile, or give other results, are not
used any more, and the reason is told.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zinfer.core.engine import CODED_TOKENS
from zinfer.core.errors import error_line
from zinfer.engine.pinned import TensorPlace
from zinfer.engine.stream.packed_layer import Chunk
from zinfer.engine.stream.quantized import TURNED_ROWS, CodesLayout, Run
from zinfer.engine.triton_check import alike, cannot_run

Product = Callable[[Tensor, Tensor | None], Tensor | None]
Parts = tuple[tuple[int, Run], ...]  # rows of a weight, in order: bytes before them in the layer, and their chunks

# What tells or sets the place, shape and type of a tensor, and nothing of its values.
_ATTRIBUTES: tuple[Any, ...] = (
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda,
)  # fmt: skip
_METHODS: tuple[Any, ...] = (
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.__hash__,
)  # fmt: skip
_VALUELESS = frozenset([*(one.__get__ for one in _ATTRIBUTES), *_METHODS, getattr(Tensor.data, "__set__")])  # noqa: B009


class LazyWeight(nn.Parameter):
    """Matrix whose values `fill` puts in place before anything reads them. `product` gets the states and the bias of a
    product with it instead, and returns it, or None if the values are needed all the same. Experts that are `stacked`,
    ``[E, ..]``, are multiplied by what knows of them (`zinfer.engine.stream.few_experts`)."""

    fill: Callable[[], None]
    product: Product | None
    stacked: "StackedCodes | None"

    def __new__(
        cls, data: Tensor, fill: Callable[[], None], product: Product | None, stacked: "StackedCodes | None" = None
    ) -> "LazyWeight":
        found: LazyWeight = torch.Tensor._make_subclass(cls, data, False)
        found.fill, found.product, found.stacked = fill, product, stacked
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        if any(not issubclass(one, nn.Parameter) for one in types):  # tensors of another kind decide
            for weight in _weights((args, tuple(options.values()))):
                weight.fill()
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear:
                found = _product(*args, **options)
                if found is not None:
                    return found
            if function not in _VALUELESS:
                for weight in _weights((args, tuple(options.values()))):
                    weight.fill()
            return function(*args, **options)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return a product by what `weight` has for it; None if it has nothing."""
    others = [one for one in (input, bias) if isinstance(one, LazyWeight)]
    product = weight.product if isinstance(weight, LazyWeight) and not others else None
    return None if product is None else product(input, bias)


def _weights(values: Sequence[Any]) -> Iterator[LazyWeight]:
    """Yield the lazy weights among arguments."""
    for value in values:
        if isinstance(value, LazyWeight):
            yield value
        elif isinstance(value, list | tuple):
            yield from _weights(value)


def parts_of(pieces: Sequence[Chunk], place: TensorPlace, start: int) -> Parts | None:
    """Return the rows of the weight at `place` in the slot, whose bytes in the layer begin behind `start`; of stacked
    experts one after the other. None if the kernel does not read them: neither a matrix nor a stack of them, or not all
    of it in plain codes with scales of consecutive columns."""
    found = list[tuple[int, Run]]()
    rows = 0
    if len(place.shape) not in (2, 3):
        return None
    for piece in pieces:
        layout, begin = piece.layout, piece.start - start
        if not isinstance(layout, CodesLayout) or layout.coded is not None or layout.order:
            return None
        if len(place.shape) == 2 and not _whole_bytes(layout):
            return None
        if (layout.columns, layout.dtype) != (place.shape[-1], place.dtype):
            return None
        if piece.place != place.offset + rows * layout.columns * place.dtype.itemsize:
            return None
        rows += layout.rows
        more = found[-1][1].continued(layout, begin - found[-1][0]) if found else None
        if more is not None:
            found[-1] = found[-1][0], more
        else:
            found.append((begin, Run(layout, layout)))
    return tuple(found) if found and rows == prod(place.shape[:-1]) else None


def _whole_bytes(layout: CodesLayout) -> bool:
    """Tell whether the columns that share a scale fill bytes."""
    return layout.grid[1] == 1 or layout.block[1] * layout.bits % 8 == 0


class PackedProducts:
    """Products with the weights of layers that stay; `status` is ``on``, or the reason why the kernel is not used."""

    def __init__(self, device: torch.device) -> None:
        self.status = cannot_run(device) or "on"
        self._checked = set[tuple[object, ...]]()

    def compute(
        self, parts: Parts, data: Tensor, states: Tensor, bias: Tensor | None, plain: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return the product of `states` ``[.., columns]`` with the weight of `parts`, whose layer's bytes are `data`,
        and of `bias`; None if the kernel does not serve it. `plain` returns what torch computes."""
        if self.status != "on" or states.device != data.device or not _serves(parts, states, bias):
            return None
        kind = tuple(run for _, run in parts), bias is None, -(-states.numel() // states.shape[-1] // 16)
        try:
            found = _compute(parts, data, states, bias)
            if kind in self._checked:
                return found
            expected = plain()
            same = alike(found, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.status = f"the kernel failed: {error_line(error)[:120]}"
            return None
        if not same:
            self.status = "the kernel's results differ from those of unpacked weights"
            return expected
        self._checked.add(kind)
        return found


@dataclass(frozen=True)
class StackedCodes:
    """Codes of `count` stacked experts in a layer that stays on the GPU; `content` returns the layer's bytes, None
    while the layer comes through the slot."""

    products: PackedProducts
    parts: Parts
    count: int
    content: Callable[[], Tensor | None]

    def ready(self, transposed: bool) -> bool:
        """Tell whether the kernel reads the experts, ``[E, rows, columns]``, or if `transposed` ``[E, columns,
        rows]``."""
        if self.products.status != "on" or len(self.parts) != 1 or self.content() is None:
            return False
        layout, inputs = self.parts[0][1].layout, self.parts[0][1].rows // self.count
        if not transposed:
            return _whole_bytes(layout)
        return layout.grid[0] == 1 or layout.block[0] % TURNED_ROWS == 0 == inputs % layout.block[0]

    def multiply(self, states: Tensor, experts: Tensor, transposed: bool) -> Tensor:
        """Return partial products of each pair of a token and an expert, float32 ``[pairs, splits, rows]``, to be added
        along `splits`, if the codes are `ready`; `states` is ``[tokens, columns]``, or ``[pairs, columns]``, `experts`
        ``[tokens, k]``, both contiguous."""
        from zinfer.engine.stream.product_kernel import multiply_experts

        ((start, run),), data = self.parts, self.content()
        assert data is not None
        return multiply_experts(states, data[start:], run, experts, self.count, transposed)


def _serves(parts: Parts, states: Tensor, bias: Tensor | None) -> bool:
    """Tell whether the kernel serves a product, and is faster."""
    layout, rows = parts[0][1].layout, sum(run.rows for _, run in parts)
    if states.dtype != layout.dtype or states.dim() < 1 or states.shape[-1] != layout.columns or states.requires_grad:
        return False
    if bias is not None and (bias.dtype != states.dtype or bias.shape != (rows,) or bias.stride(0) != 1):
        return False
    return 0 < states.numel() <= CODED_TOKENS * layout.columns


def _compute(parts: Parts, data: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product that `_serves` by the kernel."""
    from zinfer.engine.stream.product_kernel import multiply, paired

    layout, rows = parts[0][1].layout, sum(run.rows for _, run in parts)
    flat = states.reshape(-1, layout.columns)
    given = {bits: paired(flat, bits) for bits in {run.layout.bits for _, run in parts}}
    out, place = torch.empty((len(flat), rows), dtype=states.dtype, device=states.device), 0
    for start, run in parts:
        own = slice(place, place + run.rows)
        multiply(given[run.layout.bits], data[start:], run, None if bias is None else bias[own], out[:, own], len(flat))
        place = own.stop
    return out.view(*states.shape[:-1], rows)
