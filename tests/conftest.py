"""Fixtures that several test files share."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as zinfer.worker has it, and before torch is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs this in the background ignores it for us
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes one of `tests.checkpoints.ARCHITECTURES` once a session; returns its folder, which nobody may change."""

    @cache
    def make(architecture: str, hidden_size: int = 64) -> Path:
        from tests.checkpoints import save_checkpoint

        return save_checkpoint(architecture, tmp_path_factory.mktemp(architecture), hidden_size)

    return make
