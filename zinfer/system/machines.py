"""Machines by name: the catalogue, and the descriptions that `zinfer probe` wrote."""

import os
from pathlib import Path

from zinfer.core.errors import did_you_mean
from zinfer.core.machine import DESCRIPTION_BYTES, Machine, MachineError, catalogue
from zinfer.system import documents


def load(reference: str | Path) -> Machine:
    """Return the machine of a catalogue name, a `machine.json` or its folder. Raises MachineError."""
    if str(reference) in catalogue():
        return Machine(name=str(reference), **catalogue()[str(reference)])
    path = Path(reference)
    if os.path.isdir(path):  # unlike Path.is_dir, of a name that is too long for the disk too
        path = path / "machine.json"
    try:
        return documents.validate(Machine, documents.read_object(path, DESCRIPTION_BYTES), path)
    except FileNotFoundError:
        raise MachineError(
            f"no machine {str(reference)[:200]!r}: not a machine.json, not one of {', '.join(catalogue())}"
            f"{did_you_mean(str(reference), catalogue())}"
        ) from None
    except documents.DocumentError as error:
        raise error.converted(MachineError, "; `zinfer probe` writes such a file") from None
