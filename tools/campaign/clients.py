"""Clients of `zinfer serve`: good ones, whose answers are judged, and those that are slow, idle, greedy or gone."""

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

ANSWER_S = 60.0  # after which a client has waited in vain
TEXTS = "/v1/completions"


class Reply(NamedTuple):
    """Answer to one request: its status (0: none), its text, whether that is all of it, and what went wrong."""

    prompt: str
    status: int
    text: str = ""
    whole: bool = False
    fault: str = ""
    waited_in_vain: bool = False
    seconds: float = 0.0


def ask(port: int, prompt: str, stream: bool, seconds: float = ANSWER_S, **more: Any) -> Reply:
    """Ask for the text after `prompt`, greedily; wait at most `seconds` for each part of the answer."""
    body = json.dumps({"prompt": prompt, "temperature": 0, "stream": stream, **more}).encode()
    began, status, text = time.monotonic(), 0, ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    fault, whole, in_vain = "", False, False
    try:
        connection.request("POST", TEXTS, body, {"content-type": "application/json"})
        response = connection.getresponse()
        status = response.status
        if status != 200:
            fault = response.read().decode(errors="replace")[:300]
        elif not stream:
            text, whole = json.loads(response.read())["choices"][0]["text"], True
        else:
            for line in response:
                if line.strip() == b"data: [DONE]":
                    whole = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        fault = str(event["error"])[:300]
                        break
                    text += event["choices"][0]["text"] if event["choices"] else ""
            fault = fault or ("" if whole else "the stream was cut")
    except TimeoutError:
        fault, in_vain = f"no answer within {seconds:.0f} s", True
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        fault = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return Reply(prompt, status, text, whole and not fault, fault, in_vain, time.monotonic() - began)


