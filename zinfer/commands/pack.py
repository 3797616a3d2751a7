"""`zinfer pack`: write packed layers, a quantised copy, or a TensorRT plan."""

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
@options.model
@click.option(
    "--engine",
    type=click.Choice(["stream", "tensorrt"]),
    default="stream",
    help="Engine to pack for: coded layers (stream), or a plan of these shapes (tensorrt).",
)
@click.option(
    "--dtype",
    type=options.WEIGHT_TYPE,
    metavar=options.DTYPE,
    help="Weight type; for stream only bf16, and FP8 as released, shrink.  [default: the model's own]",
)
@click.option(
    "--weights",
    type=click.Choice(SCHEMES),
    help="Write a checkpoint with quantised layers instead; `zinfer study accuracy` measures the loss.",
)
@options.layers
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder, or .plan file.  [default: in engines/packed, or engines/plans]",
)
@options.revision
@options.allow_nan
@click.option("--max-batch-size", type=click.IntRange(min=1), help="Most sequences in a batch, for tensorrt.")
@click.option(
    "--max-seq-len", type=click.IntRange(min=2), help="Most tokens of a sequence, prompt and output, for tensorrt."
)
@options.load_format
@click.option("--force", is_flag=True, default=None, help="Replace a plan that exists.")
def command(
    model: str,
    engine: str,
    dtype: Any,
    weights: Any,
    layers: int | None,
    output: Path | None,
    allow_nan: bool | None,
    **shapes: Any,
) -> None:
    """Pack a checkpoint's decoder layers once, for faster loads and fewer bytes. With `--engine stream -O
    weight_codec=lossless` it reads a third fewer bytes (a sixth of weights released in FP8) and codes nothing when it
    loads. Every tensor has a checksum. Prints the folder; the engine finds the default folder by itself, another one
    with -O packed=FOLDER.

    With --weights, write a checkpoint in the format of compressed-tensors, whose decoder layers are quantised without
    calibration: int4 with a scale for 128 columns, int8 and fp8 with one for each row. Every command takes the folder
    as --model.

    With --engine tensorrt, build a plan with weight streaming. It holds the weights and is valid for this model, these
    shapes and the installed library. TensorRT builds for the GPU of this machine; TensorRT-RTX builds without a GPU.
    Host memory needed: two copies of the weights.

    \b
    zinfer pack --model ./my-checkpoint
    zinfer run --model ./my-checkpoint --offload cpu -O weight_codec=lossless --prompt "Once upon a time"
    zinfer pack --model ./my-checkpoint --weights int4 -o ./my-checkpoint-int4
    zinfer study accuracy --model ./my-checkpoint --weights ./my-checkpoint-int4
    zinfer pack --model ./my-checkpoint --engine tensorrt --max-batch-size 32 --max-seq-len 1024
    """
    from zinfer.checkpoint.source import find
    from zinfer.commands.watch import Watch
    from zinfer.engine import kind

    if engine == "tensorrt":
        if lacking := next((key for key in ("max_batch_size", "max_seq_len") if shapes[key] is None), None):
            raise click.UsageError(f"--engine tensorrt needs --{lacking.replace('_', '-')}: a plan is for given shapes")
        if weights:
            raise click.UsageError("--weights: a quantised copy is for --engine stream; leave out one of the two")
        kind(engine)
        click.echo(_plan(model, dtype, layers, output, bool(allow_nan), **shapes))
        return
    if stray := next((key for key, value in shapes.items() if value is not None), None):
        raise click.UsageError(f"--{stray.replace('_', '-')} is for --engine tensorrt")
    if weights and layers is not None:
        raise click.UsageError("--layers: a quantised copy has all layers; give --layers where it is used")
    if weights and allow_nan:
        raise click.UsageError("--allow-nan: NaN and infinity have no codes; leave it out, or leave out --weights")
    if output is not None and output.is_file():
        raise click.UsageError(f"--output {output} is a file: name a folder")
    kind(engine)
    source = find(model, dtype, layers, "safetensors", fetch=True)
    with Watch() as watch:
        folder = quantised(source, weights, output, watch) if weights else _packed(source, output, watch, allow_nan)
    click.echo(folder)


