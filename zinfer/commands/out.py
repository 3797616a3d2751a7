"""Tables on stdout: cells are cut to fit a terminal, but never in a file or a pipe."""

from rich.console import Console

WIDTH = 160  # columns of a table in a file or a pipe


def console() -> Console:
    """Console of stdout, for tables."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)
