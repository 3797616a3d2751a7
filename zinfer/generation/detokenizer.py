"""Text of a growing sequence, for stops and for streams."""

from collections.abc import Sequence

from zinfer.generation import tuning
from zinfer.generation.tokenizer import CONTEXT, UNFINISHED, Tokenizer


class RunningText:
    """Text of a sequence's tokens, which grow: decoded from its last tokens on, however long it is."""

    def __init__(self) -> None:
        self._settled, self._text, self._head = 0, "", ""  # first tokens, their text, and that of the last of them
        self._latest: tuple[int, str] = 0, ""  # all tokens at the last time, and their text

    def of(self, tokenizer: Tokenizer, ids: list[int], before: Sequence[int]) -> str:
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


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
