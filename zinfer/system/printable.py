"""Filter of foreign text: escapes what a terminal or page would obey.

Control characters, bidirectional overrides and characters without width can move a terminal's cursor, change its title,
hide or reorder what is read, or make an SVG file that is no XML. `printable` writes each of them as JSON does
(``\\u001b``). There is one exit for each kind of output: `guarded` (all that is printed), `zinfer.commands.out.console`
(tables), `zinfer.report.document.html`, and `zinfer.report.plot.style.render` (figures). CSV and JSON files keep every
character.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

from zinfer.core.errors import ZinferError

# Controls without tab and newline, surrogates, separators of lines and paragraphs, marks of direction, characters
# without width or picture, and two code points that are no characters, which XML does not have.
_UNSEEN = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff"
    "\\ufff9-\\ufffb\\ufffe\\uffff\\ud800-\\udfff\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0000-\\U000e007f"
)
_HARMFUL = re.compile(f"[{_UNSEEN}]")
# Joiners, with which Persian, Hindi and many emoji are written.
_JOINERS = "\u200c\u200d"
_CURSOR = re.compile(r"[\r\n]*(?:\x1b\[A)*")  # a write of nothing else moves the cursor between progress bars
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with its harmful characters written as JSON writes them; tabs and newlines stay."""
    return text if text.isascii() and text.isprintable() else _HARMFUL.sub(_escaped, text)


def generated(text: str) -> str:
    """Return a model's text for a terminal: `printable`, with the joiners that some scripts need."""
    return "".join(part if part in _JOINERS else printable(part) for part in re.split(f"([{_JOINERS}])", text) if part)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class Guard:
    """Text stream that writes `printable` text to the stream `unguarded`.

    It calls itself UTF-8, so that click does not go around it where the true encoding is ASCII.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, unguarded: TextIO) -> None:
        self.unguarded = unguarded

    def write(self, text: str) -> int:
        lead = 0 if text.endswith("\n") else len(text) - len(text.lstrip("\r"))  # a progress bar begins anew
        self.unguarded.write(text if _CURSOR.fullmatch(text) else text[:lead] + printable(text[lead:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


class Droppable:
    """Text stream that drops what `stream` cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Send what `stream` holds, and all that follows, to the null device: Python would complain at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream below a `Guard`: for tables, whose own colours are control characters."""
    return getattr(stream, "unguarded", stream)


def show_generated(text: str, stream: TextIO | None = None) -> None:
    """Print a model's text without a newline: unchanged into a file or a pipe, `generated` on a terminal."""
    stream = unguarded(stream or sys.stdout)
    stream.write(generated(text) if stream.isatty() else text)
    stream.flush()


def shows_unicode() -> bool:
    """Tell whether stdout takes every character; JSON is written in ASCII otherwise, to keep its value."""
    encoding = getattr(unguarded(sys.stdout), "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").startswith("utf")


@contextmanager
def guarded() -> Iterator[None]:
    """Put a `Guard` before stdout and stderr; let stdin keep bad bytes. What cannot be shown is a ``?``."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    stderr: Any = Droppable(sys.stderr)
    with redirect_stdout(cast("TextIO", Guard(sys.stdout))), redirect_stderr(cast("TextIO", Guard(stderr))):
        yield


def text_lines(stream: TextIO, name: str) -> Iterator[str]:
    """Yield the lines of a text stream; `name` is for messages. Raises ZinferError for a line that is not UTF-8."""
    for number, line in enumerate(iter(stream.readline, ""), 1):
        if _SURROGATE.search(line):
            raise ZinferError(f"line {number} of {name} is not UTF-8 text")
        yield line


def refuse_surrogates(arguments: Iterable[str]) -> None:
    """Raise ZinferError for an argument that is not UTF-8."""
    for argument in arguments:
        if _SURROGATE.search(argument):
            raise ZinferError(f"the argument '{argument[:80]}' is not UTF-8 text")
