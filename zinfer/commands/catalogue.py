"""Lists of `zinfer plan --list`: the models and the machines of the catalogue."""

from collections.abc import Callable

from zinfer.analysis.economics import list_price
from zinfer.checkpoint import quantization, resolve
from zinfer.commands.out import Table, console, table_of
from zinfer.core.machine import FIGURES, Machine, catalogue
from zinfer.core.model import ModelSpec
from zinfer.core.units import gb, gib
from zinfer.system.machines import load


def models(name: str | None) -> None:
    """Print the catalogue's models with their sizes as released, or one: of a catalogue name, a folder, a hub id."""
    specs = [resolve.resolve(name)] if name else [resolve.from_catalogue(entry) for entry in resolve.catalogue_names()]
    columns: dict[str, Callable[[ModelSpec], str]] = {
        "model": lambda spec: spec.name,
        "#parameters": lambda spec: (
            f"{spec.parameters / 1e9:.2f} B" if spec.parameters > 1e8 else f"{spec.parameters / 1e6:.2f} M"
        ),
        "format": lambda spec: str((quantization.settings_of(spec.config) or {}).get("quant_method", spec.dtype)),
        "#weights": lambda spec: gb(spec.stored_bytes),
        "#layers": lambda spec: str(spec.num_layers),
        "#per layer": lambda spec: gb(round(spec.layer_bytes * spec.stored_ratio), 2),
        "#other": lambda spec: gb(spec.other_bytes, 2),
        "#KV per token": lambda spec: f"{spec.kv_bytes_per_token / 1e3:.1f} kB",
        "#positions": lambda spec: f"{spec.max_position:,}" if spec.max_position else "",
        "architecture": lambda spec: spec.architecture,
    }
    console().print(table_of(columns, specs, drop=("other", "per layer", "architecture", "KV per token")))


def machines(name: str | None) -> None:
    """Print the catalogue's machines, or one with the sources of its figures."""
    if name:
        machine = load(name)
        cells, price = [(field, machine.describe(field)) for field in FIGURES], list_price(machine)
        listed = "unknown" if price is None else f"{price.usd_per_gpu_hour} (assumed: {price.source}, {price.date})"
        cells.append(("USD a GPU-hour", listed))
        console().print(Table("", ("figure", machine.note or machine.name), cells))
        return

    def rate(value: float | None) -> str:
        return f"{gb(value)}/s" if value else ""

    def host(machine: Machine) -> str:
        return gib(machine.host_bytes) + " beside the GPU's" * machine.unified if machine.host_bytes else ""

    def usd(machine: Machine) -> str:
        price = list_price(machine)
        return "" if price is None else f"{price.usd_per_gpu_hour:.2f}"

    columns: dict[str, Callable[[Machine], str]] = {
        "machine": lambda machine: machine.name,
        "GPU": lambda machine: machine.gpu_name or "",
        "#GPU memory": lambda machine: gib(machine.gpu_bytes),
        "#bandwidth of it": lambda machine: rate(machine.hbm_bandwidth),
        "#bf16 matrix products": lambda machine: (
            f"{machine.matmul_flops / 1e12:,.4g} TFLOP/s" if machine.matmul_flops else ""
        ),
        "#link": lambda machine: rate(machine.h2d_bandwidth),
        "#host memory": host,
        "#USD/h (assumed)": usd,
        "source": lambda machine: machine.source,
    }
    drop = ("GPU", "source", "bf16 matrix products", "bandwidth of it")
    console().print(table_of(columns, map(load, catalogue()), drop=drop))
