"""Planning: what fits, on which tier, and how fast it can be, before anything runs."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Folder that is also the function `zinfer.plan` of the Python API."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("zinfer.api").plan(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
