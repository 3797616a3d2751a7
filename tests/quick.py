"""Quick tests (``make quick``): those that load no torch, here and in processes that they start, and take no seconds.

A file belongs to them if importing it imports no torch; in it a test does unless it is marked ``torch`` or ``long`` or
uses the fixture `checkpoint`. torch cannot be imported in such a run, so that a test which does fails.
"""

import os
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

BLOCKER = Path(__file__).parent / "without_torch"


class Quick:
    """Plugin of pytest that selects the quick tests and refuses torch."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="zinfer-quick-")
        self._log = Path(self._folder.name) / "imports"
        os.environ["ZINFER_TORCH_IMPORTS"] = str(self._log)
        os.environ["XDG_CACHE_HOME"] = self._folder.name  # shapes that were measured before would hide torch
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BLOCKER), os.environ.get("PYTHONPATH"))))
        from tests.without_torch import sitecustomize  # noqa: F401 - from here on this process refuses torch

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Leave out a file that imports torch."""
        report = yield
        if report.failed and self._log.is_file():
            report.outcome, report.longrepr, report.result = "passed", None, []
            self._log.unlink()
        return report

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
