"""Command line: `python -m tools.campaign [--seed N] [--class NAME,..] [--count N] [--jobs N] [-o FILE]`."""

import sys
from pathlib import Path

import click

from tools.campaign import run


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of all dice.")
@click.option("--class", "wanted", help="Classes, separated by commas, or beginnings of their names.  [default: all]")
@click.option("--count", default=10, show_default=True, help="Cases of each class.")
@click.option("--number", type=int, help="Run only this case, and tell all that happened.")
@click.option("--jobs", default=1, show_default=True, help="Cases at a time.")
@click.option("--minutes", type=float, help="Begin no case after so many minutes.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File that the record is appended to.")
@click.option("--list", "listing", is_flag=True, help="List the classes.")
def main(
    seed: int,
    wanted: str | None,
    count: int,
    number: int | None,
    jobs: int,
    minutes: float | None,
    output: Path | None,
    listing: bool,
) -> None:
    """Disturb zinfer in every way, count what held, and print a table; exit with 1 if something failed."""
    if listing:
        click.echo("\n".join(f"{name:20} {text}" for name, text in run.titles().items()))
        return
    numbers = range(count) if number is None else [number]
    sys.exit(run.campaign(seed, run.chosen(wanted), numbers, jobs, minutes, output, tell=number is not None))


if __name__ == "__main__":
    main()
