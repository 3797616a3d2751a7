"""Faults planted into zinfer to prove that the campaign sees them."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from zinfer import cli
from zinfer.job.batch import openai
from zinfer.job.serve import app
from zinfer.record import jsonl, store
from zinfer.system import atomic, ending
from zinfer.worker import server, session


class Plant(NamedTuple):
    """One fault: what it does, the class whose cases must see it, the number of cases that is enough, the function that
    plants it into a zinfer that has just been forked, and words each of which a judge must say."""

    fault: str
    seen_by: str
    cases: int
    plant: Callable[[], None]
    words: tuple[str, ...]


def everywhere(old: Any, new: Any) -> None:
    """Put `new` wherever a module of zinfer has `old`."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "zinfer":
            for attribute in [key for key, value in vars(module).items() if value is old]:
                setattr(module, attribute, new)
                count += 1
    if not count:
        raise LookupError(f"no module of zinfer has {old}")


def _lost_point() -> None:
    store.Store.append = lambda *_: None  # type: ignore[method-assign]


def _changed_answer() -> None:
    answer = openai.answer

    def changed(request: Any, text: str, *rest: Any) -> Any:
        return answer(request, f"{text} {os.getpid()}", *rest)

    everywhere(answer, changed)


def _half_file() -> None:
    def write(path: Path, content: str | bytes) -> None:
        Path(f"{path}.draft").write_text("left")
        path.write_bytes(b"half")

    everywhere(atomic.write, write)


def _internal_error() -> None:
    def main(**_settings: Any) -> None:
        raise ZeroDivisionError

    cli.cli.main = main  # type: ignore[method-assign, assignment]


def _orphan() -> None:
    serve = server.Server.serve

    def served(self: server.Server, commands: Any) -> None:
        parent = os.getppid()
        try:
            serve(self, commands)
        finally:
            if os.getppid() != parent:
                time.sleep(600)

    everywhere(ending.with_parent, lambda: os.environ.pop(ending.PARENT, None))
    server.Server.serve = served  # type: ignore[method-assign]


def _checksum_skipped() -> None:
    def unseal(line: bytes) -> tuple[str, dict[str, Any]]:
        try:
            fields = json.loads(line)
            del fields["checksum"], fields["schema_version"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise jsonl.Garbled("not a whole record") from None
        return str(fields.pop("kind", None)), fields

    everywhere(jsonl.unseal, unseal)


def _append_without_sync() -> None:
    vars(jsonl)["os"] = SimpleNamespace(**{**vars(os), "fsync": lambda _file: None})


def _text_of_another() -> None:
    deliver, held = app.Desk.deliver, [""]

    def delivered(self: app.Desk, updates: Iterable[tuple[Any, Any]]) -> None:
        given = []
        for row, update in updates:
            if text := update.delta or update.text:
                update, held[0] = update.model_copy(update={"text": held[0], "delta": held[0]}), text
            given.append((row, update))
        deliver(self, given)

    app.Desk.deliver = delivered  # type: ignore[method-assign]


def _idle_for_ever() -> None:
    connections: Any = import_module("zinfer.job.serve.connections")
    connections.Connection._limit = lambda *_: None


def _any_weights() -> None:
    everywhere(session._check_weights, lambda _request: None)


PLANTS = (
    Plant("A measured point is not written.", "kill-sweep", 2, _lost_point, ("None is not 1",)),
    Plant("An answer differs from start to start.", "kill-batch", 2, _changed_answer, ("results differ",)),
    Plant("A file is written in place, with a draft beside it that stays.", "kill-export", 2, _half_file,
          ("is cut or mixed", "left behind: ")),
    Plant("A command ends with an error that nobody expected.", "checkpoint", 2, _internal_error, ("Internal error",)),
    Plant("A worker outlives the command that started it.", "kill-reuse", 10, _orphan, ("processes left behind",)),
    Plant("The checksum of a record is not compared.", "record", 2, _checksum_skipped, ("compare", "report", "resume")),
    Plant("A line is acknowledged before it is on disk.", "sync", 2, _append_without_sync,
          ("sweep: ", "batch: ", "not synced before something else was written")),
    Plant("A client of a server gets the text of another one.", "serve-kill", 2, _text_of_another, ("another text",)),
    Plant("Connections that send nothing stay open.", "serve-crowd", 10, _idle_for_ever,
          ("connections without a request are open",)),
    Plant("A worker loads whatever weights there are.", "weights", 5, _any_weights, ("serve, ",)),
)  # fmt: skip
