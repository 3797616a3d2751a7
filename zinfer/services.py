"""What a worker does for a command besides loading and measuring: a service is an object in the worker's process, and
each of its methods, which takes the engine first and else what JSON can carry, is one request and one answer.

    rows (`zinfer.rows`): batch jobs         chat (`zinfer.chat`): a conversation
    rerun (`zinfer.rerun`): what a kept conversation saves
    follow (`zinfer.follow`): logits along given tokens
"""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zinfer.model import ModelSpec
from zinfer.plan import Plan

if TYPE_CHECKING:
    from zinfer.engine.base import Progress


def make(service: str, plan: Plan, beat: "Progress", fields: dict[str, Any]) -> Any:
    """The `service` for the load of `plan`; `beat` hears of progress. Of `fields`, those of its first request, it takes
    what it is made of: ``rows`` the `model`, as JSON, where nothing is loaded yet."""
    if service == "rows":
        from zinfer.rows import Rows

        model = fields.pop("model", None)
        return Rows(ModelSpec.model_validate(model) if model else plan.model)
    if service == "chat":
        from zinfer.chat import Chat

        return Chat(plan)
    if service == "rerun":
        from zinfer.rerun import Rerun

        return Rerun(plan, beat)
    from zinfer import follow

    return SimpleNamespace(
        **{verb: partial(getattr(follow, verb), beat=beat) for verb in ("windows", "record", "compare")}
    )
