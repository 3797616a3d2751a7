"""`zinfer probe`: measure this machine for sweeps and plans."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zinfer.commands.options import Size

if TYPE_CHECKING:
    from zinfer.commands.out import Table
    from zinfer.core.machine import Machine


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
@click.option("--memory", type=Size(), help="Host memory to measure with, as 1GiB.  [default: half of what is free]")
@click.option("--json", "as_json", is_flag=True, help="Also print the machine as JSON.")
def command(nvme_path: str | None, output: Path | None, quick: bool, memory: int | None, as_json: bool) -> None:
    """Measure this machine's memory links, compute rate and, with --nvme-path, drive; write machine.json."""
    from zinfer.commands.files import write
    from zinfer.commands.out import console
    from zinfer.core.units import parse_bytes
    from zinfer.system import local
    from zinfer.worker.probe import probe

    if memory is not None and memory < parse_bytes(local.LITTLE):
        raise click.UsageError(f"--memory: {local.LITTLE} at least; less would measure the caches of the processor")
    machine = probe(nvme_path, quick, lambda what: click.echo(f"measuring {what}", err=True), memory)
    machine = machine.model_copy(update={"name": local.name()})
    path = output or local.results_folder()
    if output is None or path.is_dir():
        path = path / "machine.json"
    text = machine.model_dump_json(indent=1) + "\n"
    write(path, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        console().print(table(machine))
    if nvme_path is not None and machine.nvme_bandwidth is None:
        click.echo(f"{nvme_path} was not measured: {machine.note}", err=True)
    click.echo(f"wrote {path}", err=True)


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
        ("device memory, read and written", machine.hbm_bandwidth, "/s"),
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
