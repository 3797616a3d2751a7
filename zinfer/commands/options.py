"""The options that several verbs share, under one name with one meaning, and what they stand for."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("bfloat16", "float16", "float32")
OFFLOADS = ("none", "cpu", "nvme")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

MODEL_HELP = "Catalogue name (see `zinfer models`), Hugging Face hub id, checkpoint folder, or config.json."


class Words(click.ParamType[Any]):
    """A comma list of words; with `known`, each must be one of them."""

    name = "a,b,.."

    def __init__(self, known: tuple[str, ...] = ()) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in value.split(",") if word.strip())
        unknown = [word for word in words if self.known and word not in self.known]
        if unknown or not words:
            self.fail(f"{', '.join(unknown) or 'nothing'!r}: choose from {', '.join(self.known)}", param, ctx)
        return words


class Numbers(click.ParamType[Any]):
    """A comma list of positive whole numbers."""

    name = "n,n,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(word) for word in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r}: write positive whole numbers with commas between", param, ctx)
        return numbers


class Batches(click.ParamType[Any]):
    """``auto``, ``auto*4``, ``1,2,4``, ``1,8,auto``, ``1-64*2`` or ``8-64+8``."""

    name = "auto|n,n,..|n-n*n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from zinfer.job.recipe import RecipeError, parse_batches

        try:
            return parse_batches(value)
        except RecipeError as error:
            self.fail(str(error).removeprefix("--batch-size "), param, ctx)


class GpuWeights(click.ParamType[Any]):
    """A comma list of ``auto``, shares (``25%``) and sizes (``40GiB``)."""

    name = "auto|n%|size,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        from zinfer.plan.plan import resident_bytes

        words = tuple(word.strip() for word in value.split(","))
        for word in words:
            try:
                resident_bytes(word, 0)
            except ValueError:
                self.fail(f"{word!r}: write auto, a share such as 25%, or a size such as 40GiB", param, ctx)
        return words


class Dtype(click.ParamType[Any]):
    """A weight type, long or short."""

    name = "|".join(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        word = SHORT_DTYPES.get(value, value)
        if word not in DTYPES:
            self.fail(f"{value!r}: choose from {', '.join(DTYPES)}", param, ctx)
        return str(word)


def engine_options(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """``-O key=v1,v2`` as axes."""
    from zinfer.job.recipe import parse_option

    axes = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key or not text:
            raise click.BadParameter(f"{value!r}: write key=value, or key=value,value for an axis", ctx, param)
        axes[key.strip()] = tuple(parse_option(word.strip()) for word in text.split(","))
    return axes


SHORTHANDS = {  # settings of `stream` with an option of their own, and their values as in `zinfer.plan.plan`
    "weight_codec": (("auto", "none", "lossless"), "How weights cross the link."),
    "kv_offload": (("none", "cpu", "auto"), "Whose KV cache lies in host memory: no, all, or excess sequences'."),
    "kv_cache_dtype": (("auto", "bf16", "int8", "fp8"), "Type of the KV cache."),
}


def _shorthands(function: Command) -> Command:
    """Options that stand for ``-O key=..``."""

    @functools.wraps(function)
    def told(*args: Any, settings: dict[str, tuple[Any, ...]], **given: Any) -> Any:
        short = {key: values for key in SHORTHANDS if (values := given.pop(key)) is not None}
        for key in sorted(short.keys() & settings.keys()):
            raise click.UsageError(f"--{key.replace('_', '-')} and -O {key} say the same: leave out one")
        return function(*args, settings=settings | short, **given)

    for key, (choices, words) in reversed(SHORTHANDS.items()):
        told = click.option(f"--{key.replace('_', '-')}", key, type=Words(choices), help=words)(told)
    return cast("Command", told)


def load_options(function: Command) -> Command:
    """What decides a load: weights, type, slice, NVMe folder, engine settings."""
    function = _shorthands(function)
    for option in (
        click.option(
            "-O", "--option", "settings", multiple=True, callback=engine_options, metavar="KEY=VALUE[,VALUE..]",
            help="A setting of the engine; a comma list is an axis. Repeatable.",
        ),
        click.option(
            "--gpu-weights", type=GpuWeights(), default=None,
            help="Of the offloaded weights, how much stays on the GPU.",
        ),
        click.option("--nvme-path", type=click.Path(file_okay=False), help="Folder for --offload nvme."),
        click.option("--layers", type=click.IntRange(min=1), help="A slice: the model's first N layers only."),
        click.option(
            "--load-format", type=click.Choice(["auto", "safetensors", "dummy"]), default=None,
            help="Real weights or random ones of the same size.",
        ),
        click.option("--dtype", type=Dtype(), default=None, help="Weight type; the model's own by default."),
    ):  # fmt: skip
        function = option(function)
    return function


def with_nvme(machine: Any, nvme_path: str | None) -> Any:
    """`machine` with the space that is free at `nvme_path` right now."""
    if nvme_path is None:
        return machine
    import shutil
    from pathlib import Path

    Path(nvme_path).mkdir(parents=True, exist_ok=True)
    return machine.model_copy(update={"nvme_bytes": shutil.disk_usage(nvme_path).free})


def locate(load: Any) -> Any:
    """The engine of a load as a sweep wants it; None where it does not have that offload.

    Raises EngineError for an engine that is not there and for options it does not know.
    """
    from zinfer import engine

    kind = engine.kind(load.engine)
    unknown = [key for key, _ in load.options if key not in kind.options]
    if unknown:
        known = ", ".join(kind.options) or "none"
        raise engine.EngineError(f"engine {load.engine} has no option {unknown[0]!r}; its options: {known}")
    if load.offload not in kind.offloads:
        return None
    if load.gpu_weights is not None and not kind.gpu_weights:
        able = ", ".join(name for name, other in engine.ENGINES.items() if other.gpu_weights)
        raise engine.EngineError(f"--gpu-weights is for {able}: {load.engine} keeps no share")
    return kind.target
