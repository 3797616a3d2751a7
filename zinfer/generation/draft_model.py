"""Drafts of a small model that stays on the device: speculative decoding (Leviathan et al. 2023).

Its engine keeps the running rows in one micro-batch and works on a CUDA stream of its own, between the passes, while
the ring goes on bringing weights. Tokens are drawn with the waiting times of the row's places, as the large model's
will be: so both draw the same one often.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Several
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zinfer.checkpoint.tokenizer_files import folder_of
from zinfer.core.model import ModelError, ModelSpec
from zinfer.core.request import GREEDY
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.transfer import to_device
from zinfer.generation import tuning
from zinfer.generation.drafts import Drafter, NgramDrafter
from zinfer.generation.sampling import EditedRow, choose
from zinfer.generation.sequence import Sequence, common
from zinfer.generation.tokenizer import load_tokenizer


class ModelDrafter:
    """Drafts of `engine`'s model, for a model with `vocab_size` tokens. Rows longer than its positions get none."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine, self._spec = engine, engine.plan.model
        self._tokens, self._vocab_size = vocab_size, min(vocab_size, self._spec.vocab_size)
        # Micro-batches with the keys of their rows, None for an ended row: all that have drafts, then new ones.
        self._parts: list[tuple[MicroBatch, list[int | None]]] = []
        self._computed: dict[int, int] = {}  # tokens of each row in the KV cache, without `_ahead`
        self._ahead: dict[int, list[int]] = {}  # last token and drafts of each row, from position `_start` on
        self._start = 0
        self._recent: list[float] = []
        self._stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        engine.clear()
        engine.expect(engine.plan.case.workload)
        if self._stream is not None:
            torch.cuda.synchronize()  # the weights are there

    @property
    def token_s(self) -> float | None:
        """Seconds in which a token of all rows is drafted, as measured; None before the first."""
        return sorted(self._recent)[len(self._recent) // 2] if self._recent else None

    def draft(self, rows: Mapping[int, Sequence], counts: Mapping[int, int]) -> dict[int, list[int]]:
        last = self._spec.max_position or 1 << 30
        counts = {key: count for key, count in counts.items() if 1 < rows[key].length <= last - count}
        known_ids = {key: rows[key].known_ids for key in counts}
        if not counts:
            return {}
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._drop_rejected(known_ids)
                self._begin({key: ids[:-1] for key, ids in known_ids.items()})
                self._join()
                if self._stream is not None:
                    self._stream.synchronize()
                began = time.monotonic()
                drafts = self._run(rows, known_ids, counts)
        except (torch.OutOfMemoryError, MemoryError):  # all rows are forgotten, and have no drafts for now
            self._clear()
            return {}
        except BaseException:
            with suppress(Exception):
                self._clear()
            raise
        seconds = (time.monotonic() - began) / max(counts.values())
        self._recent = [*self._recent[1 - tuning.DRAFTS.recent_rounds :], seconds]
        return drafts

    def discard(self, key: int) -> None:
        if self._computed.pop(key, None) is not None:
            for _, keys in self._parts:
                keys[:] = [None if other == key else other for other in keys]
        if self._parts and not self._computed:
            self._clear()

    def _clear(self) -> None:
        self._parts, self._computed, self._ahead = [], {}, {}
        self._engine.clear()

    def _begin(self, rows: Mapping[int, Several[int]]) -> None:
        new = {key: list(ids) for key, ids in rows.items() if key not in self._computed}
        if not new:
            return
        width = max(map(len, new.values()))
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in new.values()])
        tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in new.values()])
        batch = self._engine.admit(mask, width + tuning.DRAFTS.growth)
        self._engine.forward([Work(batch, self._embedded(tokens))])
        if not self._parts:
            self._start = batch.length
        self._parts.append((batch, [*new]))
        self._computed |= {key: len(ids) for key, ids in new.items()}

    def _drop_rejected(self, ids_by_key: Mapping[int, list[int]]) -> None:
        """Forget rejected drafts, and discard rows that lack too many tokens. `ids_by_key` has rows with drafts."""
        if not self._parts:
            return
        (batch, keys), *_ = self._parts
        kept = []
        for key in keys:
            right = 0
            if key is not None:
                ahead, known_ids, computed = self._ahead.get(key, []), ids_by_key.get(key, []), self._computed[key]
                right = common(ahead, known_ids[computed:-1])
                self._computed[key] += right
            kept.append(right)
        self._ahead = {}
        if self._start + min(kept) < batch.length:
            self._engine.rollback(batch, self._start + torch.tensor(kept))
        for key, known_ids in ids_by_key.items():
            if len(known_ids) - self._computed.get(key, len(known_ids)) > tuning.DRAFTS.backlog:
                self.discard(key)

    def _join(self) -> None:
        """Make one micro-batch of all rows that have not ended. Ended ones stay in it until others come or most have
        ended: CUDA graphs are recorded for a number of rows."""
        engine = self._engine
        (_, first), *new = self._parts
        if not new and first.count(None) <= tuning.DRAFTS.ended * len(first):
            return
        stay = [(batch, [index for index, key in enumerate(keys) if key is not None]) for batch, keys in self._parts]
        stay = [(batch, places) for batch, places in stay if places]
        if len(stay) > 1:
            batch = engine.move_rows(stay, self._capacity())
        else:
            ((batch, places),) = stay
            engine.retire(batch, [index for index in range(batch.batch_size) if index not in places])
        for other, _ in self._parts:
            if other is not batch:
                engine.retire(other)
        self._parts = [(batch, [key for _, keys in self._parts for key in keys if key is not None])]

    def _capacity(self) -> int:
        return (max(self._computed.values()) // tuning.DRAFTS.growth + 2) * tuning.DRAFTS.growth

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Return token ids that the model has: padding of a larger vocabulary is none of a text."""
        return to_device(token_ids, self._engine.device).clamp(max=self._spec.vocab_size - 1)

    def _run(
        self, rows: Mapping[int, Sequence], known_ids: Mapping[int, list[int]], counts: Mapping[int, int]
    ) -> dict[int, list[int]]:
        engine = self._engine
        ((batch, keys),) = self._parts
        # Of rows that have ended, or have no drafts, a token of no meaning is computed.
        token_ids = [[0] if key is None else known_ids.get(key, [0]) for key in keys]
        computed = [0 if key is None or key not in counts else self._computed[key] for key in keys]
        lacking = [ids[first:-1] for ids, first in zip(token_ids, computed, strict=True)]
        longest, count = max(map(len, lacking)), max(counts.values())
        if batch.length + longest + count + 1 > batch.capacity:  # gaps are closed up
            batch = engine.move_rows([(batch, range(len(keys)))], self._capacity())
            self._parts = [(batch, keys)]
        if longest:
            tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in lacking])
            sizes = batch.length + torch.tensor([len(ids) for ids in lacking])
            engine.forward([Work(batch, self._embedded(tokens))])
            engine.rollback(batch, sizes)
            for key, ids in zip(keys, lacking, strict=True):
                if key is not None:
                    self._computed[key] += len(ids)
        self._start = batch.length
        columns = [to_device(torch.tensor([ids[-1] for ids in token_ids]), engine.device)]
        drafting = [None if key is None or key not in counts else rows[key] for key in keys]
        samplings = [GREEDY if row is None else row.sampling for row in drafting]
        edited = {}  # what a draft repeats of drafts before it is left to the large model
        if self._vocab_size == self._tokens:
            edited = {n: EditedRow(row.edits) for n, row in enumerate(drafting) if row is not None and row.edits}
        for ahead in range(count + 1):  # the last draft is computed, too, so that no row lacks it
            (logits,) = engine.forward([Work(batch, self._embedded(columns[-1][:, None]))])
            if ahead < count:
                places = [ahead if row is None else len(row.output_ids) + ahead for row in drafting]
                columns.append(choose(logits[:, 0, : self._vocab_size], samplings, places, edited)[0])
        drafted = dict(zip(keys, torch.stack(columns, dim=1).tolist(), strict=True))
        self._ahead = {key: drafted[key] for key in counts}
        return {key: drafted[key][1 : 1 + number] for key, number in counts.items()}


def drafter_of(engine: Engine) -> Drafter | None:
    """Return the drafter that the engine's option `draft` asks for; None for none."""
    if engine.draft is not None:
        return ModelDrafter(engine.draft, engine.plan.model.vocab_size)
    return NgramDrafter() if getattr(engine.options, "draft", "none") == "ngram" else None


def check_same_tokens(spec: ModelSpec) -> None:
    """Raise ModelError unless `spec`'s draft model has the same tokens. Special ones are included."""
    if spec.draft is None:
        return
    folders = [folder_of(model) for model in (spec, spec.draft)]
    hf: list[Any] = [load_tokenizer(folder) for folder in folders]
    ours, theirs = (tokenizer.get_vocab() for tokenizer in hf)
    special, others = ({n for n, token in model.added_tokens_decoder.items() if token.special} for model in hf)
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    differing += [token for token in theirs if token not in ours]
    why = ""
    if differing:
        why = f"{len(differing):,} of {len(ours):,} tokens differ, such as {min(differing)!r}"
    elif special != others:
        why = f"the special tokens differ: {sorted(t for t, number in ours.items() if number in special ^ others)}"
    if why:
        raise ModelError(f"{spec.draft.name} cannot draft for {spec.name}: they have other tokenizers ({why[:200]})")
