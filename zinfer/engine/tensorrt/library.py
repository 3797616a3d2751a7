"""Libraries with one Python API: TensorRT and TensorRT-RTX.

TensorRT (`tensorrt`, 10.6 or later) builds a plan for the GPU of the machine, TensorRT-RTX (`tensorrt_rtx`) for every
GPU that it supports, without one; the machine that runs it does the last stage of compilation.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any, Literal

import torch

from zinfer.core.errors import environment_error
from zinfer.engine import EngineError

Name = Literal["tensorrt", "tensorrt-rtx"]
LIBRARIES: dict[Name, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # distribution -> import name
# Compute capabilities of TensorRT-RTX 1.x, by its support matrix: Ampere to Ada, and Blackwell's 12.x; not 9.0, 10.x.
RTX_CAPABILITIES = ((8, 0), (8, 6), (8, 9))
RTX_FROM = (12, 0)
RTX_TARGET = "8.0, 8.6, 8.9, 12.x"  # targets of a plan built with the library's defaults
RESOURCE = "libnvinfer_builder_resource"  # kernels to build with: in one file for all GPUs, or in one for each kind


@dataclass(frozen=True)
class Library:
    """An installed library; name and version are part of a plan's key."""

    module: Any
    name: Name
    version: str

    @property
    def writes_streams(self) -> bool:
        """True if a build writes the plan in pieces (TensorRT 10.8)."""
        return hasattr(self.module, "IStreamWriter")

    def target(self) -> str:
        """Return the compute capabilities that run a plan built on this GPU. Raises EngineError for TensorRT, which
        builds on the GPU itself, on a machine without a GPU."""
        if self.name == "tensorrt-rtx":
            return RTX_TARGET
        if not torch.cuda.is_available():
            raise EngineError(
                "TensorRT builds a plan on the GPU that will run it, and this machine has none; "
                "TensorRT-RTX builds without a GPU: pip install 'zinfer[tensorrt-rtx]'"
            )
        return "{}.{}".format(*torch.cuda.get_device_capability())

    def why_not(self, capability: tuple[int, int]) -> str | None:
        """Return why the library does not run on a GPU, if so."""
        if self.name == "tensorrt-rtx" and capability not in RTX_CAPABILITIES and capability < RTX_FROM:
            return (
                f"TensorRT-RTX {self.version} runs on compute capability {RTX_TARGET}, and this GPU has "
                f"{capability[0]}.{capability[1]}; TensorRT supports it: pip install 'zinfer[tensorrt]'"
            )
        return None

    def why_no_build(self, capability: tuple[int, int]) -> str | None:
        """Return which file a build for a GPU lacks. Some packages of TensorRT have the kernels of few GPUs."""
        loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line)
        folders = {Path(path).parent for path in loaded if Path(path).name.startswith("libnvinfer.so")}
        folders |= {Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder}
        found = {path.name.split(".")[0] for folder in folders for path in folder.glob(f"{RESOURCE}*.so.*")}
        wanted = f"{RESOURCE}_sm{capability[0]}{capability[1]}"
        if self.name == "tensorrt-rtx" or found & {RESOURCE, wanted}:
            return None
        return f"TensorRT {self.version} lacks {wanted}.so and builds no plan for this GPU: see docs/engines.md"


def find_library() -> Library:
    """Return the library that is installed, TensorRT before TensorRT-RTX. Raises EngineError, with the command that
    installs it, for one that is missing, too old, or does not load."""
    for name in LIBRARIES:
        if util.find_spec(LIBRARIES[name]) is not None:
            try:
                module = import_module(LIBRARIES[name])
            except (ImportError, OSError) as error:
                raise environment_error(EngineError(f"{name} is installed but does not load: {error}")) from None
            if not hasattr(module.ICudaEngine, "weight_streaming_budget_v2"):
                remedy = f"pip install -U 'zinfer[{name}]'"
                raise environment_error(EngineError(f"{name} {module.__version__} is too old: {remedy}"))
            return Library(module, name, module.__version__)
    lines = " or ".join(f"pip install 'zinfer[{name}]'" for name in LIBRARIES)
    raise environment_error(EngineError(f"engine tensorrt needs {' or '.join(LIBRARIES)}: {lines}"))


class Messages:
    """Logger for the library that keeps its errors for the user."""

    def __init__(self, module: Any) -> None:
        self.errors: list[str] = []
        severity = module.ILogger
        errors, debug = self.errors, os.environ.get("ZINFER_DEBUG") == "1"

        class Logger(module.ILogger):  # type: ignore[misc]
            def log(self, level: Any, text: str) -> None:
                if level in (severity.INTERNAL_ERROR, severity.ERROR):
                    errors.append(" ".join(text.split()))
                if debug and level != severity.VERBOSE:
                    print(text, file=sys.stderr)

        self.logger = Logger()

    def failure(self, what: str, otherwise: Callable[[str], Exception] = EngineError) -> Exception:
        """Return the exception for a failed call. It is MemoryError or torch's OutOfMemoryError if the library's errors
        mention memory, else one of type `otherwise`."""
        reason = "; ".join(self.errors[-2:]) or "the library gave no reason"
        text, lowered = f"{what}: {reason}", reason.lower()
        if RESOURCE in reason:  # TensorRT 10.6 looks for it where the loader looks, not beside itself
            text += "; if it is installed, start zinfer with its folder in LD_LIBRARY_PATH"
        if any(word in lowered for word in ("out of memory", "outofmemory", "bad_alloc", "insufficient memory")):
            on_host = "host" in lowered or "bad_alloc" in lowered
            return MemoryError(text) if on_host else torch.cuda.OutOfMemoryError(f"CUDA out of memory: {text}")
        return otherwise(text)
