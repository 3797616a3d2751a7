"""Worker tasks that generate text: prompts, batches of rows, and conversations."""

import time
from collections.abc import Iterable
from dataclasses import replace

from zinfer.engine import EngineError
from zinfer.generation.chat import Chat
from zinfer.generation.detokenizer import TextPieces
from zinfer.generation.sampling import Score
from zinfer.generation.scheduler import ContinuousScheduler, Sequence, advance, continue_prompts
from zinfer.worker.session import Session
from zinfer.worker.tasks import (
    BatchStart,
    BatchStarted,
    BatchStep,
    BatchStepped,
    ChatAsk,
    ChatAsked,
    ChatEnd,
    ChatEnded,
    ChatOpen,
    ChatOpened,
    ChatStep,
    ChatToken,
    CompletionStep,
    EchoedPrompt,
    Generate,
    Generated,
    GenerateStep,
    RowStep,
    TokenScore,
)

STREAM_S = 0.05  # prompts are continued that long before their text is shown
ANSWER_S = 1.0  # a batch is decoded that long before its rows are answered, unless one ends


def generate(session: Session, request: Generate) -> Generated:
    """Begin to continue prompts."""
    tokenizer = session.tokenizer()
    session.scheduler, sequences = continue_prompts(
        session.engine, session.plan.model, tokenizer, request.prompts, output_len=request.output_len,
        sampling=request.sampling, ignore_eos=request.ignore_eos, batch_size=request.batch_size,
    )  # fmt: skip
    session.text = TextPieces(tokenizer)
    session.sent = dict.fromkeys(sequences, 0)
    session.asked = len(sequences) * request.output_len
    return generate_step(session, GenerateStep())


def generate_step(session: Session, _request: GenerateStep) -> Generated:
    """Go on with the prompts of `generate` for a pass, or several short ones."""
    running, pieces = session.scheduler, session.text
    if running is None or pieces is None:
        raise EngineError("no prompts are being continued")
    began = time.monotonic()
    touched: dict[Sequence, None] = {}
    while running.running:
        touched |= dict.fromkeys(advance(running))
        if time.monotonic() - began > STREAM_S:
            break
    steps = [
        CompletionStep(
            number=sequence.key, tokens=sequence.output_ids[session.sent[sequence] :], text=pieces.add(sequence),
            finish_reason=sequence.finish_reason, output_text=sequence.text,
        )
        for sequence in touched
    ]  # fmt: skip
    session.sent |= {sequence: len(sequence.output_ids) for sequence in touched}
    session.beat("generating", sum(session.sent.values()) / session.asked)
    tally = running.schedule.tally
    return Generated(
        steps=steps, seconds=time.monotonic() - began, running=len(running.sequences), passes=tally.passes,
        drafted=tally.drafted, accepted=tally.accepted,
    )  # fmt: skip


def batch_start(session: Session, request: BatchStart) -> BatchStarted:
    """Begin a batch, in place of one that runs."""
    if session.scheduler is not None:
        session.scheduler.end()
    session.sent, session.text, session.streams = {}, TextPieces(session.tokenizer()), set()
    session.scheduler = ContinuousScheduler(
        session.engine, session.tokenizer(), request.load, request.rows, request.arrivals, request.cache_size
    )
    return BatchStarted(
        positions=session.scheduler.schedule.limits.positions,
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
        _drop(session, running, request.drop)
        session.sent |= {sequence: len(sequence.output_ids) for sequence in sequences}
        session.streams |= {row.key for asked in request.requests if asked.stream for row in asked.rows}
        running.add(sequences)
        while running.running:
            changed = running.step()
            touched |= dict.fromkeys(changed)
            if any(sequence.ended for sequence in changed) or time.monotonic() - began > answer_s:
                break
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
        seconds=time.monotonic() - began,
        rows=rows,
        running=len(schedule.running),
        waiting=len(schedule.waiting),
        read=tally.read - before.read,
        padded=tally.padded - before.padded,
        again=tally.again - before.again,
        drafted=tally.drafted - before.drafted,
        accepted=tally.accepted - before.accepted,
        kept_bytes=0 if running.prefixes is None else running.prefixes.held,
    )


def _drop(session: Session, running: ContinuousScheduler, keys: Iterable[int]) -> None:
    """Forget rows, however far they are."""
    gone = set(keys)
    if not gone or session.text is None:
        return
    running.drop(gone)
    session.text.forget(gone)
    session.sent = {sequence: count for sequence, count in session.sent.items() if sequence.key not in gone}
    session.streams -= gone


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


def chat_open(session: Session, request: ChatOpen) -> ChatOpened:
    """Begin a conversation, in place of one that is open."""
    if session.chat is not None:
        session.chat.close()
    session.chat = Chat(
        session.engine, session.tokenizer(), sampling=request.sampling, output_len=request.output_len,
        ignore_eos=request.ignore_eos, cache_size=request.cache_size, folder=request.folder,
        folder_size=request.folder_size,
    )  # fmt: skip
    return ChatOpened(notes=session.chat.take_notes())


def chat_ask(session: Session, request: ChatAsk) -> ChatAsked:
    """Compute a user's turn and the first token of its answer."""
    began, chat = time.monotonic(), _chat(session)
    piece, reloaded, computed = chat.ask(request.prompt_ids)
    seconds = time.monotonic() - began
    return ChatAsked(
        text=piece.text, finish_reason=piece.finish_reason, seconds=seconds, reloaded=reloaded, computed=computed,
        notes=chat.take_notes(),
    )  # fmt: skip


def chat_step(session: Session, _request: ChatStep) -> ChatToken:
    """Compute the next token of the answer."""
    began = time.monotonic()
    piece = _chat(session).step()
    return ChatToken(text=piece.text, finish_reason=piece.finish_reason, seconds=time.monotonic() - began)


def chat_end(session: Session, _request: ChatEnd) -> ChatEnded:
    """End the answer, and keep its KV cache."""
    chat = _chat(session)
    output_ids, text = chat.end()
    return ChatEnded(output_ids=output_ids, output_text=text, notes=chat.take_notes())


def _chat(session: Session) -> Chat:
    if session.chat is None:
        raise EngineError("no conversation is open")
    return session.chat
