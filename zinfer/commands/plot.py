"""`zinfer plot`: the figures of what was measured."""

from pathlib import Path

import click


@click.command("plot", short_help="Draw the figures of a result file.")
@click.argument("results", default="sweeps/results", type=click.Path(path_type=Path))
@click.option("-o", "--output", default="plots", show_default=True, type=click.Path(path_type=Path), help="Folder.")
@click.option("--format", "formats", default="png,svg", show_default=True, help="png, svg, or both.")
@click.option("--figure", "wanted", default="all", show_default=True, help="Names, separated by commas.")
def command(results: Path, output: Path, formats: str, wanted: str) -> None:
    """Draw what each sweep in RESULTS (a file or a folder) shows: throughput, latency and link use over batch size,
    throughput over residency, and the timeline of a decode step where one was traced.

    Prints the paths it wrote, DIR/<machine>/<sweep>-<figure>.<format>. Equal results give equal bytes.
    """
    from typing import get_args

    from zinfer import chart, plot
    from zinfer.cli import ENVIRONMENT, NOTHING, Failure
    from zinfer.group import groups
    from zinfer.store import StoreError, files, read, read_usable

    forms = [form for form in get_args(chart.Format) if form in formats.split(",")]
    if len(forms) != len(formats.split(",")):
        raise click.BadParameter(f"{formats!r}: write png, svg, or png,svg", param_hint="--format")
    names = list(plot.FIGURES) if wanted == "all" else wanted.split(",")
    if unknown := [name for name in names if name not in plot.FIGURES]:
        choice = ", ".join(plot.FIGURES)
        raise click.BadParameter(f"{unknown[0]!r} is no figure: choose from {choice}, or all", param_hint="--figure")
    try:
        warning = read_usable(results).warning
    except StoreError as error:
        raise Failure(str(error), NOTHING) from error
    if warning:
        click.echo(warning, err=True)
    missing = set(names) if wanted != "all" else set()
    for file in files(results):
        found = groups(read(file).points)
        for group, points in found.items():
            stem = output / group.stem(file.stem, alone=len(found) == 1)
            for name, figure in plot.draw(group, points, names).items():
                missing.discard(name)
                for form in forms:
                    path = stem.with_name(f"{stem.name}-{name}.{form}")
                    try:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(chart.render(figure, form))
                    except OSError as error:
                        raise Failure(f"cannot write {path}: {error.strerror}", ENVIRONMENT) from error
                    click.echo(path)
    if missing:
        why = "; `zinfer sweep` traces a step of each point that the stream engine offloads" * ("timeline" in missing)
        raise Failure(f"no point in {results} has what figure {', '.join(sorted(missing))} would show{why}", NOTHING)
