"""Progress of long work: the callback that all rooms report to."""

from collections.abc import Callable

Progress = Callable[[str, float], None]  # the stage under way, and the share of it that is done (0 to 1)


def silent(_stage: str, _share: float) -> None:
    """Ignore progress."""
