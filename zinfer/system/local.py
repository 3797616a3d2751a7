"""Local machine: its name, the folder of its results, and its probed description."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from zinfer.core.errors import ENVIRONMENT
from zinfer.core.machine import Machine, MachineError
from zinfer.system import machines
from zinfer.system.ending import PARENT
from zinfer.system.host import host_bytes, host_facts, slug, vectors

RESULTS = Path("sweeps/results")
PROBE = (sys.executable, "-m", "zinfer", "probe")
LITTLE = "64MiB"  # least host memory of a probe
ALIKE = 0.1  # hosts whose memory differs by no more than this share are taken for the same one
ROUND = 10 << 30  # bytes of memory from which on a name has GiB, and not MiB


def name() -> str:
    """Return the name of this machine: its slug, ``nvidia-h200``, or ``nvidia-h200-16-cores-126-gib``.

    The latter is for a host whose slug has the figures of another host.
    """
    short, cores, memory = slug(), host_facts()["cores"], host_bytes()

    def is_this(machine: Machine) -> bool:
        recorded = machine.details.get("host")
        return not isinstance(recorded, dict) or (
            recorded.get("cores") == cores and abs((machine.host_bytes or 0) / memory - 1) <= ALIKE
        )

    try:
        if is_this(machines.load(RESULTS / short)):
            return short
    except MachineError:
        return short
    stem = f"{short}-{cores}-cores-"
    for path in sorted(RESULTS.glob(f"{stem}*")):
        with suppress(MachineError):
            if is_this(machines.load(path)):
                return path.name
    return stem + (f"{memory >> 30}-gib" if memory >= ROUND else f"{memory >> 20}-mib")


def results_folder() -> Path:
    """Return the folder of this machine's records: ``sweeps/results/<machine>``."""
    return RESULTS / name()


def this_machine() -> Machine:
    """Return this machine as probed, with the host memory usable now. Raises MachineError."""
    path = results_folder() / "machine.json"
    if not path.is_file():
        _probe(path)
    machine, now = machines.load(path), host_bytes()
    host = machine.details.get("host", {}) | vectors()  # which probes of before did not note
    details = machine.details | {"host": host}
    return machine.model_copy(update={"host_bytes": min(now, machine.host_bytes or now), "details": details})


def _probe(path: Path) -> None:
    """Probe in a process of its own: here a CUDA context would take GPU memory. Raises MachineError."""
    env = {**os.environ, PARENT: str(os.getpid())}
    with subprocess.Popen([*PROBE, "-o", str(path)], stdout=subprocess.DEVNULL, env=env, start_new_session=True) as run:
        try:
            code = run.wait()
        except BaseException:
            run.kill()
            raise
    if code == 0:
        return
    killed = code == -signal.SIGKILL  # as the kernel does where memory is short
    error = MachineError(
        f"`zinfer probe` was killed: run `zinfer probe --quick --memory {LITTLE}`, which takes less memory"
        if killed
        else "`zinfer probe` failed on this machine; run it to see why"
    )
    error.exit_code = ENVIRONMENT if killed else code
    raise error
