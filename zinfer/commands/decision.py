"""Decisions of `zinfer best`: service levels, objectives, cost, machines."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import click

from zinfer.analysis import reproduce
from zinfer.analysis.economics import Point, cost, fleet, parse_demand
from zinfer.analysis.sla import Decision, Objective, decide, parse
from zinfer.commands.out import say
from zinfer.core.units import counted, duration, figures
from zinfer.record.measurement import Measurement
from zinfer.record.stats import ci95_half_width

ACCURACY = "`zinfer study accuracy` tells how far its text differs"


def question(
    levels: tuple[str, ...],
    objective: Objective,
    demand: str | None,
    deadline: str | None,
    utilisation: float,
    spare: int,
    gpu_hour_usd: float | None,
) -> Callable[..., Decision] | None:
    """Return what decides for points by the options, or None. Raises UsageError or EconomicsError."""
    if deadline is not None and demand is None:
        raise click.UsageError("--deadline needs a --demand, such as 2Mtok/day")
    if not (levels or demand or gpu_hour_usd is not None or objective != "throughput"):
        return None
    needed = None if demand is None else parse_demand(demand, deadline)
    slas = tuple(map(parse, levels))

    def answer(points: Sequence[Point], **rate: Any) -> Decision:
        decision = decide(points, slas, objective, gpu_hour_usd, **rate)
        if needed is None or (point := decision.point) is None:
            return decision
        alone_s = fmean(point.e2e_ms if isinstance(point, Measurement) else point.of("e2e_ms")) / 1e3
        if deadline is not None and alone_s > needed[1]:
            return decision.model_copy(update={"too_slow": alone_s})
        return decision.model_copy(update={"fleet": fleet(point, *needed, utilisation, spare)})

    return answer


def lines(decision: Decision, noun: str = "point") -> list[str]:
    """Return the answer in a few lines: of points, or as `noun` says of plans."""
    point = decision.point
    shown, predicted = point or decision.nearest, noun == "plan"
    if shown is None:
        return [f"No {noun} is usable."]
    levels = []
    for check in decision.kept:
        text = f"{check.sla.describe()}: predicted {check.value}" if predicted else check.describe()
        levels.append(f"  {text}{check.missed}")
    if point is None:
        return [f"No {noun} of {decision.usable} keeps every level. The nearest is {_named(shown)}:", *levels]
    rate = "" if predicted else f", {figures(point.output_tok_s or 0)} tok/s"
    choice = f"{decision.keeping} of {counted(decision.usable, noun)} to choose from"
    head = f"Best by {decision.objective}, {choice}: {_named(point)}{rate}"
    return [head, *levels, *(f"  {line}" for line in _costs(decision))]


def show(decision: Decision) -> None:
    """Print the answer in a few lines."""
    say("\n".join(lines(decision)))
    if decision.point is not None:
        show_commands(decision.point)
    if decision.lossy is not None:
        say(f"Best lossy setting, ranked apart: {_named(decision.lossy)}; {ACCURACY}.")


def show_commands(point: Point) -> None:
    """Print the commands that use and that measure a point."""
    again, use = reproduce.commands(point)
    click.echo(f"  use it:     {use}\n  reproduce:  {again}")


def _costs(decision: Decision) -> list[str]:
    cost, machines, point = decision.cost, decision.fleet, decision.point
    lines = []
    if cost is not None and cost.usd_per_mtok is not None:
        lines.append(f"{figures(cost.usd_per_mtok)} USD a million output tokens")
    if cost is not None and cost.j_per_token is not None:
        lines.append(f"{figures(cost.j_per_token)} J an output token ({cost.method})")
    if decision.too_slow is not None:
        unit = "one batch" if isinstance(point, Measurement) else "a request"
        lines.append(f"{unit} takes {duration(decision.too_slow)}, longer than --deadline: no number of GPUs keeps it")
    elif machines is not None:
        lines.append(
            f"{figures(machines.tokens)} tokens in {duration(machines.seconds)}: {counted(machines.working, 'GPU')} at "
            f"{machines.load:.0%} of {figures(machines.gpu_tok_s)} tok/s, {machines.spare} spare"
        )
    if lines and point is not None and point.case.layers is not None:
        lines.append(f"all figures are for {counted(point.case.layers, 'layer')}, not for the model")
    return lines


def _named(point: Point) -> str:
    if isinstance(point, Measurement):
        return point.case.batch_label
    return f"{point.case.label()}, {point.requests.loop}"


def row(decision: Decision) -> dict[str, Any]:
    """Return the answer as JSON: seconds, USD, J; null is unknown."""
    machines = decision.fleet
    return {
        "objective": decision.objective,
        **{name: point_row(getattr(decision, name), decision.gpu_hour_usd) for name in ("point", "lossy", "nearest")},
        "levels": [
            {"level": check.sla.describe(), "actual": check.actual, "samples": check.samples, "ok": check.ok}
            for check in decision.kept
        ],
        "keeping": decision.keeping,
        "usable": decision.usable,
        "fleet": machines and machines.model_dump() | {"gpus": machines.gpus, "load": machines.load},
    }


def point_row(point: Point | None, gpu_hour_usd: float | None = None) -> dict[str, Any] | None:
    """Return a point as JSON: configuration, rates, cost, commands; null is unknown."""
    if point is None:
        return None
    case, paid = point.case, cost(point, gpu_hour_usd)
    measured = point if isinstance(point, Measurement) else None
    half_width = ci95_half_width(measured.output_tok_s_samples) if measured else None
    names = ("output_tok_s", "decode_tok_s", "prefill_tok_s", "tpot_ms", "h2d_bandwidth", "link_share")
    again, use = reproduce.commands(point)
    return {
        "engine": case.engine,
        "offload": case.offload,
        "weights": case.weights,
        "options": dict(case.options),
        "batch_size": case.workload.batch_size if measured else None,
        **{name: getattr(point, name, None) for name in (*names, "gpu_peak_bytes", "host_peak_bytes")},
        "output_tok_s_half_width": half_width,
        "ttft_ms": measured.mean_ttft_ms if measured else None,
        "usd_per_mtok": paid.usd_per_mtok,
        "j_per_token": paid.j_per_token,
        "command": again,
        "use_command": use,
    }
