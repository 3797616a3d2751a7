"""Tests of zinfer. Their waits are not measurements."""

import os
from pathlib import Path

PATIENCE_S = 600  # time-out of a wait, after which the test fails: a busy machine may take minutes to start a process


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with `settings`, in which Python finds zinfer from any folder."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1]))))
    return os.environ | {"PYTHONPATH": path} | settings
