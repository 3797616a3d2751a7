"""Recipes: the points of a sweep (`sweeps/*.toml`) and the settings of an engine (`engines/*.toml`).

Recipes of the current folder come first, then the package's (`zinfer/catalog`). Both are plain data. Unknown
keys are errors that list the known ones; every list is an axis.
"""

import math
import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from zinfer.checkpoint.resolve import catalogue_name
from zinfer.core.case import MAX_COUNT, Case, LoadFormat, Workload, resident_bytes
from zinfer.core.engine import ENGINES, Offload, Option, Options, conflict, draft_model, has_option, resolve_options
from zinfer.core.errors import ZinferError, did_you_mean
from zinfer.core.model import Dtype, Weights
from zinfer.core.requests import ONLY_NUMBERS, InFlight, LengthDistribution, Order, RequestCount, RequestRate
from zinfer.core.value import Frozen, first_fault
from zinfer.engine.server import preset
from zinfer.system import documents
from zinfer.system.printable import printable

SWEEP_RECIPES = Path("sweeps")
LOADS, POINTS = 1000, 10_000  # maximum of processes, and of points
AXIS = 1000  # maximum of values of an axis
PEER = "peer"  # engine that a user would pick instead of `stream`
DESCRIPTION = 4000  # maximum of characters


class RecipeError(ZinferError):
    """Recipe, or axis on the command line, that cannot be understood."""


def _plain(name: str) -> str:
    if name != printable(name) or not name.isprintable():
        raise ValueError("a name has no control characters")
    return name


def _as_tuple(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _budget(text: str) -> str:
    resident_bytes(text, 0)
    return text


T = TypeVar("T")
_UNIQUE = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
OptionalAxis = Annotated[tuple[T, ...], Field(max_length=AXIS), BeforeValidator(_as_tuple), _UNIQUE]
Axis = Annotated[OptionalAxis[T], Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_plain)]
Whole = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Settings = Annotated[tuple[Option, ...], Field(min_length=1, max_length=AXIS), BeforeValidator(_as_tuple)]
Budget = Annotated[Name, AfterValidator(_budget)]
Lengths = Annotated[Name, AfterValidator(lambda text: LengthDistribution.parse(text).describe())]
_DEFAULT_LENGTHS = (((512,), (32,)), ([512], [32]))  # as a header of a sweep has them


class EngineRecipe(Frozen):
    """Engine by name, and its options that differ from the defaults."""

    engine: Name
    description: str = Field(default="", max_length=DESCRIPTION)
    options: dict[Name, Option] = Field(default_factory=dict, max_length=100)


class SweepLoad(Frozen):
    """Work of one process: cases that differ only in batch size and lengths share it."""

    model: str
    engine: str
    offload: Offload
    dtype: Dtype | None
    layers: int | None
    gpu_weights: str | None
    options: Options
    allow_nan: bool = False
    weights: Weights = "as-released"

    @property
    def conflict(self) -> str | None:
        """Reason why the options contradict each other or the load; None if they do not."""
        return conflict(self.engine, self.options, self.offload, self.weights, self.gpu_weights)

    @property
    def draft_model(self) -> str | None:
        """Name of the draft model; None without one."""
        return draft_model(self.engine, self.options)

    def case(self, load_format: LoadFormat, dtype: Dtype, input_len: int, output_len: int) -> Case:
        """Return the load's case at batch size 1."""
        workload = Workload(batch_size=1, input_len=input_len, output_len=output_len)
        return Case(**dict(self) | {"dtype": dtype}, load_format=load_format, workload=workload)


