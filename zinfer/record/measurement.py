"""What was measured, in the words it is stored in. Every sample is kept; every rate is derived from the samples.

`output_tok_s` counts all generated tokens over prefill and decode together, and is what published tables quote;
`decode_tok_s` leaves out prefill and the first token it yields.
"""

from statistics import mean, median
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_serializer, model_validator

from zinfer.spec.case import Case
from zinfer.spec.value import Frozen

SCHEMA_VERSION = 1

Status = Literal[
    "ok",
    "oom_gpu",
    "oom_host",
    "unsupported",
    "timeout",
    "crashed",
    "nan_output",
    "offload_not_effective",
    "io_error",
    "cancelled",
]


class Effective(Frozen):
    """Where the weights really were, by tier, and how many of them crossed the link in one decode step."""

    gpu_weight_bytes: int
    host_weight_bytes: int = 0
    nvme_weight_bytes: int = 0
    streamed_bytes_per_step: int = 0  # weight bytes that a decode step moves to the device
    wire_bytes_per_step: int | None = None  # of those, what crosses the link; None: as many
    pinned_bytes: int = 0  # host memory page-locked for it, rounding included
    shortfall: str | None = None  # what was asked for and not done, though the engine took the request
    settings: dict[str, Any] = Field(default_factory=dict)  # every knob of the engine, at the value in force


Lane = Literal["copy", "decode", "compute"]  # over the link, from the wire's code to weights, and with them
_Moment = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: round(value, 3) + 0.0)]


class Span(Frozen):
    """What one lane did for one layer, in ms from the beginning of a decode step, to the microsecond; no layer: the
    embedding, the head, and all else outside the layers. Stored as a row, ``["copy",3,17.204,35.391]``: a step has
    hundreds of them.
    """

    lane: Lane
    layer: int | None
    start_ms: _Moment  # negative where it was under way when the step began
    end_ms: _Moment

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, value: Any) -> Any:
        return dict(zip(cls.model_fields, value, strict=True)) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _forwards(self) -> Self:
        if self.end_ms < self.start_ms:
            raise ValueError(f"a span from {self.start_ms} to {self.end_ms} ms")
        return self

    @model_serializer
    def _to_row(self) -> tuple[Lane, int | None, float, float]:
        return self.lane, self.layer, self.start_ms, self.end_ms


class Measurement(Frozen):
    """One point: a case, how it ended, and every sample taken on the way.

    `ttft_ms[r]` is repeat r's prefill up to its first token; `step_ms[r][i]` its decode steps, each synchronised.
    """

    case: Case
    status: Status
    machine: str
    error: str | None = None
    stage: str | None = None  # where it ended if not ok: load, warm-up, prefill, decode
    ttft_ms: tuple[float, ...] = ()
    step_ms: tuple[tuple[float, ...], ...] = ()
    load_s: float | None = None
    load_bytes: int | None = None  # weights that were loaded in that time
    gpu_peak_bytes: int | None = None  # most bytes that tensors held at once
    gpu_used_bytes: int | None = None  # of the device after the point: caches, context and other processes included
    host_peak_bytes: int | None = None
    effective: Effective | None = None
    link_bandwidth: float | None = None  # pinned H2D bytes/s, measured in the same process
    total_layers: int | None = None  # of the whole model; more than effective layers means a slice
    num_layers: int | None = None
    model_revision: str = ""
    gpu: dict[str, Any] = Field(default_factory=dict)  # clocks, power, temperature, throttle reasons during the point
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: str = ""  # ISO 8601, UTC
    predicted: dict[str, float | None] = Field(default_factory=dict)  # what the plan said before
    timeline: tuple[Span, ...] = ()  # of one more decode step after the timed ones; empty where none was traced

    @property
    def usable(self) -> bool:
        """Whether there are samples, and they are those of the case asked for. A point without samples but ``ok`` was
        only tried for whether it fits."""
        return self.status == "ok" and 0 < len(self.ttft_ms) == len(self.step_ms)

    @property
    def load_bandwidth(self) -> float | None:
        """Weight bytes a second of the load, coding and page-locking included."""
        return self.load_bytes / self.load_s if self.load_bytes and self.load_s else None

    @property
    def e2e_ms(self) -> tuple[float, ...]:
        """Prefill and decode of each repeat."""
        return tuple(first + sum(steps) for first, steps in zip(self.ttft_ms, self.step_ms, strict=True))

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first, over all repeats: (e2e - ttft) / (output_len - 1)."""
        steps = [step for repeat in self.step_ms for step in repeat]
        return mean(steps) if steps else None

    @property
    def step_median_ms(self) -> float | None:
        steps = [step for repeat in self.step_ms for step in repeat]
        return median(steps) if steps else None

    @property
    def output_tok_s_samples(self) -> tuple[float, ...]:
        """B · n / e2e of each repeat."""
        tokens = self.case.workload.batch_size * self.case.workload.output_len
        return tuple(tokens / e2e * 1e3 for e2e in self.e2e_ms)

    @property
    def output_tok_s(self) -> float | None:
        samples = self.output_tok_s_samples
        return mean(samples) if samples else None

    @property
    def decode_tok_s(self) -> float | None:
        """B (n - 1) over the sum of the decode steps."""
        tpot = self.tpot_ms
        return self.case.workload.batch_size / tpot * 1e3 if tpot else None

    @property
    def prefill_tok_s(self) -> float | None:
        if not self.ttft_ms:
            return None
        return self.case.workload.batch_size * self.case.workload.input_len / mean(self.ttft_ms) * 1e3

    @property
    def h2d_bandwidth(self) -> float | None:
        """Weight bytes a second that decode moved to the device, the median step taken."""
        step = self.step_median_ms
        if self.effective is None or not self.effective.streamed_bytes_per_step or not step:
            return None
        return self.effective.streamed_bytes_per_step / step * 1e3

    @property
    def link_share(self) -> float | None:
        """Achieved over measured link bandwidth; above 1 when fewer bytes cross than are used (compression)."""
        achieved = self.h2d_bandwidth
        return achieved / self.link_bandwidth if achieved and self.link_bandwidth else None
