"""Ranking of machines for a model: what fits, how fast, at which price."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from zinfer.analysis import economics, sla
from zinfer.analysis.sla import Decision, Objective, Sla, SlaCheck, decide
from zinfer.commands.out import console, say, table_of
from zinfer.core.machine import Machine
from zinfer.core.units import counted, duration, figures, gb
from zinfer.plan.advice import host_needed
from zinfer.plan.placement import TUNING
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement


class Question(NamedTuple):
    """Levels, prices and demand of the command line, for each machine."""

    machines: Sequence[Machine]
    stated: Mapping[str, float]  # prices by machine, or for all under ""
    prompts: int | None
    slas: tuple[Sla, ...]
    asked: Objective | None
    deadline: float | None = None  # seconds for the prompts

    @property
    def objective(self) -> Objective:
        return self.asked or ("cost" if self.stated else "throughput")

    def assumed(self, machine: Machine) -> economics.ListPrice | None:
        """Return the catalogue's price of a machine of which none is stated."""
        return None if {machine.name, ""} & self.stated.keys() else economics.list_price(machine)

    def price(self, machine: Machine) -> float | None:
        """Return the USD of a GPU-hour: as given, else as the catalogue assumes."""
        assumed = self.assumed(machine)
        return self.stated.get(machine.name, self.stated.get("")) if assumed is None else assumed.usd_per_gpu_hour

    @property
    def pays(self) -> bool:
        """True if prices matter to what was asked."""
        return bool(self.stated) or self.prompts is not None or self.objective == "cost"

    def answer(self, plans: Sequence[Plan]) -> Decision | None:
        """Return the decision among plans on one machine; None if nothing was asked."""
        price, objective = self.price(plans[0].machine) if self.pays else None, self.objective
        if objective == "cost" and price is None and any(map(self.price, self.machines)):
            objective = "throughput"
        asked = self.slas or price is not None or objective != "throughput"
        return decide(as_points(plans), self.slas, objective, price) if asked else None

    def run(self, plan: Plan) -> tuple[float, float | None] | None:
        """Return the hours and USD of all prompts on one machine; None if unknown."""
        if self.prompts is None or plan.e2e_s is None:
            return None
        hours = ceil(self.prompts / plan.case.workload.batch_size) * plan.e2e_s / 3600
        price = self.price(plan.machine)
        return hours, None if price is None else hours * plan.placement.gpus * price

    def describe(self, plan: Plan) -> str:
        """Return the hours and USD of all prompts in a sentence; nothing without prompts."""
        if (run := self.run(plan)) is None:
            return ""
        gpus = f"{plan.placement.gpus} GPUs of " * (plan.placement.gpus > 1)
        paid = ", of no known price" if run[1] is None else f" for {figures(run[1])} USD"
        batch, due = f"at batch {plan.case.workload.batch_size}", ""
        if self.deadline is not None:
            needed = self.needed(plan)
            number = "no number of machines is enough" if needed is None else f"it takes {counted(needed, 'machine')}"
            due = f"; to end within {duration(self.deadline)} {number}"
        return f"{self.prompts:,} prompts take {figures(run[0])} h on {gpus}{plan.machine.name}{paid}, {batch}{due}."

    def needed(self, plan: Plan) -> int | None:
        """Return the number of machines that answer all prompts in time; None if none do, or unknown."""
        if self.prompts is None or self.deadline is None or not plan.e2e_s:
            return None
        batches = ceil(self.prompts / plan.case.workload.batch_size)
        each = int(self.deadline / plan.e2e_s)
        return ceil(batches / each) if each else None

    def assumption(self, machine: Machine) -> str:
        """Return the source of an assumed price, if the answer uses one."""
        if (listed := self.assumed(machine)) is None or not self.pays:
            return ""
        usd = f"{listed.usd_per_gpu_hour} USD an hour of {machine.name} is assumed"
        return f"{usd}: {listed.source}, {listed.date}; --price states yours."

    def usd_per_mtok(self, plan: Plan) -> float | None:
        """Return the USD of a million output tokens; None without a price or a time."""
        price = self.price(plan.machine)
        (point,) = as_points([plan]) or (None,)
        paid = None if point is None or price is None else economics.cost(point, price)
        return None if paid is None else paid.usd_per_mtok

    def row(self, plan: Plan) -> dict[str, Any]:
        """Return a plan's prices and levels as JSON; null is unknown."""
        checks = [check for point in as_points([plan]) for check in sla.check(point, self.slas)]
        hours, usd = self.run(plan) or (None, None)
        return {
            "usd_per_gpu_hour": self.price(plan.machine),
            "price_assumed": self.assumed(plan.machine) is not None,
            "usd_per_mtok": self.usd_per_mtok(plan),
            "prompts_hours": hours,
            "prompts_usd": usd,
            "machines_for_deadline": self.needed(plan),
            "levels": [{"level": check.sla.describe(), "predicted": check.actual, "ok": check.ok} for check in checks],
        }


def as_points(plans: Sequence[Plan]) -> tuple[Measurement, ...]:
    """Return predictions as points, for levels and prices; they are never shown as measured."""
    return tuple(
        Measurement(
            case=plan.case, status="ok", machine=plan.machine.name, ttft_ms=(plan.prefill_s * 1e3,),
            step_ms=((plan.step_s * 1e3,) * (plan.case.workload.output_len - 1),),
        )
        for plan in plans
        if plan.holds and plan.prefill_s is not None and plan.step_s is not None
    )  # fmt: skip


