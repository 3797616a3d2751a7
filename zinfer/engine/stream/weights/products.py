"""Products of few tokens with resident quantised weights, from their codes.

Unpacking such a weight first writes it to the layer buffer in 16 bits and reads it again, six to eight times the bytes
of codes of 4 bits. Many tokens are worth that; for few, a kernel (`zinfer.engine.stream.weights.product_kernel`) reads
the codes once.

A weight that the kernel serves is a `LazyWeight`: a parameter in the layer buffer, as others are, but unpacked when
something first reads its values. `torch.nn.functional.linear` for few tokens does not. All else that torch is given the
weight for does: a product of many tokens, a view, a copy. So no code for modules and architectures is needed, and what
reads a weight without its module reads the right values.

Stacked experts are multiplied pair by pair, as `zinfer.engine.stream.experts.few_experts` does with experts of 16 bits.

Ordinary unpacking serves columns in an order of their own (GPTQ with `desc_act`), and codes that are coded losslessly
(FP8). The first product of each kind is computed both ways: kernels that do not compile, or give other results, are not
used any more, and the record has the reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zinfer.core.engine import CODED_TOKENS
from zinfer.core.errors import error_line
from zinfer.engine.pinned import TensorPlace
from zinfer.engine.state import Entry
from zinfer.engine.stream.weights.chunk import Chunk
from zinfer.engine.stream.weights.formats import TRANSPOSED_ROWS, CodesLayout, Run
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.triton_check import alike, cannot_run

Product = Callable[[Tensor, Tensor | None], Tensor | None]
Parts = tuple[tuple[int, Run], ...]  # rows of a weight, in order: bytes before them in the layer, and their chunks

# Functions that return or set the place, shape and type of a tensor, and read none of its values.
_ATTRIBUTES: tuple[Any, ...] = (
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda,
)  # fmt: skip
_METHODS: tuple[Any, ...] = (
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.__hash__,
)  # fmt: skip
_VALUELESS = frozenset(
    [*(attribute.__get__ for attribute in _ATTRIBUTES), *_METHODS, getattr(Tensor.data, "__set__")]  # noqa: B009
)


class LazyWeight(nn.Parameter):
    """Weight whose values `fill` puts in place before anything reads them.

    `product` gets the states and the bias of a product with it instead, and returns the product, or None if the values
    are needed all the same. Experts that are `stacked`, ``[E, ..]``, are multiplied by
    `zinfer.engine.stream.experts.few_experts`.
    """

    fill: Callable[[], None]
    product: Product | None
    stacked: "StackedCodes | None"

    def __new__(
        cls, data: Tensor, fill: Callable[[], None], product: Product | None, stacked: "StackedCodes | None" = None
    ) -> "LazyWeight":
        weight: LazyWeight = torch.Tensor._make_subclass(cls, data, False)
        weight.fill, weight.product, weight.stacked = fill, product, stacked
        return weight

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        if any(not issubclass(kind, nn.Parameter) for kind in types):  # tensors of another kind decide
            _fill((args, tuple(options.values())))
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear and (product := _product(*args, **options)) is not None:
                return product
            if function not in _VALUELESS:
                _fill((args, tuple(options.values())))
            return function(*args, **options)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return a product by the function of `weight`; None if it has none."""
    if not isinstance(weight, LazyWeight) or isinstance(input, LazyWeight) or isinstance(bias, LazyWeight):
        return None
    return None if weight.product is None else weight.product(input, bias)


def _fill(values: Sequence[Any]) -> None:
    """Fill in the lazy weights among arguments."""
    for value in values:
        if isinstance(value, LazyWeight):
            value.fill()
        elif isinstance(value, list | tuple):
            _fill(value)


