"""Plans that say what an engine has to do."""

from typing import Any

from zinfer.core.case import Workload
from zinfer.core.engine import plan_options
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan, Planner


class Steered(Plan):
    """Plan with `device_rows` rows' KV cache on the GPU. Prompts are passed in `tokens`; None leaves both."""

    device_rows: int | None = None
    tokens: int | None = None

    def planner(self) -> Planner:
        return SteeredPlanner(self)

    def steer(self, placement: Placement, batch_size: int) -> Placement:
        update: dict[str, Any] = {}
        if self.device_rows is not None:
            there = max(0, batch_size - self.device_rows)
            by_cpu = plan_options(self.case.engine, self.case.options).kv_attention == "cpu" or placement.kv_ratio < 1
            update = {"kv_host_share": there / batch_size, "kv_on_cpu": there > 0 and by_cpu}
        if self.tokens is not None:
            update["pass_tokens"] = self.tokens
        return placement.model_copy(update=update)


class SteeredPlanner(Planner):
    """Planner that places each workload as `plan` is steered."""

    def __init__(self, plan: Steered) -> None:
        super().__init__(plan.case, plan.model, plan.machine, plan.efficiency, plan.nvme_path, plan)
        self._steered = plan

    def placement(self, workload: Workload) -> Placement:
        return self._steered.steer(super().placement(workload), workload.batch_size)


def steered(plan: Plan, device_rows: int | None = None, tokens: int | None = None) -> Steered:
    """`plan` with another placement: for this batch, and any other."""
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    result = Steered.model_construct(**fields, device_rows=device_rows, tokens=tokens)
    return result.model_copy(update={"placement": result.steer(plan.placement, plan.case.workload.batch_size)})
