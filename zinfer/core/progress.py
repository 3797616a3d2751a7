"""Progress of long work: the callback that all rooms report to."""

from collections.abc import Callable

Progress = Callable[[str, float], None]  # the stage under way, and the share of it that is done (0 to 1)
NOTE = "note: "  # begins a stage that is no stage but a line for the user, who would wonder otherwise


def silent(_stage: str, _share: float) -> None:
    """Ignore progress."""


def note(progress: Progress, line: str) -> None:
    """Have `progress` show a line that stays."""
    progress(NOTE + line, 1.0)  # a message that is complete is never left out
