"""Record of `zinfer reuse`: TTFT with a conversation's keys and values reloaded from host memory or from disk, against
computing them again.

Computing takes the whole model for every token, and streamed weights one pass at least, which a reload needs as well.
So a short context gains nothing, and from some context on, the break-even, a reload is faster.
"""

from collections.abc import Sequence
from math import log
from pathlib import PurePath
from statistics import median
from typing import Any, ClassVar, Literal, Self

from zinfer.core.case import Case
from zinfer.core.units import duration, figures, gb
from zinfer.core.value import Frozen
from zinfer.record.study import Study

COLUMNS = ("#context", "#kept", "#recompute", "#memory", "#faster", "#disk", "#faster", "token", "#logits")

ReloadSource = Literal["memory", "disk"]
SOURCES: tuple[ReloadSource, ...] = ("memory", "disk")


class Point(Frozen):
    """Prefills of `context` tokens, all but `new_tokens` of which were kept, in `kept_bytes`: every sample of the TTFT,
    in ms. A context that was not measured has a reason in `skipped`.

    `max_difference` is the largest between any logit computed and reloaded.
    """

    context: int
    new_tokens: int
    kept_bytes: int = 0
    recompute_ms: tuple[float, ...] = ()
    memory_ms: tuple[float, ...] = ()
    disk_ms: tuple[float, ...] = ()
    same_token: bool | None = None
    max_difference: float | None = None
    skipped: str | None = None

    def samples(self, source: ReloadSource) -> tuple[float, ...]:
        return self.memory_ms if source == "memory" else self.disk_ms

    def gain(self, source: ReloadSource) -> float | None:
        """Return the speed-up of a reload over computing, by medians; None if one was not measured."""
        own = self.samples(source)
        return median(self.recompute_ms) / median(own) if own and self.recompute_ms else None

    @property
    def cells(self) -> tuple[str, ...]:
        """Medians of the point as text, under `COLUMNS`."""
        sources: list[str] = []
        for source in SOURCES:
            gain = self.gain(source)
            sources += ["", ""] if gain is None else [median_text(self.samples(source)), f"{gain:.2f}x"]
        return (
            f"{self.context:,}", gb(self.kept_bytes), median_text(self.recompute_ms), *sources,
            "same" if self.same_token else "OTHER",
            "" if self.max_difference is None else figures(self.max_difference, 2),
        )  # fmt: skip


class Run(Study):
    """One load (`case`, whose workload means nothing) over context lengths."""

    KIND: ClassVar[str] = "reuse"
    POINTS: ClassVar[tuple[str, ...]] = ("points",)

    case: Case
    num_layers: int
    total_layers: int
    model_revision: str = ""
    link: float | None = None  # bytes a second, host to device, just before the load
    points: tuple[Point, ...]

    @classmethod
    def from_document(cls, document: Any) -> tuple[Self, ...]:
        """Return the runs of a document, which names machine and device once for all of them. Raises ValueError."""
        try:
            shared = {"machine": document["machine"], "device": document["device"]}
            return tuple(cls.model_validate(run | shared) for run in document["runs"])
        except KeyError as error:
            raise ValueError(f"it lacks {error}") from None
        except TypeError:
            raise ValueError("it is no object with machine, device and runs") from None

    @property
    def measured(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.recompute_ms)

    @property
    def title(self) -> str:
        """Model, slice and load: ``bloom-176b, 14 of 70 layers, stream cpu``."""
        local = self.case.model.startswith((".", "/", "~"))
        name = PurePath(self.case.model).name if local else self.case.model
        part = "" if self.case.layers is None else f", {self.num_layers} of {self.total_layers} layers"
        return f"{name}{part}, {self.case.label()}"

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Break-even from memory and from disk, and contexts that were skipped, a line each."""
        found = (verdict(self.points, source) for source in SOURCES)
        skipped = (f"{point.context:,} tokens skipped: {point.skipped}" for point in self.points if point.skipped)
        return (*filter(None, found), *skipped)

    @property
    def conditions(self) -> str:
        weights = "dummy weights" if self.case.load_format == "dummy" else "weights of the checkpoint"
        new = ", ".join(sorted({str(point.new_tokens) for point in self.points}))
        link = "" if self.link is None else f", link {gb(self.link)}/s"
        return f"{weights}, {self.case.dtype}{link}; the last {new} tokens are new"


def break_even(points: Sequence[Point], source: ReloadSource) -> float | None:
    """Return the context in tokens from which on a reload is faster: between the last measured one where it is not and
    the next, on a line through the logarithms of both gains. It is 0 if a reload always is, infinite if it is not at
    the longest context; None if nothing was measured."""
    known = sorted((point.context, gain) for point in points if (gain := point.gain(source)) is not None)
    losing = [index for index, (_, gain) in enumerate(known) if gain <= 1]
    if not known:
        return None
    if not losing:
        return 0.0
    if losing[-1] == len(known) - 1:
        return float("inf")
    (before, below), (after, above) = known[losing[-1] : losing[-1] + 2]
    share = -log(below) / (log(above) - log(below))
    return float(before * (after / before) ** share)


def verdict(points: Sequence[Point], source: ReloadSource) -> str | None:
    """Return the break-even in words; None if nothing was measured."""
    found = break_even(points, source)
    if found is None:
        return None
    contexts = [point.context for point in points if point.gain(source) is not None]
    if found == 0:
        return f"reload from {source} always wins, from {min(contexts):,} tokens on"
    if found == float("inf"):
        wins = any((point.gain(source) or 0) > 1 for point in points)
        return f"reload from {source} {'does not win at' if wins else 'never wins, up to'} {max(contexts):,} tokens"
    return f"reload from {source} wins from {round(found):,} tokens on"


def median_text(samples_ms: Sequence[float]) -> str:
    """Return the median of samples, with its unit."""
    return duration(median(samples_ms) / 1e3)
