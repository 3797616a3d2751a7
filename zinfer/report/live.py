"""HTTP server of one page that changes, for browsers on this machine."""

import re
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Event, Thread
from time import process_time, sleep
from typing import NoReturn

SHARE = 0.1  # of a core that may go into making pages: the machine is being measured

# What browsers call this machine: another name that leads here may be of a site that reads along (DNS rebinding).
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class _Answer(BaseHTTPRequestHandler):
    timeout = 10  # seconds for a request to arrive
    server: "LiveServer"

    def do_GET(self) -> None:
        if not _LOOPBACK.fullmatch(self.headers.get("Host", "")):
            return self.send_error(403, "Ask for 127.0.0.1 or localhost")
        if self.path != "/":
            return self.send_error(404)
        self.server.asked.set()
        tag, page = self.server.page
        known = self.headers.get("If-None-Match") == tag
        self.send_response(304 if known else 200)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"" if known else page)

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # a browser that went away
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


class LiveServer(ThreadingTCPServer):
    """Server of a page at ``/``, on 127.0.0.1 alone. Raises OSError if the port is taken."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        self.asked = Event()

    def run(self, make: Callable[[], str], state: Callable[[], object], share: float = SHARE) -> NoReturn:
        """Answer with the page of `make`, again when `state` has changed.

        It is made in this thread, where somebody asks, in at most a `share` of the time; answers do not wait for it.
        """
        seen = state()
        self._show(make())
        Thread(target=self.serve_forever, daemon=True).start()
        while True:
            self.asked.wait()
            self.asked.clear()
            if (now := state()) != seen:
                began, seen = process_time(), now
                self._show(make())
                sleep((process_time() - began) / share)

    def _show(self, page: str) -> None:
        content = page.encode()
        self.page = f'"{sha256(content).hexdigest()[:16]}"', content
