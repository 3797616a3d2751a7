"""Record of a load of requests (`zinfer sweep --requests`).

Times and rates are derived from the time at which each pass ended, and of each request when it arrived and which passes
gave it a token. TTFT and E2E begin with its arrival. TPOT is the mean time of its tokens after the first, ITL the time
between any two tokens. Percentiles are by nearest rank.
"""

from itertools import pairwise, repeat
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import model_serializer, model_validator

from zinfer.core.case import Case
from zinfer.core.requests import RequestLoad
from zinfer.core.value import Frozen
from zinfer.record.bounds import LONGEST_MS, SHORTEST_MS, Count, NotNegative, Text
from zinfer.record.measurement import Moment, Recorded
from zinfer.record.stats import nearest_rank

RequestMetric = Literal["ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"]
METRICS: tuple[RequestMetric, ...] = get_args(RequestMetric)


class RequestSample(Frozen):
    """Request: its lengths, its arrival, and the passes of its tokens; stored as ``[245,106,1503.2,17,106]``."""

    input_len: Count
    output_len: Count
    arrived_ms: Moment
    # Number of the first pass, and passes in a row that gave it a token each, or, negative, tokens of one pass.
    runs: tuple[tuple[Count, int], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if len(value) < 3 or len(value) % 2 == 0:
                raise ValueError("a request is a row of two lengths, a time, and pairs of passes")
            input_len, output_len, arrived_ms, *passes = value
            runs = tuple(zip(passes[::2], passes[1::2], strict=True))
            value = {"input_len": input_len, "output_len": output_len, "arrived_ms": arrived_ms, "runs": runs}
        return value

    @model_validator(mode="after")
    def _forwards(self) -> Self:
        if any(first + max(1, count) > next_first for (first, count), (next_first, _) in pairwise(self.runs)):
            raise ValueError("the passes of a request are not in order")
        if any(count in (0, -1) for _, count in self.runs):
            raise ValueError("a run of passes without tokens")
        return self

    @model_serializer
    def _to_row(self) -> list[float]:
        return [self.input_len, self.output_len, self.arrived_ms, *(number for run in self.runs for number in run)]

    @property
    def tokens(self) -> int:
        """Tokens that it got."""
        return sum(abs(count) for _, count in self.runs)

    @property
    def passes(self) -> list[int]:
        """Number of the pass of each of its tokens."""
        return [
            number
            for first, count in self.runs
            for number in (range(first, first + count) if count > 0 else repeat(first, -count))
        ]


class PassCounts(Frozen):
    """Counts over all passes of a load."""

    read: Count = 0  # positions of KV cache
    padded: Count = 0  # those of them that were padding
    computed: Count = 0  # positions
    again: Count = 0  # those of them that were computed before
    suspended: Count = 0  # rows that went to host memory
    merged: Count = 0  # micro-batches
    retries: Count = 0  # for want of memory
    drafted: Count = 0  # drafts that were verified
    accepted: Count = 0  # right ones
    checked: Count = 0  # drafts up to the first wrong one of a row and pass
    drafting_ms: NotNegative = 0.0

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if self.padded > self.read or self.again > max(self.computed, self.read):
            raise ValueError(f"{self.padded} of {self.read} positions are padding, {self.again} are computed again")
        if self.accepted > (self.checked or self.drafted) or self.checked > self.drafted:
            raise ValueError(f"{self.accepted} of {self.drafted} drafts are right, {self.checked} of them are checked")
        return self


class Summary(NamedTuple):
    """Statistics of samples, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float


class RequestKey(NamedTuple):
    """Key of a load: the model's, without workload, and the requests'."""

    case: Case
    requests: RequestLoad


class RequestPoint(Recorded):
    """One load of requests, its status and every sample. The workload of `case` means nothing."""

    requests: RequestLoad
    pass_ms: tuple[Moment, ...] = ()  # time at which each pass ended
    samples: tuple[RequestSample, ...] = ()
    counts: PassCounts = PassCounts()
    busy_ms: NotNegative = 0.0  # time of all passes, without waits for requests that had not come
    waiting_ms: NotNegative = 0.0  # time of passes during which further requests waited
    waiting_tokens: Count = 0  # tokens that were generated meanwhile
    kv_positions: Count = 0  # positions of KV cache that there was room for
    sla: tuple[Text, ...] = ()  # service levels that were asked for, as typed

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(end <= start for start, end in pairwise(self.pass_ms)):
            raise ValueError("pass_ms: times that do not ascend")
        for sample in self.samples:
            last = sample.runs[-1][0] + max(1, sample.runs[-1][1]) - 1 if sample.runs else -1
            if last >= len(self.pass_ms):
                raise ValueError(f"samples: a token of pass {last}, and there are {len(self.pass_ms)}")
            if sample.tokens > sample.output_len or (self.status == "ok" and sample.tokens < sample.output_len):
                raise ValueError(f"samples: {sample.tokens} tokens of a request for {sample.output_len}")
            if sample.runs and self.pass_ms[sample.runs[0][0]] <= sample.arrived_ms:
                raise ValueError("samples: a request has a token before it arrived")
        if self.status == "ok" and len(self.samples) != self.requests.requests:
            raise ValueError(f"samples: {len(self.samples)} of {self.requests.requests} requests")
        if self.pass_ms and not SHORTEST_MS <= self.pass_ms[0] <= self.pass_ms[-1] <= LONGEST_MS:
            raise ValueError(f"pass_ms: passes from {self.pass_ms[0]} to {self.pass_ms[-1]} ms")
        if any(not 0 <= sample.arrived_ms <= LONGEST_MS for sample in self.samples):
            raise ValueError("samples: a request that arrived at no time")
        if self.usable and not self.waiting_ms - 1 <= self.busy_ms <= self.wall_ms + 1:
            raise ValueError(
                f"busy_ms: {self.busy_ms} of {self.wall_ms} ms, {self.waiting_ms} with requests that waited"
            )
        if self.waiting_tokens > self.output_tokens:
            raise ValueError(f"waiting_tokens: {self.waiting_tokens} of {self.output_tokens}")
        return self

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.case.with_batch(1), self.requests)

    @property
    def usable(self) -> bool:
        """True if every request got all its tokens."""
        return self.status == "ok" and bool(self.samples)

    @property
    def wall_ms(self) -> float:
        """Time from the start to the last token, in ms."""
        return self.pass_ms[-1] if self.pass_ms else 0.0

    def of(self, metric: RequestMetric) -> list[float]:
        """Return the samples of a metric of finished requests, in ms; of ITL one for each token but the first."""
        ended = [sample for sample in self.samples if sample.runs and sample.tokens == sample.output_len]
        if metric == "itl_ms":
            pairs = (pair for sample in ended for pair in pairwise(sample.passes))
            return [self.pass_ms[end] - self.pass_ms[start] for start, end in pairs]
        return [value for sample in ended if (value := self.value_ms(sample, metric)) is not None]

    def value_ms(self, sample: RequestSample, metric: RequestMetric) -> float | None:
        """Return a metric of one request, in ms; None where undefined."""
        passes = sample.passes
        if not passes:
            return None
        first, last = self.pass_ms[passes[0]], self.pass_ms[passes[-1]]
        if metric == "ttft_ms":
            return first - sample.arrived_ms
        if metric == "e2e_ms":
            return last - sample.arrived_ms
        return (last - first) / (len(passes) - 1) if len(passes) > 1 else None

    def summary(self, metric: RequestMetric) -> Summary | None:
        """Return mean, p50, p90 and p99 of a metric, in ms; None without samples."""
        ordered = sorted(self.of(metric))
        return Summary(fmean(ordered), *(nearest_rank(ordered, n) for n in (50, 90, 99))) if ordered else None

    @property
    def mean_ttft_ms(self) -> float | None:
        """Mean time to a request's first token, in ms."""
        return fmean(first_ms) if (first_ms := self.of("ttft_ms")) else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean TPOT of the requests, in ms; None if undefined."""
        return fmean(tpot_ms) if (tpot_ms := self.of("tpot_ms")) else None

    def _per_second(self, amount: int, ms: float) -> float | None:
        return amount / ms * 1e3 if self.usable and ms else None

    @property
    def output_tokens(self) -> int:
        """Tokens that requests got."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def mean_lengths(self) -> tuple[float, float] | None:
        """Mean tokens of a prompt and of an answer, as asked for."""
        lengths = [(sample.input_len, sample.output_len) for sample in self.samples]
        return (fmean(tokens[0] for tokens in lengths), fmean(tokens[1] for tokens in lengths)) if lengths else None

    @property
    def output_tok_s(self) -> float | None:
        """Output tokens of the requests over the load's time."""
        return self._per_second(self.output_tokens, self.wall_ms)

    @property
    def input_tok_s(self) -> float | None:
        """Prompt tokens of the requests over the load's time, a second."""
        return self._per_second(sum(sample.input_len for sample in self.samples), self.wall_ms)

    @property
    def request_s(self) -> float | None:
        """Requests a second."""
        return self._per_second(len(self.samples), self.wall_ms)

    @property
    def waiting_tok_s(self) -> float | None:
        """Output tokens a second while further requests waited, or None."""
        return self._per_second(self.waiting_tokens, self.waiting_ms)

    @property
    def padding(self) -> float | None:
        """Share of the positions of KV cache read that were padding."""
        return self.counts.padded / self.counts.read if self.counts.read else None

    @property
    def drafts_right(self) -> float | None:
        """Share of the verified drafts that were right; None without drafts."""
        return self.counts.accepted / self.counts.drafted if self.counts.drafted else None

    @property
    def link_busy(self) -> float | None:
        """Share of the passes' time for which the link carried weights."""
        if self.effective is None or not self.links_bandwidth or not self.busy_ms:
            return None
        wire = self.effective.wire_bytes
        return wire * len(self.pass_ms) / self.links_bandwidth / self.busy_ms * 1e3 if wire else None
