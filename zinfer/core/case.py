"""Cases: points requested of a machine, the keys of their measurements."""

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from zinfer.core.engine import Offload as Offload
from zinfer.core.engine import Option as Option
from zinfer.core.engine import Options, plan_options, without_defaults
from zinfer.core.model import Dtype, Weights
from zinfer.core.units import parse_share
from zinfer.core.value import Frozen

LoadFormat = Literal["safetensors", "dummy"]
MAX_COUNT = 10**9  # largest count of sequences, tokens or layers
MAX_NAME = 1024  # characters of the name of a model, a machine, an engine
Name = Annotated[str, Field(max_length=MAX_NAME)]


class Workload(Frozen):
    """A batch of prompts of `input_len` tokens, each continued by `output_len` tokens."""

    batch_size: int = Field(ge=1, le=MAX_COUNT)
    input_len: int = Field(ge=1, le=MAX_COUNT)
    output_len: int = Field(ge=1, le=MAX_COUNT)

    @property
    def total_len(self) -> int:
        """Tokens of one sequence at its end."""
        return self.input_len + self.output_len

    @property
    def mean_context(self) -> int:
        """Tokens that a decode step attends to, on average."""
        return self.input_len + self.output_len // 2

    def with_batch(self, batch_size: int) -> "Workload":
        return self.model_copy(update={"batch_size": batch_size})


class Case(Frozen):
    """One requested point: model, engine, placement, workload, options. Hashable by value: the key of a record."""

    model: Name
    engine: Name
    offload: Offload
    workload: Workload
    dtype: Dtype = "bfloat16"
    load_format: LoadFormat = "dummy"
    # A slice: the number of first decoder layers; None is all.
    layers: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    # Share of the streamed weights that stays on the GPU: auto, 25%, 40GiB. None: the engine's default without search.
    gpu_weights: Name | None = None
    options: Options = ()  # settings that differ from the engine's defaults, sorted
    allow_nan: bool = False  # weights with NaN or infinity are loaded, too
    weights: Weights = "as-released"  # format that the layers' weights are given while they load

    @field_validator("options")
    @classmethod
    def _leave_out_defaults(cls, value: Options, info: ValidationInfo) -> Options:
        """Drop options with default values, so that equal cases compare equal."""
        return without_defaults(info.data.get("engine", ""), value)

    @model_serializer(mode="wrap")
    def _as_before(self, fields: SerializerFunctionWrapHandler) -> Any:
        """Leave out new fields at their defaults, as earlier versions do."""
        written = fields(self)
        for name in ("allow_nan", "weights"):
            if written.get(name) == type(self).model_fields[name].default:
                del written[name]
        return written

    @property
    def load(self) -> "Case":
        """Case at batch 1; equal loads share a process and its weights."""
        return self.with_batch(1)

    def with_batch(self, batch_size: int) -> "Case":
        return self.model_copy(update={"workload": self.workload.with_batch(batch_size)})

    @property
    def lossy(self) -> bool:
        """True for settings that change the values that the model computes."""
        return self.weights != "as-released" or plan_options(self.engine, self.options).kv_quantized

    def label(self) -> str:
        """Return engine and offload in short, for legends and progress lines."""
        resident = "" if self.gpu_weights in (None, "auto") else f" gpu-weights={self.gpu_weights}"
        options = "".join(f" {key}={str(value).rpartition('/')[2]}" for key, value in self.options)  # its name
        weights = "" if self.weights == "as-released" else f" weights={self.weights}"
        return f"{self.engine} {self.offload}{resident}{weights}{options}{' allow-nan' if self.allow_nan else ''}"

    @property
    def batch_label(self) -> str:
        """Configuration and batch: ``stream cpu, batch 64``."""
        return f"{self.label()}, batch {self.workload.batch_size}"


def without_folders(model: str) -> str:
    """Return a model's name, without the folders of a local path."""
    return PurePath(model).name if model.startswith((".", "/", "~")) else model


def weights_text(load_format: LoadFormat) -> str:
    """Return ``dummy weights``, or that they are the checkpoint's."""
    return "dummy weights" if load_format == "dummy" else "weights of the checkpoint"


def spread(count: int, every: int) -> tuple[int, ...]:
    """Return indices of `count` of `every` layers: evenly spaced, so that the link has time between them."""
    return tuple(index for index in range(every) if (index + 1) * count // every > index * count // every)


def resident_bytes(gpu_weights: str | None, streamable: int, automatic: int = 0) -> int:
    """Return the `streamable` bytes that ``auto``, a share or a size keeps. Raises ValueError."""
    return 0 if gpu_weights is None else parse_share(gpu_weights, streamable, automatic)
