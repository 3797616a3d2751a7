"""Record of `zinfer accuracy`: how far an engine's output moves when one of its settings changes.

A reference and a changed setting get the same tokens; at each position both say how likely every next token is. If rows
follow the reference's own greedy tokens (`own`), a setting that runs freely takes the same way up to the first position
where its most likely token is another one, so both are known from one pass. Greedy text is easy for a model; rows that
follow a given text (`text`) show the effect elsewhere, and the text's perplexity.

The first position of a row is its prefill's, which no setting of the KV cache changes.
"""

from collections.abc import Sequence
from math import exp, inf
from pathlib import PurePath
from statistics import fmean, median_low
from typing import ClassVar, Literal, NamedTuple, Self, get_args

from zinfer.core.case import Case
from zinfer.core.engine import plan_options
from zinfer.core.errors import ZinferError
from zinfer.core.model import Weights
from zinfer.core.units import figures
from zinfer.core.value import Frozen
from zinfer.record.measurement import Status
from zinfer.record.study import Study

Along = Literal["own", "text"]
COLUMNS = (
    "setting", "tokens fed", "#positions", "#logit error", "#largest", "#KL, nats", "#largest KL", "#same token",
    "#perplexity", "#same texts", "#tokens before a difference",
)  # fmt: skip


class AccuracyError(ZinferError):
    """A comparison that cannot be made; the message says what to do next."""


class Position(NamedTuple):
    """Deviation at one next token. The logits' error is the root of the mean square over the vocabulary, over the
    standard deviation of the reference's logits; KL is the divergence of the distribution from the reference's."""

    error: float
    kl: float  # nats
    same: float  # 1 if the most likely token is that of the reference, else 0
    reference_nats: float  # -ln p of the token that came next, by the reference
    nats: float  # the same by the setting


class Deviation(Frozen):
    """Deviation over all positions of `rows` rows: means, and the largest.

    `first_differences`, of rows that follow the reference's own tokens, counts the tokens of each row before the first
    one that differs, None if all are the same.
    """

    case: Case
    along: Along
    rows: int
    positions: int
    error: float
    error_max: float
    kl: float
    kl_max: float
    agreement: float
    reference_perplexity: float | None = None  # perplexity of a text; None on the reference's own tokens
    perplexity: float | None = None
    first_differences: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, case: Case, along: Along, rows: Sequence[Sequence[Position]]) -> Self:
        """Return the deviation over `rows` of positions, one row at least."""
        every = [position for row in rows for position in row]
        perplexities: dict[str, float | None] = {}
        first: tuple[int | None, ...] = ()
        if along == "text":
            perplexities = {
                "reference_perplexity": exp(fmean(position.reference_nats for position in every)),
                "perplexity": exp(fmean(position.nats for position in every)),
            }
        else:
            first = tuple(next((i for i, position in enumerate(row) if not position.same), None) for row in rows)
        return cls(
            case=case,
            along=along,
            rows=len(rows),
            positions=len(every),
            error=fmean(position.error for position in every),
            error_max=max(position.error for position in every),
            kl=fmean(position.kl for position in every),
            kl_max=max(position.kl for position in every),
            agreement=fmean(position.same for position in every),
            first_differences=first,
            **perplexities,
        )

    @property
    def identical(self) -> float | None:
        """Share of rows whose greedy text is the reference's to the end."""
        return self.first_differences.count(None) / self.rows if self.first_differences else None

    @property
    def first_difference(self) -> float | None:
        """Median of `first_differences`, infinite if most rows have none."""
        found = [inf if tokens is None else tokens for tokens in self.first_differences]
        return median_low(found) if found else None


class Failed(Frozen):
    """A setting without numbers, and the reason."""

    case: Case
    status: Status
    error: str


class Prompts(Frozen):
    """Text that rows begin with and follow: its name, the sha256 of its UTF-8, its length in tokens."""

    name: str
    sha256: str
    tokens: int


class AccuracyRecord(Study):
    """One run of `zinfer accuracy`; logits were of type `logits_dtype`."""

    KIND: ClassVar[str] = "accuracy"
    POINTS: ClassVar[tuple[str, ...]] = ("deviations", "failed")

    told: str  # description of the model
    revision: str
    reference: Case
    logits_dtype: str
    samples: int  # pieces of the text; each makes a row along it and one along the reference's own tokens
    prompts: Prompts
    deviations: tuple[Deviation, ...]
    failed: tuple[Failed, ...] = ()

    @property
    def title(self) -> str:
        """Model, reference and machine, and a warning where the weights mean nothing."""
        load = self.reference.workload
        dummy = "RANDOM WEIGHTS, which say nothing of a model: " if self.reference.load_format == "dummy" else ""
        lengths = f"{load.input_len} tokens in, {load.output_len} followed"
        return f"{dummy}{self.reference.model}, against {self.reference.label()}, {lengths}, on {self.machine}"

    @property
    def compared(self) -> tuple[Case, ...]:
        """Settings that have numbers, without the reference in other batches."""
        batch_size = self.reference.workload.batch_size
        return tuple(dict.fromkeys(d.case for d in self.deviations if d.case.workload.batch_size == batch_size))

    def label(self, case: Case) -> str:
        """Return the settings in which `case` differs from the reference, as text."""
        batch_size = case.workload.batch_size
        found = [f"{key}={value}" for key, value in case.options if (key, value) not in self.reference.options]
        if case.model != self.reference.model:
            # A copy in the default folder is told by its format.
            found.insert(0, f"weights={PurePath(case.model).name.rpartition(f'-{self.revision}-')[2]}")
        found += [f"batch {batch_size}"] * (batch_size != self.reference.workload.batch_size)
        return " ".join(found) or "none"

    def of(self, case: Case) -> tuple[Deviation, ...]:
        """Return the deviations by the settings that make a measured `case` lossy; none if they were not compared on
        its model and engine, or with random weights."""
        reference = self.reference
        if (PurePath(case.model), case.layers) != (PurePath(reference.model), reference.layers):
            return ()
        if not case.lossy or reference.load_format == "dummy":
            return ()
        found = (one for one in self.deviations if one.case.engine == case.engine)
        return tuple(one for one in found if _rounding(one.case, reference.model) == _rounding(case, case.model))

    def cells(self, deviations: Sequence[Deviation] | None = None) -> list[tuple[str, ...]]:
        """Return a row of text for each deviation, or each of `deviations`, under `COLUMNS`."""
        return [
            (
                self.label(one.case),
                one.along,
                f"{one.positions:,}",
                _percent(one.error),
                _percent(one.error_max),
                f"{one.kl:.3g}",
                f"{one.kl_max:.3g}",
                f"{one.agreement:.2%}",
                _change(one.reference_perplexity, one.perplexity),
                "" if one.identical is None else f"{one.identical:.0%} of {one.rows}",
                _tokens(one.first_difference, one.case.workload.output_len),
            )
            for one in (self.deviations if deviations is None else deviations)
        ]


def _rounding(case: Case, model: str) -> tuple[str, str]:
    """Return the formats of the weights and of the KV cache. A copy of `model` that `zinfer pack --weights` wrote has
    the format at the end of its name."""
    formats = (name for name in get_args(Weights) if case.model.endswith(f"-{name}"))
    weights = case.weights if case.model == model else next(formats, case.model)
    options = plan_options(case.engine, case.options)
    return weights, options.kv_cache_dtype if options.kv_in_8_bits else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{figures(before, 4)} {round(after / before - 1, 4) + 0.0:+.2%}"


def _tokens(count: float | None, most: int) -> str:
    return "" if count is None else f"all {most}" if count == inf else str(count)
