"""A report before it has a form: sections of blocks, which `zinfer.report.page` and `zinfer.report.markdown` write.

Names of models and texts of errors come from anywhere, so blocks hold plain text only and each form escapes all of it.
The one mark is a pair of backticks in a sentence, around what is to be typed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["", "best", "failed", "predicted"]


class Text(NamedTuple):
    """A paragraph. `missing` says what the report lacks and how to get it; `caution`, how not to read it."""

    words: str
    kind: Literal["", "missing", "caution"] = ""


class Heading(NamedTuple):
    """What the blocks after it are about, within a section."""

    words: str


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
    """A column whose title starts with ``#`` holds numbers, so stands flush right; with ``~``, they are predicted and
    look so. The marks themselves are not shown."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """Each column's title and its mark, empty for text."""
        return tuple((title.lstrip("#~"), title[:1] if title[:1] in ("#", "~") else "") for title in self.columns)


class Swatch(NamedTuple):
    """An entry of a legend: its sign as SVG, and what that stands for."""

    svg: str
    label: str


class Picture(NamedTuple):
    """A figure, drawn as SVG for a wide and for a narrow page; `description` says what a reader sees in it."""

    title: str
    description: str
    wide: str
    narrow: str
    legend: tuple[Swatch, ...] = ()


class Links(NamedTuple):
    """Figures in files of their own, by name. Only a form that may need other files shows them."""

    files: Mapping[str, str]


class Answer(NamedTuple):
    """What to use for one workload, and the command that runs it; `value` is empty where nothing succeeded."""

    question: str
    value: str
    unit: str
    configuration: str
    lines: tuple[str, ...] = ()
    command: str = ""


Block = Text | Heading | Items | Command | Table | Picture | Links | Answer


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
