"""`zinfer build`: build a TensorRT plan from a model's weights."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import click

from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.core.errors import ENVIRONMENT


@click.command("build")
@options.model
@click.option(
    "--engine", type=click.Choice(["tensorrt"]), default="tensorrt", show_default=True, help="Engine to build for."
)
@click.option("--max-batch-size", type=click.IntRange(min=1), required=True, help="Most sequences in a batch.")
@click.option(
    "--max-seq-len", type=click.IntRange(min=2), required=True, help="Most tokens of a sequence, prompt and output."
)
@click.option(
    "--dtype",
    type=options.Dtype(),
    metavar=options.DTYPE,
    help="Weight type, bf16 or fp16.  [default: the model's own]",
)
@options.layers
@options.load_format
@click.option(
    "--library", type=click.Choice(["auto", "tensorrt", "tensorrt-rtx"]), default="auto", show_default=True,
    help="Library to build with, if both are installed.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder, or .plan file.  [default: engines/plans]"
)
@options.revision
@options.allow_nan
@click.option("--force", is_flag=True, help="Replace a plan that exists.")
def command(
    model: str,
    engine: str,
    max_batch_size: int,
    max_seq_len: int,
    dtype: Any,
    layers: int | None,
    load_format: Any,
    library: str,
    output: Path | None,
    allow_nan: bool | None,
    force: bool,
) -> None:
    """Build a TensorRT plan with weight streaming, for `--engine tensorrt` of run and sweep. Prints its path.

    The plan holds the weights and is valid for this model, these shapes and the installed library. TensorRT builds for
    the GPU of this machine; TensorRT-RTX builds without a GPU. Host memory needed: two copies of the weights.

    \b
    zinfer build --model ./my-checkpoint --max-batch-size 32 --max-seq-len 1024
    zinfer build --model opt-30b --load-format dummy --max-batch-size 32 --max-seq-len 544
    """
    from zinfer.checkpoint.source import find
    from zinfer.core.units import duration, gb
    from zinfer.engine import kind
    from zinfer.system.host import allowed_bytes

    kind(engine)
    from zinfer.engine.tensorrt import planfile
    from zinfer.engine.tensorrt.build import Cancelled, build, peak_host_bytes, plan_key
    from zinfer.engine.tensorrt.library import find_library

    found = find_library(library)
    source = find(model, dtype, layers, load_format or "auto", fetch=True)
    key = plan_key(found, model, source.spec, source.load_format, layers, max_batch_size, max_seq_len)
    path = _path(output, planfile.PLANS, key.stem)
    if path.is_file() and not force:
        file = planfile.read(path)
        file.check()
        if file.key != key:
            raise Failure(f"{path} is a plan of other settings: --force replaces it, -o names another file")
        click.echo(f"{path} is there already: nothing to build", err=True)
        click.echo(path)
        return
    signals: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    from zinfer.commands.watch import Watch

    with Watch() as watch:
        watch.say(f"building {path} with {found.name} {found.version}")
        weights, peak = gb(source.spec.weight_bytes), gb(peak_host_bytes(source.spec))
        watch.say(f"{weights} of weights ({source.load_format}); up to {peak} of host memory")
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            stopped, free = lambda: bool(signals), allowed_bytes()
            file = build(found, key, source.spec, path, watch.progress, stopped, free, bool(allow_nan))
        except Cancelled:
            watch.say("interrupted; nothing is left behind")
            raise SystemExit(128 + signals[0]) from None
        except (MemoryError, OSError) as error:
            raise Failure(f"the build failed: {error}", ENVIRONMENT) from error
        except RuntimeError as error:  # torch's OutOfMemoryError among them
            raise Failure(f"the build failed: {' '.join(str(error).split())[:500]}", ENVIRONMENT) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        watch.say(f"{gb(file.size)} in {duration(file.build_s)}, for GPUs of compute capability {key.target}")
    click.echo(path)


def _path(output: Path | None, default: Path, stem: str) -> Path:
    if output is None:
        return default / f"{stem}.plan"
    return output if output.suffix == ".plan" else output / f"{stem}.plan"
