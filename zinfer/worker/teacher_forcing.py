"""Teacher forcing: feed fixed tokens to an engine, and record or compare the logits of each step.

A reference's logits go to a file, step by step and in their own type; a comparison reads them back at the same step. So
memory holds the logits of one step only, and the engines need not be loaded at the same time.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zinfer.core.errors import NotFiniteError
from zinfer.core.progress import Progress
from zinfer.engine.base import Engine
from zinfer.generation.sampling import greedy
from zinfer.generation.scheduler import DecodeLoop
from zinfer.record.study import Position
from zinfer.worker.session import Session
from zinfer.worker.tasks import LogitsCompare, LogitsCompared, LogitsFile, LogitsRecord, LogitsRecorded

VALUES = 1 << 22  # logits that are compared at once: in 64 bits, and several times over


class Forced:
    """Sampler of given tokens, ``[B, steps]``, -1 for the likeliest. `logits`: the last, ``[B, V]``."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = iter(tokens.unbind(1))
        self.logits: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits
        given = next(self._tokens)
        return torch.where(given < 0, greedy(logits)[0], given)


def _follow(
    engine: Engine, prompts: Sequence[list[int]], tokens: Sequence[list[int] | None], steps: int, on_progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits ``[B, V]`` and next tokens ``[B]`` of each step. These are `tokens` or, for a row without, the most
    likely ones. Raises NotFiniteError if logits are not numbers."""
    token_ids = torch.tensor(prompts)
    sampler = Forced(torch.tensor([row or [-1] * steps for row in tokens], device=engine.device))
    loop = DecodeLoop(engine, sampler)
    try:
        for step in range(steps):
            chosen = loop.step() if step else loop.start(token_ids, torch.ones_like(token_ids), reserve=steps)
            if not bool(sampler.logits.isfinite().all()):
                raise NotFiniteError
            yield sampler.logits, chosen
            on_progress("following", (step + 1) / steps)
    finally:
        loop.end()


def logits_record(session: Session, request: LogitsRecord) -> LogitsRecorded:
    """Continue prompts of one length, and write the logits."""
    engine, steps, chosen = session.engine, request.steps, []
    with Path(request.file).open("wb") as out:
        for logits, tokens in _follow(engine, request.prompts, request.tokens, steps, session.on_progress):
            out.write(logits.cpu().contiguous().view(torch.uint8).numpy().data)
            chosen.append(tokens)
    rows, vocabulary = logits.shape
    dtype = str(logits.dtype).removeprefix("torch.")
    return LogitsRecorded(
        tokens=torch.stack(chosen, 1).tolist(),
        logits=LogitsFile(file=request.file, dtype=dtype, shape=(steps, rows, vocabulary)),
    )


def logits_compare(session: Session, request: LogitsCompare) -> LogitsCompared:
    """Feed given tokens, and compare their logits with the recorded ones."""
    recorded, rows = request.logits, slice(request.first, request.first + len(request.prompts))
    steps, count, vocabulary = recorded.shape
    values = torch.from_file(recorded.file, size=steps * count * vocabulary, dtype=getattr(torch, recorded.dtype))
    deviations: list[Tensor] = []
    following = _follow(session.engine, request.prompts, request.tokens, steps, session.on_progress)
    for reference, (logits, tokens) in zip(values.view(recorded.shape), following, strict=True):
        size = max(1, VALUES // vocabulary)
        parts = zip(reference[rows].to(logits.device).split(size), logits.split(size), tokens.split(size), strict=True)
        deviations.append(torch.cat([deviation(*part) for part in parts]).cpu())
    return LogitsCompared(rows=[[Position(*step) for step in row] for row in torch.stack(deviations, 1).tolist()])


def deviation(reference: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the deviation of `logits` from `reference`, ``[B, V]`` each. It has the fields of a
    `zinfer.record.study.Position`, in float64, ``[B, 5]``; `tokens`, ``[B]``, come next."""
    same = reference.argmax(-1) == logits.argmax(-1)
    expected, actual = reference.double(), logits.double()
    error = (actual - expected).square().mean(-1).sqrt() / expected.std(-1, correction=0)
    expected, actual = expected.log_softmax(-1), actual.log_softmax(-1)
    kl = (expected.exp() * (expected - actual)).sum(-1)
    nats = [-log.gather(-1, tokens[:, None])[:, 0] for log in (expected, actual)]
    return torch.stack([error, kl.clamp(min=0), same.double(), *nats], dim=-1)
