"""This machine: its name, where its results go, and what a probe found of it."""

import subprocess
import sys
from pathlib import Path

from zinfer.spec import machine
from zinfer.spec.host import host_bytes, host_facts, slug
from zinfer.spec.machine import Machine, MachineError

RESULTS = Path("sweeps/results")
ALIKE = 0.1  # hosts whose memory differs by no more than this share may be the same


def name() -> str:
    """This machine's: its slug, ``nvidia-h200``; with cores and memory, ``nvidia-h200-16-cores-126-gib``, where the
    figures under that name are another host's."""
    own = slug()
    try:
        known = machine.load(RESULTS / own)
    except MachineError:
        return own
    there, cores, memory = known.details.get("host"), host_facts()["cores"], host_bytes()
    if not there or (there.get("cores") == cores and abs((known.host_bytes or 0) / memory - 1) <= ALIKE):
        return own
    return f"{own}-{cores}-cores-{memory >> 30}-gib"


def results_folder() -> Path:
    """Where this machine's records lie: ``sweeps/results/<machine>``."""
    return RESULTS / name()


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
