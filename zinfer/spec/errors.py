"""Errors that are told to a user in one line, and the exit codes that they end the command with."""

# click itself uses 2 for usage errors
INTERNAL, USAGE, PARTIAL, NOTHING, ENVIRONMENT, INTEGRITY, REGRESSION = 1, 2, 3, 4, 5, 6, 7


class ZinferError(ValueError):
    """An error that its message explains: what is wrong, and what to do next. `exit_code` ends the command."""

    exit_code = USAGE


def one_line(error: BaseException) -> str:
    """The message of an exception in one line, with its type where the message does not stand alone."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
