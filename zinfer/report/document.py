"""Document model of a report, and its HTML page in one file.

Names of models and texts of errors come from anywhere, so blocks hold plain text only, and the page escapes all of it
where it is written; its own policy forbids to load or run whatever slipped through, and names the one script of a live
page by its hash. The only markup is a pair of backticks in a sentence, around words to be typed.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Literal, NamedTuple, TypeVar

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from zinfer.system.printable import printable

T = TypeVar("T")
Kind = Literal["", "best", "failed"]


class Heading(str):
    """Heading within a section."""


class Text(str):
    """Paragraph."""


class Command(str):
    """Lines for a shell."""


class Items(tuple[str, ...]):
    """List of sentences, of any iterable."""


class Signature(tuple[str, ...]):
    """Lines that are filled in by hand."""


class Row(NamedTuple):
    """Cells of a table; the first one names the row."""

    cells: tuple[str, ...]
    kind: Kind = ""


class Table(NamedTuple):
    """Table; a `folded` one is closed on the screen and not printed.

    A column whose title starts with ``#`` holds numbers and stands flush right; the mark itself is not shown.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    folded: bool = False

    def filled(self) -> "Table":
        """Return the table without its empty columns; the first column stays."""
        kept = [nth for nth in range(len(self.columns)) if nth == 0 or any(row.cells[nth] for row in self.rows)]
        rows = tuple(row._replace(cells=tuple(row.cells[nth] for nth in kept)) for row in self.rows)
        return self._replace(columns=tuple(self.columns[nth] for nth in kept), rows=rows)

    @property
    def heads(self) -> tuple[tuple[str, bool], ...]:
        """Title of each column, and whether it holds numbers."""
        return tuple((title.lstrip("#"), title.startswith("#")) for title in self.columns)


class Picture(NamedTuple):
    """Figure as SVG, and its description."""

    title: str
    description: str
    svg: str


Block = Heading | Text | Items | Command | Table | Picture | Signature


class Section:
    """Titled blocks, without empty ones and empty columns; `anchor` names the section in links."""

    def __init__(self, anchor: str, title: str, blocks: Iterable[Block]) -> None:
        self.anchor, self.title = anchor, title
        filled = (block.filled() if isinstance(block, Table) else block for block in blocks)
        self.blocks = tuple(part for part in filled if (part.rows if isinstance(part, Table) else part))


class Document(NamedTuple):
    """Report as a whole; `subtitle` says what it covers."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def table(
    caption: str,
    columns: Mapping[str, Callable[[T], str]],
    items: Iterable[T],
    kind: Callable[[T], Kind] = lambda _item: "",
) -> Table:
    """Return a table of `items`, a row each: `columns` make its cells, `kind` says how it looks."""
    rows = (Row(tuple(cell(item) for cell in columns.values()), kind(item)) for item in items)
    return Table(caption, tuple(columns), tuple(rows))


def html(document: Document, live: bool = False) -> str:
    """Return the page with its style and figures, without invisible characters. A `live` one replaces itself."""
    script = Markup(_file("page.js")) if live else ""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    style = Markup(_file("page.css"))
    return printable(_template().render(document=document, style=style, script=script, digest=digest))


def prose(text: str) -> Markup:
    """Return a sentence with its backticks as code and everything escaped."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def shell(text: str) -> Markup:
    """Return shell lines that do not wrap within an option's name."""
    return Markup(re.sub(r"(?<=\s)--?[A-Za-z][A-Za-z-]*", r"<span>\g<0></span>", str(escape(text))))


def columned(numeric: bool, text: str = "") -> Markup:
    """Return the class of a table's cell: numeric, or prose by its length."""
    prose = "" if not text else "s" if len(text) < 16 else "m" if len(text) < 60 else "l"
    return Markup(f' class="{kind}"') if (kind := "n" if numeric else prose) else Markup("")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": prose, "shell": shell, "columned": columned, "form": lambda it: type(it).__name__}
    environment.filters["image"] = lambda svg: f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("zinfer.report") / name).read_text(encoding="utf-8")
