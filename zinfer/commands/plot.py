"""`zinfer plot`: figures of the results."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

import click
from matplotlib.figure import Figure

from zinfer.analysis import study as studies
from zinfer.analysis.group import groups, path_part
from zinfer.commands.options import option, words
from zinfer.commands.out import write
from zinfer.commands.results import choose, results_options, usable
from zinfer.commands.verb import Failure, Verb
from zinfer.record import study
from zinfer.record.measurement import latest
from zinfer.report.plot import figures, style


@click.command("plot", cls=Verb)
@results_options
@option("-o --output", click.Path(path_type=Path), "Folder.", default="plots")
@option("--format forms", words("", get_args(style.Format)), "Formats.", default="png,svg")
def command(results: Path | None, machine: str | None, output: Path, forms: Sequence[style.Format]) -> None:
    """Draw the figures of this machine's sweeps, or of those in RESULTS. RESULTS is a file or a folder. The figures
    show throughput over batch size, latency over throughput, throughput over the weights on the GPU where three budgets
    were measured, and the timeline of a decode step where one was traced; and those of `zinfer study reuse`.

    Prints the paths it wrote, DIR/<machine>/<sweep>-<figure>.<format>. Equal results give equal bytes.
    """
    chosen = choose(results, machine)
    sweeps = chosen.read()
    reads = (study.read(root, "reuse") for root in chosen.roots() if root.exists())
    runs = [run for read in reads for run in read.runs if chosen.keeps(run.machine)]
    try:
        usable(sweeps, chosen)
    except Failure:
        if not runs:
            raise
    # A case that several files have is drawn as it was measured last, in the figures of each.
    newest = {(point.machine, point.case): point for point in latest(chain(*(records.points for _, records in sweeps)))}
    for file, records in sweeps:
        groups_of_file = groups(newest[point.machine, point.case] for point in records.points)
        for group, points in groups_of_file.items():
            stem = output / group.stem(file.stem, alone=len(groups_of_file) == 1)
            for name, figure in figures.draw(group, points).items():
                _write(figure, stem.with_name(f"{stem.name}-{name}"), forms)
    for run in studies.latest(runs):
        if (drawn := figures.reuse(run)) is not None:
            _write(drawn, output / path_part(run.machine) / f"reuse-{path_part(studies.title(run))}", forms)


def _write(figure: Figure, stem: Path, forms: Sequence[style.Format]) -> None:
    for form in forms:
        path = stem.with_name(f"{stem.name}.{form}")
        write(path, style.render(figure, form))
        click.echo(path)