def parts_of(chunks: Sequence[Chunk], block: TensorPlace, start: int) -> Parts | None:
    """Return the rows of a weight as runs of its `chunks`. Stacked experts follow each other. The weight is at `block`
    in the layer buffer, its bytes in the layer begin behind `start`. None if the kernel does not read them: neither a
    matrix nor a stack of them, or not all of it in plain codes with scales of consecutive columns."""
    runs = list[tuple[int, Run]]()
    rows = 0
    if len(block.shape) not in (2, 3):
        return None
    for chunk in chunks:
        layout, begin = chunk.layout, chunk.start - start
        if not isinstance(layout, CodesLayout) or layout.coded is not None or layout.order:
            return None
        if len(block.shape) == 2 and not _whole_bytes(layout):
            return None
        if (layout.columns, layout.dtype) != (block.shape[-1], block.dtype):
            return None
        if chunk.place != block.offset + rows * layout.columns * block.dtype.itemsize:
            return None
        rows += layout.rows
        longer = runs[-1][1].continued(layout, begin - runs[-1][0]) if runs else None
        if longer is not None:
            runs[-1] = runs[-1][0], longer
        else:
            runs.append((begin, Run(layout, layout)))
    return tuple(runs) if runs and rows == prod(block.shape[:-1]) else None


def _whole_bytes(layout: CodesLayout) -> bool:
    """Tell whether the columns that share a scale fill bytes."""
    return layout.grid[1] == 1 or layout.block[1] * layout.bits % 8 == 0


