"""`zinfer routing`: hits of a cache of experts on the routing of a trained mixture, by policy and size."""

from pathlib import Path

import click

from zinfer.commands import options


@click.command("routing")
@options.model
@options.prompt_text
@click.option("--samples", type=click.IntRange(min=1), default=16, show_default=True, help="Pieces of the text.")
@click.option("--length", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens of a piece.")
@options.record("routing")
def command(model: str, prompt_file: str, samples: int, length: int, output: Path | None, as_json: bool) -> None:
    """Record which experts the routers of a checkpoint choose for each token of a text, and replay that on a cache of
    experts: the share of needs that it meets, with each policy of expert_cache and for several sizes; and the share of
    right guesses of the next layer's experts. Random weights route evenly and are refused.

    \b
    zinfer routing --model ./my-mixture
    zinfer routing --model ./my-mixture --prompt-file book.txt --samples 64
    """
    from zinfer.checkpoint.source import find
    from zinfer.commands.out import console, study_file, table
    from zinfer.job.accuracy import describe, text_of
    from zinfer.record import study
    from zinfer.record.routing import COLUMNS, RoutingRecord
    from zinfer.worker import routing

    source = find(model, None, None, "safetensors")
    spec, text = source.spec, text_of(prompt_file)
    told = describe(spec)
    record = routing.measure(spec, text, samples, length, told, lambda what: click.echo(f"traced {what}", err=True))
    path = study_file(RoutingRecord, record.machine, output)
    study.append(path, record)
    if as_json:
        click.echo(record.model_dump_json(indent=1))
    else:
        console().print(table(f"{record.model}: {record.told}", COLUMNS, record.cells()), record.verdict(), sep="\n")
    click.echo(f"wrote {path}", err=True)
