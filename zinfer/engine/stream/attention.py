"""Attention: the one function that models call by name where their keys are not simply on the device.

A decode step has one token a row, or several where drafts are verified, as many in all micro-batches. All of a decoder
layer but attention treats one token like any other. So the rows of all micro-batches go through it together: its
kernels are launched, and its weights are read from the GPU's memory, once. Attention runs for each micro-batch, over
its own keys and values, or on the CPU for all micro-batches' rows at once (`JOINED`). Rows that the CPU attends to call
the same function in passes of their own (`NAME`): chunks of prompts, and layers that join no others.

Models that take their attention function by name (the `AttentionInterface` of `transformers`) give the place for it; an
adapter does for BLOOM (`zinfer.engine.stream.bloom`). A cache hands a model its new keys and values with an attribute
`zinfer_states`, which attends for them. In joined passes the function must be called once in each layer, with the very
tensors that the cache returned and without a mask or bias of the model's own: `OwnAttentionError` says that a model
does something else.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zinfer.engine.cache import FixedLayer, RowCache, shares_keys
from zinfer.engine.decoder import Part
from zinfer.engine.stream import bloom
from zinfer.engine.stream.kv.cpu import HostStates, OwnAttentionError, unknown
from zinfer.engine.stream.kv.store import PartLayer
from zinfer.engine.stream.split_attention import plain_attention
from zinfer.engine.transfer import to_host

NAME, JOINED = "zinfer", "zinfer_joined"  # names of the attention function: models make masks for the first alone
MASKED = {"full_attention", "sliding_attention"}  # kinds of layers whose mask is that of the cache's positions
Attend = Callable[..., Tensor]  # what takes the arguments of `plain_attention`


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend, with the signature of `transformers`' attention functions."""
    states = getattr(key, "zinfer_states", None)
    of_both = getattr(value, "zinfer_states", None) is states
    if states is None or not of_both or len(query) != len(key) or query.shape[1] % key.shape[1]:
        raise OwnAttentionError(f"layer {getattr(module, 'layer_idx', '?')} attends to other keys than its cache's")
    attended: Tensor = states.attend(query, key, value, attention_mask, options)
    return attended.contiguous(), None  # some models view it


class Alibi(NamedTuple):
    """Bias of each head that grows with a key's position, by `slopes`: float32 ``[heads]``."""

    slopes: Tensor
    dtype: torch.dtype  # what the model rounds it to

    def of(self, positions: Tensor) -> Tensor:
        """Return the bias of keys at `positions`. These are ``[b, n]``, the bias is ``[b, heads, 1, n]``."""
        return (self.slopes[:, None] * positions[:, None]).to(self.dtype)[:, :, None]


class Bias:
    """Bias of a micro-batch's scores, in all forms that layers need.

    `hidden`, ``[B, 1, count, n]``, is 0 or the lowest number; None hides nothing. `positions`, ``[B or 1, n]``, are
    those of the keys, for a model with ALiBi.
    """

    def __init__(
        self, hidden: Tensor | None = None, positions: Tensor | None = None, alibi: Alibi | None = None
    ) -> None:
        self.hidden, self.positions, self._alibi = hidden, positions, alibi
        self._forms: dict[tuple[int, int], Tensor] = {}
        if hidden is not None and alibi is None:
            self._forms[hidden.shape[-1], 1] = hidden

    def of(self, length: int, heads: int) -> Tensor:
        """Return the bias of the last `length` positions. They are those of a window; it is ``[B, 1, heads * count,
        length]``: as many heads ask, each with all tokens. With ALiBi it is ``[B or 1, H, count, length]``.
        """
        if (length, heads) not in self._forms:
            self._forms[length, heads] = self._made(length, heads)
        return self._forms[length, heads]

    def _made(self, length: int, heads: int) -> Tensor:
        hidden = self.hidden
        if self._alibi is not None and self.positions is not None:
            alibi = self._alibi.of(self.positions[:, -length:])
            shape = torch.broadcast_shapes(alibi.shape, () if hidden is None else hidden[..., -length:].shape)
            bias_tensor = _aligned(shape[:-1], length, alibi.dtype, alibi.device).copy_(alibi)
            return bias_tensor if hidden is None else bias_tensor.add_(hidden[..., -length:])
        assert hidden is not None
        rows, _, count, end = hidden.shape
        bias_tensor = _aligned((rows, 1, heads * count), length, hidden.dtype, hidden.device)
        return bias_tensor.copy_(hidden[..., end - length :].repeat(1, 1, heads, 1))


