"""Clients of `zinfer serve`, whose answers are judged."""

import http.client
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
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
    fault, whole, in_vain = "", False, False
    try:
        with connected(port, seconds) as connection:
            connection.request("POST", TEXTS, body, {"content-type": "application/json"})
            response = connection.getresponse()
            status = response.status
            if status != 200:
                fault = response.read().decode(errors="replace")[:300]
            elif not stream:
                text, whole = json.loads(response.read())["choices"][0]["text"], True
            for line in response if status == 200 and stream else ():
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
    return Reply(prompt, status, text, whole and not fault, fault, in_vain, time.monotonic() - began)


def status_of(port: int, path: str, seconds: float = ANSWER_S) -> int:
    """Return the status of a path; 0 if there is no answer."""
    with suppress(OSError, http.client.HTTPException), connected(port, seconds) as connection:
        connection.request("GET", path)
        return connection.getresponse().status
    return 0


def connected(port: int, seconds: float) -> "closing[http.client.HTTPConnection]":
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=seconds))


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
