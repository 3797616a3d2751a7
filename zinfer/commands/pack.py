"""`zinfer pack`: write packed layers, a quantised copy, or a TensorRT plan."""

from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import click

from zinfer.checkpoint.quantization import SCHEMES
from zinfer.checkpoint.source import Source, find
from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.out import say, writing
from zinfer.commands.verb import Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.units import duration, gb
from zinfer.engine import kind
from zinfer.job.signals import Signals
from zinfer.system.host import host_bytes


@click.command("pack", cls=Verb)
@options.any_model
@option("--engine", click.Choice(["stream", "tensorrt"]), "Coded layers, or a plan of given shapes.", default="stream")
@options.dtype
@option("--weights", click.Choice(SCHEMES), "Write a quantised checkpoint; see `zinfer study accuracy`.")
@options.layers
@option("-o --output", options.PATH, "Folder, or .plan file.  [default: in engines/packed, or engines/plans]")
@options.allow_nan
@option("--max-batch-size", options.COUNT, "Maximum sequences in a batch, for tensorrt.")
@option("--max-seq-len", click.IntRange(min=2), "Maximum tokens of a sequence, prompt and output, for tensorrt.")
@option("--level", click.IntRange(0, 5), "Optimisation level of the build, for tensorrt.  [default: 1]")
@options.load_format
@option("--force", bool, "Replace a plan that exists.", default=None)
def command(engine: str, output: Path | None, **how: Any) -> None:
    """Pack a checkpoint's decoder layers once, for faster loads and fewer bytes. With `--engine stream -O
    weight_codec=lossless` it reads a third fewer bytes (a sixth of weights released in FP8) and codes nothing when it
    loads. Every tensor has a checksum. Prints the folder; the engine finds the default folder by itself, another one
    with -O packed=FOLDER.

    With --weights, write a checkpoint in the format of compressed-tensors, whose decoder layers are quantised without
    calibration. Every command takes the folder as --model. With --engine tensorrt, build a plan with weight streaming,
    for this model, these shapes, this GPU and the installed library; it takes host memory for two copies of weights.

    \b
    zinfer pack --model ./my-checkpoint
    zinfer pack --model ./my-checkpoint --weights int4 -o ./my-checkpoint-int4
    zinfer pack --model ./my-checkpoint --engine tensorrt --max-batch-size 32 --max-seq-len 1024
    """
    built, weights, shape = engine == "tensorrt", how["weights"], (how["max_batch_size"], how["max_seq_len"])
    if built:
        options.refuse(("weights",), "is for --engine stream: leave out one of the two")
        if None in shape:
            raise click.UsageError("--engine tensorrt needs --max-batch-size and --max-seq-len, the shapes of a plan")
    else:
        options.refuse(("max_batch_size", "max_seq_len", "level", "load_format", "force"), "is for --engine tensorrt")
        if output is not None and output.is_file():
            raise click.UsageError(f"--output {output} is a file: name a folder")
    if weights:
        options.refuse(("layers",), "is not for a quantised copy, which has all layers: give it where that is used")
        options.refuse(("allow_nan",), "is not for --weights, which has no code for NaN")
    kind(engine)
    if built:
        click.echo(_plan(output, how))
        return
    source = find(how["model"], how["dtype"], how["layers"], "safetensors", fetch=True)
    with Watch() as watch:
        folder = quantised(source, weights, output, watch) if weights else _packed(source, output, watch, how)
    click.echo(folder)


def _packed(source: Source, output: Path | None, watch: Watch, how: dict[str, Any]) -> Path:
    from zinfer.engine.stream.weights import packed

    spec = source.spec
    folder = output or packed.PACKED / packed.folder_name(spec, source.revision)
    whole = round(spec.streamed_bytes * spec.stored_ratio)
    watch.message(f"packing {gb(whole)} of layers into {folder}")
    with writing(folder):
        size = packed.write(spec, source.revision, folder, _device(), watch.progress, bool(how["allow_nan"]))
    why = f": {packed.why_whole(spec)}" if size >= 0.99 * whole else ""
    watch.message(f"{gb(size)}, {size / whole:.1%} of it{why}")
    return folder


def quantised_folder(source: Source, weights: str) -> Path:
    """Return the default folder of a quantised copy."""
    from zinfer.engine.stream.weights.packed import PACKED

    return PACKED / f"{Path(source.spec.name).name}-{source.spec.dtype}-{source.revision}-{weights}"


def quantised(source: Source, weights: Any, output: Path | None, watch: Watch) -> Path:
    """Write a quantised copy of a checkpoint; return its folder."""
    from zinfer.engine.quantization import checkpoint

    folder = output or quantised_folder(source, weights)
    watch.message(f"writing {source.spec.name} with layers in {weights} into {folder}")
    with writing(folder):
        done = checkpoint.write(source.spec, source.revision, folder, weights, _device(), watch.progress)
    size = f"{gb(done.after)}, {done.after / done.before:.1%} of {gb(done.before)}"
    watch.message(f"{done.matrices:,} matrices in {weights}: {size}; the folder has {gb(done.nbytes)}")
    if done.kept:
        more = f" and {len(done.kept) - 1:,} more" if len(done.kept) > 1 else ""
        watch.message(f"routers, shared or narrow matrices of the layers stay as they are: {done.kept[0]}{more}")
    watch.message("the text will differ: `zinfer study accuracy --weights` measures by how much")
    return folder


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _plan(output: Path | None, how: dict[str, Any]) -> Path:
    """Build a TensorRT plan; return its path. Raises Failure where it cannot be built."""
    from zinfer.engine.tensorrt import planfile
    from zinfer.engine.tensorrt.build import build, peak_host_bytes, plan_key
    from zinfer.engine.tensorrt.library import find_library

    tensorrt = find_library()
    source = find(how["model"], how["dtype"], how["layers"], how["load_format"] or "auto", fetch=True)
    shape = how["layers"], how["max_batch_size"], how["max_seq_len"]
    key = plan_key(tensorrt, how["model"], source.spec, source.load_format, *shape)
    path = output or planfile.PLANS
    path = path if path.suffix == ".plan" else path / f"{key.stem}.plan"
    if path.is_file() and not how["force"]:
        file = planfile.read(path)
        file.check()
        if file.key != key or how["level"] not in (None, file.level):
            raise Failure(f"{path} is a plan of other settings: --force replaces it, -o names another file")
        say(f"{path} is there already: nothing to build", err=True)
        return path
    with Watch() as watch, Signals() as signals:
        watch.message(f"building {path} with {tensorrt.name} {tensorrt.version}")
        weights, peak = gb(source.spec.streamed_bytes), gb(peak_host_bytes(tensorrt, source.spec))
        watch.message(f"{weights} of weights ({source.load_format}); up to {peak} of host memory")
        try:
            stopped, free = lambda: signals.pending is not None, host_bytes()
            level, nan = planfile.LEVEL if how["level"] is None else how["level"], bool(how["allow_nan"])
            file = build(tensorrt, key, source.spec, path, watch.progress, stopped, free, nan, level)
        except CancelledError:
            watch.message("interrupted; nothing is left behind")
            raise SystemExit(128 + (signals.pending or 0)) from None
        except (MemoryError, OSError, RuntimeError) as error:  # torch's OutOfMemoryError among them
            raise Failure(f"the build failed: {' '.join(str(error).split())[:500]}", ENVIRONMENT) from error
        watch.message(f"{gb(file.size)} in {duration(file.build_s)}, for GPUs of compute capability {key.target}")
    return path