class HostBiases:
    """Biases of host rows, in host memory. Layers that see equally many positions share them."""

    def __init__(self, biases: Sequence[Bias | None]) -> None:
        self._biases = biases
        self._forms: dict[tuple[tuple[int, ...], int], list[list[Tensor]]] = {}

    def __call__(self, lengths: tuple[int, ...], heads: int) -> list[list[Tensor]]:
        """Return one or no float32 `Bias.of` the last positions of each micro-batch."""
        if (lengths, heads) not in self._forms:
            pairs = enumerate(zip(self._biases, lengths, strict=True))
            made = {index: bias.of(length, heads) for index, (bias, length) in pairs if bias is not None}
            copies = dict(zip(made, to_host(*made.values()) if made else (), strict=True))
            forms = [[copies[index].float()] if index in copies else [] for index in range(len(lengths))]
            self._forms[lengths, heads] = forms
        return self._forms[lengths, heads]


class JoinedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of several caches, `stores`, as one: the attention function stores new keys and values in each, and
    attends to it. `rows` counts the rows of each, `biases` are shared by all layers; `by` computes attention.
    """

    is_sliding = False

    def __init__(self, stores: Sequence[Any], rows: Sequence[int], biases: Sequence[Bias | None], by: Attend) -> None:
        super().__init__()
        self._stores, self._rows, self._biases, self._by = stores, rows, biases, by
        self.length: int = max(store.get_seq_length() for store in stores)
        self.attended = False

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states.zinfer_states = value_states.zinfer_states = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return 1, 0

    def check(self, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        """Note a call of the attention function. Raises OwnAttentionError if it differs from what others do."""
        supported = (
            ("position_bias",) if any(bias is not None and bias.positions is not None for bias in self._biases) else ()
        )
        other = unknown(options, "s_aux", *supported)
        if mask is not None or self.attended or other or query.shape[2] != key.shape[2]:
            what = sorted(other) or ("a mask" if mask is not None else "keys of another pass or layer")
            raise OwnAttentionError(f"attention with {what}")
        self.attended = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Store each micro-batch's new keys and values, and attend to all. `query` is ``[B, heads, n, head_dim]``, the
        result ``[B, n, heads, head_dim]``.
        """
        self.check(query, key, mask, options)
        outputs, first = [], 0
        for store, count, bias in zip(self._stores, self._rows, self._biases, strict=True):
            rows = slice(first, first + count)
            first = rows.stop
            keys, values = store.update(key[rows], value[rows])
            bias = store.bias or bias  # a recorded layer with a sliding window has its own
            shared, tokens = query.shape[1] // keys.shape[1], query.shape[2]
            seen = None if bias is None else bias.of(keys.shape[2], shared if tokens > 1 else 1)
            # Query heads that share keys stand where several tokens would: no key is copied for them.
            queries = query[rows].reshape(count, keys.shape[1], shared * tokens, query.shape[-1])
            sinks = options.get("s_aux")
            if sinks is not None:
                sinks = sinks.view(keys.shape[1], shared, 1).expand(-1, -1, tokens).flatten(1)
            mixed = self._by(queries, keys, values, attn_mask=seen, scale=options.get("scaling"), sinks=sinks)
            separated = mixed.view(*keys.shape[:2], shared, tokens, values.shape[-1])
            outputs.append(separated.permute(0, 3, 1, 2, 4).reshape(count, tokens, -1, values.shape[-1]))
            del keys, values  # dequantised, they take memory of their own, which the next ones need
            store.hand_back()
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class JoinedHostLayer(JoinedLayer):
    """Layer of several caches in host memory, to which the CPU attends."""

    def __init__(
        self, stores: Sequence[PartLayer], rows: Sequence[int], biases: Sequence[Bias | None], on_host: HostBiases
    ) -> None:
        super().__init__(stores, rows, biases, plain_attention)
        self._states = HostStates(stores, rows, on_host)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        self.check(query, key, mask, options)
        return self._states.attend(query, key, value, None, {name: options.get(name) for name in ("scaling", "s_aux")})


