"""Decisions of `zinfer best`: service levels, objectives, cost, machines."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import click
from pydantic import ValidationError

from zinfer.analysis.best import Decision, Objective, decide, known_cost
from zinfer.analysis.economics import EconomicsError, Fleet, Point, Prices, fleet, parse_demand
from zinfer.analysis.sla import Sla, parse
from zinfer.commands.out import say
from zinfer.core.units import counted, duration, figures
from zinfer.record.measurement import Measurement

ACCURACY = "`zinfer study accuracy` tells how far its text differs"


class GroupDecision(NamedTuple):
    """Decision for one group of points, and the machines for the demand."""

    decision: Decision
    prices: Prices
    fleet: Fleet | None
    show_front: bool
    too_slow: float | None = (
        None  # seconds of one batch, or of a mean request, if that alone is longer than the deadline
    )


class DecisionCriteria(NamedTuple):
    """Options of the command line, for any group of points."""

    slas: tuple[Sla, ...]
    objective: Objective
    prices: Prices
    demand: tuple[float, float] | None
    utilisation: float
    spare: int
    pareto: bool
    due: bool = False  # a deadline was given

    def answer(
        self, points: Sequence[Point], rate: Callable[[Point], float | None] = lambda point: point.output_tok_s
    ) -> GroupDecision:
        """Return the decision for `points`, and the fleet for the demand."""
        decision = decide(points, self.slas, self.objective, self.prices, rate)
        machines = too_slow = None
        if self.demand is not None and decision.point is not None:
            point = decision.point
            alone_s = fmean(point.e2e_ms if isinstance(point, Measurement) else point.of("e2e_ms")) / 1e3
            if self.due and alone_s > self.demand[1]:
                too_slow = alone_s
            else:
                gpus = self.prices.gpus_per_server
                machines = fleet(decision.point, *self.demand, self.utilisation, self.spare, gpus)
        return GroupDecision(decision, self.prices, machines, self.pareto, too_slow)


def question(
    levels: tuple[str, ...],
    objective: Objective,
    pareto: bool,
    demand: str | None,
    deadline: str | None,
    utilisation: float,
    spare: int,
    **prices: float | int | None,
) -> DecisionCriteria | None:
    """Return the criteria that the options state, or None.

    Raises UsageError or EconomicsError.
    """
    if deadline is not None and demand is None:
        raise click.UsageError("--deadline needs a --demand, such as 2Mtok/day")
    try:
        paid = Prices.model_validate(prices)
    except ValidationError as error:
        raise EconomicsError(f"a price is a number of USD, 0 or more: {error.errors()[0]['msg']}") from None
    if not (levels or pareto or demand or paid.known or objective != "throughput"):
        return None
    needed = None if demand is None else parse_demand(demand, deadline)
    return DecisionCriteria(
        tuple(map(parse, levels)), objective, paid, needed, utilisation, spare, pareto, deadline is not None
    )


def show(answer: GroupDecision) -> None:
    """Print the answer in a few lines."""
    decision, point = answer.decision, answer.decision.point
    if point is None:
        if decision.unknown:
            say(f"The {decision.objective} is not known for any of {decision.keeping} points.")
        else:
            say(f"No point of {decision.usable} keeps every level." if decision.usable else "No point is usable.")
        if decision.nearest is not None:
            say(f"The nearest is {_named(decision.nearest)}:")
            for check in decision.kept:
                say(f"  {check.describe()}{check.missed}")
        _show_lossy(decision)
        return
    choice = f"{decision.keeping} of {counted(decision.usable, 'point')} to choose from"
    say(f"Best by {decision.objective}, {choice}: {_named(point)}, {figures(point.output_tok_s or 0)} tok/s")
    if decision.unknown:
        say(f"  {decision.unknown} of them are left out: their {decision.objective} is not known")
    for check in decision.kept:
        say(f"  {check.describe()}")
    for line in costs(answer):
        say(f"  {line}")
    show_commands(point)
    _show_lossy(decision)
    if answer.show_front:
        say("\nPareto front of output tok/s and tok/s of one user:")
        for front_point in decision.front:
            user = 1e3 / front_point.tpot_ms if front_point.tpot_ms else 0.0
            say(f"  {_named(front_point)}: {figures(front_point.output_tok_s or 0)} tok/s, {figures(user)} a user")


def _show_lossy(decision: "Decision") -> None:
    if decision.lossy is not None:
        say(f"Best lossy setting, ranked apart: {_named(decision.lossy)}; {ACCURACY}.")


def show_commands(point: Point) -> None:
    """Print the commands that use and that measure a point."""
    from zinfer.analysis import reproduce

    again, use = reproduce.commands(point)
    click.echo(f"  use it:     {use}")
    click.echo(f"  reproduce:  {again}")


def costs(answer: GroupDecision) -> list[str]:
    cost, machines = answer.decision.cost, answer.fleet
    lines = []
    if cost is not None and cost.usd_per_mtok is not None:
        lines.append(f"{figures(cost.usd_per_mtok)} USD a million output tokens")
    elif answer.prices.known:
        lines.append("USD not known: --power-usd-kwh needs a reading of the energy, and this point has none")
    if cost is not None and cost.j_per_token is not None:
        lines.append(f"{figures(cost.j_per_token)} J an output token ({cost.method})")
    if answer.too_slow is not None:
        unit = "one batch" if isinstance(answer.decision.point, Measurement) else "a request"
        lines.append(f"{unit} takes {duration(answer.too_slow)}, longer than --deadline: no number of GPUs keeps it")
    elif machines is not None:
        lines.append(
            f"{figures(machines.tokens)} tokens in {duration(machines.seconds)}: {counted(machines.working, 'GPU')} at "
            f"{machines.load:.0%} of {figures(machines.gpu_tok_s)} tok/s, {machines.spare} spare, "
            f"{counted(machines.servers, 'server')} of {answer.prices.gpus_per_server}"
        )
    layers = answer.decision.point.case.layers if answer.decision.point else None
    if lines and layers is not None:
        lines.append(f"all figures are for {counted(layers, 'layer')}, not for the model")
    return lines


def _named(point: Point) -> str:
    loop = f"batch {point.case.workload.batch_size}" if isinstance(point, Measurement) else point.requests.loop
    return f"{point.case.label()}, {loop}"


def row(answer: GroupDecision) -> dict[str, Any]:
    """Return the answer as JSON: seconds, USD, J; null is unknown."""
    from zinfer.analysis import reproduce

    decision, machines = answer.decision, answer.fleet
    again, use = (None, None) if decision.point is None else reproduce.commands(decision.point)
    return {
        "objective": decision.objective,
        **{name: _brief(getattr(decision, name), answer.prices) for name in ("point", "lossy", "nearest")},
        "command": again,
        "batch_command": use,
        "levels": [
            {
                "level": check.sla.describe(),
                "actual": check.actual,
                "samples": check.samples,
                "ok": check.ok,
                "missed_by": check.miss if check.actual is not None else None,
            }
            for check in decision.kept
        ],
        "keeping": decision.keeping,
        "usable": decision.usable,
        "pareto": [_brief(point, answer.prices) for point in decision.front],
        "fleet": None if machines is None else machines.model_dump() | {"gpus": machines.gpus, "load": machines.load},
    }


def configuration(point: Point) -> dict[str, Any]:
    """Return the configuration of a point as JSON."""
    case = point.case
    return {"engine": case.engine, "offload": case.offload, "weights": case.weights, "options": dict(case.options)}


def _brief(point: Point | None, prices: Prices) -> dict[str, Any] | None:
    if point is None:
        return None
    paid = known_cost(point, prices)
    return {
        **configuration(point),
        "batch_size": point.case.workload.batch_size if isinstance(point, Measurement) else None,
        "output_tok_s": point.output_tok_s,
        "user_tok_s": 1e3 / point.tpot_ms if point.tpot_ms else None,
        "usd_per_mtok": paid.usd_per_mtok,
        "j_per_token": paid.j_per_token,
        "energy_method": paid.method,
    }
