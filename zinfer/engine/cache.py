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
    """Keys and values of one decoder layer, ``[B, kv_heads, capacity, head_dim]`` each, filled from the front."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (
            torch.empty((*states.shape[:2], self.capacity, states.shape[3]), dtype=self.dtype, device=self.device)
            for states in (key_states, value_states)
        )
        self.keys, self.values = self._keys[:, :, :0], self._values[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self.capacity:
            raise IndexError(f"the KV cache has room for {self.capacity} tokens a sequence, token {end} was decoded")
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values


def make_cache(config: PreTrainedConfig, capacity: int) -> Cache:
    """A cache for `capacity` tokens a sequence. Models whose layers keep another state than keys and values (recurrent,
    convolutional) get the cache that `transformers` makes for them."""
    default = DynamicCache(config=config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in default.layers):
        return default
    return Cache(layers=[FixedLayer(capacity) for _ in range(config.get_text_config().num_hidden_layers)])
