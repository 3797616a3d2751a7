"""Options for prices and demand that verbs share, and options by machine."""

from typing import Any

import click

from zinfer.commands.options import together


class PerMachine(click.ParamType[Any]):
    """Comma list of ``MACHINE=VALUE``; without a name, for all machines."""

    name = "[machine=]value,.."

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = (word.rpartition("=") for word in value.split(","))
        return tuple((name.strip(), self._kind.convert(text.strip(), param, ctx)) for name, _, text in words)


sizing_options = together(  # for a demand, and for the host's price
    click.option("--host-hour-usd", type=click.FloatRange(min=0), help="Price of a host, GPUs excluded, in USD/h."),
    click.option(
        "--gpus-per-server", type=click.IntRange(min=1), default=1,
        help="GPUs that share a host and its price.",
    ),
    click.option("--demand", metavar="TOKENS", help="Output tokens to size for: 2Mtok/day, 5Mtok."),
    click.option("--deadline", metavar="TIME", help="Time in which the demand is due: 8h, 30min, 2s."),
    click.option(
        "--utilisation", type=click.FloatRange(0, 1, min_open=True), default=0.8,
        help="Share of a GPU's throughput to plan with, 0 to 1.",
    ),
    click.option("--spare", type=click.IntRange(min=0), default=1, help="Number of spare GPUs."),
)  # fmt: skip
price_options = together(
    click.option("--gpu-hour-usd", type=click.FloatRange(min=0), help="Price of a GPU, in USD an hour."),
    sizing_options,
    click.option("--power-usd-kwh", type=click.FloatRange(min=0), help="Price of energy, in USD a kWh."),
)
