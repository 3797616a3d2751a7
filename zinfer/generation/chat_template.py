"""Chat templates of checkpoints, rendered in a process with limits (`zinfer.generation.render`)."""

import json
import os
import select
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Any

from zinfer.generation import render
from zinfer.spec.model import ModelError

MEMORY = 1 << 30  # bytes of the process
CPU_S = 10  # seconds of CPU time for a conversation
WALL_S = 120.0  # seconds to wait for it on a busy machine


class ChatTemplate:
    """A chat template and its variables (special tokens); its process starts with the first conversation."""

    def __init__(self, template: str, variables: dict[str, Any]) -> None:
        self._first = {"template": template, "variables": variables}
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not: str | None = None

    def shows(self, field: str) -> bool:
        """Tell whether the template does anything with a field of messages, by its name."""
        return field in self._first["template"]

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a conversation, up to where its answer begins.

        Raises ModelError where the template refuses it, or takes more time or memory than any conversation needs; then
        also for every later one.
        """
        if self._why_not is not None:
            raise ModelError(self._why_not)
        line = self._ask(messages)
        if line is None:
            self.close()
            self._why_not = f"the model's chat template takes more than {CPU_S} s, or breaks down"
            raise ModelError(self._why_not)
        answer = json.loads(line)
        if "error" in answer:
            raise ModelError(f"the model's chat template refuses the conversation: {answer['error']}")
        return str(answer["text"])

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process; start it if need be."""
        if self._process is not None:
            return self._process
        variables = {name: os.environ[name] for name in ("TZ", "PATH", "LD_LIBRARY_PATH") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(render.__file__), str(MEMORY), str(CPU_S)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables,
        )  # fmt: skip
        self._ended = weakref.finalize(self, _end, self._process)
        self._send(self._first)
        return self._process

    def _send(self, message: dict[str, Any]) -> None:
        pipe = self._running().stdin
        assert pipe is not None
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    def _ask(self, messages: list[dict[str, Any]]) -> bytes | None:
        """Return the line that answers for `messages`; None if the process ends or takes too long."""
        try:
            pipe = self._running().stdout
            assert pipe is not None
            self._send({"messages": messages})
        except OSError:
            return None
        ready, _, _ = select.select([pipe], [], [], WALL_S)
        line = pipe.readline(8 * render.MAX_TEXT) if ready else b""
        return line if line.endswith(b"\n") else None

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._process is not None:
            self._ended()
            self._process = None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # a line that the process did not read
                pipe.close()
    process.wait()
