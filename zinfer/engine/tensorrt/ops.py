"""Operations of decoders, added to a TensorRT network definition.

Networks are strongly typed: an operation computes in the type of its operands, and only `cast` changes it. The library
holds weights by reference until the plan is built; `Net` keeps them alive.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zinfer.engine import EngineError
from zinfer.engine.tensorrt.library import Library

Node = Any  # an ITensor of the library


class Net:
    """A network under construction. `weights` maps the model's parameter names to tensors on the CPU, contiguous and in
    `dtype`. A parameter counts as used once `parameter` has returned it."""

    def __init__(self, library: Library, network: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.trt, self.network, self.dtype = library.module, network, dtype
        self.weights = weights
        self.unused = set(weights)
        self.inputs: dict[str, tuple[int | str, ...]] = {}
        self._parameters: dict[str, Node] = {}
        self._held: list[Any] = []  # everything the network refers to
        trt = self.trt
        self.types = {
            torch.float32: trt.float32,
            torch.float16: trt.float16,
            torch.bfloat16: trt.bfloat16,
            torch.int32: trt.int32,
        }

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> Node:
        """Add an input. A letter in `shape` is a dimension that the optimisation profiles bound: B sequences, S new
        positions, T all positions, C positions that the KV cache has room for."""
        self.inputs[name] = tuple(shape)
        sizes = tuple(size if isinstance(size, int) else -1 for size in shape)
        return self.network.add_input(name, self.types[dtype], sizes)

    def output(self, name: str, node: Node) -> None:
        node.name = name
        self.network.mark_output(node)

    def has(self, name: str) -> bool:
        return name in self.weights

    def parameter(self, name: str, rank: int) -> Node:
        """Return the parameter `name`, one constant for all its uses. It has leading dimensions of 1 up to `rank`.
        Raises EngineError when the model has no such parameter, and when it is used with two ranks."""
        if name not in self.weights:
            raise EngineError(f"the TensorRT network needs the parameter {name}, which the model does not have")
        if name in self.unused:
            self.unused.remove(name)
            self._parameters[name] = self.constant(self.weights[name], rank, name)
        node = self._parameters[name]
        if len(node.shape) != rank:  # a reshaped weight would be a second copy in the plan
            raise EngineError(f"the TensorRT network uses {name} with {len(node.shape)} and with {rank} dimensions")
        return node

    def constant(self, value: Tensor | Sequence[Any], rank: int | None = None, name: str = "") -> Node:
        """Add the constant `value`; a list becomes int32."""
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int32)
        tensor = tensor.contiguous()
        shape = (1,) * ((rank or tensor.dim()) - tensor.dim()) + tuple(tensor.shape)
        weights = self.trt.Weights(self.types[tensor.dtype], tensor.data_ptr(), tensor.numel())
        self._held += [tensor, weights]
        layer = self.network.add_constant(shape, weights)
        node = self.out(layer, "constant")
        if name:
            layer.name = name
        return node

    def scalar(self, value: float, rank: int, dtype: torch.dtype | None = None) -> Node:
        return self.constant(torch.full((1,) * rank, value, dtype=dtype or self.dtype))

    def out(self, layer: Any, kind: str) -> Node:
        """Return the output of `layer`. Raises EngineError if the library refused to add it."""
        if layer is None:
            raise EngineError(f"the TensorRT library refused a {kind} layer")
        return layer.get_output(0)

    def binary(self, operation: str, a: Node, b: Node) -> Node:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.out(self.network.add_elementwise(a, b, kind), operation)

    def add(self, a: Node, b: Node) -> Node:
        return self.binary("SUM", a, b)

    def multiply(self, a: Node, b: Node) -> Node:
        return self.binary("PROD", a, b)

    def unary(self, x: Node, operation: str) -> Node:
        return self.out(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)), operation)

    def activation(self, x: Node, kind: str) -> Node:
        return self.out(self.network.add_activation(x, getattr(self.trt.ActivationType, kind)), kind)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        if x.dtype == self.types[dtype]:
            return x
        return self.out(self.network.add_cast(x, self.types[dtype]), "cast")

    def gather(self, x: Node, indices: Node, axis: int) -> Node:
        return self.out(self.network.add_gather(x, indices, axis), "gather")

    def pick(self, x: Node, index: int, axis: int) -> Node:
        """Return ``x[.., index, ..]`` along `axis`, without that dimension."""
        return self.gather(x, self.constant(torch.tensor(index, dtype=torch.int32)), axis)

    def concat(self, nodes: Sequence[Node], axis: int) -> Node:
        layer = self.network.add_concatenation(list(nodes))
        node = self.out(layer, "concatenation")
        layer.axis = axis
        return node

    def shuffle(
        self,
        x: Node,
        shape: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> Node:
        """Transpose by `before`, reshape to `shape`, transpose by `after`. Each step only if given; in `shape` 0 keeps
        a dimension, and one -1 is inferred."""
        layer = self.network.add_shuffle(x)
        node = self.out(layer, "shuffle")
        if before is not None:
            layer.first_transpose = tuple(before)
        if shape is not None:
            layer.reshape_dims = tuple(shape)
        if after is not None:
            layer.second_transpose = tuple(after)
        return node

    def product(self, a: Node, b: Node, turned: bool = False) -> Node:
        """Return ``a @ b``, or ``a @ b.mT`` if `turned`."""
        kind = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(a, kind.NONE, b, kind.TRANSPOSE if turned else kind.NONE)
        return self.out(layer, "matrix multiply")

    def softmax(self, x: Node) -> Node:
        """Add a softmax over the last axis."""
        layer = self.network.add_softmax(x)
        node = self.out(layer, "softmax")
        layer.axes = 1 << (len(x.shape) - 1)
        return node

    def linear(self, x: Node, name: str) -> Node:
        """Return ``x @ weight.T (+ bias)`` with the parameters of `name`."""
        rank = len(x.shape)
        y = self.product(x, self.parameter(f"{name}.weight", rank), turned=True)
        return self.add(y, self.parameter(f"{name}.bias", rank)) if self.has(f"{name}.bias") else y

    def layer_norm(self, x: Node, name: str, epsilon: float) -> Node:
        """Add a layer norm, with ``name.weight`` and ``name.bias``."""
        rank = len(x.shape)
        scale, bias = self.parameter(f"{name}.weight", rank), self.parameter(f"{name}.bias", rank)
        make = getattr(self.network, "add_normalization_v2", self.network.add_normalization)
        layer = make(x, scale, bias, 1 << (rank - 1))
        node = self.out(layer, "normalization")
        layer.epsilon = epsilon
        return node

    def rms_norm(self, x: Node, name: str, epsilon: float) -> Node:
        """Add an RMS norm as `transformers` computes it, in float32, then rounded."""
        rank, mean = len(x.shape), self.trt.ReduceOperation.AVG
        exact = self.cast(x, torch.float32)
        square = self.multiply(exact, exact)
        square = self.out(self.network.add_reduce(square, mean, 1 << (rank - 1), True), "reduce")
        square = self.add(square, self.scalar(epsilon, rank, torch.float32))
        scaled = self.multiply(exact, self.unary(self.unary(square, "SQRT"), "RECIP"))
        return self.multiply(self.parameter(f"{name}.weight", rank), self.cast(scaled, self.dtype))

    def shape(self, x: Node) -> Node:
        """Return the dimensions of `x`, an int64 vector."""
        return self.out(self.network.add_shape(x), "shape")

    def head(self, x: Node, axis: int, length: Node) -> Node:
        """Return ``x[.., :length, ..]`` along `axis`; `length` is an int64 vector."""
        rank, whole = len(x.shape), self.shape(x)
        parts = [length if i == axis else self.gather(whole, self.constant([i]), 0) for i in range(rank)]
        size = self.concat(parts, 0)
        layer = self.network.add_slice(x, (0,) * rank, (1,) * rank, (1,) * rank)
        node = self.out(layer, "slice")
        layer.set_input(2, size)
        return node
