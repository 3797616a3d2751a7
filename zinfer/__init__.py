"""Run models larger than the GPU, measure every way, and choose."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"
__all__ = ("LLM", "SamplingParams", "plan", "results", "sweep")


def __getattr__(name: str) -> Any:
    """Import the API when it is first used: the command line starts without it."""
    if name == "plan":  # a folder of this name is there, and can be called
        return import_module("zinfer.plan")
    if name in __all__:
        return getattr(import_module("zinfer.api"), name)
    raise AttributeError(f"module 'zinfer' has no attribute {name!r}")
