"""Sweep over a cluster: each load is a job of its own, which submitit gives to Slurm or starts on this machine.

A job measures its load on the node that it is given and writes a part: a results file beside the sweep's, in the folder
`parts_of`, every point on disk before the next one starts. A job that is preempted or runs out of time goes back into
the queue; its next run finds in the part what it has. The process that submitted the jobs takes their parts into the
sweep's file in the order of the loads, so that it is the file of a sweep on one machine. The jobs of a round are an
array; the next round begins when the array has ended, so that loads that are compared are measured in turn.
"""

import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zinfer.core.errors import ENVIRONMENT, ZinferError, one_line
from zinfer.core.machine import Machine
from zinfer.core.units import counted
from zinfer.job.recipe import Sweep, SweepLoad
from zinfer.job.requests import request_sets
from zinfer.job.signals import Interrupted, Signals
from zinfer.job.sweep import Events, Outcome, header_of, prepare, run, source_of
from zinfer.record.jsonl import read_lines
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.store import Header, Records, Store, StoreError, decode, encode, read
from zinfer.worker.process import Worker

Kind = Literal["slurm", "local"]
Point = Measurement | RequestPoint

POLL_S: dict[Kind, float] = {"slurm": 5.0, "local": 0.1}  # seconds between two looks at the jobs
ABSENT_S = 20.0  # after which a job that the queue does not list, and that left no result, has failed
RELEASE_S = 120.0  # for cancelled jobs of an earlier start to end
LONG_MIN = 60 * 24 * 365  # time limit of local jobs, in minutes: none
TIMEOUTS = 20  # how often a job that ran out of time goes back into the queue
OWN = frozenset(  # parameters of sbatch that are not for the user to set
    {"array", "output", "error", "open_mode", "signal", "nodes", "ntasks", "ntasks_per_node", "command", "folder",
     "map_count", "requeue", "no_requeue", "additional_parameters"}
)  # fmt: skip
LISTS = frozenset({"setup", "teardown", "srun_args"})  # parameters of submitit with several values
NUMBERS = frozenset({"cpus_per_task", "cpus_per_gpu", "signal_delay_s", "array_parallelism"})


class ClusterError(ZinferError):
    """A cluster that takes no jobs, or parameters that it would not understand."""


def parts_of(output: Path) -> Path:
    """Return the folder of the jobs' parts and logs, beside the results file `output`."""
    return output.with_name(output.name + ".cluster")


