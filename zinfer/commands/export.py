"""`zinfer export`: records as a flat table, for other tools."""

import sys
from pathlib import Path

import click

from zinfer.analysis.requests import goodput
from zinfer.commands.options import option
from zinfer.commands.out import say, write
from zinfer.commands.results import warned
from zinfer.commands.verb import Failure, Verb
from zinfer.core.errors import NOTHING
from zinfer.core.units import counted
from zinfer.record.export import WRITERS, request_table, table
from zinfer.record.store import Records, files, read
from zinfer.system.printable import printable


@click.command("export", cls=Verb)
@click.argument("results", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, path_type=Path))
@option("--format form", click.Choice([*WRITERS]), "Format.  [default: the ending of OUT, else csv]")
@option("--requests", bool, "Write the loads of requests, which are a table of their own.")
@option("-o --output", click.Path(path_type=Path), "File to write.  [default: stdout]", metavar="OUT")
def command(results: tuple[Path, ...], form: str | None, requests: bool, output: Path | None) -> None:
    """Write every point of the FILEs (or folders; default: sweeps/results) as one row: its case, status, rates with
    their confidence intervals, peaks, placement and versions. Failures are rows; unknown is empty, never 0. With
    --requests, every load of requests: mean, p50, p90 and p99 of TTFT, TPOT, ITL and E2E, rates and counts.

    In CSV, a text that a spreadsheet would run as a formula begins with an apostrophe.

    \b
    zinfer export -o all.csv
    """
    ending = output.suffix.removeprefix(".").lower() if output else ""
    by_file: dict[str, Records] = {}
    for path in dict.fromkeys(results or (Path("sweeps/results"),)):
        of_path = {str(file): warned(read(file)) for file in files(path)} if path.exists() else {}
        equal, loads = (any(getattr(each, kind) for each in of_path.values()) for kind in ("points", "requests"))
        if not (loads if requests else equal):
            other = f"{'leave out' if requests else 'add'} --requests"
            hint = other if equal or loads else "measure first, with `zinfer sweep`"
            raise Failure(f"nothing to export in {path}: {hint}", NOTHING)
        if output and any(output.resolve() == Path(file).resolve() for file in of_path):
            raise Failure(f"{output} is one of the result files: name another file with -o")
        by_file |= of_path
    if form is None and ending not in ("", "txt", *WRITERS):
        raise Failure(f"{output}: zinfer writes no .{ending}; end it in .csv or .json, or choose with --format")
    rows = request_table(by_file.items(), goodput) if requests else table(by_file.items())
    content = WRITERS[form or (ending if ending in WRITERS else "csv")](rows)
    if (served := sum(len(records.requests) for records in by_file.values())) and not requests:
        say(f"{counted(served, 'load')} of requests left out: --requests writes them", err=True)
    if output is None:
        # a terminal is for reading: what would move its cursor is written out; a file or a pipe gets every character
        click.echo(printable(content.decode()) if sys.stdout.isatty() else content, nl=False)
        return
    write(output, content)
    click.echo(output)
