"""A real Slurm of one node on this machine, for tests: munged, slurmctld and slurmd with files of their own.

Needs Debian's packages slurm-wlm and munge, and root. Nothing of the machine's own Slurm, if it has one, is touched.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import PATIENCE_S

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
PATHS = "/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=2 MaxTime=INFINITE State=UP
PartitionName=high Nodes={host} PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return the reason why no Slurm can be started here; None if one can."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:{PATHS}") is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm of one node with partitions ``low`` and ``high``. Yield the environment that its commands need.
    `folder` must be readable for munge: not below a private folder."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{PATHS}"}
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(host=host, port=_free_port(), slurmd_port=_free_port(), folder=folder, cpus=os.cpu_count())
    )
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}  # fmt: skip
    munge = [f"--{name}={folder / file}" for name, file in files.items()]
    with ExitStack() as stack:

        def start(*words: str) -> None:
            log = stack.enter_context((folder / f"{words[0]}.out").open("wb"))
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)

        start("munged", "--foreground", "--force", *munge)
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D", "-N", host)
        _wait(lambda: _said(environment, "sinfo", "--noheader", "--format=%T", "--partition=low") == "idle", folder)
        try:
            yield environment
        finally:
            _said(environment, "scancel", "--user=root")
            with_jobs = time.monotonic() + 30
            while time.monotonic() < with_jobs and _said(environment, "squeue", "--noheader"):
                time.sleep(0.2)


def _said(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip()


def _wait(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + min(60, PATIENCE_S)
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.[lo]*")))
            raise AssertionError(f"Slurm did not start: {logs}")
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
