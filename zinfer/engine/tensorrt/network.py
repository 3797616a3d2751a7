"""Decoder layers as TensorRT networks: BLOOM, Llama, Mistral, Qwen2.

The names and shapes of parameters come from the `transformers` model, which also computes what surrounds the layers. A
parameter of a layer that the network does not use is an error: an unknown variant is refused, not approximated.

Inputs, with P cached positions, S new ones and T = P + S: ``hidden [B, S, H]``; ``bias [B, 1, S, T]``, added to
attention scores; ``cos`` and ``sin [B, 1, S, D]``, or for BLOOM ``alibi [B, heads, 1, T]``; ``past_{key,value}_i [B,
kv_heads, C, D]``, the KV cache, of which the first P positions are read. Outputs: ``output [B, S, H]``, and
``{key,value}_i [B, kv_heads, S, D]``, for the caller to append. So a pass copies each layer's cache once, inside the
GPU, to put the new positions behind it, and writes nothing of it back.

Networks are strongly typed: an operation computes in the type of its operands, and only `Net.cast` changes it.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.core.model import ModelSpec
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
        return self.add(y, self.parameter(f"{name}.bias", rank)) if f"{name}.bias" in self.weights else y

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


NETWORK_VERSION = 2  # part of a plan's key; raise it when the code in this folder changes what a network computes


def make_network(
    library: Library,
    network: Any,
    model: PreTrainedModel,
    spec: ModelSpec,
    weights: dict[str, Tensor],
    max_seq_len: int,
) -> Net:
    """Fill `network` with the decoder layers of `model`. Sequences have up to `max_seq_len` tokens. `weights` are the
    layers' parameters, on the CPU, and must outlive the returned `Net`. Raises EngineError for a model that differs in
    any detail from the decoders above."""
    body = BODIES.get(spec.architecture)
    if body is None:
        raise EngineError(
            f"no TensorRT network for {spec.architecture} models; there is one for {', '.join(BODIES)}. "
            "Use --engine stream, which runs any decoder"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and max_seq_len > limit:
        raise EngineError(f"--max-seq-len {max_seq_len} is more than the {limit} positions of {spec.name}")
    net = Net(library, network, weights, getattr(torch, spec.dtype))
    hidden = net.input("hidden", net.dtype, ("B", "S", model.get_input_embeddings().weight.shape[1]))
    net.output("output", body(net, hidden, model, spec, max_seq_len))
    if net.unused:
        raise EngineError(
            f"{spec.name} has parameters that the {spec.architecture} network does not use: {min(net.unused)}"
            + (f" and {len(net.unused) - 1} more" if len(net.unused) > 1 else "")
        )
    return net


class Attention:
    """Attention of all layers of a network. Queries that share a key are rows of one product."""

    def __init__(self, net: Net, spec: ModelSpec, alibi: bool = False) -> None:
        self.net, self.spec = net, spec
        bias = net.input("bias", net.dtype, ("B", 1, "S", "T"))
        total, new = (net.gather(net.shape(bias), net.constant([axis]), 0) for axis in (3, 2))
        self._past = net.binary("SUB", total, new)
        if alibi:
            bias = net.add(net.input("alibi", net.dtype, ("B", spec.num_heads, 1, "T")), bias)
        groups = spec.num_heads // spec.num_kv_heads
        self.bias = net.concat([bias] * groups, 2) if groups > 1 else bias

    def __call__(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """Add attention of `layer`; return ``[B, S, heads · D]``. Queries are ``[B, heads, S, D]``, new keys and values
        ``[B, kv_heads, S, D]``."""
        net, spec = self.net, self.spec
        cached = []
        for name, new in (("key", key), ("value", value)):
            past = net.input(f"past_{name}_{layer}", net.dtype, ("B", spec.num_kv_heads, "C", spec.head_dim))
            net.output(f"{name}_{layer}", new)
            cached.append(net.concat([net.head(past, 2, self._past), new], 2))
        query = net.multiply(query, net.scalar(1 / sqrt(spec.head_dim), 4))
        rows = net.shuffle(query, (0, spec.num_kv_heads, -1, spec.head_dim))
        scores = net.add(net.product(rows, cached[0], turned=True), self.bias)
        mixed = net.product(net.softmax(scores), cached[1])
        heads = net.shuffle(mixed, (0, spec.num_heads, -1, spec.head_dim), after=(0, 2, 1, 3))
        return net.shuffle(heads, (0, 0, spec.num_heads * spec.head_dim))


def _require(holds: bool, spec: ModelSpec, what: str) -> None:
    if not holds:
        raise EngineError(f"{spec.name}: the TensorRT network does not support {what}; use --engine stream")


def _bloom(net: Net, hidden: Node, model: PreTrainedModel, spec: ModelSpec, _max_seq_len: int) -> Node:
    config, eps = model.config, model.config.layer_norm_epsilon
    attend = Attention(net, spec, alibi=True)
    for index in range(spec.num_layers):
        prefix = f"transformer.h.{index}"
        normed = net.layer_norm(hidden, f"{prefix}.input_layernorm", eps)
        residual = normed if config.apply_residual_connection_post_layernorm else hidden
        fused = net.linear(normed, f"{prefix}.self_attention.query_key_value")
        parts = net.shuffle(fused, (0, 0, spec.num_heads, 3, spec.head_dim))
        numbers = [net.constant(torch.tensor(part, dtype=torch.int32)) for part in range(3)]
        query, key, value = (net.shuffle(net.gather(parts, part, 3), before=(0, 2, 1, 3)) for part in numbers)
        mixed = attend(index, query, key, value)
        hidden = net.add(net.linear(mixed, f"{prefix}.self_attention.dense"), residual)
        normed = net.layer_norm(hidden, f"{prefix}.post_attention_layernorm", eps)
        residual = normed if config.apply_residual_connection_post_layernorm else hidden
        inner = net.activation(net.linear(normed, f"{prefix}.mlp.dense_h_to_4h"), "GELU_TANH")
        hidden = net.add(net.linear(inner, f"{prefix}.mlp.dense_4h_to_h"), residual)
    return hidden


def _llama(net: Net, hidden: Node, model: PreTrainedModel, spec: ModelSpec, max_seq_len: int) -> Node:
    config, eps = model.config, model.config.rms_norm_eps
    _require(config.hidden_act in ("silu", "swish"), spec, f"the activation {config.hidden_act}")
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",)):
        _require(max_seq_len <= window, spec, f"a sliding window ({window}) shorter than --max-seq-len {max_seq_len}")
    attend, rotate = Attention(net, spec), _rotary(net, model, spec)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        normed = net.rms_norm(hidden, f"{prefix}.input_layernorm", eps)
        query, key, value = (
            net.shuffle(
                net.linear(normed, f"{prefix}.self_attn.{part}_proj"), (0, 0, heads, spec.head_dim), after=(0, 2, 1, 3)
            )
            for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads))
        )
        mixed = attend(index, rotate(query), rotate(key), value)
        hidden = net.add(hidden, net.linear(mixed, f"{prefix}.self_attn.o_proj"))
        normed = net.rms_norm(hidden, f"{prefix}.post_attention_layernorm", eps)
        gate = net.linear(normed, f"{prefix}.mlp.gate_proj")
        swish = net.multiply(gate, net.activation(gate, "SIGMOID"))
        gated = net.multiply(swish, net.linear(normed, f"{prefix}.mlp.up_proj"))
        hidden = net.add(hidden, net.linear(gated, f"{prefix}.mlp.down_proj"))
    return hidden


def _rotary(net: Net, model: PreTrainedModel, spec: ModelSpec) -> Callable[[Node], Node]:
    """Return the rotary embedding, a function of ``[B, heads, S, D]``."""
    module = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    half = spec.head_dim // 2
    _require(module.inv_freq.numel() == half, spec, "a rotary embedding of part of the head")
    cos, sin = (net.input(name, net.dtype, ("B", 1, "S", spec.head_dim)) for name in ("cos", "sin"))
    swapped = net.constant([*range(half, 2 * half), *range(half)])
    signs = net.constant(torch.tensor([-1.0] * half + [1.0] * half, dtype=net.dtype), 4)

    def rotate(x: Node) -> Node:
        turned = net.multiply(net.gather(x, swapped, 3), signs)
        return net.add(net.multiply(x, cos), net.multiply(turned, sin))

    return rotate


BODIES = {"bloom": _bloom, "llama": _llama, "mistral": _llama, "qwen2": _llama}
