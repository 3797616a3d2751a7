"""Text from generated tokens."""

from typing import TYPE_CHECKING, Any

from zinfer.generation.radix_tree import common
from zinfer.generation.tokenizer import UNFINISHED, decode

if TYPE_CHECKING:
    from zinfer.generation.sequence import Sequence
    from zinfer.generation.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoder: returns the text of tokens as they arrive, in whole characters only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._done = 0  # tokens from `_start` to `_done` are already text, and context for the next ones

    def add(self, token: int) -> str:
        """Add a token; return the new text, empty while a character is not complete."""
        self._ids.append(token)
        new = self.rest()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return new

    def rest(self) -> str:
        """Return the text left, even if its last character is not complete."""
        before = decode(self._tokenizer, self._ids[self._start : self._done])
        return decode(self._tokenizer, self._ids[self._start :])[len(before) :]


def new_text(tokenizer: "Tokenizer", sequence: "Sequence") -> str:
    """Return the text of a sequence that was not `shown` before.

    That is all of it once it has ended, else the text without the bytes of an unfinished character, spaces that the
    next token may take back, and what may become one of the texts that end it. Each piece is cut from the text of all
    tokens so far, unlike a `Detokenizer`'s: where a tokenizer cleans up spaces, the pieces joined still make the text
    that the sequence ends with. Only characters that a tokenizer takes back for good, as Llama 2's does where invalid
    bytes follow them, stay in the pieces.
    """
    before = sequence.shown
    if sequence.ended:
        text = whole = sequence.text
    else:
        whole = sequence.running.of(tokenizer, sequence.output_ids, sequence.before)
        text = _before_a_stop(whole.rstrip(UNFINISHED).rstrip(), sequence.stop)
    if not text.startswith(before):
        if before.startswith(text) or (whole.endswith(UNFINISHED) and not sequence.ended):
            return ""
        before = before[: common(before, text)]
    sequence.shown = text
    return text[len(before) :]


def _before_a_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return `text` without an end that may begin one of `stops`."""
    end = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        end = start if 0 <= start < end else end
    return text[:end]
