"""Engines: the ways to run a model. `zinfer.core.engine` has the table of them, `zinfer.engine.base` their contract.

Their code is imported in the process that runs it, because that costs seconds and gigabytes.
"""

from importlib import util

from zinfer.core.engine import ENGINES, EngineKind, ServerOptions
from zinfer.core.errors import ZinferError, did_you_mean, environment_error
from zinfer.engine.server import preset


class EngineError(ZinferError):
    """Engine that cannot be used as asked. The message says what to do."""


def kind(name: str) -> EngineKind:
    """Return the entry of engine `name`, that of `ENGINES` or a server's. Checks that what it requires is installed.
    Raises EngineError when there is no such engine, or when a package is missing."""
    entry = ENGINES.get(name) or _server(name)
    missing = [package for package in entry.requires if not any(map(util.find_spec, package.split("|")))]
    if missing:
        packages = ", ".join(" or ".join(package.split("|")) for package in missing)
        raise environment_error(EngineError(f"engine {name} needs {packages}: pip install 'zinfer[{entry.extra}]'"))
    return entry


def _server(name: str) -> EngineKind:
    if (server := preset.read(name)) is None:
        names = [*ENGINES, *preset.presets()]
        raise EngineError(f"no engine {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    return EngineKind(
        "zinfer.engine.server.engine:Server",
        offloads=frozenset(server.offload),
        requires=("torch", "psutil"),
        options=ServerOptions,
        gpu_weights=True,
    )
