"""Attention and KV cache inside a network, in two kinds that give the same numbers.

`Native` uses the library's own layers: the cache is written in place, and attention can be one fused kernel. `Plain`
uses ordinary layers, for library versions without those: a step reads the past and outputs its new keys and values,
which the caller's buffers place behind the past. Its first dimension is the position, so that the past is contiguous.
"""

from abc import ABC, abstractmethod
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from zinfer.core.model import ModelSpec
from zinfer.engine.tensorrt.ops import Net, Node

CacheKind = Literal["native", "plain"]


class Attention(ABC):
    """Attention of all layers of a network: the mask, and the names and shapes of the cache's tensors.

    Inputs: ``mask [B, T]`` (bool: the key is a token, not padding), ``keys [T]`` (0, 1, ..), ``ends [S]`` (the first
    key that each new token must not see), and ``key_positions [B, T]`` if `slopes` (ALiBi, ``[heads]``) are given.
    """

    kind: CacheKind

    def __init__(self, net: Net, spec: ModelSpec, max_seq_len: int, slopes: Tensor | None = None) -> None:
        self.net, self.spec, self.max_seq_len = net, spec, max_seq_len
        self.mask = net.input("mask", torch.bool, ("B", "T"))
        keys, ends = net.input("keys", torch.int32, ("T",)), net.input("ends", torch.int32, ("S",))
        rank = self._rank()
        ones = (1,) * (rank - 3)
        visible = net.less(net.shuffle(keys, (*ones, 1, 1, -1)), net.shuffle(ends, (*ones, 1, -1, 1)))
        allowed = net.both(visible, net.shuffle(self.mask, (0, *ones, 1, -1)))
        # Half of the lowest number, not -inf: a row of padding attends to all keys equally; to none would give NaN.
        lowest = torch.finfo(net.dtype).min / 2
        self.bias = net.select(allowed, net.scalar(0.0, rank), net.scalar(lowest, rank))
        if slopes is not None:
            positions = net.input("key_positions", torch.int32, ("B", "T"))
            reshaped = net.cast(net.shuffle(positions, (0, *ones, 1, -1)), torch.float32)
            slope = net.constant(slopes.float().view(-1, *ones, 1).contiguous(), rank)
            self.bias = net.add(net.cast(net.multiply(reshaped, slope), net.dtype), self.bias)

    def _rank(self) -> int:
        """Return the number of dimensions of the attention scores."""
        return 4

    def __call__(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """Add attention of `layer`: queries ``[B, heads, S, D]``, new keys and values ``[B, kv_heads, S, D]``; return
        ``[B, S, heads · D]``."""
        scale = self.net.scalar(1 / sqrt(self.spec.head_dim), 4)
        mixed = self._attend(layer, self.net.multiply(query, scale), key, value)
        width = self.spec.num_heads * self.spec.head_dim
        return self.net.shuffle(mixed, (0, 0, width), before=(0, 2, 1, 3))

    @abstractmethod
    def _attend(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """Put keys and values into the cache and attend to all of it; return ``[B, heads, S, D]``."""


class Native(Attention):
    """Attention by the library's own layers.

    Input ``past_{key,value}_i`` and output ``{key,value}_i`` are one buffer ``[B, kv_heads, max_seq_len, D]``, written
    from position ``write_at [B]`` on.
    """

    kind: CacheKind = "native"

    def __init__(self, net: Net, spec: ModelSpec, max_seq_len: int, slopes: Tensor | None = None) -> None:
        super().__init__(net, spec, max_seq_len, slopes)
        self._write_at = net.input("write_at", torch.int32, ("B",))
        self._length = net.gather(net.shape(self.mask), net.constant([1]), 0)

    def _attend(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        trt, network = self.net.trt, self.net.network
        seen = []
        for name, new in (("key", key), ("value", value)):
            shape = ("B", self.spec.num_kv_heads, self.max_seq_len, self.spec.head_dim)
            past = self.net.input(f"past_{name}_{layer}", self.net.dtype, shape)
            update = network.add_kv_cache_update(past, new, self._write_at, trt.KVCacheMode.LINEAR)
            whole = self.net.made(update, "KV cache update").get_output(0)
            self.net.output(f"{name}_{layer}", whole)
            seen.append(self.net.head(whole, 2, self._length))
        softmax = trt.AttentionNormalizationOp.SOFTMAX
        if hasattr(network, "add_attention_v2"):
            attention = network.add_attention_v2(query, *seen, softmax, trt.CausalMaskKind.NONE)
        else:
            attention = network.add_attention(query, *seen, softmax, False)
        attention = self.net.made(attention, "attention")
        attention.mask = self.bias
        attention.decomposable = True  # for shapes without a fused kernel
        return attention.get_output(0)


class Plain(Attention):
    """Attention by ordinary layers: inputs ``past_{key,value}_i`` ``[P, B, kv_heads, D]``, outputs ``{key,value}_i``
    ``[S, B, kv_heads, D]``."""

    kind: CacheKind = "plain"

    def _rank(self) -> int:
        return 4 if self.spec.num_heads == self.spec.num_kv_heads else 5  # grouped queries have one more dimension

    def _attend(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        net, spec = self.net, self.spec
        groups = spec.num_heads // spec.num_kv_heads
        seen = []
        for name, new in (("key", key), ("value", value)):
            past = net.input(f"past_{name}_{layer}", net.dtype, ("P", "B", spec.num_kv_heads, spec.head_dim))
            front = net.shuffle(new, before=(2, 0, 1, 3))
            net.output(f"{name}_{layer}", front)
            both = net.shuffle(net.concat([past, front], 0), before=(1, 2, 0, 3))
            seen.append(both if groups == 1 else net.shuffle(both, (0, spec.num_kv_heads, 1, -1, spec.head_dim)))
        if groups > 1:
            query = net.shuffle(query, (0, spec.num_kv_heads, groups, -1, spec.head_dim))
        scores = net.add(net.matmul(query, seen[0], transpose_b=True), self.bias)
        mixed = net.matmul(net.softmax(scores), seen[1])
        return mixed if groups == 1 else net.shuffle(mixed, (0, spec.num_heads, -1, spec.head_dim))


ATTENTIONS: dict[CacheKind, type[Attention]] = {"native": Native, "plain": Plain}
