"""Products with resident quantised weights, from their codes.

Unpacking such a weight first writes it to the layer buffer in 16 bits and reads it again, six to eight times the bytes
of codes of 4 bits. So `PackedProducts.prepare` brings the codes of layers that stay into the form of kernels that read
them (`zinfer.engine.stream.weights.low_bit`), in place of their chunks.

Such a weight is a `LazyWeight`: a parameter in the layer buffer, as others are, but unpacked when something first reads
its values. `torch.nn.functional.linear` does not, nor do routed experts (`zinfer.engine.stream.experts.few_experts`);
all else that torch is given the weight for does. So no code for modules and architectures is needed.

Weights that the kernels cannot read are unpacked in each pass: columns in an order of their own (GPTQ with `desc_act`),
codes that are coded losslessly (FP8), and odd sizes. The first matrix of each kind is multiplied both ways: kernels
that do not compile, or give other results, are not used, and the record has the reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zinfer.core.case import Option
from zinfer.core.errors import error_line
from zinfer.core.progress import Progress, note, silent
from zinfer.engine.pinned import TensorPlace
from zinfer.engine.state import Entry
from zinfer.engine.stream.weights import low_bit
from zinfer.engine.stream.weights.chunk import Chunk
from zinfer.engine.stream.weights.formats import CodesLayout
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.triton_check import alike

Product = Callable[[Tensor, Tensor | None], Tensor | None]
Parts = Sequence[tuple[Chunk, Tensor]]  # chunks of a weight, and their bytes
CHECKED = 3  # tokens of the first product of a kind, and experts: the first, one in the middle, the last

# Functions that return or set the place, shape and type of a tensor, and read none of its values.
_ATTRIBUTES: tuple[Any, ...] = (
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda,
)  # fmt: skip
_METHODS: tuple[Any, ...] = (
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.__hash__,
)  # fmt: skip
_VALUELESS = frozenset(
    [*(attribute.__get__ for attribute in _ATTRIBUTES), *_METHODS, getattr(Tensor.data, "__set__")]  # noqa: B009
)


class LazyWeight(nn.Parameter):
    """Weight whose values `fill` puts in place before anything reads them. `product` gets the states and the bias of a
    product with it instead, and returns the product, or None if the values are needed all the same. `matrix` returns
    what kernels multiply with, if its layer stays."""

    fill: Callable[[], None]
    product: Product
    matrix: Callable[[], low_bit.Matrix | None]

    def __new__(
        cls, data: Tensor, fill: Callable[[], None], product: Product, matrix: Callable[[], low_bit.Matrix | None]
    ) -> "LazyWeight":
        weight: LazyWeight = torch.Tensor._make_subclass(cls, data, False)
        weight.fill, weight.product, weight.matrix = fill, product, matrix
        return weight

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear and (product := _product(*args, **options)) is not None:
                return product
            if function not in _VALUELESS:
                _fill((args, tuple(options.values())))
            return function(*args, **options)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return a product by the function of `weight`; None if it has none."""
    return weight.product(input, bias) if isinstance(weight, LazyWeight) else None


def _fill(values: Sequence[Any]) -> None:
    """Fill in the lazy weights among arguments."""
    for value in values:
        if isinstance(value, LazyWeight):
            value.fill()
        elif isinstance(value, list | tuple):
            _fill(value)


class CheckedKernel:
    """Kernel that is given up if it fails. It is also given up if it differs in the first call of a kind; then
    `progress` shows a line. `status` is ``on``, the reason why it is not used, or None where nothing is for it;
    `reference` names what the results are compared with."""

    def __init__(self, status: str | None, reference: str, progress: Progress = silent) -> None:
        self.status, self._reference, self._progress = status, reference, progress
        self._checked = set[object]()

    def give_up(self, reason: str) -> None:
        """Use the kernel no more. Whoever measures or waits would wonder."""
        self.status = reason
        note(self._progress, f"using {self._reference} instead of a faster kernel: {reason}")

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
            self.give_up(f"the kernel failed: {error_line(error)[:120]}")
            return None
        if not same:
            self.give_up(f"the kernel's results differ from those of {self._reference}")
            return expected
        self._checked.add(kind)
        return result


