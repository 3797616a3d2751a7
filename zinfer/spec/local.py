"""Local machine: its name, the folder of its results, and its probed description."""

import subprocess
import sys
from pathlib import Path

from zinfer.spec import machine
from zinfer.spec.host import host_bytes, host_facts, slug
from zinfer.spec.machine import Machine, MachineError

RESULTS = Path("sweeps/results")
ALIKE = 0.1  # largest relative difference in memory of hosts that are taken for the same one


def name() -> str:
    """Return the name of this machine: its slug, ``nvidia-h200``; with cores and memory,
    ``nvidia-h200-16-cores-126-gib``, if another host's figures are stored under the slug."""
    own = slug()
    try:
        known = machine.load(RESULTS / own)
    except MachineError:
        return own
    recorded, cores, memory = known.details.get("host"), host_facts()["cores"], host_bytes()
    if not recorded or (recorded.get("cores") == cores and abs((known.host_bytes or 0) / memory - 1) <= ALIKE):
        return own
    return f"{own}-{cores}-cores-{memory >> 30}-gib"


def results_folder() -> Path:
    """Return the folder of this machine's records: ``sweeps/results/<machine>``."""
    return RESULTS / name()


def this_machine() -> Machine:
    """Return the description that `zinfer probe` wrote of this machine. If there is none, the probe runs now, in its
    own process.

    (A probe in this process would leave a CUDA context behind, whose GPU memory a measurement would lack.) Raises
    MachineError if the probe fails.
    """
    path = results_folder() / "machine.json"
    if not path.is_file():
        command = [sys.executable, "-m", "zinfer.cli", "probe", "-o", str(path)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise MachineError("`zinfer probe` failed on this machine; run it to see why")
    return machine.load(path)
