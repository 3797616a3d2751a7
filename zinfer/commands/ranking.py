"""Ranking of machines for a model: what fits, how fast, at which price."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import Any

from zinfer.analysis import economics, sla
from zinfer.analysis.best import Objective
from zinfer.analysis.economics import Prices
from zinfer.analysis.sla import SlaCheck
from zinfer.commands import decision
from zinfer.commands.decision import DecisionCriteria, GroupDecision
from zinfer.commands.out import console, say, table
from zinfer.core.machine import Machine
from zinfer.core.units import counted, duration, figures, gb
from zinfer.plan.placement import TUNING
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement

HOST_NEGLIGIBLE = 4 << 30  # bytes of host memory that every host has


class Question:
    """Levels, prices and demand of the command line, for each machine."""

    def __init__(
        self,
        machines: Sequence[Machine],
        prices: Mapping[str, float],
        prompts: int | None,
        levels: tuple[str, ...],
        objective: Objective | None,
    ) -> None:
        self.objective: Objective = objective or ("cost" if prices else "throughput")
        self.prompts, self._levels = prompts, levels
        self._stated, self._machines = prices, machines
        self.on(machines[0])  # refuses what contradicts itself

    def price(self, machine: Machine) -> float | None:
        """Return the USD of a GPU-hour: as given, else as the catalogue assumes."""
        if (stated := self._stated.get(machine.name, self._stated.get(""))) is not None:
            return stated
        listed = economics.list_price(machine)
        return None if listed is None else listed.usd_per_gpu_hour

    def assumes(self, machine: Machine) -> bool:
        """Tell whether the machine's price is the catalogue's."""
        return not {machine.name, ""} & self._stated.keys() and self.price(machine) is not None

    def on(self, machine: Machine) -> DecisionCriteria | None:
        """Return the criteria for plans on a machine; None if nothing was asked."""
        pays = bool(self._stated) or self.prompts is not None or self.objective == "cost"
        price, objective = self.price(machine), self.objective
        if objective == "cost" and price is None and any(map(self.price, self._machines)):
            objective = "throughput"
        return decision.question(self._levels, objective, gpu_hour_usd=price if pays else None)

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
        batch = f"at batch {plan.case.workload.batch_size}"
        return f"{self.prompts:,} prompts take {figures(run[0])} h on {gpus}{plan.machine.name}{paid}, {batch}."

    def assumption(self, machine: Machine) -> str:
        """Return the source of an assumed price, if the answer uses one."""
        criteria, listed = self.on(machine), economics.list_price(machine)
        if listed is None or not self.assumes(machine) or criteria is None or criteria.prices.gpu_hour_usd is None:
            return ""
        usd = f"{listed.usd_per_gpu_hour} USD an hour of {machine.name} is assumed"
        return f"{usd}: {listed.source}, {listed.date}; --price states yours."

    def row(self, plan: Plan) -> dict[str, Any]:
        """Return a plan's prices and levels as JSON; null is unknown."""
        ranked, criteria = Ranked(self, [plan], None), self.on(plan.machine)
        levels = () if criteria is None else criteria.slas
        checks = [check for point in as_points([plan]) for check in sla.check(point, levels)]
        hours, usd = self.run(plan) or (None, None)
        return {
            "usd_per_gpu_hour": self.price(plan.machine),
            "price_assumed": self.assumes(plan.machine),
            "usd_per_mtok": ranked.usd_per_mtok,
            "prompts_hours": hours,
            "prompts_usd": usd,
            "levels": [{"level": check.sla.describe(), "predicted": check.actual, "ok": check.ok} for check in checks],
        }


def as_points(plans: Sequence[Plan]) -> tuple[Measurement, ...]:
    """Return predictions as points, for levels and prices; they are never shown as measured."""
    return tuple(
        Measurement(
            case=plan.case,
            status="ok",
            machine=plan.machine.name,
            ttft_ms=(plan.prefill_s * 1e3,),
            step_ms=((plan.step_s * 1e3,) * (plan.case.workload.output_len - 1),),
        )
        for plan in plans
        if plan.holds and plan.prefill_s is not None and plan.step_s is not None
    )