def status_of(port: int, path: str, seconds: float = ANSWER_S) -> int:
    """Return the status of a path; 0 if there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class Load:
    """Good clients that ask until `stop`, each in a thread. `replies` are what they got."""

    def __init__(self, port: int, prompts: Sequence[str], clients: int, dice: random.Random, **more: Any) -> None:
        self.replies: list[Reply] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(port, prompts, random.Random(dice.random()), more), daemon=True)
            for _ in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int, prompts: Sequence[str], dice: random.Random, more: Mapping[str, Any]) -> None:
        while not self._over.is_set():
            self.replies.append(reply := ask(port, dice.choice(prompts), dice.random() < 0.5, **more))
            if not reply.whole:
                self._over.wait(0.05)

    def stop(self) -> list[Reply]:
        """Let each client end with the answer that it waits for; return all replies."""
        self._over.set()
        deadline = time.monotonic() + ANSWER_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = sum(thread.is_alive() for thread in self._threads)
        return [*self.replies, *[Reply("", 0, fault=f"no end within {ANSWER_S:.0f} s", waited_in_vain=True)] * late]


def _head(length: int, path: str = TEXTS, method: str = "POST") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def _request(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    return _head(len(content)) + content


def _idle(_made: socket.socket, _dice: random.Random) -> None: ...


def _half_head(made: socket.socket, dice: random.Random) -> None:
    whole = _head(10)
    made.sendall(whole[: dice.randrange(1, len(whole) - 4)])


def _half_body(made: socket.socket, dice: random.Random) -> None:
    made.sendall(_head(dice.choice((100, 1000, 1 << 20))) + b'{"prompt": ')


def _kept_alive(made: socket.socket, _dice: random.Random) -> None:
    made.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")


def _unread(made: socket.socket, dice: random.Random) -> None:
    made.sendall(
        _request(prompt="abc", max_tokens=200, stream=True, temperature=1, ignore_eos=True, n=dice.choice((1, 8)))
    )


def _gone(made: socket.socket, dice: random.Random) -> None:
    made.sendall(_request(prompt="abc", max_tokens=200, stream=dice.random() < 0.5, ignore_eos=True))
    if dice.random() < 0.5:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


def _garbage(made: socket.socket, dice: random.Random) -> None:
    made.sendall(bytes(dice.randrange(256) for _ in range(dice.randrange(1, 400))))


def _huge_head(made: socket.socket, _dice: random.Random) -> None:
    with suppress(OSError):  # it is cut off
        made.sendall(b"GET /health HTTP/1.1\r\n" + b"x-long: " + b"a" * (1 << 20))


WITHOUT_REQUEST = ("idle", "half a head", "garbage")  # which the server has to close by itself
WITH_WORK = ("unread", "gone")  # which ask for many tokens
NUISANCES: dict[str, Callable[[socket.socket, random.Random], None]] = {
    "idle": _idle, "half a head": _half_head, "half a body": _half_body, "kept alive": _kept_alive,
    "unread": _unread, "gone": _gone, "garbage": _garbage, "a huge head": _huge_head,
}  # fmt: skip


class Crowd:
    """Connections of nuisances, which send a byte now and then."""

    def __init__(self) -> None:
        self.held: dict[socket.socket, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def add(self, port: int, kind: str, dice: random.Random) -> None:
        """Open a connection of a kind; one that the server refuses is not held."""
        with suppress(OSError):
            made = socket.create_connection(("127.0.0.1", port), 5)
            self.held[made] = kind
            NUISANCES[kind](made, dice)

    def _drip(self) -> None:
        while not self._over.wait(1.0):
            for made, kind in list(self.held.items()):
                if kind in ("half a head", "half a body"):
                    with suppress(OSError):
                        made.send(b"a", socket.MSG_DONTWAIT)

    def open(self, kinds: Sequence[str]) -> int:
        """Return how many connections of these kinds the server has not closed."""
        count = 0
        for made, kind in self.held.items():
            if kind in kinds:
                made.setblocking(False)
                try:
                    while made.recv(1 << 16):
                        pass
                except BlockingIOError:
                    count += 1
                except OSError:
                    pass
        return count

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for made in self.held:
            made.close()


def _rows(_dice: random.Random) -> dict[str, Any]:
    return {"prompt": "abc", "n": 1000, "max_tokens": 200, "ignore_eos": True, "temperature": 1}


def _prompts(_dice: random.Random) -> dict[str, Any]:
    return {"prompt": ["abc"] * 1000, "max_tokens": 200, "ignore_eos": True}


def _long_prompt(dice: random.Random) -> dict[str, Any]:
    return {"prompt": "a b " * (1 << dice.choice((18, 20, 21))), "max_tokens": 4}


def _token_ids(dice: random.Random) -> dict[str, Any]:
    return {"prompt": [5] * (1 << dice.choice((16, 20))), "max_tokens": 4}


def _values(_dice: random.Random) -> dict[str, Any]:
    return {"prompt": [[]] * 2_000_000}


def _stops(_dice: random.Random) -> dict[str, Any]:
    return {"prompt": "abc", "n": 100, "max_tokens": 100, "stop": ["s" * 9000 + str(number) for number in range(100)]}


def _scored(_dice: random.Random) -> dict[str, Any]:
    return {"prompt": ["ab" * 100] * 200, "max_tokens": 100, "logprobs": 20, "echo": True, "ignore_eos": True}


def _messages(_dice: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}] * 200_000, "max_tokens": 4}


GREEDY: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "n=1000": _rows, "a thousand prompts": _prompts, "a long prompt": _long_prompt, "many token ids": _token_ids,
    "millions of values": _values, "long stops": _stops, "scores of long prompts": _scored, "many messages": _messages,
}  # fmt: skip


class Greedy:
    """Client that sends costly requests in `threads` threads, until `stop`."""

    def __init__(self, port: int, kind: str, threads: int, dice: random.Random) -> None:
        body = GREEDY[kind](dice)
        path = "/v1/chat/completions" if "messages" in body else TEXTS
        content = json.dumps(body).encode()
        self.statuses: list[int] = []
        self._over = threading.Event()
        self._made: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=self._run, args=(port, _head(len(content), path) + content), daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int, request: bytes) -> None:
        while not self._over.is_set():
            with suppress(OSError, ValueError, IndexError):
                made = socket.create_connection(("127.0.0.1", port), ANSWER_S)
                self._made.append(made)
                with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                    made.sendall(request)
                answer = made.makefile("rb").readline()
                self.statuses.append(int(answer.split()[1]))
                made.close()
            self._over.wait(0.05)

    def stop(self) -> None:
        self._over.set()
        for made in self._made:
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for made in self._made:
            made.close()
