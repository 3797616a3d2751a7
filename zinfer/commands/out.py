"""Output that commands share: tables on stdout, and runs of studies in the files of their kind."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from zinfer.spec.printable import printable, unguarded

if TYPE_CHECKING:
    from zinfer.record.study import Study

WIDTH = 160  # columns of a table in a file or a pipe


class PlainConsole(Console):
    """Console whose texts are plain: no markup of rich in them, and no character that moves the cursor."""

    def __init__(self, file: TextIO | None = None, **settings: Any) -> None:
        stream = unguarded(sys.stdout if file is None else file)
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal's encoding lacks is a question mark
        super().__init__(file=stream, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console() -> Console:
    """Return stdout for tables; cells are cut to fit a terminal, but never a file or a pipe."""
    found = PlainConsole()
    return found if found.is_terminal else PlainConsole(width=WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Table:
    """Return a table of text; columns whose title begins with ``#`` hold numbers and stand flush right."""
    found = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in columns:
        found.add_column(name.lstrip("#"), justify="right" if name.startswith("#") else "left")
    for row in rows:
        found.add_row(*row)
    return found


def study_file(kind: "type[Study]", machine: str, output: Path | None) -> Path:
    """Return the file for runs of a kind of study: `output`, or the machine's file in it or in sweeps/results."""
    from zinfer.record import study
    from zinfer.spec.local import RESULTS

    path = output or RESULTS / machine
    return path / study.file_name(kind) if output is None or path.is_dir() else path


def write(path: Path, text: str) -> None:
    """Replace `path` by `text` as a whole: a reader sees the old file or the new one, never half of it.

    Raises Failure where the folder cannot be written to.
    """
    from zinfer.cli import Failure
    from zinfer.spec import atomic
    from zinfer.spec.errors import ENVIRONMENT

    try:
        atomic.write(path, text)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; choose another place with -o", ENVIRONMENT) from None
