"""Measurements as they are stored. Every sample is kept; every rate is derived from the samples."""

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, TypeAdapter, model_validator

from zinfer.core.case import Case, Name
from zinfer.core.engine import plan_options
from zinfer.core.value import Frozen
from zinfer.record.bounds import LONGEST_MS, AtLeastOne, Bounded, Count, EngineSettings, Ms, NotNegative, Positive, Text
from zinfer.record.bounds import Versions as Versions

Status = Literal[
    "ok", "oom_gpu", "oom_host", "unsupported", "timeout", "crashed", "nan_output", "offload_not_effective", "io_error",
    "cancelled",
]  # fmt: skip


class Effective(Frozen):
    """Counted placement: weight bytes by tier, and bytes of a decode step."""

    gpu_weight_bytes: Count
    host_weight_bytes: Count = 0
    nvme_weight_bytes: Count = 0
    streamed_bytes_per_step: Count = 0  # weight bytes that a decode step moves to the device, decoded
    wire_bytes_per_step: Count | None = None  # the same as they cross the link, coded; None: as many
    nvme_bytes_per_step: Count = 0  # weight bytes that a decode step of `stream` reads from disk, as they lie there
    pinned_bytes: Count = 0  # page-locked host memory, rounding included
    shortfall: Text | None = None  # requested behaviour that the engine accepted and did not deliver
    settings: EngineSettings = Field(default_factory=dict)  # every setting of the engine, at the value in force

    @property
    def wire_bytes(self) -> int:
        """Weight bytes that cross the link in a step, as coded."""
        return self.streamed_bytes_per_step if self.wire_bytes_per_step is None else self.wire_bytes_per_step


# Read from disk, copy over the link, gather the parts of several GPUs, unpack the wire's code, compute with weights.
Lane = Literal["disk", "copy", "gather", "unpack", "compute"]
Carried = Literal["expert", "guess"]  # what a copy carries: experts that were chosen, or guessed to be
Moment = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: round(value, 3) + 0.0)]
SpanMs = Annotated[Moment, Field(ge=-1e7, le=LONGEST_MS)]  # spans may begin before their step


class Span(NamedTuple):
    """Work of a lane for a layer, ms since the step began; by the device's clock, but for the disk."""

    lane: Lane
    layer: Count | None  # None: embedding, head, and all else outside the layers
    start_ms: SpanMs  # negative if it was under way when the step began
    end_ms: SpanMs
    carries: Carried | None = None
    rank: Count = 0  # number of the GPU

    def row(self) -> list[Any]:
        """Return the stored row: ``["copy", 3, 17.204, 35.391]``."""
        times = (round(self.start_ms, 3) + 0.0, round(self.end_ms, 3) + 0.0)
        return [self.lane, self.layer, *times, *((self.carries, self.rank) if self.rank else filter(None, self[4:5]))]


def _renamed(rows: Any) -> Any:
    """Return rows of spans with today's name of the lane ``decode``."""
    if not isinstance(rows, list | tuple):
        return rows
    return [("unpack", *row[1:]) if isinstance(row, list | tuple) and "decode" in row[:1] else row for row in rows]


def _in_a_step(timeline: tuple[Span, ...]) -> tuple[Span, ...]:
    if any(span.start_ms > span.end_ms for span in timeline):
        raise ValueError("a span ends at a time in ms, not before its start")
    if timeline and max(span.end_ms for span in timeline) <= 0:
        raise ValueError("a step of no length")
    return timeline


Timeline = Annotated[
    tuple[Span, ...],
    BeforeValidator(_renamed),
    AfterValidator(_in_a_step),
    PlainSerializer(lambda timeline: [span.row() for span in timeline]),
]
spans: Callable[[Any], tuple[Span, ...]] = TypeAdapter(Timeline).validate_python


class Recorded(Frozen):
    """Facts of every measured point: case, status, and conditions."""

    case: Case
    status: Status
    machine: Name
    error: Text | None = None
    stage: Text | None = None  # stage of the failure: load, warm-up, prefill, decode, requests
    load_s: Positive | None = None
    load_bytes: AtLeastOne | None = None  # weight bytes read, or made, in `load_s`, as they are stored
    gpu_peak_bytes: Count | None = None  # peak of the bytes that tensors held
    gpu_used_bytes: Count | None = None  # bytes in use on the device after the point: caches, context, other processes
    host_peak_bytes: Count | None = None
    effective: Effective | None = None
    link_bandwidth: Positive | None = None  # pinned H2D bytes/s, measured in the same process
    all_links_bandwidth: Positive | None = None  # of several GPUs at once, from the memory that the weights lie in
    total_layers: AtLeastOne | None = None  # layers of the whole model; more than `num_layers` means a slice
    num_layers: AtLeastOne | None = None
    model_revision: Text = ""
    gpu: Bounded = Field(default_factory=dict)  # clocks, power, temperature, throttle reasons during the point
    versions: Versions = Field(default_factory=dict)
    started_at: Name = ""  # ISO 8601, UTC
    command: Text | None = None  # of a server: the command line that started it, and its version
    predicted: dict[Name, NotNegative | None] = Field(default_factory=dict)  # predictions of the plan, by quantity

    @model_validator(mode="after")
    def _a_slice(self) -> Self:
        if self.num_layers and self.total_layers and self.num_layers > self.total_layers:
            raise ValueError(f"num_layers: {self.num_layers} of {self.total_layers} layers")
        return self

    @property
    def gpu_bytes(self) -> int | None:
        """Peak bytes of tensors, with a library's own GPU memory."""
        own = int(self.effective.settings.get("library_gpu_bytes") or 0) if self.effective else 0
        return None if self.gpu_peak_bytes is None else self.gpu_peak_bytes + own

    @property
    def gpus(self) -> int:
        """Number of GPUs that the load took, each with its own link."""
        return plan_options(self.case.engine, self.case.options).gpus

    @property
    def links_bandwidth(self) -> float | None:
        """Bytes a second of all links, at once if that was measured."""
        return self.all_links_bandwidth or (self.link_bandwidth and self.link_bandwidth * self.gpus)


