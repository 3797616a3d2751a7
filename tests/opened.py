"""Engines that tests start are closed after each test."""

from collections.abc import Iterator
from typing import Any

import pytest

from zinfer.engine.base import Engine


@pytest.fixture(autouse=True)
def engines_closed() -> Iterator[None]:
    """Close all engines that a test has started; safe for those that it closed itself."""
    started, start = list[Engine](), Engine.start.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Engine], *args: Any) -> Engine:
        started.append(start(cls, *args))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "start", classmethod(noted))
        yield
    for engine in started:
        engine.close()