class PlanGroup(NamedTuple):
    """Plans of one model and pair of lengths on one machine; what was chosen."""

    title: str  # without the machine
    machine: Machine
    plans: list[Plan]
    answer: Decision | None

    @property
    def plan(self) -> Plan:
        """Best plan: as decided, else the fastest that fits, else the smallest."""
        decided = None if self.answer is None else self.answer.point or self.answer.nearest
        holding = [plan for plan in self.plans if plan.holds]
        if not holding:
            return min(self.plans, key=lambda plan: plan.gpu.total)
        chosen = (plan for plan in holding if decided is not None and plan.case == decided.case)
        return next(chosen, None) or max(holding, key=lambda plan: plan.output_tok_s or 0.0)

    @property
    def missed(self) -> list[SlaCheck]:
        """Levels that the best plan misses."""
        return [] if self.answer is None else [check for check in self.answer.kept if not check.ok]


def _levels(group: PlanGroup) -> str:
    if group.missed:
        values = [f"{check.value} {check.sla.metric}".removesuffix(" output_tok_s") for check in group.missed]
        return f"no: {', '.join(values)}"
    return "yes" * bool(group.answer is not None and group.answer.kept)


def show(title: str, rows: Sequence[PlanGroup], question: Question, calibrated: bool) -> None:
    """Print the machines, best first, and what is assumed of them."""

    def rank(group: PlanGroup) -> tuple[bool, bool, float]:
        plan, worst = group.plan, float("inf")
        values = {"cost": question.usd_per_mtok(plan), "latency": plan.step_s}
        value = values.get(question.objective, -(plan.output_tok_s or 0.0))
        return not plan.holds, bool(group.missed), worst if value is None else value

    def of(value: Callable[[Plan], float | None], form: Callable[[float], str] = figures) -> Callable[[PlanGroup], str]:
        def cell(group: PlanGroup) -> str:
            number = value(group.plan) if group.plan.holds else None
            return "" if number is None else form(number)

        return cell

    rate, price = of(lambda plan: plan.output_tok_s), of(lambda plan: question.price(plan.machine), "{:.2f}".format)
    columns: dict[str, Callable[[PlanGroup], str]] = {
        "machine": lambda group: group.machine.name + "*" * bool(group.machine.overridden),
        "fits": lambda group: "yes" if group.plan.holds else f"no: {shortage(group.plan)}",
        "configuration": lambda group: group.plan.case.label() * group.plan.holds,
        "#batch": of(lambda plan: plan.case.workload.batch_size, "{:,}".format),
        "#tok/s": lambda group: rate(group) + (f" ± {group.plan.error:.0%}" if group.plan.error else ""),
        "#TTFT": of(lambda plan: plan.prefill_s, duration),
        "#TPOT": of(lambda plan: plan.step_s, duration),
        "#host memory": lambda group: host_needed(group.plan) * group.plan.holds,
        "#USD/h": lambda group: price(group) + "~" * bool(group.plan.holds and question.assumed(group.machine)),
        "#USD/Mtok": of(question.usd_per_mtok),
        "levels": lambda group: _levels(group) * group.plan.holds,
        "#all prompts": of(lambda plan: (question.run(plan) or (None,))[0], lambda hours: f"{figures(hours)} h"),
        "#USD": of(lambda plan: (question.run(plan) or (None, None))[1]),
        "#machines": of(question.needed, "{:,}".format),
    }
    by = {"cost": "USD a token", "latency": "TPOT"}.get(question.objective, "tok/s")
    kind = "predicted" if calibrated else "physical limits"
    head = f"{title}, {counted(len(rows), 'machine')} by {by}: {kind}, nothing was run"
    drop = ("TPOT", "USD/h", "configuration", "TTFT", "batch")
    console().print(table_of(columns, sorted(rows, key=rank), head, drop=drop))
    if any(row.plan.machine.overridden for row in rows):
        say("* With figures that are set by hand.")
    if calibrated and any(row.plan.holds and not row.plan.error for row in rows):
        say("No record is of the kind (weights, experts, GPU) of a row without ±.")
    if any("?" in host_needed(row.plan) for row in rows if row.plan.holds):
        say("? The memory of this host is not known; --host-memory MACHINE=SIZE says what there is.")
    if any(question.assumed(row.plan.machine) for row in rows):
        dates = [price.date for price in economics.list_prices().values()]
        say(
            f"~ A price that a provider listed between {min(dates)} and {max(dates)}, assumed here "
            "(`zinfer plan --list machines NAME`); --price MACHINE=USD states yours."
        )


def shortage(plan: Plan) -> str:
    """Return the memory that a plan lacks, in a few words."""
    machine = plan.machine
    tiers = (
        ("GPU", plan.gpu.total, machine.gpu_bytes),
        ("host", plan.host.total, TUNING.max_host_share * (machine.host_bytes or float("inf"))),
        ("disk", plan.nvme.total, float("inf") if machine.nvme_bytes is None else machine.nvme_bytes),
    )
    lacking = [f"{name} {need / 1e9:.1f} of {gb(there)}" for name, need, there in tiers if need > there > 0]
    return ", ".join(lacking) or "no room for a sequence"
