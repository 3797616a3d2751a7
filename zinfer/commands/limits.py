"""Limits of typed values: `bound` limits every option and argument of a verb, beside the range of its type."""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import click

WHOLE = 10**9  # largest count: tokens, rows, layers, repeats
SEED = 2**63  # largest seed: 64 bits
REAL = 1e12  # largest real number: seconds, prices
SMALLEST = 1e-9  # smallest one but 0: a quotient of two numbers is finite
TEXT = 1 << 20  # longest text, in characters: a prompt
NAME = 4096  # longest name or path: Linux's limit of a path
ITEMS = 1000  # maximum of values of a comma list, and of uses of a repeatable option

METAVARS = ("model", "machine", "engine")
NUMBERS = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}
PROSE = ("prompts", "system")  # parameters with texts of any kind


def bound(command: click.Command) -> None:
    """Bound the values of all options and arguments of `command`. Safe to call twice."""
    for verb in getattr(command, "commands", {}).values():
        bound(verb)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.metavar is None and not parameter.is_flag:
            named = parameter.name.upper() + ",.." * (parameter.type.name == "a,b,..") if parameter.name else ""
            parameter.metavar = named if parameter.name in METAVARS else NUMBERS.get(parameter.type.name)
        if not getattr(parameter.type, "bounded", False):
            kind = copy(parameter.type)  # click's own types are shared
            largest = SEED if parameter.name == "seed" else getattr(kind, "largest", WHOLE)
            kind.convert = _bounded(parameter.type.convert, largest)  # type: ignore[method-assign]
            kind.bounded = True  # type: ignore[attr-defined]
            parameter.type = kind


def _bounded(convert: Callable[..., Any], largest: int) -> Callable[..., Any]:
    def checked(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        longest = TEXT if param is not None and param.name in PROSE else NAME
        if isinstance(value, str) and len(value) > longest:
            raise click.BadParameter(f"a value of {len(value):,} characters: at most {longest:,}", ctx, param)
        if isinstance(value, str) and "\0" in value:
            raise click.BadParameter("a NUL character", ctx, param)
        converted = convert(value, param, ctx)
        if fault := _fault(converted, largest):
            raise click.BadParameter(f"{str(value)[:60]!r}: {fault}", ctx, param)
        return converted

    return checked


def _fault(value: Any, largest: int) -> str:
    """Return the reason why a parsed value is out of bounds; empty if it is not."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        if len(value) > ITEMS:
            return f"{len(value):,} values: at most {ITEMS:,}"
        return next(filter(None, (_fault(item, largest) for item in value)), "")
    if isinstance(value, int) and abs(value) > largest:
        return f"write a whole number up to {largest:,}"
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= REAL):
        return f"write a number up to {REAL:,.0f}"
    if isinstance(value, float) and 0 < abs(value) < SMALLEST:
        return f"write 0, or a number from {SMALLEST} on"
    return ""
