"""Rows of a reference on an engine: side by side, or as requests that come and go; what its logits are off by."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_continuous import Words, run, small
from tests.test_drafts import Oracle
from tools.conformance.reference import OUTPUT_LEN, Reference
from zinfer.engine.base import Engine, Work
from zinfer.generation import sequence
from zinfer.generation.drafts import Drafts
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.schedule import PlannedBatch
from zinfer.generation.scheduler import ContinuousScheduler

SHORT = 5  # tokens of the rows that end early
WRONG = 0.4  # share of wrong tokens in drafts
CACHE_SIZE = 64 << 20  # bytes of kept keys and values


def side_by_side(engine: Engine, reference: Reference) -> Tensor:
    """Return the errors of the logits, ``[B, OUTPUT_LEN]``, of padded rows."""
    every = list(range(len(reference.prompts)))
    sets = [every] if engine.cannot_pad() is None else [[row] for row in every]
    errors = torch.full((len(every), OUTPUT_LEN), torch.inf)
    for pass_rows in [sets] if engine.one_pass else [[rows] for rows in sets]:
        _run(engine, reference, pass_rows, errors)
    return errors


def _run(engine: Engine, reference: Reference, sets: Sequence[list[int]], errors: Tensor) -> None:
    """Run a micro-batch of each of `sets` of rows; enter their `errors`."""
    engine.clear()
    works, tokens = [], reference.tokens.to(engine.device)
    for rows in sets:
        width = max(len(reference.prompts[row]) for row in rows)
        ids = torch.tensor([[-1] * (width - len(reference.prompts[row])) + reference.prompts[row] for row in rows])
        batch = engine.admit((ids >= 0).long(), width + OUTPUT_LEN)
        works.append(Work(batch, ids.clamp(0).to(engine.device)))
    for step in range(OUTPUT_LEN):
        for rows, logits in zip(sets, engine.forward(works), strict=True):
            for index, row in enumerate(rows):
                errors[row, step] = reference.error(row, step, logits[index, -1])
        works = [Work(work.batch, tokens[rows, step, None]) for rows, work in zip(sets, works, strict=True)]
    engine.clear()


def come_and_go(engine: Engine, reference: Reference, drafts: bool = False, kept: bool = False) -> Tensor | None:
    """Return the errors of the logits, ``[2 B, OUTPUT_LEN]``, of staggered rows. None if keys and values are to be
    `kept` for later rows, and cannot be.

    With `drafts`, passes verify tokens of the reference, some of them replaced by wrong ones.
    """
    count, answers = len(reference.prompts), reference.tokens.tolist()
    lengths = [OUTPUT_LEN] * count + [SHORT] * count
    rows = [sequence.Sequence(reference.prompts[key % count], most, key=key) for key, most in enumerate(lengths)]
    oracle = Oracle({row.key: (row.prompt_ids, answers[row.key % count]) for row in rows}, WRONG)
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        patch.setattr(PassTimes, "room", lambda *_: 1000)
        patch.setattr(Drafts, "_worth", lambda _drafts, counts, _rows: max(counts.values()))
        running = ContinuousScheduler(
            engine, Words(), engine.plan.case.workload, drafter=oracle if drafts else None,  # type: ignore[arg-type]
            cache_size=CACHE_SIZE if kept else 0,
        )  # fmt: skip
        if kept and running.cannot_reuse is not None:
            return None
        running.schedule.step = 8  # positions that a micro-batch grows by
        watch = _Watch(engine, running, reference)
        patch.setattr(engine, "forward", watch.forward)
        first, second = rows[:count], rows[count:]
        run(running, [[*first[::2], *second[1::2]], first[1::2], second[::2]], every=3)
        if running.drafts.max_drafts:
            assert 0 < running.drafts.accepted < running.drafts.drafted
        if kept:
            assert any(row.cached for row in rows)
        running.end()
    for row in rows:
        if row.failure is not None:
            raise ValueError(f"row {row.key}: {row.failure.message}")
    watch.errors[count:, SHORT:] = 0
    return watch.errors


class _Watch:
    """Engine passes whose logits are compared, then replaced by the reference's.

    So all rows go on with the reference's tokens. Logits behind a wrong draft are no row's.
    """

    def __init__(self, engine: Engine, running: ContinuousScheduler, reference: Reference) -> None:
        self._forward, self._running, self._reference = engine.forward, running, reference
        self.errors = torch.full((2 * len(reference.prompts), OUTPUT_LEN), torch.inf)

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Return the logits of `works`, the reference's where rows use them."""
        batches = {id(batch.micro_batch): batch for batch in self._running.schedule.batches}
        outputs = zip(works, self._forward(works), strict=True)
        return [self._checked(batches[id(work.batch)], work, logits.clone()) for work, logits in outputs]

    def _checked(self, batch: PlannedBatch, work: Work, logits: Tensor) -> Tensor:
        for index, row in enumerate(batch.rows):
            sequence: Any = None if row is None else self._running.sequences.get(row.key)
            if sequence is None or batch.length + work.token_ids.shape[1] < batch.width:
                continue
            prompt, first = sequence.key % len(self._reference.prompts), len(sequence.output_ids)
            answer, fed = self._reference.tokens[prompt].tolist(), work.token_ids[index].tolist()
            for ahead in range(logits.shape[1] if batch.running else 1):
                step = first + ahead
                if step == OUTPUT_LEN or (ahead and fed[ahead] != answer[step - 1]):
                    break
                at = ahead if batch.running else -1
                error = self._reference.error(prompt, step, logits[index, at])
                previous = self.errors[sequence.key, step]
                self.errors[sequence.key, step] = error if previous == torch.inf else max(error, float(previous))
                logits[index, at] = self._reference.logits[prompt, step].to(logits)
        return logits
