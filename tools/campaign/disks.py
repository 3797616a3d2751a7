"""Machines that fail: a full, failing, read-only or vanishing disk, a full stdout, little memory, a second writer; and
a power cut, for which the order of writes and syncs is checked.

Each case disturbs one command, judges how it ends, then lets it start again without the disturbance.
"""

import errno
import random
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign import judge, shim
from tools.campaign.lab import PATIENCE_S, Lab, Normal, Result, Room, Verb
from tools.campaign.subject import Ended, alive
from tools.campaign.verbs import VERBS
from zinfer.core.errors import PARTIAL

WRITERS = ("sweep", "batch", "pack", "plot", "report", "export", "probe", "reuse", "accuracy", "chat", "run-nvme")
READERS = ("run", "best", "plan")
PRINTERS = ("plan", "best", "run", "export", "chat", "plot", "sweep", "report", "pack")
EATERS = ("run", "sweep", "batch", "pack", "plot", "reuse")
ON_VERBS = {
    "disk-full": WRITERS, "size-limit": WRITERS, "dev-full": PRINTERS, "read-only": WRITERS, "vanish": WRITERS,
    "io-error": (*WRITERS, *READERS), "memory": EATERS, "two-jobs": ("sweep", "batch", "pack", "reuse"),
    "sync": WRITERS,
}  # fmt: skip
FEW = 8  # operations in folders other than the user's own
Disturb = Callable[[Room, Verb, Normal, random.Random, Result], Ended]


def verbs_of(name: str) -> list[Verb]:
    """Return the commands that a class disturbs."""
    return [VERBS[verb] for verb in ON_VERBS.get(name, (name.removeprefix("kill-"),))]


class Skipped(Exception):
    """There is nothing to try here; the message says why."""


def _shim(room: Room) -> shim.Shim:
    if room.shim is None:
        raise Skipped("no C compiler, so no shim")
    return room.shim


def _armed(room: Room, verb: Verb, result: Result, how: str, mode: int, *folders: Path, **fault: Any) -> Ended:
    """Run a command with a fault of the shim; `how` is for the tale."""
    room.tale.append(how)
    disk = _shim(room)
    disk.arm(mode, folders, **fault)
    ended = room.run(verb.words, stdin=verb.stdin, armed=True)
    result.struck += disk.hits > 0
    disk.disarm()
    return ended


