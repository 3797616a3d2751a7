"""Worker tasks that generate text: prompts, batches of rows, and conversations."""

import time

from zinfer.engine import EngineError
from zinfer.generation import scheduler
from zinfer.generation.chat import Chat
from zinfer.generation.scheduler import Scheduler, Sequence
from zinfer.worker.session import Session
from zinfer.worker.tasks import (
    BatchStart,
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
    Completion,
    Generate,
    Generated,
    RowStep,
    Tokenize,
    Tokenized,
)

ANSWER_S = 1.0  # a batch is decoded that long before its rows are answered, unless one ends


def generate(session: Session, request: Generate) -> Generated:
    """Continue prompts."""
    began = time.monotonic()
    sequences = scheduler.generate(
        session.engine, session.plan.model, session.tokenizer(), request.prompts, output_len=request.output_len,
        sampling=request.sampling, ignore_eos=request.ignore_eos, batch_size=request.batch_size, progress=session.beat,
    )  # fmt: skip
    texts = [
        Completion(
            prompt=prompt, output_ids=sequence.output_ids, output_text=sequence.text,
            finish_reason=sequence.finish_reason or "length",
        )
        for prompt, sequence in zip(request.prompts, sequences, strict=True)
    ]  # fmt: skip
    return Generated(texts=texts, seconds=time.monotonic() - began)


def tokenize(session: Session, request: Tokenize) -> Tokenized:
    """Turn prompts into token ids."""
    tokenizer = session.tokenizer(request.model)
    return Tokenized(prompts=[tokenizer.try_encode(prompt) for prompt in request.prompts])


def batch_start(session: Session, request: BatchStart) -> BatchStepped:
    """Begin a batch, in place of one that runs."""
    tokenizer = session.tokenizer()
    if session.scheduler is None:
        session.scheduler = Scheduler(session.engine, tokenizer)
    sequences = [
        Sequence(row.prompt_ids, row.left, row.sampling, row.stop, output_ids=list(row.output_ids), key=row.key)
        for row in request.rows
    ]
    session.sent = {sequence: len(sequence.output_ids) for sequence in sequences}
    began = time.monotonic()
    session.scheduler.start(sequences, request.reserve)
    return _stepped(session, session.scheduler, 1, began)


def batch_step(session: Session, _request: BatchStep) -> BatchStepped:
    """Decode until a row ends, the room is used up, or `ANSWER_S` seconds have gone by."""
    began, steps, running = time.monotonic(), 0, session.scheduler
    if running is None or not running.running:
        raise EngineError("no batch is running")
    while running.running:
        ended = running.step()
        steps += 1
        if ended or time.monotonic() - began > ANSWER_S:
            break
    return _stepped(session, running, steps, began)


def _stepped(session: Session, running: Scheduler, steps: int, began: float) -> BatchStepped:
    """Answer for the rows that had not ended at the time of the last answer; the batch is ended with the last of
    them."""
    seconds = time.monotonic() - began
    rows = [_row_step(sequence, sent) for sequence, sent in session.sent.items()]
    session.sent = {sequence: len(sequence.output_ids) for sequence in session.sent if not sequence.ended}
    if not running.running:
        running.end()
    return BatchStepped(steps=steps, seconds=seconds, rows=rows)


def _row_step(sequence: Sequence, sent: int) -> RowStep:
    return RowStep(
        key=sequence.key, tokens=sequence.output_ids[sent:], finish_reason=sequence.finish_reason, text=sequence.text,
        error=sequence.error,
    )  # fmt: skip


def chat_open(session: Session, request: ChatOpen) -> ChatOpened:
    """Begin a conversation, in place of one that is open."""
    if session.chat is not None:
        session.chat.close()
    session.chat = Chat(
        session.engine, session.tokenizer(), sampling=request.sampling, output_len=request.output_len,
        ignore_eos=request.ignore_eos, system=request.system, cache_size=request.cache_size, folder=request.folder,
        folder_size=request.folder_size,
    )  # fmt: skip
    return ChatOpened(notes=session.chat.take_notes())


def chat_ask(session: Session, request: ChatAsk) -> ChatAsked:
    """Compute a user's turn and the first token of its answer."""
    began, chat = time.monotonic(), _chat(session)
    piece, reloaded, computed = chat.ask(request.turn)
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
