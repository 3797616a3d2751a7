"""Workers without a process, for tests and for programs that want no second process."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from zinfer.core.progress import Progress, silent
from zinfer.plan.planner import Plan
from zinfer.worker.process import Client, OnLoaded
from zinfer.worker.session import Function, Session, facts_of, load_with
from zinfer.worker.tasks import NAMES, Load, Loaded, Message, Request

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

MakeEngine = Callable[[Plan, Progress], "Engine"]


class InlineWorker(Client):
    """Worker that runs tasks in this process; requests and answers go through JSON all the same.

    `engine` is ``module:Class`` as a `Worker` has it, or an engine class, or any function of a plan and its progress.
    `instead` has functions of the session and the request that run in place of a task's own, by request class. An
    exception of a function is answered as a failure; WorkerDied is raised, as if the process had ended. `timeout_s` and
    `debug` are there for the sake of `Worker`'s signature.
    """

    def __init__(
        self,
        engine: str | MakeEngine = "",
        *,
        timeout_s: float = 0,
        notice: Progress = silent,
        loaded: OnLoaded = lambda _size, _seconds: None,
        debug: bool = False,
        revision: str = "",
        instead: Mapping[type[Request[Any]], Callable[[Session, Any], Message]] | None = None,
    ) -> None:
        super().__init__(engine if isinstance(engine, str) else "", notice, loaded, revision)
        functions: dict[str, Function] = {}
        if not isinstance(engine, str):
            functions["load"] = _loader(engine)
        functions |= {NAMES[request]: function for request, function in (instead or {}).items()}
        self.session = Session(notice, functions)
        self._owns_engine = True

    @classmethod
    def around(cls, engine: "Engine", **settings: Any) -> Self:
        """Return a worker whose engine is loaded already, and is left open by `close`; `settings` are those of the
        class."""
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


def _loader(make: MakeEngine) -> Function:
    def load(session: Session, request: Load) -> Loaded:
        return load_with(session, request, lambda: make)

    return load
