"""This machine: its name, where its results go, and what a probe found of it."""

import subprocess
import sys
from pathlib import Path

from zinfer import machine
from zinfer.machine import Machine, MachineError
from zinfer.probe import slug

RESULTS = Path("sweeps/results")


def results_folder() -> Path:
    """Where this machine's records lie: ``sweeps/results/<machine>``."""
    return RESULTS / slug()


def this_machine() -> Machine:
    """What `zinfer probe` wrote about this machine; it is run now, in a process of its own, if it never was.

    (A probe in this process would leave a CUDA context behind that takes GPU memory from whatever is measured.)
    """
    path = results_folder() / "machine.json"
    if not path.is_file():
        command = [sys.executable, "-m", "zinfer.cli", "probe", "-o", str(path)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise MachineError("`zinfer probe` failed on this machine; run it to see why")
    return machine.load(path)
