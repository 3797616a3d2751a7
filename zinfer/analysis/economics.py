"""Economics: cost and energy of a token, and GPUs for a demand.

USD a million tokens = USD an hour / (3600 · tok/s) · 1e6. Energy is what NVML counted on the GPU while the point was
timed, over the tokens generated meanwhile; a datasheet's watts never replace it.
"""

import re
import tomllib
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.resources import files
from math import ceil

from pydantic import Field

from zinfer.core.errors import ZinferError
from zinfer.core.machine import Machine, catalogue
from zinfer.core.value import Frozen
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint

COUNTER = "NVML's energy counter of the GPU"
READINGS = "mean of NVML's power readings of the GPU, times the time"
DAY_S = 86400
LARGEST = 1e18  # most tokens of a demand, and most seconds
Point = Measurement | RequestPoint
_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": DAY_S, "day": DAY_S}


class EconomicsError(ZinferError):
    """Price, demand or duration that is invalid or unknown."""


class ListPrice(Frozen):
    """Price of a GPU-hour that somebody lists: an assumption where none is given."""

    usd_per_gpu_hour: float = Field(gt=0, allow_inf_nan=False)  # with its share of the host
    date: date  # on which the source read it
    source: str


@cache
def list_prices() -> Mapping[str, ListPrice]:
    """Return the catalogue's prices by name of the machine."""
    with (files("zinfer") / "catalog" / "prices.toml").open("rb") as file:
        return {name: ListPrice(**entry) for name, entry in tomllib.load(file).items()}


def list_price(machine: Machine) -> ListPrice | None:
    """Return the catalogue's price of a machine or of its GPU."""
    same_gpu = (name for name, entry in catalogue().items() if entry["gpu_name"] == machine.gpu_name)
    return next((list_prices()[name] for name in (machine.name, *same_gpu) if name in list_prices()), None)


class Cost(Frozen):
    """Cost of a point's tokens, None where unknown, and the energy's method."""

    usd_per_mtok: float | None = None
    j_per_token: float | None = None
    method: str = ""


class Fleet(Frozen):
    """GPUs for a demand, each running one point's configuration."""

    tokens: float  # output tokens to generate within `seconds`
    seconds: float
    gpu_tok_s: float  # throughput of one GPU at full load
    utilisation: float  # share of a GPU's capacity that is planned with
    working: int
    spare: int

    @property
    def gpus(self) -> int:
        return self.working + self.spare

    @property
    def load(self) -> float:
        """Share of the working GPUs' full capacity that the demand takes."""
        return self.tokens / (self.working * self.gpu_tok_s * self.seconds) if self.working else 0.0


def energy(point: Point) -> tuple[float, str] | None:
    """Return the J an output token of all repeats, and the method."""
    tokens = point.output_tokens
    if not point.usable or not tokens:
        return None
    counted, watts, seconds = (point.gpu.get(key) for key in ("energy_j", "power_w_mean", "timed_s"))
    if counted:
        return counted / tokens, COUNTER
    return (watts * seconds / tokens, READINGS) if watts and seconds else None


def cost(point: Point, gpu_hour_usd: float | None = None) -> Cost:
    """Return the cost of a point's tokens; a price of None is unknown, not free."""
    rate, (joules, method) = point.output_tok_s, energy(point) or (None, "")
    paid = gpu_hour_usd if point.usable and rate else None
    usd = None if paid is None or not rate else paid * point.gpus * 1e6 / rate / 3600
    return Cost(usd_per_mtok=usd, j_per_token=joules, method=method)


def parse_quantity(text: str, factors: Mapping[str, float], what: str, least: float = 1e-15) -> float:
    """Return a number times the factor of its unit; `what` says what to write. Raises EconomicsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]*)\s*", text)
    value = 0.0 if match is None else float(match[1]) * factors.get(match[2], 0.0)
    if not least <= value <= LARGEST:
        raise EconomicsError(f"{text[:80]!r} is not {what}")
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds of ``8h``, ``30 min``, ``2s`` or ``250ms``. Raises EconomicsError."""
    return parse_quantity(text, _SECONDS, "a duration: write 8h, 30min, 2s or 250ms")


def parse_count(text: str) -> int:
    """Return the number of ``100k`` or ``2500``. Raises EconomicsError."""
    return round(parse_quantity(text, _PREFIXES, "a number of prompts: write 2500, 100k or 2M", least=1))


def parse_demand(text: str, deadline: str | None = None) -> tuple[float, float]:
    """Return the tokens of a demand, and the seconds for them. Raises EconomicsError.

    ``2Mtok/day`` is spread over a day, or due within `deadline` of each; ``5Mtok`` needs a `deadline`.
    """
    form = r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kKMGBT]?)\s*(?:tok(?:ens?)?)?\s*(?:/\s*(s|min|h|d|day))?\s*"
    match = re.fullmatch(form, text)
    tokens = 0.0 if match is None else float(match[1]) * _PREFIXES[match[2]]
    if match is None or not 0 < tokens <= LARGEST:
        raise EconomicsError(f"{text[:80]!r} is not a demand: write 2Mtok/day, 500ktok/h, or 5Mtok with --deadline 8h")
    period = _SECONDS[match[3]] if match[3] else None
    if deadline is None and period is None:
        raise EconomicsError(f"{text!r} has no period: write it as 2Mtok/day, or add --deadline 8h")
    seconds = parse_seconds(deadline) if deadline is not None else float(period or 0)
    if period is not None and seconds > period:
        raise EconomicsError(f"--deadline {deadline} is longer than the time in which the next {text} comes")
    return tokens, seconds


def fleet(point: Point, tokens: float, seconds: float, utilisation: float = 0.8, spare: int = 1) -> Fleet:
    """Return the GPUs for `tokens` in `seconds`, and `spare` more. Raises EconomicsError without a throughput."""
    rate, gpus = point.output_tok_s, point.gpus
    if not rate:
        raise EconomicsError("a fleet needs a measured throughput")
    working = max(1, ceil(tokens / (rate * utilisation * seconds) * (1 - 1e-9)))  # a rounding error must not add a GPU
    capacity = {"gpu_tok_s": rate / gpus, "utilisation": utilisation}
    return Fleet(tokens=tokens, seconds=seconds, **capacity, working=working * gpus, spare=spare)
