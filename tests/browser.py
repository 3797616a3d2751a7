"""Headless Chromium, driven over a pipe with the standard library alone.

The DevTools protocol is JSON with a zero byte after each message; Chromium reads from descriptor 3 and writes to 4.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE_S = 60.0


class Seen(NamedTuple):
    """Events of a page while it loaded, and the page itself."""

    errors: tuple[str, ...]
    requests: tuple[str, ...]
    browser: "Browser"

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.browser.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def printed(self) -> bytes:
        """Return the page as PDF, on A4."""
        paper = self.browser.send("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(paper["data"])


class Browser:
    """Connection to one tab."""

    def __init__(self, writing: int, reading: int) -> None:
        self._writing, self._reading = writing, reading
        self._buffer, self._count = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, page: Path | str, width: int = 1280, scheme: str = "light") -> Seen:
        """Load a file or an address at a width in CSS pixels. The colour scheme is ``light`` or ``dark``."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._happened("Page.loadEventFired"):
            self._receive()
        self.send("Runtime.evaluate", expression="0")  # its answer comes after all events of the load
        requests = [event["params"]["request"]["url"] for event in self._happened("Network.requestWillBeSent")]
        return Seen(self.errors, tuple(requests), self)

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of the page since it was opened."""
        errors = [str(event["params"]["entry"]["text"]) for event in self._happened("Log.entryAdded")]
        errors += [str(event["params"]) for event in self._happened("Runtime.exceptionThrown")]
        return (*errors, *(str(event["params"]) for event in self._happened("Runtime.consoleAPICalled")))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        return dict(answer["result"])

    def _happened(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._reading, 1 << 16) if ready else b""
            assert chunk, "Chromium ended or gave no answer"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Run Chromium with its profile in the folder `profile`; end it on leaving the ``with`` block."""
    assert CHROMIUM is not None
    theirs_in, ours_out = _pipe()
    ours_in, theirs_out = _pipe()
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--hide-scrollbars", "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe",
        "about:blank",
    ]  # fmt: skip
    # bash moves the pipes' ends to the two descriptors; a plain sh does not know numbers above 9
    moving = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", moving, "bash", *command], pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are numbered from 10. So neither is 3 or 4."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
