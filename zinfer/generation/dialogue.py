"""Conversation of a user and a model as tokens.

Each turn is tokenised whole, and `zinfer.generation.prefix_cache` reuses the tokens that it begins with.
"""

from typing import Any

from zinfer.core.model import ModelError
from zinfer.generation.tokenizer_process import Prompt, Refusal, TokenizerProcess


class Dialogue:
    """Turns of a user and answers, formatted by the chat template. It gets `settings`; without one they are joined.
    Raises ModelError where the model has several chat templates, and none was chosen."""

    def __init__(
        self, tokenizer: TokenizerProcess, system: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer, self.template = tokenizer, tokenizer.facts.template
        if not self.template and tokenizer.template.names:
            raise ModelError(tokenizer.template.why_not)
        self._settings = settings or {}
        self._messages = [{"role": "system", "content": system}] if system else []
        self._turn = {"role": "user", "content": ""}

    def ask(self, turn: str) -> list[int]:
        """Return the tokens of the conversation and `turn`, added by `answered`. Raises ModelError."""
        self._turn = {"role": "user", "content": turn}
        messages = [*self._messages, self._turn]
        prompt: Prompt = {"messages": messages, "template": self._settings}
        if not self.template:
            prompt = "".join(message["content"] for message in messages)
        ids = self._tokenizer.encode_alone(prompt)
        if isinstance(ids, Refusal):
            raise ModelError(ids.message)
        return ids

    def answered(self, text: str, reasoning: str = "") -> None:
        """Add the last turn and its answer to the conversation; the template gets the `reasoning`, too."""
        thought = {"reasoning_content": reasoning} if reasoning else {}
        self._messages += [self._turn, {"role": "assistant", "content": text} | thought]
