"""Weights of a checkpoint that change under a server or copy.

What the earlier weights gave is refused in a line, or not used: a result is that of the weights on disk alone. A text
that a server gives is that of one set of weights.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tools.campaign import judge
from tools.campaign.clients import Load
from tools.campaign.damage import PACKED_RUN
from tools.campaign.kills import normal
from tools.campaign.lab import PATIENCE_S, Lab, Result, Room, Verb
from tools.campaign.serve import PROMPTS, TOKENS, WORDS, ended, started, workers
from tools.campaign.verbs import VERBS
from tools.damage import read_header
from zinfer.record.store import read


def change(folder: Path, dice: random.Random) -> str:
    """Shuffle the values of all tensors of a checkpoint, or of one; in place or in new files, with their old times or
    new ones. Return what was done."""
    paths = {name: path for path in sorted(folder.glob("*.safetensors")) for name in read_header(path)[0]}
    varied = [name for name in sorted(paths) if len(np.unique(_values(paths[name], name))) > 1]
    names = varied if dice.random() < 0.5 else [dice.choice(varied)]
    anew, dated = dice.random() < 0.5, dice.random() < 0.5
    for path in sorted({paths[name] for name in names}):
        header, data = read_header(path)
        content, times = bytearray(path.read_bytes()), path.stat()
        head = len(content) - len(data)
        for name in names:
            if paths[name] == path:
                start, end = header[name]["data_offsets"]
                shuffled = np.random.default_rng(dice.getrandbits(32)).permutation(_values(path, name))
                content[head + start : head + end] = shuffled.tobytes()
        written = path.with_name("anew") if anew else path
        written.write_bytes(content)
        written.rename(path)
        if dated:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    what = "all tensors" if len(names) > 1 else names[0]
    return what + ", in new files" * anew + ", with their old times" * dated


def _values(path: Path, name: str) -> Any:
    header, data = read_header(path)
    start, end = header.get(name, {}).get("data_offsets", (0, 0))
    return np.frombuffer(data[start:end], "<f4")


def _own(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command with the checkpoint of the room."""
    return tuple(word if word != "MODEL" else "model" for word in words)


def _resumed(verb: Verb, lab: Lab, room: Room, dice: random.Random, result: Result) -> str:
    """Resume records of the earlier weights."""
    (name,) = verb.grows
    path, usual = room.work / name, normal(lab, verb)
    first = room.start(_own(verb.words))
    first.wait(usual.seconds * dice.uniform(0.3, 1.2))
    first.signal(dice.choice((signal.SIGKILL, signal.SIGTERM)))
    room.say(first.end(PATIENCE_S))
    result.faults += judge.processes(room.reap())
    what = change(room.work / "model", dice)
    before = path.read_bytes() if path.is_file() else b""
    done = room.run(_own(verb.next if path.exists() else verb.words))
    result.struck += bool(before)
    result.faults += judge.words(done)
    if done.code != 0:
        result.faults += judge.refusal(done)
        if path.is_file() and path.read_bytes() != before:
            result.faults.append(f"{name} was refused, and has changed")
        return what
    outcome = verb.outcome(room, done)
    if name == "r.jsonl":
        revisions = {point.model_revision for point in read(path).points}
        result.faults += judge.equal(outcome, usual.outcome, "points")
        if len(revisions) > 1:
            result.faults.append(f"points of {len(revisions)} sets of weights are in one file")
    else:
        path.rename(room.work / "mixed.jsonl")
        path.with_name(f"{name}.job").unlink()
        again = room.run(_own(verb.words))
        result.faults += judge.equal(outcome, verb.outcome(room, again), "answers of the changed weights")
    return what


def _batch(lab: Lab, room: Room, dice: random.Random, result: Result) -> str:
    return _resumed(VERBS["batch"], lab, room, dice, result)


def _sweep(lab: Lab, room: Room, dice: random.Random, result: Result) -> str:
    return _resumed(VERBS["sweep"], lab, room, dice, result)


def _packed(_lab: Lab, room: Room, dice: random.Random, result: Result) -> str:
    """Run with packed layers of the earlier weights."""
    verb = VERBS["run"]
    room.run((*_own(VERBS["pack"].words), "-o", "packed"))
    words = _own(PACKED_RUN)
    before = verb.outcome(room, room.run(words))
    what = change(room.work / "model", dice)
    done = room.run(words)
    shutil.rmtree(room.work / "packed")
    room.run((*_own(VERBS["pack"].words), "-o", "packed"))
    wanted = verb.outcome(room, room.run(words))
    result.struck += before != wanted
    result.faults += judge.words(done)
    if done.code != 0:
        result.faults += judge.refusal(done)
    else:
        result.faults += judge.equal(verb.outcome(room, done), wanted, "texts")
    return what


def _served(lab: Lab, room: Room, dice: random.Random, result: Result) -> str:
    """Kill the worker of a server after the change: there is no other one, and the server ends, and says why."""
    what = ""
    server, port = started(room, result, words=_own(WORDS))
    if port:
        load = Load(port, PROMPTS, dice.randint(2, 8), dice, max_tokens=TOKENS)
        server.wait(dice.random())
        what = change(room.work / "model", dice)
        for worker in workers(server):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                result.struck += 1
        ends = server.wait(PATIENCE_S)
        result.faults += judge.replies(load.stop(), lab.notes["served"], {0, 200, 500, 503})
        room.tale.append(f"  {len(load.replies)} answers")
        if not ends:
            result.faults.append("the server goes on with a worker that cannot have the weights of the start")
    outcome = ended(room, server, [], False, result)
    if port and "weights" not in outcome.last_line:
        result.faults.append(f"the server does not say why it ends: {outcome.last_line[:200]}")
    return what


PLACES: dict[str, Callable[[Lab, Room, random.Random, Result], str]] = {
    "batch": _batch, "sweep": _sweep, "packed": _packed, "serve": _served,
}  # fmt: skip


def _case(lab: Lab, number: int, keep: bool = False) -> Result:
    name = [*PLACES][number % len(PLACES)]
    result, began = Result("weights", number), time.monotonic()
    with Room(lab, "weights", keep) as room:
        shutil.copytree(lab.model, room.work / "model")
        what = PLACES[name](lab, room, lab.dice("weights", number), result)
        room.tale.append(f"  {name}: {what}")
        result.faults += judge.processes(room.reap())
        result.tale = room.tale
    result.faults = [f"{name}, {what}: {fault}" for fault in result.faults]
    result.seconds = time.monotonic() - began
    return result


USES = ("batch", "sweep")
CLASSES = {"weights": _case}
