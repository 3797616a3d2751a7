"""The contract of an engine: two verbs, so that one loop, one clock and one sampler serve all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zinfer.engine import ENGINES, EngineError
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Effective, Span

if TYPE_CHECKING:
    from zinfer.engine.kv_snapshot import KVSnapshot

Progress = Callable[[str, float], None]  # what is being done, and the share of it that is done (0 to 1)


def silent(_what: str, _share: float) -> None:
    """Progress nobody watches."""


class Engine(ABC):
    """A model ready to run. Constructed means loaded; every error of loading is raised by the constructor."""

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        self.plan = plan
        defaults = ENGINES[plan.case.engine].options if plan.case.engine in ENGINES else {}
        self.options: dict[str, Any] = {**defaults, **dict(plan.case.options)}
        self.progress = progress
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @classmethod
    def unable(cls) -> str | None:
        """Why this machine cannot run the engine though all it requires is installed; None when it can."""
        return None

    @abstractmethod
    def prefill(
        self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0, past: "Sequence[KVSnapshot]" = ()
    ) -> Tensor:
        """Start a batch over: ``[B, S]`` left-padded prompts (int64) and their mask (1 real, 0 padding) to the last
        position's logits ``[B, V]`` on the device. The KV cache gets room for ``reserve`` further tokens; a batch that
        was running is forgotten.

        `past` is what was kept of the first positions of these rows, one part after the other: only what follows is
        computed, which must be a position at least. No part may be closed before the logits are there. Raises
        EngineError for a past that is not of these rows, and where `cannot_keep` says why.
        """

    @abstractmethod
    def decode(self, token_ids: Tensor) -> Tensor:
        """One step for all rows: the tokens chosen last, ``[B]``, to the next logits ``[B, V]``, both on the device."""

    def cannot_keep(self) -> str | None:
        """Why the engine can neither keep what it computed nor take it up again; None where it can do both."""
        return f"engine {self.plan.case.engine} keeps no keys and values"

    def keep(self, first: int, last: int) -> "KVSnapshot":
        """A copy, in host memory, of the running batch's keys and values of the positions from `first` up to `last`,
        which have been computed. Raises EngineError where `cannot_keep` says why, MemoryError where there is no room.
        """
        raise EngineError(self.cannot_keep() or "there is nothing to keep")

    def timeline(self, token_ids: Tensor) -> tuple[Span, ...]:
        """One more decode step, traced; empty, and no step made, where the engine cannot tell.

        All that was under way during the step is told, also copies that began before it or end after it. A span begins
        when its stream has done waiting: what no span of a lane covers counts as idle.
        """
        return ()

    @abstractmethod
    def effective(self) -> Effective:
        """Where the weights are and what a step streams, as it really is, counted and not planned."""

    def release(self) -> None:  # noqa: B027 - an engine without state of its own has nothing to do
        """Forget the running batch and free its KV cache; weights stay."""

    def close(self) -> None:  # noqa: B027
        """Free everything, page-locked memory included. Safe to call twice."""
