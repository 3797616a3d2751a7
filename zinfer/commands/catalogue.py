"""Lists of `zinfer plan --list`: the models and the machines of the catalogue."""

import json

import click

from zinfer.commands.out import console, table
from zinfer.core.units import gb, gib


def models(name: str | None, as_json: bool) -> None:
    """Print the catalogue's models with their sizes as released, or one: of a catalogue name, a folder, a hub id."""
    from zinfer.checkpoint import quantization, resolve

    specs = [resolve.resolve(name)] if name else [resolve.from_catalogue(entry) for entry in resolve.catalogue_names()]
    if as_json:
        keys = (
            "parameters", "expert_parameters", "weight_bytes", "stored_bytes", "layer_bytes", "other_bytes",
            "kv_bytes_per_token",
        )  # fmt: skip
        rows = [spec.model_dump(exclude={"layers"}) | {key: getattr(spec, key) for key in keys} for spec in specs]
        click.echo(json.dumps(rows, indent=1))
        return
    columns = (
        "model", "#parameters", "format", "#weights", "#layers", "#per layer", "#other", "#KV per token", "#positions",
        "architecture",
    )  # fmt: skip
    cells = [
        (
            spec.name,
            f"{spec.parameters / 1e9:.2f} B" if spec.parameters > 1e8 else f"{spec.parameters / 1e6:.2f} M",
            str((quantization.settings_of(spec.config) or {}).get("quant_method", spec.dtype)),
            gb(spec.stored_bytes),
            str(spec.num_layers),
            gb(round(spec.layer_bytes * spec.stored_ratio), 2),
            gb(spec.other_bytes, 2),
            f"{spec.kv_bytes_per_token / 1e3:.1f} kB",
            f"{spec.max_position:,}" if spec.max_position else "",
            spec.architecture,
        )
        for spec in specs
    ]
    console().print(table("", columns, cells, drop=("other", "per layer", "architecture", "KV per token")))


def machines(name: str | None, as_json: bool) -> None:
    """Print the catalogue's machines, or one with the sources of its figures."""
    from zinfer.analysis.economics import list_price
    from zinfer.core.machine import FIGURES, Machine, catalogue_names
    from zinfer.system.machines import load

    described = [load(entry) for entry in ([name] if name else catalogue_names())]
    if as_json:
        click.echo(json.dumps([machine.model_dump(mode="json") for machine in described], indent=1))
        return
    if name:
        cells, price = [(field, described[0].describe(field)) for field in FIGURES], list_price(described[0])
        listed = "unknown" if price is None else f"{price.usd_per_gpu_hour} (assumed: {price.source}, {price.date})"
        cells.append(("USD a GPU-hour", listed))
        console().print(table("", ("figure", described[0].note or described[0].name), cells))
        return

    def rate(value: float | None) -> str:
        return f"{gb(value)}/s" if value else ""

    def host(machine: Machine) -> str:
        return gib(machine.host_bytes) + " beside the GPU's" * machine.unified if machine.host_bytes else ""

    def usd(machine: Machine) -> str:
        price = list_price(machine)
        return "" if price is None else f"{price.usd_per_gpu_hour:.2f}"

    rows = [
        (
            machine.name, machine.gpu_name or "", gib(machine.gpu_bytes), rate(machine.hbm_bandwidth),
            f"{machine.matmul_flops / 1e12:,.4g} TFLOP/s" if machine.matmul_flops else "",
            rate(machine.h2d_bandwidth), host(machine), usd(machine), machine.source,
        )
        for machine in described
    ]  # fmt: skip
    columns = (
        "machine", "GPU", "#GPU memory", "#bandwidth of it", "#bf16 matrix products", "#link", "#host memory",
        "#USD/h (assumed)", "source",
    )  # fmt: skip
    console().print(table("", columns, rows, drop=("GPU", "source", "bf16 matrix products", "bandwidth of it")))
