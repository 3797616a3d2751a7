"""Errors that a user sees as one line, and exit codes."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

# click itself uses 2 for usage errors
INTERNAL, USAGE, PARTIAL, NOTHING, ENVIRONMENT, INTEGRITY, REGRESSION = 1, 2, 3, 4, 5, 6, 7
EXIT_CODES = {
    "0": "all points ok",
    str(INTERNAL): "an internal error: `zinfer --debug ..` shows where",
    str(USAGE): "wrong usage",
    str(PARTIAL): "some points, or lines of a batch job, failed; the results are usable",
    str(NOTHING): "nothing succeeded",
    str(ENVIRONMENT): "this machine cannot do it (memory, disk, missing package, hub out of reach)",
    str(INTEGRITY): "results have other settings, were taken away or lack a shard; or the codec returned wrong bits",
    str(REGRESSION): "a regression (`zinfer compare --fail-on-regression 5%`)",
    "130, 143": "interrupted",
}


# Texts of errors about host memory: of torch, of the system, of C++, and of the dynamic linker.
_NO_MEMORY = (
    "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc", "failed to map segment",
)  # fmt: skip


class ZinferError(ValueError):
    """Base of errors whose message says the fault and the remedy. `exit_code` ends the command."""

    exit_code = USAGE

    def converted(self, kind: type["E"], more: str = "") -> "E":
        """Return this error as one of `kind`, with `more` at its end."""
        error = kind(f"{self}{more}")
        error.exit_code = self.exit_code
        return error


E = TypeVar("E", bound=ZinferError)


class NotFiniteError(ZinferError):
    """Logits that are not numbers."""

    def __init__(self) -> None:
        super().__init__("the model's output is not a number")


def environment_error(error: E) -> E:
    """Give `error` the exit code of this machine (missing package, no network)."""
    error.exit_code = ENVIRONMENT
    return error


def is_out_of_memory(error: BaseException | str) -> bool:
    """Tell whether an error, or its text, means too little host memory."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _NO_MEMORY)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ``; did you mean 'x' or 'y'?`` for close `words`."""
    names = list(words)
    close = get_close_matches(word, names, n=3, cutoff=0.6)
    close += [name for name in names if word and name not in close and (name.startswith(word) or word.startswith(name))]
    return f"; did you mean {' or '.join(map(repr, close[:3]))}?" if close else ""


def error_line(error: BaseException) -> str:
    """Return an exception as one line, with its type if useful."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