class Sweep(Frozen):
    """Axes of a sweep: every tuple is an axis, and the sweep is their product. `batch_size` lists the batches to
    measure, or is "auto": double until two doublings together gain less than 5%, or memory runs out; then bisect to the
    largest batch that runs ("1,8,32,auto" measures these and goes on behind them). The engine "peer" is the one to
    compare `stream` with. No point begins after `minutes`, each load having its part of them; 0 is no bound. A sweep
    with `requests`, a file, or `request_lengths`, distributions, measures these in closed loops (`in_flight`) and open
    loops (`request_rate`), and equal batches only if it names a `batch_size`. All points are measured `rounds` times,
    each time with the model loaded anew."""

    description: str = Field(default="", max_length=DESCRIPTION)
    model: Axis[Annotated[Name, AfterValidator(lambda name: catalogue_name(name) or name)]]
    engine: Axis[Name] = ("stream",)
    offload: Axis[Offload] = ("none", "cpu")
    batch_size: Annotated[tuple[Whole, ...], Field(max_length=AXIS)] | str = "auto"
    input_len: Axis[Whole] = (512,)
    output_len: Axis[Whole] = (32,)
    requests: Name | None = None
    request_lengths: OptionalAxis[Lengths] = ()
    num_requests: RequestCount | None = None  # of a file: its first ones
    in_flight: OptionalAxis[InFlight] = ()
    request_rate: OptionalAxis[RequestRate] = ()
    request_order: Order = "given"
    seed: int = Field(default=0, ge=0, le=MAX_COUNT)  # of the lengths, the arrivals and the tokens of requests
    sla: OptionalAxis[Name] = ()
    rounds: int = Field(default=1, ge=1, le=100)
    dtype: Dtype | None = None
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    layers: Axis[Whole | None] = (None,)
    gpu_weights: Axis[Budget | None] = (None,)  # of offloaded weights: else all are on the GPU
    options: dict[Name, Settings] = Field(default_factory=dict, max_length=100)
    weights: Axis[Weights] = ("as-released",)  # formats that the layers' weights are given
    allow_nan: bool = False  # load weights with NaN or infinity, too
    machine: OptionalAxis[Name] = Field(default=(), max_length=100)  # to plan for; a sweep runs on this machine
    repeats: int = Field(default=3, ge=1, le=MAX_COUNT)
    tolerance: float = Field(default=0.02, gt=0, le=100)  # repeats stop at this 95% half-width, as a share of the mean
    timeout_s: float = Field(default=1800, gt=0, le=1e12)
    minutes: float = Field(default=15, ge=0, le=1e9)

    @model_validator(mode="before")
    @classmethod
    def _only_requests(cls, fields: Any) -> Any:
        """Leave out equal batches of requests without a batch size."""
        if not isinstance(fields, dict) or not (fields.get("requests") or fields.get("request_lengths")):
            return fields
        fields = {"batch_size": ()} | fields
        if all(fields.get(name) in (None, (), []) for name in ("in_flight", "request_rate")):
            fields["in_flight"] = ("auto",)
        if fields["batch_size"] in ((), []) and {"input_len", "output_len"} & fields.keys():
            lengths = fields.get("input_len", ()), fields.get("output_len", ())
            if lengths not in _DEFAULT_LENGTHS:
                raise ValueError("input_len and output_len are for equal batches: name a batch_size, too")
        return fields

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batches(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = parse_batches(value)
        if isinstance(value, str) or value in ((), []):
            return value
        sizes = value if isinstance(value, list | tuple) else (value,)
        if len(sizes) > AXIS or not all(type(size) is int and 1 <= size <= MAX_COUNT for size in sizes):
            raise ValueError(f"batch sizes are 1 to {AXIS:,} whole numbers from 1 to {MAX_COUNT:,}")
        return tuple(sorted(set(sizes)))

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        sources = len(self.request_lengths) + (self.requests is not None)
        if not sources:
            for name in ("num_requests", "in_flight", "request_rate", "request_order", "seed", "sla"):
                if getattr(self, name) not in ((), None, 0, "given"):
                    raise ValueError(f"{name} is for loads of requests only: add requests (a file) or request_lengths")
            if self.batch_size == ():
                raise ValueError("batch_size: a sweep without requests needs one")
        if self.request_order != "given" and (self.request_rate or "auto" in self.in_flight):
            raise ValueError(ONLY_NUMBERS)
        budgets = sum(1 if offload == "none" else len(self.gpu_weights) for offload in self.offload)
        loads = len(self.model) * len(self.layers) * len(self.engine) * len(self.weights) * budgets
        loads *= math.prod(map(len, self.options.values())) * self.rounds
        lengths = len(self.input_len) * len(self.output_len) * max(1, len(self.machine))
        points = loads * lengths * (1 if isinstance(self.batch_size, str) else len(self.batch_size))
        points += loads * sources * (len(self.in_flight) + len(self.request_rate))
        if loads > LOADS or points > POINTS:
            asked = f"the axes make {loads:,} loads and {points:,} points"
            raise ValueError(f"{asked}; a sweep has at most {LOADS:,} and {POINTS:,}")
        return self

    def loads(self, planning: bool = False) -> Iterator[SweepLoad]:
        """Yield the loads, with engine recipes resolved and options validated. An engine goes without an option that
        only others of the sweep have. With `planning` any engine takes the options of `PlanOptions`, which it may lack.
        Raises OptionError for an unknown option and for a wrong value, RecipeError for an unknown engine."""
        recipes = {(name, offload): engine_recipe(name, offload) for name in self.engine for offload in self.offload}
        axes = self.model, self.layers, self.engine, self.weights, self.offload
        for model, layers, name, weights, offload in product(*axes):
            engine, engines = recipes[name, offload].engine, {each.engine for each in recipes.values()}
            own = {
                option: values
                for option, values in self.options.items()
                if has_option(engine, option, planning) or not any(has_option(each, option) for each in engines)
            }
            for budget, values in product(self._budgets(engine, offload, engines), [*product(*own.values())]):
                options = recipes[name, offload].options | dict(zip(own, values, strict=True))
                yield SweepLoad(
                    model=model, engine=engine, offload=offload, dtype=self.dtype, layers=layers, gpu_weights=budget,
                    options=resolve_options(engine, options, planning), allow_nan=self.allow_nan, weights=weights,
                )  # fmt: skip

    def _budgets(self, engine: str, offload: str, engines: Collection[str]) -> tuple[str | None, ...]:
        """Return the shares of weights that stay: the axis, ``auto`` where it is open, None without a choice."""
        able = {name for name in engines if name in ENGINES and ENGINES[name].gpu_weights}
        if offload == "none" or (able and engine in ENGINES and engine not in able):
            return (None,)
        searched = engine in ENGINES and ENGINES[engine].options().transport().shares_memory
        return tuple("auto" if budget is None and searched else budget for budget in self.gpu_weights)

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield the input and output lengths of equal batches, in tokens; none if the sweep has no batches."""
        yield from product(self.input_len if self.batch_size else (), self.output_len)


def parse_batches(text: str) -> tuple[int, ...] | str:
    """Return the sizes of ``1,2``, ``1-64*2``, ``8-32+8``; text that ends in ``auto`` stays. Raises RecipeError."""
    sizes = automatic(text)
    return text if text.endswith("auto") else sizes


def automatic(text: str) -> tuple[int, ...]:
    """Return the batches before ``auto``. Raises RecipeError."""
    sizes = set[int]()
    for part in text.removesuffix(",auto").split(",") if text != "auto" else ():
        match = re.fullmatch(r"\s*([0-9]{1,12})(?:-([0-9]{1,12})([*+])([0-9]{1,12}))?\s*", part)
        value, end, step = (int(match[1]), int(match[2] or match[1]), int(match[4] or 1)) if match else (0, 0, 0)
        grows = match is not None and step >= (2 if match[3] == "*" else 1)
        while grows and 1 <= value <= end and len(sizes) <= AXIS:
            sizes.add(value)
            value = value * step if match[3] == "*" else value + step  # type: ignore[index]
        if not grows or value <= end or end > MAX_COUNT:
            shown = text if len(text) <= 80 else f"{text[:80]}…"
            forms = "write auto, 1,2,4, 1,8,auto, 1-64*2 (doubling) or 8-64+8 (steps)"
            raise RecipeError(f"--batch-size {shown!r}: {forms}, at most {AXIS:,} sizes from 1 to {MAX_COUNT:,}")
    return tuple(sorted(sizes))


def parse_option(text: str) -> Option:
    """Return the value of an option as typed: true or false, a number, or text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if isinstance(number, float) and not math.isfinite(number) else number
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a recipe file. Raises RecipeError that names the file and the line."""
    try:
        return documents.read_toml(path)
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except documents.DocumentError as error:
        raise error.converted(RecipeError) from None


def with_options(fields: dict[str, Any], options: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields of a recipe with `options` before its own. Raises RecipeError if these are no table."""
    recorded = fields.get("options", {})
    if not isinstance(recorded, dict):
        raise RecipeError(f"{origin}: options: write a table, [options]")
    return fields | {"options": recorded | options}


def make_sweep(fields: dict[str, Any], origin: str) -> Sweep:
    """Make a Sweep of plain data. Raises RecipeError with `origin` and, for an unknown key, the keys to choose from."""
    try:
        return Sweep.model_validate(fields)
    except ValidationError as error:
        raise RecipeError(f"{origin}: {_first_problem(error, Sweep)}") from None


def sweep_recipe(name: str) -> Path:
    """Return the file of a sweep recipe: a path in ``.toml``, or a name here or in the package. Raises RecipeError."""
    if name.endswith(".toml"):
        return Path(name)
    recipes = documents.catalogue(SWEEP_RECIPES)
    if name not in recipes:
        raise RecipeError(f"no recipe {name[:80]!r}; choose from {', '.join(sorted(recipes))}, or name a .toml file")
    return recipes[name]


def engine_recipe(name: str, offload: Offload = "cpu") -> EngineRecipe:
    """Return ``engines/<name>.toml``, or the engine `name`; `PEER` is one that is installed. Raises RecipeError."""
    if name == PEER:
        able = offload != "none" and find_spec("deepspeed") is not None
        return EngineRecipe(engine="deepspeed" if able else "accelerate")
    recipes = documents.catalogue(preset.FOLDER)
    if name in preset.presets():
        return EngineRecipe(engine=name)
    if (path := recipes.get(name)) is not None:
        try:
            return EngineRecipe.model_validate(read_toml(path))
        except ValidationError as error:
            raise RecipeError(f"{path}: {_first_problem(error, EngineRecipe)}") from None
    if name in ENGINES:
        return EngineRecipe(engine=name)
    names = dict.fromkeys([*ENGINES, PEER, *sorted(recipes)])
    raise RecipeError(f"no engine {name[:80]!r}{did_you_mean(name, names)}; choose from {', '.join(names)}")


def _first_problem(error: ValidationError, kind: type[Frozen]) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:60] for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}; the keys are {', '.join(kind.model_fields)}"
    return first_fault(error)
