"""Where tables go: stdout, whose cells are cut to fit a terminal, but never a file or a pipe."""

from rich.console import Console

WIDTH = 160  # columns, where nobody looks at a terminal


def console() -> Console:
    """stdout, for tables."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)