class Measurement(Recorded):
    """One point: a case, its status, and every sample taken."""

    ttft_ms: tuple[Ms, ...] = ()  # of each repeat: its prefill up to its first token
    step_ms: tuple[tuple[Ms, ...], ...] = ()  # decode steps of each repeat, each synchronised
    timeline: Timeline = ()  # one more decode step after the timed ones; empty if none was traced

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps, tokens = {*map(len, self.step_ms)}, self.case.workload.output_len
        if len(self.ttft_ms) != len(self.step_ms):
            raise ValueError(f"step_ms: {len(self.step_ms)} repeats, and ttft_ms has {len(self.ttft_ms)}")
        if self.status == "ok" and not steps <= {tokens - 1}:
            raise ValueError(f"step_ms: {min(steps)} steps for {tokens} tokens, the first of which is the prefill's")
        if self.timeline and (rank := max(span.rank for span in self.timeline)) >= self.gpus:
            raise ValueError(f"timeline: GPU {rank} of {self.gpus}")
        return self

    @property
    def usable(self) -> bool:
        """True if the point has samples. (An ``ok`` point without was only tried for whether it fits.)"""
        return self.status == "ok" and 0 < len(self.ttft_ms) == len(self.step_ms)

    @property
    def load_bandwidth(self) -> float | None:
        """Weight bytes a second of the load, coding and page-locking included."""
        return self.load_bytes / self.load_s if self.load_bytes and self.load_s else None

    @cached_property
    def e2e_ms(self) -> tuple[float, ...]:
        """Time of prefill and decode of each repeat, in ms."""
        return tuple(first + sum(steps) for first, steps in zip(self.ttft_ms, self.step_ms, strict=True))

    @property
    def mean_ttft_ms(self) -> float | None:
        """Mean time to the first token, in ms."""
        return fmean(self.ttft_ms) if self.ttft_ms else None

    @property
    def steps_ms(self) -> list[float]:
        """Decode steps of all repeats, in ms."""
        return [step for repeat in self.step_ms for step in repeat]

    @cached_property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first, in ms."""
        return fmean(steps) if (steps := self.steps_ms) else None

    @cached_property
    def step_median_ms(self) -> float | None:
        """Median decode step over all repeats, in ms."""
        return median(steps) if (steps := self.steps_ms) else None

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated in all repeats."""
        return len(self.ttft_ms) * self.case.workload.batch_size * self.case.workload.output_len

    @cached_property
    def output_tok_s_samples(self) -> tuple[float, ...]:
        """Output throughput of each repeat, in tok/s: B · n / e2e."""
        tokens = self.case.workload.batch_size * self.case.workload.output_len
        return tuple(tokens / e2e * 1e3 for e2e in self.e2e_ms)

    @cached_property
    def output_tok_s(self) -> float | None:
        """Mean of `output_tok_s_samples`: prefill counts, as in published tables."""
        return fmean(self.output_tok_s_samples) if self.output_tok_s_samples else None

    @property
    def decode_tok_s(self) -> float | None:
        """Decode throughput: B (n - 1) over the decode steps' sum."""
        tpot = self.tpot_ms
        return self.case.workload.batch_size / tpot * 1e3 if tpot else None

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens a second of the mean prefill."""
        workload, first_ms = self.case.workload, self.mean_ttft_ms
        return workload.batch_size * workload.input_len / first_ms * 1e3 if first_ms else None

    @property
    def h2d_bandwidth(self) -> float | None:
        """Weight bytes a second over all links in the median step."""
        step = self.step_median_ms
        if self.effective is None or not self.effective.wire_bytes or not step:
            return None
        return self.effective.wire_bytes / step * 1e3

    @property
    def link_share(self) -> float | None:
        """Share of the median step for which the link carried weights."""
        achieved = self.h2d_bandwidth
        return achieved / self.links_bandwidth if achieved and self.links_bandwidth else None


R = TypeVar("R")


def in_time(records: Iterable[R]) -> list[R]:
    """Return records in the order of their `started_at`."""
    return sorted(records, key=attrgetter("started_at"))


def latest(points: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return the latest record of each case on each machine."""
    return latest_by(points, lambda point: (point.machine, point.case))


def latest_by(records: Iterable[R], key: Callable[[R], Hashable]) -> tuple[R, ...]:
    """Return the latest record of each key; cancelled ones replace none."""
    latest_records: dict[Hashable, R] = {}
    for record in in_time(records):
        if (name := key(record)) not in latest_records or getattr(record, "status", None) != "cancelled":
            latest_records[name] = record
    return tuple(latest_records.values())
