"""Parent's end of a worker: one process a load.

CUDA, ZeRO and TensorRT keep global state, and an out-of-memory must not take the sweep down. Parent and worker exchange
JSON lines over the worker's stdin and stdout, in lock-step: a point is asked for only when the one before it is on
disk. The worker's own prints go to stderr. A worker ends with its parent, whatever kills that, and the programs that it
has started end with it (`zinfer.system.ending`).
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from zinfer import __version__
from zinfer.core.case import Case
from zinfer.core.errors import ENVIRONMENT, USAGE, lacks_memory
from zinfer.core.model import Weights
from zinfer.core.progress import Progress, silent
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Measurement, Status
from zinfer.record.requests import RequestPoint
from zinfer.system import scratch
from zinfer.system.ending import NO_GPU_MEMORY, NO_HOST_MEMORY, PARENT, at_end
from zinfer.system.host import address_words, no_memory
from zinfer.worker.failure import TaskFailure
from zinfer.worker.tasks import NAMES, TASKS, Answer, Load, Loaded, Measure, MeasureRequests, Request

OnLoaded = Callable[[int, float], None]  # bytes of weights, and the seconds they took
# OpenMP's threads spin while they wait for each other; on cores that somebody else uses too, a step then takes 50 times
# as long. Sleeping costs next to nothing.
_CALM = {"OMP_WAIT_POLICY": "PASSIVE"}
_MEMORY: dict[int, Status] = {NO_GPU_MEMORY: "oom_gpu", NO_HOST_MEMORY: "oom_host"}  # by exit code
# Files that count kills, by the controllers of a hierarchy of control groups: those of version 2 have none.
_OOM_FILES = {
    "memory": (("/sys/fs/cgroup/memory", "memory.oom_control"),),
    "": (("/sys/fs/cgroup", "memory.events"), ("/sys/fs/cgroup/unified", "memory.events")),
}
KILL_S = 10.0  # for the kernel to end a killed worker
# Batches of many sizes in one process leave gaps that a larger one cannot use, unless blocks may grow.
_GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def now() -> str:
    """Return the time, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class WorkerError(RuntimeError):
    """A request without an answer: its status, the reason in one line, and the exit code of a command that cannot go on
    without it."""

    def __init__(self, status: Status, message: str, exit_code: int = ENVIRONMENT) -> None:
        super().__init__(message)
        self.status: Status = status
        self.exit_code = exit_code

    @property
    def line(self) -> str:
        """The reason as a command prints it: with the status, unless the fault is one of files or of usage."""
        return str(self) if self.exit_code == USAGE else f"{self.status}: {self}"


class TaskFailed(WorkerError):
    """A task that failed in a worker that goes on living."""


class WorkerDied(WorkerError):
    """A worker that ended, or was ended, without an answer."""


class Client(ABC):
    """Client of a worker: a process (`Worker`), or this one (`zinfer.worker.inline.InlineWorker`)."""

    def __init__(self, target: str, notice: Progress, loaded: OnLoaded, revision: str) -> None:
        self._target, self._notice, self._loaded, self._revision = target, notice, loaded, revision

    def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request of `zinfer.worker.tasks`.

        Raises TaskFailed where the worker says that it failed, WorkerDied where it ended without an answer.
        """
        name = NAMES[type(request)]
        answer = self._exchange({"task": name, "request": request.model_dump(mode="json")})
        if "failure" in answer:
            failure = TaskFailure.model_validate(answer["failure"])
            raise TaskFailed(failure.status, failure.error, failure.exit_code)
        found: Answer = TASKS[name].answer.model_validate(answer["answer"])  # type: ignore[assignment]
        return found

    def load(self, plan: Plan) -> Measurement | None:
        """Load `plan`'s engine; return None if it is ready, else a Measurement with the reason why it is not."""
        return self._load(plan).refused

    def start(self, plan: Plan) -> None:
        """Load `plan`'s engine. Raises TaskFailed if it is not ready then, WorkerDied."""
        answer = self._load(plan)
        if (refused := answer.refused) is not None:
            raise TaskFailed(refused.status, f"loading failed: {refused.error}", answer.exit_code)

    def _load(self, plan: Plan) -> Loaded:
        answer = self.ask(Load(target=self._target, plan=plan, revision=self._revision))
        if answer.refused is None:
            self._loaded(answer.load_bytes, answer.load_s)
        return answer

    def measure(self, case: Case, repeats: int, tolerance: float) -> Measurement:
        """Measure one case of the loaded engine; a failure is a Measurement with its status."""
        return self.ask(Measure(case=case, repeats=repeats, tolerance=tolerance)).point

    def measure_requests(self, request: MeasureRequests) -> RequestPoint:
        """Measure a load of requests on the loaded engine; a failure is a RequestPoint with its status."""
        return self.ask(request).point

    @abstractmethod
    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the session's answer to a message, both as JSON has them. Raises WorkerDied."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker and whatever it started, at once."""

    @abstractmethod
    def close(self) -> None:
        """Let the worker finish in order. Safe to call twice."""


