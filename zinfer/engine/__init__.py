"""Engines: the ways to run a model. `zinfer.core.engine` has the table of them, `zinfer.engine.base` their contract.

Their code is imported in the process that runs it, because that costs seconds and gigabytes.
"""

from importlib import util

from zinfer.core.engine import ENGINES, EngineKind
from zinfer.core.errors import ZinferError, did_you_mean, not_here
from zinfer.core.model import Weights


class EngineError(ZinferError):
    """Engine that cannot be used as asked. The message says what to do."""


def kind(name: str, weights: Weights = "as-released") -> EngineKind:
    """Return an entry of `ENGINES`. Raises EngineError unless it and its packages for `weights` exist."""
    if name not in ENGINES:
        raise EngineError(f"no engine {name!r}{did_you_mean(name, ENGINES)}; there are {', '.join(ENGINES)}")
    entry = ENGINES[name]
    missing = [wanted for wanted in entry.requires if not any(map(util.find_spec, wanted.split("|")))]
    if missing:
        packages = ", ".join(" or ".join(wanted.split("|")) for wanted in missing)
        raise not_here(EngineError(f"engine {name} needs {packages}: pip install 'zinfer[{entry.extra}]'"))
    package = entry.own_package
    if weights in entry.own_formats and package and util.find_spec(package) is None:
        needs = f"engine {name} needs {package} for --weights {weights}: pip install 'zinfer[{package}]'"
        raise not_here(EngineError(needs))
    return entry
