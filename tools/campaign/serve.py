"""`zinfer serve` under kills.

A client's answer is the text of the prompt, an error that says so, or a stream that ends early; never another text.
The server ends when it is told. Slow, idle and greedy clients are in `tests/test_serve_{connections,limits}.py`.
"""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress

from tools.campaign import judge
from tools.campaign.clients import ANSWER_S, Load, ask, status_of
from tools.campaign.lab import GRACE_S, PATIENCE_S, Lab, Result, Room
from tools.campaign.subject import Ended, Subject
from tools.campaign.verbs import ON_MODEL

PROMPTS = ("a", "Hello", "abcdefghij", "The rain", "0123456789 0123456789", "zz top", "?", "{}[]()")
TOKENS = 12
WORDS = ("serve", *ON_MODEL, "--offload", "none", "--port", "0", "--batch-size", "4", "--drain", "3")
DRAIN_S = 3 + 20  # until a server that is told to end has ended
MAX_OUTPUT = 1 << 20  # characters on stderr
WAYS = ("KILL", "TERM", "INT", "TERM twice", "worker", "worker", "worker twice", "reader")
READER = "tokenizer_server"  # in the command line of the process that reads prompts


def started(room: Room, result: Result) -> tuple[Subject, int]:
    """Start a server and wait until it serves; return it and its port, 0 if it does not come."""
    server = room.start(WORDS)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not server.wait(0.02):
        if match := re.search(r"^serving .* at http://127\.0\.0\.1:(\d+)/", server.said, re.MULTILINE):
            return server, int(match[1])
    result.faults.append(f"the server does not come: {server.said[-300:]}")
    return server, 0


def ended(room: Room, server: Subject, sent: list[int], killed: bool, result: Result) -> Ended:
    """Wait for the end of a server and judge it: code, words, how much it said, processes and files left."""
    ended_server = server.end(PATIENCE_S)
    room.say(ended_server)
    result.faults += judge.code(ended_server, sent, killed) + judge.words(ended_server)
    if len(ended_server.stderr) > MAX_OUTPUT:
        result.faults.append(f"{len(ended_server.stderr):,} characters on stderr: {ended_server.stderr[:200]!r}")
    result.faults += judge.processes(room.reap())
    return ended_server


def signalled(room: Room, server: Subject, result: Result) -> None:
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    ended(room, server, [signal.SIGTERM], False, result)
    if (late := time.monotonic() - began) > DRAIN_S + GRACE_S:
        result.faults.append(f"{late:.0f} s from SIGTERM to the end")


def workers(server: Subject, reader: bool = False) -> list[int]:
    """Return a server's processes with the model, or the `reader` of prompts."""
    return [process for process, words in server.victims().items() if (READER in words) is reader]


def _answers(lab: Lab, port: int, dice: random.Random, result: Result, what: str) -> None:
    """Judge that a good client soon gets the right answer. Not after another fault."""
    deadline, reply = time.monotonic() + ANSWER_S, None
    while not result.faults and (left := deadline - time.monotonic()) > 0:
        reply = ask(port, dice.choice(PROMPTS), dice.random() < 0.5, left, max_tokens=TOKENS)
        if reply.whole:
            break
        time.sleep(0.2)
    faults = [] if reply is None else judge.replies([reply], lab.texts)
    if reply is not None and reply.seconds > ANSWER_S:
        faults.append(f"the answer took {reply.seconds:.0f} s")
    result.faults += [f"{what}: {fault}" for fault in faults]


def _is_well(port: int, result: Result, what: str) -> None:
    if not result.faults and (status := status_of(port, "/health")) != 200:
        result.faults.append(f"{what}: /health answers {status}")


def _killed(lab: Lab, room: Room, dice: random.Random, result: Result) -> None:
    """Kill a server that has a load, or its worker."""
    way = dice.choice(WAYS)
    server, port = started(room, result)
    if not port:
        ended(room, server, [], False, result)
        return
    load = Load(port, PROMPTS, dice.randint(2, 8), dice, max_tokens=TOKENS)
    moment = dice.random() * 2
    room.tale.append(f"  {way} after {moment:.2f} s of load")
    server.wait(moment)
    sent: list[int] = []
    if way.startswith(("worker", "reader")):
        for _ in range(1 + way.endswith("twice")):
            for worker in workers(server, reader=way == "reader"):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    result.struck += 1
            server.wait(dice.random())
        _answers(lab, port, dice, result, "after the worker's end")
        _is_well(port, result, "after the worker's end")
    else:
        kind = signal.Signals[f"SIG{way.split()[0]}"]
        sent.append(kind)
        result.struck += server.signal(kind)
        if way.endswith("twice") and not server.wait(dice.random()):
            server.signal(kind)
    if not sent:
        # A stream that has sent text ends with an error; a request whose worker ends again and again may be the cause.
        allowed = {200, 503, 500} if way.endswith("twice") else {200, 503}
        result.faults += judge.replies(load.stop(), lab.texts, allowed)
        signalled(room, server, result)
    else:
        ended(room, server, sent, False, result)
        result.faults += judge.replies(load.stop(), lab.texts, {0, 200, 503})


def texts(room: Room) -> dict[str, str]:
    """Return the text of `zinfer run` after each prompt. Raises RuntimeError if there is none."""
    asked = [word for prompt in PROMPTS for word in ("-p", prompt)]
    done = room.run(("run", *ON_MODEL, "--offload", "none", *asked, "--output-len", str(TOKENS), "--json"))
    try:
        return {prompt: answer["output_text"] for prompt, answer in zip(PROMPTS, json.loads(done.stdout), strict=True)}
    except (ValueError, TypeError, KeyError):
        raise RuntimeError(f"no texts to compare with: {done.output[-2000:]}") from None


def furnish(lab: Lab) -> None:
    """Note the texts of `zinfer run`. Raises RuntimeError if an undisturbed server gives others."""
    with Room(lab, "served") as room:
        lab.texts = texts(room)
        result = Result("served", 0)
        server, port = started(room, result)
        for prompt in PROMPTS if port else ():
            for stream in (False, True):
                result.faults += judge.replies([ask(port, prompt, stream, max_tokens=TOKENS)], lab.texts)
        signalled(room, server, result)
    if result.faults:
        raise RuntimeError(f"undisturbed server: {result.faults}")


def _case(lab: Lab, number: int, keep: bool = False) -> Result:
    result = Result("serve-kill", number)
    with Room(lab, f"{result.name}-{number}", keep) as room:
        before = room.files()
        _killed(lab, room, lab.dice(result.name, number), result)
        if judge.files(room.files(), before):  # what was killed leaves scratch: the next start removes it
            room.run(("run", "--help"))
        result.faults += judge.files(room.files(), before)
        result.tale = room.tale
    return result


CLASSES = {"serve-kill": _case}
