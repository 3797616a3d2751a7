"""Recipes: the points of a sweep (`sweeps/*.toml`) and the settings of an engine (`engines/*.toml`).

Both are plain data. Unknown keys are errors that list the known ones; every list is an axis.
"""

import re
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from zinfer.plan.published import Published
from zinfer.spec.case import Case, LoadFormat, Workload, resident_bytes
from zinfer.spec.engine import ENGINES, Offload, Option, Options, conflict, settle
from zinfer.spec.errors import ZinferError
from zinfer.spec.model import Dtype
from zinfer.spec.value import Frozen

ENGINE_RECIPES = Path("engines")


class RecipeError(ZinferError):
    """A recipe, or an axis on the command line, that cannot be understood."""


class EngineRecipe(Frozen):
    """An engine by name, and its options that differ from the engine's defaults."""

    engine: str
    description: str = ""
    options: dict[str, Option] = Field(default_factory=dict)


class SweepLoad(Frozen):
    """Work of one process: cases that differ only in batch size and lengths share it."""

    model: str
    engine: str
    offload: Offload
    dtype: Dtype | None
    layers: int | None
    gpu_weights: str | None
    options: Options

    @property
    def conflict(self) -> str | None:
        """Reason why the options contradict each other or the offload; None if they do not."""
        return conflict(self.engine, self.options, self.offload)

    def case(self, load_format: LoadFormat, dtype: Dtype, input_len: int, output_len: int) -> Case:
        """Return the load's case at batch size 1."""
        return Case(
            model=self.model,
            engine=self.engine,
            offload=self.offload,
            workload=Workload(batch_size=1, input_len=input_len, output_len=output_len),
            dtype=dtype,
            load_format=load_format,
            layers=self.layers,
            gpu_weights=self.gpu_weights,
            options=self.options,
        )


