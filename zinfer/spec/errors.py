"""Errors that a user sees as one line, and the exit codes of commands."""

# click itself uses 2 for usage errors
INTERNAL, USAGE, PARTIAL, NOTHING, ENVIRONMENT, INTEGRITY, REGRESSION = 1, 2, 3, 4, 5, 6, 7
EXIT_CODES = {
    "0": "all points ok",
    str(INTERNAL): "an internal error: `zinfer --debug ..` shows where",
    str(USAGE): "wrong usage",
    str(PARTIAL): "some points, or lines of a batch job, failed; the results are usable",
    str(NOTHING): "nothing succeeded",
    str(ENVIRONMENT): "this machine cannot do it (memory, disk, missing package)",
    str(INTEGRITY): "the results have other settings or were taken away, or the codec returned wrong bits",
    str(REGRESSION): "a regression (`zinfer compare --fail-on-regression 5%`)",
    "130, 143": "interrupted",
}


class ZinferError(ValueError):
    """Base of errors whose message says the fault and the remedy. `exit_code` ends the command."""

    exit_code = USAGE


def one_line(error: BaseException) -> str:
    """Return the message of an exception in one line, preceded by its type unless it is a ValueError."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
