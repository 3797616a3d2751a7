"""`zinfer study routing`: hits of a cache of experts on the routing of a trained mixture, by policy and size."""

from pathlib import Path

import click

from zinfer.checkpoint.source import find
from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.study import keep, present
from zinfer.job.accuracy import describe, text_of


@click.command("routing")
@options.model
@options.prompt_text
@option("--samples", options.COUNT, "Pieces of the text.", default=16)
@option("--length", click.IntRange(min=2), "Tokens of a piece.", default=256)
@options.record("routing")
def command(model: str, prompt_file: str, samples: int, length: int, output: Path | None) -> None:
    """Measure the experts that a trained mixture needs, and a cache's hits.

    The experts that the routers of a checkpoint choose for each token of a text are replayed on a cache of experts: the
    share of needs that it meets, with each policy and for several sizes. Random weights route evenly and are refused.

    \b
    zinfer study routing --model ./my-mixture --prompt-file book.txt --samples 64
    """
    from zinfer.worker import routing  # with torch

    spec, text = find(model, None, None, "safetensors").spec, text_of(prompt_file)
    progress = lambda what: click.echo(f"traced {what}", err=True)  # noqa: E731
    run = routing.measure(spec, text, samples, length, describe(spec), progress)
    keep(run, output)
    present(run)
