"""`zinfer machines`: list the catalogue's machines, or show one with the source of each figure."""

import click


@click.command("machines")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the catalogue's machines with the figures that plans are made from; with NAME (a catalogue name, or a
    machine.json), show one with its sources."""
    import json

    from zinfer.commands.out import console, table
    from zinfer.core.machine import FIGURES, catalogue_names
    from zinfer.core.units import gb, gib
    from zinfer.system.machines import load

    machines = [load(name)] if name else [load(entry) for entry in catalogue_names()]
    if as_json:
        click.echo(json.dumps([machine.model_dump(mode="json") for machine in machines], indent=1))
        return
    if name:
        cells = [(field, machines[0].describe(field)) for field in FIGURES]
        console().print(table("", ("figure", machines[0].note or machines[0].name), cells))
        return

    def rate(value: float | None) -> str:
        return f"{gb(value)}/s" if value else ""

    rows = []
    for machine in machines:
        assumed = machine.sources.get("host_bytes", "").startswith("assumed")
        host = gib(machine.host_bytes) if machine.host_bytes else ""
        rows.append((
            machine.name,
            machine.gpu_name or "",
            gib(machine.gpu_bytes),
            rate(machine.hbm_bandwidth),
            f"{machine.matmul_flops / 1e12:,.4g} TFLOP/s" if machine.matmul_flops else "",
            rate(machine.h2d_bandwidth),
            f"{host} (assumed)" if assumed else host,
            machine.source,
        ))  # fmt: skip
    columns = (
        "machine", "GPU", "#GPU memory", "#bandwidth of it", "#bf16 matrix products", "#link", "#host memory", "source",
    )  # fmt: skip
    console().print(table("", columns, rows, drop=("GPU", "source", "bf16 matrix products", "bandwidth of it")))
