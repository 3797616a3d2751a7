"""`zinfer best`: the best configuration, and the command that runs it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from zinfer.analysis import rates, reproduce, requests
from zinfer.analysis.economics import Point, cost, fleet, parse_demand
from zinfer.analysis.group import Group, Points, groups
from zinfer.analysis.rates import Edge
from zinfer.analysis.requests import RequestGroup, RequestRates
from zinfer.analysis.sla import Decision, Objective, decide, parse
from zinfer.checkpoint.resolve import is_wanted
from zinfer.commands.options import SHARE, option, price, repeatable
from zinfer.commands.out import Table, cell, console, say, table_of
from zinfer.commands.results import choose, results_options, usable
from zinfer.commands.verb import Failure, Verb
from zinfer.core.case import Case
from zinfer.core.errors import NOTHING
from zinfer.core.units import counted, duration, figures, gib, milliseconds
from zinfer.record.measurement import Measurement
from zinfer.record.requests import METRICS, RequestMetric, RequestPoint
from zinfer.record.stats import ci95_half_width

Answers = dict[Group | RequestGroup, Decision]


@click.command("best", cls=Verb)
@results_options
@option("-m --model", str, metavar="MODEL", text="Show only this model.")
@repeatable("--sla levels", "Level to keep, such as ttft:p99:<=:2s.", "LEVEL")
@option("--objective", click.Choice(["throughput", "cost", "latency"]), "Quantity to choose by.", default="throughput")
@price
@option("--demand", str, "Output tokens to size for: 2Mtok/day, 5Mtok.", metavar="TOKENS")
@option("--deadline", str, "Time in which the demand is due: 8h, 30min, 2s.", metavar="TIME")
@option("--utilisation", SHARE, "Share of a GPU's throughput to plan with.", default=0.8)
@option("--spare", click.IntRange(min=0), "Number of spare GPUs.", default=1)
@option("--json as_json", bool, "Print JSON.")
def command(results: Path | None, machine: str | None, model: str | None, as_json: bool, **asked: Any) -> None:
    """Name the fastest configuration, what offload gains, and where memory ends: of this machine's results, or of
    RESULTS (a file or a folder).

    Each model or slice, pair of lengths and machine is judged by itself, whole models first. Throughput is output
    tokens a second, prefill included; each engine and offload is taken at its own best batch size. A difference within
    the noise of the repeats counts for none, and lossy settings (an 8-bit KV cache) are ranked apart. Loads of
    requests follow, those of the same requests together: the best has the most output tokens a second or, where
    requests arrive at a rate, the least E2E. With --sla, --objective or prices the answer is the point that keeps the
    levels and is best by the objective; the exit code is 4 when none keeps them.

    \b
    zinfer best --machine all
    zinfer best --sla 'ttft:p99:<=:30s' --objective cost --gpu-hour-usd 2.50 --demand 2Mtok/day --deadline 8h
    """
    chosen = choose(results, machine)
    records = usable(chosen.read(), chosen, requests_too=True)
    equal_groups, loads = groups(records.points), requests.groups(records.requests)
    wanted = {group: points for group, points in equal_groups.items() if is_wanted(model, group.model)}
    served = {group: points for group, points in loads.items() if is_wanted(model, group.model)}
    every: list[Points | Sequence[RequestPoint]] = [*wanted.values(), *served.values()]
    if not any(point.usable for points in every for point in points):
        names = "; ".join(sorted({f"{group.model_name} on {group.machine}" for group in (*equal_groups, *loads)}))
        raise Failure(f"no usable point of {model} in {chosen.path}; there are {names}", NOTHING)
    ranks = {group: requests.ranked(points) for group, points in served.items()}
    question = _question(**asked)
    answers: Answers = {}
    if question is not None:
        means = {id(row.point): row.mean for rows in ranks.values() for row in rows}
        answers |= {group: question(points) for group, points in wanted.items()}
        for group, rows in ranks.items():
            answers[group] = question([row.point for row in rows], rate=lambda point: means[id(point)])
    if as_json:
        summaries = [_summary(group, points) for group, points in wanted.items()]
        summaries += [_request_summary(group, rows) for group, rows in ranks.items()]
        for summary, answer in zip(summaries, answers.values(), strict=False):
            summary["decision"] = _decision_row(answer)
        click.echo(json.dumps(summaries, indent=1))
    else:
        _print(wanted, served, ranks, answers)
    if answers and all(answer.point is None for answer in answers.values()):
        raise SystemExit(NOTHING)


def _print(
    wanted: Mapping[Group, Points],
    served: Mapping[RequestGroup, Sequence[RequestPoint]],
    ranks: Mapping[RequestGroup, list[RequestRates]],
    answers: Answers,
) -> None:
    """Print the groups: whole models before slices, loads of requests last."""
    every: list[Group | RequestGroup] = [*wanted, *served]
    for number, group in enumerate(every):
        click.echo("\n" * (number > 0), nl=False)
        if isinstance(group, Group):
            cautions = _print_points(group, wanted[group], answers.get(group))
        else:
            cautions = _print_requests(group, served[group], ranks[group], answers.get(group))
        if cautions := [*cautions, *filter(None, [group.caution])]:
            say("\n" + "\n".join(cautions))


def _name(title: str, point: Point, told: str, alike: str) -> None:
    say(f"Best of {title}: {told}" + f"\n{alike}" * bool(alike))
    _show_commands(point)


def _print_points(group: Group, points: Points, answer: Decision | None) -> Sequence[str]:
    """Print a group; return what to be careful about."""
    winner = rates.winner(points)
    if answer is not None:
        _show(answer)
    elif winner is None:
        say(f"{group.title}: nothing succeeded ({rates.statuses(points)})")
    else:
        told = f"{winner.case.batch_label}, {rates.rate_text(winner)} tok/s"
        _name(group.title, winner, told + ", one repeat" * (len(winner.ttft_ms) == 1), rates.tied(points, winner))
    say(f"\n{group.title}\n{group.conditions}\n")
    if winner is None:
        return rates.cautions(points)
    edges = {edge.load: edge for edge in rates.edges(points)}
    exact = not winner.case.lossy
    console().print(_table(rates.best_by_load(rates.exact(points) if exact else points), edges))
    if tops := rates.best_by_load(rates.lossy(points) if exact else ()):
        say(f"Lossy settings, ranked apart: {rates.ACCURACY}.")
        console().print(_table(tops, edges))
    elif not exact:
        say(f"Every setting that succeeded is lossy: {rates.ACCURACY}.")
    for edge in edges.values():
        if edge.largest_ok is None:
            load_points = [point for point in points if point.case.load == edge.load]
            say(f"{edge.load.label()}: nothing succeeded ({rates.statuses(load_points)}).")
    for verdict in rates.offload_verdicts(points):
        say(f"{verdict.engine or 'Any engine'}: {verdict.text}")
    return rates.cautions(points)


def _table(tops: Points, edges: dict[Case, Edge]) -> Table:
    columns: dict[str, Callable[[Measurement], str]] = {
        "configuration": lambda point: point.case.label(),
        "#best batch": lambda point: str(point.case.workload.batch_size),
        "#tok/s": rates.rate_text,
        "#TTFT": lambda point: milliseconds(point.mean_ttft_ms),
        "#TPOT": lambda point: milliseconds(point.tpot_ms or None),
        "#prefill tok/s": lambda point: cell(point.prefill_tok_s),
        "#decode tok/s": lambda point: cell(point.decode_tok_s),
        "#link share": lambda point: f"{point.link_share:.0%}" if point.link_share else "",
        "#GPU peak": lambda point: cell(point.gpu_bytes, gib),
        "#OOM at": lambda point: str(edges[point.case.load].smallest_oom or ""),
    }
    return table_of(columns, tops, drop=("GPU peak", "link share", "OOM at"))


def _print_requests(
    group: RequestGroup, points: Sequence[RequestPoint], rows: list[RequestRates], answer: Decision | None
) -> Sequence[str]:
    """Print a group of loads; return what to be careful about."""
    if answer is not None and rows:
        _show(answer)
    elif rows:
        first, *others = rows
        point, e2e = first.point, first.point.summary("e2e_ms")
        rate_text = f"{figures(first.mean)} tok/s"
        if isinstance(point.requests.request_rate, float) and e2e is not None:
            rate_text = f"E2E {milliseconds(e2e.mean)}, {rate_text}"
        same = [row.point.case.label() for row in others if not row.point.case.lossy and first.differs(row) is False]
        alike = f"As fast within the range of the loads: {', '.join(same)}." * bool(same)
        _name(group.title, point, f"{point.case.label()}, {rate_text}, {counted(len(first.rates), 'load')}", alike)
    say("\n" * bool(rows) + f"{group.title}\n{group.conditions}\n")
    for failed in {point.case.label(): point for point in points if not point.usable}.values():
        if all(row.point.key != failed.key for row in rows):
            say(f"{failed.case.label()}: {failed.status}.")
    if not rows:
        return ()
    console().print(_request_table(rows))
    if any(row.point.case.lossy for row in rows):
        say(f"Lossy settings, ranked apart: {rates.ACCURACY}.")
    single = sum(len(row.rates) == 1 for row in rows)
    some = "Every load was" if single == len(rows) else f"{single} of {len(rows)} loads were"
    once = [f"{some} measured once, so that the noise is unknown: differences may be chance."]
    return [*rates.conditions([row.point for row in rows]), *once * bool(single)]


def _request_table(rows: list[RequestRates]) -> Table:
    def summary(row: RequestRates, time: RequestMetric, name: str) -> str:
        return milliseconds(getattr(row.point.summary(time), name, None))

    columns: dict[str, Callable[[RequestRates], str]] = {
        "configuration": lambda row: row.point.case.label(),
        "#loads": lambda row: str(len(row.rates)),
        "#tok/s": lambda row: figures(row.mean),
        "#range": lambda row: row.range,
        "#tok/s while others waited": lambda row: cell(row.point.waiting_tok_s),
        "#TTFT": lambda row: summary(row, "ttft_ms", "mean"),
        "#TPOT": lambda row: milliseconds(row.point.tpot_ms),
        "#E2E p99": lambda row: summary(row, "e2e_ms", "p99"),
        "#drafts right": lambda row: "" if row.point.drafts_right is None else f"{row.point.drafts_right:.0%}",
        "#GPU peak": lambda row: cell(row.point.gpu_bytes, gib),
    }
    return table_of(columns, rows, drop=("GPU peak", "range", "tok/s while others waited", "E2E p99"))


def _request_summary(group: RequestGroup, rows: list[RequestRates]) -> dict[str, Any]:
    by_load = [
        (_point_row(row.point) or {})
        | {"lossy": row.point.case.lossy, "loads": len(row.rates)}
        | {"output_tok_s": row.mean, "output_tok_s_of_loads": row.rates}
        | {name: getattr(row.point, name) for name in ("waiting_tok_s", "drafts_right")}
        | {name: time and time._asdict() for name in METRICS for time in [row.point.summary(name)]}
        for row in rows
    ]
    return {**group.model_dump(), "best": by_load[0] if by_load else None, "by_load": by_load}


def _summary(group: Group, points: Points) -> dict[str, Any]:
    return {
        **group.model_dump(),
        "best": _point_row(rates.winner(points)),
        "best_by_load": [_point_row(point) for point in rates.best_by_load(rates.exact(points))],
        "lossy_by_load": [_point_row(point) for point in rates.best_by_load(rates.lossy(points))],
        "offload": [
            {"engine": verdict.engine, "offload": verdict.offload, "gain": verdict.gain}
            | {"verdict": verdict.change and verdict.change.verdict, "words": verdict.text}
            for verdict in rates.offload_verdicts(points)
        ],
        "edges": [
            {"engine": edge.load.engine, "offload": edge.load.offload, "options": dict(edge.load.options)}
            | {"largest_ok": edge.largest_ok, "smallest_oom": edge.smallest_oom}
            for edge in rates.edges(points)
        ],
    }


def _question(
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


def _show(decision: Decision) -> None:
    """Print the answer in a few lines."""
    say("\n".join(lines(decision)))
    if decision.point is not None:
        _show_commands(decision.point)
    if decision.lossy is not None:
        say(f"Best lossy setting, ranked apart: {_named(decision.lossy)}; {rates.ACCURACY}.")


def _show_commands(point: Point) -> None:
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


def _decision_row(decision: Decision) -> dict[str, Any]:
    """Return the answer as JSON: seconds, USD, J; null is unknown."""
    machines = decision.fleet
    return {
        "objective": decision.objective,
        **{name: _point_row(getattr(decision, name), decision.gpu_hour_usd) for name in ("point", "lossy", "nearest")},
        "levels": [
            {"level": check.sla.describe(), "actual": check.actual, "samples": check.samples, "ok": check.ok}
            for check in decision.kept
        ],
        "keeping": decision.keeping,
        "usable": decision.usable,
        "fleet": machines and machines.model_dump() | {"gpus": machines.gpus, "load": machines.load},
    }


def _point_row(point: Point | None, gpu_hour_usd: float | None = None) -> dict[str, Any] | None:
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
