"""Worker tasks that generate text."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from zinfer.core.request import EchoedPrompt, TokenScore, Update
from zinfer.engine import EngineError
from zinfer.generation.sampling import Score
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.sequence import Sequence
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStart, BatchStarted, BatchStep, BatchStepped

COUNTED = ("passes", "read", "padded", "drafted", "accepted")  # of the schedule, since the last answer
ANSWER_S = 1.0  # seconds of decoding before an answer, unless a row ends


def batch_start(session: Session, command: BatchStart) -> BatchStarted:
    """Begin a batch, in place of a running one."""
    if session.scheduler is not None:
        session.scheduler.end()
    session.scheduler = running = ContinuousScheduler(
        session.engine, session.tokenizer, command.load, command.rows, command.arrivals, command.cache_size
    )
    positions, loading = running.schedule.limits.positions, session.unfinished is not None
    return BatchStarted(positions=positions, cannot_reuse=running.cannot_reuse, loading=loading)


def batch_step(session: Session, command: BatchStep) -> BatchStepped:
    """Discard rows, begin new ones, and run passes."""
    running = session.scheduler
    if running is None:
        raise EngineError("no batch is running")
    schedule, unfinished = running.schedule, session.unfinished
    answer_s = ANSWER_S if command.answer_s is None else command.answer_s
    before, began = replace(schedule.tally), time.monotonic()
    touched: dict[Sequence, None] = {}
    try:
        running.drop(command.drop)
        running.add(command.requests)
        while running.running:
            changed = running.step()
            touched |= dict.fromkeys(changed)
            if any(sequence.ended for sequence in changed) or time.monotonic() - began > answer_s:
                break
        seconds = time.monotonic() - began
        session.finish_loading(wait=False)  # a pass ends with the load: no token of unchecked weights
        if not running.running:
            running.release()
    except BaseException:
        session.scheduler = None
        raise
    rows = [_update(session, sequence) for sequence in touched]
    counts: dict[str, Any] = {name: getattr(schedule.tally, name) - getattr(before, name) for name in COUNTED}
    counts |= {"running": len(schedule.running), "waiting": len(schedule.waiting), "kept_bytes": running.prefixes.held}
    loaded = session.facts if unfinished and not session.unfinished else None
    return BatchStepped(seconds=seconds, rows=rows, loaded=loaded, **counts)


def _update(session: Session, sequence: Sequence) -> Update:
    scores, sequence.scores = sequence.scores, []
    tokens, sequence.sent = sequence.output_ids[sequence.sent :], len(sequence.output_ids)
    prompt = None
    if sequence.echo:
        sequence.echo = False  # it goes out once
        text, first = session.tokenizer.decode(sequence.prompt_ids), session.token_text(sequence.prompt_ids[0])
        prompt = EchoedPrompt(text=text, first=first, scores=_token_scores(session, sequence.prompt_scores))
        sequence.prompt_scores = []
    return Update(
        key=sequence.key,
        tokens=tokens,
        text=sequence.text,
        delta=sequence.new_text(session.tokenizer) if sequence.stream else "",
        prompt=prompt,
        scores=_token_scores(session, scores),
        failure=sequence.failure,
        finish_reason=sequence.finish_reason,
        cached=sequence.cached,
    )


def _token_scores(session: Session, scores: Iterable[Score]) -> list[TokenScore]:
    text = session.token_text
    return [
        TokenScore(token=text(score.token), logprob=score.logprob, top=[(text(token), p) for token, p in score.top])
        for score in scores
    ]
