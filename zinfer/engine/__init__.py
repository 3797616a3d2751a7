"""Engines: the ways to run a model. `zinfer.core.engine` has the table of them, `zinfer.engine.base` their contract.

Their code is imported in the process that runs it, because that costs seconds and gigabytes.
"""

from importlib import util

from zinfer.core.engine import ENGINES, EngineKind
from zinfer.core.errors import ZinferError, did_you_mean, environment_error


class EngineError(ZinferError):
    """Engine that cannot be used as asked. The message says what to do."""


def kind(name: str) -> EngineKind:
    """Return the entry of engine `name` in `ENGINES`. Checks that what it requires is installed. Raises EngineError
    when there is no such engine, or when a package is missing."""
    if name not in ENGINES:
        raise EngineError(f"no engine {name!r}{did_you_mean(name, ENGINES)}; there are {', '.join(ENGINES)}")
    entry = ENGINES[name]
    missing = [package for package in entry.requires if not any(map(util.find_spec, package.split("|")))]
    if missing:
        packages = ", ".join(" or ".join(package.split("|")) for package in missing)
        raise environment_error(EngineError(f"engine {name} needs {packages}: pip install 'zinfer[{entry.extra}]'"))
    return entry
