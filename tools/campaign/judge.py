"""Verdicts on a run that was disturbed: each judge returns the faults that it finds, none if all is well.

They see only what a user sees: exit code, words on the terminal, files, processes.
"""

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.campaign.clients import Reply
from tools.campaign.subject import ROOT, Ended
from zinfer.core.errors import EXIT_CODES, INTERNAL

DOCUMENTED = {int(code) for key in EXIT_CODES for code in key.split(", ")} - {INTERNAL}
FORBIDDEN: tuple[str, ...] = (
    "Traceback (most recent call last)",
    "Internal error",
    "Exception ignored",
    "Exception in thread",
)
FORBIDDEN += ("Fatal Python error", "Segmentation fault", "terminate called")
MAX_STACKS = 8000  # characters told of a process that hangs: where its threads are


def code(ended: Ended, sent: Iterable[int] = (), killed: bool = False) -> list[str]:
    """Judge the exit code after the signals `sent` to it; `killed` if something was to end it with SIGKILL."""
    if ended.code is None:
        return [f"no end within {ended.seconds:.0f} s" + f":\n{ended.stderr[-MAX_STACKS:]}"]
    allowed = set(DOCUMENTED) - {130, 143} | {128 + number for number in sent}
    if killed or signal.SIGKILL in sent:
        allowed.add(128 + signal.SIGKILL)
    polite = {signal.SIGINT, signal.SIGTERM} & set(sent)
    if polite and signal.SIGKILL not in sent and not killed:
        allowed = {0, *(128 + number for number in polite)}
    return [] if ended.code in allowed else [f"exit code {ended.code}: {ended.last_line[:200]}"]


def before_zinfer(ended: Ended, sent: Iterable[int]) -> bool:
    """Tell whether SIGINT met Python before zinfer: it then shows a traceback of its own."""
    early = "KeyboardInterrupt" in ended.output and f'File "{ROOT / "zinfer"}' not in ended.output
    return early and signal.SIGINT in sent and ended.code in (1, 128 + signal.SIGINT)


def words(ended: Ended) -> list[str]:
    """Judge the output: no traceback, no internal error, no fault of the interpreter."""
    return [f"says {word!r}: {_around(ended.output, word)}" for word in FORBIDDEN if word in ended.output]


def cursor(screen: str) -> list[str]:
    """Judge what a terminal is left with: a cursor."""
    shown = re.findall(r"\x1b\[\?25([lh])", screen)
    return ["the terminal is left without a cursor"] if shown and shown[-1] == "l" else []


def kept(before: bytes, after: bytes, name: str) -> list[str]:
    """Judge a file of records that only grows: whole lines of `before` begin `after`."""
    whole = before[: before.rfind(b"\n") + 1]
    return [] if after.startswith(whole) else [f"{name} lost records that were on disk"]


def equal(actual: Any, wanted: Any, what: str) -> list[str]:
    """Judge a result by that of an undisturbed run."""
    if actual == wanted:
        return []
    if isinstance(actual, Mapping) and isinstance(wanted, Mapping):
        first, *more = [key for key in {**wanted, **actual} if actual.get(key) != wanted.get(key)]
        what = f"{what} differ in {1 + len(more)}: {first}"
        return [f"{what}: {_short(actual.get(first))} is not {_short(wanted.get(first))}"]
    return [f"{what} differ: {_short(actual)} is not {_short(wanted)}"]


def replies(actual: Iterable[Reply], wanted: Mapping[str, str], allowed: Collection[int] | None = None) -> list[str]:
    """Judge what clients of a server got: the whole text that is `wanted` after each prompt. With `allowed`, the server
    was disturbed: an answer may have one of these statuses, or be cut after a part of the right text (status 200)."""
    faults = Counter[str]()
    for reply in actual:
        right = wanted.get(reply.prompt, "")
        if reply.text != right if reply.whole else not right.startswith(reply.text):
            faults[f"another text after {reply.prompt!r}: {_short(reply.text)} is not {_short(right)}"] += 1
        elif reply.whole:
            continue
        elif allowed is None or reply.status not in allowed or reply.waited_in_vain:
            faults[f"status {reply.status}: {reply.fault[:200]}"] += 1
    return [f"{fault} ({count} times)" if count > 1 else fault for fault, count in faults.items()]


def whole(actual: bytes | None, allowed: Iterable[bytes | None], name: str) -> list[str]:
    """Judge a file that is written at once: absent or as before, or all of the new one."""
    if actual in [*allowed]:
        return []
    return [f"{name} is missing" if actual is None else f"{name} is cut or mixed ({len(actual)} bytes)"]


def files(actual: Collection[str], wanted: Collection[str], allowed: Sequence[str] = ()) -> list[str]:
    """Judge the files after the next start: those of an undisturbed run; any that match `allowed` may be there."""

    others = {"left behind": {*actual} - {*wanted}, "missing": {*wanted} - {*actual}}
    faults = []
    for what, names in others.items():
        if kept := [name for name in names if not any(map(Path(name).match, allowed))]:
            faults.append(f"{len(kept)} files {what}: {_some(kept)}")
    return faults


def processes(left: Mapping[int, str]) -> list[str]:
    """Judge the processes that run after the end, by their command lines."""
    return [f"{len(left)} processes left behind: {_some(left.values())}"] if left else []


def _some(names: Iterable[Any]) -> str:
    shown = sorted(map(str, names))
    return ", ".join(name[:100] for name in shown[:3]) + (" .." if len(shown) > 3 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:117] + ".."


def _around(text: str, word: str) -> str:
    at = text.find(word)
    return repr(text[max(0, at - 100) : at + 200])