class Ranked:
    """Best plan of a machine, with its price and the levels."""

    def __init__(self, question: Question, plans: Sequence[Plan], answer: GroupDecision | None) -> None:
        self._question, self.answer = question, answer
        decided = None if answer is None else answer.decision.point or answer.decision.nearest
        holding = [plan for plan in plans if plan.holds]
        self.plan = (
            next((plan for plan in holding if decided is not None and plan.case == decided.case), None)
            or max(holding, key=lambda plan: plan.output_tok_s or 0.0, default=None)
            or min(plans, key=lambda plan: plan.gpu.total)
        )

    @cached_property
    def usd_per_mtok(self) -> float | None:
        """USD a million output tokens; None without a price or a time."""
        price = self._question.price(self.plan.machine)
        (point,) = as_points([self.plan]) or (None,)
        paid = None if point is None or price is None else economics.cost(point, Prices(gpu_hour_usd=price))
        return None if paid is None else paid.usd_per_mtok

    @property
    def _missed(self) -> list[SlaCheck]:
        return [] if self.answer is None else [check for check in self.answer.decision.kept if not check.ok]

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Key to sort by: machines that fit, those that keep the levels, the objective."""
        plan, worst = self.plan, float("inf")
        value = {"cost": self.usd_per_mtok, "latency": plan.step_s}.get(
            self._question.objective, -(plan.output_tok_s or 0.0)
        )
        return not plan.holds, bool(self._missed), worst if value is None else value

    @property
    def cells(self) -> tuple[str, ...]:
        """Text of the row, under `COLUMNS`."""
        plan, question = self.plan, self._question
        name, price = plan.machine.name + "*" * bool(plan.machine.overridden), question.price(plan.machine)
        if not plan.holds:
            return name, f"no: {shortage(plan)}", *[""] * (len(COLUMNS) - 2)
        levels = f"no: {', '.join(map(_value, self._missed))}" if self._missed else "yes"
        run = question.run(plan)
        return (
            name,
            "yes",
            plan.case.label(),
            f"{plan.case.workload.batch_size:,}",
            (figures(plan.output_tok_s) if plan.output_tok_s else "") + (f" ± {plan.error:.0%}" if plan.error else ""),
            "" if plan.prefill_s is None else duration(plan.prefill_s),
            "" if plan.step_s is None else duration(plan.step_s),
            host_needed(plan),
            "" if price is None else f"{price:.2f}" + "~" * question.assumes(plan.machine),
            "" if self.usd_per_mtok is None else figures(self.usd_per_mtok),
            levels if self.answer is not None and self.answer.decision.kept else "",
            "" if run is None else f"{figures(run[0])} h",
            "" if run is None or run[1] is None else figures(run[1]),
        )


def _value(check: SlaCheck) -> str:
    """Return the value of a missed level in a few words."""
    if check.sla.at_most:
        return f"{check.sla.metric} {check.value}"
    return check.value + "/user" * (check.sla.metric == "user_tok_s")


COLUMNS = (
    "machine", "fits", "configuration", "#batch", "#tok/s", "#TTFT", "#TPOT", "#host memory", "#USD/h", "#USD/Mtok",
    "levels", "#all prompts", "#USD",
)  # fmt: skip


def show(title: str, rows: Sequence[Ranked], question: Question, calibrated: bool) -> None:
    """Print the machines, best first, and what is assumed of them."""
    by = {"cost": "USD a token", "latency": "TPOT"}.get(question.objective, "tok/s")
    kind = "predicted" if calibrated else "physical limits"
    head = f"{title}, {counted(len(rows), 'machine')} by {by}: {kind}, nothing was run"
    ranked = sorted(rows, key=lambda row: row.rank)
    console().print(
        table(head, COLUMNS, [row.cells for row in ranked], drop=("TPOT", "USD/h", "configuration", "TTFT", "batch"))
    )
    if any(row.plan.machine.overridden for row in rows):
        say("* With figures that are set by hand.")
    if calibrated and any(row.plan.holds and not row.plan.error for row in rows):
        say("No record is of the kind (weights, experts, GPU) of a row without ±.")
    if any("?" in host_needed(row.plan) for row in rows if row.plan.holds):
        say("? The memory of this host is not known; --host-memory MACHINE=SIZE says what there is.")
    if any(question.assumes(row.plan.machine) for row in rows):
        dates = [price.date for price in economics.list_prices().values()]
        say(
            f"~ A price that a provider listed between {min(dates)} and {max(dates)}, assumed here "
            "(`zinfer plan --list machines NAME`); --price MACHINE=USD states yours."
        )


def host_unknown(plan: Plan) -> bool:
    """Tell whether a plan needs host memory of which nothing is known."""
    return plan.holds and plan.machine.host_bytes is None and plan.host.total > HOST_NEGLIGIBLE


def host_needed(plan: Plan) -> str:
    """Return the host memory of a plan, marked where it is unknown."""
    return f"{ceil(plan.host.total / TUNING.max_host_share / (1 << 30))} GiB" + "?" * host_unknown(plan)


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
