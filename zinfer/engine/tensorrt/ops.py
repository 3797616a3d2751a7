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
    """A network under construction.

    `weights` maps the model's parameter names to tensors on the CPU, contiguous and in `dtype`. A parameter counts as
    used once `parameter` has returned it.
    """

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
            torch.bool: trt.bool,
        }

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> Node:
        """Add an input. A letter in `shape` is a dimension that the optimisation profiles bound: B sequences, S new
        tokens, P past tokens, T = P + S."""
        self.inputs[name] = tuple(shape)
        sizes = tuple(size if isinstance(size, int) else -1 for size in shape)
        return self.network.add_input(name, self.types[dtype], sizes)

    def output(self, name: str, node: Node) -> None:
        node.name = name
        self.network.mark_output(node)

    def has(self, name: str) -> bool:
        return name in self.weights

    def parameter(self, name: str, rank: int) -> Node:
        """Return the parameter `name`, with leading dimensions of 1 up to `rank`; one constant for all its uses.

        Raises EngineError when the model has no such parameter, and when it is used with two ranks.
        """
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
        """Add the constant `value`, kept alive, with leading dimensions of 1 up to `rank`; a list becomes int32."""
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int32)
        tensor = tensor.contiguous()
        shape = (1,) * ((rank or tensor.dim()) - tensor.dim()) + tuple(tensor.shape)
        weights = self.trt.Weights(self.types[tensor.dtype], tensor.data_ptr(), tensor.numel())
        self._held += [tensor, weights]
        layer = self.made(self.network.add_constant(shape, weights), "constant")
        if name:
            layer.name = name
        return layer.get_output(0)

    def scalar(self, value: float, rank: int, dtype: torch.dtype | None = None) -> Node:
        return self.constant(torch.full((1,) * rank, value, dtype=dtype or self.dtype))

    def made(self, layer: Any, what: str) -> Any:
        if layer is None:
            raise EngineError(f"the TensorRT library refused a {what} layer")
        return layer

    def _binary(self, a: Node, b: Node, operation: str) -> Node:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.made(self.network.add_elementwise(a, b, kind), operation).get_output(0)

    def add(self, a: Node, b: Node) -> Node:
        return self._binary(a, b, "SUM")

    def multiply(self, a: Node, b: Node) -> Node:
        return self._binary(a, b, "PROD")

    def less(self, a: Node, b: Node) -> Node:
        return self._binary(a, b, "LESS")

    def both(self, a: Node, b: Node) -> Node:
        return self._binary(a, b, "AND")

    def unary(self, x: Node, operation: str) -> Node:
        return self.made(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)), operation).get_output(
            0
        )

    def activation(self, x: Node, kind: str) -> Node:
        return self.made(self.network.add_activation(x, getattr(self.trt.ActivationType, kind)), kind).get_output(0)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        if x.dtype == self.types[dtype]:
            return x
        return self.made(self.network.add_cast(x, self.types[dtype]), "cast").get_output(0)

    def select(self, condition: Node, then: Node, otherwise: Node) -> Node:
        return self.made(self.network.add_select(condition, then, otherwise), "select").get_output(0)

    def gather(self, x: Node, indices: Node, axis: int) -> Node:
        return self.made(self.network.add_gather(x, indices, axis), "gather").get_output(0)

    def pick(self, x: Node, index: int, axis: int) -> Node:
        """Return ``x[.., index, ..]`` along `axis`, without that dimension."""
        return self.gather(x, self.constant(torch.tensor(index, dtype=torch.int32)), axis)

    def concat(self, nodes: Sequence[Node], axis: int) -> Node:
        layer = self.made(self.network.add_concatenation(list(nodes)), "concatenation")
        layer.axis = axis
        return layer.get_output(0)

    def shuffle(
        self,
        x: Node,
        shape: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> Node:
        """Transpose by `before`, reshape to `shape` (0 keeps a dimension, one -1 is inferred), transpose by `after`;
        each step only if given."""
        layer = self.made(self.network.add_shuffle(x), "shuffle")
        if before is not None:
            layer.first_transpose = tuple(before)
        if shape is not None:
            layer.reshape_dims = tuple(shape)
        if after is not None:
            layer.second_transpose = tuple(after)
        return layer.get_output(0)

    def matmul(self, a: Node, b: Node, transpose_b: bool = False) -> Node:
        none, transposed = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        layer = self.network.add_matrix_multiply(a, none, b, transposed if transpose_b else none)
        return self.made(layer, "matrix multiply").get_output(0)

    def softmax(self, x: Node) -> Node:
        """Add a softmax over the last dimension."""
        layer = self.made(self.network.add_softmax(x), "softmax")
        layer.axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def mean(self, x: Node) -> Node:
        """Add the mean over the last dimension, which stays, as 1."""
        axes = 1 << (len(x.shape) - 1)
        return self.made(self.network.add_reduce(x, self.trt.ReduceOperation.AVG, axes, True), "reduce").get_output(0)

    def linear(self, x: Node, name: str) -> Node:
        """Return ``x @ weight.T (+ bias)`` with the parameters ``name.weight`` ``[out, in]`` and, if the model has it,
        ``name.bias``."""
        y = self.matmul(x, self.parameter(f"{name}.weight", len(x.shape)), transpose_b=True)
        return self.add(y, self.parameter(f"{name}.bias", len(x.shape))) if self.has(f"{name}.bias") else y

    def layer_norm(self, x: Node, name: str, epsilon: float) -> Node:
        """Add a layer norm over the last dimension, with the parameters ``name.weight`` and ``name.bias``."""
        rank = len(x.shape)
        scale, bias = self.parameter(f"{name}.weight", rank), self.parameter(f"{name}.bias", rank)
        make = getattr(self.network, "add_normalization_v2", self.network.add_normalization)
        layer = self.made(make(x, scale, bias, 1 << (rank - 1)), "normalization")
        layer.epsilon = epsilon
        return layer.get_output(0)

    def rms_norm(self, x: Node, name: str, epsilon: float) -> Node:
        """Add an RMS norm: ``x / sqrt(mean(x^2) + epsilon)`` in float32, rounded, times ``name.weight``
        (`transformers`)."""
        rank = len(x.shape)
        wide = self.cast(x, torch.float32)
        square = self.add(self.mean(self.multiply(wide, wide)), self.scalar(epsilon, rank, torch.float32))
        scaled = self.multiply(wide, self.unary(self.unary(square, "SQRT"), "RECIP"))
        return self.multiply(self.parameter(f"{name}.weight", rank), self.cast(scaled, self.dtype))

    def shape(self, x: Node) -> Node:
        """Return the dimensions of `x`, an int64 vector."""
        return self.made(self.network.add_shape(x), "shape").get_output(0)

    def head(self, x: Node, axis: int, length: Node) -> Node:
        """Return ``x[.., :length, ..]`` along `axis`; `length` is an int64 vector of one element."""
        rank = len(x.shape)
        whole = self.shape(x)
        parts = [length if i == axis else self.gather(whole, self.constant([i]), 0) for i in range(rank)]
        size = self.concat(parts, 0)
        layer = self.made(self.network.add_slice(x, (0,) * rank, (1,) * rank, (1,) * rank), "slice")
        layer.set_input(2, size)
        return layer.get_output(0)
