"""Conversations on an engine, a token at a time, so that an answer may be stopped at any of them.

After each answer its keys and values go to the prefix cache; the next turn continues from those it finds there.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from zinfer.engine.base import Engine
from zinfer.generation.detokenizer import Detokenizer
from zinfer.generation.prefix_cache import PrefixCache
from zinfer.generation.sampling import NotFiniteError, Sampling, nth_seed
from zinfer.generation.scheduler import Scheduler, Sequence
from zinfer.generation.tokenizer import Tokenizer, decode
from zinfer.plan.plan import Plan
from zinfer.spec.model import ModelError
from zinfer.spec.source import revision_of


def cache_identity(plan: Plan) -> dict[str, str]:
    """Return the facts that tell the keys and values of a plan's model from those of all others, whichever engine
    computed them."""
    spec = plan.model
    return {
        "model": Path(spec.name).name,
        "revision": revision_of(spec, plan.case.load_format),
        "dtype": spec.dtype,
        "layers": str(spec.num_layers),
    }


class Piece(NamedTuple):
    """The text that new tokens complete, empty within a character; `finish_reason` is ``stop`` or ``length`` at the
    answer's end, else None."""

    text: str
    finish_reason: Literal["stop", "length"] | None


class Chat:
    """One conversation: a turn is an `ask`, a `step` for each further token, and an `end`.

    `cache_size` and `folder_size` are bytes of host memory and of the disk under `folder`. `notes` collects lines for
    the user, which `take_notes` hands out once.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        sampling: Sampling,
        output_len: int,
        ignore_eos: bool = False,
        cache_size: int,
        folder: str | None = None,
        folder_size: int = 0,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling, self._output_len, self._ignore_eos = sampling, output_len, ignore_eos
        self._scheduler = Scheduler(engine, tokenizer)
        self._cache: PrefixCache | None = None
        self._turns = 0
        self._notes: list[str] = []
        if (why_not := engine.cannot_snapshot()) is not None:
            self._notes.append(f"each turn computes the whole conversation: {why_not}")
        else:
            where = None if folder is None else Path(folder)
            pin, say = engine.device.type == "cuda", self._notes.append
            self._cache = PrefixCache(cache_identity(engine.plan), cache_size, where, folder_size, say, pin)

    def ask(self, ids: list[int]) -> tuple[Piece, int, int]:
        """Compute the first token of the answer to a conversation, whose last turn is new; return its piece, and how
        many tokens were reloaded and computed.

        Raises ModelError where the model's positions leave no room for an answer, NotFiniteError where the logits are
        not numbers.
        """
        spec = self._engine.plan.model
        left = self._output_len
        if spec.max_position is not None:
            left = min(left, spec.max_position - len(ids))
        if left < 1:
            raise ModelError(f"the conversation has {len(ids)} tokens, and {spec.name} {spec.max_position} positions")
        past = self._cache.find(ids) if self._cache is not None and self._alike(len(ids)) else []
        reloaded = sum(part.length for part in past)
        sampling = self._sampling.model_copy(update={"seed": nth_seed(self._sampling.seed, self._turns)})
        self._turns += 1
        self._answer = Sequence(ids, left, sampling, ignore_eos=self._ignore_eos, chat=True)
        self._detokenizer, self._shown = Detokenizer(self._tokenizer.hf), 0
        self._scheduler.start([self._answer], left, past)
        return self._piece(), reloaded, len(ids) - reloaded

    def step(self) -> Piece:
        """Compute the next token of an answer that has not ended."""
        self._scheduler.step()
        return self._piece()

    def end(self) -> tuple[list[int], str]:
        """End the answer, as far as it is, and keep its KV cache; return its ids and its text."""
        answer, loop = self._answer, self._scheduler.loop
        text = decode(self._tokenizer.hf, answer.output_ids)
        if self._cache is not None and self._alike(len(answer.prompt_ids) + len(answer.output_ids)):
            self._cache.keep(answer.prompt_ids + answer.output_ids[: loop.steps], self._engine, loop.batch)
        self._scheduler.end()
        return answer.output_ids, text

    def _alike(self, length: int) -> bool:
        """Tell whether a conversation of that many tokens has the keys of others that begin with it."""
        most = self._engine.alike_until
        return most is None or length <= most

    def take_notes(self) -> tuple[str, ...]:
        """Return the lines for the user that have come since the last time."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def close(self) -> None:
        """End a running answer and free the prefix cache's memory; its files stay."""
        self._scheduler.end()
        if self._cache is not None:
            self._cache.close()

    def _piece(self) -> Piece:
        answer = self._answer
        if answer.error is not None:
            self._scheduler.end()
            raise NotFiniteError
        text = "".join(map(self._detokenizer.add, answer.output_ids[self._shown :]))
        self._shown = len(answer.output_ids)
        return Piece(text + (self._detokenizer.rest() if answer.ended else ""), answer.finish_reason)
