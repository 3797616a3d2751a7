"""Requests and updates: they go unchanged from border to scheduler and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zinfer.core.value import Frozen


class Sampling(Frozen):
    """Choice of a row's next token, and the tokens that end it. Temperature 0 is greedy.

    `top_p` below 1 is nucleus sampling, `top_k` 0 takes all tokens. `repetition_penalty` counts tokens of prompt and
    output, the others those of the output alone. `logit_bias` has pairs of a token and what its logit gains. A row ends
    neither at an end token nor at a stop before it has `min_tokens`. `grammar` is that of its text
    (`zinfer.generation.grammar`), or "".
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: str = "0"
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: str = ""

    @property
    def edits(self) -> bool:
        """True if logits are changed before a token is chosen."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias or self.min_tokens or self.grammar)

    def unknown_token(self, vocab_size: int) -> str | None:
        """Return a line about a token not below `vocab_size`; None without one."""
        named = {"logit_bias": [token for token, _ in self.logit_bias], "stop_token_ids": self.stop_token_ids}
        for name, tokens in named.items():
            if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
                return f"{name} has token {wrong[0]}: ids are from 0 to {vocab_size - 1}"
        return None


GREEDY = Sampling()


def nth_seed(seed: str, number: int) -> str:
    """Return the seed of row `number` of several: the first row keeps `seed`."""
    return f"{seed}/{number}" if number else seed


@dataclass(eq=False)
class Request:
    """One answer to generate: token ids, sampling and limits.

    `left` tokens may follow `output_ids`. The text continues the prompt's, unless `chat`. `stream` asks for text as it
    comes, `special` for special tokens in it, `logprobs` for scores with that many alternatives, `echo` for the
    prompt's. `owner`s share memory.
    """

    prompt_ids: Sequence[int]
    left: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    output_ids: list[int] = field(default_factory=list)
    key: int = 0
    owner: int = 0
    chat: bool = False
    stream: bool = False
    logprobs: int | None = None
    echo: bool = False
    special: bool = False

    @property
    def limit(self) -> int:
        """Maximum number of output tokens."""
        return len(self.output_ids) + self.left

    @property
    def length(self) -> int:
        """Number of tokens that prefill has to read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def need(self) -> tuple[int, int]:
        """`length`, and the maximum of tokens to come."""
        return self.length, self.left

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a plain request; a subclass may have more fields."""
        ids = self.prompt_ids if isinstance(self.prompt_ids, list) else list(self.prompt_ids)
        return Request, (ids, *(getattr(self, each.name) for each in fields(Request)[1:]))

    def add(self, tokens: Sequence[int]) -> None:
        """Append output tokens."""
        self.output_ids.extend(tokens)
        self.left -= len(tokens)


@dataclass(frozen=True)
class TokenScore:
    """Token, its log-probability in nats, and the likeliest ones in its place."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class EchoedPrompt:
    """Prompt as text, its first token, and the scores of the others."""

    text: str
    first: str
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """Reason why a request has no answer, with code and HTTP status."""

    code: str
    message: str
    status: int = 500
    param: str | None = None


@dataclass(frozen=True)
class Update:
    """New tokens of the request `key`, and its end or failure.

    `delta` is new text, if the request streams; `text` the whole one, at the end. `scores` count the end token, too;
    `prompt` comes once, if the request echoes. `cached` counts the prompt's tokens that were reused.
    """

    key: int
    tokens: list[int] = field(default_factory=list)
    delta: str = ""
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    failure: Failure | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt: EchoedPrompt | None = None
    cached: int = 0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None
