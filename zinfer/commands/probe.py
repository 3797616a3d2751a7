"""`zinfer probe`: measure this machine for sweeps and plans."""

import os
from pathlib import Path

import click

from zinfer.commands.options import SIZE, option
from zinfer.commands.out import Table, console, say, write
from zinfer.commands.verb import Failure, Verb
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.machine import FIGURES, MachineError
from zinfer.core.units import parse_bytes
from zinfer.system import local, machines

BUSY = 0.25  # load average, as a share of the CPUs, from which on a probe does not replace a quieter one


@click.command("probe", cls=Verb)
@option("--nvme-path", click.Path(), "Folder on a drive whose reads are measured, too.")
@option("--output -o", click.Path(path_type=Path), "File or folder.  [default: sweeps/results/MACHINE/machine.json]")
@option("--quick", bool, "Take fewer samples of smaller blocks.")
@option("--memory", SIZE, "Host memory to measure with, as 1GiB.  [default: half of what is free]")
@option("--force", bool, "Replace a machine.json that was made while less ran on this machine.")
def command(nvme_path: str | None, output: Path | None, quick: bool, memory: int | None, force: bool) -> None:
    """Measure this machine's memory links, compute rate and, with --nvme-path, drive; write machine.json."""
    if memory is not None and memory < parse_bytes(local.LITTLE):
        raise click.UsageError(f"--memory: {local.LITTLE} at least; less would measure the caches of the processor")
    path = output or local.results_folder()
    if output is None or path.is_dir():
        path = path / "machine.json"
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cpus:
        busy = f"the load average is {load:.1f} on {cpus} CPUs"
        if path.is_file() and not force and not _as_busy(path):
            raise Failure(f"{busy}, and {path} was made while less ran: wait a minute, or add --force", ENVIRONMENT)
        say(f"{busy}: figures may be too low", err=True)
    from zinfer.worker import probe  # imports torch

    machine = probe.probe(nvme_path, quick, lambda what: click.echo(f"measuring {what}", err=True), memory)
    machine = machine.model_copy(update={"name": local.name()})
    write(path, machine.model_dump_json(indent=1) + "\n")
    figures = [(field, machine.describe(field)) for field in FIGURES if getattr(machine, field)]
    console().print(Table("", ("figure", machine.name), figures))
    if nvme_path is not None and machine.nvme_bandwidth is None:
        say(f"{nvme_path} was not measured: {machine.note}", err=True)
    click.echo(f"wrote {path}", err=True)


def _as_busy(path: Path) -> bool:
    """Tell whether a machine.json was made under no less load."""
    try:
        before = machines.load(path).details.get("load_average", 0)
    except MachineError:  # no description of a machine
        return True
    return isinstance(before, int | float) and before >= os.getloadavg()[0]
