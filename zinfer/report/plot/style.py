"""Style of every figure: colours, sheet, axes, stable bytes.

Measured series are solid lines with markers; limits and predictions are dashed and have none. An engine keeps its
colour and its marker in every figure. A hollow marker means no offload, so a print without colour stays legible.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import ceil, log2
from textwrap import wrap
from typing import Any, Literal
from xml.sax.saxutils import escape

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text as MatplotlibText
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from zinfer.core.case import Case
from zinfer.system.printable import printable

Format = Literal["png", "svg"]

# Okabe & Ito's palette, safe for colour-blind readers
_ENGINES = {
    "stream": ("#0072B2", "o"),
    "deepspeed": ("#D55E00", "s"),
    "accelerate": ("#009E73", "^"),
    "tensorrt": ("#CC79A7", "D"),
    "tensorrt-rtx": ("#882255", "P"),
}
_OTHERS = (("#E69F00", "v"), ("#56B4E9", "X"), ("#000000", "p"), ("#999933", "h"))
_VARIANTS = ("<", ">", "*", "d", "8", "H")  # markers of one engine's further options
PALETTE = tuple(colour for colour, _ in (*_ENGINES.values(), *_OTHERS))
GREY, INK, GRID = "#666666", "#222222", "#e4e4e4"

_STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "zinfer",  # element ids come from it instead of a random number
    "svg.fonttype": "none",  # text stays text: it can be selected, and a figure is a quarter of the size
    "path.simplify": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}
_WIDTH, _DPI = 9.0, 150
_LEFT, _RIGHT, _PANEL = 0.85, 0.25, 3.7  # inches, like all below
DRAWN = _WIDTH - _LEFT - _RIGHT  # width of the drawn area
_AXIS_LABEL, _LEGEND_ROW = 0.6, 0.2
_TITLE_ROW, _NOTE_ROW, _MARGIN = 0.28, 0.21, 0.18
CHARACTER = 0.064  # width of one character of the legend's font, a generous estimate


@contextmanager
def looks() -> Iterator[None]:
    """Apply our settings over matplotlib's defaults, whatever the user's own matplotlibrc says."""
    with style.context(["default", _STYLE]):
        yield


def render(figure: Figure, form: Format) -> bytes:
    """Return the figure's file, without formulas. Equal figures give equal bytes, with no dates or random ids."""
    for text in figure.findobj(MatplotlibText):
        text.set(parse_math=False, text=printable(text.get_text()))
    buffer = BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    with looks():
        figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata)
    if form == "png":
        return buffer.getvalue()
    words = (f"<{tag}>{escape(said(figure, part))}</{tag}>" for tag, part in (("title", "title"), ("desc", "note")))
    head, svg, rest = printable(buffer.getvalue().decode().replace(" \n", " ")).partition("<svg ")
    attributes, _, inside = rest.partition(">")
    return f'{head}{svg}role="img" {attributes}>{"".join(words)}{inside}'.encode()


def said(figure: Figure, part: str) -> str:
    """Return a figure's title, or its notes ("note")."""
    return " ".join(text.get_text() for text in figure.texts if text.get_gid() == part)


def series(loads: Iterable[Case]) -> dict[Case, dict[str, Any]]:
    """Return plot arguments of each load: colour by engine, fill by offload."""
    looks_by_load: dict[Case, dict[str, Any]] = {}
    engines = dict(_ENGINES)
    variants: dict[tuple[str, str], int] = {}
    for load in loads:
        other = _OTHERS[(len(engines) - len(_ENGINES)) % len(_OTHERS)]
        colour, marker = engines.setdefault(load.engine, other)
        nth = variants[load.engine, load.offload] = variants.get((load.engine, load.offload), -1) + 1
        if nth:
            marker = _VARIANTS[(nth - 1) % len(_VARIANTS)]
            colour = lighter(colour, min(0.6, 0.3 * nth))
        looks_by_load[load] = {
            "color": colour,
            "marker": marker,
            "markersize": 7,
            "markerfacecolor": {"none": "white", "cpu": colour}.get(load.offload, lighter(colour, 0.6)),
            "markeredgewidth": 1.5,
            "linewidth": 1.8,
            "label": shortened(load.label(), 90),
        }
    return looks_by_load


