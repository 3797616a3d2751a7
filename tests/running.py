"""Run one micro-batch at a time, and a minimal engine."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tests import passes
from zinfer.engine.base import Engine, MicroBatch, Work, check_works
from zinfer.engine.kv_snapshot import KVSnapshot, RowsPast

Past = RowsPast | Sequence[KVSnapshot]  # the latter of a single row


def prefill(engine: Engine, token_ids: Tensor, mask: Tensor, reserve: int = 0, past: Past = ()) -> Tensor:
    """Retire all that is running, and compute these prompts: the next logits, ``[B, V]``."""
    engine.clear()
    if not isinstance(past, RowsPast):
        past = RowsPast([past], (0,), sum(part.length for part in past))
    return passes.prefill(engine, token_ids, mask, reserve, past if past.length else None)[1]


def decode(engine: Engine, token_ids: Tensor) -> Tensor:
    """One step of the micro-batch that `prefill` began, with tokens ``[B]``: the next logits, ``[B, V]``."""
    return passes.decode(engine, engine.batches[-1], token_ids)


def snapshot(engine: Engine, first: int, last: int) -> KVSnapshot:
    """A copy of positions of the micro-batch that `prefill` began."""
    if not engine.batches:
        return engine.snapshot(MicroBatch(1, 1, 1), first, last)
    return engine.snapshot(engine.batches[-1], first, last)


def error(actual: Tensor, expected: Tensor) -> float:
    """The difference relative to the norm of `expected`."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Tell whether tensors are equal one by one."""
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


class StepEngine(Engine):
    """An engine without a model: `step` says what a prefill or decode step of so many rows gives, ``[B, V]``."""

    def step(self, name: str, rows: int) -> Tensor:
        raise NotImplementedError

    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> MicroBatch:
        rows, length = attention_mask.shape
        self.batches.append(batch := MicroBatch(rows, length, capacity))
        return batch

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        check_works(works, self.batches)
        outputs = []
        for work in works:
            logits = self.step("decode" if work.batch.length else "prefill", work.batch.batch_size)
            work.batch.length += work.token_ids.shape[1]
            outputs.append(torch.stack([logits] * work.keep, dim=1))
        return outputs

    def retire(self, batch: MicroBatch, rows: Sequence[int] | None = None) -> None:
        self.batches = [kept for kept in self.batches if kept is not batch]
