"""Measurement of `zinfer study reuse`: a whole prefill against one that continues from a kept KV cache."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.engine import EngineError
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.generation.sampling import greedy
from zinfer.generation.scheduler import DecodeLoop
from zinfer.record.study import Reload
from zinfer.worker.measure import first_token_ms, prompts
from zinfer.worker.session import Session
from zinfer.worker.tasks import PrefixReuse


class _Recording:
    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits
        return greedy(logits)[0]


def prefix_reuse(session: Session, request: PrefixReuse) -> Reload:
    """Time rounds in which each way has its turn, after a warm-up. Raises EngineError where the engine cannot keep
    anything, and whatever running out of memory raises."""
    engine, context, new_tokens = session.engine, request.context, request.new_tokens
    if (why_not := engine.cannot_snapshot()) is not None:
        raise EngineError(why_not)
    workload, label = Workload(batch_size=1, input_len=context, output_len=1), f"{context:,} tokens"
    token_ids = prompts(workload, session.plan.model.vocab_size).to(engine.device)
    sampler = _Recording()
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
