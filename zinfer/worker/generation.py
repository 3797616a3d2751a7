"""Worker tasks that generate text: rows that come to a batch and go from it."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zinfer.engine import EngineError
from zinfer.generation.detokenizer import TextPieces
from zinfer.generation.prefix_cache import KeptFolder
from zinfer.generation.sampling import Score
from zinfer.generation.scheduler import ContinuousScheduler, Sequence
from zinfer.worker.session import Session
from zinfer.worker.tasks import (
    BatchStart,
    BatchStarted,
    BatchStep,
    BatchStepped,
    EchoedPrompt,
    RowStep,
    TokenScore,
)

ANSWER_S = 1.0  # a batch is decoded that long before its rows are answered, unless one ends


def batch_start(session: Session, request: BatchStart) -> BatchStarted:
    """Begin a batch, in place of one that runs."""
    if session.scheduler is not None:
        session.scheduler.end()
    session.sent, session.text, session.streams = {}, TextPieces(session.tokenizer()), set()
    folder = None if request.folder is None else KeptFolder(Path(request.folder), request.folder_size)
    session.scheduler = ContinuousScheduler(
        session.engine, session.tokenizer(), request.load, request.rows, request.arrivals, request.cache_size, folder
    )
    return BatchStarted(
        positions=session.scheduler.schedule.limits.positions,
        notes=session.scheduler.take_notes(),
        cannot_score=session.engine.cannot_score(),
        cannot_reuse=session.scheduler.cannot_reuse,
    )


def batch_step(session: Session, request: BatchStep) -> BatchStepped:
    """Forget rows and add others; run passes until a row ends, nothing is left to do, or the time of an answer has come
    (`ANSWER_S` by default)."""
    running = session.scheduler
    if running is None:
        raise EngineError("no batch is running")
    schedule = running.schedule
    schedule.ending = request.ending
    answer_s = ANSWER_S if request.answer_s is None else request.answer_s
    sequences = [
        Sequence(
            asked.prompts[row.prompt], row.left, row.sampling, asked.stop, asked.ignore_eos, list(row.output_ids),
            row.key, request=asked.key, chat=asked.chat, logprobs=asked.logprobs, echo=asked.echo,
        )
        for asked in request.requests for row in asked.rows
    ]  # fmt: skip
    before, began = replace(schedule.tally), time.monotonic()
    touched: dict[Sequence, None] = {}
    try:
        dropped = _drop(session, running, request.drop)
        session.sent |= {sequence: len(sequence.output_ids) for sequence in sequences}
        session.streams |= {row.key for asked in request.requests if asked.stream for row in asked.rows}
        running.add(sequences)
        while running.running:
            changed = running.step()
            touched |= dict.fromkeys(changed)
            if any(sequence.ended for sequence in changed) or time.monotonic() - began > answer_s:
                break
        seconds = time.monotonic() - began
        if not running.running:
            running.release()
    except BaseException:
        session.scheduler, session.sent = None, {}
        raise
    rows = [_row_step(session, sequence) for sequence in touched]
    for sequence in touched:
        session.sent[sequence] = len(sequence.output_ids)
        if sequence.ended:
            del session.sent[sequence]
            session.streams.discard(sequence.key)
    tally = schedule.tally
    return BatchStepped(
        passes=tally.passes - before.passes,
        seconds=seconds,
        rows=rows,
        running=len(schedule.running),
        waiting=len(schedule.waiting),
        read=tally.read - before.read,
        padded=tally.padded - before.padded,
        again=tally.again - before.again,
        drafted=tally.drafted - before.drafted,
        accepted=tally.accepted - before.accepted,
        kept_bytes=0 if running.prefixes is None else running.prefixes.held,
        dropped=dropped,
        notes=running.take_notes(),
    )


def _drop(session: Session, running: ContinuousScheduler, keys: Iterable[int]) -> dict[int, str]:
    """Forget rows, however far they are; return the texts of those with `stream`, by key."""
    gone = set(keys)
    if not gone or session.text is None:
        return {}
    streams = [one for one in session.sent if one.key in gone & session.streams]
    texts = {one.key: session.tokenizer().decode(one.output_ids, one.before) for one in streams}
    running.drop(gone)
    session.text.forget(gone)
    session.sent = {sequence: count for sequence, count in session.sent.items() if sequence.key not in gone}
    session.streams -= gone
    return texts


def _row_step(session: Session, sequence: Sequence) -> RowStep:
    tokens = sequence.output_ids[session.sent[sequence] :]
    scores, sequence.scores = sequence.scores, []
    piece = ""
    if session.text is not None and sequence.key in session.streams:
        piece = session.text.add(sequence)
    prompt = None
    if sequence.echo:
        sequence.echo = False  # it is told once
        decode = session.tokenizer().decode
        prompt = EchoedPrompt(
            text=decode(sequence.prompt_ids), first=session.token_text(sequence.prompt_ids[0]),
            scores=_token_scores(session, sequence.prompt_scores),
        )  # fmt: skip
        sequence.prompt_scores = []
    return RowStep(
        key=sequence.key, tokens=tokens, finish_reason=sequence.finish_reason, text=sequence.text,
        error=sequence.error, piece=piece, prompt=prompt, scores=_token_scores(session, scores), cached=sequence.cached,
    )  # fmt: skip


def _token_scores(session: Session, scores: Iterable[Score]) -> list[TokenScore]:
    name = session.token_text
    return [
        TokenScore(token=name(one.token), logprob=one.logprob, top=[(name(token), value) for token, value in one.top])
        for one in scores
    ]
