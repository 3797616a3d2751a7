"""Rows that come and go: the three prompts, and each once more, through the scheduler of `zinfer batch` and `serve`."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.test_continuous import Words, run, small
from tests.test_drafts import Oracle
from zinfer.engine.base import Engine
from zinfer.generation import schedule, scheduler
from zinfer.generation.drafts import Drafts
from zinfer.generation.scheduler import ContinuousScheduler

SHORT = 5  # tokens of the rows that end early
WRONG = 0.4  # share of wrong tokens in drafts


def come_and_go(engine: Engine, prompts: Sequence[list[int]], expected: Tensor, drafts: bool) -> Tensor:
    """Return the greedy tokens of `prompts`, ``[B, OUTPUT_LEN]``, which begin in different passes, beside rows of the
    same prompts that end early; `expected` with -1 where one of those has another token.

    With `drafts`, passes verify tokens of `expected`, some of them replaced by wrong ones.
    """
    answers = expected.tolist()
    rows = [scheduler.Sequence(prompt, len(answer), key=key) for key, (prompt, answer) in
            enumerate(zip(prompts, answers, strict=True))]  # fmt: skip
    early = [scheduler.Sequence(prompt, SHORT, key=len(rows) + key) for key, prompt in enumerate(prompts)]
    known = {one.key: (one.prompt_ids, answers[one.key % len(rows)]) for one in (*rows, *early)}
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        patch.setattr(schedule.PassTimes, "room_for_drafts", lambda *_: 1000)
        patch.setattr(Drafts, "_worth", lambda _drafts, counts, _rows: max(counts.values()))
        drafter = Oracle(known, WRONG) if drafts else None
        load = engine.plan.case.workload
        running = ContinuousScheduler(engine, Words(), load, drafter=drafter)  # type: ignore[arg-type]
        running.schedule.step = 8  # positions that a micro-batch grows by
        run(running, [[rows[0], early[2]], [rows[1]], [early[0], rows[2], early[1]]], every=3)
        if running.drafts is not None:
            assert 0 < running.drafts.accepted < running.drafts.drafted
        running.end()
    for one in (*rows, *early):
        if one.error is not None:
            raise ValueError(f"row {one.key}: {one.error}")
    found = torch.tensor([one.output_ids for one in rows])
    beside = torch.tensor([one.output_ids for one in early])
    found[:, :SHORT][beside != expected[:, :SHORT]] = -1
    return found
