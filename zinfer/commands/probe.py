"""`zinfer probe`: measure this machine for sweeps and plans."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zinfer.commands.failure import Failure
from zinfer.commands.options import SIZE
from zinfer.core.errors import ENVIRONMENT

if TYPE_CHECKING:
    from zinfer.commands.out import Table
    from zinfer.core.machine import Machine

BUSY = 0.25  # load average, as a share of the CPUs, from which on a probe does not replace a quieter one


@click.command("probe")
@click.option(
    "--nvme-path", type=click.Path(), help="Folder on a drive whose reads are measured, too; several, A,B, together."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="File or folder.  [default: sweeps/results/MACHINE/machine.json]",
)
@click.option("--quick", is_flag=True, help="Take fewer samples of smaller blocks.")
@click.option("--memory", type=SIZE, help="Host memory to measure with, as 1GiB.  [default: half of what is free]")
@click.option("--force", is_flag=True, help="Replace a machine.json that was made while less ran on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Also print the machine as JSON.")
def command(
    nvme_path: str | None, output: Path | None, quick: bool, memory: int | None, force: bool, as_json: bool
) -> None:
    """Measure this machine's memory links, compute rate and, with --nvme-path, drive; write machine.json."""
    from zinfer.commands.files import write
    from zinfer.commands.out import console, say
    from zinfer.core.units import parse_bytes
    from zinfer.system import local
    from zinfer.worker.probe import probe

    if memory is not None and memory < parse_bytes(local.LITTLE):
        raise click.UsageError(f"--memory: {local.LITTLE} at least; less would measure the caches of the processor")
    path = output or local.results_folder()
    if output is None or path.is_dir():
        path = path / "machine.json"
    if (busy := too_busy()) is not None:
        if path.is_file() and not force and not _as_busy(path):
            raise Failure(f"{busy}, and {path} was made while less ran: wait a minute, or add --force", ENVIRONMENT)
        say(f"{busy}: figures may be too low", err=True)
    machine = probe(nvme_path, quick, lambda what: click.echo(f"measuring {what}", err=True), memory)
    machine = machine.model_copy(update={"name": local.name()})
    text = machine.model_dump_json(indent=1) + "\n"
    write(path, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        console().print(table(machine))
    if nvme_path is not None and machine.nvme_bandwidth is None:
        say(f"{nvme_path} was not measured: {machine.note}", err=True)
    click.echo(f"wrote {path}", err=True)


def too_busy() -> str | None:
    """Return in words that other programs use much of the CPUs; None if they do not."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load average is {load:.1f} on {cpus} CPUs" if load > BUSY * cpus else None


def _as_busy(path: Path) -> bool:
    """Tell whether a machine.json was made under no less load."""
    from zinfer.core.machine import MachineError
    from zinfer.system.machines import load

    try:
        before = load(path).details.get("load_average", 0)
    except MachineError:  # no description of a machine
        return True
    return isinstance(before, int | float) and before >= os.getloadavg()[0]


def table(machine: "Machine") -> "Table":
    """Return a table of the measured figures."""
    from zinfer.commands import out
    from zinfer.core.units import gb, gib

    link = "host to GPU" if machine.gpu_count else "copy within memory"
    rows: list[tuple[str, float | None, str]] = [
        (f"{link}, pinned" if machine.gpu_count else link, machine.h2d_bandwidth, "/s"),
        (f"{link}, pageable", machine.pageable_bandwidth, "/s"),
        ("GPU to host, pinned", machine.d2h_bandwidth if machine.gpu_count else None, "/s"),
        ("both directions at once, each", machine.duplex_bandwidth, "/s"),
        ("links of all GPUs at once", machine.links_bandwidth, "/s"),
        ("GPU to GPU, each while all exchange", machine.gather_bandwidth, "/s"),
        ("device memory, read and written", machine.hbm_bandwidth if machine.gpu_count else None, "/s"),
        ("host memory, read and written", machine.host_bandwidth, "/s"),
        ("CPU attention, KV cache read", machine.attention_bandwidth, "/s"),
        ("the same, 8 query heads a key", machine.grouped_attention_bandwidth, "/s"),
        ("the same while the link copies", machine.shared_attention_bandwidth, "/s"),
        (f"{link} meanwhile", machine.shared_h2d_bandwidth, "/s"),
        ("disk, direct reads", machine.nvme_bandwidth, "/s"),
    ]
    cells = []
    if machine.gpu_count:
        cells.append(("GPU", f"{machine.gpu_count} x {machine.gpu_name}, {gib(machine.gpu_bytes)}"))
    if machine.host_bytes is not None:
        cells.append(("host memory", gib(machine.host_bytes)))
    cells += [(name, gb(value) + unit) for name, value, unit in rows if value is not None]
    if machine.matmul_flops is not None:
        cells.append(("matrix product", f"{machine.matmul_flops / 1e12:.3g} TFLOP/s"))
    return out.table("", ("figure", machine.name), cells)