class PackedProducts(CheckedKernel):
    """Products with the weights of resident layers."""

    status: str

    def __init__(self, device: torch.device, progress: Progress = silent) -> None:
        super().__init__(low_bit.cannot_run(device) or "on", "unpacked weights", progress)
        self._lazy: dict[int, tuple[str, ...]] = {}  # by layer: names of its lazy weights
        self._matrices: dict[int, dict[str, low_bit.Matrix]] = {}  # of resident layers
        self._waiting: tuple[int, set[str]] = -1, set()  # lazy weights of a layer that are not unpacked yet

    def attach(self, ring: PrefetchRing, index: int, layer: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Attach a layer to `ring`. Its weights that kernels may read are lazy."""
        packed, weights = ring.layers[index], dict[str, Tensor]()
        for name, block in packed.blocks.items() if self.status == "on" else ():
            if entries[name].is_parameter and holds_codes(packed.chunks_of(block), block):
                fill, product = partial(self._fill_in, ring, index, name), partial(self._multiply, index, name)
                matrix = partial(self._matrix, index, name)
                weights[name] = LazyWeight(block.view(ring.layer_buffer), fill, product, matrix)
        self._lazy |= {index: tuple(weights)} if weights else {}
        ring.attach(index, layer, entries, weights, partial(self._unpack, ring, index) if weights else None)

    def prepare(self, ring: PrefetchRing) -> None:
        """Bring the codes of layers that stay now into the kernels' form. Raises torch.OutOfMemoryError."""
        staying = set(range(len(ring.layers))).difference(ring.streamed, ring.unpacked)
        self._matrices = {index: matrices for index, matrices in self._matrices.items() if index in staying}
        for index in sorted(staying.intersection(self._lazy).difference(self._matrices)):
            held, weights = ring.held(index), dict[str, tuple[TensorPlace, Parts]]()
            for name in self._lazy[index]:
                block = ring.layers[index].blocks[name]
                weights[name] = block, [(chunk, ring.bytes_of(index, chunk)) for chunk in held.chunks_of(block)]
            self._matrices[index] = self.matrices_of(weights, ring.layer_buffer)
            del weights  # or the layer's bytes stay
            ring.shed(index, self._matrices[index])

    def matrices_of(
        self, weights: Mapping[str, tuple[TensorPlace, Parts]], buffer: Tensor
    ) -> dict[str, low_bit.Matrix]:
        """Bring weights into the kernels' form; return those that they can read, by name. Each has its place in a layer
        `buffer`, where it is unpacked for a trial, and its chunks with their bytes. Raises torch.OutOfMemoryError."""
        made = {name: self._made(*weight, buffer) for name, weight in weights.items() if self.status == "on"}
        try:
            low_bit.finish(self._progress)
        except Exception as error:
            made = {}
            self.give_up(f"the kernel failed: {error_line(error)[:120]}")
        return {name: matrix for name, matrix in made.items() if matrix is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in the kernels' form."""
        return sum(matrix.nbytes for matrices in self._matrices.values() for matrix in matrices.values())

    def settings(self, staying: Iterable[int], serves: bool = False) -> dict[str, Option]:
        """Return how products with layers that stay are computed. With `serves`, some weights are read from codes."""
        serves = serves or self.status != "on" or any(self._matrices.get(index) for index in staying)
        return {"packed_kernel": self.status if serves else "no weights that it reads"}

    def restart(self, index: int) -> None:
        """Have the next layer's lazy weights unpacked when read. It is layer `index`."""
        self._waiting = index, set(self._lazy.get(index, ()))

    def _made(self, block: TensorPlace, parts: Parts, buffer: Tensor) -> low_bit.Matrix | None:
        """Return a weight in the kernels' form; None if it stays as it is."""
        codes = [chunk.layout.views(content) for chunk, content in parts]  # type: ignore[union-attr]
        form = low_bit.form_of(codes, block.stored_shape, block.dtype)
        if form is None:
            return None
        matrices, experts = list[low_bit.Matrix](), [0, form.experts // 2, form.experts - 1]
        states = torch.randn(CHECKED, form.columns, dtype=block.dtype, device=form.weight.device)

        def product() -> Tensor:
            matrices.append(matrix := low_bit.prepare(form, block.dtype))
            if not form.experts:
                return matrix.multiply(states)
            chosen = torch.tensor(experts, device=states.device)[:, None]
            return matrix.multiply_pairs(states, chosen, {}).float().sum(1).to(states.dtype)

        def plain() -> Tensor:
            for chunk, content in parts:
                chunk.unpack(content, buffer)
            weight = block.view_stored(buffer)
            if not form.experts:
                return functional.linear(states, weight)
            return torch.stack([functional.linear(*pair) for pair in zip(states, weight[experts], strict=True)])

        kind = form.kind, form.group, tuple(block.shape), form.zeros is None, block.dtype
        self.checked(kind, product, plain)
        return matrices[0] if matrices and self.status == "on" else None

    def _matrix(self, index: int, name: str) -> low_bit.Matrix | None:
        return self._matrices.get(index, {}).get(name)

    def _unpack(self, ring: PrefetchRing, index: int) -> None:
        """Unpack a layer that stays, but for its lazy weights."""
        self.restart(index)
        held = ring.held(index)
        lazy = {chunk.start for name in self._lazy[index] for chunk in held.chunks_of(held.blocks[name])}
        ring.unpack_now(index, [chunk for chunk in held.chunks_to_unpack if chunk.start not in lazy])

    def _fill_in(self, ring: PrefetchRing, index: int, name: str) -> None:
        """Unpack a lazy weight of the computing layer."""
        layer, waiting = self._waiting
        if layer != index or name not in waiting or not ring.computes_resident(index):
            return
        waiting.remove(name)
        held, matrix = ring.held(index), self._matrix(index, name)
        block = held.blocks[name]
        if matrix is None:
            ring.unpack_now(index, held.chunks_of(block))
        else:
            ring.unpack_now(index, (), partial(matrix.unpack, block.view_stored(ring.layer_buffer)))

    def _multiply(self, index: int, name: str, states: Tensor, bias: Tensor | None) -> Tensor | None:
        """Multiply with a weight from its codes; None if it must be unpacked."""
        matrix = self._matrix(index, name)
        if matrix is None or matrix.experts or not matrix.takes(states) or states.requires_grad:
            return None
        return matrix.multiply(states.reshape(-1, matrix.columns), bias).view(*states.shape[:-1], matrix.rows)


def holds_codes(chunks: Sequence[Chunk], block: TensorPlace) -> bool:
    """Tell whether a matrix is in codes that kernels may read."""
    layouts = [chunk.layout for chunk in chunks]
    return len(block.shape) in (2, 3) and all(
        isinstance(layout, CodesLayout) and layout.coded is None and not layout.order for layout in layouts
    )
