"""Record of `zinfer routing`: hits of a cache of experts, by its policy and size, on the routing of a mixture.

A *need* is an expert that a layer chose for a token of a step. It is a hit if the expert was on the device already.
With experts chosen evenly and at random, a cache that holds a share of them meets the same share of the needs, whatever
its policy.
"""

from typing import ClassVar

from pydantic import Field

from zinfer.core.model import ExpertPolicy
from zinfer.core.value import Frozen
from zinfer.record.study import Study

Share = float  # 0 to 1
COLUMNS = ("cache", "#experts", "#hits with lru", "#hits with lfu")
POLICIES: tuple[ExpertPolicy, ...] = ("lru", "lfu")


class Hits(Frozen):
    """Needs of steps of `batch_size` tokens met by a cache of `experts` experts of all layers, as a share of all
    needs."""

    policy: ExpertPolicy
    experts: int
    hits: Share = Field(ge=0, le=1)
    batch_size: int = Field(default=1, ge=1)


class Touched(Frozen):
    """Experts of a layer that a step of `batch_size` tokens needs, as a share of all of them, on average."""

    batch_size: int = Field(ge=2)
    share: Share = Field(ge=0, le=1)


class RoutingRecord(Study):
    """One run of `zinfer routing`: `tokens` tokens of a text, one at a time and several side by side, through
    `num_layers` layers of routed experts. `guessed` is the share of right guesses among those for the next layer; None
    if there were none."""

    KIND: ClassVar[str] = "routing"
    POINTS: ClassVar[tuple[str, ...]] = ("rows", "touched")

    model: str
    told: str  # description of the model
    text: str
    tokens: int
    num_layers: int
    num_experts: int  # of a layer
    experts_per_token: int
    guessed: Share | None = Field(default=None, ge=0, le=1)
    rows: tuple[Hits, ...]
    touched: tuple[Touched, ...] = ()  # of steps of several tokens, ascending; runs of earlier versions have none

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the cache, ascending."""
        return tuple(sorted({row.experts for row in self.rows}))

    def hits(self, policy: str, experts: int) -> float:
        """Return the share of the needs of single tokens that a cache of `experts` experts meets: that of the largest
        measured one that is not larger, and none below the smallest."""
        known = [row for row in self.rows if row.policy == policy and row.experts <= experts and row.batch_size == 1]
        return max(known, key=lambda row: row.experts).hits if known else 0.0

    def cells(self) -> list[tuple[str, ...]]:
        """Return a row of text for each size, under `COLUMNS`."""
        every = self.num_layers * self.num_experts
        return [
            (f"{size / every:.0%}", str(size), *(f"{self.hits(policy, size):.1%}" for policy in POLICIES))
            for size in self.sizes
        ]

    def verdict(self) -> str:
        """Return how the policies, the guesses and the experts of several tokens compare with chance, in a sentence
        each."""
        best = {size: max(POLICIES, key=lambda one: self.hits(one, size)) for size in self.sizes}
        won = sum(policy == "lru" for policy in best.values())
        said = f"lru meets more needs at {won} of {len(best)} sizes, lfu at the others."
        chance = self.experts_per_token / self.num_experts
        if self.guessed is not None:
            said += f" Guesses of the next layer's experts: {self.guessed:.0%} right; at random, {chance:.0%} would be."
        if self.touched:
            last = self.touched[-1]
            evenly = 1 - (1 - chance) ** last.batch_size
            said += (
                f" A step of {last.batch_size} tokens touches {last.share:.0%} of the experts; at random, {evenly:.0%}."
            )
        return said