def shortened(text: str, length: int) -> str:
    """Return `text`, cut to `length` characters with an ellipsis at its end."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


class Sheet:
    """Figure under construction: panels (in a `stack` below each other) and a legend."""

    def __init__(
        self,
        title: str,
        question: str,
        notes: Iterable[str],
        panels: int = 1,
        stack: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._titles = wrap(f"{title}: {question}", 80)
        self._notes = [line for note in notes for line in wrap(note, 124)]
        self._figure = Figure()
        FigureCanvasAgg(self._figure)
        self._rows = [inches for pair in stack for inches in pair] or [_PANEL]
        columns = 1 if stack else panels
        grid = self._figure.add_gridspec(len(self._rows), columns, height_ratios=self._rows, hspace=0, wspace=0.2)
        rows = range(1, len(self._rows), 2) if stack else (0,)
        self.panels = [self._figure.add_subplot(grid[row, column]) for row in rows for column in range(columns)]

    def finish(self) -> Figure:
        """Place title, notes and legend around the panels; return the figure."""
        entries: dict[str, Any] = {}
        for panel in self.panels:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        handles, labels = list(entries.values()), list(entries)
        width = max(map(len, labels), default=0) * CHARACTER + 0.55
        columns = max(1, min(4, int((_WIDTH - _LEFT) // width)))
        heads = _TITLE_ROW if any(panel.get_title(loc="left") for panel in self.panels) else 0
        top = 2 * _MARGIN + _TITLE_ROW * len(self._titles) + _NOTE_ROW * len(self._notes) + heads
        bottom = _AXIS_LABEL + _LEGEND_ROW * ceil(len(labels) / columns) + _MARGIN
        height = top
        for inches in (*self._rows, bottom):  # not sum(), whose last digit depends on the version of Python
            height += inches
        self._figure.set_size_inches(_WIDTH, height)
        self._figure.subplots_adjust(
            left=_LEFT / _WIDTH, right=1 - _RIGHT / _WIDTH, top=1 - top / height, bottom=bottom / height
        )
        y = _MARGIN
        for line in self._titles:
            self._figure.text(_MARGIN / _WIDTH, 1 - y / height, line, size=13, weight="bold", va="top", gid="title")
            y += _TITLE_ROW
        for line in self._notes:
            self._figure.text(_MARGIN / _WIDTH, 1 - y / height, line, size=9, color=GREY, va="top", gid="note")
            y += _NOTE_ROW
        self._figure.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(_LEFT / _WIDTH, (bottom - _AXIS_LABEL) / height),
            ncols=columns, frameon=False, borderaxespad=0, borderpad=0.2, handlelength=2.6, columnspacing=2, fontsize=9,
        )  # fmt: skip
        return self._figure


def batch_axis(axes: Axes, sizes: Iterable[int]) -> None:
    """Make the x axis logarithmic, with ticks at batch sizes."""
    # a count of set bits is the simplest order that puts 16 before 24 before 28
    candidates = sorted(set(sizes), key=lambda size: (size.bit_count(), -size))
    low, high = min(candidates), max(candidates)
    ticks: list[int] = []
    for size in candidates:
        if all(abs(log2(size / tick)) >= log2(high / low) / 16 for tick in ticks):
            ticks.append(size)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 2**0.5, high * 2**0.5)
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("batch size")


def log_axis(axes: Axes, values: Iterable[float], which: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    low, high = min(values := list(values)), max(values)
    low, high = low / 1.35, high * 1.35
    span = high / low
    steps: tuple[float, ...]
    if span < 8:
        steps = (1.0, 1.5, *range(2, 10))
    elif span < 40:
        steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    else:
        steps = (1.0, 2.0, 5.0) if span < 3e4 else (1.0,)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def lighter(colour: str, share: float) -> str:
    """Return `colour`, moved towards white by `share` of the way."""
    red, green, blue = (part + (1 - part) * share for part in to_rgb(colour))
    return to_hex((red, green, blue))
