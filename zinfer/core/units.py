"""Units: bytes, rates and durations to text and back.

Files hold bytes, bytes per second and milliseconds; only the screen rounds, and it always says GB (1e9) or GiB (2^30).
"""

import re
from math import floor, isfinite, log10

_SUFFIXES = {"": 1, "B": 1} | {
    f"{prefix}{mark}B": base**power
    for mark, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_BY_UPPER = {suffix.upper(): factor for suffix, factor in _SUFFIXES.items()}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*(/s)?\s*", re.IGNORECASE)

MAX_BYTES = 10**18  # largest size that is typed: a million TB


def parse_bytes(text: str) -> int:
    """Return the bytes of a size (``40GiB``, ``4096``), or a rate (``200GB/s``). Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].upper() not in _BY_UPPER:
        raise ValueError(f"{text[:40]!r} is not a size: write a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    size = float(match[1]) * _BY_UPPER[match[2].upper()]
    if size > MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is too large: a size, or a rate, is at most {gb(MAX_BYTES)}")
    return int(size)


def parse_share(text: str, whole: int, automatic: int = 0) -> int:
    """Return the bytes of a share (``25%``) or a size; `automatic` for ``auto``. Raises ValueError."""
    if text == "auto":
        return min(automatic, whole)
    if text.endswith("%"):
        share = float(text.removesuffix("%")) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{text} is not a share: write 0% to 100%")
        return int(share * whole)
    return min(parse_bytes(text), whole)


def gb(size: float, digits: int = 1) -> str:
    """Return bytes in decimal units, for weights and links: ``352.5 GB``."""
    return f"{size / 1e9:.{digits}f} GB" if size >= 1e8 else f"{size / 1e6:.{digits}f} MB"


def gib(size: float, digits: int = 1) -> str:
    """Return bytes in binary gigabytes, for memory: ``79.2 GiB``."""
    return f"{size / 2**30:.{digits}f} GiB"


def figures(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, never an exponent: ``1,480``."""
    if value == 0:
        return "0"
    if not isfinite(value):
        return str(value)
    places = digits - 1 - floor(log10(abs(value)))
    text = f"{round(value, places):,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 point``, ``1,200 points``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(ms: float | None) -> str:
    """Return ms as `duration` does; nothing for None."""
    return "" if ms is None else duration(ms / 1e3)


def duration(seconds: float) -> str:
    """Return seconds as text: ``850 ms``, ``6.41 s``, ``3 min 20 s``."""
    if seconds < 1:
        return f"{figures(seconds * 1e3)} ms"
    if seconds < 60 or not isfinite(seconds):
        return f"{figures(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
