"""Document model of a report, which `page` renders.

Names of models and texts of errors come from anywhere, so blocks hold plain text only and the page escapes all of it.
The only markup is a pair of backticks in a sentence, around words to be typed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Kind = Literal["", "best", "failed", "predicted"]


class Heading(str):
    """Heading within a section."""


class Text(str):
    """Paragraph."""


class Command(str):
    """Lines for a shell."""


class Items(tuple[str, ...]):
    """List of sentences."""


class Signature(tuple[str, ...]):
    """Lines that are filled in by hand."""


class Row(NamedTuple):
    """Cells of a table; the first one names the row."""

    cells: tuple[str, ...]
    kind: Kind = ""


class Table(NamedTuple):
    """Table; a `folded` one is closed on the screen and not printed.

    A column whose title starts with ``#`` holds numbers and stands flush right; with ``~`` its numbers are predicted
    and look so. The marks themselves are not shown.
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
    def heads(self) -> tuple[tuple[str, str], ...]:
        """Title and mark of each column; the mark is empty for text."""
        return tuple((title.lstrip("#~"), title[:1] if title[:1] in ("#", "~") else "") for title in self.columns)


class Picture(NamedTuple):
    """Figure as SVG, and its description."""

    title: str
    description: str
    svg: str


Block = Heading | Text | Items | Command | Table | Picture | Signature


class Section(NamedTuple):
    """Titled blocks; `anchor` names the section in links."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


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


def section(anchor: str, title: str, blocks: Iterable[Block]) -> Section:
    """Return a section without empty blocks and empty columns."""
    filled = (block.filled() if isinstance(block, Table) else block for block in blocks)
    return Section(anchor, title, tuple(part for part in filled if (part.rows if isinstance(part, Table) else part)))
