"""Loads of requests: their lengths, and how they arrive.

A closed loop keeps N requests in flight: the next comes when one ends. An open loop has a rate: requests come
at random times of a Poisson process, whatever the machine does meanwhile. Names follow `vllm bench serve` and GuideLLM
(request rate, goodput), and lengths a sweep's (`input_len`, `output_len`).
"""

import math
import random
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from zinfer.core.case import MAX_COUNT, Name
from zinfer.core.units import counted, figures
from zinfer.core.value import Frozen

MAX_REQUESTS = 100_000  # of one load
DEFAULT_REQUESTS = 1000
MIN_RATE, MAX_RATE = 1e-6, 1_000_000  # requests a second
MAX_SIGMA = 4.0
ONLY_NUMBERS = "request_order longest-first is for numbers in flight, not for auto, which chooses by itself, or a rate"
FORM = (
    "lognormal:INPUT,OUTPUT or fixed:INPUT,OUTPUT (mean tokens), then max_input_len=N, max_output_len=N, sigma=S "
    "(lognormal), separated by commas"
)


class Lengths(NamedTuple):
    """Tokens of a request's prompt and of its answer."""

    input_len: int
    output_len: int


class LengthDistribution(Frozen):
    """Distribution of the lengths of requests; prompts and answers are independent."""

    kind: Literal["lognormal", "fixed"]
    input_len: int = Field(ge=1, le=MAX_COUNT)  # mean, before lengths are cut
    output_len: int = Field(ge=1, le=MAX_COUNT)
    max_input_len: int = Field(default=MAX_COUNT, ge=1, le=MAX_COUNT)
    max_output_len: int = Field(default=MAX_COUNT, ge=1, le=MAX_COUNT)
    sigma: float = Field(default=0.5, ge=0, le=MAX_SIGMA)  # standard deviation of a log-normal length's logarithm

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the distribution of a text such as ``lognormal:245,106,sigma=0.8``. Raises ValueError."""
        kind, _, rest = text.strip().partition(":")
        means, settings = (parts := rest.split(","))[:2], [part.partition("=")[::2] for part in parts[2:]]
        fields = {"kind": kind} | dict(zip(("input_len", "output_len"), means, strict=False))
        fields |= {name.strip(): value for name, value in settings}
        try:
            if len(fields) < 3 + len(settings) or ("sigma" in fields and kind != "lognormal"):
                raise ValueError
            return cls.model_validate(fields)
        except ValueError:
            raise ValueError(
                f"{text[:80]!r} is no distribution of lengths: write {FORM}; lengths are 1 to {MAX_COUNT:,} tokens, "
                f"sigma is at most {MAX_SIGMA:g}"
            ) from None

    def describe(self) -> str:
        """Return the text that `parse` takes."""
        text = f"{self.kind}:{self.input_len},{self.output_len}"
        for name in ("max_input_len", "max_output_len"):
            text += "" if getattr(self, name) == MAX_COUNT else f",{name}={getattr(self, name)}"
        return text + f",sigma={self.sigma:g}" * (self.kind == "lognormal")

    def draw(self, count: int, seed: int) -> list[Lengths]:
        """Return the lengths of `count` requests; equal seeds give equal lengths."""
        dice = random.Random(f"lengths {seed}")
        means = (self.input_len, self.max_input_len), (self.output_len, self.max_output_len)

        def length(mean: float, longest: int) -> int:
            if self.kind == "lognormal":
                mean = dice.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
            return max(1, min(longest, round(mean)))

        return [Lengths(*(length(*mean) for mean in means)) for _ in range(count)]


def _in_flight(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_REQUESTS):
        return value
    raise ValueError(f"requests in flight: write auto, or a whole number from 1 to {MAX_REQUESTS:,}")


def _rate(value: Any) -> Any:
    if isinstance(value, str | float) and value in ("inf", math.inf):
        return "inf"
    if type(value) in (int, float) and MIN_RATE <= value <= MAX_RATE:
        return float(value)
    raise ValueError(f"a rate of requests: write inf, or a number from {MIN_RATE:f} to {MAX_RATE:,} a second")


Order = Literal["given", "longest-first"]
InFlight = Annotated[int | Literal["auto"], BeforeValidator(_in_flight)]
RequestRate = Annotated[float | Literal["inf"], BeforeValidator(_rate)]
RequestCount = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]


class RequestLoad(Frozen):
    """Load of requests, a part of the key of its record. Either `in_flight` or `request_rate` is set."""

    source: Name  # distribution of lengths, or name and checksum of a file
    requests: int = Field(ge=1, le=MAX_REQUESTS)
    seed: int = Field(default=0, ge=0, le=MAX_COUNT)
    in_flight: InFlight | None = None  # closed loop: requests at a time, or as many as fit
    request_rate: RequestRate | None = None  # open loop: requests a second, or all at once
    order: Order = "given"  # of a number in flight the longest answers may come first

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if (self.in_flight is None) == (self.request_rate is None):
            raise ValueError("a load of requests has a number in flight, or a rate")
        if self.order != "given" and not isinstance(self.in_flight, int):
            raise ValueError(ONLY_NUMBERS)
        return self

    def arrivals(self) -> list[float]:
        """Return the seconds at which requests arrive, ascending; equal seeds, equal times."""
        if not isinstance(self.request_rate, float):
            return [0.0] * self.requests
        dice = random.Random(f"arrivals {self.seed}")
        return [*accumulate(dice.expovariate(self.request_rate) for _ in range(self.requests))]

    @property
    def loop(self) -> str:
        """Text of how requests arrive: ``64 in flight``, ``2 a second``."""
        if self.in_flight is not None:
            number = f"{self.in_flight:,}" if isinstance(self.in_flight, int) else "auto"
            return f"{number} in flight{', the longest first' if self.order != 'given' else ''}"
        return "all at once" if self.request_rate == "inf" else f"{figures(float(self.request_rate or 0))} a second"

    def describe(self) -> str:
        """Return the load as text: ``1,000 requests of lognormal:245,106,sigma=0.5, 64 in flight``."""
        return f"{counted(self.requests, 'request')} of {self.source}, {self.loop}"
