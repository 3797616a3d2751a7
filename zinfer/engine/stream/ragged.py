"""Ragged decode steps: one forward pass for the rows of several micro-batches, whose lengths differ.

A step has one token a row, or several where drafts are verified, as many in all micro-batches. All of a decoder layer
but attention treats one token like any other. So the rows of all micro-batches go through it
together: its kernels are launched, and its weights are read from the GPU's memory, once. Attention runs for each
micro-batch, over its own keys and values.

Models that take their attention function by name (`_supports_attention_backend` of `transformers`) give the place for
it, without code for architectures. The function must be called once in each layer, with the very tensors that the cache
returned and without a mask or bias of the model's own: `NotRaggedError` says that a model does something else.

Rows that the CPU attends to have a pass of their own, in which it attends to all micro-batches' rows at once.

Other models share a forward pass in another way: to the model all rows are one rectangle, left-padded to the longest,
whose keys and values are `zinfer.engine.stream.stacked.Stacked`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zinfer.engine.cache import FixedLayer, QuantizedLayer, RowCache
from zinfer.engine.decoder import Part
from zinfer.engine.stream.cpu_attention import attend_all, stack_host_rows
from zinfer.engine.stream.host_work import gathered_stores, to_host_async
from zinfer.engine.stream.kv import PartLayer, SplitLayer
from zinfer.engine.stream.stacked import stack
from zinfer.engine.transfer import to_device, to_host

NAME = "zinfer_ragged"  # name of the attention function
MASKED = {"full_attention", "sliding_attention"}  # kinds of layers whose mask is that of the cache's positions
# Options of attention functions that change nothing for one token of a row that sees exactly its keys.
HARMLESS = {
    "dropout", "scaling", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "layer_idx",
}  # fmt: skip
Attend = Callable[..., Tensor]  # what takes the arguments of `scaled_dot_product_attention`


class NotRaggedError(RuntimeError):
    """The model cannot run ragged passes; the micro-batches' caches may hold part of the pass."""


class RaggedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of several caches, `stores`, as one: it hands new keys and values on to `attend`, which stores them.
    `rows` counts the rows of each, `masks` are their biases, shared by all layers; `by` computes their attention."""

    is_sliding = False

    def __init__(
        self, stores: Sequence[DynamicLayer], rows: Sequence[int], masks: "Sequence[Bias | None]", by: Attend
    ) -> None:
        super().__init__()
        self._stores, self._rows, self._masks, self._by = stores, rows, masks, by
        self._length: int = max(store.get_seq_length() for store in stores)
        self.key = self.value = torch.empty(0)
        self.attended = False

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.key, self.value = key_states, value_states
        key_states.zinfer_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return 1, 0

    def _take(self) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, which are kept no longer."""
        key, value, self.key, self.value = self.key, self.value, torch.empty(0), torch.empty(0)
        del key.zinfer_layer  # type: ignore[attr-defined]
        self.attended = True
        return key, value

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Store each micro-batch's new keys and values, and attend to all. `query` is ``[B, heads, n, head_dim]``, the
        result ``[B, n, heads, head_dim]``.
        """
        key, value = self._take()
        outputs, first = [], 0
        for store, count, mask in zip(self._stores, self._rows, self._masks, strict=True):
            rows = slice(first, first + count)
            first = rows.stop
            keys, values = store.update(key[rows], value[rows])
            mask = getattr(store, "bias", None) or mask  # a recorded layer with a sliding window has its own
            shared, tokens = query.shape[1] // keys.shape[1], query.shape[2]
            seen = None if mask is None else mask.of(keys.shape[2], shared if tokens > 1 else 1)
            # Query heads that share keys stand where several tokens would: no key is copied for them.
            queries = query[rows].reshape(count, keys.shape[1], shared * tokens, query.shape[-1])
            mixed = self._by(queries, keys, values, attn_mask=seen, scale=scaling)
            separated = mixed.view(*keys.shape[:2], shared, tokens, values.shape[-1])
            outputs.append(separated.permute(0, 3, 1, 2, 4).reshape(count, tokens, -1, values.shape[-1]))
            del keys, values  # dequantised, they take memory of their own, which the next ones need
            if isinstance(store, PartLayer):
                store.attended()
        return torch.cat(outputs)


class HostAttentionLayer(RaggedLayer):
    """Layer of several caches in host memory, to which the CPU attends."""

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        key, value = self._take()
        home, dtype = query.device, query.dtype
        key, value, query = to_host_async(*self._stores[0].narrowed().encode(key, value), query)
        total, blocks, first = len(query), list[tuple[Tensor, Tensor]](), 0
        with gathered_stores():
            for store, count in zip(self._stores, self._rows, strict=True):
                rows = slice(first, first + count)
                first = rows.stop
                blocks.append(store.narrowed().append(key[rows], value[rows]))
        shared, tokens = query.shape[1] // key.shape[1], query.shape[2]
        queries = query.reshape(total, key.shape[1], shared * tokens, query.shape[-1])
        mixed = attend_all(queries, blocks, self._biases(blocks, shared if tokens > 1 else 1), scaling)
        separated = mixed.to(dtype).view(total, key.shape[1], shared, tokens, -1)
        return to_device(separated.permute(0, 3, 1, 2, 4).reshape(total, tokens, query.shape[1], -1), home)

    def _biases(self, blocks: Sequence[tuple[Tensor, Tensor]], heads: int) -> list[Tensor]:
        """Return the bias of all rows. It is ``[B, 1, 1 or heads * n, m]``, m the most positions that one sees; none if
        nothing is hidden. Layers that see equally many share it.
        """
        held = next((mask for mask in self._masks if mask is not None), None)
        if held is None:
            return []
        lengths = tuple(keys.shape[2] for keys, _ in blocks)
        return [held.joined(self._masks, self._rows, lengths, heads)]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a ragged pass, with the signature of `transformers`' attention functions."""
    layer = getattr(key, "zinfer_layer", None)
    other = {name for name, content in options.items() if content is not None and content is not False} - HARMLESS
    if (
        layer is None or key is not layer.key or value is not layer.value or layer.attended
        or attention_mask is not None or other or query.shape[2] != key.shape[2] or len(query) != len(key)
        or query.shape[1] % key.shape[1]
    ):  # fmt: skip
        raise NotRaggedError(f"layer {getattr(module, 'layer_idx', '?')} attends in a way of its own {sorted(other)}")
    return layer.attend(query, options.get("scaling")), None


class StackedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer `index` of the caches of `parts`, as one: keys and values are `Stacked`. With `on_cpu` they are in host
    memory, and the CPU attends to them."""

    is_sliding = False

    def __init__(self, index: int, parts: Sequence[Part], on_cpu: bool) -> None:
        super().__init__()
        self.index, self._parts, self._on_cpu = index, parts, on_cpu

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        device, dtype = key_states.device, key_states.dtype
        if self._on_cpu:  # all parts are stored alike: one transfer
            key_states, value_states = to_host_async(*self._layer(self._parts[0]).encode(key_states, value_states))
        stacked: list[list[Any]] = [[], []]
        first = 0
        with gathered_stores():
            for part in self._parts:
                rows = slice(first, first + len(part.token_ids))
                first = rows.stop
                layer = self._layer(part)
                layer.window(part.rows, part.batch.length)  # other parts may be rows of the same batch
                store = layer.append if self._on_cpu else layer.store
                for blocks, states in zip(stacked, store(key_states[rows], value_states[rows]), strict=True):
                    blocks.append(states)
        keys, values = (
            stack_host_rows(blocks, device, dtype) if self._on_cpu else stack(blocks, dtype) for blocks in stacked
        )
        return keys, values

    def _layer(self, part: Part) -> Any:
        cache = part.batch.cache
        assert isinstance(cache, RowCache)
        return cache.layers[self.index]

    def get_seq_length(self) -> int:
        return max(part.batch.length for part in self._parts)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.get_seq_length() + self._parts[0].token_ids.shape[1], 0


def stacked_inputs(parts: Sequence[Part], on_cpu: bool) -> tuple[Cache, Tensor | None]:
    """Return cache and mask ``[B, n]`` for `parts` as one rectangle. They are decode steps of equal token counts;
    there is no mask if there is no padding.
    """
    layers = getattr(parts[0].batch.cache, "layers", ())
    cache = Cache(layers=[StackedLayer(index, parts, on_cpu) for index in range(len(layers))])
    count = parts[0].token_ids.shape[1]
    longest = max(part.batch.length for part in parts) + count
    if all(part.batch.mask is None and part.batch.length + count == longest for part in parts):
        return cache, None
    masks = []
    for batch, rows, tokens, *_ in parts:
        end = batch.length + count
        mask = tokens.new_ones((len(tokens), end)) if batch.mask is None else batch.mask[rows, :end]
        masks.append(pad(mask, (longest - end, 0)))
    return cache, torch.cat(masks)


class Ragged:
    """Ragged passes of `model`; `able` is False if it is known that it cannot run them."""

    def __init__(self, model: PreTrainedModel, accepted: frozenset[str]) -> None:
        candidates = (getattr(module, "config", None) for module in model.modules())
        configs = [config for config in candidates if isinstance(config, PreTrainedConfig)]
        self._configs = list({id(config): config for config in configs}.values())
        self._on = False
        text = model.config.get_text_config(decoder=True)
        self.able = (
            bool(getattr(model, "_supports_attention_backend", False))
            and all(config._attn_implementation == "sdpa" for config in self._configs)
            and {"position_ids", "attention_mask"} <= accepted
            and set(getattr(text, "layer_types", None) or ()) <= MASKED
            and getattr(text, "attention_chunk_size", None) is None
        )

    def takes(self, part: Part, on_cpu: bool = False) -> bool:
        """Tell whether a part can join others with equal token counts: a decode step of a micro-batch's rows, which
        have nothing but keys and values, on the device or coming there, or, `on_cpu`, CPU-attended rows.
        Rows with a sliding window have one token.
        """
        batch, cache, count = part.batch, part.batch.cache, part.token_ids.shape[1]
        if not (self.able and is_decode(part) and isinstance(cache, RowCache)):
            return False
        every = part.rows == slice(0, batch.batch_size)
        whole = all(takes_part(layer, every) for layer in cache.layers)
        split = all(isinstance(layer, SplitLayer) and layer.joins(part.rows, on_cpu) for layer in cache.layers)
        whole = whole and not on_cpu
        return (whole or split) and (count == 1 or all(layer.slots.window is None for layer in cache.layers))

    def switch(self, on: bool) -> None:
        """Switch the model to the attention of ragged passes, or back."""
        if on != self._on:
            self._on = on
            for config in self._configs:
                config._attn_implementation_internal = NAME if on else "sdpa"

    @contextmanager
    def cache(
        self,
        caches: Sequence[Sequence[DynamicLayer]],
        rows: Sequence[int],
        masks: Sequence[Tensor | None],
        by: Attend = scaled_dot_product_attention,
        on_cpu: bool = False,
    ) -> Iterator[Cache]:
        """Switch the model to ragged attention over the layers of `caches`. They share one cache; their numbers of rows
        are in `rows`. `masks` are what `bias` returns of each; None hides nothing. `by` computes the attention of a
        micro-batch, unless the CPU attends to all of them. Raises NotRaggedError after a pass in which a layer did not
        attend.
        """
        biases = [None if mask is None else Bias(mask) for mask in masks]
        kind = HostAttentionLayer if on_cpu else RaggedLayer
        layers = [kind(stores, rows, biases, by) for stores in zip(*caches, strict=True)]
        self.switch(True)
        try:
            yield Cache(layers=layers)
        finally:
            self.switch(False)
        if not all(layer.attended for layer in layers):
            raise NotRaggedError("a layer stores keys and values, and does not attend to them as others do")


def bias_of(part: Part, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of attention for a part, a decode step; None if its tokens see all positions."""
    batch, (rows, count) = part.batch, part.token_ids.shape
    if batch.mask is None and count == 1:
        return None
    end = batch.length + count
    if batch.mask is None:
        seen = torch.ones((rows, 1, end), dtype=torch.bool, device=part.token_ids.device)
    else:
        seen = (batch.mask[part.rows, :end] != 0)[:, None]
    if count > 1:
        position = torch.arange(end, device=seen.device)
        seen = seen & (position <= position[batch.length :, None])
    return bias(seen, dtype)


def bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention bias of `count` tokens, ``[B, 1, count, n]``: 0 where `seen`, bool ``[B, count,
    n]``, is true, else the lowest number.
    """
    rows, count, end = seen.shape
    bias_tensor = _aligned(rows, count, end, dtype, seen.device)
    return bias_tensor.masked_fill_(~seen[:, None], torch.finfo(dtype).min)


class Bias:
    """Attention bias ``[B, 1, count, n]`` in all forms that layers need."""

    def __init__(self, whole: Tensor) -> None:
        self._forms = {(whole.shape[-1], 1): whole}
        self._whole = whole
        self._joined: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def of(self, length: int, heads: int) -> Tensor:
        """Return the bias of the last `length` positions. They are those of a window; it is ``[B, 1, heads * count,
        length]``: as many heads ask, each with all tokens.
        """
        if (length, heads) not in self._forms:
            rows, _, count, end = self._whole.shape
            bias_tensor = _aligned(rows, heads * count, length, self._whole.dtype, self._whole.device)
            for head in range(heads):
                bias_tensor[:, :, head * count : (head + 1) * count].copy_(self._whole[..., end - length :])
            self._forms[length, heads] = bias_tensor
        return self._forms[length, heads]

    def joined(
        self, masks: "Sequence[Bias | None]", rows: Sequence[int], lengths: tuple[int, ...], heads: int
    ) -> Tensor:
        """Return several micro-batches' biases as a float32 mask in host memory. It has the last positions of the
        longest mask; each micro-batch, with its `rows`, has the last `lengths` of them.
        """
        if (lengths, heads) not in self._joined:
            seen = [
                None if mask is None else mask.of(length, heads) for mask, length in zip(masks, lengths, strict=True)
            ]
            tokens = max(mask.shape[2] for mask in seen if mask is not None)
            bias_tensor = torch.zeros((sum(rows), 1, tokens, max(lengths)))
            host_masks = to_host(*(mask for mask in seen if mask is not None))
            first = 0
            for mask, count, length in zip(seen, rows, lengths, strict=True):
                if mask is not None:
                    bias_tensor[first : first + count, ..., max(lengths) - length :] = host_masks.pop(0)
                first += count
            self._joined[lengths, heads] = bias_tensor
        return self._joined[lengths, heads]


def _aligned(rows: int, tokens: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros ``[rows, 1, tokens, count]`` with rows aligned to 8 values: kernels of attention read a bias in
    vectors, and fail at any other address.
    """
    return torch.zeros((rows, 1, tokens, -(-count // 8) * 8), dtype=dtype, device=device)[..., :count]


def layers_of(part: Part) -> Sequence[DynamicLayer]:
    """Return the layers of a part's cache, for its rows alone."""
    layers = part.batch.cache.layers if part.batch.cache is not None else ()
    kinds = SplitLayer, QuantizedLayer
    return [PartLayer(layer, part.rows, part.batch.length) if isinstance(layer, kinds) else layer for layer in layers]


def takes_part(layer: DynamicLayer, whole: bool) -> bool:
    """Tell whether device rows of a layer can share a pass. In 8 bits, attended to a part at a time, also some rows
    can; else all, `whole`.
    """
    return isinstance(layer, QuantizedLayer) or (type(layer) is FixedLayer and whole)


def is_decode(part: Part) -> bool:
    """Tell whether a part is a decode step: the next token of each row, or several that are verified, with logits of
    all."""
    count, batch = part.token_ids.shape[1], part.batch
    return part.keep == count and batch.length >= (1 if count == 1 else batch.prompt_len)


def split(parts: Sequence[Part], logits: Tensor) -> list[Tensor]:
    """Return the logits of each part."""
    ends = list(accumulate(len(part.token_ids) for part in parts))
    return [logits[end - len(part.token_ids) : end] for part, end in zip(parts, ends, strict=True)]


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
