"""Passes over any `transformers` decoder; subclasses only place its weights.

No code is for one architecture: whatever `AutoModelForCausalLM` builds runs. Positions follow the attention mask, so
that left-padded rows count from their own first token, as in `generate`.
"""

import inspect
import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from typing_extensions import TypeVar

from zinfer.checkpoint.architecture import CACHE_NAMES, COUNTS_PADDING, decoder_layers
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work, check_sources, check_works
from zinfer.engine.cache import CacheFullError, FixedLayer, RowCache, RowMask, RowSource, make_cache
from zinfer.engine.kv_snapshot import KVSnapshot, RowsPast
from zinfer.engine.transfer import to_device, to_device_together
from zinfer.plan.planner import Plan
from zinfer.system import scratch
from zinfer.system.scratch import Scratch

WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")  # of transformers.masking_utils
# Types without position ids that number, or use, the tokens which the mask shows: their rows may be padded.
COUNT_BY_MASK = frozenset({"bloom", "falcon_mamba", "mamba", "mamba2", "mpt"})
COUNT_GAPS = frozenset({"mpt"})  # of these, the ones for which forgotten positions make tokens more distant


class DecoderBatch(MicroBatch):
    """Micro-batch of a `Decoder`: a KV cache and a mask of positions.

    `cache` is None where the model makes its own; `state` is what the forward pass takes as its cache. `mask`, ``[B,
    capacity]``, has 0 at padding and at forgotten positions; it is None while there is neither, since every kernel can
    then use plain causal attention, which needs no ``[B, 1, S, S]`` mask.
    """

    def __init__(self, mask: Tensor, capacity: int, cache: Cache | None, state: Any) -> None:
        super().__init__(mask.shape[0], mask.shape[1], capacity)
        self.cache, self.state = cache, state
        self.mask: Tensor | None = None
        self._before: Tensor | None = None  # [B, 1]: real positions among the first `length`
        self.torn = False  # True after a pass that failed: some layers may hold its positions
        if not bool(mask.all()):
            self._need_mask(mask.device, mask.dtype)[:, : self.prompt_len] = mask

    def _need_mask(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones((self.batch_size, self.capacity), dtype=dtype, device=device)
        return self.mask

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of each row's next tokens, ``[B, count]``. They count from 0; padding is at 0."""
        if self.mask is None:
            return torch.arange(self.length, self.length + count, device=device).expand(self.batch_size, count)
        if self._before is None:
            self._before = self.mask[:, : self.length].sum(-1, keepdim=True)
        counted: Tensor = self._before + self.mask[:, self.length : self.length + count].cumsum(-1)
        return (counted - 1).clamp(min=0)

    def advance(self, count: int) -> None:
        if self._before is not None and self.mask is not None:
            self._before = self._before + self.mask[:, self.length : self.length + count].sum(-1, keepdim=True)
        self.length += count

    def rollback(self, lengths: Tensor) -> None:
        """Keep the first `lengths` ``[B]`` positions of each row. Rows shorter than the longest are padded."""
        length = int(lengths.max())
        if int(lengths.min()) < length:
            mask = self._need_mask(lengths.device)
            mask[:, :length] *= torch.arange(length, device=lengths.device) < lengths[:, None]
        if self.mask is not None:  # forgotten positions behind the prompt are free for real tokens again
            self.mask[:, max(length, self.prompt_len) :] = 1
        self.length, self._before = length, None

    def note_kept(self, rows: Tensor) -> None:
        """Note that the cache keeps `rows` only, indices ``[b]``."""
        self.batch_size = len(rows)
        self.mask, self._before = None if self.mask is None else self.mask[rows], None

    def real(self, rows: Tensor) -> Tensor:
        """Tell which positions of `rows` are real: bool ``[b, length]``. Others are padding or forgotten."""
        if self.mask is None:
            return torch.ones((len(rows), self.length), dtype=torch.bool, device=rows.device)
        return self.mask[rows, : self.length].bool()

    def others(self, rows: Tensor) -> Tensor:
        kept = torch.ones(self.batch_size, dtype=torch.bool, device=rows.device)
        kept[rows] = False
        return kept.nonzero()[:, 0]

    def show(self, rows: slice | None = None) -> None:
        """Narrow the cache to `rows`, or all rows, at the batch's length."""
        if isinstance(self.cache, RowCache):
            self.cache.window(rows or slice(0, self.batch_size), self.length)


D = TypeVar("D", bound=DecoderBatch, default=Any)  # a decoder's kind of micro-batch
Of = TypeVar("Of", bound=DecoderBatch, covariant=True, default=DecoderBatch)


class MovedRows(NamedTuple, Generic[Of]):
    """Rows ``[b]`` that move to another micro-batch. They have a `mask` if positions of them were forgotten."""

    batch: Of
    rows: Tensor
    mask: RowMask | None


class Part(NamedTuple, Generic[Of]):
    """Rows of a work that go through the model together."""

    batch: Of
    rows: slice
    token_ids: Tensor  # [b, n]
    positions: Tensor
    keep: int


class Decoder(Engine[D]):
    """Engine whose `model` is a causal language model of `transformers`. Subclasses put its weights in place in
    `_load`, which ends with `_ready`. What it opens it gives to `_opened`, since a load may fail half-way."""

    model: PreTrainedModel

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        self._opened = ExitStack()  # closes in reverse order what the load has opened
        super().__init__(plan, progress)
        # cuDNN's attention, which PyTorch prefers on Hopper, plans some 60 ms for every shape that it has not seen, and
        # each length of a batch is one. PyTorch's own kernels need no plan.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._opened.callback(self.give_back)
        self._opened.callback(vars(self).pop, "model", None)
        try:
            self._load()
            self._opened.callback(self.clear)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _load(self) -> None:
        """Build `model`, with its weights in place."""

    def _ready(self) -> None:
        self.model.eval()
        for module in self.model.modules():
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(self.device)
        self._inspect()

    def _inspect(self) -> None:
        """Inspect the arguments that `model` takes; needs no weights. Raises EngineError if it takes no cache."""
        accepted = inspect.signature(self.model.forward).parameters
        self._accepted = frozenset(accepted)
        self._cache_name = next((name for name in CACHE_NAMES if name in accepted), "")
        if not self._cache_name or "input_ids" not in accepted:
            raise EngineError(
                f"{self.plan.model.name} cannot be run step by step: the forward pass of {type(self.model).__name__} "
                "takes no cache"
            )
        takes_default = getattr(self.model, "_supports_default_dynamic_cache", lambda: True)
        # Modules of a few models keep states of the batch themselves, besides what is in the cache.
        self._in_modules = any(hasattr(module, "_setup_cache") for module in self.model.modules())
        self._own_cache = self._in_modules or not takes_default()
        modules = {sys.modules[type(module).__module__] for module in self.model.modules()}
        # Whether the model's code makes masks that end with a window: the names of what it imports tell.
        self._masks_window = any(mask in vars(module) for module in modules for mask in WINDOW_MASKS)
        _, layers = decoder_layers(self.model)
        scale_by_positions(layers)
        kind = self.model.config.get_text_config(decoder=True).model_type
        self._counts_gaps = kind in COUNT_GAPS
        numbered = "position_ids" in accepted and not asks_length(layers) and kind not in COUNTS_PADDING
        self._knows_padding = "attention_mask" in accepted and (numbered or kind in COUNT_BY_MASK)

    def _call(self, batch: D, **inputs: object) -> Tensor:
        """Run one forward pass and return its logits ``[B, n, V]``."""
        output = self.model(**inputs)
        if self._own_cache and (state := getattr(output, self._cache_name, None)) is not None:
            batch.state = state
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> D:
        if past is not None and (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        padded = int(attention_mask.sum(-1).min()) < attention_mask.shape[1]
        if padded and (why_not := self.cannot_pad()) is not None:
            raise EngineError(f"{why_not}: its prompts must be of one length in a batch")
        if self._in_modules and self.batches:
            raise EngineError(f"modules of {self.plan.model.name} hold the state of one batch: retire the other first")
        batch = self._make_batch(to_device(attention_mask, self.device), capacity)
        self.batches.append(batch)
        try:
            if past is not None:
                assert batch.cache is not None
                past.put(batch.cache.layers, self.device)
        except BaseException:
            self.retire(batch)
            raise
        batch.advance(0 if past is None else past.length)
        return batch

    def _make_batch(self, mask: Tensor, capacity: int, moved: Sequence[tuple[D, Tensor]] = ()) -> D:
        """Make a micro-batch and its cache. Rows of `moved` (batches and indices) will leave their memory for it."""
        cache = None if self._own_cache else make_cache(self.model.config, len(mask), capacity)
        return cast("D", DecoderBatch(mask, capacity, cache, self._state_of(cache)))  # another D, another method

    def _state_of(self, cache: Cache | None) -> Any:
        return DynamicCache(config=self.model.config) if self._in_modules else cache

    @cached_property
    def _kinds_of_layers(self) -> list[Any]:
        """Layers of a `RowCache` of the model, if it takes one."""
        cache = None if self._own_cache else make_cache(self.model.config, 1, 1)
        return cache.layers if isinstance(cache, RowCache) else []

    @property
    def _windows(self) -> list[int]:
        attention = RowCache(layers=self._kinds_of_layers).attention
        return [layer.slots.window for layer in attention.values() if layer.slots.window]

    def cannot_pad(self) -> str | None:
        if not self._knows_padding:
            return f"{self.plan.model.name} knows no padding"
        if not self._kinds_of_layers:  # states and blocks of tokens that count padding, too
            return f"{self.plan.model.name} keeps its cache whole, and knows no padding"
        return None

    def cannot_chunk(self) -> str | None:
        layers, name = self._kinds_of_layers, self.plan.model.name
        if not layers or not RowCache(layers=layers).only_keys:
            return f"layers of {name} take a prompt as a whole: they hold more than keys and values"
        if not self._knows_padding:
            return f"{name} takes a prompt as a whole, and then one token at a time"
        if self._windows and not self._masks_window:
            return f"{name} takes a prompt as a whole: its masks know nothing of the window that its cache keeps"
        return None

    def cannot_draft(self) -> str | None:
        if not RowCache(layers=self._kinds_of_layers).only_keys:
            return f"layers of {self.plan.model.name} hold a state that cannot forget single tokens"
        return self.cannot_chunk()

    def equal_lengths(self) -> str | None:
        name, windows = self.plan.model.name, self._windows
        local = "local" in getattr(self.model.config, "attention_layers", ())  # GPT-Neo cuts its window out by itself
        if windows or local:
            window = f"its window of {min(windows)} tokens" if windows else "the window of its local layers"
            return f"all rows of a batch keep as many drafts with {name}, since {window} counts gaps between tokens"
        if self._counts_gaps:
            return f"all rows of a batch keep as many drafts with {name}, since it counts gaps between tokens"
        return None

    def cannot_move_rows(self) -> str | None:
        return self.cannot_pad()

    @torch.inference_mode()
    def move_rows(self, sources: Sequence[tuple[D, Sequence[int]]], capacity: int) -> D:
        if (why_not := self.cannot_move_rows()) is not None:
            raise EngineError(why_not)
        check_sources(sources, self.batches)
        batches = [batch for batch, _ in sources]
        indices = to_device_together([torch.tensor(list(rows)) for _, rows in sources], self.device)
        moved = list(zip(batches, indices, strict=True))
        real = [batch.real(rows) for batch, rows in moved]
        counts = torch.cat([rows.sum(-1) for rows in real])
        broken_rows = [(rows.long().diff(dim=-1) < 0).any() for rows in real]
        length, *broken = torch.stack([counts.max(), *broken_rows]).tolist()  # the CPU waits for the device once
        mask = (torch.arange(length, device=self.device) >= length - counts[:, None]).long()
        masks = [RowMask(rows) if has_gaps else None for rows, has_gaps in zip(real, broken, strict=True)]
        emptied = [batch for batch, rows in moved if len(rows) == batch.batch_size]
        target = self._make_batch(mask, capacity, moved)
        self.batches.append(target)
        self._move(target, [MovedRows(*rows, mask) for rows, mask in zip(moved, masks, strict=True)], length)
        target.advance(length)
        target.show()
        for batch in emptied:
            self.retire(batch)
        return target

    def _move(self, target: D, moved: "Sequence[MovedRows[D]]", length: int) -> None:
        assert isinstance(target.cache, RowCache)
        others = [batch.others(rows) for batch, rows, _ in moved]
        sources = [RowSource(batch.cache, rows, mask, batch.length) for batch, rows, mask in moved]
        for index in range(len(target.cache.layers)):
            target.cache.gather(index, sources, length)
            for (batch, *_), kept in zip(moved, others, strict=True):
                assert isinstance(batch.cache, RowCache)
                batch.cache.keep_rows(kept, batch.length, index)
        for (batch, rows, _), kept in zip(moved, others, strict=True):
            if len(rows) < batch.batch_size:
                batch.note_kept(kept)

    def cannot_snapshot(self) -> str | None:
        layers = self._kinds_of_layers
        if not layers or any(type(layer) is not FixedLayer for layer in layers):
            return f"the layers of {self.plan.model.name} hold another state than keys and values"
        if len(layers) != self.plan.model.num_layers:
            return f"the layers of {self.plan.model.name} hold keys and values of several passes of a token"
        if windows := self._windows:
            return f"layers of {self.plan.model.name} hold the last {min(windows)} positions only (sliding window)"
        return None

    @torch.inference_mode()
    def snapshot(self, batch: D, first: int, last: int, row: int = 0) -> KVSnapshot:
        if (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        cache = batch.cache if self.is_live(batch) else None
        pad = 0
        if cache is not None and batch.mask is not None:
            real = batch.mask[row, : batch.length].bool()
            pad = batch.length - int(real.sum())
            if not bool(real[pad:].all()):
                raise EngineError(f"positions of row {row} were forgotten between others")
        if cache is None or not 0 <= first < last <= batch.length - pad:
            raise EngineError(f"positions {first} to {last} have not been computed")
        if not all(layer.is_initialized for layer in cache.layers):
            raise EngineError(f"some layers of {self.plan.model.name} hold no keys and values of their own")
        return KVSnapshot(cache.layers, first, last, row, pad, self.device.type == "cuda")

    @torch.inference_mode()
    def forward(self, works: Sequence[Work[D]]) -> list[Tensor]:
        check_works(works, self.batches)
        tokens = to_device_together([work.token_ids for work in works], self.device)
        split = [self._parts(work._replace(token_ids=ids)) for work, ids in zip(works, tokens, strict=True)]
        sizes = [(parts[0].batch, ids.shape[1]) for parts, ids in zip(split, tokens, strict=True)]
        for batch, _ in sizes:
            batch.torn = True
        try:
            logits = iter(self._run([part for parts in split for part in parts]))
            joined = [torch.cat([next(logits) for _ in parts]) for parts in split]
            for batch, count in sizes:
                layers = batch.cache.attention.values() if isinstance(batch.cache, RowCache) else ()
                if any(layer.is_initialized and layer.length != batch.length + count for layer in layers):
                    raise CacheFullError
        except CacheFullError:
            message = f"{self.plan.model.name} computes other tokens than those of its prompt"
            raise EngineError(message) from None
        for batch, count in sizes:
            batch.advance(count)
            batch.show()
            batch.torn = False
        return joined

    def _parts(self, work: Work[D]) -> list[Part[D]]:
        """Split a work into parts whose rows go through the model together. Raises EngineError as `check_chunk`."""
        batch, token_ids, keep = work
        count = token_ids.shape[1]
        self.check_chunk(batch, count)
        positions = batch.positions(count, token_ids.device)
        return [Part(batch, rows, token_ids[rows], positions[rows], keep) for rows in self._rows(batch, count)]

    def check_chunk(self, batch: MicroBatch, count: int) -> None:
        """Raise EngineError for a chunk of `count` tokens that cannot be computed."""
        whole = batch.length == 0 and count >= batch.prompt_len
        chunked = not whole and (count > 1 or batch.length < batch.prompt_len)
        if chunked and (why_not := self.cannot_chunk()) is not None:
            raise EngineError(why_not)

    def _rows(self, batch: D, count: int) -> list[slice]:
        """Split rows into slices that go through the model in turn."""
        rows = slice(0, batch.batch_size)
        return [rows] if count == 1 or not isinstance(batch.cache, RowCache) else self._split(rows, count)

    def _at_once(self, rows: int, count: int) -> int:
        return self.plan.placement.prefill_rows(rows, count)

    def _split(self, rows: slice, count: int) -> list[slice]:
        """Split `rows` so that activations stay within bounds."""
        at_once = self._at_once(rows.stop - rows.start, count)
        return [slice(start, min(start + at_once, rows.stop)) for start in range(rows.start, rows.stop, at_once)]

    def _run(self, parts: Sequence[Part[D]]) -> list[Tensor]:
        return [self._alone(part) for part in parts]

    def _alone(self, part: Part[D]) -> Tensor:
        batch, rows, token_ids, positions, keep = part
        batch.show(rows)
        end = batch.length + token_ids.shape[1]
        inputs: dict[str, object] = {
            "input_ids": token_ids,
            "attention_mask": None if batch.mask is None else batch.mask[rows, :end],
            "position_ids": positions,
            "logits_to_keep": keep,
            self._cache_name: batch.state,
            "use_cache": True,
        }
        if self._cache_name == "cache_params" and batch.length:
            inputs["attention_mask"] = None  # the state has taken the padding in already, as in `generate`
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        return self._call(batch, **inputs)[:, -keep:]

    @torch.inference_mode()
    def rollback(self, batch: D, lengths: Tensor) -> None:
        cache = batch.cache
        if not isinstance(cache, RowCache) or not cache.only_keys:
            raise EngineError(f"layers of {self.plan.model.name} hold a state that cannot forget single positions")
        shortest, length = int(lengths.min()), int(lengths.max())
        if not 0 < shortest <= length <= batch.length:
            raise ValueError(f"rows of {batch.length} positions cannot be rolled back to {shortest} to {length}")
        if shortest < length and (why_not := self.equal_lengths()) is not None:
            raise EngineError(why_not)
        if batch.torn and self._windows:
            raise EngineError("a pass that failed may have moved the windows of some layers")
        cache.rollback(length)
        batch.rollback(to_device(lengths, self.device))

    @torch.inference_mode()
    def retire(self, batch: D, rows: Sequence[int] | None = None) -> None:
        if not self.is_live(batch):
            return
        kept = [] if rows is None else sorted(set(range(batch.batch_size)) - set(rows))
        if kept and len(kept) < batch.batch_size:
            if not isinstance(batch.cache, RowCache):
                raise EngineError(f"{self.plan.model.name} keeps its cache whole: all rows are retired at once")
            self._keep_rows(batch, kept)
        elif not kept:
            self.discard(batch)
            self._free(batch)

    def _keep_rows(self, batch: D, kept: Sequence[int]) -> None:
        assert isinstance(batch.cache, RowCache)
        rows = to_device(torch.tensor(kept), self.device)
        batch.note_kept(rows)
        batch.cache.keep_rows(rows, batch.length)

    def _free(self, batch: D) -> None:
        batch.cache = batch.state = batch.mask = None

    def close(self) -> None:
        self._opened.close()


def offload_folder(nvme_path: str | None) -> Scratch:
    """Make a scratch folder for offloaded weights inside `nvme_path`. Its `cleanup` removes it, or if this process is
    killed the next start. Raises EngineError unless `nvme_path` names a folder that exists."""
    if nvme_path is None or not Path(nvme_path).is_dir():
        what = f"{nvme_path!r} is not a folder" if nvme_path else "it needs one"
        raise EngineError(f"offload nvme puts the weights into the folder given by --nvme-path: {what}")
    return scratch.folder(Path(nvme_path), "weights")


def _scale_by_positions(layer: nn.Module, attention: Any) -> None:
    """Scale the queries of `attention` by the position ids of its `layer`."""
    forward, positions = layer.forward, torch.empty(0)

    def scale(_module: nn.Module, _args: tuple[Any, ...], queries: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        scale: Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
        return (queries * scale[..., None]).to(queries.dtype)

    @wraps(forward)
    def noting_positions(*args: Any, **named: Any) -> Any:  # behind the hooks, where another pass may take turns
        nonlocal positions
        positions = named["position_ids"]
        return forward(*args, **named)

    attention.attn_temperature_tuning = False
    attention.q_proj.register_forward_hook(scale)
    layer.forward = noting_positions


def scale_by_positions(layers: Iterable[nn.Module]) -> None:
    """Scale queries by positions, not by columns of the cache."""
    for layer in layers:
        for module in layer.modules():
            plain = not getattr(module, "use_rope", True) and not hasattr(module, "qk_norm")
            if plain and getattr(module, "attn_temperature_tuning", False):
                _scale_by_positions(layer, module)


def asks_length(layers: Iterable[nn.Module]) -> bool:
    """Tell whether code of the layers asks the cache for its length."""

    def asks(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return "get_seq_length" in getattr(code, "co_names", ()) and not hasattr(module, "attn_temperature_tuning")

    return any(asks(module) for layer in layers for module in layer.modules())
