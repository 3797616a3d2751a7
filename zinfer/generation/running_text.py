"""Text of a growing sequence, for stops and for streams."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zinfer.generation.tokenizer import CONTEXT, UNFINISHED

if TYPE_CHECKING:
    from zinfer.generation.tokenizer import Tokenizer

SETTLED = 16  # tokens after which the text before them is not decoded again


class RunningText:
    """Text of a sequence's tokens, which grow: decoded from its last tokens on, however long it is."""

    def __init__(self) -> None:
        self._settled, self._text, self._head = 0, "", ""  # first tokens, their text, and that of the last of them
        self._latest: tuple[int, str] = 0, ""  # all tokens at the last time, and their text

    def of(self, tokenizer: "Tokenizer", ids: list[int], before: Sequence[int]) -> str:
        """Return the text of `ids`, which continues that of `before`."""
        if self._latest[0] == len(ids):
            return self._latest[1]
        first = max(0, self._settled - CONTEXT)
        both = tokenizer.decode(ids[first:])
        if self._settled and self._text.endswith(self._head) and both.startswith(self._head):
            text = self._text + both[len(self._head) :]
        else:
            text = tokenizer.decode(ids, before)
        if len(ids) >= self._settled + SETTLED and not text.endswith(UNFINISHED):
            self._settled, self._text = len(ids), text
            self._head = tokenizer.decode(ids[max(0, len(ids) - CONTEXT) :])
        self._latest = len(ids), text
        return text
