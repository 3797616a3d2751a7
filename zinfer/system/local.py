"""Local machine: its name, the folder of its results, and its probed description."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from zinfer.core.machine import Machine, MachineError
from zinfer.system import machines
from zinfer.system.ending import PARENT
from zinfer.system.host import allowed_bytes, gpus, host_bytes, host_facts, slug

RESULTS = Path("sweeps/results")
PROBE = (sys.executable, "-m", "zinfer", "probe")
LITTLE = "64MiB"  # host memory of a second try of the probe
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
    """Return this machine as probed, with the host memory usable now.

    If there is none, the probe runs now, in a process of its own: a CUDA context in this one would take GPU memory from
    a measurement. A probe that is killed, as the kernel does where memory is short, runs again with less of it; if that
    is killed, too, the machine is described without rates, and the next call tries again. stderr gets a line about it.
    Raises MachineError if the probe fails.
    """
    path = results_folder() / "machine.json"
    if not path.is_file() and _probe(path) == -signal.SIGKILL:
        _warn("the probe was killed, as happens where host memory is short: measuring again with little memory")
        if _probe(path, "--quick", "--memory", LITTLE) == -signal.SIGKILL:
            _warn("the probe was killed again: going on without this machine's rates, so nothing is predicted")
            return unmeasured()
    machine, now = machines.load(path), allowed_bytes()
    return machine.model_copy(update={"host_bytes": min(now, machine.host_bytes or now)})


def _probe(path: Path, *words: str) -> int:
    """Run the probe in a process that ends with this one; return its exit code, 0 or that of a kill.

    Raises MachineError if it fails otherwise.
    """
    command = [*PROBE, "-o", str(path), *words]
    env = {**os.environ, PARENT: str(os.getpid())}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env, start_new_session=True) as process:
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code not in (0, -signal.SIGKILL):
        error = MachineError("`zinfer probe` failed on this machine; run it to see why")
        error.exit_code = code
        raise error
    return code


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


def unmeasured() -> Machine:
    """Return the description of this machine without a measurement: its memories, and no rates."""
    devices = gpus()
    fields: dict[str, Any] = {}
    if devices:
        size = devices[0].get("memory_bytes")
        fields = {"gpu_count": len(devices), "gpu_name": devices[0].get("name"), "gpu_bytes": size}
    return Machine(
        name=name(),
        source="datasheet",
        host_bytes=allowed_bytes(),
        note="not measured: the probe was killed",
        details={"host": host_facts()},
        **fields,
    )