def _packed(source: "Source", output: Path | None, watch: "Watch", allow_nan: bool | None) -> Path:
    """Write the packed layers of a checkpoint; return their folder."""
    from zinfer.core.units import gb
    from zinfer.engine.stream.weights import packed

    folder = output or packed.PACKED / packed.folder_name(source.spec, source.revision)
    whole = round(source.spec.streamed_bytes * source.spec.stored_ratio)
    watch.message(f"packing {gb(whole)} of layers into {folder}")
    try:
        size = packed.write(source.spec, source.revision, folder, _device(), watch.progress, bool(allow_nan))
    except OSError as error:
        raise Failure(f"cannot pack into {folder}: {error.strerror or error}", ENVIRONMENT) from error
    share = size / whole
    watch.message(f"{gb(size)}, {share:.1%} of it" + ("" if share < 0.99 else f": {packed.why_whole(source.spec)}"))
    return folder


def quantised_folder(source: "Source", weights: str) -> Path:
    """Return the default folder of a quantised copy."""
    from zinfer.engine.stream.weights.packed import PACKED

    return PACKED / f"{Path(source.spec.name).name}-{source.spec.dtype}-{source.revision}-{weights}"


def quantised(source: "Source", weights: Any, output: Path | None, watch: "Watch") -> Path:
    """Write a quantised copy of a checkpoint; return its folder. Raises Failure where it cannot be written."""
    from zinfer.core.units import gb
    from zinfer.engine.quantization import checkpoint

    folder = output or quantised_folder(source, weights)
    watch.message(f"writing {source.spec.name} with layers in {weights} into {folder}")
    try:
        done = checkpoint.write(source.spec, source.revision, folder, weights, _device(), watch.progress)
    except OSError as error:
        raise Failure(f"cannot write {folder}: {error.strerror or error}", ENVIRONMENT) from error
    share = f"{done.after / done.before:.1%} of {gb(done.before)}"
    watch.message(
        f"{done.matrices:,} matrices in {weights}: {gb(done.after)}, {share}; the folder has {gb(done.nbytes)}"
    )
    if done.kept:
        more = f" and {len(done.kept) - 1:,} more" if len(done.kept) > 1 else ""
        watch.message(f"routers, shared or narrow matrices of the layers stay as they are: {done.kept[0]}{more}")
    watch.message("the text will differ: `zinfer study accuracy --weights` measures by how much")
    return folder


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _plan(
    model: str,
    dtype: Any,
    layers: int | None,
    output: Path | None,
    allow_nan: bool,
    max_batch_size: int,
    max_seq_len: int,
    load_format: Any,
    force: bool | None,
) -> Path:
    """Build a TensorRT plan; return its path. Raises Failure where it cannot be built."""
    from zinfer.checkpoint.source import find
    from zinfer.commands.out import say
    from zinfer.commands.watch import Watch
    from zinfer.core.units import duration, gb
    from zinfer.engine.tensorrt import planfile
    from zinfer.engine.tensorrt.build import Cancelled, build, peak_host_bytes, plan_key
    from zinfer.engine.tensorrt.library import find_library
    from zinfer.job.signals import Signals
    from zinfer.system.host import host_bytes

    tensorrt = find_library()
    source = find(model, dtype, layers, load_format or "auto", fetch=True)
    key = plan_key(tensorrt, model, source.spec, source.load_format, layers, max_batch_size, max_seq_len)
    path = output or planfile.PLANS
    path = path if path.suffix == ".plan" else path / f"{key.stem}.plan"
    if path.is_file() and not force:
        file = planfile.read(path)
        file.check()
        if file.key != key:
            raise Failure(f"{path} is a plan of other settings: --force replaces it, -o names another file")
        say(f"{path} is there already: nothing to build", err=True)
        return path
    with Watch() as watch, Signals() as signals:
        watch.message(f"building {path} with {tensorrt.name} {tensorrt.version}")
        weights, peak = gb(source.spec.weight_bytes), gb(peak_host_bytes(source.spec))
        watch.message(f"{weights} of weights ({source.load_format}); up to {peak} of host memory")
        try:
            stopped, free = lambda: signals.pending is not None, host_bytes()
            file = build(tensorrt, key, source.spec, path, watch.progress, stopped, free, allow_nan)
        except Cancelled:
            watch.message("interrupted; nothing is left behind")
            raise SystemExit(128 + (signals.pending or 0)) from None
        except (MemoryError, OSError) as error:
            raise Failure(f"the build failed: {error}", ENVIRONMENT) from error
        except RuntimeError as error:  # torch's OutOfMemoryError among them
            raise Failure(f"the build failed: {' '.join(str(error).split())[:500]}", ENVIRONMENT) from error
        watch.message(f"{gb(file.size)} in {duration(file.build_s)}, for GPUs of compute capability {key.target}")
    return path
