"""Prefill and decode over any `transformers` decoder; an engine on top of it only says where the weights are.

No per-architecture code: what `AutoModelForCausalLM` builds, runs. Positions follow the attention mask, so that
left-padded rows count from their own first token, as `generate` does it.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Progress, silent
from zinfer.engine.cache import CacheFullError, FixedLayer, RowCache, make_cache, show_rows
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.plan.cost import pass_tokens, prefill_rows
from zinfer.plan.plan import Plan, placement_of

CACHE_NAMES = ("past_key_values", "cache_params")  # what forward passes call their cache


class Decoder(Engine):
    """An engine whose `model` is a `transformers` causal language model. Subclasses say in `_load` where its weights
    go, and end it with `_ready`; what `close` frees has a default in the class, as it may be called half-way."""

    model: PreTrainedModel
    _cache: Cache | None = None
    _state: Any = None  # what the forward pass takes as its cache, and has its state of the batch in
    _mask: Tensor | None = None

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _load(self) -> None:
        """Make `model`, with its weights in place."""

    def _ready(self) -> None:
        self.model.eval()
        for module in self.model.modules():
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(self.device)
        self._inspect()
        self._cache = None

    def _inspect(self) -> None:
        """Learn how `model` is called; its weights need not be there. Raises EngineError where it has no cache."""
        owner = self._forward_owner()
        accepted = inspect.signature(owner.forward).parameters
        self._accepted = frozenset(accepted)
        self._cache_name = next((name for name in CACHE_NAMES if name in accepted), "")
        if not self._cache_name or "input_ids" not in accepted:
            raise EngineError(
                f"{self.plan.model.name} cannot be run step by step: the forward pass of {type(owner).__name__} takes "
                "no cache"
            )
        takes_default = getattr(owner, "_supports_default_dynamic_cache", lambda: True)
        # Modules of a few models keep states of the batch themselves, besides what is in the cache.
        self._in_modules = any(hasattr(module, "_setup_cache") for module in self.model.modules())
        self._own_cache = self._in_modules or not takes_default()
        self._rope_switch = rope_switch(self.model)

    def _forward_owner(self) -> PreTrainedModel:
        """The module whose `forward` names the arguments; an engine that wraps the model overrides `_call` only."""
        return self.model

    def _call(self, **inputs: object) -> Tensor:
        """One forward pass; logits ``[B, n, V]``."""
        output = self.model(**inputs)
        if self._own_cache and (state := getattr(output, self._cache_name, None)) is not None:
            self._state = state
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def prefill(
        self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0, past: Sequence[KVSnapshot] = ()
    ) -> Tensor:
        self.release()
        token_ids, mask = token_ids.to(self.device), attention_mask.to(self.device)
        batch_size, length = token_ids.shape
        known = self._check_past(past, batch_size, length)
        self._check_positions(mask, reserve)
        self._cache = self._make_cache(batch_size, length, length + reserve)
        self._state = DynamicCache(config=self.model.config) if self._in_modules else self._cache
        if self._cache is not None:
            for part in past:
                part.put(self._cache.layers, self.device)
        # Without padding every kernel can use plain causal attention, which needs no [B, 1, S, S] mask.
        self._mask = None if bool(mask.all()) else torch.ones((batch_size, length + reserve), dtype=mask.dtype)
        if self._mask is not None:
            self._mask = self._mask.to(self.device)
            self._mask[:, :length] = mask
        self._length = self._mask_length = length
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self._next_position = positions[:, -1:] + 1
        parts = self._split(slice(0, batch_size), length - known) if past else self._parts(batch_size, length)
        try:
            logits = self._in_parts(
                parts, known, lambda rows: self._step(token_ids[rows, known:], positions[rows, known:], rows)
            )
            if isinstance(self._cache, RowCache) and not self._cache.has_length(length):
                raise CacheFullError
        except CacheFullError:
            raise EngineError(f"{self.plan.model.name} computes other tokens than those of its prompt") from None
        self._show(slice(0, batch_size), length)
        return torch.cat(logits)

    def _check_positions(self, mask: Tensor, reserve: int) -> None:
        """Raise EngineError where the batch's positions would lead to wrong text."""
        lengths = mask.sum(-1)
        least, most = int(lengths.min()), int(lengths.max())
        switch = self._rope_switch
        if switch is not None and least <= switch < most + reserve:
            raise EngineError(
                f"from position {switch} on {self.plan.model.name} turns all keys by other angles (longrope), also "
                f"those in the cache: prompts of {least} to {most} tokens and {reserve} more must stay on one side"
            )
        if "attention_mask" not in self._accepted and least < mask.shape[1]:
            raise EngineError(f"{self.plan.model.name} knows no padding: its prompts must be of one length in a batch")

    def _check_past(self, past: Sequence[KVSnapshot], batch_size: int, length: int) -> int:
        """The positions that `past` holds. Raises EngineError for one that cannot be taken up."""
        if not past:
            return 0
        if (why_not := self.cannot_keep()) is not None:
            raise EngineError(why_not)
        known, layers = 0, self.plan.model.num_layers
        for part in past:
            if part.first != known or not part.fits(layers, batch_size):
                raise EngineError("what was kept is of other rows, of another model, or not in order")
            known += part.length
        if known >= length:
            raise EngineError(f"{known} positions were kept, and the prompt has {length}: one at least must be new")
        return known

    def cannot_keep(self) -> str | None:
        layers = [] if self._own_cache else make_cache(self.model.config, 1, 1).layers
        if not layers or any(type(layer) is not FixedLayer for layer in layers):
            return f"the layers of {self.plan.model.name} hold another state than keys and values"
        windows = {layer.slots.window for layer in layers} - {None}
        if windows:
            return f"layers of {self.plan.model.name} hold the last {min(windows)} positions only (sliding window)"
        return None

    @torch.inference_mode()
    def keep(self, first: int, last: int) -> KVSnapshot:
        if (why_not := self.cannot_keep()) is not None:
            raise EngineError(why_not)
        if self._cache is None or not 0 <= first < last <= self._length:
            raise EngineError(f"positions {first} to {last} have not been computed")
        if not all(layer.is_initialized for layer in self._cache.layers):
            raise EngineError(f"some layers of {self.plan.model.name} hold no keys and values of their own")
        return KVSnapshot.of(self._cache.layers, first, last, pin=self.device.type == "cuda")

    def _make_cache(self, batch_size: int, length: int, capacity: int) -> Cache | None:
        """The cache of a batch whose prompts are `length` tokens long; None where the model makes its own."""
        return None if self._own_cache else make_cache(self.model.config, batch_size, capacity)

    def _parts(self, batch_size: int, length: int) -> list[slice]:
        """The rows that go through the model together, `length` tokens of each at a time."""
        rows = slice(0, batch_size)
        return [rows] if length == 1 or not isinstance(self._cache, RowCache) else self._split(rows, length)

    def _split(self, rows: slice, length: int) -> list[slice]:
        """`rows`, as many at a time as have activations of `length` tokens within bounds."""
        setup = placement_of(self.plan.case, self.plan.model, self.plan.machine)
        at_once = prefill_rows(rows.stop - rows.start, length, pass_tokens(setup, self.plan.model))
        return [slice(start, min(start + at_once, rows.stop)) for start in range(rows.start, rows.stop, at_once)]

    def _in_parts(self, parts: list[slice], length: int, work: Callable[[slice], Tensor]) -> list[Tensor]:
        """`work`, a forward pass, for each part of the batch, of which `length` tokens are in the cache."""
        logits = []
        for rows in parts:
            self._show(rows, length)
            logits.append(work(rows))
        return logits

    def _show(self, rows: slice, length: int) -> bool:
        """Narrow the cache to `rows`, at position `length`; False where it is not of our making."""
        return self._cache is not None and show_rows(self._cache, rows, length)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        if self._state is None:
            raise RuntimeError("decode() before prefill()")
        self._length += 1
        positions, self._next_position = self._next_position, self._next_position + 1
        parts, length = self._parts(token_ids.shape[0], 1), self._length - 1
        logits = self._in_parts(parts, length, lambda rows: self._step(token_ids[rows, None], positions[rows], rows))
        if len(parts) > 1:
            self._show(slice(0, token_ids.shape[0]), self._length)
        return torch.cat(logits)

    def _step(self, token_ids: Tensor, positions: Tensor, rows: slice) -> Tensor:
        """One forward pass of `rows`, whose tokens and positions these are; the last position's logits."""
        first = self._mask_length == self._length
        inputs: dict[str, object] = {
            "input_ids": token_ids,
            "attention_mask": None if self._mask is None else self._mask[rows, : self._length],
            "position_ids": positions,
            "logits_to_keep": 1,
            self._cache_name: self._state,
            "use_cache": True,
        }
        if self._cache_name == "cache_params" and not first:
            inputs["attention_mask"] = None  # of a state that has taken padding in, as `generate` has it
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        return self._call(**inputs)[:, -1]

    def release(self) -> None:
        self._cache = self._state = None
        self._mask = None

    def close(self) -> None:
        self.release()
        if hasattr(self, "model"):
            del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rope_switch(model: PreTrainedModel) -> int | None:
    """The position from which on a rotary embedding of `model` turns all keys, those before it included, by other
    angles (longrope); None where there is none."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    switches = [
        int(group["original_max_position_embeddings"])
        for group in groups
        if group.get("rope_type") == "longrope" and group.get("original_max_position_embeddings")
    ]
    return min(switches, default=None)


def scratch(nvme_path: str | None) -> TemporaryDirectory[str]:
    """A folder for offloaded weights inside `nvme_path`, gone when it is cleaned up.

    Raises EngineError unless `nvme_path` names a folder that exists.
    """
    if nvme_path is None or not Path(nvme_path).is_dir():
        what = f"{nvme_path!r} is not a folder" if nvme_path else "it needs one"
        raise EngineError(f"offload nvme puts the weights into the folder given by --nvme-path: {what}")
    return TemporaryDirectory(prefix="zinfer-", dir=nvme_path)
