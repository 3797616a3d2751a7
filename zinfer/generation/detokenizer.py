"""Text from generated tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zinfer.generation.radix_tree import common
from zinfer.generation.tokenizer import UNFINISHED, decode

if TYPE_CHECKING:
    from zinfer.generation.scheduler import Sequence
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


class TextPieces:
    """Text of sequences, in chunks that their tokens complete: joined, a sequence's chunks are its whole text.

    Each chunk is cut from the text of all tokens so far, unlike a `Detokenizer`'s: where a tokenizer cleans up spaces,
    the chunks then still make the text that the sequence ends with. Only characters that a tokenizer takes back for
    good, as Llama 2's does where invalid bytes follow them, stay in the chunks.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._shown: dict[int, str] = {}  # by key

    def add(self, sequence: "Sequence") -> str:
        """Return the text of a sequence that was not returned before: all of it once it has ended, else without the
        bytes of an unfinished character, spaces that the next token may take back, and what may become one of the texts
        that end it."""
        before = self._shown.get(sequence.key, "")
        if sequence.ended:
            text = whole = sequence.text
            self.discard([sequence.key])
        else:
            whole = sequence.running.of(self._tokenizer, sequence.output_ids, sequence.before)
            text = _before_a_stop(whole.rstrip(UNFINISHED).rstrip(), sequence.stop)
        if not text.startswith(before):
            if before.startswith(text) or (whole.endswith(UNFINISHED) and not sequence.ended):
                return ""
            before = before[: common(before, text)]
        if not sequence.ended:
            self._shown[sequence.key] = text
        return text[len(before) :]

    def discard(self, keys: Iterable[int]) -> None:
        """Forget sequences whose text is wanted no more."""
        for key in keys:
            self._shown.pop(key, None)


def _before_a_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return `text` without an end that may begin one of `stops`."""
    end = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        end = start if 0 <= start < end else end
    return text[:end]
