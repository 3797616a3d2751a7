"""Options that several verbs share, and the loads that they stand for."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from zinfer.core.engine import ENGINES, OptionError, StreamOptions, option_text, values
from zinfer.core.errors import ZinferError
from zinfer.core.units import parse_bytes

if TYPE_CHECKING:
    from zinfer.checkpoint.source import Source
    from zinfer.core.case import LoadFormat
    from zinfer.core.machine import Machine
    from zinfer.core.model import ModelSpec
    from zinfer.generation.tokenizer_process import TokenizerProcess
    from zinfer.job.recipe import Sweep, SweepLoad

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("bfloat16", "float16", "float32")
OFFLOADS = ("none", "cpu", "nvme")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPE = "|".join(SHORT_DTYPES)  # as help texts show it; the long names are taken as well

WEIGHTS = ("as-released", "int4", "int8", "fp8")
MODEL_HELP = "Catalogue name (see `zinfer plan --list models`), Hugging Face hub id, checkpoint folder, or config.json."
ENGINE_HELP = "Engine (accelerate, deepspeed, stream, tensorrt), or a recipe in the folder engines/."
ENGINES_HELP = "Engines (accelerate, deepspeed, stream, tensorrt), or recipes in engines/.  [default: stream]"


class Words(click.ParamType[Any]):
    """Comma list of words; each must be one of `choices`, if there are any, unless `others` are allowed."""

    name = "a,b,.."

    def __init__(self, choices: tuple[str, ...] = (), others: bool = False) -> None:
        self.choices, self.others = choices, others

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return f"[{'|'.join(self.choices)}],.." if self.choices else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in value.split(",") if word.strip())
        unknown = [word for word in words if self.choices and not self.others and word not in self.choices]
        if unknown or not words:
            self.fail(f"{', '.join(unknown) or 'nothing'!r}: choose from {', '.join(self.choices)}", param, ctx)
        return words


class Parsed(click.ParamType[Any]):
    """Value that `parse` makes of a text; the message of its ValueError or ZinferError is the user's."""

    def __init__(self, name: str, parse: Callable[[str], Any], largest: int | None = None) -> None:
        self.name, self._parse = name, parse
        if largest is not None:
            self.largest = largest  # of `zinfer.commands.limits`

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except (ValueError, ZinferError) as error:
            self.fail(str(error).removeprefix("--batch-size "), param, ctx)


class Values(Parsed):
    """Comma list of values; `parse` makes each of a word, or raises ValueError. `syntax` is for its error."""

    def __init__(self, name: str, parse: Callable[[str], Any], syntax: str) -> None:
        def split(text: str) -> tuple[Any, ...]:
            try:
                return tuple(parse(word.strip()) for word in text.split(","))
            except ValueError:
                raise ValueError(f"{text[:60]!r}: write {syntax}") from None

        super().__init__(name, split)


def typed() -> dict[str, str]:
    """Return the parameters that the command line names, and their options."""
    context = click.get_current_context()
    options = {str(parameter.name): parameter.opts[-1] for parameter in context.command.params}
    source = context.get_parameter_source
    return {name: option for name, option in options.items() if source(name) is ParameterSource.COMMANDLINE}


def positive(word: str) -> int:
    """Return a positive whole number. Raises ValueError."""
    if (number := int(word)) < 1:
        raise ValueError(word)
    return number


def _share_or_size(word: str) -> str:
    from zinfer.core.case import resident_bytes

    resident_bytes(word, 0)
    return word


NUMBERS = Values("n,n,..", positive, "positive whole numbers with commas between")
GPU_WEIGHTS = Values("auto|n%|size,..", _share_or_size, "auto, a share such as 25%, or a size such as 40GiB")


def _shard(text: str) -> Any:
    from zinfer.job.shard import Shard

    return Shard.parse(text)


def _batches(text: str) -> Any:
    from zinfer.job.recipe import parse_batches

    return parse_batches(text)


def _dtype(text: str) -> str:
    if (word := SHORT_DTYPES.get(text, text)) not in DTYPES:
        raise ValueError(f"{text!r}: choose from {', '.join(DTYPES)}")
    return word


