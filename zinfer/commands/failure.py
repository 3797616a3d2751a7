"""The error that a command ends with."""

import click

from zinfer.core.errors import USAGE


class Failure(click.ClickException):
    """Error of a command: a short message that says what to do next, and an exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]