class Ragged:
    """Attention of `model` by the function of this module.

    `by_name` is False for a model that computes attention itself, and `able` if it is known that its rows cannot join
    those of other micro-batches. `own` names the model's own attention function; with `sinks` it repeats keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: nn.ModuleList,
        accepted: frozenset[str],
        cache_name: str,
        device: torch.device,
    ) -> None:
        self._model, self.accepted, self._cache_name = model, accepted, cache_name  # names of its arguments
        candidates = (getattr(module, "config", None) for module in model.modules())
        configs = [config for config in candidates if isinstance(config, PreTrainedConfig)]
        self._configs = [
            (config, config._attn_implementation) for config in {id(config): config for config in configs}.values()
        ]
        self._name: str | None = None
        text = model.config.get_text_config(decoder=True)
        slopes = bloom.adapt(layers)
        self.alibi = None if slopes is None else Alibi(slopes.to(device), model.dtype)
        self.by_name = self.alibi is not None or calls_by_name(layers)
        self.implementation = "sdpa" if self.alibi is not None else str(model.config._attn_implementation)
        self.sinks = any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in layers.modules())
        same = "eager" if self.sinks else "sdpa"  # transformers' function that computes what `plain_attention` does
        replaceable = all(name == same for _, name in self._configs) and bool(
            getattr(model, "_supports_attention_backend", False)
        )
        self.able = (
            (self.alibi is not None or (replaceable and "position_ids" in accepted))
            and "attention_mask" in accepted
            and set(getattr(text, "layer_types", None) or ()) <= MASKED
            and getattr(text, "attention_chunk_size", None) is None
            and not shares_keys(model.config)
        )

    def run(self, token_ids: Tensor, positions: Tensor, keep: int, cache: Cache, mask: object = None) -> Tensor:
        """Run a forward pass of the model; return the logits of the last `keep` tokens ``[B, keep, V]``."""
        inputs = {"input_ids": token_ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": keep}
        inputs |= {self._cache_name: cache, "use_cache": True}
        logits: Tensor = self._model(**{name: inputs[name] for name in inputs.keys() & self.accepted}).logits
        return logits[:, -keep:]

    def takes(self, part: Part) -> bool:
        """Tell whether a part can join others with equal token counts: a decode step of a micro-batch's rows, which
        have nothing but keys and values. Rows with a sliding window have one token.
        """
        cache, count = part.batch.cache, part.token_ids.shape[1]
        return (
            self.able
            and is_decode(part)
            and isinstance(cache, RowCache)
            and all(isinstance(layer, FixedLayer) and layer.joins(part.rows) for layer in cache.layers)
            and (count == 1 or all(layer.slots.window is None for layer in cache.layers))
        )

    def switch(self, name: str | None) -> None:
        """Switch the model to the attention function of that name; None: to its own."""
        if name != self._name:
            self._name = name
            for config, original in self._configs:
                config._attn_implementation_internal = name or original

    @contextmanager
    def cache(
        self,
        caches: Sequence[Sequence[Any]],
        rows: Sequence[int],
        biases: Sequence[Bias | None],
        by: Attend = plain_attention,
        on_cpu: bool = False,
        whole: bool = True,
    ) -> Iterator[Cache]:
        """Switch the model to joined attention over the layers of `caches`. They share one cache; their numbers of rows
        are in `rows`. `biases` of each add to its scores, None nothing. `by` computes the attention of a micro-batch,
        unless the CPU attends to all of them. Raises OwnAttentionError after a `whole` pass in which a layer did not
        attend.
        """
        layers: list[JoinedLayer]
        if on_cpu:
            on_host = HostBiases(biases)
            layers = [JoinedHostLayer(stores, rows, biases, on_host) for stores in zip(*caches, strict=True)]
        else:
            layers = [JoinedLayer(stores, rows, biases, by) for stores in zip(*caches, strict=True)]
        for layer in layers if self.alibi is not None else ():
            layer.length = 0  # BLOOM may make a bias of this length: nobody reads it, but it must not grow in graphs
        before = self._name
        self.switch(JOINED)
        try:
            yield Cache(layers=layers)
        finally:
            self.switch(before)
        if whole and not all(layer.attended for layer in layers):
            raise OwnAttentionError("a layer stores keys and values, and does not attend to them as others do")

    def bias_of(self, part: Part, dtype: torch.dtype) -> Bias | None:
        """Return what a part, a decode step, adds to its scores; None for nothing."""
        batch, (rows, count), device = part.batch, part.token_ids.shape, part.token_ids.device
        if batch.mask is None and count == 1 and self.alibi is None:
            return None
        end = batch.length + count
        mask = None if batch.mask is None else batch.mask[part.rows, :end]
        if mask is None and count == 1:
            return self.bias(None, mask, end, dtype, device)
        seen = torch.ones((rows, 1, end), dtype=torch.bool, device=device) if mask is None else (mask != 0)[:, None]
        if count > 1:
            position = torch.arange(end, device=device)
            seen = seen & (position <= position[batch.length :, None])
        return self.bias(seen, mask, end, dtype, device)

    def bias(
        self, seen: Tensor | None, mask: Tensor | None, end: int, dtype: torch.dtype, device: torch.device
    ) -> Bias:
        """Return the bias of tokens that see `seen` of `end` positions. `seen` is bool ``[B, count, n]``. `mask`, ``[B,
        end]``, has 1 where a position is real: those alone are counted.
        """
        hidden = None if seen is None else bias(seen, dtype)
        if self.alibi is None:
            return Bias(hidden)
        if mask is None:
            return Bias(hidden, torch.arange(end, device=device)[None], self.alibi)
        return Bias(hidden, (mask.cumsum(-1) - 1) * mask, self.alibi)


def calls_by_name(layers: nn.ModuleList) -> bool:
    """Tell whether layers look their attention function up by name."""
    forwards = {inspect.unwrap(type(module).forward) for layer in layers for module in layer.modules()}
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return any("ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ()) for code in codes)


def bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention bias of `count` tokens, ``[B, 1, count, n]``: 0 where `seen`, bool ``[B, count,
    n]``, is true, else the lowest number.
    """
    rows, count, end = seen.shape
    bias_tensor = _aligned((rows, 1, count), end, dtype, seen.device)
    return bias_tensor.masked_fill_(~seen[:, None], torch.finfo(dtype).min)


def _aligned(shape: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros ``[*shape, count]``, rows aligned to 8 values: kernels read a bias in vectors, or fail."""
    return torch.zeros((*shape, -(-count // 8) * 8), dtype=dtype, device=device)[..., :count]


def layers_of(part: Part) -> Sequence[PartLayer]:
    """Return the layers of a part's cache, for its rows alone."""
    layers = part.batch.cache.layers if part.batch.cache is not None else ()
    return [PartLayer(layer, part.rows, part.batch.length) for layer in layers]


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
ALL_ATTENTION_FUNCTIONS.register(JOINED, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
