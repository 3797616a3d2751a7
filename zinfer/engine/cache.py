"""A KV cache with all its memory taken at the start.

`transformers`' DynamicCache copies itself at every step to grow by one token, and its StaticCache makes attention read
the whole capacity. Here the memory is static and attention sees a view of the part that is filled: no copy, no waste,
and an out-of-memory comes in prefill or not at all.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one decoder layer, ``[B, kv_heads, capacity, head_dim]`` each, filled from the front.

    `window` limits what is written and seen to some of the rows, so that a batch can be prefilled a few rows at a time.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        super().__init__()
        self.batch_size, self.capacity = batch_size, capacity
        self.rows, self.length = slice(0, batch_size), 0

    def window(self, rows: slice, length: int) -> None:
        """Go on at position `length` of `rows` only."""
        self.rows, self.length = rows, length
        if self.is_initialized:
            self._show()

    def _show(self) -> None:
        self.keys, self.values = self._keys[self.rows, :, : self.length], self._values[self.rows, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (
            torch.empty(
                (self.batch_size, states.shape[1], self.capacity, states.shape[3]), dtype=self.dtype, device=self.device
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True
        self._show()

    def advance(self, count: int) -> int:
        """Take the next `count` positions; the first of them. Raises IndexError beyond the capacity."""
        start, self.length = self.length, self.length + count
        if self.length > self.capacity:
            raise IndexError(f"the KV cache holds {self.capacity} tokens a sequence; token {self.length} was decoded")
        return start

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.advance(key_states.shape[2])
        self._keys[self.rows, :, start : self.length] = key_states
        self._values[self.rows, :, start : self.length] = value_states
        self._show()
        return self.keys, self.values


class QuantizedLayer(FixedLayer):
    """Keys and values in 8 bits (`storage` is int8 or float8_e4m3fn), each head of each token with a scale of its own.

    The prompt's attention sees exact ones. A later pass sees all that is stored, brought back to the model's type: in
    memory of its own, so the rows of a pass should be few. That saves memory and no time: beside an unquantised cache
    in 16 bits, of which attention reads 2 bytes a value, a step reads 1, writes 2 and reads these 2.
    """

    def __init__(self, batch_size: int, capacity: int, storage: torch.dtype) -> None:
        super().__init__(batch_size, capacity)
        self._storage = storage
        self._largest = 127.0 if storage == torch.int8 else torch.finfo(storage).max
        # The least that scales to all of the range by a normal number: 0, and what is as good as that, must not be a
        # divisor.
        self._least = self._largest * torch.finfo(torch.float32).tiny

    def get_seq_length(self) -> int:
        return self.length

    def _show(self) -> None:
        """Nothing is to be seen without a pass."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = []
        for states in (key_states, value_states):
            shape = (self.batch_size, states.shape[1], self.capacity)
            content = torch.empty((*shape, states.shape[3]), dtype=self._storage, device=self.device)
            self._stored.append((content, torch.empty((*shape, 1), dtype=torch.float32, device=self.device)))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.advance(key_states.shape[2])
        for (content, scales), states in zip(self._stored, (key_states, value_states), strict=True):
            scale = states.abs().amax(-1, keepdim=True).float().clamp_(min=self._least) / self._largest
            new = states / scale
            content[self.rows, :, start : self.length] = new.round_() if self._storage == torch.int8 else new
            scales[self.rows, :, start : self.length] = scale
        if not start:
            return key_states, value_states
        keys, values = (
            content[self.rows, :, : self.length].to(self.dtype).mul_(scales[self.rows, :, : self.length])
            for content, scales in self._stored
        )
        return keys, values


STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def make_cache(config: PreTrainedConfig, batch_size: int, capacity: int, storage: str = "auto") -> Cache:
    """A cache for `batch_size` sequences of up to `capacity` tokens, in the model's type or in `STORAGE`'s. Models
    whose layers keep another state than keys and values (recurrent, convolutional) get the cache that `transformers`
    makes for them."""
    default = DynamicCache(config=config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in default.layers):
        return default
    depth = config.get_text_config().num_hidden_layers
    if storage in STORAGE:
        return Cache(layers=[QuantizedLayer(batch_size, capacity, STORAGE[storage]) for _ in range(depth)])
    return Cache(layers=[FixedLayer(batch_size, capacity) for _ in range(depth)])


def show_rows(cache: Cache, rows: slice, length: int) -> bool:
    """Narrow every layer of `cache` to `rows`, at position `length`; False where the cache is not of our making."""
    if not all(isinstance(layer, FixedLayer) for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.window(rows, length)
    return True
