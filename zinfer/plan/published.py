"""Ratios that others have published, to compare with planned ones; and sizes of their lossless codecs.

If every weight crosses the link at each step, two machines differ as their links do. A published ratio below that means
that the engine reached a smaller share of the faster link than of the one it was calibrated on; this share follows from
the ratio.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Annotated, ClassVar

from pydantic import Field

from zinfer.core.value import Frozen
from zinfer.plan.planner import Plan
from zinfer.plan.times import Efficiency

Text = Annotated[str, Field(max_length=1000)]
Ratio = Annotated[float, Field(gt=0, le=1e6)]


class Published(Frozen):
    """Published throughput on `machine` over that on the machine `over`."""

    claim: Text
    engine: Text
    machine: Text
    over: Text
    low: Ratio
    high: Ratio
    source: Text


class PublishedCodec(Frozen):
    """Size of bf16 weights after another lossless codec, as a share."""

    columns: ClassVar = ("codec", "#size", "weights", "source")

    codec: str
    low: float
    high: float
    weights: str
    source: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Text under `columns`."""
        low, high = f"{100 * self.low:g}", f"{100 * self.high:g}%"
        return self.codec, high if self.low == self.high else f"{low}-{high}", self.weights, self.source


def codecs() -> tuple[PublishedCodec, ...]:
    """Return the published codecs of the catalogue."""
    with (files("zinfer") / "catalog" / "codecs.toml").open("rb") as file:
        return tuple(PublishedCodec(codec=name, **entry) for name, entry in tomllib.load(file).items())


class RatioComparison(Frozen):
    """Published ratio and the planned one, None without a plan."""

    published: Published
    planned: float | None = None
    share: float  # share of the link that the plan assumes

    @property
    def explaining(self) -> tuple[float, float] | None:
        """Shares of the faster link that give the published ratios; None if the plan agrees or is unknown."""
        claim = self.published
        if self.planned is None or claim.low <= self.planned <= claim.high:
            return None
        return self.share * claim.low / self.planned, self.share * claim.high / self.planned

    def describe(self) -> str:
        """Return the comparison of both ratios in one or two sentences."""
        claim = self.published
        head = f"{claim.claim} with {claim.engine}: published {claim.low:g}-{claim.high:g}x ({claim.source}), planned"
        if self.planned is None:
            return f"{head} unknown."
        text = f"{head} {self.planned:.1f}x."
        if self.explaining is not None:
            low, high = self.explaining
            text += f" The published ratio is that of {low:.0%} to {high:.0%} of the link instead of {self.share:.0%}."
        return text


def compare_ratios(
    claims: Iterable[Published], plans: Iterable[Plan], efficiencies: Mapping[str, Efficiency]
) -> Iterator[RatioComparison]:
    """Yield each claim with its planned ratio: that of the first plans of its engine on its two machines."""
    rates: dict[tuple[str, str], float | None] = {}
    for plan in plans:
        rates.setdefault((plan.case.engine, plan.machine.name), plan.output_tok_s if plan.fits else None)
    for claim in claims:
        rate, base = (rates.get((claim.engine, name)) for name in (claim.machine, claim.over))
        share = efficiencies[claim.engine].link_share if claim.engine in efficiencies else 1.0
        yield RatioComparison(published=claim, planned=rate / base if rate and base else None, share=share)
