"""The ways to run a model: what each can do, and where its code is.

The table is all that planning and checking need; the code behind it is imported in the process that runs it, because
that costs seconds and gigabytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, util
from typing import TYPE_CHECKING

from zinfer.spec.case import Offload, Option
from zinfer.spec.errors import ZinferError

if TYPE_CHECKING:
    from zinfer.engine.base import Engine


@dataclass(frozen=True)
class Kind:
    """An engine as the rest of zinfer knows it."""

    target: str  # module:Class
    offloads: frozenset[Offload]
    requires: tuple[str, ...]  # import names, checked before anything is loaded; "a|b" is either
    options: Mapping[str, Option] = field(default_factory=dict)  # settings a case may change, with their defaults
    gpu_weights: bool = False  # whether part of the offloaded weights can stay on the GPU
    extra: str = "engines"  # the pip extra that installs what it requires


_TRANSFORMERS = ("torch", "transformers", "accelerate", "safetensors")

ENGINES: dict[str, Kind] = {
    "stream": Kind(
        "zinfer.engine.stream:Stream",
        offloads=frozenset({"none", "cpu"}),
        requires=(*_TRANSFORMERS, "greenlet"),
        options={
            "ring_depth": "auto",
            "weight_codec": "auto",
            "packed": "auto",
            "kv_offload": "none",
            "kv_attention": "auto",
            "kv_threads": "auto",
            "kv_cache_dtype": "auto",
        },
        gpu_weights=True,
    ),
    "deepspeed": Kind(
        "zinfer.engine.deepspeed:DeepSpeed",
        offloads=frozenset({"none", "cpu", "nvme"}),
        requires=(*_TRANSFORMERS, "deepspeed"),
        options={"pin_memory": True, "tuned": True, "prefetch_layers": 1},
    ),
    "accelerate": Kind(
        "zinfer.engine.accelerate:Accelerate",
        offloads=frozenset({"none", "cpu", "nvme"}),
        requires=_TRANSFORMERS,
        options={"pin_memory": True},
    ),
    "tensorrt": Kind(
        "zinfer.engine.tensorrt:TensorRT",
        offloads=frozenset({"none", "cpu"}),
        requires=(*_TRANSFORMERS, "tensorrt|tensorrt_rtx"),
        options={"library": "auto", "plan": "auto"},
        gpu_weights=True,
        extra="engines,tensorrt",
    ),
}


class EngineError(ZinferError):
    """An engine that cannot be used for what was asked; the message says what to do next."""


def kind(name: str) -> Kind:
    """What is known of the engine `name`, of which everything it requires is installed.

    Raises EngineError when there is no such engine, or when a package is missing.
    """
    if name not in ENGINES:
        raise EngineError(f"no engine {name!r}; there are {', '.join(ENGINES)}")
    found = ENGINES[name]
    missing = [wanted for wanted in found.requires if not any(map(util.find_spec, wanted.split("|")))]
    if missing:
        packages = ", ".join(" or ".join(wanted.split("|")) for wanted in missing)
        raise EngineError(f"engine {name} needs {packages}: pip install 'zinfer[{found.extra}]'")
    return found


def load(target: str) -> "type[Engine]":
    """The engine class at ``module:Class``, imported now."""
    module, _, name = target.partition(":")
    engine: type[Engine] = getattr(import_module(module), name)
    return engine
