"""Options that several verbs share, and the loads that they stand for."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple, TypeVar, cast

import click
from click.core import ParameterSource

from zinfer import engine as engines
from zinfer.checkpoint.gguf import SUFFIX
from zinfer.checkpoint.source import Source, find
from zinfer.checkpoint.tokenizer_files import chat_template as template_of
from zinfer.checkpoint.tokenizer_files import folder_of, require
from zinfer.commands.verb import help_engine
from zinfer.core.case import Case
from zinfer.core.engine import ENGINES, OptionError, StreamOptions, is_server, values
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError
from zinfer.core.units import parse_bytes
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.recipe import Sweep, SweepLoad, make_sweep, parse_batches, parse_option
from zinfer.job.shard import Shard
from zinfer.system import local

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # the long names are taken as well
OFFLOADS = ("none", "cpu", "nvme")
WEIGHTS = ("as-released", "int4", "int8", "fp8")
MODEL_HELP = "Name in the catalogue (`zinfer plan --list models`), hub id, checkpoint folder, GGUF, or config.json."
NAME_A_MODEL = "--model NAME, or a recipe (`zinfer plan --list models` lists the catalogue)"
OFFLOAD_HELP = "Weights on GPU, host or NVMe."
ENGINE_HELP = "Engine (accelerate, deepspeed, stream, tensorrt), or a recipe in the folder engines/."
ENGINES_HELP = (
    "Engines (accelerate, deepspeed, stream, tensorrt), servers (vllm, llama-server, ..), or recipes in engines/.  "
    "[default: stream]"
)

AMOUNT = click.FloatRange(min=0)
SECONDS, ONE_OFFLOAD = click.FloatRange(min=0, min_open=True), click.Choice(OFFLOADS)
PATH, FILE = click.Path(path_type=Path), click.Path(dir_okay=False, path_type=Path)
SHARE = click.FloatRange(0, 1, min_open=True)
NUMBER_METAVARS = {click.IntRange: "N", click.FloatRange: "X", int: "N", float: "X"}


def option(names: str, kind: Any, text: str, **settings: Any) -> Callable[[Command], Command]:
    """Return a click option: its names with spaces between, its type (`bool` is a flag), and its help."""
    usual = (
        {"is_flag": True}
        if kind is bool
        else {"type": kind, "metavar": NUMBER_METAVARS.get(kind if isinstance(kind, type) else type(kind))}
    )
    return click.option(*names.split(), help=text, **usual | settings)


def repeatable(names: str, text: str, metavar: str, **settings: Any) -> Callable[[Command], Command]:
    """Return an option for texts that may be given several times."""
    return option(names, str, f"{text} Repeatable.", multiple=True, metavar=metavar, **settings)


class Parsed(click.ParamType[Any]):
    """Value that `parse` makes of a text. Help shows its `name`.

    The user gets the message of its ValueError, or is told the `syntax`, where that is given. Whole numbers in it are
    up to `largest`.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], syntax: str = "", largest: int | None = None) -> None:
        self.name, self._parse, self._syntax = name, parse, syntax
        if largest is not None:
            self.largest = largest

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            syntax = f"{value[:60]!r}: write {self._syntax}"
            self.fail(syntax if self._syntax else str(error).removeprefix("--batch-size "), param, ctx)


def comma_list(name: str, parse: Callable[[str], Any], syntax: str) -> Parsed:
    """Return the type of a list of values. `parse` makes each of a word."""
    return Parsed(name, lambda text: tuple(parse(word.strip()) for word in text.split(",")), syntax)


def words(name: str, choices: Iterable[str] = (), others: bool = False) -> Parsed:
    """Return the type of a comma list of words: of `choices`, if there are any, unless `others` are allowed."""
    names = tuple(choices)

    def split(text: str) -> tuple[str, ...]:
        given = tuple(filter(None, map(str.strip, text.split(","))))
        unknown = [word for word in given if names and not others and word not in names]
        if unknown or not given:
            raise ValueError(f"{(', '.join(unknown) or 'nothing')[:60]!r}: choose from {', '.join(names)}")
        return given

    return Parsed(f"[{'|'.join(names)}],.." if names else name, split)


