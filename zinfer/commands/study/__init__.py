"""`zinfer study`: studies of one question each, in records of one type."""

from pathlib import Path

import click

from zinfer.analysis.study import show
from zinfer.commands import limits
from zinfer.commands.out import console, table
from zinfer.record import study
from zinfer.system.local import RESULTS

STUDIES = ("codec", "accuracy", "reuse", "routing")


class _Studies(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(STUDIES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return limits.loaded(f"zinfer.commands.study.{name}") if name in STUDIES else None


@click.group("study", cls=_Studies)
def command() -> None:
    """Measure one question apart from a sweep. Each run is added to sweeps/results/MACHINE/STUDY.jsonl."""


def keep(run: study.Study, output: Path | None) -> None:
    """Add a run to `output`, or to the machine's file."""
    path = output or RESULTS / run.machine
    if output is None or path.is_dir():
        path /= f"{run.study}.jsonl"
    study.append(path, run)
    click.echo(f"wrote {path}", err=True)


def present(run: study.Study) -> None:
    """Print a run as a table and its notes."""
    shown = show(run)
    console().print(table(shown.title, shown.columns, shown.cells), *shown.notes, sep="\n", highlight=False)