def _full(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    budget = int(dice.random() * usual.written)
    if verb.name == "probe":  # the disk's own measurement writes most
        budget = dice.choice((budget, dice.randrange(3000)))
    return _armed(room, verb, result, f"  {budget} bytes of room", shim.FULL, room.root, budget=budget)


def _limited(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    largest = max(map(len, usual.contents.values()), default=6000)
    printed = verb.name in ("chat", "run-nvme")  # whose results are on stdout, a file of the harness
    limit = dice.randrange(4000 if printed else 0, max(5000, largest))
    room.tale.append(f"  files of at most {limit} bytes")
    result.struck += 1
    before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    return room.run(verb.words, stdin=verb.stdin, before=before, terminal=not printed)


def _stdout_full(room: Room, verb: Verb, _usual: Normal, _dice: random.Random, result: Result) -> Ended:
    ended = room.run(verb.words, stdin=verb.stdin, stdout="/dev/full")
    result.struck += 1
    if ended.code == 0:
        result.faults.append("stdout is full, and the exit code is 0")
    return ended


def _read_only(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    at = 0 if dice.random() < 0.5 else dice.randrange(max(1, usual.operations))
    folder = room.work if dice.random() < 0.7 else room.root
    error = dice.choice((errno.EROFS, errno.EACCES))
    how = f"  {folder.name} is read-only ({errno.errorcode[error]}) from operation {at} on"
    return _armed(room, verb, result, how, shim.FAIL, folder, kinds=shim.NAMES, at=at, error=error, lasting=True)


def _vanishing(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    others = [room.root / "tmp"] + [room.root / "drive"] * any("DRIVE" in word for word in verb.words)
    folder = dice.choice((room.work, room.work, *others))
    at = dice.randrange(max(1, usual.operations if folder == room.work else min(usual.operations, FEW)))
    how, kinds = f"  {folder.name} vanishes at operation {at}", shim.CHANGES | shim.OPENS
    ended = _armed(room, verb, result, how, shim.VANISH, folder, kinds=kinds, at=at)
    gone = folder.with_name(f"{folder.name}.gone")
    if gone.exists():  # the drive is back, with what was on it
        shutil.rmtree(folder, ignore_errors=True)
        gone.rename(folder)
    return ended


def _failing(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    reading, lasting = dice.random() < 0.5, dice.random() < 0.3
    at = dice.randrange(max(1, usual.reads if reading else usual.operations))
    how = f"  EIO at {'read' if reading else 'write'} {at}{' and all later ones' * lasting}"
    kinds = shim.READS | shim.OPENS if reading else shim.CHANGES
    folders = [room.root, room.lab.model][: 1 + reading]
    return _armed(room, verb, result, how, shim.FAIL, *folders, kinds=kinds, at=at, lasting=lasting)


def _audited(room: Room, verb: Verb, _usual: Normal, dice: random.Random, result: Result) -> Ended:
    """Check that what a power cut must not take is synced; sometimes also where a log has to be mended first."""
    disk = _shim(room)
    words, ended = verb.words, None
    for attempt in range(1 + (dice.random() < 0.5 and bool(verb.grows))):
        if attempt:
            log = room.work / verb.grows[0]
            log.write_bytes(log.read_bytes()[: -dice.randrange(1, 400)])
            words = verb.next(room)
            room.tale.append(f"  {log.name} is cut to {log.stat().st_size} bytes")
        disk.arm(shim.COUNT, [room.work], audit=True)
        ended = room.run(words, stdin=verb.stdin, armed=True)
        result.faults += [disk.unsynced] if disk.unsynced else []
        result.struck += disk.operations > 0
        disk.disarm()
    assert ended is not None
    return ended


def _starved(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    """Give its processes, at some moment, little more memory than they have."""
    more = int(2 ** dice.uniform(18, 27))
    subject = room.start(verb.words, stdin=verb.stdin)
    subject.wait(usual.seconds * dice.uniform(0.3, 1))
    for process in alive(room.root):
        with suppress(OSError):
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + more
            resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))
    room.tale.append(f"  {more >> 10} KiB of memory more than it has by then")
    ended = subject.end(PATIENCE_S)
    room.say(ended)
    result.struck += ended.code != 0
    return ended


def _second(room: Room, verb: Verb, usual: Normal, dice: random.Random, result: Result) -> Ended:
    """Start a command twice at once, and sometimes kill the first."""
    first = room.start(verb.words, stdin=verb.stdin)
    first.wait(dice.random() ** 2 * usual.seconds)
    second = room.start(verb.next(room) if dice.random() < 0.5 else verb.words, stdin=verb.stdin)
    ending = dice.random() < 0.3
    if ending:
        first.wait(dice.random() * usual.seconds)
        first.signal(signal.SIGKILL)
    ends = [first.end(PATIENCE_S), second.end(PATIENCE_S)]
    for ended in ends:
        room.say(ended)
    result.struck += 1
    result.faults += judge.code(ends[0], [signal.SIGKILL] if ending else []) + judge.words(ends[0])
    if not ending and 0 not in {ended.code for ended in ends}:
        result.faults.append(f"neither of two jobs succeeds: {ends[0].code}, {ends[1].code}")
    return ends[1]


DISTURB: dict[str, Disturb] = {
    "disk-full": _full, "size-limit": _limited, "dev-full": _stdout_full, "read-only": _read_only,
    "vanish": _vanishing, "io-error": _failing, "memory": _starved, "two-jobs": _second, "sync": _audited,
}  # fmt: skip


def disturbed(name: str, lab: Lab, number: int, keep: bool = False) -> Result:
    """Disturb a command as a class does; judge its end, its files, and the next start."""
    result, dice = Result(name, number), lab.dice(name, number)
    verb = VERBS[ON_VERBS[name][number % len(ON_VERBS[name])]]
    usual = lab.normals[verb.name]
    with Room(lab, f"{name}-{number}", keep) as room:
        try:
            ended = DISTURB[name](room, verb, usual, dice, result)
        except Skipped as why:
            result.skipped = str(why)
            return result
        result.faults += judge.code(ended, killed=name == "memory") + judge.words(ended)
        result.faults += judge.processes(room.reap())
        if ended.code == 0 and name not in ("vanish", "dev-full", "two-jobs"):
            warned = "was not measured" in ended.output  # a probe without the drive's rate says so
            if not warned and (verb.name not in ("sweep", "batch") or not result.struck):
                outcome = verb.outcome(room, ended)
                result.faults += judge.equal(outcome, usual.outcome, "results of a run that ends well")
        elif ended.code and not ended.output.strip():
            result.faults.append(f"fails without a word (exit code {ended.code})")
        ended = room.run(verb.next(room), stdin=verb.stdin)
        result.faults += judge.words(ended)
        ran_out = name == "memory" and "oom_host" in ended.output  # a result, which the next start keeps
        if ended.code != (PARTIAL if ran_out else 0):
            result.faults.append(f"the next start ends with {ended.code}: {ended.last_line[:300]}")
        elif not ran_out:
            result.faults += judge.equal(verb.outcome(room, ended), usual.outcome, "results")
        result.faults += judge.files(room.files(), usual.files, (*verb.keeps, "*.damaged"))
        result.faults = [f"{verb.name}: {fault}" for fault in result.faults]
        result.tale = room.tale
    return result


CLASSES = {name: partial(disturbed, name) for name in DISTURB}
