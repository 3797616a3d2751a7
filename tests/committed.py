"""The committed records, read once in a process."""

from functools import cache
from pathlib import Path

from zinfer.analysis import calibrate
from zinfer.core.machine import Machine
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import read

RESULTS = Path(__file__).parents[1] / "sweeps" / "results"


@cache
def points() -> tuple[Measurement, ...]:
    """Return the latest point of each case and machine."""
    return latest(read(RESULTS).points)


@cache
def machines() -> dict[str, Machine]:
    """Return the descriptions of the machines, by name."""
    return calibrate.load_machines(RESULTS)
