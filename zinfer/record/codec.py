"""Record of `zinfer codec`: size and speed of the lossless codec on weights, and whether it pays behind this link.

A streamed step takes as long as its bytes need on the link. Coded they are fewer, and some are decoded while the next
ones cross, so the longer of both sets the pace: a link brings at most ``1 / max(coded / raw, link / decode)`` times as
many weights a second, where `link` and `decode` are rates of raw bytes.
"""

from typing import ClassVar, Literal

from zinfer.core.errors import ZinferError
from zinfer.core.units import figures, gb
from zinfer.core.value import Frozen
from zinfer.record.study import Study

COLUMNS = ("weights", "#bytes", "#coded to", "#bound", "#encode GB/s", "#decode GB/s", "pays")


class CodecError(ZinferError):
    """Weights that cannot be measured; the message says what to do next."""


class Rate(Frozen):
    """Bytes a second: the median of `samples`, and their range over it."""

    median: float
    spread: float
    samples: int
    of: str


class Coded(Frozen):
    """One kind of weights, laid end to end and coded. `bound` is the size that coding exponents one by one can reach,
    with a table for every block, as a share: their entropy and 8 bits, over 16; of FP8 with 4 bits, over 8. Rates are
    of raw bytes, None if nothing was timed."""

    name: str
    told: str  # description of the weights
    total_bytes: int  # bytes of all weights of this kind
    raw_bytes: int  # bytes of the weights that were coded, before coding
    coded_bytes: int
    bound: float
    status: Literal["ok", "no_smaller", "wrong_bits"]
    encode: Rate | None = None
    decode: Rate | None = None

    @property
    def ratio(self) -> float:
        return self.coded_bytes / self.raw_bytes

    def gain(self, link: float) -> float | None:
        """Return the upper bound on the codec's speed-up behind a link of `link` bytes a second; None if it is
        unknown."""
        return 1 / max(self.ratio, link / self.decode.median) if self.status == "ok" and self.decode else None

    def verdict(self, link: float) -> str:
        """Return in a few words whether the codec pays: yes and the gain, or no, as decoding is slower than the
        link."""
        gain = self.gain(link)
        if gain is None:
            return "FAILED" if self.status == "wrong_bits" else "no, as large"
        if gain <= 1:
            return "no, too slow"
        return f"yes, {gain:.2f}x"


class CodecRecord(Study):
    """One run of `zinfer codec`; `link` is the bandwidth from host to device, in bytes a second."""

    KIND: ClassVar[str] = "codec"
    POINTS: ClassVar[tuple[str, ...]] = ("rows",)

    link: float
    rows: tuple[Coded, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the weights that came back with other bits."""
        return tuple(row.name for row in self.rows if row.status == "wrong_bits")

    def cells(self) -> list[tuple[str, ...]]:
        """Return a row of text for each kind of weights, under `COLUMNS`."""
        return [
            (
                row.name,
                gb(row.raw_bytes),
                f"{row.ratio:.1%}",
                f"{row.bound:.1%}",
                _rate(row.encode),
                _rate(row.decode, spread=True),
                row.verdict(self.link),
            )
            for row in self.rows
        ]


def _rate(rate: Rate | None, spread: bool = False) -> str:
    """Return a rate in GB/s as text; with `spread`, followed by half the range."""
    return "" if rate is None else figures(rate.median / 1e9) + f" ± {rate.spread / 2:.1%}" * spread