class Worker(Client):
    """Worker in a process of its own: starts it, sends it requests, watches the time.

    `target` is the engine as ``module:Class``, `revision` the fingerprint of the weights that it may load, if they may
    not be others. Raises WorkerDied when the process crashes (`crashed`), cannot go on
    without memory (`oom_gpu`, `oom_host`) or overruns `timeout_s` in a request (`timeout`; it is killed then).
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float,
        notice: Progress = silent,
        loaded: OnLoaded = lambda _size, _seconds: None,
        debug: bool = False,
        revision: str = "",
    ) -> None:
        super().__init__(target, notice, loaded, revision)
        self._timeout = timeout_s
        self._log: IO[bytes] | None = None if debug else tempfile.TemporaryFile()  # noqa: SIM115
        self._oom_kills, self._killed = _oom_kills(), False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zinfer.worker.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**_CALM, **_GROWING, **os.environ, PARENT: str(os.getpid())},
            start_new_session=True,  # ctrl-C is the parent's to handle
        )
        self._forget = at_end(self._abort)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.kill()
                raise WorkerDied("timeout", f"no answer within {self._timeout:g} s") from None
            if answer is None:
                raise self._obituary()
            if "progress" in answer:
                self._notice(answer["progress"], answer["share"])
            else:
                self._oom_kills = _oom_kills()  # earlier ones struck others
                return answer

    def _obituary(self) -> WorkerDied:
        code = self._process.wait()
        self._forget()
        scratch.remove_abandoned()  # what it owned
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return WorkerDied("oom_host", "the kernel killed the worker: host memory ran out")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self._tail()
        if code in _MEMORY:
            return WorkerDied(_MEMORY[code], tail or "memory ran out")
        if lacks_memory(tail):
            return WorkerDied("oom_host", no_memory(f"{how}; {tail}"))
        told = [how, f"last line on stderr: {tail}" if tail else "", address_words()]
        return WorkerDied("crashed", f"the worker ended: {'; '.join(filter(None, told))}")

    def _tail(self) -> str:
        """Return the last line that the worker wrote to stderr, where errors end up."""
        if self._log is None:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def kill(self) -> None:
        self._killed = True
        self._kill_group()
        with suppress(subprocess.TimeoutExpired):  # the kernel may hold it, at a drive that does not answer
            self._process.wait(timeout=KILL_S)
        self._forget()
        scratch.remove_abandoned()  # what it owned

    def _abort(self) -> None:
        """End the worker in the last moments of this process, in which others may be waiting for it."""
        self._kill_group()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        scratch.remove_abandoned()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # also one that leads no group yet

    def close(self) -> None:
        """Let the worker finish in order; kill it if it does not within half a minute."""
        with suppress(BrokenPipeError, OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=0 if self._killed else 30)
        except subprocess.TimeoutExpired:
            if not self._killed:
                self.kill()
        self._forget()
        if self._log is not None:
            self._log.close()


def _oom_kills() -> int:
    """Count how often the kernel's out-of-memory killer has struck in this process's own control group, and those
    within it; 0 if that is not known. The rest of the host does not count."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            for root, file in _OOM_FILES.get(kinds, ()):
                for group in (path, ""):  # a container may see its own group as the root
                    with suppress(OSError, ValueError):
                        found = dict(one.split() for one in Path(f"{root}{group}/{file}").read_text().splitlines())
                        return int(found["oom_kill"])
    return 0


def here(engine_name: str) -> dict[str, Any]:
    """Return the start of a study's record: machine, device, time and versions."""
    from zinfer.system import host, local

    devices = host.gpus()
    device = str(devices[0].get("name", "gpu")) if devices else host.cpu_model()
    return {"machine": local.name(), "device": device, "started_at": now(), "versions": versions(engine_name)}


def versions(engine_name: str, weights: Weights = "as-released") -> dict[str, str]:
    """Return the versions of Python, zinfer, the driver, and the packages that the engine requires for `weights`."""
    import platform

    from zinfer.core.engine import ENGINES
    from zinfer.system.host import driver_version, package_version

    found = {"python": platform.python_version(), "zinfer": __version__}
    kind = ENGINES.get(engine_name)
    own = (kind.own_package,) if kind is not None and kind.own_package and weights in kind.own_formats else ()
    for package in (*(kind.requires if kind is not None else ("torch",)), *own):
        if version := package_version(package):
            found[package] = version
    if driver := driver_version():
        found["driver"] = driver
    return found
