"""`zinfer study codec`: size and speed of losslessly coded weights, and whether coding pays on this machine."""

from pathlib import Path

import click

from zinfer.analysis.study import wrong
from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.commands.study import keep, present
from zinfer.core.errors import INTEGRITY


@click.command("codec")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...", type=click.Path(path_type=Path))
@options.record("codec")
def command(checkpoints: tuple[Path, ...], output: Path | None) -> None:
    """Measure size and speed of losslessly coded weights, and whether coding pays.

    Drawn weights are coded and decoded, and those of each CHECKPOINT (a folder, or one safetensors file), floats cast
    to bf16. Reports their size as a share of the original, the speed, whether every bit returns, and the gain of a
    streamed model over this machine's link. Checkpoints are not changed; of a large one, a sample of each matrix is
    taken. The exit code is 6 if the codec returned other bits.

    \b
    zinfer study codec
    zinfer study codec ./my-checkpoint
    """
    from zinfer.worker import codec  # with torch

    run = codec.measure(checkpoints, lambda what: click.echo(f"measuring {what}", err=True))
    keep(run, output)
    present(run)
    if names := wrong(run):
        raise Failure(f"{', '.join(names)}: the codec returned other bits", INTEGRITY)
