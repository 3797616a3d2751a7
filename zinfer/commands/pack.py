"""`zinfer pack`: write a checkpoint's layers to disk in the lossless wire format, or a quantised copy of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.checkpoint.quantization import SCHEMES
from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.core.errors import ENVIRONMENT

if TYPE_CHECKING:
    from zinfer.checkpoint.source import Source
    from zinfer.commands.watch import Watch


@click.command("pack")
@click.option("-m", "--model", required=True, help="Hugging Face hub id, or checkpoint folder.")
@click.option(
    "--dtype",
    type=options.Dtype(),
    metavar=options.DTYPE,
    help="Weight type; only bf16, and FP8 as released, shrink.  [default: the model's own]",
)
@click.option(
    "--weights",
    type=click.Choice(SCHEMES),
    help="Write a checkpoint with quantised layers instead: other weights, so measure the loss with `zinfer accuracy`.",
)
@options.layers
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: in engines/packed]"
)
@options.revision
@options.allow_nan
def command(
    model: str, dtype: Any, weights: Any, layers: int | None, output: Path | None, allow_nan: bool | None
) -> None:
    """Code a checkpoint's decoder layers once, so that `--engine stream -O weight_codec=lossless` reads a third fewer
    bytes (a sixth of weights released in FP8) and codes nothing when it loads. Every tensor has a checksum. Prints the
    folder; the engine finds the default folder by itself, another one with -O packed=FOLDER.

    With --weights, write a checkpoint in the format of compressed-tensors, whose decoder layers are quantised without
    calibration: int4 with a scale for 128 columns, int8 and fp8 with one for each row. Every command takes the folder
    as --model.

    \b
    zinfer pack --model ./my-checkpoint
    zinfer run --model ./my-checkpoint --offload cpu -O weight_codec=lossless --prompt "Once upon a time"
    zinfer pack --model ./my-checkpoint --weights int4 -o ./my-checkpoint-int4
    zinfer accuracy --model ./my-checkpoint --weights ./my-checkpoint-int4
    """
    from zinfer.checkpoint.source import find
    from zinfer.commands.watch import Watch
    from zinfer.engine import kind

    kind("stream")
    if weights and layers is not None:
        raise click.UsageError("--layers: a quantised copy has all layers; give --layers where it is used")
    if weights and allow_nan:
        raise click.UsageError("--allow-nan: NaN and infinity have no codes; leave it out, or leave out --weights")
    source = find(model, dtype, layers, "safetensors", fetch=True)
    with Watch() as watch:
        folder = quantised(source, weights, output, watch) if weights else _packed(source, output, watch, allow_nan)
    click.echo(folder)


def _packed(source: "Source", output: Path | None, watch: "Watch", allow_nan: bool | None) -> Path:
    """Write the packed layers of a checkpoint; return their folder."""
    from zinfer.core.units import gb
    from zinfer.engine.stream import packed

    folder = output or packed.PACKED / packed.folder_name(source.spec, source.revision)
    whole = round(source.spec.streamed_bytes * source.spec.stored_ratio)
    watch.say(f"packing {gb(whole)} of layers into {folder}")
    try:
        size = packed.write(source.spec, source.revision, folder, _device(), watch.progress, bool(allow_nan))
    except OSError as error:
        raise Failure(f"cannot pack into {folder}: {error.strerror or error}", ENVIRONMENT) from error
    share = size / whole
    watch.say(f"{gb(size)}, {share:.1%} of it" + ("" if share < 0.99 else f": {packed.why_whole(source.spec)}"))
    return folder


def quantised_folder(source: "Source", weights: str) -> Path:
    """Return the default folder of a quantised copy, whose name differs for other weights and types."""
    from zinfer.engine.stream.packed import PACKED

    return PACKED / f"{Path(source.spec.name).name}-{source.spec.dtype}-{source.revision}-{weights}"


def quantised(source: "Source", weights: Any, output: Path | None, watch: "Watch") -> Path:
    """Write a quantised copy of a checkpoint; return its folder. Raises Failure where it cannot be written."""
    from zinfer.core.units import gb
    from zinfer.engine.quantization import checkpoint

    folder = output or quantised_folder(source, weights)
    watch.say(f"writing {source.spec.name} with layers in {weights} into {folder}")
    try:
        done = checkpoint.write(source.spec, source.revision, folder, weights, _device(), watch.progress)
    except OSError as error:
        raise Failure(f"cannot write {folder}: {error.strerror or error}", ENVIRONMENT) from error
    share = f"{done.after / done.before:.1%} of {gb(done.before)}"
    watch.say(f"{done.matrices:,} matrices in {weights}: {gb(done.after)}, {share}; the folder has {gb(done.nbytes)}")
    if done.kept:
        more = f" and {len(done.kept) - 1:,} more" if len(done.kept) > 1 else ""
        watch.say(f"routers, shared or narrow matrices of the layers stay as they are: {done.kept[0]}{more}")
    watch.say("the text will differ: `zinfer accuracy --weights` measures by how much")
    return folder


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
