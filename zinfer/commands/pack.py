"""`zinfer pack`: write a checkpoint's layers to disk in the lossless wire format."""

from pathlib import Path
from typing import Any

import click

from zinfer.cli import Failure
from zinfer.commands import options
from zinfer.spec.errors import ENVIRONMENT


@click.command("pack")
@click.option("-m", "--model", required=True, help="Hugging Face hub id, or checkpoint folder.")
@click.option(
    "--dtype",
    type=options.Dtype(),
    metavar=options.DTYPE,
    help="Weight type; only bf16 shrinks.  [default: the model's own]",
)
@click.option("--layers", type=click.IntRange(min=1), help="Slice: the model's first N layers only.")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: in engines/packed]"
)
@options.allow_nan
def command(model: str, dtype: Any, layers: int | None, output: Path | None, allow_nan: bool | None) -> None:
    """Code a checkpoint's decoder layers once, so that `--engine stream -O weight_codec=lossless` reads a third fewer
    bytes and codes nothing when it loads. Every tensor has a checksum. Prints the folder; the engine finds the default
    folder by itself, another one with -O packed=FOLDER.

    \b
    zinfer pack --model ./my-checkpoint
    zinfer run --model ./my-checkpoint --offload cpu -O weight_codec=lossless --prompt "Once upon a time"
    """
    from zinfer.commands.watch import Watch
    from zinfer.engine import kind
    from zinfer.spec.source import find
    from zinfer.spec.units import gb

    kind("stream")
    import torch

    from zinfer.engine.stream import packed

    source = find(model, dtype, layers, "safetensors", fetch=True)
    folder = output or packed.PACKED / packed.folder_name(source.spec, source.revision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Watch() as watch:
        watch.say(f"packing {gb(source.spec.streamed_bytes)} of layers into {folder}")
        try:
            size = packed.write(source.spec, source.revision, folder, device, watch.progress, bool(allow_nan))
        except OSError as error:
            raise Failure(f"cannot pack into {folder}: {error.strerror or error}", ENVIRONMENT) from error
        watch.say(f"{gb(size)}, {size / source.spec.streamed_bytes:.1%} of it")
    click.echo(folder)
