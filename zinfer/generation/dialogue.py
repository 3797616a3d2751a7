"""Tokens of a conversation.

Each turn continues the tokens of the turn before, so that their keys and values can be reused. If the text of all
messages were tokenised anew, it might not begin with the tokens that the model saw and chose: templates trim answers,
and a tokenizer may split the same text in another way. So only the added text is tokenised if its tokens decode to
exactly that text; otherwise the whole text is, and the common beginning of both token sequences can be reused.
"""

from zinfer.core.model import ModelError
from zinfer.generation.tokenizer import CONTEXT
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess


class Dialogue:
    """Turns of a user and answers, formatted by the chat template. Without one they are joined. Raises ModelError where
    the model has several chat templates, and none was chosen."""

    def __init__(self, tokenizer: TokenizerProcess, system: str | None = None) -> None:
        self._tokenizer, self.template = tokenizer, tokenizer.facts.template
        if not self.template and tokenizer.template.names:
            raise ModelError(tokenizer.template.why_not)
        self._messages = [{"role": "system", "content": system}] if system else []
        self._asked: list[dict[str, str]] = []
        self._text, self._ids = "", list[int]()  # the conversation up to the last answer

    def ask(self, turn: str) -> list[int]:
        """Return the tokens of the conversation and of `turn`. The turn becomes part of the conversation with
        `answered`. Raises ModelError for a conversation that the template refuses, and for one without tokens."""
        self._asked = [*self._messages, {"role": "user", "content": turn}]
        whole = self._render(self._asked)
        ids = self._continued(whole) or self._tokenizer.encode_alone(whole, special=not self.template)
        if isinstance(ids, Refusal):
            raise ModelError(ids.message)
        self._open = whole, ids
        return list(ids)

    def answered(self, answer: list[int], answer_text: str) -> None:
        """Add an answer to the conversation after the last turn: its tokens without the end token, and its text."""
        text, ids = self._open
        self._messages = [*self._asked, {"role": "assistant", "content": answer_text}]
        self._text, self._ids = text + answer_text, ids + answer

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self.template:
            return "".join(message["content"] for message in messages)
        return self._tokenizer.render(messages)

    def _continued(self, whole: str) -> list[int] | None:
        """Return the tokens so far and the tokens that `whole` adds; None if they do not decode to `whole`."""
        if not self._ids or not whole.startswith(self._text):
            return None
        new = self._tokenizer.continuation(self._ids[-CONTEXT:], whole[len(self._text) :])
        return self._ids + new if new else None
