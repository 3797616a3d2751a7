"""`zinfer codec`: size and speed of losslessly coded weights, and whether coding pays on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zinfer.commands import options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zinfer.record.codec import CodecRecord


@click.command("codec")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=options.Dtype(),
    metavar=options.DTYPE,
    help="With bf16, cast other floats to bf16 and code them, too; without it bf16 and FP8 alone are coded.",
)
@options.record("codec")
def command(checkpoints: tuple[Path, ...], dtype: str | None, output: Path | None, as_json: bool) -> None:
    """Code and decode weights of known distributions, and those of each CHECKPOINT (a folder, or one safetensors file).
    Reports their size as a share of the original, the speed, whether every bit returns, and the gain of a streamed
    model over this machine's link. Checkpoints are not changed; of a large one, a sample of each matrix is taken.

    The exit code is 6 if the codec returned other bits.

    \b
    zinfer codec
    zinfer codec ./my-checkpoint
    """
    from zinfer.commands.failure import Failure
    from zinfer.commands.out import console, study_file
    from zinfer.core.errors import INTEGRITY
    from zinfer.record import study
    from zinfer.record.codec import CodecRecord
    from zinfer.worker import codec

    if dtype not in (None, "bfloat16"):
        raise click.UsageError(f"--dtype {dtype}: only bfloat16 is coded")
    record = codec.measure(
        checkpoints, cast=dtype is not None, progress=lambda what: click.echo(f"measuring {what}", err=True)
    )
    path = study_file(CodecRecord, record.machine, output)
    study.append(path, record)
    if as_json:
        click.echo(record.model_dump_json(indent=1))
    else:
        console().print(*tables(record), sep="\n")
    click.echo(f"wrote {path}", err=True)
    if record.failed:
        raise Failure(f"{', '.join(record.failed)}: the codec returned other bits", INTEGRITY)


def tables(record: "CodecRecord") -> "list[RenderableType]":
    """Return the measured rows, and those that others have published."""
    from zinfer.commands.out import table
    from zinfer.core.units import gb
    from zinfer.plan.published import PublishedCodec, codecs
    from zinfer.record.codec import COLUMNS

    measured = f"{record.machine}, link {gb(record.link)}/s"
    return [
        table(measured, COLUMNS, record.cells()),
        table("published by others, not measured here", PublishedCodec.columns, [one.cells for one in codecs()]),
    ]
