"""Economics: cost and energy of a token, prices, durations.

The more tokens a machine makes in an hour that is paid for, the cheaper each is: USD a million tokens = USD an hour /
(3600 · tok/s) · 1e6. Energy is what NVML counted on the GPU while the point was timed, over the tokens generated
meanwhile; a datasheet's watts never replace it.
"""

import re
import tomllib
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.resources import files

from pydantic import Field

from zinfer.core.errors import ZinferError
from zinfer.core.machine import Machine, catalogue
from zinfer.core.value import Frozen
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint

COUNTER = "NVML's energy counter of the GPU"
READINGS = "mean of NVML's power readings of the GPU, times the time"
DAY_S = 86400
LARGEST = 1e18  # of prompts, tokens a second, and seconds
Point = Measurement | RequestPoint
_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": DAY_S, "day": DAY_S}


class EconomicsError(ZinferError):
    """Price, number or duration that is invalid or unknown."""


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
    usd = None
    if point.usable and rate and gpu_hour_usd is not None:
        usd = gpu_hour_usd * point.gpus * 1e6 / rate / 3600
    return Cost(usd_per_mtok=usd, j_per_token=joules, method=method)


def parse_seconds(text: str) -> float:
    """Return the seconds of ``8h``, ``30 min``, ``2s`` or ``250ms``. Raises EconomicsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h|d|day)\s*", text)
    value = 0.0 if match is None else float(match[1]) * (1e-3 if match[2] == "ms" else _SECONDS[match[2]])
    if not 0 < value <= LARGEST:
        raise EconomicsError(f"{text[:80]!r} is not a duration: write 8h, 30min, 2s or 250ms")
    return value


def parse_count(text: str) -> int:
    """Return the number of ``100k`` or ``2500``. Raises EconomicsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?)\s*", text)
    number = 0.0 if match is None else float(match[1]) * _PREFIXES[match[2]]
    if not 1 <= number <= LARGEST:
        raise EconomicsError(f"{text[:80]!r} is not a number of prompts: write 2500, 100k or 2M")
    return round(number)
