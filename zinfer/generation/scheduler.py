"""The decode loop, and the scheduler that runs batches of sequences on an engine with it.

`DecodeLoop` knows tokens on the device and nothing of text: prefill, then a token a row and step, each chosen by a
sampler. `Scheduler` is the loop for sequences: each has its length, its sampling, its stops, and what it has so far.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.generation import passes
from zinfer.generation.sampling import GREEDY, NotFiniteError, Sampling, choose
from zinfer.generation.tokenizer import NO_TOKENS, Tokenizer
from zinfer.record.measurement import Span
from zinfer.spec.model import ModelError, ModelSpec, check_positions
from zinfer.spec.progress import Progress

if TYPE_CHECKING:
    from zinfer.engine.kv_snapshot import KVSnapshot

Sampler = Callable[[Tensor], Tensor]  # logits [B, V] to the ids [B] that come next


class DecodeLoop:
    """The decode loop: a batch that is started, stepped and ended.

    `tokens` are the ids chosen last, ``[B]``, on the device; `steps` counts the decode steps since the prefill. A batch
    whose pass or sampler raises is ended.
    """

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine, self._sampler = engine, sampler
        self._batch: MicroBatch | None = None
        self.steps = 0
        self.tokens: Tensor

    @property
    def active(self) -> bool:
        """True from a batch's start until its end."""
        return self._batch is not None

    @property
    def batch(self) -> MicroBatch:
        """Running micro-batch. Raises EngineError if there is none."""
        if self._batch is None:
            raise EngineError("no batch is running")
        return self._batch

    def start(self, token_ids: Tensor, mask: Tensor, reserve: int, past: "Several[KVSnapshot]" = ()) -> Tensor:
        """Prefill a batch and choose its first tokens, ``[B]``; a batch that was running is ended. The arguments are
        those of `zinfer.generation.passes.prefill`."""
        self.end()
        self._batch, logits = passes.prefill(self.engine, token_ids, mask, reserve, past)
        self.steps = 0
        return self._choose(logits)

    def step(self) -> Tensor:
        """Run one decode step with the tokens chosen last; returns the next ones, ``[B]``."""
        try:
            logits = passes.decode(self.engine, self.batch, self.tokens)
        except BaseException:
            self._abandon()
            raise
        self.steps += 1
        return self._choose(logits)

    def end(self) -> None:
        """Free the batch's KV cache. Safe to call twice."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.engine.retire(batch)

    def snapshot(self, first: int, last: int) -> "KVSnapshot":
        """Copy the keys and values of the computed positions from `first` up to `last` to host memory."""
        return self.engine.snapshot(self.batch, first, last)

    def timeline(self) -> tuple[Span, ...]:
        """Run one more decode step, traced, whose tokens count for nothing."""
        return self.engine.timeline([Work(self.batch, self.tokens[:, None])])

    def _choose(self, logits: Tensor) -> Tensor:
        try:
            self.tokens = self._sampler(logits)
        except BaseException:
            self._abandon()
            raise
        return self.tokens

    def _abandon(self) -> None:
        with suppress(Exception):
            self.end()


@dataclass(eq=False)
class Sequence:
    """One request: its prompt, the sampling of its tokens, its stops, and its output so far.

    `left` is the number of tokens that it may still get. Once it has ended, `finish_reason` is ``stop`` (an end token,
    or one of the texts `stop`) or ``length`` and `text` its output; or `error` says why it has none. The end token is
    not part of `output_ids`.
    """

    prompt_ids: list[int]
    left: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    output_ids: list[int] = field(default_factory=list)
    key: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    error: str | None = None
    text: str = ""

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Scheduler:
    """Scheduler of one batch, from its start until its end: decides which sequences are in the next pass."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.sequences: list[Sequence] = []
        self.loop = DecodeLoop(engine, self._choose)
        self._tokenizer = tokenizer
        self._reserve = 0

    @property
    def running(self) -> bool:
        """True while a sequence has not ended and the KV cache has room for its next token."""
        room = self.loop.active and self._reserve > 0
        return room and any(not sequence.ended for sequence in self.sequences)

    def start(self, sequences: Iterable[Sequence], reserve: int, past: "Several[KVSnapshot]" = ()) -> list[Sequence]:
        """Begin a batch of `sequences` with room for `reserve` more tokens each: prefill their prompts and the output
        that they have so far, and choose a token for each. Returns the sequences that ended with it."""
        self.sequences, self._reserve = list(sequences), reserve
        known = [sequence.prompt_ids + sequence.output_ids for sequence in self.sequences]
        length = max(map(len, known))
        token_ids = torch.tensor([[self._tokenizer.padding] * (length - len(ids)) + ids for ids in known])
        mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in known])
        return self._extend(self.loop.start(token_ids, mask, reserve, past))

    def step(self) -> list[Sequence]:
        """Run a decode step of the batch, while it is `running`. Returns the sequences that ended with it."""
        return self._extend(self.loop.step())

    def end(self) -> None:
        """End the batch, however far its sequences are. Safe to call twice."""
        self._reserve = 0
        self.loop.end()

    def _choose(self, logits: Tensor) -> Tensor:
        samplings = [GREEDY if sequence.ended else sequence.sampling for sequence in self.sequences]
        places = [len(sequence.output_ids) for sequence in self.sequences]
        tokens, self._finite = choose(logits, samplings, places)
        return tokens

    def _extend(self, tokens: Tensor) -> list[Sequence]:
        """Add its next token to each sequence; returns those that ended."""
        self._reserve -= 1
        running = [
            (sequence, token, finite)
            for sequence, token, finite in zip(self.sequences, tokens.tolist(), self._finite.tolist(), strict=True)
            if not sequence.ended
        ]
        for sequence, token, finite in running:
            self._add(sequence, token, finite)
        return [sequence for sequence, _, _ in running if sequence.ended]

    def _add(self, sequence: Sequence, token: int, finite: bool) -> None:
        if not finite:
            sequence.error = str(NotFiniteError())
        elif token in self._tokenizer.ends and not sequence.ignore_eos:
            sequence.finish_reason, sequence.text = "stop", self._tokenizer.decode(sequence.output_ids)
        else:
            sequence.output_ids.append(token)
            sequence.left -= 1
            text = self._before_stop(sequence)
            if text is not None:
                sequence.finish_reason, sequence.text = "stop", text
            elif sequence.left == 0:
                sequence.finish_reason, sequence.text = "length", self._tokenizer.decode(sequence.output_ids)

    def _before_stop(self, sequence: Sequence) -> str | None:
        """Return the text before the first of the sequence's stops; None if it contains none."""
        if not sequence.stop:
            return None
        recent = 8 + max(len(stop.encode(errors="replace")) for stop in sequence.stop)  # a token is a byte at least
        tail = self._tokenizer.decode(sequence.output_ids[-recent:])
        if not any(stop in tail for stop in sequence.stop):
            return None
        text = self._tokenizer.decode(sequence.output_ids)
        places = [place for stop in sequence.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else None


def generate(
    engine: Engine,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    prompts: Several[str],
    *,
    output_len: int = 32,
    sampling: Sampling = GREEDY,
    ignore_eos: bool = False,
    batch_size: int = 1,
    progress: Progress,
) -> list[Sequence]:
    """Continue every prompt, `batch_size` at a time, each with a seed of its own made of `sampling`'s.

    Raises ModelError for a prompt without tokens, or one that leaves no room for `output_len` in the model's positions,
    NotFiniteError where the logits are not numbers.
    """
    sequences = []
    for number, prompt in enumerate(prompts):
        own = sampling.model_copy(update={"seed": f"{sampling.seed}/{number}"})
        sequences.append(Sequence(tokenizer.encode(prompt), output_len, own, ignore_eos=ignore_eos, key=number))
        if not sequences[-1].prompt_ids:
            raise ModelError(f"prompt {prompt!r} {NO_TOKENS}")
    longest = max(len(sequence.prompt_ids) for sequence in sequences)
    check_positions(spec, longest, output_len, f"a prompt of {longest} tokens")
    scheduler = Scheduler(engine, tokenizer)
    try:
        for start in range(0, len(sequences), batch_size):
            group = sequences[start : start + batch_size]
            scheduler.start(group, reserve=output_len)
            while True:
                if any(sequence.error is not None for sequence in group):
                    raise NotFiniteError
                share = (scheduler.loop.steps + 1) / output_len
                progress("generating", (start + len(group) * share) / len(sequences))
                if not scheduler.running:
                    break
                scheduler.step()
    finally:
        scheduler.end()
    return sequences