class Sweep(Frozen):
    """Axes of a sweep: every tuple is an axis, and the sweep is their product.

    `batch_size` lists the batches to measure, or is "auto": double until memory runs out, then bisect to the largest
    batch that runs ("auto*4" quadruples; "1,8,32,auto" measures these and the largest).
    """

    description: str = ""
    model: tuple[str, ...]
    engine: tuple[str, ...] = ("stream",)
    offload: tuple[Offload, ...] = ("none", "cpu")
    batch_size: tuple[int, ...] | str = "auto"
    input_len: tuple[int, ...] = (512,)
    output_len: tuple[int, ...] = (32,)
    dtype: Dtype | None = None
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    layers: tuple[int | None, ...] = (None,)
    gpu_weights: tuple[str | None, ...] = (None,)  # with offload only; without it all weights are on the GPU
    options: dict[str, tuple[Option, ...]] = Field(default_factory=dict)
    machine: tuple[str, ...] = ()  # machines to plan for; a sweep runs on this machine
    published: tuple[Published, ...] = ()
    repeats: int = Field(default=3, ge=1)
    tolerance: float = Field(default=0.02, gt=0)  # repeats stop at this 95% half-width, as a share of the mean
    timeout_s: float = Field(default=1800, gt=0)

    @field_validator(
        "model", "engine", "offload", "input_len", "output_len", "layers", "gpu_weights", "machine", mode="before"
    )
    @classmethod
    def _axis(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)

    @field_validator("batch_size", mode="before")
    @classmethod
    def _batches(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = parse_batches(value)
        elif isinstance(value, int):
            value = (value,)
        if isinstance(value, list | tuple):
            if not value or min(value) < 1:
                raise ValueError("batch sizes are positive whole numbers")
            return tuple(sorted(set(value)))
        return value

    @field_validator("gpu_weights")
    @classmethod
    def _known_budgets(cls, value: tuple[str | None, ...]) -> tuple[str | None, ...]:
        for budget in value:
            resident_bytes(budget, 0)
        return value

    @field_validator("options", mode="before")
    @classmethod
    def _option_axes(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: tuple(v) if isinstance(v, list | tuple) else (v,) for key, v in value.items()}

    def loads(self, planning: bool = False) -> Iterator[SweepLoad]:
        """Yield the loads one after the other, with the engine recipes resolved and the options validated.

        With `planning` any engine takes the options of `PlanOptions`, which it may lack. Raises OptionError for an
        unknown option and for a wrong value, RecipeError for an unknown engine.
        """
        for model in self.model:
            for layers in self.layers:
                for name in self.engine:
                    recipe = engine_recipe(name)
                    for offload in self.offload:
                        budgets = (None,) if offload == "none" else self.gpu_weights
                        for budget, options in product(budgets, _product(recipe.options, self.options)):
                            yield SweepLoad(
                                model=model,
                                engine=recipe.engine,
                                offload=offload,
                                dtype=self.dtype,
                                layers=layers,
                                gpu_weights=budget,
                                options=settle(recipe.engine, options, planning),
                            )

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of input and output length, in tokens."""
        for input_len in self.input_len:
            for output_len in self.output_len:
                yield input_len, output_len


def _product(fixed: dict[str, Option], axes: dict[str, tuple[Option, ...]]) -> list[dict[str, Option]]:
    combined: list[dict[str, Option]] = [dict(fixed)]
    for key, values in axes.items():
        combined = [options | {key: value} for options in combined for value in values]
    return combined


def automatic(batch_size: str) -> tuple[int, tuple[int, ...]]:
    """Return the factor of ``auto`` (2) or ``auto*N``, and the batches that are listed before it in ``1,8,auto``.
    Raises RecipeError for anything else."""
    *listed, last = batch_size.split(",")
    match = re.fullmatch(r"auto(?:\*([2-9]|\d\d+))?", last)
    if match is None or (listed and match[1]):
        raise RecipeError(f"--batch-size {batch_size!r}: write auto, auto*4 to quadruple, or 1,8,auto")
    batches = parse_batches(",".join(listed)) if listed else ()
    assert not isinstance(batches, str)
    return int(match[1] or 2), batches


def parse_batches(text: str) -> tuple[int, ...] | str:
    """Return the batch sizes of ``1,2,4``; ``1-64*2`` (1, 2, 4, .. 64); ``8-32+8`` (8, 16, 24, 32); mixed with commas.
    ``auto``, ``auto*4`` and ``1,2,auto`` stay text. Raises RecipeError."""
    if text.split(",")[-1].startswith("auto"):
        automatic(text)
        return text
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)([*+])(\d+))?\s*", part)
        if match is None:
            raise RecipeError(f"--batch-size {text!r}: write auto, 1,2,4, a range 1-64*2 (doubling), or 8-64+8 (steps)")
        value, end = int(match[1]), int(match[2] or match[1])
        step = int(match[4] or 1)
        if value < 1 or step < (2 if match[3] == "*" else 1):
            raise RecipeError(f"--batch-size {text!r}: the range {part.strip()} never ends or starts below 1")
        while value <= end:
            found.append(value)
            if match[3] is None:
                break
            value = value * step if match[3] == "*" else value + step
    return tuple(sorted(set(found)))


def parse_option(text: str) -> Option:
    """Return the value of an option as typed: true or false, a number, or text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a recipe file. Raises RecipeError that names the file and the line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from None


def make_sweep(fields: dict[str, Any], origin: str) -> Sweep:
    """Make a Sweep of plain data. Raises RecipeError that names `origin` and, for an unknown key, lists the known
    ones."""
    try:
        return Sweep.model_validate(fields)
    except ValidationError as error:
        raise RecipeError(f"{origin}: {_first_problem(error, Sweep)}") from None


def engine_recipe(name: str) -> EngineRecipe:
    """Return the recipe `engines/<name>.toml`, or the engine `name` with its defaults. Raises RecipeError."""
    path = ENGINE_RECIPES / f"{name}.toml"
    if path.is_file():
        try:
            return EngineRecipe.model_validate(read_toml(path))
        except ValidationError as error:
            raise RecipeError(f"{path}: {_first_problem(error, EngineRecipe)}") from None
    if name in ENGINES:
        return EngineRecipe(engine=name)
    recipes = [path.stem for path in sorted(ENGINE_RECIPES.glob("*.toml"))]
    raise RecipeError(f"no engine {name!r}; choose from {', '.join([*ENGINES, *recipes])}")


def _first_problem(error: ValidationError, kind: type[Frozen]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}; the keys are {', '.join(kind.model_fields)}"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"
