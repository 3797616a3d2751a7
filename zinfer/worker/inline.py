"""Workers without a process, for tests and other programs."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from zinfer.core.progress import Progress, silent
from zinfer.core.value import Frozen
from zinfer.worker.process import Client, OnLoaded
from zinfer.worker.session import Function, MakeEngine, Session, facts_of, load
from zinfer.worker.tasks import NAMES, Command

if TYPE_CHECKING:
    from zinfer.engine.base import Engine


class InlineWorker(Client):
    """Worker that runs tasks in this process. Commands and answers go through JSON all the same.

    `engine` is ``module:Class`` as a `Worker` has it, or an engine class, or any function of a plan and its progress.
    `instead` has functions of the session and the command that run in place of a task's own, by command class. An
    exception of a function is answered as a failure; WorkerDied is raised, as if the process had ended. `timeout_s` and
    `debug` are there for the sake of `Worker`'s signature.
    """

    def __init__(
        self,
        engine: str | MakeEngine = "",
        *,
        timeout_s: float = 0,
        on_progress: Progress = silent,
        on_loaded: OnLoaded = lambda _size, _seconds: None,
        debug: bool = False,
        revision: str = "",
        instead: Mapping[type[Command[Any]], Callable[[Session, Any], Frozen]] | None = None,
    ) -> None:
        super().__init__(engine if isinstance(engine, str) else "", on_progress, on_loaded, revision)
        functions: dict[str, Function] = {}
        if not isinstance(engine, str):
            functions["load"] = partial(load, find=lambda _target: engine)
        functions |= {NAMES[command]: function for command, function in (instead or {}).items()}
        self.session = Session(on_progress, functions)
        self._owns_engine = True

    @classmethod
    def around(cls, engine: "Engine", **settings: Any) -> Self:
        """Return a worker of a loaded engine, which `close` leaves open."""
        worker = cls(**settings)
        worker.session.engine, worker.session.facts = engine, facts_of(engine.plan)
        worker._owns_engine = False
        return worker

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(json.dumps(self.session.answer(json.loads(json.dumps(message)))))
        return answer

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.session.close(self._owns_engine)
