"""Blocks of a report before it has a form: `zinfer.report.page` and `zinfer.report.markdown` write them.

Names of models and texts of errors come from anywhere, so blocks hold plain text only and each form escapes all of it.
The only markup is a pair of backticks in a sentence, around words to be typed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["", "best", "failed", "predicted"]


class Text(NamedTuple):
    """A paragraph. One of kind `missing` says what the report lacks and how to get it; `caution`, how not to read
    it."""

    text: str
    kind: Literal["", "missing", "caution"] = ""


class Heading(NamedTuple):
    """A heading within a section: the subject of the blocks after it."""

    text: str


class Items(NamedTuple):
    """A list of sentences."""

    lines: tuple[str, ...]


class Command(NamedTuple):
    """Lines for a shell."""

    text: str


class Row(NamedTuple):
    """Cells of a table, the first of which names the row. Cells are plain text: backticks mean themselves."""

    cells: tuple[str, ...]
    kind: Kind = ""


class Table(NamedTuple):
    """A table. A column whose title starts with ``#`` holds numbers and stands flush right; with ``~`` its numbers are
    predicted and look so. The marks themselves are not shown."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def filled(self) -> "Table":
        """Return the table without the columns that have no text in any row; the first one stays."""
        kept = [nth for nth in range(len(self.columns)) if nth == 0 or any(row.cells[nth] for row in self.rows)]
        rows = tuple(row._replace(cells=tuple(row.cells[nth] for nth in kept)) for row in self.rows)
        return self._replace(columns=tuple(self.columns[nth] for nth in kept), rows=rows)

    @property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """Title and mark of each column; the mark is empty for text."""
        return tuple((title.lstrip("#~"), title[:1] if title[:1] in ("#", "~") else "") for title in self.columns)


class Picture(NamedTuple):
    """A figure as an SVG file (`zinfer.report.plot.style.render`); `description` says what a reader sees in it.

    A table beside it must hold the same values: forms without figures leave it out.
    """

    title: str
    description: str
    svg: str


class Links(NamedTuple):
    """Figures in files of their own, by name. Only a form that may need other files shows them."""

    files: Mapping[str, str]


class Recommendation(NamedTuple):
    """The configuration to use for one model on one machine, and the command that runs it; `value` is empty where
    nothing succeeded. `facts` are pairs of a name and a text: latency, cost, risks."""

    question: str
    value: str
    unit: str
    configuration: str
    lines: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    command: str = ""


class Signature(NamedTuple):
    """A place to sign, with the lines that are to be filled in by hand."""

    lines: tuple[str, ...]


class Details(NamedTuple):
    """Blocks that a reader opens on the screen, and that are not printed: `title` says what is inside."""

    title: str
    blocks: "tuple[Plain, ...]"


Plain = Text | Heading | Items | Command | Table | Picture | Links | Recommendation | Signature
Block = Plain | Details


class Section(NamedTuple):
    """One question of the report. `anchor` names it in links."""

    anchor: str
    title: str
    blocks: Sequence[Block]


class Document(NamedTuple):
    """The whole report. `subtitle` says what it covers."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
