"""Worker tasks of studies: time a kept KV cache, and record or compare the logits along fixed tokens.

A reference's logits go to a file, step by step and in their own type; a comparison reads them back at the same step. So
memory holds the logits of one step only, and the engines need not be loaded at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.core.errors import NotFiniteError
from zinfer.engine import EngineError
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.generation.sampling import greedy
from zinfer.generation.scheduler import DecodeLoop
from zinfer.record.study import Position, Reload
from zinfer.worker.measure import first_token_ms, prompts
from zinfer.worker.session import Session
from zinfer.worker.tasks import LogitsCompare, LogitsRecord, LogitsRecorded, PrefixReuse

VALUES = 1 << 22  # logits that are compared at once: in 64 bits, and several times over


class Recording:
    """Sampler that keeps the last `logits`, ``[B, V]``. `choose` may replace the likeliest ids, ``[B]``."""

    def __init__(self, choose: Callable[[Tensor], Tensor] = lambda ids: ids) -> None:
        self._choose = choose
        self.logits: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits
        return self._choose(greedy(logits)[0])


def prefix_reuse(session: Session, request: PrefixReuse) -> Reload:
    """Time a whole prefill and a kept KV cache in turn. A warm-up comes first. Raises EngineError if the engine cannot
    keep anything, and whatever running out of memory raises."""
    engine, context, new_tokens = session.engine, request.context, request.new_tokens
    if (why_not := engine.cannot_snapshot()) is not None:
        raise EngineError(why_not)
    workload, label = Workload(batch_size=1, input_len=context, output_len=1), f"{context:,} tokens"
    token_ids = prompts(workload, session.plan.model.vocab_size).to(engine.device)
    sampler = Recording()
    loop = DecodeLoop(engine, sampler)
    with ExitStack() as stack:
        stack.callback(loop.end)
        session.on_progress(label, 0.0)
        first_token_ms(loop, token_ids)
        computed = sampler.logits
        kept = engine.snapshot(loop.batch, 0, context - new_tokens)
        stack.callback(kept.close)
        past = RowsPast([[kept]], (0,), kept.length)
        samples: dict[str, list[float]] = {"recompute": [], "memory": []}
        difference, same = 0.0, True
        for turn in range(request.repeats + 1):
            for number, (way, taken) in enumerate(samples.items(), 1):
                milliseconds = first_token_ms(loop, token_ids, past if way == "memory" else None)
                difference = max(difference, float((sampler.logits.float() - computed.float()).abs().max()))
                same &= torch.equal(sampler.logits.argmax(-1), computed.argmax(-1))
                if turn:  # the first one warms up
                    taken.append(round(milliseconds, 4))
                session.on_progress(label, (turn + number / 2) / (request.repeats + 1))
        times: dict[str, Any] = {f"{way}_ms": tuple(taken) for way, taken in samples.items()}
        findings: dict[str, Any] = {"kept_bytes": kept.nbytes, "same_token": same, "max_difference": difference}
        return Reload(context=context, new_tokens=new_tokens, **times, **findings)


def _follow(
    session: Session, prompts: Sequence[list[int]], tokens: Sequence[list[int] | None], steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits ``[B, V]`` and next tokens ``[B]`` of each step. These are `tokens` or, for a row without, the most
    likely ones. Raises NotFiniteError if logits are not numbers."""
    token_ids, engine = torch.tensor(prompts), session.engine
    given = iter(torch.tensor([row or [-1] * steps for row in tokens], device=engine.device).unbind(1))
    sampler = Recording(lambda ids: torch.where((forced := next(given)) < 0, ids, forced))
    loop = DecodeLoop(engine, sampler)
    try:
        for step in range(steps):
            chosen = loop.step() if step else loop.start(token_ids, torch.ones_like(token_ids), reserve=steps)
            if not bool(sampler.logits.isfinite().all()):
                raise NotFiniteError
            yield sampler.logits, chosen
            session.on_progress("following", (step + 1) / steps)
    finally:
        loop.end()


def logits_record(session: Session, request: LogitsRecord) -> LogitsRecorded:
    """Continue prompts of one length, and write the logits."""
    chosen = []
    with Path(request.file).open("wb") as out:
        for logits, tokens in _follow(session, request.prompts, request.tokens, request.steps):
            out.write(logits.cpu().contiguous().view(torch.uint8).numpy().data)
            chosen.append(tokens)
    dtype, shape = str(logits.dtype).removeprefix("torch."), (request.steps, *logits.shape)
    return LogitsRecorded(tokens=torch.stack(chosen, 1).tolist(), file=request.file, dtype=dtype, shape=shape)


def logits_compare(session: Session, request: LogitsCompare) -> list[list[Position]]:
    """Feed recorded tokens, and compare their logits with the recorded ones."""
    recorded, rows = request.logits, slice(request.first, request.first + len(request.prompts))
    steps, count, vocabulary = recorded.shape
    values = torch.from_file(recorded.file, size=steps * count * vocabulary, dtype=getattr(torch, recorded.dtype))
    deviations: list[Tensor] = []
    following = _follow(session, request.prompts, recorded.tokens[rows], steps)
    for reference, (logits, tokens) in zip(values.view(recorded.shape), following, strict=True):
        size = max(1, VALUES // vocabulary)
        parts = zip(reference[rows].to(logits.device).split(size), logits.split(size), tokens.split(size), strict=True)
        deviations.append(torch.cat([deviation(*part) for part in parts]).cpu())
    return [[Position(*step) for step in row] for row in torch.stack(deviations, 1).tolist()]


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
