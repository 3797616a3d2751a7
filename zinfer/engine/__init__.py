"""Engines: the ways to run a model. `zinfer.core.engine` has the table of them, `zinfer.engine.base` their contract.

Their code is imported in the process that runs it, because that costs seconds and gigabytes.
"""

from importlib import util
from typing import Any

from zinfer.core.engine import ENGINES, EngineKind, ServerOptions
from zinfer.core.errors import ZinferError, did_you_mean, environment_error
from zinfer.engine.server import preset


class EngineError(ZinferError):
    """Engine that cannot be used as asked. The message says what to do."""


def kind(name: str) -> EngineKind:
    """Return the entry of engine `name`, that of `ENGINES` or a server's. Checks that what it requires is installed.
    Raises EngineError when there is no such engine, or when a package is missing."""
    if (entry := ENGINES.get(name)) is None:
        if (server := preset.read(name)) is None:
            names = [*ENGINES, *preset.presets()]
            raise EngineError(f"no engine {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
        how: dict[str, Any] = {"requires": ("torch", "psutil"), "options": ServerOptions, "gpu_weights": True}
        entry = EngineKind("zinfer.engine.server.engine:Server", offloads=frozenset(server.offload), **how)
    missing = [package for package in entry.requires if not any(map(util.find_spec, package.split("|")))]
    if missing:
        packages = ", ".join(" or ".join(package.split("|")) for package in missing)
        raise environment_error(EngineError(f"engine {name} needs {packages}: pip install 'zinfer[{entry.extra}]'"))
    return entry
