"""Parent's end of a worker: one process a load.

CUDA, ZeRO and TensorRT keep global state, and an out-of-memory must not take the sweep down. Commands and answers go
through a socket, pickled, in lock-step; what the worker prints goes to stderr. A worker ends with its parent, whatever
kills that, and the programs that it has started end with it (`zinfer.system.ending`).
"""

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing import Pipe
from typing import IO, Any

from zinfer import __version__
from zinfer.core.case import Case
from zinfer.core.engine import ENGINES
from zinfer.core.errors import ENVIRONMENT, USAGE, is_out_of_memory
from zinfer.core.progress import Progress, silent
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement, Status
from zinfer.system import host, local, scratch
from zinfer.system.ending import NO_GPU_MEMORY, NO_HOST_MEMORY, PARENT, at_end
from zinfer.worker.tasks import Answer, BatchStepped, Command, Facts, Load, Measure

OnLoaded = Callable[[int, float], None]  # bytes of weights, and the seconds they took
_VARIABLES = {
    # OpenMP's threads spin while they wait for each other; on cores that somebody else uses too, a step then takes 50
    # times as long. Sleeping costs next to nothing.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Batches of many sizes in one process leave gaps that a larger one cannot use, unless blocks may grow.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_MEMORY: dict[int, Status] = {NO_GPU_MEMORY: "oom_gpu", NO_HOST_MEMORY: "oom_host"}  # by exit code
KILL_S = 10.0  # for the kernel to end a killed worker


def now() -> str:
    """Return the time, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class WorkerError(RuntimeError):
    """Command without an answer. Its status, the reason in one line, and the exit code for it."""

    def __init__(self, status: Status, message: str, exit_code: int = ENVIRONMENT) -> None:
        super().__init__(status, message, exit_code)  # so that it can be pickled
        self.status: Status = status
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def line(self) -> str:
        """Reason as the CLI prints it. With the status, unless the fault is one of files or of usage."""
        return str(self) if self.exit_code == USAGE else f"{self.status}: {self}"


class TaskFailed(WorkerError):
    """Task that failed in a worker that goes on living."""


class LoadFailed(TaskFailed):
    """Load that failed, perhaps in a pass that began before its end."""


class WorkerDied(WorkerError):
    """Worker that ended, or was ended, without an answer."""


class Client(ABC):
    """Client of a worker: a process (`Worker`), or in tests this one."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = 0.0,
        on_progress: Progress = silent,
        on_loaded: OnLoaded = lambda _size, _seconds: None,
        debug: bool = False,
        revision: str = "",
    ) -> None:
        self._target, self._timeout, self._debug, self._revision = target, timeout_s, debug, revision
        self._on_progress, self._on_loaded = on_progress, on_loaded
        self.facts = Facts()  # of the load

    def ask(self, command: Command[Answer]) -> Answer:
        """Return the answer to a command of `zinfer.worker.tasks`. Raises TaskFailed where the task failed, WorkerDied
        where the worker ended without an answer."""
        answer: Answer | TaskFailed = self._exchange(command)
        if isinstance(answer, TaskFailed):
            raise answer
        if isinstance(answer, BatchStepped) and answer.loaded is not None:
            self._loaded(answer.loaded)
        return answer

    def load(self, plan: Plan, early: bool = False) -> None:
        """Load `plan`'s engine; with `early` it may answer before all is loaded. Raises LoadFailed, WorkerDied."""
        self.facts = self.ask(Load(target=self._target, plan=plan, revision=self._revision, early=early))
        if self.facts.load_s is not None:
            self._loaded(self.facts)

    def _loaded(self, facts: Facts) -> None:
        self.facts = facts
        self._on_loaded(facts.load_bytes or 0, facts.load_s or 0.0)

    def measure(self, case: Case, repeats: int, tolerance: float) -> Measurement:
        """Measure one case of the loaded engine. A failure is a Measurement with its status."""
        return self.ask(Measure(case=case, repeats=repeats, tolerance=tolerance))

    @abstractmethod
    def _exchange(self, command: Command[Any]) -> Any:
        """Return the session's answer to a command, or a TaskFailed. Raises WorkerDied."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker and whatever it started, at once."""

    @abstractmethod
    def close(self) -> None:
        """Let the worker finish in order. Safe to call twice."""


