"""The options for money, energy and demand, which several verbs share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def price_options(function: Command) -> Command:
    """Prices, and the demand to size for."""
    for option in (
        click.option("--spare", type=click.IntRange(min=0), default=1, show_default=True, help="GPUs on top."),
        click.option(
            "--utilisation", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
            help="Of a GPU's throughput that the sizing counts on.",
        ),
        click.option("--deadline", metavar="TIME", help="In which the demand has to be met, as 8h."),
        click.option("--demand", metavar="TOKENS", help="Output tokens to size for, as 2Mtok/day."),
        click.option(
            "--gpus-per-server", type=click.IntRange(min=1), default=1, show_default=True,
            help="GPUs that share a host and its price.",
        ),
        click.option("--power-usd-kwh", type=click.FloatRange(min=0), help="USD a kWh."),
        click.option("--host-hour-usd", type=click.FloatRange(min=0), help="USD an hour of a host, without its GPUs."),
        click.option("--gpu-hour-usd", type=click.FloatRange(min=0), help="USD an hour of the GPU."),
    ):  # fmt: skip
        function = option(function)
    return function
