"""What a worker does for a command besides loading and measuring: a service is an object in the worker's process, and
each of its methods, which takes the engine first and else what JSON can carry, is one request and one answer.

    rows (`zinfer.generation.rows`): batch jobs         chat (`zinfer.generation.chat`): a conversation
    rerun (`zinfer.worker.prefix_reuse`): what a kept conversation saves
    follow (`zinfer.worker.teacher_forcing`): logits along given tokens
"""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zinfer.plan.plan import Plan
from zinfer.spec.model import ModelSpec

if TYPE_CHECKING:
    from zinfer.engine.base import Progress


class Services:
    """Those of one worker, each made at its first request; `beat` hears of progress."""

    def __init__(self, beat: "Progress") -> None:
        self._beat = beat
        self._made: dict[str, Any] = {}

    def answer(self, service: str, verb: str, engine: Any, plan: Plan | None, fields: dict[str, Any]) -> dict[str, Any]:
        """What `verb` of `service` answers, whose arguments are `fields`, for the `engine` and `plan` that are loaded.
        Those of ``rows`` may have the `model` among them, as JSON, for before anything is."""
        model = fields.pop("model", None) if service == "rows" else None
        if service not in self._made:
            self._made[service] = self._make(service, plan, model)
        answer: dict[str, Any] = getattr(self._made[service], verb)(engine, **fields)
        return answer

    def _make(self, service: str, plan: Any, model: Any) -> Any:
        if service == "rows":
            from zinfer.generation.rows import Rows

            return Rows(plan.model if plan is not None else ModelSpec.model_validate(model))
        if service == "chat":
            from zinfer.generation.chat import Chat

            return Chat(plan)
        if service == "rerun":
            from zinfer.worker.prefix_reuse import Rerun

            return Rerun(plan, self._beat)
        from zinfer.worker import teacher_forcing

        verbs = ("windows", "record", "compare")
        return SimpleNamespace(**{verb: partial(getattr(teacher_forcing, verb), beat=self._beat) for verb in verbs})
