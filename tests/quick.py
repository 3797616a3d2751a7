"""Quick tests (``make quick``): those that load no torch, here and in processes that they start, and take no seconds.

A file belongs to them if importing it imports no torch; in it a test does unless it is marked ``torch`` or ``long`` or
uses the fixture `checkpoint`. torch cannot be imported in such a run, so that a test which does fails.
"""

import ast
import os
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[1]
BLOCKER = ROOT / "tests" / "without_torch"
LOADS_TORCH = {"torch", "accelerate", "deepspeed", "safetensors", "transformers", "triton"}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in `node` that run when the module is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for part in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(node, part, ()):
            yield from _executed(statement)


def _file(module: str) -> Path | None:
    """Return the file of one of our modules, else None."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _imports(file: Path) -> set[str]:
    """Return the modules that importing `file` imports directly, and their packages."""
    modules = set[str]()
    for node in _executed(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in modules]
    return {".".join(name[:length]) for name in parts for length in range(1, len(name) + 1)}


def imports_torch(file: Path) -> bool:
    """Tell whether importing `file` imports torch, directly or through modules of ours."""
    waiting, seen = [file], {file}
    while waiting:
        names = _imports(waiting.pop())
        if names & LOADS_TORCH:
            return True
        files = {path for name in names if (path := _file(name))} - seen
        waiting += files
        seen |= files
    return False


class Quick:
    """Plugin of pytest that selects the quick tests and refuses torch."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="zinfer-quick-")
        self._log = Path(self._folder.name) / "imports"
        os.environ["ZINFER_TORCH_IMPORTS"] = str(self._log)
        os.environ["XDG_CACHE_HOME"] = self._folder.name  # shapes that were measured before would hide torch
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BLOCKER), os.environ.get("PYTHONPATH"))))
        from tests.without_torch import sitecustomize  # noqa: F401 - from here on this process refuses torch

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
        return True if is_test and imports_torch(collection_path) else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        heavy = [
            item for item in items if any(map(item.get_closest_marker, ("torch", "long"))) or _makes_checkpoints(item)
        ]
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in heavy]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Fail if the test, or a process that it started, imported torch."""
        try:
            yield
        finally:
            if self._log.is_file():
                log = self._log.read_text()
                self._log.unlink()
                pytest.fail(f"{item.name} imports torch: mark it with pytest.mark.torch, or do without\n{log}", False)


def _makes_checkpoints(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "checkpoint" in item.fixturenames
