"""Figures as inline SVG, drawn for the width they are shown at, in the colours of `zinfer.report.plot.style`.

Measured is filled and solid, predicted is pale with a dashed outline. A colour too close to the paper, light or dark,
is moved away from it until its contrast is that of a graphic one can see (WCAG 2.2, 1.4.11), and nothing is told by
colour alone: a line has its marker, a bar its label, and a table with the same numbers stands beside every figure.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, cos, floor, log2, log10, pi, sin
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from zinfer.spec.units import figures

WIDE, NARROW = 920, 344
LIGHT, DARK = "#ffffff", "#14171b"  # the page's paper
CONTRAST = 3.0
_ROW, _BAR, _GAP, _CHARACTER = 18, 15, 10, 6.6  # pixels; the last is of 12 px type, generously

# corners and turn of a marker, in matplotlib's letters; a negative number of corners is a star or a cross
_MARKERS = {
    "s": (4, 45), "^": (3, 0), "v": (3, 180), "<": (3, 270), ">": (3, 90), "D": (4, 0), "d": (4, 0), "p": (5, 0),
    "h": (6, 0), "H": (6, 30), "8": (8, 22), "*": (-5, 0), "P": (-4, 0), "X": (-4, 45),
}  # fmt: skip


class Line(NamedTuple):
    """One load over batch size: `points` are batch, value and half-width of its confidence, None from one repeat.
    `failed` are batches with the sign of how they ended, × out of memory and + otherwise."""

    label: str
    colour: str
    marker: str
    hollow: bool
    points: tuple[tuple[int, float, float | None], ...]
    failed: tuple[tuple[int, str], ...] = ()


class Bar(NamedTuple):
    """A horizontal bar of `segments` (length, colour) with `text` at its end; `label` stands above, `tag` before it.
    `band` is half the width of its error bar."""

    label: str
    segments: tuple[tuple[float, str], ...]
    text: str
    tag: str = ""
    band: float = 0.0
    predicted: bool = False


def contrast(first: str, second: str) -> float:
    """The ratio of two colours' luminances, 1 to 21: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def readable(colour: str, paper: str) -> str:
    """`colour`, moved towards white on dark paper and towards black on light, as far as `CONTRAST` asks."""
    goal = 255 if _luminance(paper) < 0.2 else 0
    mixed = colour
    for step in range(1, 21):
        if contrast(mixed, paper) >= CONTRAST:
            break
        mixed = "#" + "".join(f"{round(part + (goal - part) * step / 20):02x}" for part in _parts(colour))
    return mixed


def curves(lines: Sequence[Line], width: int, label: str) -> str:
    """Values over batch size, both axes logarithmic; batches that failed stand in a strip below, a row a line."""
    known = [point for line in lines for point in line.points]
    failing = [line for line in lines if line.failed]
    batches = [size for size, _, _ in known] + [size for line in failing for size, _ in line.failed]
    left, right, top, plot = 48, 12, 10, 300 if width > NARROW else 240
    strip = top + plot + 8
    bottom = strip + 16 * len(failing)
    root = _svg(width, bottom + 40, label)
    low, high = min(batches) / 2**0.5, max(batches) * 2**0.5
    bounds = [(value - min(half or 0, value / 2), value + (half or 0)) for _, value, half in known]
    floor_, ceiling = min(low for low, _ in bounds) / 1.35, max(high for _, high in bounds) * 1.35

    def x(size: float) -> float:
        return left + (width - left - right) * log2(size / low) / log2(high / low)

    def y(value: float) -> float:
        return top + plot * log10(ceiling / value) / log10(ceiling / floor_)

    for tick in _decades(floor_, ceiling):
        _line(root, left, y(tick), width - right, y(tick), "grid")
        _text(root, left - 7, y(tick) + 4, figures(tick), "end")
    for size in _sizes(batches, 16 if width > NARROW else 8):
        _line(root, x(size), top, x(size), bottom, "grid")
        _text(root, x(size), bottom + 16, f"{size}", "middle")
    _text(root, (left + width - right) / 2, bottom + 34, "batch size", "middle")
    for row, line in enumerate(failing):
        for size, sign in line.failed:
            _text(root, x(size), strip + 16 * row + 9, sign, "middle", "cross", _ink(line.colour))
    for line in lines:
        ink = _ink(line.colour)
        for (size, value, _), (after, then, _) in pairwise(line.points):
            _line(root, x(size), y(value), x(after), y(then), "curve", ink)
        for size, value, half in line.points:
            if half:
                _line(root, x(size), y(value + half), x(size), y(value - min(half, value / 2)), "whisker", ink)
            _marker(root, x(size), y(value), line)
    return _xml(root)


def swatch(line: Line) -> str:
    """The line's sign for a legend."""
    root = _svg(26, 14)
    _line(root, 0, 7, 26, 7, "curve", _ink(line.colour))
    _marker(root, 13, 7, line)
    return _xml(root)


def block(colour: str) -> str:
    """A filled square for a legend."""
    root = _svg(14, 14)
    _rect(root, 1, 1, 12, 12, "bar", colour)
    return _xml(root)


