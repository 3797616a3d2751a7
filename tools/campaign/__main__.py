"""Command line: `python -m tools.campaign [--seed N] [--class NAME,..] [--count N] [--jobs N] [-o FILE]`."""

import os
import sys
import tempfile
from pathlib import Path

import click

from tools.campaign import shim as shims


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of all dice.")
@click.option("--class", "wanted", help="Classes, separated by commas, or beginnings of their names.  [default: all]")
@click.option("--count", default=10, show_default=True, help="Cases of each class; three times as many inputs.")
@click.option("--number", type=int, help="Run only this case, and tell all that happened.")
@click.option("--jobs", default=1, show_default=True, help="Cases at a time.")
@click.option("--minutes", type=float, help="Begin no case after so many minutes.")
@click.option("--ordinary", default=0.0, show_default=True, help="Share of kills with executed processes.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File that the record is appended to.")
@click.option("--list", "listing", is_flag=True, help="List the classes.")
def main(
    seed: int,
    wanted: str | None,
    count: int,
    number: int | None,
    jobs: int,
    minutes: float | None,
    ordinary: float,
    output: Path | None,
    listing: bool,
) -> None:
    """Disturb zinfer in every way, count what held, and print a table; exit with 1 if something failed."""
    from tools.campaign import run

    if listing:
        click.echo("\n".join(f"{name:20} {text}" for name, text in run.titles().items()))
        return
    chosen = run.chosen(wanted)
    numbers = [number] if number is not None else range(count)
    status = run.campaign(seed, chosen, numbers, jobs, minutes, ordinary, output, tell=number is not None)
    sys.stdout.flush()
    os._exit(status)  # libraries that were imported only to fork from have nothing to tidy up


def restart() -> None:
    """Start this process again with the shim, if a compiler makes one."""
    folder = Path(tempfile.mkdtemp(prefix="zinfer-campaign-"))
    os.environ["ZINFER_CAMPAIGN_ROOT"] = str(folder)
    library = shims.build(folder)
    if library is not None:
        shims.restart_with(library, "tools.campaign")


if __name__ == "__main__":
    if "ZINFER_CAMPAIGN_ROOT" not in os.environ and not {"--help", "--list"} & {*sys.argv}:
        restart()
    main()
