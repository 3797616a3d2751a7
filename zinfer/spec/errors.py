"""Errors that a user sees as one line, and the exit codes of commands."""

# click itself uses 2 for usage errors
INTERNAL, USAGE, PARTIAL, NOTHING, ENVIRONMENT, INTEGRITY, REGRESSION = 1, 2, 3, 4, 5, 6, 7


class ZinferError(ValueError):
    """Base of errors whose message says what is wrong and what to do next. `exit_code` ends the command."""

    exit_code = USAGE


def one_line(error: BaseException) -> str:
    """The message of an exception in one line, preceded by its type unless it is a ValueError."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