def minutes(text: str) -> int:
    """Return a time limit as sbatch takes it, in minutes, rounded up: ``minutes``, ``minutes:seconds``,
    ``hours:minutes:seconds``, ``days-hours``, ``days-hours:minutes`` or ``days-hours:minutes:seconds``. Raises
    ClusterError."""
    found = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", text)
    if not found:
        raise ClusterError(f"--slurm-arg time={text[:40]}: write minutes, hours:minutes:seconds or days-hours")
    days, *rest = found.groups()
    fields = [int(field) for field in rest if field is not None]
    if days is not None:
        hours, minute, second = (*fields, 0, 0)[:3]
    elif len(fields) == 3:
        hours, minute, second = fields
    else:
        hours, minute, second = 0, *(*fields, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minute) * 60 + second
    if not total:
        raise ClusterError("--slurm-arg time=0: a job needs a time limit, so that it is asked to stop before it ends")
    return -(-total // 60)


def slurm_parameters(words: Iterable[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE``, or ``KEY`` alone, of sbatch's options as parameters of submitit's executor. Raises
    ClusterError."""
    from submitit.slurm.slurm import _get_default_parameters

    known = _get_default_parameters()
    found: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not re.fullmatch("[a-z][a-z0-9_]*", key) or "\n" in text or (equals and not text):
            raise ClusterError(f"--slurm-arg {word[:60]!r}: write an option of sbatch, as partition=gpu or exclusive")
        if key in OWN:
            raise ClusterError(f"--slurm-arg {key}: zinfer sets it itself")
        if key in LISTS:
            found.setdefault(key, []).append(text)
        elif key == "time":
            found[key] = minutes(text)
        elif key in NUMBERS:
            if not re.fullmatch("[0-9]{1,6}", text):
                raise ClusterError(f"--slurm-arg {word[:60]}: write a whole number")
            found[key] = int(text)
        else:
            (found if key in known else more)[key] = text if equals else True
    if "time" not in found:
        raise ClusterError("--cluster slurm needs --slurm-arg time=.., the time limit of a job, as 12:00:00 or 1-0")
    return found | ({"additional_parameters": more} if more else {})


class Result(NamedTuple):
    """Answer of a job: the lines of all its points, those included that were recorded before, or its error."""

    points: list[bytes]
    error: str | None = None


@dataclass(frozen=True)
class LoadTask:
    """One load of a sweep in one round, as a job is given it."""

    recipe: dict[str, Any]  # the sweep
    index: int  # of the load among `Sweep.loads`
    number: int  # of the round, from 0
    results: Path  # file of the sweep, with what is recorded
    part: Path
    nvme_path: str | None
    gpus: str | None  # CUDA_VISIBLE_DEVICES of local jobs
    machine: Callable[[], Machine]
    locate: Callable[[SweepLoad], str | None]
    watch: Callable[[], Any]  # context with the `events` of the job's log
    make_worker: Callable[..., Any] = Worker

    def measure(self) -> Outcome:
        """Measure what is not recorded yet. Raises as `zinfer.job.sweep.run` does."""
        sweep = Sweep.model_validate(self.recipe)
        load = [*sweep.loads()][self.index]
        machine = self.machine()

        def resolve(load: SweepLoad) -> Any:
            return source_of(sweep, load)

        jobs = prepare(
            sweep, machine, resolve, self.locate, self.nvme_path, requests=request_sets(sweep), loads=[load]
        )  # fmt: skip
        with Store.open(self.part) as store, self.watch() as watch:
            own = read(self.part)
            store.append_header(header_of(sweep, machine.name, [(job.plan.case.model, job.revision) for job in jobs]))
            before = read(self.results) if self.results.exists() else Records()
            known: list[Point] = [*before.points, *own.points, *before.requests, *own.requests]
            # SIGTERM comes before the signal upon which submitit gives the job back; a job that is killed has lost no
            # more than the point under way.
            signals = Signals(signal.SIGINT)
            return run(sweep, jobs, store, known, watch.events(), self.make_worker, [self.number], signals)


class MeasureLoad:
    """Function of the jobs: picklable, and given back to the queue as it is."""

    def __call__(self, task: LoadTask) -> Result:
        if os.environ.get("SUBMITIT_EXECUTOR") == "local":  # submitit hides all GPUs from such a job
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if task.gpus is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = task.gpus
        try:
            return Result([encode(point) for point in task.measure().all])
        except Exception as error:
            traceback.print_exc()
            return Result([], one_line(error))

    def checkpoint(self, task: LoadTask) -> Any:
        """Return what to run when the job is started again: the same; the part says what is left to do."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task)


class Cluster:
    """Queue for jobs: that of Slurm, with these options of sbatch, or this machine, which runs one after the other.

    Raises ClusterError if submitit or Slurm is not installed, or if an option is wrong.
    """

    def __init__(self, kind: Kind, folder: Path, words: Sequence[str] = (), name: str = "sweep") -> None:
        self.kind, self.folder = kind, folder
        try:
            import submitit
        except ImportError:
            raise _not_here("--cluster needs submitit: pip install 'zinfer[slurm]'") from None
        if kind == "local" and words:
            raise ClusterError("--slurm-arg is for --cluster slurm")
        parameters = slurm_parameters(words) if kind == "slurm" else {"timeout_min": LONG_MIN}
        try:
            if kind == "slurm":
                parameters = {"job_name": f"zinfer-{name}"} | parameters
                self._executor: Any = submitit.SlurmExecutor(folder / "jobs", max_num_timeout=TIMEOUTS)
            else:
                self._executor = submitit.LocalExecutor(folder / "jobs", max_num_timeout=TIMEOUTS)
            self._executor.update_parameters(**parameters)
            folder.mkdir(parents=True, exist_ok=True)
        except RuntimeError:
            raise _not_here("--cluster slurm needs a machine from which jobs are submitted: there is no srun") from None
        except OSError as error:
            raise _not_here(f"cannot write {folder}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise ClusterError(f"--slurm-arg: {one_line(error)}") from None
        self._absent: dict[str, float] = {}  # id of a job that the queue does not list -> when that was seen first

    @property
    def at_once(self) -> int | None:
        """Jobs that may be submitted together: any number, or one on this machine."""
        return None if self.kind == "slurm" else 1

    def submit(self, tasks: Sequence[LoadTask]) -> list[Any]:
        """Submit tasks as one array; return submitit's jobs. Raises ClusterError."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            with _errors_to(self.folder / "controllers.log") if self.kind == "local" else nullcontext():
                jobs: list[Any] = self._executor.map_array(MeasureLoad(), tasks)
        except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
            raise _not_here(f"no job could be submitted: {one_line(error)}") from None
        if self.kind == "slurm":
            with self._submitted.open("a") as file:
                file.writelines(f"{job.job_id}\n" for job in jobs)
                file.flush()
                os.fsync(file.fileno())
        return jobs

    def ended(self, jobs: Sequence[Any]) -> list[Any]:
        """Return those of `jobs` that have ended, with a result or without."""
        if self.kind == "local":
            return [job for job in jobs if job.done()]
        done = [job for job in jobs if _has_result(job)]
        rest = [job for job in jobs if job not in done]
        listed = _listed(rest) if rest else set()
        if listed is None:  # Slurm does not answer: nothing is known
            return done
        now = time.monotonic()
        for job in rest:
            if job.job_id in listed:
                self._absent.pop(job.job_id, None)
            elif now - self._absent.setdefault(job.job_id, now) > ABSENT_S:
                done.append(job)
        return done

    def result(self, job: Any) -> Result:
        """Return the answer of a job that has ended; of one without an answer, an error that names its log."""
        if _has_result(job):
            with suppress(Exception):  # of a pickle that was cut, or of a failure outside of our function
                found = job.result()
                if isinstance(found, Result):
                    return found
        return Result([], f"job {job.job_id} ended without a result; its log is {job.paths.stderr}")

    def cancel(self, jobs: Iterable[Any]) -> None:
        """Cancel jobs; return at once."""
        if self.kind == "slurm":
            _scancel([job.job_id for job in jobs])
            return
        for job in jobs:
            with suppress(OSError):
                job.cancel()

    def cancel_earlier(self) -> bool:
        """Cancel the jobs of an earlier start of this sweep; return whether there are any. Their points are kept."""
        if self.kind != "slurm" or not self._submitted.exists():
            return False
        ids = [word for word in self._submitted.read_text().split() if re.fullmatch("[0-9]+(_[0-9]+)?", word)]
        _scancel(ids)
        return bool(ids)

    @property
    def _submitted(self) -> Path:
        return self.folder / "submitted"


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Give processes that are started in the block the file `path` as stderr: submitit's controller of a local job
    shows a traceback when it is cancelled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ours, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(log)


def _not_here(message: str) -> ClusterError:
    error = ClusterError(message)
    error.exit_code = ENVIRONMENT
    return error


def _scancel(ids: Sequence[str]) -> None:
    for begin in range(0, len(ids), 500):  # a command line has an end
        with suppress(OSError, subprocess.SubprocessError):
            command = ["scancel", "--quiet", *ids[begin : begin + 500]]
            subprocess.run(command, check=False, capture_output=True, timeout=60)


def _has_result(job: Any) -> bool:
    folder = job.paths.folder
    with suppress(OSError):
        os.listdir(folder)  # a network file system looks again
    return bool(job.paths.result_pickle.exists())


def _listed(jobs: Sequence[Any]) -> set[str] | None:
    """Return the ids of those jobs that Slurm's queue lists, waiting or running; None if it does not answer."""
    arrays = sorted({job.job_id.split("_")[0] for job in jobs})
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(arrays)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return set(done.stdout.split())


class ClusterSweep:
    """A sweep whose loads are jobs; `make_task` returns the task of a load (its index) in a round."""

    def __init__(
        self,
        sweep: Sweep,
        indices: Sequence[int],
        make_task: Callable[[int, int, Path], LoadTask],
        cluster: Cluster,
        store: Store,
        events: Events,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._sweep, self._indices, self._make_task = sweep, indices, make_task
        self._cluster, self._store, self._events, self._say = cluster, store, events, say
        self._told: dict[Path, int] = {}  # bytes of each part that were told of
        self._last_header: Header | None = None
        self.failed: list[str] = []  # errors of jobs

    @cached_property
    def _known(self) -> set[bytes]:
        """Lines that the sweep's file holds."""
        return set(read_lines(self._store.path))

    def part(self, index: int, number: int) -> Path:
        """Return the path of the part of a load in a round."""
        return self._cluster.folder / f"round-{number:04d}-load-{index:04d}.part"

    def run(self) -> Outcome:
        """Measure all loads in all rounds, and return their points.

        Raises Interrupted on SIGINT and SIGTERM, after the jobs were cancelled; StoreError if a record cannot be
        written; ClusterError if no job can be submitted.
        """
        outcome = Outcome([], [])
        with Signals() as signals:
            for number in range(self._sweep.rounds):
                tasks = [self._make_task(index, number, self.part(index, number)) for index in self._indices]
                size = self._cluster.at_once or len(tasks)
                for begin in range(0, len(tasks), size):
                    self._array(tasks[begin : begin + size], signals, outcome)
        return outcome

    def _array(self, tasks: Sequence[LoadTask], signals: Signals, outcome: Outcome) -> None:
        """Submit tasks, wait for them, and take their parts in order, each as soon as those before it have ended."""
        jobs = self._cluster.submit(tasks)
        if self._cluster.kind == "slurm":
            ids = f"{jobs[0].job_id} to {jobs[-1].job_id}" if len(jobs) > 1 else jobs[0].job_id
            self._say(f"submitted {counted(len(jobs), 'job')}: {ids}")
        ended: list[Any] = []
        taken = 0
        try:
            while taken < len(jobs):
                with signals.raised():
                    time.sleep(POLL_S[self._cluster.kind])
                ended += self._cluster.ended([job for job in jobs if job not in ended])
                for task in tasks:
                    self._tell(task.part)
                while taken < len(jobs) and jobs[taken] in ended:
                    self._take(tasks[taken], self._cluster.result(jobs[taken]), outcome)
                    taken += 1
        except BaseException as end:
            self._cluster.cancel(job for job in jobs if job not in ended)
            if isinstance(end, Interrupted):
                for task in tasks[taken:]:
                    self._collect(task.part)
            raise

    def _tell(self, part: Path) -> None:
        """Tell of points that a job has written since the last look."""
        begin = self._told.setdefault(part, 0)
        try:
            with part.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._told[part] = begin + len(whole)
        for record in _records(whole.splitlines()):
            if isinstance(record, Measurement):
                self._events.point(record, False)
            elif isinstance(record, RequestPoint):
                self._events.requests(record, False)

    def _take(self, task: LoadTask, result: Result, outcome: Outcome) -> None:
        """Take the part of a job that has ended into the sweep's file, and its points into `outcome`."""
        self._tell(task.part)
        found = self._collect(task.part)
        if result.error is None:
            found = [*_records(result.points)]
        else:
            self.failed.append(result.error)
            self._say(f"load {task.index + 1}: {result.error}")
        outcome.points.extend(record for record in found if isinstance(record, Measurement))
        outcome.requests.extend(record for record in found if isinstance(record, RequestPoint))

    def _collect(self, part: Path) -> list[Header | Point]:
        """Append the records of a part to the sweep's file, those that it lacks, and return them all."""
        if not part.exists():
            return []
        found = [*_records(read_lines(part))]
        for record in found:
            line = encode(record)
            if isinstance(record, Header):
                self._append_header(record)
            elif line not in self._known:
                self._store.append(record)
                self._known.add(line)
        return found

    def _append_header(self, header: Header) -> None:
        """Append a job's header if it says anything that the last one does not, such as another machine."""
        last = self._last_header
        if last is None or header.model_copy(update={"started_at": last.started_at}) != last:
            self._store.append_header(header)
            self._last_header = header

    def collect_earlier(self) -> None:
        """Take the parts that an earlier start left behind; its jobs are cancelled first. Raises StoreError if one of
        them still writes."""
        if self._cluster.cancel_earlier():
            self._say("cancelled the jobs of an earlier start, which go on with what they have")
        deadline = time.monotonic() + (RELEASE_S if self._cluster.kind == "slurm" else 0)
        for part in sorted(self._cluster.folder.glob("*.part")):
            while True:
                try:
                    Store.open(part).close()
                    break
                except StoreError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(1)
            self._collect(part)
        self.clear()

    def clear(self) -> None:
        """Remove the parts, which the sweep's file holds, and the logs of the jobs."""
        shutil.rmtree(self._cluster.folder, ignore_errors=True)


def _records(lines: Iterable[bytes]) -> Iterable[Header | Point]:
    """Yield the records of whole lines; a torn one, which a kill left, is passed over."""
    for line in lines:
        with suppress(ValueError):
            yield decode(line)
