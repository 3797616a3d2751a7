"""The ways to run a model. A name stands for an import that happens only when the engine is used."""

from importlib import import_module, util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

ENGINES: dict[str, str] = {
    "stream": "zinfer.engine.stream:Stream",
    "deepspeed": "zinfer.engine.deepspeed:DeepSpeed",
    "accelerate": "zinfer.engine.accelerate:Accelerate",
}


class EngineError(ValueError):
    """An engine that cannot be used for what was asked; the message says what to do next."""


def load(target: str) -> "type[Engine]":
    """The engine class behind a name of `ENGINES`, or behind ``module:Class``.

    Raises EngineError when there is no such engine, or when a package it needs is not installed.
    """
    location = ENGINES.get(target, target)
    module, _, name = location.partition(":")
    if not name:
        raise EngineError(f"no engine {target!r}; there are {', '.join(ENGINES)}")
    if util.find_spec("torch") is None:
        raise EngineError("no engine can run without torch: pip install 'zinfer[engines]'")
    engine: type[Engine] = getattr(import_module(module), name)
    missing = [package for package in engine.requires if util.find_spec(package) is None]
    if missing:
        raise EngineError(f"engine {target} needs {', '.join(missing)}: pip install 'zinfer[{engine.extra}]'")
    return engine
