"""A conversation as tokens: each turn continues the tokens of the one before, so that what was computed is of use.

Text made of all messages anew need not begin with the tokens that the model saw and chose: templates trim answers, and
a tokenizer may cut the same text in another way. So only what the text adds is tokenised, where its tokens really are
that text; elsewhere all of it is, and what both have in common from the beginning on is of use.
"""

from typing import Any

from zinfer.spec.model import ModelError

TAIL = 16  # tokens before the added ones: enough context to see whether these are read as they are written
UNFINISHED = "\ufffd"  # what bytes that are no character yet are decoded to


class Dialogue:
    """Turns of a user and their answers, as the tokenizer's chat template has them, or else one after the other."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._messages = [{"role": "system", "content": system}] if system else []
        self._asked: list[dict[str, str]] = []
        self._text, self._ids = "", list[int]()  # of everything that was said
        self.template = bool(getattr(tokenizer, "chat_template", None))

    def ask(self, turn: str) -> list[int]:
        """The tokens of everything said and of `turn`, up to where its answer begins; the turn counts as said once it
        is `answered`. Raises ModelError for a conversation that the template refuses, or one without tokens."""
        self._asked = [*self._messages, {"role": "user", "content": turn}]
        whole = self._render(self._asked)
        ids = self._continued(whole) or self._tokenizer(whole, add_special_tokens=not self.template).input_ids
        if not ids:
            raise ModelError("the conversation has no tokens: it needs at least one")
        self._open = whole, list(ids)
        return list(ids)

    def answered(self, answer: list[int]) -> str:
        """The text of `answer`, whose tokens, without the end token, followed those of the last turn."""
        text, ids = self._open
        said = decode(self._tokenizer, answer)
        self._messages = [*self._asked, {"role": "assistant", "content": said}]
        self._text, self._ids = text + said, ids + answer
        return said

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self.template:
            return "".join(message["content"] for message in messages)
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template says no in whatever way its author chose
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"the model's chat template refuses the conversation: {reason}") from None

    def _continued(self, whole: str) -> list[int] | None:
        """The tokens so far and those of what `whole` adds to their text; None where that is not `whole`."""
        if not self._ids or not whole.startswith(self._text):
            return None
        added, tail = whole[len(self._text) :], self._ids[-TAIL:]
        new: list[int] = self._tokenizer(added, add_special_tokens=False).input_ids
        before, after = (decode(self._tokenizer, ids, special=True) for ids in (tail, tail + new))
        return self._ids + new if new and after == before + added else None


class Detokenizer:
    """Text out of tokens as they come, never half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0  # tokens that were told; those from the start on are context for the next ones

    def add(self, token: int) -> str:
        """What can be told since the last time; empty while a character is not complete."""
        self._ids.append(token)
        new = self.rest()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return new

    def rest(self) -> str:
        """What was not told yet, though it may be no whole character."""
        before = decode(self._tokenizer, self._ids[self._start : self._told])
        return decode(self._tokenizer, self._ids[self._start :])[len(before) :]


def decode(tokenizer: Any, ids: list[int], special: bool = False) -> str:
    """The text of `ids`, as it is, with or without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
