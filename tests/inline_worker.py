"""Workers without a process."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from zinfer.core.value import Frozen
from zinfer.worker.process import Client
from zinfer.worker.session import Function, MakeEngine, Session, facts_of, load
from zinfer.worker.tasks import NAMES, Command

if TYPE_CHECKING:
    from zinfer.engine.base import Engine


class InlineWorker(Client):
    """Worker that runs tasks in this process. Commands and answers go through JSON all the same. `engine` is
    ``module:Class`` as a `Worker` has it, or any function of a plan and its progress. `instead` has functions of the
    session and the command that run in place of a task's own, by command class. An exception of a function is answered
    as a failure; WorkerDied is raised, as if the process had ended."""

    def __init__(
        self,
        engine: str | MakeEngine = "",
        instead: Mapping[type[Command[Any]], Callable[[Session, Any], Frozen]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(engine if isinstance(engine, str) else "", **settings)
        functions: dict[str, Function] = {}
        if not isinstance(engine, str):
            functions["load"] = partial(load, find=lambda _target, _early: engine)
        functions |= {NAMES[command]: function for command, function in (instead or {}).items()}
        self.session = Session(self._on_progress, functions)
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
