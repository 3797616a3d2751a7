"""Evaluation of a TensorRT network with torch: the definition is read back from the library, layer by layer.

Without a GPU no engine can run; this shows what the library was asked to compute. An unknown layer raises an error, and
so does an operand whose type is not the one that strong typing demands.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def evaluate(trt: Any, network: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's outputs by name, for `inputs` by name."""
    return _Walker(trt).run(network, inputs)


class _Walker:
    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.types = {
            trt.float32: torch.float32, trt.int32: torch.int32, trt.int64: torch.int64,
        }  # fmt: skip
        self.values: dict[str, Tensor] = {}

    def run(self, network: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        declared = [network.get_input(index) for index in range(network.num_inputs)]
        assert {node.name for node in declared} == set(inputs)
        for node in declared:
            self._check(node, inputs[node.name])
            self.values[node.name] = inputs[node.name]
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            kind = self.trt.ILayer.type.__get__(layer).name  # not layer.type: an activation has a `type` of its own
            evaluate_layer: Callable[..., Tensor] | None = getattr(self, f"_{kind.lower()}", None)
            if evaluate_layer is None:
                raise NotImplementedError(f"the walker does not know the layer {kind}")
            operands = [self.values[layer.get_input(i).name] for i in range(layer.num_inputs) if layer.get_input(i)]
            value = evaluate_layer(self._typed(layer, kind), *operands)
            assert layer.num_outputs == 1
            self._check(layer.get_output(0), value)
            self.values[layer.get_output(0).name] = value
        outputs = [network.get_output(index).name for index in range(network.num_outputs)]
        return {name: self.values[name] for name in outputs}

    def _check(self, node: Any, value: Tensor) -> None:
        assert value.dtype == self.types[node.dtype], f"{node.name}: {value.dtype}, declared {node.dtype}"
        shape = tuple(node.shape)
        assert len(shape) == value.dim(), f"{node.name}: {tuple(value.shape)}, declared {shape}"
        for declared, actual in zip(shape, value.shape, strict=True):
            assert declared in (-1, actual), f"{node.name}: {tuple(value.shape)}, declared {shape}"

    def _typed(self, layer: Any, kind: str) -> Any:
        """Cast `layer` to its own class: the library returns the base class."""
        names = {
            "CONSTANT": "IConstantLayer", "SHUFFLE": "IShuffleLayer", "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
            "ELEMENTWISE": "IElementWiseLayer", "UNARY": "IUnaryLayer", "ACTIVATION": "IActivationLayer",
            "CAST": "ICastLayer", "GATHER": "IGatherLayer",
            "CONCATENATION": "IConcatenationLayer", "REDUCE": "IReduceLayer", "NORMALIZATION": "INormalizationLayer",
            "SHAPE": "IShapeLayer", "SLICE": "ISliceLayer", "SOFTMAX": "ISoftMaxLayer",
        }  # fmt: skip
        layer.__class__ = getattr(self.trt, names[kind])
        return layer

    def _constant(self, layer: Any) -> Tensor:
        return torch.from_numpy(layer.weights.copy()).reshape(tuple(layer.shape))

    def _shuffle(self, layer: Any, x: Tensor) -> Tensor:
        x = x.permute(tuple(layer.first_transpose)[: x.dim()])
        if layer.reshape_dims is not None:
            x = x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(layer.reshape_dims)])
        return x.permute(tuple(layer.second_transpose)[: x.dim()]).contiguous()

    def _matrix_multiply(self, layer: Any, a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype
        transpose = self.trt.MatrixOperation.TRANSPOSE
        assert layer.op0 == self.trt.MatrixOperation.NONE
        return a @ (b.mT if layer.op1 == transpose else b)

    def _elementwise(self, layer: Any, a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype
        assert a.dim() == b.dim(), "TensorRT broadcasts dimensions of 1, it does not add any"
        operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "SUM": torch.add,
            "SUB": torch.sub,
            "PROD": torch.mul,
        }
        return operations[layer.op.name](a, b)

    def _unary(self, layer: Any, x: Tensor) -> Tensor:
        return {"SQRT": torch.sqrt, "RECIP": torch.reciprocal}[layer.op.name](x)

    def _activation(self, layer: Any, x: Tensor) -> Tensor:
        kind = self.trt.ActivationType
        views: dict[Any, Callable[[Tensor], Tensor]] = {
            kind.RELU: F.relu,
            kind.SIGMOID: torch.sigmoid,
            kind.GELU_ERF: F.gelu,
            kind.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"),
        }
        return views[layer.type](x)

    def _cast(self, layer: Any, x: Tensor) -> Tensor:
        return x.to(self.types[layer.to_type])

    def _gather(self, layer: Any, x: Tensor, indices: Tensor) -> Tensor:
        assert layer.mode == self.trt.GatherMode.DEFAULT
        assert layer.num_elementwise_dims == 0
        taken = x.index_select(layer.axis, indices.reshape(-1).long())
        return taken.reshape(x.shape[: layer.axis] + indices.shape + x.shape[layer.axis + 1 :])

    def _concatenation(self, layer: Any, *parts: Tensor) -> Tensor:
        assert len({part.dtype for part in parts}) == 1
        return torch.cat(parts, layer.axis)

    def _reduce(self, layer: Any, x: Tensor) -> Tensor:
        assert layer.op == self.trt.ReduceOperation.AVG
        assert layer.axes == 1 << (x.dim() - 1)
        return x.mean(-1, keepdim=layer.keep_dims)

    def _normalization(self, layer: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        assert layer.axes == 1 << (x.dim() - 1)
        assert scale.dim() == bias.dim() == x.dim()
        return F.layer_norm(x, x.shape[-1:], scale.flatten(), bias.flatten(), layer.epsilon)

    def _shape(self, _layer: Any, x: Tensor) -> Tensor:
        return torch.tensor(x.shape, dtype=torch.int64)

    def _slice(self, layer: Any, x: Tensor, size: Tensor) -> Tensor:
        assert set(layer.start) == {0}
        assert set(layer.stride) == {1}
        return x[tuple(slice(0, int(length)) for length in size)]

    def _softmax(self, layer: Any, x: Tensor) -> Tensor:
        assert layer.axes == 1 << (x.dim() - 1)
        return x.softmax(-1)
