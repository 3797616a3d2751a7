"""Server of completions without a model, for presets of tests.

    small_server.py PORT [FAULT] [STYLE]

Faults: ``never`` is not ready, ``dies`` ends while it answers, ``short`` ends an answer early, ``refuses`` has status
429, ``slow`` takes half a second a token. Styles say how tokens are counted: ``usage``, ``ids``, ``timings``,
``events`` (not at all) or ``silent``, where events hold two tokens each and nothing says so.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, FAULT, STYLE = [*sys.argv[1:], "", ""][:3]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = self.path == "/v1/models" or FAULT != "never"
        self._send(200 if ready else 503, json.dumps({"data": [{"id": "small"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAULT == "refuses":
            self._send(429, b'{"error": "too many"}')
            return
        self.send_response(200)
        self.end_headers()
        count, length = asked["max_tokens"], len(asked["prompt"])
        if FAULT == "dies" and count > 4:
            print("the last words", file=sys.stderr, flush=True)
            os._exit(3)
        if FAULT == "short" and count > 4:
            count -= 1
        stride = 2 if STYLE == "silent" else 1
        for number in range(stride, count + 1, stride):
            time.sleep(0.5 if FAULT == "slow" else 0.002)
            event: dict[str, Any] = {"choices": [{"text": "x" * stride}]}
            if STYLE == "ids":
                event["choices"][0]["token_ids"] = [7]
            if STYLE == "timings":
                event["timings"] = {"predicted_n": number}
            if STYLE in ("", "usage"):
                event["usage"] = {"completion_tokens": number, "prompt_tokens": length}
            self._event(event)
        if STYLE in ("events", "silent"):
            self._event({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": length}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        pass


if __name__ == "__main__":
    subprocess.Popen(["sleep", "600"], start_new_session=True)  # as programs that leave their group do
    ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()