class Worker(Client):
    """Worker in a process of its own. Starts it, sends it requests, watches the time. `target` is the engine as
    ``module:Class``, `revision` the fingerprint of the weights that it may load, if they may not be others. Raises
    WorkerDied when the process crashes (`crashed`), cannot go on without memory (`oom_gpu`, `oom_host`) or overruns
    `timeout_s` in a request (`timeout`; it is killed then)."""

    def __init__(self, target: str, *, timeout_s: float, **settings: Any) -> None:
        super().__init__(target, timeout_s=timeout_s, **settings)
        self._log: IO[bytes] | None = None if self._debug else tempfile.TemporaryFile()  # noqa: SIM115
        self._oom_kills, self._killed, usable = host.oom_kills(), False, host.usable_cpus()
        # The CPU time of a container limits the threads of libraries.
        threads = {"OMP_NUM_THREADS": str(usable)} if usable < len(os.sched_getaffinity(0)) else {}
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zinfer.worker.server"],
                stdin=theirs.fileno(),
                stdout=self._log or 2,
                stderr=self._log,
                env={**_VARIABLES, **threads, **os.environ, PARENT: str(os.getpid())},
                start_new_session=True,  # ctrl-C is the parent's to handle
            )
        self._unregister = at_end(partial(self._end, 1.0))  # others may wait for this process

    def _exchange(self, command: Command[Any]) -> Any:
        deadline = time.monotonic() + self._timeout
        try:
            with suppress(BrokenPipeError):  # its last words may be there
                self._connection.send(command)
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                answer = self._connection.recv()
                if not isinstance(answer, tuple):
                    self._oom_kills = host.oom_kills()  # earlier ones struck others
                    return answer
                self._on_progress(*answer)
        except (EOFError, ConnectionError):
            raise self._obituary() from None
        self.kill()
        raise WorkerDied("timeout", f"no answer within {self._timeout:g} s")

    def _obituary(self) -> WorkerDied:
        code = self._process.wait()
        self._unregister()
        scratch.remove_abandoned()  # what it owned
        if code == -signal.SIGKILL and host.oom_kills() > self._oom_kills:
            return WorkerDied("oom_host", "the kernel killed the worker: host memory ran out")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = ""  # the last line on stderr, where errors end up
        if self._log is not None:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            tail = lines[-1].strip()[:300] if lines else ""
        if code in _MEMORY:
            return WorkerDied(_MEMORY[code], tail or "memory ran out")
        if is_out_of_memory(tail):
            return WorkerDied("oom_host", f"host memory ran out ({how}; {tail})")
        return WorkerDied("crashed", f"the worker ended: {how}" + f"; last line on stderr: {tail}" * bool(tail))

    def kill(self) -> None:
        self._killed = True
        self._end(KILL_S)
        self._unregister()

    def _end(self, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # also one that leads no group yet
        with suppress(subprocess.TimeoutExpired):  # the kernel may hold it, at a drive that does not answer
            self._process.wait(timeout=seconds)
        scratch.remove_abandoned()

    def close(self) -> None:
        """Let the worker finish in order. Kill it if it does not within half a minute."""
        self._connection.close()
        if not self._killed:
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._unregister()
        if self._log is not None:
            self._log.close()


def study_header(engine_name: str) -> dict[str, Any]:
    """Return the start of a study's record: machine, device, time and versions."""
    devices = host.gpus()
    device = str(devices[0].get("name", "gpu")) if devices else host.cpu_model()
    return {"machine": local.name(), "device": device, "started_at": now(), "versions": versions(engine_name)}


def versions(engine_name: str) -> dict[str, str]:
    """Return the versions of Python, zinfer, the driver, and the engine's packages."""
    kind = ENGINES.get(engine_name)
    packages = kind.requires if kind is not None else ("torch",)
    driver = next((gpu.get("driver", "") for gpu in host.gpus()), "")
    installed = {package: host.package_version(package) for package in packages} | {"driver": driver}
    present = {name: version for name, version in installed.items() if version}
    return {"python": platform.python_version(), "zinfer": __version__, **present}