SHARD = Parsed("i/n", _shard)
SIZE = Parsed("size", parse_bytes, largest=1 << 62)  # bytes: 8GiB or 4096
BATCHES = Parsed("auto|n,n,..|n-n*n", _batches)
WEIGHT_TYPE = Parsed("|".join(DTYPES), _dtype)
dtype = click.option("--dtype", type=WEIGHT_TYPE, metavar=DTYPE, help="Weight type.  [default: the model's own]")
gpu_weights = click.option(
    "--gpu-weights",
    type=GPU_WEIGHTS,
    help="Part of the offloaded weights that stays on the GPU: auto, a share (25%) or a size (40GiB).  "
    "[default: auto for stream]",
)
models = click.option("-m", "--model", type=Words(), help=MODEL_HELP)
offloads = click.option(
    "--offload",
    type=Words(OFFLOADS),
    help="Weights on the GPU (none), in host memory (cpu) or on an NVMe drive (nvme).  [default: none,cpu]",
)


def engine_options(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Return ``-O key=v1,v2`` as axes."""
    from zinfer.job.recipe import parse_option

    axes = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key or not text:
            raise click.BadParameter(f"{value!r}: write key=value, or key=value,value for an axis", ctx, param)
        axes[key.strip()] = tuple(parse_option(word.strip()) for word in text.split(","))
    return axes


# Options of `stream` with a flag.
SHORTHANDS = ("weight_codec", "kv_offload", "kv_cache_dtype", "draft", "experts", "gpus")


def shorthand(name: str) -> Callable[[Command], Command]:
    """Return the click option ``--name`` of an option of `stream`. It takes a comma list of values."""
    field = StreamOptions.model_fields[name]
    choices = tuple(values(field))
    kind = NUMBERS if choices == ("N",) else Words(choices, others=field.title is not None)
    return click.option(f"--{name.replace('_', '-')}", name, type=kind, help=field.description)


def _shorthands(function: Command) -> Command:
    @functools.wraps(function)
    def merged(*args: Any, settings: dict[str, tuple[Any, ...]], **given: Any) -> Any:
        short = {key: values for key in SHORTHANDS if (values := given.pop(key)) is not None}
        for key in sorted(short.keys() & settings.keys()):
            raise click.UsageError(f"--{key.replace('_', '-')} and -O {key} say the same: leave out one")
        return function(*args, settings=settings | short, **given)

    for key in reversed(SHORTHANDS):
        merged = shorthand(key)(merged)
    return cast("Command", merged)


def together(*parts: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds options, in their order."""

    def add(function: Command) -> Command:
        for option in reversed(parts):
            function = option(function)
        return function

    return add


def drafts_right(drafted: int, accepted: int) -> str:
    """Return the count of right drafts, to follow other counts; empty without drafts."""
    return f", {accepted:,} of {drafted:,} drafts right" if drafted else ""


def timeout(default: float, limited: str) -> Callable[[Command], Command]:
    """Return the option ``--timeout``, in seconds."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default,
        help=f"Limit for {limited}, in seconds.",
    )


def record(kind: str) -> Callable[[Command], Command]:
    """Return the options ``--output`` and ``--json`` of a kind of study."""
    help_text = f"File or folder.  [default: sweeps/results/MACHINE/{kind}.jsonl]"
    return together(
        click.option("-o", "--output", type=click.Path(path_type=Path), help=help_text),
        click.option("--json", "as_json", is_flag=True, help="Print the record as JSON, besides writing it."),
    )


model = click.option("-m", "--model", required=True, help=MODEL_HELP)
engine = click.option("--engine", default="stream", help=ENGINE_HELP)
offload_if_needed = click.option(
    "--offload",
    type=click.Choice(OFFLOADS),
    help="Weights on the GPU (none), in host memory (cpu) or on an NVMe drive.  [default: none if they fit]",
)
layers = click.option("--layers", type=click.IntRange(min=1), help="A slice: the model's first N layers only.")
load_format = click.option(
    "--load-format",
    type=click.Choice(["auto", "safetensors", "dummy"]),
    help="Real weights (safetensors), random ones of the same size (dummy), or real ones if there are any (auto).  "
    "[default: auto]",
)
prompt_text = click.option(
    "--prompt-file", metavar="FILE", default="default", show_default=False,
    help="UTF-8 text file.  [default: Python's own manual]",
)  # fmt: skip
weights = click.option(
    "--weights",
    type=Words(WEIGHTS),
    default=None,
    help="Format of the weights in decoder layers; all but as-released round them (int4: groups of 128 values with a "
    "16-bit scale; int8, fp8: a scale a row), so results are lossy.  [default: as-released]",
)
allow_nan = click.option(
    "--allow-nan", is_flag=True, default=None, help="Load weights with NaN or infinity, too; else they are refused."
)


def revision(function: Command) -> Command:
    """Add the option ``--revision``, which becomes a part of the models' names."""

    @functools.wraps(function)
    def named(*args: Any, revision: str | None, **given: Any) -> Any:
        if revision is not None:
            given["model"] = at_revision(given.get("model"), revision)
        return function(*args, **given)

    help_text = "Branch, tag or commit of a hub model; as --model owner/name@REVISION."
    return cast("Command", click.option("--revision", metavar="REVISION", help=help_text)(named))


load_options = together(  # of a load: weights, type, slice, NVMe folder, engine settings
    revision,
    dtype,
    allow_nan,
    load_format,
    layers,
    click.option(
        "--nvme-path",
        type=click.Path(file_okay=False),
        help="Folder for --offload nvme; engine stream takes several, A,B, one a drive.",
    ),
    gpu_weights,
    click.option(
        "-O",
        "--option",
        "settings",
        multiple=True,
        callback=engine_options,
        metavar="KEY=VALUE[,VALUE..]",
        help="An option of the engine (listed below); a comma list is an axis. Repeatable.",
    ),
    _shorthands,
)


chat_template = click.option(
    "--chat-template",
    metavar="FILE|NAME",
    help="Chat template: a file, or one of the model's by its name.  [default: the model's own]",
)


def tokenizer_of(spec: "ModelSpec", wanted: str | None) -> "TokenizerProcess":
    """Start the tokenizer of a model, with the template of ``--chat-template``; it ends with the command.

    Raises ModelError for files that cannot be read or believed.
    """
    from zinfer.checkpoint.tokenizer_files import chat_template, require
    from zinfer.generation.tokenizer_process import TokenizerProcess

    directory = None if spec.directory is None else Path(spec.directory)
    if directory is not None:
        require(directory)
    tokenizer = TokenizerProcess(spec, chat_template(directory, wanted))
    click.get_current_context().call_on_close(tokenizer.close)
    return tokenizer


job_options = together(  # of a command that answers requests
    engine,
    click.option(
        "--offload",
        type=click.Choice(OFFLOADS),
        help="Weights on the GPU (none), in host memory (cpu) or on an NVMe drive.  "
        "[default: the faster of none and cpu]",
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1), help="Most rows that run at a time.  [default: all that fit]"
    ),
    click.option(
        "--output-len",
        type=click.IntRange(min=1),
        default=256,
        help="Most tokens of an answer, for requests without max_tokens.",
    ),
    weights,
    load_options,
    chat_template,
    timeout(36000, "a load or a pass"),
)


