"""Cases: one point that is asked of a machine, used as the key of its measurement."""

from typing import Literal

from pydantic import Field

from zinfer.spec.model import Dtype
from zinfer.spec.value import Frozen

Offload = Literal["none", "cpu", "nvme"]
LoadFormat = Literal["safetensors", "dummy"]
Option = str | int | float | bool


class Workload(Frozen):
    """A batch of `batch_size` prompts of `input_len` tokens, each continued by `output_len` tokens."""

    batch_size: int = Field(ge=1)
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=1)

    @property
    def total_len(self) -> int:
        """Tokens of one sequence at its end."""
        return self.input_len + self.output_len


class Case(Frozen):
    """One point that was asked for: model, engine, placement, workload, options. Hashable by value: the key of a
    record."""

    model: str
    engine: str
    offload: Offload
    workload: Workload
    dtype: Dtype = "bfloat16"
    load_format: LoadFormat = "dummy"
    layers: int | None = None  # a slice: the first so many decoder layers; None is all
    gpu_weights: str | None = None  # share of the streamed weights that stays on the GPU: auto, 25%, 40GiB
    options: tuple[tuple[str, Option], ...] = ()  # settings that differ from the engine's defaults, sorted

    @property
    def load(self) -> "Case":
        """The case without its batch size: cases with equal loads share one process and one copy of the weights."""
        return self.with_batch(1)

    def with_batch(self, batch_size: int) -> "Case":
        workload = self.workload.model_copy(update={"batch_size": batch_size})
        return self.model_copy(update={"workload": workload})

    def label(self) -> str:
        """Engine and offload in a few characters, for legends and progress lines."""
        resident = "" if self.gpu_weights is None else f" gpu-weights={self.gpu_weights}"
        options = "".join(f" {key}={value}" for key, value in self.options)
        return f"{self.engine} {self.offload}{resident}{options}"
