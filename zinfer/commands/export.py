"""`zinfer export`: records as a flat table, for other tools."""

import sys
from pathlib import Path

import click

FORMATS = ("csv", "json")


@click.command("export")
@click.argument("results", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), help="Format.  [default: the ending of OUT, else csv]")
@click.option("--requests", is_flag=True, help="Write the loads of requests, which are a table of their own.")
@click.option(
    "-o", "--output", metavar="OUT", type=click.Path(path_type=Path), help="File to write.  [default: stdout]"
)
def command(results: tuple[Path, ...], form: str | None, requests: bool, output: Path | None) -> None:
    """Write every point of the FILEs (or folders; default: sweeps/results) as one row: its case, status, rates with
    their confidence intervals, peaks, placement and versions. Failures are rows; unknown is empty, never 0. With
    --requests, every load of requests: mean, p50, p90 and p99 of TTFT, TPOT, ITL and E2E, rates and counts.

    In CSV, a text that a spreadsheet would run as a formula begins with an apostrophe.

    \b
    zinfer export --format json sweeps/results/*/bloom-176b-slice.jsonl
    zinfer export -o all.csv
    """
    from zinfer.analysis.requests import goodput
    from zinfer.commands.failure import Failure
    from zinfer.commands.files import write
    from zinfer.commands.out import say
    from zinfer.core.errors import NOTHING
    from zinfer.core.units import counted
    from zinfer.record.export import WRITERS, FlatTable, request_table
    from zinfer.record.store import files, read
    from zinfer.system.printable import printable

    ending = output.suffix.removeprefix(".").lower() if output else ""
    chosen = form or (ending if ending in FORMATS else "csv")
    points, served = [], []
    for path in dict.fromkeys(results or (Path("sweeps/results"),)):
        if results and not path.exists():
            raise Failure(f"{path} does not exist: name a results file, or a folder of them", NOTHING)
        records_of_files = [(str(file), read(file)) for file in files(path)] if path.exists() else []
        for warning in (records.warning for _, records in records_of_files if records.warning):
            say(warning, err=True)
        if not any(records.requests if requests else records.points for _, records in records_of_files):
            other = any(records.points if requests else records.requests for _, records in records_of_files)
            kind = "loads of requests" if requests else "points of equal sequences" if other else "results"
            hint = (
                f": {'leave out' if requests else 'add'} --requests"
                if other
                else ": measure first, with `zinfer sweep`"
            )
            raise Failure(f"no {kind} in {path}{hint}", NOTHING)
        if output and any(output.resolve() == Path(file).resolve() for file, _ in records_of_files):
            raise Failure(f"{output} is one of the result files: name another file with -o")
        points += [(file, point) for file, records in records_of_files for point in records.points]
        served += [(file, point) for file, records in records_of_files for point in records.requests]
    if form is None and ending and ending not in (*FORMATS, "txt"):
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise Failure(f"{output}: zinfer writes no .{ending}; end it in {endings}, or choose with --format")
    content = WRITERS[chosen](request_table(served, goodput) if requests else FlatTable.of(points))
    if served and not requests:
        say(f"{counted(len(served), 'load')} of requests left out: --requests writes them", err=True)
    if output is None:
        # a terminal is for reading: what would move its cursor is written out; a file or a pipe gets every character
        click.echo(printable(content.decode()) if sys.stdout.isatty() else content, nl=False)
        return
    write(output, content)
    click.echo(output)
