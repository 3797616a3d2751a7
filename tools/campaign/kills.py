"""Kills of every command: SIGKILL, SIGTERM, SIGINT, and two of them, at a random moment or at the n-th change on disk,
of the command or of its worker; then the next start, which must end as if nothing had happened.

A process that SIGINT meets while Python itself starts, before a line of zinfer runs, may end with Python's own
traceback.
"""

import os
import signal
from contextlib import suppress
from functools import partial

from tools.campaign import judge, shim
from tools.campaign.lab import PATIENCE_S, Lab, Normal, Result, Room, Verb, contents
from tools.campaign.verbs import VERBS

OLD = b"from an earlier run\n"
LATE_S = 20.0  # from a signal to the end
WAYS = ("KILL", "TERM", "INT", "INT twice", "TERM twice", "worker", "write", "torn")


def disturbed(verb: Verb, lab: Lab, number: int, keep: bool = False) -> Result:
    """Kill `verb` once or several times, and restart it until done."""
    result = Result(f"kill-{verb.name}", number)
    dice, usual = lab.dice(result.name, number), lab.normals[verb.name]
    cold = verb.name == "probe" and number % 5 == 0
    with Room(lab, f"{result.name}-{number}", keep, cold) as room:
        earlier = dict.fromkeys(usual.contents if verb.replaces and dice.random() < 0.5 else (), OLD)
        for name in earlier:
            (room.work / name).parent.mkdir(parents=True, exist_ok=True)
            (room.work / name).write_bytes(OLD)
        recorded: dict[str, bytes] = {}
        for _ in range(dice.randint(1, verb.chain)):
            share = 1 - dice.random() ** 2  # the first half of a run imports
            done = _killed(room, verb, usual, dice.choice(WAYS), share, dice.random() < 0.3, result)
            result.faults += _after(room, verb, usual, recorded, earlier)
            if done:
                break
        ended = room.run(verb.next(room), stdin=verb.stdin)
        result.faults += judge.words(ended) + judge.processes(room.reap())
        if ended.code != 0:
            result.faults.append(f"the next start ends with {ended.code}: {ended.last_line[:300]}")
        else:
            result.faults += judge.equal(verb.outcome(room, ended), usual.outcome, "results")
        result.faults += _after(room, verb, usual, recorded, earlier)
        if judge.files(room.files(), usual.files, verb.keeps):  # what ended after the next start is removed by another
            room.run(("run", "--help"))
        result.faults += judge.files(room.files(), usual.files, verb.keeps)
        result.tale = room.tale
    return result


def _killed(room: Room, verb: Verb, usual: Normal, way: str, share: float, terminal: bool, result: Result) -> bool:
    """Start the command and end it in the given `way`. Return whether it was done before."""
    at_write = way in ("write", "torn") and bool(room.shim and usual.operations)
    way = "KILL" if way in ("write", "torn") and not at_write else way
    terminal = terminal and verb.name != "chat"
    if at_write and room.shim:
        room.shim.arm(shim.KILL if way == "write" else shim.TORN, [room.root], at=int(share * usual.operations))
    subject = room.start(verb.next(room), stdin=verb.stdin, terminal=terminal, armed=at_write)
    sent: list[int] = []
    moment = share * usual.seconds
    room.tale.append(
        f"  {way} at {share:.0%}" + ("" if at_write else f", after {moment:.2f} s") + " on a pty" * terminal
    )
    killed = False
    if way == "worker":
        ended_before = subject.wait(moment)
        while not ended_before and not (below := [*subject.victims()]):  # it has none yet, or will have none
            ended_before = subject.wait(0.02)
        if not ended_before:
            with suppress(ProcessLookupError):
                os.kill(below[int(share * 1e6) % len(below)], signal.SIGKILL)
                killed = True
    elif not at_write:
        number = signal.Signals[f"SIG{way.split()[0]}"]
        subject.wait(moment)
        if subject.signal(number, group=number == signal.SIGINT):
            sent.append(number)
        if way.endswith("twice") and not subject.wait(0.2):
            subject.signal(number, group=number == signal.SIGINT)
    ended = subject.end(PATIENCE_S)
    room.say(ended)
    if at_write and room.shim:
        killed = room.shim.hits > 0
        room.shim.disarm()
    result.struck += bool(sent or killed)
    if judge.before_zinfer(ended, sent):
        room.tale.append("  Python was still starting: its own end")
    else:
        result.faults += judge.code(ended, sent, killed) + judge.words(ended)
    if terminal and signal.SIGKILL not in sent and ended.code != 128 + signal.SIGKILL:
        result.faults += judge.cursor(ended.stdout)
    if {signal.SIGINT, signal.SIGTERM} & {*sent} and (late := ended.seconds - moment) > LATE_S:
        result.faults.append(f"{late:.0f} s from {way} to the end")
    result.faults += judge.processes(room.reap())
    return ended.code == 0 and not killed


def _after(room: Room, verb: Verb, usual: Normal, recorded: dict[str, bytes], earlier: dict[str, bytes]) -> list[str]:
    """Judge the files between two starts: records only grow, others are as before or complete."""
    faults = []
    for name in verb.grows:
        content = (room.work / name).read_bytes() if (room.work / name).is_file() else b""
        faults += judge.kept(recorded.get(name, b""), content, name)
        recorded[name] = content
    files = contents(room.work, *verb.at_once)  # drafts among them: the next start may remove these
    for name, content in usual.contents.items():
        there = files.get(name)
        if verb.good is None:
            faults += judge.whole(there, (earlier.get(name), content), name)
        elif there is not None and not verb.good(there):
            faults.append(f"{name} is cut or mixed ({len(there)} bytes)")
    return faults


CLASSES = {f"kill-{name}": partial(disturbed, verb) for name, verb in VERBS.items()}
