"""`zinfer models`: list the catalogue's models, or show one model."""

import click


@click.command("models")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the catalogue's models with their sizes as released; with NAME (a catalogue name, a folder or a hub id),
    show one."""
    import json

    from zinfer.checkpoint import quantization, resolve
    from zinfer.commands.out import console, table
    from zinfer.core.units import gb

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
            str((quantization.method(spec.config) or {}).get("quant_method", spec.dtype)),
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
