"""Plans that say what an engine has to do, whatever the machine would have room for."""

from typing import Any

from zinfer.core.case import Workload
from zinfer.core.engine import plan_options
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan, Planner


class Steered(Plan):
    """A plan that keeps the KV cache of `here` sequences on the GPU, in host memory that of all others, and passes
    `tokens` prompt tokens at a time through the model; None leaves either as planned."""

    here: int | None = None
    tokens: int | None = None

    def planner(self) -> Planner:
        return SteeredPlanner(self)


class SteeredPlanner(Planner):
    """Planner that steers each plan as `plan` is steered."""

    def __init__(self, plan: Steered) -> None:
        super().__init__(plan.case, plan.model, plan.machine, plan.efficiency, plan.nvme_path, plan)
        self._steered = plan

    def at(self, workload: Workload) -> Plan:
        return steered(super().at(workload), self._steered.here, self._steered.tokens)

    def placement(self, workload: Workload) -> Placement:
        return self.at(workload).placement


def steered(plan: Plan, here: int | None = None, tokens: int | None = None) -> Steered:
    """`plan` with another placement: for this batch, and any other."""
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
