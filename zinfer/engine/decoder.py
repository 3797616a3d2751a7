"""Passes over any `transformers` decoder; an engine on top of it only places the weights.

There is no code for single architectures: whatever `AutoModelForCausalLM` builds runs. Positions follow the attention
mask, so that left-padded rows count from their own first token, as `generate` does it.
"""

import inspect
import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from zinfer.checkpoint.architecture import COUNTS_PADDING, decoder_layers
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work, check_sources, check_works
from zinfer.engine.cache import CacheFullError, FixedLayer, Gaps, IndexedLayer, RowCache, Source, make_cache
from zinfer.engine.choice import Alone
from zinfer.engine.kv_snapshot import KVSnapshot, Past
from zinfer.engine.positions import PADS, TOKENS, Probe, asks_length, probe, scale_by_positions
from zinfer.engine.rotary import DYNAMIC, LONGROPE, follow_lengths, recomputes, start_of, switch_of, turned_by
from zinfer.engine.transfer import landed, landed_together
from zinfer.plan.planner import Plan
from zinfer.system import scratch
from zinfer.system.scratch import Scratch

WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")  # of transformers.masking_utils
CACHE_NAMES = ("past_key_values", "cache_params")  # names of the cache argument of forward passes


class DecoderBatch(MicroBatch):
    """A micro-batch of a `Decoder`: its KV cache, and the mask of its real positions.

    `cache` is None where the model makes its own; `state` is what the forward pass takes as its cache. `mask`, ``[B,
    capacity]``, has 0 at padding and at forgotten positions; it is None while there is neither, since every kernel can
    then use plain causal attention, which needs no ``[B, 1, S, S]`` mask.
    """

    def __init__(self, mask: Tensor, capacity: int, cache: Cache | None, state: Any) -> None:
        super().__init__(mask.shape[0], mask.shape[1], capacity)
        self.cache, self.state = cache, state
        self.mask: Tensor | None = None
        self.prompts = mask.sum(-1)  # [B]: tokens of each row's prompt, which are computed together
        self._before: Tensor | None = None  # [B, 1]: real positions among the first `length`
        self.torn = False  # True after a pass that failed: some layers may hold its positions
        self._rows_alone: dict[tuple[int, int, int], list[Alone]] = {}  # of the next pass: first row, last, tokens
        own = ref(self)
        for layer in cache.layers if isinstance(cache, RowCache) else ():
            if isinstance(layer, IndexedLayer):
                layer.alone = lambda rows, count: own().alone(rows, count)  # type: ignore[union-attr]
        if not bool(mask.all()):
            self._need_mask(mask.device, mask.dtype)[:, : self.prompt_len] = mask

    def _need_mask(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones((self.batch_size, self.capacity), dtype=dtype, device=device)
        return self.mask

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of the next `count` tokens of each row, ``[B, count]``: real ones counted from 0,
        padding at 0."""
        if self.mask is None:
            return torch.arange(self.length, self.length + count, device=device).expand(self.batch_size, count)
        if self._before is None:
            self._before = self.mask[:, : self.length].sum(-1, keepdim=True)
        counted: Tensor = self._before + self.mask[:, self.length : self.length + count].cumsum(-1)
        return (counted - 1).clamp(min=0)

    def advance(self, count: int) -> None:
        """Count `count` more tokens in each row."""
        if self._before is not None and self.mask is not None:
            self._before = self._before + self.mask[:, self.length : self.length + count].sum(-1, keepdim=True)
        self.length += count
        self._rows_alone = {}

    def rollback(self, lengths: Tensor) -> None:
        """Keep the first `lengths`, ``[B]``, positions of each row; rows shorter than the longest are padded."""
        length = int(lengths.max())
        if int(lengths.min()) < length:
            mask = self._need_mask(lengths.device)
            mask[:, :length] *= torch.arange(length, device=lengths.device) < lengths[:, None]
        if self.mask is not None:  # forgotten positions behind the prompt are free for real tokens again
            self.mask[:, max(length, self.prompt_len) :] = 1
        self.length, self._before, self._rows_alone = length, None, {}

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only, indices ``[b]``."""
        self.closed_up(rows)
        if isinstance(self.cache, RowCache):
            self.cache.keep_rows(rows, self.length)

    def closed_up(self, rows: Tensor) -> None:
        """Note that the cache keeps `rows` only, indices ``[b]``."""
        self.batch_size, self.prompts = len(rows), self.prompts[rows]
        self.mask, self._before = None if self.mask is None else self.mask[rows], None
        self._rows_alone = {}

    def real(self, rows: Tensor) -> Tensor:
        """Return which of the computed positions of `rows` are neither padding nor forgotten: bool ``[b, length]``."""
        if self.mask is None:
            return torch.ones((len(rows), self.length), dtype=torch.bool, device=rows.device)
        return self.mask[rows, : self.length].bool()

    def alone(self, rows: slice, count: int) -> list[Alone] | None:
        """Return what `rows` would have alone of the next pass, of `count` tokens; None if it is what they have."""
        as_alone = count >= self.prompt_len if not self.length else count == 1 and self.length >= self.prompt_len
        if self.mask is None and as_alone:
            return None
        key = rows.start, rows.stop, count
        if key not in self._rows_alone:
            self._rows_alone[key] = self._divided(rows, count)
        return self._rows_alone[key]

    def _divided(self, rows: slice, count: int) -> list[Alone]:
        end = self.length + count
        size, number = max(end, self.prompt_len), rows.stop - rows.start
        mask = torch.ones((number, size)) if self.mask is None else self.mask[rows, :size].cpu()
        real = mask.bool()
        known, before, prompt = (real[:, :last].sum(-1).tolist() for last in (end, self.length, self.prompt_len))
        found = dict[tuple[int, int, int], Alone]()
        for row, counts in enumerate(zip(known, before, prompt, strict=True)):
            pad, own = end - counts[0], real[row, :end]
            if bool(own[pad:].all()):
                found.setdefault(counts, Alone([], slice(pad, end), *counts[1:])).rows.append(row)
            else:
                places = own.nonzero()[:, 0]
                found[row, -1, -1] = Alone(
                    [row], places if self.mask is None else places.to(self.mask.device), *counts[1:]
                )
        return list(found.values())

    def others(self, rows: Tensor) -> Tensor:
        """Return the indices of all rows but `rows`, ``[b]``."""
        kept = torch.ones(self.batch_size, dtype=torch.bool, device=rows.device)
        kept[rows] = False
        return kept.nonzero()[:, 0]

    def show(self, rows: slice | None = None) -> None:
        """Narrow the cache to `rows`, or make it show all rows, at the batch's length."""
        if isinstance(self.cache, RowCache):
            self.cache.window(rows or slice(0, self.batch_size), self.length)


class MovedRows(NamedTuple):
    """Rows ``[b]`` on their way to another micro-batch, and which of their positions were forgotten."""

    batch: DecoderBatch
    rows: Tensor
    gaps: Gaps | None


class Part(NamedTuple):
    """Rows of a work that go through the model together, with their positions ``[b, n]``."""

    batch: DecoderBatch
    rows: slice
    token_ids: Tensor  # [b, n]
    positions: Tensor
    keep: int


class Decoder(Engine):
    """Engine whose `model` is a `transformers` causal language model. Subclasses put its weights in place in `_load`,
    which ends with `_ready`; attributes that `close` frees have a default in the class, since a load may fail
    half-way."""

    model: PreTrainedModel
    _probe = Probe()  # until the weights are in place

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        # cuDNN's attention, which PyTorch prefers on Hopper, plans some 60 ms for every shape that it has not seen, and
        # each length of a batch is one. PyTorch's own kernels need no plan.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _load(self) -> None:
        """Build `model`, with its weights in place."""

    def _ready(self, first: nn.Module | None = None) -> None:
        """Make `model` ready to run, and probe it with its `first` layer, unless that is done."""
        self.model.eval()
        for module in self.model.modules():
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(self.device)
        self._inspect()
        if first is not None:
            self._probe = self._probed(first, self.device)

    def _inspect(self) -> None:
        """Find out which arguments `model` takes; its weights are not needed. Raises EngineError if it takes no
        cache."""
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
        self._follow_lengths()
        self._masks_window = masks_window(self.model)
        _, layers = decoder_layers(self.model)
        scale_by_positions(layers)
        self._counts_padding = "position_ids" in accepted and asks_length(layers)
        self._counts_padding |= self.model.config.get_text_config(decoder=True).model_type in COUNTS_PADDING

    def _follow_lengths(self) -> None:
        """Have angles of positions follow the length of each row, and find out how far rows are alike."""
        kinds = follow_lengths(self.model)
        switch = switch_of(self.model) if LONGROPE in kinds else None
        start = start_of(self.model) if DYNAMIC in kinds else None
        self._by_lengths = bool(kinds)
        self.alike_until = min((one for one in (switch, start) if one is not None), default=None)
        self.recompute_beyond = switch if recomputes(self.model) else None

    def _lengths(self, parts: "Sequence[Part]") -> Tensor | None:
        """Return the lengths that the positions of a pass are turned by, ``[B, n]``; None if it takes none."""
        if not self._by_lengths:
            return None
        found = [torch.maximum(part.batch.prompts[part.rows, None], part.positions + 1) for part in parts]
        return torch.cat(found)

    def _call(self, batch: DecoderBatch, **inputs: object) -> Tensor:
        """Run one forward pass and return its logits ``[B, n, V]``."""
        output = self.model(**inputs)
        if self._own_cache and (state := getattr(output, self._cache_name, None)) is not None:
            batch.state = state
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def admit(
        self, attention_mask: Tensor, capacity: int, past: Sequence[Past] = (), answered: Sequence[int] = ()
    ) -> DecoderBatch:
        known = self._check_past(past, *attention_mask.shape)
        self._check_padding(attention_mask)
        if self._in_modules and self.batches:
            raise EngineError(f"modules of {self.plan.model.name} hold the state of one batch: retire the other first")
        batch = self._make_batch(landed(attention_mask, self.device), capacity)
        if answered and self.recompute_beyond is None:
            batch.prompts = batch.prompts - landed(torch.tensor(list(answered)), self.device)
        self.batches.append(batch)
        try:
            for part in past:
                assert batch.cache is not None
                part.put(batch.cache.layers, self.device)
        except BaseException:
            self.retire(batch)
            raise
        batch.advance(known)
        return batch

    def _make_batch(
        self, mask: Tensor, capacity: int, moved: Sequence[tuple[DecoderBatch, Tensor]] = ()
    ) -> DecoderBatch:
        """Return a micro-batch with its cache, not admitted yet; rows of `moved`, batches and places, move to it and
        leave their memory."""
        cache = None if self._own_cache else make_cache(self.model.config, len(mask), capacity)
        return DecoderBatch(mask, capacity, cache, self._state_of(cache))

    def _state_of(self, cache: Cache | None) -> Any:
        return DynamicCache(config=self.model.config) if self._in_modules else cache

    def _check_padding(self, mask: Tensor) -> None:
        """Raise EngineError if the batch's padding would lead to wrong text."""
        if int(mask.sum(-1).min()) < mask.shape[1] and (why_not := self.cannot_pad()) is not None:
            raise EngineError(f"{why_not}: its prompts must be of one length in a batch")

    def _check_past(self, past: Sequence[Past], batch_size: int, length: int) -> int:
        """Return the number of positions that `past` holds. Raises EngineError if the batch cannot continue from it."""
        if not past:
            return 0
        if (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        known, layers = 0, self.plan.model.num_layers
        for part in past:
            if part.first != known or not part.fits(layers, batch_size):
                raise EngineError("the snapshots belong to other rows or another model, or are not in order")
            known += part.length
        if known >= length:
            raise EngineError(f"snapshots hold {known} positions of a prompt of {length}: one at least must be new")
        return known

    @cached_property
    def _kinds_of_layers(self) -> list[Any]:
        """Return the layers of a cache of the model; none if it makes its own, or holds more than keys, values and
        states."""
        cache = None if self._own_cache else make_cache(self.model.config, 1, 1)
        return cache.layers if isinstance(cache, RowCache) else []

    @property
    def _counts(self) -> bool:
        """True if the model numbers positions by itself."""
        return "position_ids" not in self._accepted and bool(self._kinds_of_layers)

    @property
    def _windows(self) -> list[int]:
        """Sliding windows of the layers, in tokens."""
        attention = RowCache(layers=self._kinds_of_layers).attention
        return [one.slots.window for one in attention.values() if one.slots.window]

    def _probed(self, first: nn.Module, device: torch.device) -> Probe:
        """Find out what the model can do with positions; weights outside of the layers must be on `device`."""
        if "attention_mask" not in self._accepted:
            return Probe(padding=False, gaps=False, moves=False)
        if not self._counts:
            return Probe()

        def make() -> RowCache:
            cache = make_cache(self.model.config, 1, 2 * (TOKENS + PADS))
            assert isinstance(cache, RowCache)
            return cache

        return probe(self.model, first, device, self._cache_name, make, self.plan.model.vocab_size)

    def cannot_pad(self) -> str | None:
        if not self._probe.padding or self._counts_padding:
            return f"{self.plan.model.name} knows no padding"
        if not self._kinds_of_layers:  # states and blocks of tokens that count padding, too
            return f"{self.plan.model.name} keeps its cache whole, and knows no padding"
        return None

    def cannot_chunk(self) -> str | None:
        layers, name = self._kinds_of_layers, self.plan.model.name
        if not layers or not RowCache(layers=layers).only_keys:
            return f"layers of {name} take a prompt as a whole: they hold more than keys and values"
        if not self._probe.chunks or self._counts_padding:
            return f"{name} takes a prompt as a whole, and then one token at a time"
        if self._windows and not self._masks_window:
            return f"{name} takes a prompt as a whole: its masks know nothing of the window that its cache keeps"
        return None

    def cannot_draft(self) -> str | None:
        if not RowCache(layers=self._kinds_of_layers).only_keys:
            return f"layers of {self.plan.model.name} hold a state that cannot forget single tokens"
        return self.cannot_chunk()

    def one_length(self) -> str | None:
        name, windows = self.plan.model.name, self._windows
        local = "local" in getattr(self.model.config, "attention_layers", ())  # GPT-Neo cuts its window out by itself
        if windows or local:
            window = f"its window of {min(windows)} tokens" if windows else "the window of its local layers"
            return f"all rows of a batch keep as many drafts with {name}, since {window} counts gaps between tokens"
        if not self._probe.gaps:
            return f"all rows of a batch keep as many drafts with {name}, since it counts gaps between tokens"
        return None

    def cannot_regroup(self) -> str | None:
        name = self.plan.model.name
        if not self._kinds_of_layers:
            return f"the layers of {name} keep their cache whole"
        if (why_not := self.cannot_pad()) is not None:
            return why_not
        if not self._probe.moves:
            return f"keys of {name} hold their place in the batch, so that its rows cannot move"
        return None

    @torch.inference_mode()
    def regroup(self, sources: Sequence[tuple[MicroBatch, Sequence[int]]], capacity: int) -> DecoderBatch:
        if (why_not := self.cannot_regroup()) is not None:
            raise EngineError(why_not)
        check_sources(sources, self.batches)
        batches = [batch for batch, _ in sources if isinstance(batch, DecoderBatch)]
        places = landed_together([torch.tensor(list(rows)) for _, rows in sources], self.device)
        moved = list(zip(batches, places, strict=True))
        real = [batch.real(rows) for batch, rows in moved]
        counts = torch.cat([one.sum(-1) for one in real])
        broken = [(one.long().diff(dim=-1) < 0).any() for one in real]
        length, *found = torch.stack([counts.max(), *broken]).tolist()  # the CPU waits for the device once
        mask = (torch.arange(length, device=self.device) >= length - counts[:, None]).long()
        gaps = [Gaps(one) if has_gaps else None for one, has_gaps in zip(real, found, strict=True)]
        emptied = [batch for batch, rows in moved if len(rows) == batch.batch_size]
        target = self._make_batch(mask, capacity, moved)
        target.prompts = torch.cat([batch.prompts[rows] for batch, rows in moved])
        self.batches.append(target)
        self._move(target, [MovedRows(*one, gap) for one, gap in zip(moved, gaps, strict=True)], length)
        target.advance(length)
        target.show()
        for batch in emptied:
            self.retire(batch)
        return target

    def _move(self, target: DecoderBatch, moved: "Sequence[MovedRows]", length: int) -> None:
        """Fill the cache of `target` with rows of others, layer by layer, and take the rows from these."""
        assert isinstance(target.cache, RowCache)
        others = [batch.others(rows) for batch, rows, _ in moved]
        sources = [Source(batch.cache, rows, gaps, batch.length) for batch, rows, gaps in moved]
        for index in range(len(target.cache.layers)):
            target.cache.gather(index, sources, length)
            for (batch, *_), kept in zip(moved, others, strict=True):
                assert isinstance(batch.cache, RowCache)
                batch.cache.keep_in_layer(index, kept, batch.length)
        for (batch, rows, _), kept in zip(moved, others, strict=True):
            if len(rows) < batch.batch_size:
                batch.closed_up(kept)

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
    def snapshot(self, batch: MicroBatch, first: int, last: int, row: int | None = None) -> KVSnapshot:
        if (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        cache = batch.cache if isinstance(batch, DecoderBatch) else None
        pad = 0
        if row is not None and isinstance(batch, DecoderBatch) and batch.mask is not None:
            real = batch.mask[row, : batch.length].bool()
            pad = batch.length - int(real.sum())
            if not bool(real[pad:].all()):
                raise EngineError(f"positions of row {row} were forgotten between others")
        if cache is None or not 0 <= first < last <= batch.length - pad:
            raise EngineError(f"positions {first} to {last} have not been computed")
        if not all(layer.is_initialized for layer in cache.layers):
            raise EngineError(f"some layers of {self.plan.model.name} hold no keys and values of their own")
        rows = slice(None) if row is None else slice(row, row + 1)
        return KVSnapshot.of(cache.layers, first, last, self.device.type == "cuda", rows, pad)

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        check_works(works, self.batches)
        tokens = landed_together([work.token_ids for work in works], self.device)
        split = [self._parts(work._replace(token_ids=ids)) for work, ids in zip(works, tokens, strict=True)]
        for work in works:
            work.batch.torn = True  # type: ignore[attr-defined]
        try:
            logits = iter(self._run([part for parts in split for part in parts]))
            found = [torch.cat([next(logits) for _ in parts]) for parts in split]
            for work in works:
                self._check_length(work)
        except CacheFullError:
            raise self._other_tokens() from None
        for work in works:
            work.batch.advance(work.token_ids.shape[1])  # type: ignore[attr-defined]
            work.batch.show()  # type: ignore[attr-defined]
            work.batch.torn = False  # type: ignore[attr-defined]
        return found

    def _check_length(self, work: Work) -> None:
        cache = getattr(work.batch, "cache", None)
        if isinstance(cache, RowCache) and not cache.has_length(work.batch.length + work.token_ids.shape[1]):
            raise self._other_tokens()

    def _other_tokens(self) -> EngineError:
        return EngineError(f"{self.plan.model.name} computes other tokens than those of its prompt")

    def _parts(self, work: Work) -> list[Part]:
        """Split a work into parts whose rows go through the model together. Raises EngineError for work that it cannot
        do."""
        batch, token_ids, keep = work
        assert isinstance(batch, DecoderBatch)
        count = token_ids.shape[1]
        self.check_chunk(batch, count)
        positions = batch.positions(count, token_ids.device)
        return [Part(batch, rows, token_ids[rows], positions[rows], keep) for rows in self._rows(batch, count)]

    def check_chunk(self, batch: MicroBatch, count: int) -> None:
        """Raise EngineError if `count` tokens of a row are part of a prompt, or several, and the model takes none."""
        whole = batch.length == 0 and count >= batch.prompt_len
        chunked = not whole and (count > 1 or batch.length < batch.prompt_len)
        if chunked and (why_not := self.cannot_chunk()) is not None:
            raise EngineError(why_not)

    def _rows(self, batch: DecoderBatch, count: int) -> list[slice]:
        """Return the rows of `batch` as slices that go through the model one after the other, `count` tokens of each
        row."""
        rows = slice(0, batch.batch_size)
        return [rows] if count == 1 or not isinstance(batch.cache, RowCache) else self._split(rows, count)

    def _split(self, rows: slice, count: int) -> list[slice]:
        """Split `rows` so that activations of `count` tokens a row stay within bounds."""
        at_once = self.plan.placement.prefill_rows(rows.stop - rows.start, count)
        return [slice(start, min(start + at_once, rows.stop)) for start in range(rows.start, rows.stop, at_once)]

    def _run(self, parts: Sequence[Part]) -> list[Tensor]:
        """Run a forward pass for each part; return their logits ``[b, keep, V]``."""
        return [self._alone(part) for part in parts]

    def _alone(self, part: Part) -> Tensor:
        part.batch.show(part.rows)
        return self._pass(part)

    def _pass(self, part: Part) -> Tensor:
        """Run one forward pass of a part, to whose rows the cache is narrowed."""
        batch, rows, token_ids, positions, keep = part
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
        with turned_by(self._lengths([part])):
            return self._call(batch, **inputs)[:, -keep:]

    @torch.inference_mode()
    def rollback(self, batch: MicroBatch, lengths: Tensor) -> None:
        cache = getattr(batch, "cache", None)
        assert isinstance(batch, DecoderBatch)
        if not isinstance(cache, RowCache) or not cache.only_keys:
            raise EngineError(f"layers of {self.plan.model.name} hold a state that cannot forget single positions")
        least, length = int(lengths.min()), int(lengths.max())
        if not 0 < least <= length <= batch.length:
            raise ValueError(f"rows of {batch.length} positions cannot be rolled back to {least} to {length}")
        if least < length and (why_not := self.one_length()) is not None:
            raise EngineError(why_not)
        if batch.torn and self._windows:
            raise EngineError("a pass that failed may have moved the windows of some layers")
        cache.rollback(length)
        batch.rollback(landed(lengths, self.device))

    @torch.inference_mode()
    def retire(self, batch: MicroBatch, rows: Sequence[int] | None = None) -> None:
        if all(batch is not one for one in self.batches):
            return
        assert isinstance(batch, DecoderBatch)
        kept = [] if rows is None else sorted(set(range(batch.batch_size)) - set(rows))
        if kept and len(kept) < batch.batch_size:
            if not isinstance(batch.cache, RowCache):
                raise EngineError(f"{self.plan.model.name} keeps its cache whole: all rows are retired at once")
            self._keep_rows(batch, kept)
        elif not kept:
            self.batches = [one for one in self.batches if one is not batch]
            self._free(batch)

    def _keep_rows(self, batch: DecoderBatch, kept: Sequence[int]) -> None:
        """Keep the rows `kept` of a micro-batch."""
        batch.keep_rows(landed(torch.tensor(kept), self.device))

    def _free(self, batch: DecoderBatch) -> None:
        """Free a micro-batch's cache."""
        batch.cache = batch.state = batch.mask = None

    def close(self) -> None:
        self.clear()
        if hasattr(self, "model"):
            del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def masks_window(model: PreTrainedModel) -> bool:
    """Tell whether the code of a model makes masks that end with a window: the names of what it imports tell."""
    modules = {type(module).__module__ for module in model.modules()}
    return any(mask in vars(sys.modules[name]) for name in modules for mask in WINDOW_MASKS)


def offload_folder(nvme_path: str | None) -> Scratch:
    """Make a scratch folder for offloaded weights inside `nvme_path`.

    Raises EngineError unless `nvme_path` names a folder that exists.
    """
    if nvme_path is None or not Path(nvme_path).is_dir():
        what = f"{nvme_path!r} is not a folder" if nvme_path else "it needs one"
        raise EngineError(f"offload nvme puts the weights into the folder given by --nvme-path: {what}")
    return scratch.folder(Path(nvme_path), "weights")
