"""Measurements as they are stored. Every sample is kept; every rate is derived from the samples.

`output_tok_s` counts all generated tokens over prefill and decode together, as published tables do; `decode_tok_s`
leaves out prefill and the first token, which prefill yields.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from itertools import starmap
from math import inf
from operator import le
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, FiniteFloat, PlainSerializer, PlainValidator

from zinfer.core.case import Case
from zinfer.core.engine import plan_options
from zinfer.core.value import Frozen

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
    """Counted placement: weight bytes by tier, and bytes of a decode step."""

    gpu_weight_bytes: int
    host_weight_bytes: int = 0
    nvme_weight_bytes: int = 0
    streamed_bytes_per_step: int = 0  # weight bytes that a decode step moves to the device, decoded
    wire_bytes_per_step: int | None = None  # the same as they cross the link, coded; None: as many
    nvme_bytes_per_step: int = 0  # weight bytes that a decode step of `stream` reads from disk, as they lie there
    pinned_bytes: int = 0  # page-locked host memory, rounding included
    shortfall: str | None = None  # requested behaviour that the engine accepted and did not deliver
    settings: dict[str, Any] = Field(default_factory=dict)  # every setting of the engine, at the value in force

    @property
    def wire_bytes(self) -> int:
        """Weight bytes that cross the link in a step, as coded."""
        return self.streamed_bytes_per_step if self.wire_bytes_per_step is None else self.wire_bytes_per_step


# Read from disk, copy over the link, gather the parts of several GPUs, unpack the wire's code, compute with weights.
Lane = Literal["disk", "copy", "gather", "unpack", "compute"]
Carried = Literal["expert", "guess"]  # what a copy carries: experts that were chosen, or guessed to be
_OLD_UNPACK: Any = "decode"  # name of the lane in earlier records
Moment = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: round(value, 3) + 0.0)]


class Span(NamedTuple):
    """Work of a lane for a layer, ms since the step began.

    No layer stands for the embedding, the head, and all else outside the layers. Of several GPUs, the step begins when
    it does on the first one. Reads from disk are timed by the host's clock, the rest by the device's.
    """

    lane: Lane
    layer: int | None
    start_ms: float  # negative if it was under way when the step began
    end_ms: float
    carries: Carried | None = None
    rank: int = 0  # number of the GPU

    def row(self) -> list[Any]:
        """Return the stored row: ``["copy", 3, 17.204, 35.391]``."""
        times = (round(self.start_ms, 3) + 0.0, round(self.end_ms, 3) + 0.0)
        return [self.lane, self.layer, *times, *((self.carries, self.rank) if self.rank else filter(None, self[4:5]))]


def spans(rows: Any) -> tuple[Span, ...]:
    """Return the spans of stored rows. Raises ValueError for a wrong row; columns are checked whole, for speed."""
    if not rows:
        return ()
    try:
        timeline = tuple(starmap(Span, rows))
        lanes, layers, starts, ends, carries, ranks = zip(*timeline, strict=True)
        if _OLD_UNPACK in lanes:
            return spans([("unpack" if span.lane == _OLD_UNPACK else span.lane, *span[1:]) for span in timeline])
        named = {*lanes} <= {*get_args(Lane)} and {*carries} <= {None, *get_args(Carried)}
    except TypeError:
        raise ValueError("a span is a row of 4 to 6 values") from None
    if not named or not {*map(type, layers)} <= {int, type(None)} or {*map(type, ranks)} != {int}:
        raise ValueError("a span has a lane that zinfer knows, and the whole numbers of a layer and a GPU")
    if not {*map(type, starts), *map(type, ends)} <= {int, float} or not all(map(le, starts, ends)):
        raise ValueError("a span ends at a time in ms, not before its start")
    if min(starts) == -inf or max(ends) == inf:
        raise ValueError("a span without a start or an end")
    return timeline


Timeline = Annotated[
    tuple[Span, ...], PlainValidator(spans), PlainSerializer(lambda timeline: [span.row() for span in timeline])
]


class Recorded(Frozen):
    """Facts of every measured point: case, status, and conditions."""

    case: Case
    status: Status
    machine: str
    error: str | None = None
    stage: str | None = None  # stage of the failure: load, warm-up, prefill, decode, requests
    load_s: float | None = None
    load_bytes: int | None = None  # weight bytes read, or made, in `load_s`, as they are stored
    gpu_peak_bytes: int | None = None  # peak of the bytes that tensors held
    gpu_used_bytes: int | None = None  # bytes in use on the device after the point: caches, context, other processes
    host_peak_bytes: int | None = None
    effective: Effective | None = None
    link_bandwidth: float | None = None  # pinned H2D bytes/s, measured in the same process
    all_links_bandwidth: float | None = None  # of several GPUs at once, from the memory that the weights lie in
    total_layers: int | None = None  # layers of the whole model; more than `num_layers` means a slice
    num_layers: int | None = None
    model_revision: str = ""
    gpu: dict[str, Any] = Field(default_factory=dict)  # clocks, power, temperature, throttle reasons during the point
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: str = ""  # ISO 8601, UTC
    predicted: dict[str, float | None] = Field(default_factory=dict)  # predictions of the plan, by quantity

    @property
    def gpus(self) -> int:
        """Number of GPUs that the load took, each with its own link."""
        return plan_options(self.case.engine, self.case.options).gpus

    @property
    def links_bandwidth(self) -> float | None:
        """Bytes a second of all links, at once if that was measured."""
        return self.all_links_bandwidth or (self.link_bandwidth and self.link_bandwidth * self.gpus)


class Measurement(Recorded):
    """One point: a case, its status, and every sample taken.

    `ttft_ms[r]` is repeat r's prefill up to its first token; `step_ms[r][i]` its decode steps, each synchronised.
    """

    ttft_ms: tuple[FiniteFloat, ...] = ()
    step_ms: tuple[tuple[FiniteFloat, ...], ...] = ()
    timeline: Timeline = ()  # one more decode step after the timed ones; empty if none was traced

    def __copy__(self) -> Self:
        """Copy without values computed from samples, which `model_copy` may change."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @property
    def usable(self) -> bool:
        """True if the point has samples of the case asked for. (An ``ok`` point without samples was only tried for
        whether it fits.)"""
        return self.status == "ok" and 0 < len(self.ttft_ms) == len(self.step_ms)

    @property
    def load_bandwidth(self) -> float | None:
        """Weight bytes a second of the load, coding and page-locking included."""
        return self.load_bytes / self.load_s if self.load_bytes and self.load_s else None

    @cached_property
    def e2e_ms(self) -> tuple[float, ...]:
        """Time of prefill and decode of each repeat, in ms."""
        return tuple(first + sum(steps) for first, steps in zip(self.ttft_ms, self.step_ms, strict=True))

    @cached_property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first, in ms."""
        steps = [step for repeat in self.step_ms for step in repeat]
        return fmean(steps) if steps else None

    @cached_property
    def step_median_ms(self) -> float | None:
        """Median decode step over all repeats, in ms."""
        steps = [step for repeat in self.step_ms for step in repeat]
        return median(steps) if steps else None

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
        """Mean of `output_tok_s_samples`."""
        return fmean(self.output_tok_s_samples) if self.output_tok_s_samples else None

    @property
    def decode_tok_s(self) -> float | None:
        """Decode throughput: B (n - 1) over the decode steps' sum."""
        tpot = self.tpot_ms
        return self.case.workload.batch_size / tpot * 1e3 if tpot else None

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens a second of the mean prefill."""
        if not self.ttft_ms:
            return None
        return self.case.workload.batch_size * self.case.workload.input_len / fmean(self.ttft_ms) * 1e3

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


class Dated(Protocol):
    """Record with the time at which it was begun."""

    @property
    def started_at(self) -> str: ...


R = TypeVar("R", bound=Dated)


def in_time(records: Iterable[R]) -> list[R]:
    """Return records in the order of their times, those of one second as they come."""
    return sorted(records, key=lambda record: record.started_at)


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
