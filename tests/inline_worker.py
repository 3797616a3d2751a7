"""Workers without a process."""

import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from zinfer.core.progress import Progress
from zinfer.worker.process import Client
from zinfer.worker.session import MakeEngine, Session, facts_of, import_engine
from zinfer.worker.tasks import Command

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

Functions = Mapping[type[Command[Any]], Callable[[Session, Any], Any]]


class InlineSession(Session):
    """Session with other functions than the tasks have."""

    def __init__(self, on_progress: Progress, find: Callable[[str, bool], MakeEngine], instead: Functions) -> None:
        super().__init__(on_progress, find)
        self.instead = instead

    def function(self, command: Command[Any]) -> Callable[..., Any]:
        return self.instead.get(type(command)) or super().function(command)


class InlineWorker(Client):
    """Worker that runs tasks in this process. Commands and answers are pickled all the same. `engine` is
    ``module:Class`` as a `Worker` has it, or any function of a plan and its progress. `instead` has functions of the
    session and the command that run in place of a task's own, by command class. An exception of a function is answered
    as a failure; WorkerDied is raised, as if the process had ended."""

    def __init__(self, engine: str | MakeEngine = "", instead: Functions | None = None, **settings: Any) -> None:
        super().__init__(engine if isinstance(engine, str) else "", **settings)
        find = import_engine if isinstance(engine, str) else lambda _target, _early: engine
        self.session = InlineSession(self._on_progress, find, instead or {})
        self._owns_engine = True

    @classmethod
    def around(cls, engine: "Engine", **settings: Any) -> Self:
        """Return a worker of a loaded engine, which `close` leaves open."""
        worker = cls(**settings)
        worker.session.engine, worker.session.facts = engine, facts_of(engine.plan)
        worker._owns_engine = False
        return worker

    def _exchange(self, command: Command[Any]) -> Any:
        return pickle.loads(pickle.dumps(self.session.answer(pickle.loads(pickle.dumps(command)))))

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.session.close(self._owns_engine)
