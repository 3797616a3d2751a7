"""Grammars of answers: which tokens may come next, as packed bits, by llguidance (extra `structured`).

A grammar is the text of llguidance's JSON, ``{"grammars": [..]}``, the first of which is that of the answer. It may be
anybody's, so a `zinfer.generation.tokenizer_server` tries each one first, within limits on CPU time and memory, and
here its size, the steps of its parser and the time of a mask are limited. It needs no torch.
"""

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zinfer.core.model import ModelError
from zinfer.generation.tokenizer import Tokenizer
from zinfer.system.host import usable_cpus

if TYPE_CHECKING:
    from torch import Tensor

MISSING = "needs llguidance: pip install 'zinfer[structured]'"
THINK = "<think>"
MARKS = ("<tool_call>", "</tool_call>")  # each a token of some models, which the text in a grammar does not permit
COMPILE_S = 0.5  # CPU time of a grammar and its first mask; 0.01 s are usual
MASK_S = 0.25  # CPU time of a later mask; 0.2 ms on average, and 9 ms at most, with 49,152 and 151,936 tokens
THREADS = 4  # that compute masks, one less than there are cores
LIMITS = {
    "max_lexer_states": 10_000,  # 2 kB each
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 15 ms
    "step_max_items": 20_000,  # 1 ms
    "verbose_errors": False,
}


def available() -> bool:
    """Tell whether llguidance is installed."""
    return find_spec("llguidance") is not None


class Vocabulary:
    """Tokens of a model, for its grammars. `hf` is a tokenizer of transformers. Raises ModelError."""

    def __init__(self, hf: Any, vocab_size: int, ends: Iterable[int]) -> None:
        if not available():
            raise ModelError(f"structured output {MISSING}")
        from llguidance.hf import from_tokenizer

        last = sorted(ends)
        if not last:
            raise ModelError("structured output needs a token that ends a text, and the model names none")
        try:
            self.tokens = from_tokenizer(hf, n_vocab=vocab_size, eos_token=last)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"structured output is not for this model's tokenizer: {why}") from None
        self.think = token_of(hf, THINK)
        self._texts = [mark for mark in MARKS if token_of(hf, mark) is None]

    def compile(self, grammar: str, prompt_ids: Sequence[int] = ()) -> Any:
        """Return llguidance's matcher of an answer to `prompt_ids`. Raises ModelError for a wrong grammar."""
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import any_to_lark

        fields = json.loads(grammar)
        begun = fields.pop("begun", None)
        if begun is not None and thinks(self.think, prompt_ids):
            fields["grammars"][0] = begun
        first = fields["grammars"][0]
        for mark in self._texts if len(fields["grammars"]) > 1 else ():  # it is ours
            first["lark_grammar"] = first["lark_grammar"].replace(mark, f'"{mark}"')
        for part in fields["grammars"]:
            if "ebnf" in part:
                try:
                    part["lark_grammar"] = any_to_lark(part.pop("ebnf"))
                except Exception as error:
                    raise _wrong(error) from None
        matcher = LLMatcher(self.tokens, json.dumps(fields), log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        return matcher

    def check(self, grammar: str) -> None:
        """Raise ModelError for a grammar that is wrong or takes too long."""
        began = time.process_time()
        matcher = self.compile(grammar)
        empty = not any(matcher.compute_bitmask())
        if matcher.is_error() or empty:
            raise _wrong(matcher.get_error() or "it permits no text")
        if time.process_time() - began > COMPILE_S:
            raise _wrong(f"it takes more than {COMPILE_S:g} s of CPU time")


def token_of(hf: Any, text: str) -> int | None:
    """Return the token of a text; None if it has several."""
    ids = hf(text, add_special_tokens=False).input_ids
    return int(ids[0]) if len(ids) == 1 else None


def thinks(think: int | None, prompt_ids: Sequence[int]) -> bool:
    """Tell whether a prompt ends where a thought has begun; `think` is the token of its beginning."""
    return think is not None and think in prompt_ids[-3:]


def _wrong(why: object) -> ModelError:
    line = " ".join(str(why).replace("<non-verbose/>", "").split())[:300]
    return ModelError(f"the grammar of the answer cannot be used: {line}")


class Grammar:
    """One row's grammar. `output_ids` grows with the row; `error` says why it cannot go on."""

    def __init__(self, compiled: "Future[Any]", output_ids: list[int]) -> None:
        self.compiled, self._output_ids, self._consumed = compiled, output_ids, 0
        self.error: str | None = None

    @property
    def ready(self) -> bool:
        """True once it is compiled, or has an error."""
        if self.compiled.done() and (fault := self.compiled.exception()) is not None:
            self.error = " ".join(str(fault).split())
        return self.compiled.done()

    def fill(self, rows: "Sequence[Tensor]", drafts: Sequence[int]) -> None:
        """Write masks of the next token and of those behind `drafts`. Each of `rows`, int32 ``[W]``, gets one. Behind a
        draft that is not permitted they stay as they are. Raises ModelError where the row cannot go on."""
        matcher, new = self.compiled.result(), self._output_ids[self._consumed :]
        if not matcher.consume_tokens(new):
            raise _wrong(matcher.get_error() or "a token does not follow it")
        self._consumed += len(new)
        accepted = 0
        for number, row in enumerate(rows):
            if number and not matcher.try_consume_tokens([drafts[number - 1]]):
                break
            accepted = number
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
            if matcher.is_error() or time.thread_time() - began > MASK_S:
                raise _wrong(matcher.get_error() or f"a token takes more than {MASK_S:g} s of CPU time")
        if accepted:
            matcher.rollback(accepted)


class Grammars:
    """Grammars of a batch's rows, and their threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._vocabulary: Vocabulary | None = None
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._threads = max(1, min(THREADS, usable_cpus() - 1))
        self._pool = ThreadPoolExecutor(self._threads, "mask")

    def add(self, grammar: str, prompt_ids: Sequence[int], output_ids: list[int]) -> Grammar:
        """Begin to compile a row's grammar."""
        return Grammar(self._compiler.submit(self._compile, grammar, prompt_ids), output_ids)

    def _compile(self, grammar: str, prompt_ids: Sequence[int]) -> Any:
        self._vocabulary = self._vocabulary or Vocabulary(self._tokenizer.hf, self._size, self._tokenizer.ends)
        return self._vocabulary.compile(grammar, prompt_ids)

    def begin(self, asked: "Sequence[tuple[Grammar, Sequence[Tensor], Sequence[int]]]") -> "list[Future[None]]":
        """Begin to fill the masks of rows, as `Grammar.fill` does; they run beside the pass."""
        parts = [asked[start :: self._threads] for start in range(min(self._threads, len(asked)))]
        return [self._pool.submit(_fill, part) for part in parts]


def _fill(part: "Sequence[tuple[Grammar, Sequence[Tensor], Sequence[int]]]") -> None:
    for grammar, rows, drafts in part:
        try:
            grammar.fill(rows, drafts)
        except BaseException as error:  # a panic of compiled code is no Exception, and is this row's alone
            grammar.error = str(error if isinstance(error, ModelError) else _wrong(error))
