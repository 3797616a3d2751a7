"""Kills of every command: SIGKILL, SIGTERM, SIGINT, and two of them, at a random moment or at the n-th change on disk,
of the command or of its worker; then the next start, which must end as if nothing had happened.

An executed process (`--ordinary`) that SIGINT meets while Python itself starts, before a line of zinfer runs, may end
with Python's own traceback.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from tools.campaign import judge, shim
from tools.campaign.lab import GRACE_S, PATIENCE_S, Lab, Normal, Result, Room, Verb, undisturbed
from tools.campaign.subject import Ended
from tools.campaign.verbs import VERBS

OLD = b"from an earlier run\n"
WAYS = ("KILL", "TERM", "INT", "INT twice", "TERM twice", "worker", "write", "torn")


def normal(lab: Lab, verb: Verb) -> Normal:
    """Return the undisturbed run of a verb, made once."""
    if verb.words not in lab.normals:
        lab.normals[verb.words] = undisturbed(lab, verb)
    return lab.normals[verb.words]


def disturbed(lab: Lab, verb: Verb, number: int, keep: bool = False) -> Result:
    """Kill `verb` once or several times, and restart it until done."""
    result = Result(f"kill-{verb.name}", number)
    dice, usual = lab.dice(result.name, number), normal(lab, verb)
    cold = verb.name == "probe" and number % 5 == 0
    with Room(lab, result.name, keep, cold) as room:
        room.ordinary = dice.random() < lab.ordinary_share or verb.executed
        earlier = {}
        if verb.replaces and dice.random() < 0.5:
            for name in usual.contents:
                (room.work / name).parent.mkdir(parents=True, exist_ok=True)
                (room.work / name).write_bytes(OLD)
                earlier[name] = OLD
        recorded: dict[str, bytes] = {}
        for _ in range(dice.randint(1, verb.chain)):
            words = verb.next if any((room.work / name).exists() for name in verb.grows) else verb.words
            done = _killed(lab, room, verb, words, usual, dice.choice(WAYS), dice.random(), dice.random() < 0.3, result)
            result.faults += _after(room, verb, usual, recorded, earlier)
            if done:
                break
        words = verb.next if any((room.work / name).exists() for name in verb.grows) else verb.words
        ended = room.run(words, stdin=verb.stdin, seconds=PATIENCE_S * (5 if room.ordinary else 1))
        result.faults += judge.words(ended) + judge.processes(room.reap(GRACE_S))
        if ended.code != usual.code:
            result.faults.append(f"the next start ends with {ended.code}: {ended.last_line[:300]}")
        else:
            result.faults += judge.equal(verb.outcome(room, ended), usual.outcome, "results")
        result.faults += _after(room, verb, usual, recorded, earlier)
        left = judge.files(room.files(), usual.files, verb.keeps)
        if left:  # a process of the killed run may have ended after the next start: the one after it removes the rest
            room.run(("run", "--help"), seconds=PATIENCE_S)
            left = judge.files(room.files(), usual.files, verb.keeps)
        result.faults += left
        result.tale = room.tale
    return result


def _killed(
    lab: Lab, room: Room, verb: Verb, words: tuple[str, ...], usual: Normal, way: str, share: float, terminal: bool,
    result: Result,
) -> bool:  # fmt: skip
    """Start the command and end it in the given `way`. Return whether it was done before."""
    at_write = way in ("write", "torn")
    if at_write and (lab.shim is None or room.ordinary or not usual.operations):
        way, at_write = "KILL", False
    terminal = terminal and verb.name != "chat"
    if at_write:
        assert lab.shim is not None
        mode = shim.KILL if way == "write" else shim.TORN
        lab.shim.arm(mode, [room.root], at=int(share * usual.operations))
    subject = room.start(words, stdin=verb.stdin, terminal=terminal, armed=at_write)
    sent: list[int] = []
    moment = share * usual.seconds * (10 if room.ordinary and not verb.executed else 1)
    room.tale.append(
        f"  {way} at {share:.0%}" + ("" if at_write else f", after {moment:.2f} s") + " on a pty" * terminal
    )
    killed = False
    if at_write:
        pass
    elif way == "worker":
        ended_before = subject.wait(moment)
        while not ended_before and not (below := subject.victims(verb.victims)):  # it has none yet, or will have none
            ended_before = subject.wait(0.02)
        if not ended_before:
            with suppress(ProcessLookupError):
                os.kill(below[int(share * 1e6) % len(below)], signal.SIGKILL)
                killed = True
    else:
        number = signal.Signals[f"SIG{way.split()[0]}"]
        subject.wait(moment)
        if subject.signal(number, group=number == signal.SIGINT):
            sent.append(number)
        if way.endswith("twice") and not subject.wait(min(0.2, usual.seconds / 10)):
            subject.signal(number, group=number == signal.SIGINT)
    ended = subject.end(PATIENCE_S * (5 if room.ordinary else 1))
    room.say(ended)
    if at_write:
        assert lab.shim is not None
        killed = lab.shim.hits > 0
        lab.shim.disarm()
    result.struck += bool(sent or killed)
    if room.ordinary and judge.before_zinfer(ended, sent):
        room.tale.append("  Python was still starting: its own end")
    else:
        result.faults += judge.code(ended, sent, killed) + judge.words(ended)
    if terminal and signal.SIGKILL not in sent and ended.code != 128 + signal.SIGKILL:
        result.faults += judge.cursor(ended.stdout)
    if polite := {int(signal.SIGINT), int(signal.SIGTERM)} & set(sent):
        result.faults += _in_time(ended, moment, polite)
    result.faults += judge.processes(room.reap(GRACE_S))
    return ended.code == usual.code and not killed


def _in_time(ended: Ended, moment: float, sent: set[int]) -> list[str]:
    late = ended.seconds - moment
    return [f"{late:.0f} s from {signal.Signals(min(sent)).name} to the end"] if late > 20 else []


def _after(room: Room, verb: Verb, usual: Normal, recorded: dict[str, bytes], earlier: dict[str, bytes]) -> list[str]:
    """Judge the files between two starts: records only grow, others are as before or complete."""
    faults = []
    for name in verb.grows:
        content = (room.work / name).read_bytes() if (room.work / name).is_file() else b""
        faults += judge.kept(recorded.get(name, b""), content, name)
        recorded[name] = content
    for pattern in verb.at_once:
        files = {str(path.relative_to(room.work)): path for path in room.work.glob(pattern) if path.is_file()}
        for name in {*files, *usual.contents}:
            if name not in usual.contents:
                continue  # a draft: the next start may remove it
            there = files[name].read_bytes() if name in files else None
            if verb.good is None:
                faults += judge.whole(there, (earlier.get(name), usual.contents[name]), name)
            elif there is not None and not verb.good(there):
                faults.append(f"{name} is cut or mixed ({len(there)} bytes)")
    return faults


def _case(verb: Verb) -> Callable[[Lab, int, bool], Result]:
    def case(lab: Lab, number: int, keep: bool = False) -> Result:
        began = time.monotonic()
        if verb.missing:
            return Result(f"kill-{verb.name}", number, skipped=f"{verb.needs} is not installed")
        result = disturbed(lab, verb, number, keep)
        result.seconds = time.monotonic() - began
        return result

    return case


CLASSES = {f"kill-{name}": _case(verb) for name, verb in VERBS.items()}
