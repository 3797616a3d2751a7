"""Files that commands write."""

from pathlib import Path

from zinfer.commands.failure import Failure
from zinfer.core.errors import ENVIRONMENT
from zinfer.system import atomic


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` as a whole. Raises Failure if that fails."""
    try:
        atomic.write(path, content)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; choose another place with -o", ENVIRONMENT) from error