class CheckedKernel:
    """Kernel that is given up if it fails. It is also given up if it differs in the first call of a kind.

    `status` is ``on``, the reason why it is not used, or None where nothing is for it; `reference` names what the
    results are compared with.
    """

    def __init__(self, status: str | None, reference: str) -> None:
        self.status, self._reference = status, reference
        self._checked = set[object]()

    def checked(self, kind: object, kernel: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor | None:
        """Return the kernel's result, or `plain`'s if it differs; None if the kernel fails."""
        try:
            result = kernel()
            if kind in self._checked:
                return result
            expected = plain()
            same = alike(result, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # of a recording that failed before
            self.status = f"the kernel failed: {error_line(error)[:120]}"
            return None
        if not same:
            self.status = f"the kernel's results differ from those of {self._reference}"
            return expected
        self._checked.add(kind)
        return result


class PackedProducts(CheckedKernel):
    """Products with the weights of resident layers."""

    status: str

    def __init__(self, device: torch.device) -> None:
        super().__init__(cannot_run(device) or "on", "unpacked weights")
        self._lazy: dict[int, dict[str, tuple[Chunk, ...]]] = {}  # by layer: its lazy weights
        self._waiting: tuple[int, dict[str, tuple[Chunk, ...]]] = -1, {}  # those of a layer that are not unpacked yet

    def attach(self, ring: PrefetchRing, index: int, layer: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Attach a layer to `ring`. Its weights that the kernel serves are lazy."""
        packed, weights = ring.layers[index], dict[str, Tensor]()
        lazy = dict[str, tuple[Chunk, ...]]()
        for name, block in packed.blocks.items() if self.status == "on" else ():
            chunks = tuple(chunk for chunk in packed.chunks if block.offset <= chunk.place < block.offset + block.size)
            parts = parts_of(chunks, block, packed.start) if entries[name].is_parameter else None
            if parts is None:
                continue
            product, stacked = None, None
            if len(block.shape) == 3:
                stacked = StackedCodes(self, parts, block.shape[0], partial(ring.computing_content, index))
            else:
                product = partial(self._multiply, ring, index, name, parts)
            fill = partial(self._fill_in, ring, index, name)
            weights[name], lazy[name] = LazyWeight(block.view(ring.layer_buffer), fill, product, stacked), chunks
        self._lazy |= {index: lazy} if lazy else {}
        ring.attach(index, layer, entries, weights, partial(self._unpack, ring, index) if lazy else None)

    def serves(self, layers: Iterable[int]) -> bool:
        """Tell whether there are lazy weights in `layers`."""
        return not self._lazy.keys().isdisjoint(layers)

    def restart(self, index: int) -> None:
        """Have the next layer's lazy weights unpacked when read. It is layer `index`."""
        self._waiting = index, dict(self._lazy.get(index, {}))

    def _unpack(self, ring: PrefetchRing, index: int) -> None:
        """Unpack a layer that stays, but for its lazy weights."""
        self.restart(index)
        lazy = {chunk.start for chunks in self._lazy[index].values() for chunk in chunks}
        ring.unpack_chunks(index, [chunk for chunk in ring.layers[index].chunks_to_unpack if chunk.start not in lazy])

    def _fill_in(self, ring: PrefetchRing, index: int, name: str) -> None:
        """Unpack a lazy weight of the computing layer."""
        layer, waiting = self._waiting
        if layer == index and name in waiting and ring.computing_content(index) is not None:
            ring.unpack_chunks(index, waiting.pop(name))

    def _multiply(
        self, ring: PrefetchRing, index: int, name: str, parts: Parts, states: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Multiply with a weight from its codes; None if it must be unpacked."""
        content = ring.computing_content(index)
        if content is None:
            return None

        def plain() -> Tensor:
            self._fill_in(ring, index, name)
            return functional.linear(states, ring.layers[index].blocks[name].view(ring.layer_buffer), bias)

        return self.compute(parts, content, states, bias, plain)

    def compute(
        self, parts: Parts, data: Tensor, states: Tensor, bias: Tensor | None, plain: Callable[[], Tensor]
    ) -> Tensor | None:
        """Multiply `states` ``[.., columns]`` with a weight; None if the kernel cannot. `parts` are the weight's,
        `data` the bytes of its layer. `plain` returns what torch computes."""
        if self.status != "on" or states.device != data.device or not _serves(parts, states, bias):
            return None
        kind = tuple(run for _, run in parts), bias is None, -(-states.numel() // states.shape[-1] // 16)
        return self.checked(kind, lambda: _compute(parts, data, states, bias), plain)


@dataclass(frozen=True)
class StackedCodes:
    """Codes of `count` stacked experts in a resident layer. `content` returns the layer's bytes, None while the layer
    streams."""

    products: PackedProducts
    parts: Parts
    count: int
    content: Callable[[], Tensor | None]

    def ready(self, transposed: bool) -> bool:
        """Tell whether the kernel reads the experts now. They are ``[E, rows, columns]``, or if `transposed` ``[E,
        columns, rows]``."""
        if self.products.status != "on" or len(self.parts) != 1 or self.content() is None:
            return False
        layout, inputs = self.parts[0][1].layout, self.parts[0][1].rows // self.count
        if not transposed:
            return _whole_bytes(layout)
        return layout.grid[0] == 1 or layout.block[0] % TRANSPOSED_ROWS == 0 == inputs % layout.block[0]

    def multiply(self, states: Tensor, experts: Tensor, transposed: bool) -> Tensor:
        """Return partial products of each pair of token and expert. They are float32 ``[pairs, splits, rows]``, to be
        added along `splits`. The codes have to be `ready`; `states` is ``[tokens, columns]``, or ``[pairs, columns]``,
        `experts` ``[tokens, k]``, both contiguous."""
        from zinfer.engine.stream.weights.product_kernel import multiply_experts

        ((start, run),), data = self.parts, self.content()
        assert data is not None
        return multiply_experts(states, data[start:], run, experts, self.count, transposed)


def _serves(parts: Parts, states: Tensor, bias: Tensor | None) -> bool:
    layout, rows = parts[0][1].layout, sum(run.rows for _, run in parts)
    if states.dtype != layout.dtype or states.dim() < 1 or states.shape[-1] != layout.columns or states.requires_grad:
        return False
    if bias is not None and (bias.dtype != states.dtype or bias.shape != (rows,) or bias.stride(0) != 1):
        return False
    return 0 < states.numel() <= CODED_TOKENS * layout.columns


def _compute(parts: Parts, data: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
    from zinfer.engine.stream.weights.product_kernel import multiply, pair_columns

    layout, rows = parts[0][1].layout, sum(run.rows for _, run in parts)
    flat = states.reshape(-1, layout.columns)
    paired = {bits: pair_columns(flat, bits) for bits in {run.layout.bits for _, run in parts}}
    out, first = torch.empty((len(flat), rows), dtype=states.dtype, device=states.device), 0
    for start, run in parts:
        span = slice(first, first + run.rows)
        added = None if bias is None else bias[span]
        multiply(paired[run.layout.bits], data[start:], run, added, out[:, span], len(flat))
        first = span.stop
    return out.view(*states.shape[:-1], rows)
