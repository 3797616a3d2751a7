"""Plans that say what an engine has to do."""

from typing import Any

from zinfer.core.case import Workload
from zinfer.core.engine import plan_options
from zinfer.plan.plan import Plan


class Steered(Plan):
    """Plan with `here` sequences' KV cache on the GPU, others in host memory. An engine passes `tokens` prompt tokens
    at a time through the model. None leaves either as planned.
    """

    here: int | None = None
    tokens: int | None = None

    def at(self, workload: Workload) -> Plan:
        return steered(super().at(workload), self.here, self.tokens)


def steered(plan: Plan, here: int | None = None, tokens: int | None = None) -> Steered:
    """`plan` with another placement: for this batch, and `at` any other."""
    update: dict[str, Any] = {}
    if here is not None:
        batch_size = plan.case.workload.batch_size
        there = max(0, batch_size - here)
        by_cpu = plan_options(plan.case.engine, plan.case.options).kv_attention == "cpu" or plan.placement.kv_ratio < 1
        update = {"kv_host_share": there / batch_size, "kv_on_cpu": there > 0 and by_cpu}
    if tokens is not None:
        update["pass_tokens"] = tokens
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    fields["placement"] = plan.placement.model_copy(update=update)
    return Steered.model_construct(**fields, here=here, tokens=tokens)