def bars(rows: Sequence[Bar], width: int, label: str, limit: tuple[float, str] | None = None) -> str:
    """Horizontal bars from zero; `limit` is a value that a dashed line marks, and its name."""
    tagged = max(len(row.tag) for row in rows)
    left = 8 + tagged * _CHARACTER if tagged else 0
    right = 12 + max(len(row.text) for row in rows) * _CHARACTER
    longest = max([limit[0] if limit else 0.0, *(_length(row) + row.band for row in rows)]) or 1.0
    top = 20 if limit else 4
    height = top + sum(_BAR + 3 + (_ROW + _GAP) * bool(row.label) for row in rows) + 6
    root = _svg(width, height, label)

    def x(value: float) -> float:
        return left + (width - left - right) * value / longest

    y = float(top)
    for row in rows:
        if row.label:
            y += _GAP
            _text(root, 0, y + 12, _fitting(row.label, width), "start", "name")
            y += _ROW
        _text(root, left - 6, y + 12, row.tag, "end")
        at = 0.0
        for size, colour in row.segments:
            if size > 0:
                _rect(
                    root,
                    x(at),
                    y,
                    max(1.0, x(at + size) - x(at) - 1),
                    _BAR,
                    "guess" if row.predicted else "bar",
                    colour,
                )
                at += size
        if row.band:
            middle = y + _BAR / 2
            _line(root, x(at - row.band), middle, x(at + row.band), middle, "error")
            for end in (at - row.band, at + row.band):
                _line(root, x(end), middle - 4, x(end), middle + 4, "error")
        _text(root, x(at + row.band) + 6, y + 12, row.text, "start", "value")
        y += _BAR + 3
    if limit:
        _line(root, x(limit[0]), top - 4, x(limit[0]), height - 4, "limit")
        _text(root, x(limit[0]), top - 8, limit[1], "end" if x(limit[0]) > width / 2 else "start")
    return _xml(root)


def _length(row: Bar) -> float:
    return sum(size for size, _ in row.segments)


def _fitting(text: str, width: int) -> str:
    room = int(width / _CHARACTER)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _decades(low: float, high: float) -> list[float]:
    """Round values between `low` and `high`, at most about eight."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 8 else (1, 2, 5) if high / low < 500 else (1,)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [value for power in powers for step in steps if low <= (value := step * 10.0**power) <= high]


def _sizes(batches: Sequence[int], count: int) -> list[int]:
    """Batch sizes to name on the axis, those with few set bits first where space is short."""
    low, high = min(batches), max(batches)
    chosen: list[int] = []
    for size in sorted(set(batches), key=lambda size: (size.bit_count(), -size)):
        if all(abs(log2(size / other)) >= log2(2 * high / low) / count for other in chosen):
            chosen.append(size)
    return sorted(chosen)


def _svg(width: float, height: float, label: str = "") -> Element:
    size = {"width": _n(width), "height": _n(height), "viewBox": f"0 0 {_n(width)} {_n(height)}"}
    told = {"role": "img", "aria-label": label} if label else {"aria-hidden": "true"}
    return Element("svg", size | told)


def _xml(root: Element) -> str:
    return tostring(root, encoding="unicode")


def _n(value: float) -> str:
    return f"{round(value, 1):g}"


def _ink(colour: str) -> str:
    return f"--light:{readable(colour, LIGHT)};--dark:{readable(colour, DARK)}"


def _line(root: Element, x1: float, y1: float, x2: float, y2: float, kind: str, ink: str = "") -> None:
    ends = {"x1": _n(x1), "y1": _n(y1), "x2": _n(x2), "y2": _n(y2), "class": kind}
    SubElement(root, "line", ends | ({"style": ink} if ink else {}))


def _rect(root: Element, x: float, y: float, width: float, height: float, kind: str, colour: str) -> None:
    size = {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height)}
    SubElement(root, "rect", size | {"class": kind, "style": _ink(colour)})


def _text(root: Element, x: float, y: float, words: str, anchor: str, kind: str = "tick", ink: str = "") -> None:
    if words:
        place = {"x": _n(x), "y": _n(y), "text-anchor": anchor, "class": kind} | ({"style": ink} if ink else {})
        SubElement(root, "text", place).text = words


def _marker(root: Element, x: float, y: float, line: Line) -> None:
    kind = {"class": "hollow" if line.hollow else "mark", "style": _ink(line.colour)}
    corners, turn = _MARKERS.get(line.marker, (0, 0))
    if not corners:
        SubElement(root, "circle", {"cx": _n(x), "cy": _n(y), "r": "4.5"} | kind)
        return
    count = abs(corners) * (1 if corners > 0 else 2)
    angles = [
        (2 * pi * nth / count + turn * pi / 180, 5.5 if corners > 0 or nth % 2 == 0 else 2.2) for nth in range(count)
    ]
    path = " ".join(f"{_n(x + radius * sin(angle))},{_n(y - radius * cos(angle))}" for angle, radius in angles)
    SubElement(root, "polygon", {"points": path} | kind)


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
