"""A conversation on an engine, in the worker: a step at a time, so that whoever asks may stop at any token.

After each answer what was computed goes to a shelf; the next turn takes up what it finds there.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinfer.engine.base import Engine
from zinfer.generation.detokenizer import Detokenizer, Dialogue
from zinfer.generation.generate import Sampling, choose, eos_token_ids, load_tokenizer
from zinfer.generation.passes import decode, prefill
from zinfer.generation.prefix_cache import PrefixCache
from zinfer.plan.plan import Plan
from zinfer.spec.model import ModelError
from zinfer.spec.source import revision_of


def shelf_identity(plan: Plan) -> dict[str, str]:
    """What tells the keys and values of a plan's model from those of all others, whichever engine computed them."""
    spec = plan.model
    return {
        "model": Path(spec.name).name,
        "revision": revision_of(spec, plan.case.load_format),
        "dtype": spec.dtype,
        "layers": str(spec.num_layers),
    }


class Chat:
    """One conversation. `open` comes first; a turn is an `ask`, a `go_on` for each further token, and an `end`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokenizer: Any = load_tokenizer(plan.model)
        self._shelf: PrefixCache | None = None
        self._notes: list[str] = []

    def open(
        self, engine: Engine, sampling: dict[str, Any], system: str | None, size: int, folder: str | None,
        folder_size: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Begin a conversation; `size` and `folder_size` are bytes. Returns ``notes``, lines for the user, as `ask` and
        `end` do, too."""
        self._sampling = Sampling.model_validate(sampling)
        self._ends = frozenset() if self._sampling.ignore_eos else eos_token_ids(self._plan.model, self._tokenizer)
        self._generator = torch.Generator(engine.device).manual_seed(self._sampling.seed)
        self._dialogue = Dialogue(self._tokenizer, system)
        if not self._dialogue.template:
            self._notes.append("the model has no chat template: turns and answers follow each other as they are")
        if (why_not := engine.cannot_snapshot()) is not None:
            self._notes.append(f"each turn computes the whole conversation: {why_not}")
        else:
            where = None if folder is None else Path(folder)
            if self._shelf is not None:
                self._shelf.close()
            pin, say = engine.device.type == "cuda", self._notes.append
            self._shelf = PrefixCache(shelf_identity(self._plan), size, where, folder_size, say, pin)
        return self._told()

    def ask(self, engine: Engine, turn: str) -> dict[str, Any]:
        """A user's turn and the first token of its answer: how many tokens were ``reloaded`` and ``computed``, in how
        many ``seconds``; and what `go_on` returns.

        Raises ModelError where the model's positions leave no room for an answer.
        """
        began = time.monotonic()
        spec = self._plan.model
        self._ids = ids = self._dialogue.ask(turn)
        self._left = self._sampling.output_len
        if spec.max_position is not None:
            self._left = min(self._left, spec.max_position - len(ids))
        if self._left < 1:
            raise ModelError(f"the conversation has {len(ids)} tokens, and {spec.name} {spec.max_position} positions")
        parts = self._shelf.find(ids) if self._shelf is not None else []
        reloaded = sum(part.length for part in parts)
        token_ids = torch.tensor([ids])
        self._answer: list[int] = []
        self._steps = 0
        self._spelling = Detokenizer(self._tokenizer)
        self._batch, logits = prefill(engine, token_ids, torch.ones_like(token_ids), self._left, parts)
        piece = self._take(logits)
        seconds = time.monotonic() - began
        return {"reloaded": reloaded, "computed": len(ids) - reloaded, "seconds": seconds} | piece | self._told()

    def go_on(self, engine: Engine) -> dict[str, Any]:
        """The next token: the ``text`` that it completes, and ``ended``: None, ``stop`` at an end token, ``length``; in
        how many ``seconds``."""
        began = time.monotonic()
        piece = self._take(decode(engine, self._batch, self._chosen))
        self._steps += 1
        return piece | {"seconds": time.monotonic() - began}

    def end(self, engine: Engine) -> dict[str, Any]:
        """End the answer, as far as it is, and keep what was computed: its ``output_ids`` and ``output_text``."""
        text = self._dialogue.answered(self._answer)
        if self._shelf is not None:
            self._shelf.keep(self._ids + self._answer[: self._steps], engine, self._batch)
        engine.retire(self._batch)
        return {"output_ids": self._answer, "output_text": text} | self._told()

    def _take(self, logits: Tensor) -> dict[str, Any]:
        """Choose the next token from ``[1, V]`` logits."""
        if not bool(logits.max().isfinite()):
            raise ModelError("the model's output is not a number")
        self._chosen = choose(logits, self._sampling, self._generator)
        token = int(self._chosen[0])
        if token in self._ends:
            return {"text": self._spelling.rest(), "ended": "stop"}
        self._answer.append(token)
        text = self._spelling.add(token)
        last = len(self._answer) == self._left
        return {"text": text + (self._spelling.rest() if last else ""), "ended": "length" if last else None}

    def _told(self) -> dict[str, Any]:
        notes = list(self._notes)
        self._notes.clear()
        return {"notes": notes}
