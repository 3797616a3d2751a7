"""`zinfer best`: the best configuration, and the command that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.commands.prices import price_options

if TYPE_CHECKING:
    from zinfer.analysis.group import Group, Points
    from zinfer.record.measurement import Measurement


@click.command("best")
@click.argument("results", default="sweeps/results", type=click.Path(path_type=Path))
@click.option("-m", "--model", help="Show only this model.")
@click.option("--machine", help="Show only this machine.")
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
def command(results: Path, model: str | None, machine: str | None, as_json: bool, **asked: Any) -> None:
    """Name the fastest configuration in RESULTS (a file or a folder), what offload gains, and where memory ends.

    Each model or slice, pair of lengths and machine is judged by itself. Throughput is output tokens a second, prefill
    included; each engine and offload is taken at its own best batch size. With --sla, --objective or prices the answer
    is the point that keeps the levels and is best by the objective; the exit code is 4 when none keeps them.

    \b
    zinfer best --sla 'ttft:p99:<=:30s' --objective cost --gpu-hour-usd 2.50 --demand 2Mtok/day --deadline 8h
    """
    import json

    from zinfer.analysis.group import groups
    from zinfer.cli import Failure
    from zinfer.commands import decision
    from zinfer.record.store import StoreError, read_usable
    from zinfer.spec.errors import NOTHING

    try:
        records = read_usable(results)
    except StoreError as error:
        raise Failure(str(error), NOTHING) from error
    if records.warning:
        click.echo(records.warning, err=True)
    found = groups(records.points)
    wanted = {
        group: points
        for group, points in found.items()
        if model in (None, group.model, group.model_name) and machine in (None, group.machine)
    }
    if not any(point.usable for points in wanted.values() for point in points):
        there = "; ".join(sorted({f"{group.model_name} on {group.machine}" for group in found}))
        raise Failure(f"no usable point of that model and machine in {results}; there are {there}", NOTHING)
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
        for nth, (group, points) in enumerate(wanted.items()):
            click.echo("\n" * (nth > 0) + f"{group.title}\n{group.conditions}\n")
            _show(points, command=group not in answers)
            if group in answers:
                decision.show(answers[group])
            if group.caution:
                click.echo(f"\n{group.caution}")
    if answers and all(answer.decision.point is None for answer in answers.values()):
        raise SystemExit(NOTHING)


def _show(points: "Points", command: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from zinfer.analysis import rates
    from zinfer.commands.out import console
    from zinfer.spec.units import duration, figures, gib

    winner = rates.best(points)
    if winner is None:
        click.echo(f"Nothing succeeded: {rates.statuses(points)}.")
        return
    edges = {edge.load: edge for edge in rates.edges(points)}
    table = Table("configuration", "best batch", "tok/s", "TTFT", "TPOT", "link share", "GPU peak", "OOM at")
    for point in rates.best_by_load(points):
        rate = rates.spread(point.output_tok_s_samples)
        cells = (
            point.case.label(),
            str(point.case.workload.batch_size),
            figures(rate.mean) + (f" ± {figures(rate.half_width, 2)}" if rate.half_width else "") if rate else "",
            duration(sum(point.ttft_ms) / len(point.ttft_ms) / 1e3),
            duration(point.tpot_ms / 1e3) if point.tpot_ms else "",
            f"{point.link_share:.0%}" if point.link_share else "",
            gib(point.gpu_peak_bytes) if point.gpu_peak_bytes else "",
            str(edges[point.case.load].smallest_oom or ""),
        )
        table.add_row(*map(Text, cells))
    console().print(table)
    for edge in edges.values():
        if edge.largest_ok is None:
            own = [point for point in points if point.case.load == edge.load]
            click.echo(f"{edge.load.label()}: nothing succeeded ({rates.statuses(own)}).")
    for verdict in rates.offload_verdicts(points):
        click.echo(f"{verdict.engine or 'Any engine'}: {verdict.text}")
    if command:
        click.echo(
            f"\nBest: {winner.case.label()}, batch {winner.case.workload.batch_size}\n{rates.command(winner.case)}"
        )


def _summary(group: "Group", points: "Points") -> dict[str, Any]:
    """Return one group as JSON: milliseconds, bytes, bytes a second; null is unknown."""
    from zinfer.analysis import rates

    return {
        **group.model_dump(),
        "best": _point(rates.best(points)),
        "best_by_load": [_point(point) for point in rates.best_by_load(points)],
        "offload": [
            {
                "engine": verdict.engine,
                "offload": verdict.offload,
                "gain": verdict.comparison.gain,
                "best": _point(verdict.comparison.best),
                "baseline": _point(verdict.comparison.baseline),
                "equal_batch": [{"batch_size": size, "ratio": ratio} for size, ratio in verdict.comparison.equal],
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
    from zinfer.analysis import rates

    if point is None:
        return None
    rate = rates.spread(point.output_tok_s_samples)
    return {
        "engine": point.case.engine,
        "offload": point.case.offload,
        "options": dict(point.case.options),
        "batch_size": point.case.workload.batch_size,
        "output_tok_s": point.output_tok_s,
        "output_tok_s_half_width": rate.half_width if rate else None,
        "decode_tok_s": point.decode_tok_s,
        "ttft_ms": sum(point.ttft_ms) / len(point.ttft_ms),
        "tpot_ms": point.tpot_ms,
        "h2d_bandwidth": point.h2d_bandwidth,
        "link_share": point.link_share,
        "gpu_peak_bytes": point.gpu_peak_bytes,
        "host_peak_bytes": point.host_peak_bytes,
        "command": rates.command(point.case),
    }
