"""`zinfer best`: the best configuration, and the command that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.commands.prices import price_options
from zinfer.commands.results import results_options

if TYPE_CHECKING:
    from zinfer.analysis.group import Group, Points
    from zinfer.analysis.rates import Edge
    from zinfer.commands.decision import GroupDecision
    from zinfer.commands.out import Table
    from zinfer.record.measurement import Measurement
    from zinfer.spec.case import Case


@click.command("best")
@results_options
@click.option("-m", "--model", help="Show only this model.")
@click.option(
    "--sla", "levels", multiple=True, metavar="METRIC:STATISTIC:<=:VALUE",
    help="A service level to keep, such as ttft:p99:<=:2s or output_tok_s:mean:>=:30. Repeatable.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(["throughput", "cost", "energy", "latency"]), default="throughput",
    show_default=True, help="Quantity to choose the best configuration by.",
)  # fmt: skip
@click.option("--pareto", is_flag=True, help="Show the points that nothing beats in both tok/s and tok/s a user.")
@price_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(results: Path | None, machine: str | None, model: str | None, as_json: bool, **asked: Any) -> None:
    """Name the fastest configuration, what offload gains, and where memory ends: of this machine's results, or of
    RESULTS (a file or a folder).

    Each model or slice, pair of lengths and machine is judged by itself, whole models first. Throughput is output
    tokens a second, prefill included; each engine and offload is taken at its own best batch size. A difference within
    the noise of the repeats counts for none, and lossy settings (an 8-bit KV cache) are ranked apart. With --sla,
    --objective or prices the answer is the point that keeps the levels and is best by the objective; the exit code is 4
    when none keeps them.

    \b
    zinfer best --machine all
    zinfer best --sla 'ttft:p99:<=:30s' --objective cost --gpu-hour-usd 2.50 --demand 2Mtok/day --deadline 8h
    """
    import json

    from zinfer.analysis.group import groups
    from zinfer.cli import Failure
    from zinfer.commands import decision
    from zinfer.commands.results import choose, usable
    from zinfer.spec.errors import NOTHING

    chosen = choose(results, machine)
    records = usable(chosen.read(), chosen)
    if records.warning:
        click.echo(records.warning, err=True)
    found = groups(records.points)
    wanted = {group: points for group, points in found.items() if model in (None, group.model, group.model_name)}
    if not any(point.usable for points in wanted.values() for point in points):
        there = "; ".join(sorted({f"{group.model_name} on {group.machine}" for group in found}))
        raise Failure(f"no usable point of {model} in {chosen.path}; there are {there}", NOTHING)
    question = decision.question(**asked)
    answers = {group: question.answer(points) for group, points in wanted.items()} if question is not None else {}
    if answers and all(answer.decision.unknown and not answer.decision.point for answer in answers.values()):
        needs = "--power-usd-kwh" if asked["objective"] == "cost" else "--objective energy"
        raise Failure(f"{needs} needs a reading of the energy, which NVML gives on a GPU: no point has one")
    if as_json:
        rows = [_summary(group, points) for group, points in wanted.items()]
        for row, answer in zip(rows, answers.values(), strict=False):
            row["decision"] = decision.row(answer)
        click.echo(json.dumps(rows, indent=1))
    else:
        _print(wanted, answers)
    if answers and all(answer.decision.point is None for answer in answers.values()):
        raise SystemExit(NOTHING)


def _print(wanted: "dict[Group, tuple[Measurement, ...]]", answers: "dict[Group, GroupDecision]") -> None:
    """Print the groups one after the other, whole models before slices."""
    from zinfer.analysis import rates
    from zinfer.commands import decision

    both = len({group.layers is None for group in wanted}) == 2
    last: bool | None = None
    for group, points in wanted.items():
        part = group.layers is not None
        if last is not None:
            click.echo()
        if both and part is not last:
            click.echo("SLICES: the first layers of a model, whose memory is not the model's\n" if part else "MODELS\n")
        last = part
        click.echo(f"{group.title}\n{group.conditions}\n")
        _show(points, command=group not in answers)
        if group in answers:
            decision.show(answers[group])
        if cautions := [*rates.cautions(points), *filter(None, [group.caution])]:
            click.echo("\n" + "\n".join(cautions))


def _show(points: "Points", command: bool) -> None:
    from zinfer.analysis import rates
    from zinfer.commands import decision
    from zinfer.commands.out import console

    winner = rates.winner(points)
    if winner is None:
        click.echo(f"Nothing succeeded: {rates.statuses(points)}.")
        return
    edges = {edge.load: edge for edge in rates.edges(points)}
    apart = rates.lossy(points) if rates.exact([winner]) else ()
    console().print(_table(rates.best_by_load([point for point in points if point not in apart]), edges))
    if tops := rates.best_by_load(apart):
        click.echo(f"Lossy settings, ranked apart: {decision.ACCURACY}.")
        console().print(_table(tops, edges))
    elif winner.case.lossy:
        click.echo(f"Every setting that succeeded is lossy: {decision.ACCURACY}.")
    for edge in edges.values():
        if edge.largest_ok is None:
            own = [point for point in points if point.case.load == edge.load]
            click.echo(f"{edge.load.label()}: nothing succeeded ({rates.statuses(own)}).")
    for verdict in rates.offload_verdicts(points):
        click.echo(f"{verdict.engine or 'Any engine'}: {verdict.text}")
    if command:
        named = f"{winner.case.label()}, batch {winner.case.workload.batch_size}"
        single = ", one repeat" if len(winner.ttft_ms) == 1 else ""
        click.echo(f"\nBest: {named}, {rates.rate_text(winner)} tok/s{single}")
        if tied := rates.tied(points, winner):
            click.echo(tied)
        decision.show_commands(winner)


def _table(tops: "Points", edges: "dict[Case, Edge]") -> "Table":
    """Return the table of the best points of loads, one a row."""
    from zinfer.analysis import rates
    from zinfer.commands.out import table
    from zinfer.spec.units import duration, figures, gib

    rows = [
        (
            point.case.label(),
            str(point.case.workload.batch_size),
            rates.rate_text(point),
            duration(sum(point.ttft_ms) / len(point.ttft_ms) / 1e3),
            duration(point.tpot_ms / 1e3) if point.tpot_ms else "",
            figures(point.prefill_tok_s) if point.prefill_tok_s else "",
            figures(point.decode_tok_s) if point.decode_tok_s else "",
            f"{point.link_share:.0%}" if point.link_share else "",
            gib(point.gpu_peak_bytes) if point.gpu_peak_bytes else "",
            str(edges[point.case.load].smallest_oom or ""),
        )
        for point in tops
    ]
    columns = (
        "configuration", "#best batch", "#tok/s", "#TTFT", "#TPOT", "#prefill tok/s", "#decode tok/s", "#link share",
        "#GPU peak", "#OOM at",
    )  # fmt: skip
    return table("", columns, rows, drop=("GPU peak", "link share", "OOM at"))


def _summary(group: "Group", points: "Points") -> dict[str, Any]:
    """Return one group as JSON: milliseconds, bytes, bytes a second; null is unknown."""
    from zinfer.analysis import rates

    return {
        **group.model_dump(),
        "best": _point(rates.winner(points)),
        "best_by_load": [_point(point) for point in rates.best_by_load(rates.exact(points))],
        "lossy_by_load": [_point(point) for point in rates.best_by_load(rates.lossy(points))],
        "offload": [
            {
                "engine": verdict.engine,
                "offload": verdict.offload,
                "gain": verdict.comparison.gain,
                "verdict": verdict.comparison.change.verdict if verdict.comparison.change else None,
                "best": _point(verdict.comparison.best),
                "baseline": _point(verdict.comparison.baseline),
                "equal_batch": [
                    {"batch_size": one.after_case.workload.batch_size, "ratio": one.ratio, "verdict": one.verdict}
                    for one in verdict.comparison.equal
                ],
                "words": verdict.text,
            }
            for verdict in rates.offload_verdicts(points)
        ],
        "edges": [
            {
                "engine": edge.load.engine,
                "offload": edge.load.offload,
                "options": dict(edge.load.options),
                "largest_ok": edge.largest_ok,
                "smallest_oom": edge.smallest_oom,
            }
            for edge in rates.edges(points)
        ],
    }


def _point(point: "Measurement | None") -> dict[str, Any] | None:
    from zinfer.analysis import rates, reproduce

    if point is None:
        return None
    rate = rates.spread(point.output_tok_s_samples)
    return {
        "engine": point.case.engine,
        "offload": point.case.offload,
        "weights": point.case.weights,
        "options": dict(point.case.options),
        "batch_size": point.case.workload.batch_size,
        "output_tok_s": point.output_tok_s,
        "output_tok_s_half_width": rate.half_width if rate else None,
        "decode_tok_s": point.decode_tok_s,
        "prefill_tok_s": point.prefill_tok_s,
        "ttft_ms": sum(point.ttft_ms) / len(point.ttft_ms),
        "tpot_ms": point.tpot_ms,
        "h2d_bandwidth": point.h2d_bandwidth,
        "link_share": point.link_share,
        "gpu_peak_bytes": point.gpu_peak_bytes,
        "host_peak_bytes": point.host_peak_bytes,
        "command": reproduce.sweep_command(point.case),
        "batch_command": reproduce.batch_command(point.case),
    }