def typed() -> dict[str, str]:
    """Return the parameters that the command line names, and their options."""
    context = click.get_current_context()
    options = ((str(parameter.name), parameter.opts[-1]) for parameter in context.command.params)
    source = context.get_parameter_source
    return {name: option for name, option in options if source(name) is ParameterSource.COMMANDLINE}


def refuse(names: Iterable[str], why: str) -> None:
    """Raise UsageError if one of these parameters is on the command line."""
    if given := next((option for name, option in typed().items() if name in names), None):
        raise click.UsageError(f"{given} {why}")


def positive(word: str) -> int:
    """Return a positive whole number. Raises ValueError."""
    if (number := int(word)) < 1:
        raise ValueError(word)
    return number


def _dtype(text: str) -> str:
    if text not in (*DTYPES, *DTYPES.values()):
        raise ValueError(f"{text[:60]!r}: choose from {', '.join(DTYPES.values())}")
    return DTYPES.get(text, text)


def _setting(text: str) -> tuple[str, tuple[Any, ...]]:
    key, _, values = text.partition("=")
    if not (key and values):
        raise ValueError(text)
    return key.strip(), tuple(parse_option(word.strip()) for word in values.split(","))


COUNT = Parsed("N", positive, "a positive whole number")
NUMBERS = comma_list("N,N,..", positive, "positive whole numbers with commas between")
SHARD = Parsed("i/n", Shard.parse)
SIZE = Parsed("SIZE", parse_bytes, largest=1 << 62)  # bytes: 8GiB or 4096
BATCHES = Parsed("auto|N,N,..|N-N*N", parse_batches)
SETTING = Parsed("KEY=VALUE[,VALUE..]", _setting, "key=value, or key=value,value for an axis", largest=1 << 62)
dtype = option("--dtype", Parsed("|".join(DTYPES), _dtype), "Weight type.  [default: the model's own]")
gpu_weights = option("--gpu-weights", words("A,.."), "Share on the GPU: 25%, 40GiB.  [default: auto]")
models = option("-m --model", words("MODEL,.."), MODEL_HELP)
offloads = option("--offload", words("", OFFLOADS), f"{OFFLOAD_HELP}  [default: none,cpu]")

# Options of `stream` with a flag.
SHORTHANDS = ("weight_codec", "kv_offload", "kv_cache_dtype", "draft", "experts", "gpus")


def shorthand(name: str) -> Callable[[Command], Command]:
    """Return the click option ``--name`` of an option of `stream`. It takes a comma list of values."""
    field = StreamOptions.model_fields[name]
    choices = tuple(values(field))
    kind = NUMBERS if choices == ("N",) else words("", choices, others=field.title is not None)
    return option(f"--{name.replace('_', '-')}", kind, str(field.description))


