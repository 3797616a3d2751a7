"""The ways to run a model: whether this installation can, and where the code is.

`zinfer.spec.engine` has the table of engines. The code behind it is imported in the process that runs it, because that
costs seconds and gigabytes.
"""

from importlib import import_module, util
from typing import TYPE_CHECKING

from zinfer.spec.engine import ENGINES, EngineKind
from zinfer.spec.errors import ZinferError

if TYPE_CHECKING:
    from zinfer.engine.base import Engine


class EngineError(ZinferError):
    """An engine that cannot be used for what was asked; the message says what to do next."""


def kind(name: str) -> EngineKind:
    """Return the entry of engine `name` in `ENGINES`, once everything that it requires is found installed.

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
    """Import and return the engine class at ``module:Class``."""
    module, _, name = target.partition(":")
    engine: type[Engine] = getattr(import_module(module), name)
    return engine
