"""`zinfer report`: what was measured, as a document."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zinfer.machine import Machine


@click.command("report", short_help="Write what was measured as a Markdown document.")
@click.argument("results", default="sweeps/results", type=click.Path(path_type=Path))
@click.option("-o", "--output", default="plots/report.md", show_default=True, type=click.Path(path_type=Path))
def command(results: Path, output: Path) -> None:
    """Write the answers in RESULTS (a file or a folder), every point behind them, and the system under test.

    Figures that `zinfer plot` drew into the report's folder are shown in it. Prints the path it wrote.
    """
    from zinfer.cli import ENVIRONMENT, Failure
    from zinfer.group import groups
    from zinfer.report import Section, markdown
    from zinfer.store import StoreError, files, read

    sections, damaged = [], []
    try:
        for file in files(results) if results.exists() else ():
            records = read(file)
            damaged += [f"{file.name}, line {damage.line}: {damage.reason}" for damage in records.damaged]
            found = groups(records.points)
            for group, points in found.items():
                figures = _figures(output.parent, group.stem(file.stem, alone=len(found) == 1))
                sections.append(Section(file.stem, group, points, _machine(file.parent), figures))
    except StoreError as error:
        raise Failure(str(error), ENVIRONMENT) from error
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(markdown(sections, damaged), encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {output}: {error.strerror}", ENVIRONMENT) from error
    click.echo(output)


def _machine(folder: Path) -> "Machine | None":
    from zinfer import machine

    try:
        return machine.load(folder / "machine.json")
    except machine.MachineError:
        return None


def _figures(folder: Path, stem: str) -> dict[str, str]:
    """Links from `folder` to the figures of `stem` that are there, SVG before PNG."""
    candidates = {
        name: [f"{stem}-{name}.{form}" for form in ("svg", "png")] for name in ("throughput", "latency", "link")
    }
    return {
        name: there[0] for name, links in candidates.items() if (there := [x for x in links if (folder / x).is_file()])
    }
