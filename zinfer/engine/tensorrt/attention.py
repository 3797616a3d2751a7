"""Attention and KV cache inside a network, by the library's own layers.

The cache is written in place, and attention can be one fused kernel.
"""

from math import sqrt

import torch
from torch import Tensor

from zinfer.core.model import ModelSpec
from zinfer.engine.tensorrt.ops import Net, Node

Tensors = dict[str, Tensor]


class Attention:
    """Attention of all layers of a network, with its inputs and outputs.

    Inputs: ``mask [B, T]`` (bool: the key is a token, not padding), ``keys [T]`` (0, 1, ..), ``ends [S]`` (the first
    key that each new token must not see), ``key_positions [B, T]`` if `slopes` (ALiBi, ``[heads]``) are given, and
    ``write_at [B]``, from which position on keys and values are written into ``past_{key,value}_i``, one buffer ``[B,
    kv_heads, max_seq_len, D]`` with the output ``{key,value}_i``.
    """

    def __init__(self, net: Net, spec: ModelSpec, max_seq_len: int, slopes: Tensor | None = None) -> None:
        self.net, self.spec, self.max_seq_len = net, spec, max_seq_len
        mask = net.input("mask", torch.bool, ("B", "T"))
        keys, ends = net.input("keys", torch.int32, ("T",)), net.input("ends", torch.int32, ("S",))
        visible = net.binary("LESS", net.shuffle(keys, (1, 1, 1, -1)), net.shuffle(ends, (1, 1, -1, 1)))
        allowed = net.binary("AND", visible, net.shuffle(mask, (0, 1, 1, -1)))
        # Half of the lowest number, not -inf: a row of padding attends to all keys equally; to none would give NaN.
        lowest = torch.finfo(net.dtype).min / 2
        self.bias = net.select(allowed, net.scalar(0.0, 4), net.scalar(lowest, 4))
        if slopes is not None:
            positions = net.input("key_positions", torch.int32, ("B", "T"))
            reshaped = net.cast(net.shuffle(positions, (0, 1, 1, -1)), torch.float32)
            slope = net.constant(slopes.float().view(-1, 1, 1).contiguous(), 4)
            self.bias = net.add(net.cast(net.multiply(reshaped, slope), net.dtype), self.bias)
        self._write_at = net.input("write_at", torch.int32, ("B",))
        self._length = net.gather(net.shape(mask), net.constant([1]), 0)

    def __call__(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """Add attention of `layer`; return ``[B, S, heads · D]``. Queries are ``[B, heads, S, D]``, new keys and values
        ``[B, kv_heads, S, D]``."""
        net, spec, trt = self.net, self.spec, self.net.trt
        query = net.multiply(query, net.scalar(1 / sqrt(spec.head_dim), 4))
        cached = []
        for name, new in (("key", key), ("value", value)):
            shape = ("B", spec.num_kv_heads, self.max_seq_len, spec.head_dim)
            past = net.input(f"past_{name}_{layer}", net.dtype, shape)
            update = net.network.add_kv_cache_update(past, new, self._write_at, trt.KVCacheMode.LINEAR)
            whole = net.out(update, "KV cache update")
            net.output(f"{name}_{layer}", whole)
            cached.append(net.head(whole, 2, self._length))
        softmax = trt.AttentionNormalizationOp.SOFTMAX
        if hasattr(net.network, "add_attention_v2"):
            attention = net.network.add_attention_v2(query, *cached, softmax, trt.CausalMaskKind.NONE)
        else:
            attention = net.network.add_attention(query, *cached, softmax, False)
        mixed = net.out(attention, "attention")
        attention.mask = self.bias
        attention.decomposable = True  # for shapes without a fused kernel
        return net.shuffle(mixed, (0, 0, spec.num_heads * spec.head_dim), before=(0, 2, 1, 3))


class Cache:
    """Keys and values of a batch, which the network reads and writes."""

    def __init__(self, spec: ModelSpec, batch_size: int, max_seq_len: int, device: torch.device) -> None:
        shape, dtype = (batch_size, spec.num_kv_heads, max_seq_len, spec.head_dim), getattr(torch, spec.dtype)
        names = [f"{part}_{layer}" for layer in range(spec.num_layers) for part in ("key", "value")]
        self._buffers = {name: torch.empty(shape, dtype=dtype, device=device) for name in names}

    def bind(self, rows: slice, past: int) -> tuple[Tensors, Tensors]:
        """Return the inputs and outputs of a pass of `rows`."""
        outputs = {name: buffer[rows] for name, buffer in self._buffers.items()}
        inputs = {f"past_{name}": view for name, view in outputs.items()}
        first = next(iter(outputs.values()))
        inputs["write_at"] = torch.full((len(first),), past, dtype=torch.int32, device=first.device)
        return inputs, outputs

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), and free the others' memory."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer[rows]
