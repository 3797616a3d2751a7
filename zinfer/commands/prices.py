"""Options for prices and demand that verbs share, and options by machine."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


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


def sizing_options(function: Command) -> Command:
    """Add the options for a demand and for the host's price."""
    for option in (
        click.option("--spare", type=click.IntRange(min=0), default=1, show_default=True, help="Number of spare GPUs."),
        click.option(
            "--utilisation", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
            help="Share of a GPU's throughput to plan with, 0 to 1.",
        ),
        click.option("--deadline", metavar="TIME", help="Time in which the demand is due: 8h, 30min, 2s."),
        click.option("--demand", metavar="TOKENS", help="Output tokens to size for: 2Mtok/day, 5Mtok."),
        click.option(
            "--gpus-per-server", type=click.IntRange(min=1), default=1, show_default=True,
            help="GPUs that share a host and its price.",
        ),
        click.option("--host-hour-usd", type=click.FloatRange(min=0), help="Price of a host, GPUs excluded, in USD/h."),
    ):  # fmt: skip
        function = option(function)
    return function


def price_options(function: Command) -> Command:
    """Add the options for prices and for a demand to size for."""
    for option in (
        click.option("--power-usd-kwh", type=click.FloatRange(min=0), help="Price of energy, in USD a kWh."),
        sizing_options,
        click.option("--gpu-hour-usd", type=click.FloatRange(min=0), help="Price of a GPU, in USD an hour."),
    ):
        function = option(function)
    return function