def merged(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with their shorthands among the `settings`. Raises UsageError for one that is there twice."""
    settings = dict(given["settings"])
    short = {key: given[key] for key in SHORTHANDS if given[key] is not None}
    for key in sorted(short.keys() & settings.keys()):
        raise click.UsageError(f"--{key.replace('_', '-')} and -O {key} say the same: leave out one")
    return {key: value for key, value in given.items() if key not in SHORTHANDS} | {"settings": settings | short}


def _shorthands(function: Command) -> Command:
    @wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        return function(*args, **merged(given))

    for key in reversed(SHORTHANDS):
        called = shorthand(key)(called)
    return cast("Command", called)


def option_group(*parts: Callable[[Any], Any]) -> Callable[[Command], Command]:
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
    return option("--timeout timeout_s", SECONDS, f"Limit for {limited}, in seconds.", default=default)


def record(kind: str) -> Callable[[Command], Command]:
    """Return the option ``--output`` of a kind of study."""
    return option("-o --output", PATH, f"File or folder.  [default: sweeps/results/MACHINE/{kind}.jsonl]")


model = option("-m --model", str, MODEL_HELP, required=True, metavar="MODEL")


def any_model(function: Command) -> Command:
    """Add the model, as an argument or as ``--model``."""

    @wraps(function)
    def called(*args: Any, model: str | None, named: str | None, **given: Any) -> Any:
        if (model is None) == (named is None):
            raise click.UsageError("name one model: MODEL, or --model MODEL")
        return function(*args, model=model or named, **given)

    option_of_it = option("-m --model", str, MODEL_HELP, metavar="MODEL")
    return cast("Command", click.argument("named", metavar="[MODEL]", required=False)(option_of_it(called)))


def recipe_or_model(recipe: str | None, given: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return `recipe` and options; a checkpoint in the recipe's place is the model."""
    path = Path(recipe or "")
    if recipe is None or given.get("model") or not (path.is_dir() or (path.suffix == SUFFIX and path.is_file())):
        return recipe, given
    return None, given | {"model": (recipe,)}


engine = option("--engine", str, ENGINE_HELP, default="stream", metavar="ENGINE")
offload_if_needed = option("--offload", ONE_OFFLOAD, f"{OFFLOAD_HELP}  [default: none if they fit]")
layers = option("--layers", COUNT, "A slice: the model's first N layers only.")
LOAD_FORMATS = click.Choice(["auto", "safetensors", "dummy"])
load_format = option("--load-format", LOAD_FORMATS, "auto: real if any; dummy: random.  [default: auto]")
prompt_text = option(
    "--prompt-file", str, "Text.  [default: Python's manual]", metavar="FILE", default="default", show_default=False
)
weights = option("--weights", words("", WEIGHTS), "The last three are lossy.  [default: as-released]")
allow_nan = option("--allow-nan", bool, "Load weights with NaN or infinity, too.", default=None)

load_options = option_group(  # of a load: weights, type, slice, NVMe folder, engine settings
    dtype,
    allow_nan,
    load_format,
    layers,
    option("--nvme-path", click.Path(file_okay=False), "Folder for --offload nvme."),
    gpu_weights,
    option("--gpu-memory", SIZE, "Use at most this of a GPU."),
    option("-O --option settings", SETTING, "Engine option; a comma list is an axis. Repeatable.", multiple=True),
    option(
        "--help-engine",
        str,
        "Show its -O options.",
        metavar="ENGINE",
        is_eager=True,
        expose_value=False,
        callback=help_engine,
    ),
    _shorthands,
)

chat_template = option("--chat-template", str, "A file, or one of the model's by name.", metavar="FILE|NAME")


def per_machine(kind: click.ParamType[Any]) -> Parsed:
    """Return the type of a comma list of ``MACHINE=VALUE``; without a name, for all machines."""

    def parse(text: str) -> Any:
        words = (word.rpartition("=") for word in text.split(","))
        return tuple((name.strip(), kind(value.strip())) for name, _, value in words)

    return Parsed("[MACHINE=]VALUE,..", parse)


price = option("--gpu-hour-usd", AMOUNT, "Price of a GPU and its part of the host, in USD an hour.")

job_options = option_group(  # of a command that answers requests
    engine,
    option("--offload", ONE_OFFLOAD, f"{OFFLOAD_HELP}  [default: the faster]"),
    option("--concurrency --batch-size batch_size", COUNT, "Maximum rows at a time.  [default: all that fit]"),
    option(
        "--max-tokens --output-len output_len", COUNT, "Maximum tokens of an answer, if none is asked.", default=256
    ),
    weights,
    load_options,
    chat_template,
    timeout(36000, "a load or a pass"),
)


def check_nvme(offloads: Iterable[str | None], nvme_path: str | None) -> None:
    """Raise UsageError if offload `nvme` is among `offloads` and has no folder."""
    if "nvme" in offloads and nvme_path is None:
        raise click.UsageError("--offload nvme needs --nvme-path, a folder on the NVMe drive")


def this_machine(nvme_path: str | None, gpu_memory: int | None = None) -> Machine:
    """Describe this machine: free space at `nvme_path`, at most `gpu_memory` bytes a GPU."""
    machine = local.this_machine()
    machine = machine if gpu_memory is None else machine.limited(gpu_memory)
    if nvme_path is None:
        return machine
    Path(nvme_path).mkdir(parents=True, exist_ok=True)
    return machine.model_copy(update={"nvme_bytes": disk_usage(nvme_path).free})


def weights_of(how: dict[str, Any], loads: Iterable[SweepLoad] = ()) -> Source:
    """Return the model with its weights, fetched if need be. Raises ModelError for a model without weights."""
    model, asked = how["model"], how["load_format"]
    weights: Any = (how.get("weights") or ("as-released",))[0]
    draft = next((load.draft_model for load in loads), None)
    source = find(model, how["dtype"], how["layers"], asked or "auto", fetch=True, weights=weights, draft=draft)
    if source.load_format == "dummy" and asked != "dummy":
        lack = "holds no .safetensors file" if Path(model).is_dir() else "has no weights to fetch"
        raise ModelError(f"{model} {lack}: give a checkpoint folder, or --load-format dummy to try it")
    return source


def offload_choices(offload: Any, gpu_weights: tuple[str, ...] | None) -> tuple[Any, ...]:
    """Return `offload`, or the offloads to choose from, preferred first. Raises UsageError."""
    if gpu_weights and offload == "none":
        raise click.UsageError("--gpu-weights is a share of offloaded weights: leave out --offload none")
    return (offload,) if offload else ("cpu",) if gpu_weights else ("none", "cpu")


def sweep_of(how: dict[str, Any], **fields: Any) -> Sweep:
    """Return the sweep that a verb's flags stand for, with other `fields`."""
    names = ("model", "engine", "layers", "gpu_weights", "weights")
    given = {name: how[name] for name in names if how.get(name) is not None}
    given |= {"options": how["settings"], "allow_nan": bool(how["allow_nan"])}
    return make_sweep(given | fields, "the command line")


def one_load(verb: str, how: dict[str, Any]) -> dict[SweepLoad, str]:
    """Return the load for each offload, with its target. Raises UsageError, OptionError, EngineError."""
    check_nvme([how["offload"]], how["nvme_path"])
    if any(len(values or ()) > 1 for values in [*how["settings"].values(), how["gpu_weights"], how["weights"]]):
        raise click.UsageError(f"{verb} takes one value for each option; axes belong to `zinfer sweep`")
    choices = offload_choices(how["offload"], how["gpu_weights"])
    wanted = sweep_of(how, offload=choices)
    if is_server(engine := next(wanted.loads()).engine):
        raise click.UsageError(f"{engine} is a server: `zinfer sweep` measures it, `zinfer {verb}` runs other engines")
    loads = {load: target for load in wanted.loads() if (target := locate(load)) is not None}
    able = {load: target for load, target in loads.items() if load.conflict is None}
    if not loads:
        raise click.UsageError(f"engine {how['engine']} has no offload {', '.join(choices)}")
    if not able:
        raise OptionError(next(str(load.conflict) for load in loads))
    return able


class Prepared(NamedTuple):
    """Model of a verb that runs one: loads to choose from, weights, tokenizer, and the engine's module:Class."""

    loads: dict[SweepLoad, str]
    source: Source
    tokenizer: TokenizerProcess
    target: str

    def cases(self, input_len: int = 1, output_len: int = 1) -> list[Case]:
        """Return the case of each load."""
        source = self.source
        return [load.case(source.load_format, source.spec.dtype, input_len, output_len) for load in self.loads]


def prepared(verb: str, how: dict[str, Any]) -> Prepared:
    """Return loads and weights of a verb's flags; start the tokenizer, which ends with the command."""
    loads = one_load(verb, how)
    source = weights_of(how, loads)
    directory = folder_of(source.spec)
    if directory is not None:
        require(directory)
    tokenizer = TokenizerProcess(source.spec, template_of(directory, how["chat_template"]))
    click.get_current_context().call_on_close(tokenizer.close)
    return Prepared(loads, source, tokenizer, next(iter(loads.values())))


def locate(load: SweepLoad) -> str | None:
    """Return the module:Class of a load's engine; None if it lacks that offload. Raises EngineError."""
    kind = engines.kind(load.engine)
    if load.offload not in kind.offloads:
        return None
    if load.gpu_weights is not None and not kind.gpu_weights:
        able = ", ".join(name for name, other in ENGINES.items() if other.gpu_weights)
        raise engines.EngineError(f"--gpu-weights is for {able}: {load.engine} keeps no share")
    return kind.target
