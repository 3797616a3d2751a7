"""Output that commands share: lines of prose and tables."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import IO, Any, NoReturn, TextIO, TypeVar, cast

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from zinfer.commands.verb import Failure
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.units import figures
from zinfer.system import atomic
from zinfer.system.printable import printable, unguarded

T = TypeVar("T")
UNLIMITED = 10_000  # columns of a table in a file or a pipe
MIN_WORDS = 12  # columns that a cell of words keeps when it is wrapped


class PlainConsole(Console):
    """Console of plain text: no markup, no cursor movement."""

    def __init__(self, file: TextIO | None = None, **settings: Any) -> None:
        stream = unguarded(sys.stdout if file is None else file)
        super().__init__(file=stream, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError; rich would exit with 1."""
        raise BrokenPipeError


def say(text: str, err: bool = False) -> None:
    """Print lines of prose, wrapped where they go to a terminal."""
    click.echo(wrapped(text, sys.stderr if err else sys.stdout), err=err)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise Failure where `path` cannot be written."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; choose another place with -o"
        raise Failure(f"cannot write {path}: {why}", ENVIRONMENT) from error


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` as a whole. Raises Failure if that fails."""
    with writing(path):
        atomic.write(path, content)


def wrapped(text: str, stream: IO[str]) -> str:
    """Return lines of prose, wrapped at the width of a terminal; words within backquotes stay together."""
    if not stream.isatty():
        return text
    width = PlainConsole(cast(TextIO, stream)).width
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        whole = re.sub("`[^`]*`", lambda match: match[0].replace(" ", "\0"), line)
        parts = wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += parts or [line]
    return "\n".join(lines).replace("\0", " ")


def console() -> Console:
    """Return stdout for tables, with the width of the terminal or COLUMNS."""
    plain = PlainConsole()
    return plain if plain.is_terminal or "COLUMNS" in os.environ else PlainConsole(width=UNLIMITED)


class Table:
    """Table of plain text that adapts to the terminal's width.

    Too wide a table loses its frame, then wraps its words, then leaves out the columns in `drop` and says so, and at
    last shows each row as a block of lines. Columns whose title begins with ``#`` hold numbers: they stand flush right
    and are never wrapped. Columns without any content are left out.
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], drop: Sequence[str] = ()
    ) -> None:
        every = [tuple(row) for row in rows]
        used = [nth for nth in range(len(columns)) if not every or any(row[nth] for row in every)]
        self.title = title
        self.columns = [columns[nth].lstrip("#") for nth in used]
        self.numbers = [columns[nth].startswith("#") for nth in used]
        self.rows = [[row[nth] for nth in used] for row in every]
        self.drop = [name for name in drop if name in self.columns]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.title:
            yield Text(self.title, style="italic")
        shown, gone = list(range(len(self.columns))), list[str]()
        while self._min_width(shown) > width and len(gone) < len(self.drop):
            gone.append(self.drop[len(gone)])
            shown = [nth for nth in shown if self.columns[nth] not in gone]
        if self._min_width(shown) > width:
            yield from self._blocks()
            return
        yield self._grid(shown, width)
        if gone:
            yield Text(f"left out for want of room: {', '.join(gone)} (a wider terminal, a pipe or --json shows them)")

    def _widths(self, nth: int) -> tuple[int, int]:
        """Return the smallest and the natural width of a column."""
        title, cells = self.columns[nth], [row[nth] for row in self.rows]
        lines = max((cell_len(line) for cell in cells for line in cell.splitlines()), default=0)
        words = max((cell_len(word) for text in [title, *cells] for word in text.split()), default=0)
        natural = max(lines, cell_len(title))
        if self.numbers[nth]:  # its title may be wrapped, its numbers may not
            return max(lines, *map(cell_len, title.split() or [""])), natural
        return min(natural, max(words, MIN_WORDS)), natural

    def _min_width(self, shown: Sequence[int]) -> int:
        return sum(self._widths(nth)[0] for nth in shown) + 2 * (len(shown) - 1)

    def _grid(self, shown: Sequence[int], width: int) -> Grid:
        natural = sum(self._widths(nth)[1] for nth in shown)
        framed = natural + 3 * len(shown) + 1 <= width
        grid = Grid(box=box.HEAVY_HEAD if framed else box.SIMPLE_HEAD, pad_edge=framed, show_edge=framed)
        if not framed:
            grid.padding, grid.collapse_padding = (0, 1, 0, 0), True
        spare = width - self._min_width(shown)
        for nth in shown:
            min_width, wanted = self._widths(nth)
            given = min(wanted - min_width, max(0, spare))
            spare -= given
            grid.add_column(
                Text(self.columns[nth]),
                justify="right" if self.numbers[nth] else "left",
                width=min_width + given,
                overflow="fold",
            )
        for row in self.rows:
            grid.add_row(*(Text(row[nth]) for nth in shown))
        return grid

    def _blocks(self) -> Iterable[Text]:
        named = max(map(len, self.columns[1:]), default=0)
        for row in self.rows:
            yield Text(row[0], overflow="fold")
            for name, cell in zip(self.columns[1:], row[1:], strict=True):
                if cell not in ("", "-"):
                    yield Text(f"  {name:{named}}  {cell}", overflow="fold")


def cell(value: float | None, form: Callable[[float], str] = figures) -> str:
    """Return a cell with a number; an empty one for none, or 0."""
    return form(value) if value else ""


def table_of(columns: Mapping[str, Callable[[T], str]], items: Iterable[T], title: str = "", **more: Any) -> Table:
    """Return a table of `items`, a row each: `columns` make its cells."""
    return Table(title, tuple(columns), [[make(item) for make in columns.values()] for item in items], **more)