def at_revision(model: Any, revision: str) -> Any:
    """Return ``owner/name@revision`` of a hub id, or of several. Raises UsageError for other models."""
    import re

    from zinfer.checkpoint import hub

    for name in (model,) if isinstance(model, str) else model or ("",):
        if not re.fullmatch(hub.REFERENCE, f"{name}@{revision}") or "@" in name or name.startswith("."):
            raise click.UsageError(f"--revision is for a hub model, as --model owner/name: {name or 'none was given'}")
    return f"{model}@{revision}" if isinstance(model, str) else tuple(f"{name}@{revision}" for name in model)


class LoadCommand(click.Command):
    """A verb with `load_options`: its help ends with the options of each engine."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for name, kind in ENGINES.items():
            with formatter.section(f"Options of engine {name}, as -O KEY=VALUE"):
                rows = [
                    (
                        f"{key}={'|'.join(values(field))}",
                        f"{field.description}  [default: {option_text(field.default)}]",
                    )
                    for key, field in kind.options.model_fields.items()
                ]
                formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


def check_nvme(offloads: Iterable[str | None], nvme_path: str | None) -> None:
    """Raise UsageError if offload `nvme` is among `offloads` and has no folder."""
    if "nvme" in offloads and nvme_path is None:
        raise click.UsageError("--offload nvme needs --nvme-path, a folder on the NVMe drive")


def with_nvme(machine: "Machine", nvme_path: str | None) -> "Machine":
    """Return `machine` with the space that is free at `nvme_path` right now."""
    if nvme_path is None:
        return machine
    from zinfer.commands.failure import Failure
    from zinfer.core.errors import ENVIRONMENT
    from zinfer.system.host import drives, free_bytes

    for folder in (folders := drives(nvme_path)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"--nvme-path {folder} cannot be made: {error.strerror}", ENVIRONMENT) from None
    return machine.model_copy(update={"nvme_bytes": free_bytes(folders)})


def this_machine(nvme_path: str | None) -> "Machine":
    """Describe this machine, with the space that is free at `nvme_path`."""
    from zinfer.system import local

    return with_nvme(local.this_machine(), nvme_path)


def weights_of(
    model: str,
    dtype: Any,
    layers: int | None,
    load_format: "LoadFormat | str | None",
    weights: tuple[Any, ...] | None = None,
    loads: "Iterable[SweepLoad]" = (),
) -> "Source":
    """Return the model with its weights, fetched if need be. They have the format `weights`; a draft model is that of
    `loads`.

    Weights are random only with ``--load-format dummy``. Raises ModelError for a model without weights.
    """
    from zinfer.checkpoint.source import find
    from zinfer.core.model import ModelError

    (weights_format,) = weights or ("as-released",)
    draft = next((load.draft_model for load in loads), None)
    wanted: Any = load_format or "auto"
    source = find(model, dtype, layers, wanted, fetch=True, weights=weights_format, draft=draft)
    if source.load_format == "dummy" and load_format != "dummy":
        lack = "holds no .safetensors file" if Path(model).is_dir() else "has no weights to fetch"
        raise ModelError(f"{model} {lack}: give a checkpoint folder, or --load-format dummy to try it")
    return source


def offload_choices(offload: Any, gpu_weights: tuple[str, ...] | None) -> tuple[Any, ...]:
    """Return `offload`, or the offloads to choose from, preferred first.

    Raises UsageError for a share of weights on the GPU if all of them stay there.
    """
    if gpu_weights and offload == "none":
        raise click.UsageError("--gpu-weights is a share of offloaded weights: leave out --offload none")
    return (offload,) if offload else ("cpu",) if gpu_weights else ("none", "cpu")


def one_load(verb: str, model: str, how: dict[str, Any]) -> "dict[SweepLoad, str]":
    """Return the load of a verb's flags for each offload, with targets.

    Raises UsageError for axes, for a missing ``--nvme-path`` and for an offload that the engine lacks; OptionError and
    EngineError as `located` does.
    """
    from zinfer.job.recipe import make_sweep

    check_nvme([how["offload"]], how["nvme_path"])
    if any(len(values or ()) > 1 for values in [*how["settings"].values(), how["gpu_weights"], how["weights"]]):
        raise click.UsageError(f"{verb} takes one value for each option; axes belong to `zinfer sweep`")
    choices = offload_choices(how["offload"], how["gpu_weights"])
    fields = {name: how[name] for name in ("engine", "layers", "gpu_weights", "weights") if how[name] is not None}
    fields |= {"model": model, "offload": choices, "options": how["settings"], "allow_nan": bool(how["allow_nan"])}
    loads = located(make_sweep(fields, "the command line"))
    if not loads:
        raise click.UsageError(f"engine {how['engine']} has no offload {', '.join(choices)}")
    return loads


def located(wanted: "Sweep") -> "dict[SweepLoad, str]":
    """Return the loads with consistent options, and their engines' targets.

    Raises OptionError if options are unknown or wrong, or contradict each other in every load; EngineError for an
    engine that is not installed.
    """
    loads = {load: target for load in wanted.loads() if (target := locate(load)) is not None}
    able = {load: target for load, target in loads.items() if load.conflict is None}
    if loads and not able:
        raise OptionError(next(str(load.conflict) for load in loads))
    return able


def locate(load: "SweepLoad") -> str | None:
    """Return the target, module:Class, of a load's engine; None if the engine lacks that offload.

    Raises EngineError for an engine that is not installed, and for one without a share of the weights although
    ``--gpu-weights`` asks for it.
    """
    from zinfer import engine

    kind = engine.kind(load.engine)
    if load.offload not in kind.offloads:
        return None
    if load.gpu_weights is not None and not kind.gpu_weights:
        able = ", ".join(name for name, other in ENGINES.items() if other.gpu_weights)
        raise engine.EngineError(f"--gpu-weights is for {able}: {load.engine} keeps no share")
    return kind.target
