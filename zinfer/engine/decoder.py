"""Prefill and decode over any `transformers` decoder; an engine on top of it only says where the weights are.

No per-architecture code: what `AutoModelForCausalLM` builds, runs. Positions follow the attention mask, so that
left-padded rows count from their own first token, as `generate` does it.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from zinfer.cost import pass_tokens, prefill_rows
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Progress, silent
from zinfer.engine.cache import make_cache, show_rows
from zinfer.plan import Plan, setup_of


class Decoder(Engine):
    """An engine whose `model` is a `transformers` causal language model. Subclasses say in `_load` where its weights
    go, and end it with `_ready`; what `close` frees has a default in the class, as it may be called half-way."""

    model: PreTrainedModel

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
        accepted = inspect.signature(self._forward_owner().forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._cache = None

    def _forward_owner(self) -> PreTrainedModel:
        """The module whose `forward` names the arguments; an engine that wraps the model overrides `_call` only."""
        return self.model

    def _call(self, **inputs: object) -> Tensor:
        """One forward pass; logits ``[B, n, V]``."""
        logits: Tensor = self.model(**inputs).logits
        return logits

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0) -> Tensor:
        self.release()
        token_ids, mask = token_ids.to(self.device), attention_mask.to(self.device)
        batch_size, length = token_ids.shape
        self._cache = self._make_cache(batch_size, length, length + reserve)
        # Without padding every kernel can use plain causal attention, which needs no [B, 1, S, S] mask.
        self._mask = None if bool(mask.all()) else torch.ones((batch_size, length + reserve), dtype=mask.dtype)
        if self._mask is not None:
            self._mask = self._mask.to(self.device)
            self._mask[:, :length] = mask
        self._length = length
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self._next_position = positions[:, -1:] + 1
        logits = self._in_parts(
            self._parts(batch_size, length), 0, lambda rows: self._step(token_ids[rows], positions[rows], rows)
        )
        self._show(slice(0, batch_size), length)
        return torch.cat(logits)

    def _make_cache(self, batch_size: int, length: int, capacity: int) -> Cache:
        """The cache of a batch whose prompts are `length` tokens long."""
        return make_cache(self.model.config, batch_size, capacity)

    def _parts(self, batch_size: int, length: int) -> list[slice]:
        """The rows that go through the model together, `length` tokens of each at a time."""
        rows = slice(0, batch_size)
        return [rows] if length == 1 or not self._show(rows, 0) else self._split(rows, length)

    def _split(self, rows: slice, length: int) -> list[slice]:
        """`rows`, as many at a time as have activations of `length` tokens within bounds."""
        setup = setup_of(self.plan.case, self.plan.model, self.plan.machine)
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
        if self._cache is None:
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
        inputs: dict[str, object] = {
            "input_ids": token_ids,
            "attention_mask": None if self._mask is None else self._mask[rows, : self._length],
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = positions
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        return self._call(**inputs)[:, -1]

    def release(self) -> None:
        self._cache = None
        self._mask = None

    def close(self) -> None:
        self.release()
        if hasattr(self, "model"):
            del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def scratch(nvme_path: str | None) -> TemporaryDirectory[str]:
    """A folder for offloaded weights inside `nvme_path`, gone when it is cleaned up.

    Raises EngineError unless `nvme_path` names a folder that exists.
    """
    if nvme_path is None or not Path(nvme_path).is_dir():
        what = f"{nvme_path!r} is not a folder" if nvme_path else "it needs one"
        raise EngineError(f"offload nvme puts the weights into the folder given by --nvme-path: {what}")
    return TemporaryDirectory(prefix="zinfer-", dir=nvme_path)
