"""Sequence: a request under way, from the scheduler to the engine and back, and its text, for stops and streams."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from zinfer.core.request import Failure, Request
from zinfer.generation import tuning
from zinfer.generation.tokenizer import CONTEXT, UNFINISHED, Tokenizer

if TYPE_CHECKING:
    from zinfer.generation.sampling import LogitEdits, Score


class RunningText:
    """Text of a sequence's tokens, which grow: decoded from its last tokens on, however long it is."""

    def __init__(self) -> None:
        self._settled, self._text, self._head = 0, "", ""  # first tokens, their text, and that of the last of them
        self._latest: tuple[int, str] = 0, ""  # all tokens at the last time, and their text

    def of(self, tokenizer: Tokenizer, ids: list[int], before: Several[int]) -> str:
        """Return the text of `ids`, which continues that of `before`."""
        if self._latest[0] == len(ids):
            return self._latest[1]
        first = max(0, self._settled - CONTEXT)
        both = tokenizer.decode(ids[first:])
        if self._settled and self._text.endswith(self._head) and both.startswith(self._head):
            text = self._text + both[len(self._head) :]
        else:
            text = tokenizer.decode(ids, before)
        if len(ids) >= self._settled + tuning.TUNED.settled and not text.endswith(UNFINISHED):
            self._settled, self._text = len(ids), text
            self._head = tokenizer.decode(ids[max(0, len(ids) - CONTEXT) :])
        self._latest = len(ids), text
        return text


def before_a_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return `text` without an end that may begin one of `stops`."""
    end = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        end = start if 0 <= start < end else end
    return text[:end]


def common(first: Several[object], second: Several[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


@dataclass(eq=False)
class Sequence(Request):
    """Request under way: its prompt, sampling and stops, and its output so far. Once it has ended, `finish_reason` is
    ``stop`` (an end token, which is not part of `output_ids`, or one of the texts `stop`) or ``length`` and `text` its
    output; or `failure` says why it has none. `cached` counts the tokens of the prompt whose keys and values were kept.
    `scores`, with `logprobs`, are of `output_ids` and of an end token, and with `echo` `prompt_scores` those of the
    prompt from its second token on; who reads them may take them out."""

    finish_reason: Literal["stop", "length"] | None = None
    failure: Failure | None = None
    text: str = ""
    cached: int = 0
    scores: "list[Score]" = field(default_factory=list)
    prompt_scores: "list[Score]" = field(default_factory=list)
    running: RunningText = field(default_factory=RunningText, repr=False)
    sent: int = 0  # output tokens that updates have told
    shown: str = ""  # text that updates have told
    edits: "LogitEdits | None" = None  # changes of its logits, if its sampling asks for any
    stops_from: int | None = None  # characters of its first `min_tokens`: a stop ends behind them

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        """Return a sequence that begins as `request` does; the request stays as it is."""
        if isinstance(request, cls):
            return request
        return cls(**vars(request) | {"output_ids": list(request.output_ids)}, sent=len(request.output_ids))

    @property
    def scores_prompt(self) -> bool:
        """True while scores of its prompt are to be computed."""
        return self.echo and self.logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids) - 1

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def known_ids(self) -> list[int]:
        """Tokens of its prompt and of its output so far."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def before(self) -> Several[int]:
        """Tokens whose text its own continues."""
        return [] if self.chat else self.prompt_ids

    def new_text(self, tokenizer: Tokenizer) -> str:
        """Return the text that was not `shown` before. That is all of it once the sequence has ended, else the text
        without the bytes of an unfinished character, spaces that the next token may take back, and what may become one
        of the texts that end it. Each piece is cut from the text of all tokens so far, so that the pieces joined make
        the text that the sequence ends with."""
        before, tokenizer = self.shown, tokenizer.raw if self.special else tokenizer
        if self.ended:
            text = whole = self.text
        else:
            whole = self.running.of(tokenizer, self.output_ids, self.before)
            text = before_a_stop(whole.rstrip(UNFINISHED).rstrip(), self.stop)
        if not text.startswith(before):
            if before.startswith(text) or (whole.endswith(UNFINISHED) and not self.ended):
                return ""
            before = before[: common(before, text)]
        self.shown = text
        return text[len(before) :]
