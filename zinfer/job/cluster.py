"""Sweep over a cluster: each shard is a job, which submitit gives to Slurm or starts on this machine.

A job does what `zinfer sweep --shard i/n --resume` does on the node that it is given. One that is preempted or runs out
of time goes back into the queue, and its next run finds in its part what it has. `zinfer.job.parts.merge` puts the
parts together.
"""

import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from zinfer.core.errors import ZinferError, environment_error, error_line
from zinfer.core.units import counted
from zinfer.job.shard import Shard, wait_until_free
from zinfer.job.signals import Signals
from zinfer.job.sweep import Events
from zinfer.record.store import read

Kind = Literal["slurm", "local"]

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
    """Cluster that takes no jobs, or parameters that it would not understand."""


def folder_of(output: Path) -> Path:
    """Return the folder of the jobs' logs, next to `output`."""
    return output.with_name(output.name + ".cluster")


def minutes(text: str) -> int:
    """Return a time limit of sbatch in minutes, rounded up. Raises ClusterError.

    It is written as ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
    ``days-hours:minutes`` or ``days-hours:minutes:seconds``.
    """
    match = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", text)
    if not match:
        raise ClusterError(f"--slurm-arg time={text[:40]}: write minutes, hours:minutes:seconds or days-hours")
    days, *rest = match.groups()
    fields = [int(field) for field in rest if field is not None]
    with_hours = days is not None or len(fields) == 3
    hours, minute, second = (*fields, 0, 0)[:3] if with_hours else (0, *fields, 0)[:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minute) * 60 + second
    if not total:
        raise ClusterError("--slurm-arg time=0: a job needs a time limit, so that it is asked to stop before it ends")
    return -(-total // 60)


def slurm_parameters(words: Iterable[str]) -> dict[str, Any]:
    """Return sbatch's options, ``KEY=VALUE`` or ``KEY``, as parameters of submitit. Raises ClusterError."""
    from submitit.slurm.slurm import _get_default_parameters

    of_submitit = _get_default_parameters()
    parameters: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not re.fullmatch("[a-z][a-z0-9_]*", key) or "\n" in text or (equals and not text):
            raise ClusterError(f"--slurm-arg {word[:60]!r}: write an option of sbatch, as partition=gpu or exclusive")
        if key in OWN:
            raise ClusterError(f"--slurm-arg {key}: zinfer sets it itself")
        if key in LISTS:
            parameters.setdefault(key, []).append(text)
        elif key == "time":
            parameters[key] = minutes(text)
        elif key in NUMBERS:
            if not re.fullmatch("[0-9]{1,6}", text):
                raise ClusterError(f"--slurm-arg {word[:60]}: write a whole number")
            parameters[key] = int(text)
        else:
            (parameters if key in of_submitit else more)[key] = text if equals else True
    if "time" not in parameters:
        raise ClusterError("--cluster slurm needs --slurm-arg time=.., the time limit of a job, as 12:00:00 or 1-0")
    return parameters | ({"additional_parameters": more} if more else {})


class MeasureShard:
    """Picklable function of the jobs, the same at each requeue: a job resumes from its part.

    `measure` takes a shard and signals, as `zinfer sweep --shard` does; `gpus` are CUDA_VISIBLE_DEVICES of local jobs.
    """

    def __init__(self, measure: Callable[..., object], gpus: str | None = None) -> None:
        self._measure, self._gpus = measure, gpus

    def __call__(self, shard: Shard) -> str | None:
        """Measure a shard; return None, or the error in one line."""
        if os.environ.get("SUBMITIT_EXECUTOR") == "local":  # submitit hides all GPUs from such a job
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if self._gpus is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = self._gpus
        try:
            # SIGTERM comes before the signal upon which submitit gives the job back; a job that is killed has lost no
            # more than the point under way.
            self._measure(shard, Signals(signal.SIGINT))
        except Exception as error:
            traceback.print_exc()
            return error_line(error)
        return None

    def checkpoint(self, shard: Shard) -> Any:
        """Return this task: a requeued job resumes from its part file."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, shard)


class Cluster:
    """Queue of jobs: of Slurm, with these options of sbatch, or of this machine, one job after the other.

    Their logs are in `folder`, next to the results file `output`. Raises ClusterError if submitit or Slurm is not
    installed, or if an option is wrong.
    """

    def __init__(self, kind: Kind, output: Path, words: Sequence[str] = ()) -> None:
        self.kind, self.folder = kind, folder_of(output)
        folder = self.folder / "jobs"
        try:
            import submitit
        except ImportError:
            raise environment_error(ClusterError("--cluster needs submitit: pip install 'zinfer[slurm]'")) from None
        if kind == "local" and words:
            raise ClusterError("--slurm-arg is for --cluster slurm")
        parameters = slurm_parameters(words) if kind == "slurm" else {"timeout_min": LONG_MIN}
        try:
            if kind == "slurm":
                parameters = {"job_name": f"zinfer-{output.stem}"} | parameters
                self._executor: Any = submitit.SlurmExecutor(folder, max_num_timeout=TIMEOUTS)
            else:
                self._executor = submitit.LocalExecutor(folder, max_num_timeout=TIMEOUTS)
            self._executor.update_parameters(**parameters)
            folder.mkdir(parents=True, exist_ok=True)
        except RuntimeError:
            raise environment_error(
                ClusterError("--cluster slurm needs a machine from which jobs are submitted: there is no srun")
            ) from None
        except OSError as error:
            raise environment_error(ClusterError(f"cannot write {folder}: {error.strerror}")) from None
        except (ValueError, TypeError) as error:
            raise ClusterError(f"--slurm-arg: {error_line(error)}") from None
        self._absent: dict[str, float] = {}  # id of a job that the queue does not list -> when that was seen first

    def submit(self, job: MeasureShard, shards: Sequence[Shard]) -> list[Any]:
        """Submit a job for each shard, as one array; return submitit's jobs. Raises ClusterError."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            with _errors_to(self.folder / "controllers.log") if self.kind == "local" else nullcontext():
                return list(self._executor.map_array(job, shards))
        except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
            raise environment_error(ClusterError(f"no job could be submitted: {error_line(error)}")) from None

    def ended(self, jobs: Sequence[Any]) -> list[Any]:
        """Return the jobs that have ended, with a result or without."""
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

    def error(self, job: Any) -> str | None:
        """Return the error of a job that has ended, or None. Without an answer, the error names the log."""
        if _has_result(job):
            with suppress(Exception):  # of a pickle that was cut, or of a failure outside of our function
                result = job.result()
                if result is None or isinstance(result, str):
                    return result
        return f"job {job.job_id} ended without a result; its log is {job.paths.stderr}"

    def cancel(self, jobs: Iterable[Any]) -> None:
        """Cancel jobs; return at once."""
        if self.kind == "slurm":
            _scancel([job.job_id for job in jobs])
            return
        for job in jobs:
            with suppress(OSError):
                job.cancel()

    def end_earlier(self, paths: Iterable[Path], on_message: Callable[[str], None]) -> None:
        """Cancel the jobs of an earlier start, whose parts are at `paths`. Raises StoreError if one still writes."""
        names = [path.name for path in self.folder.glob("jobs/*_submitted.pkl")] if self.kind == "slurm" else []
        matches = (re.fullmatch("([0-9]+(_[0-9]+)?)_submitted.pkl", name) for name in names)
        if ids := [match[1] for match in matches if match]:
            _scancel(ids)
            on_message("cancelled the jobs of an earlier start, which go on with what they have")
        for path in paths:
            wait_until_free(path, RELEASE_S if ids else 0)

    def clear(self, paths: Iterable[Path]) -> None:
        """Remove the merged parts and the logs of the jobs."""
        for path in paths:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Send stderr of processes started in the block to `path`.

    Submitit's controller of a local job shows a traceback when it is cancelled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


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
    """Return the ids of jobs that Slurm's queue lists, waiting or running; None if it does not answer."""
    arrays = sorted({job.job_id.split("_")[0] for job in jobs})
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(arrays)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return set(done.stdout.split())


def run_shards(
    cluster: Cluster,
    job: MeasureShard,
    shards: Sequence[Shard],
    path: Path,
    events: Events,
    on_message: Callable[[str], None] = lambda _text: None,
) -> list[str]:
    """Run `job` for each shard, whose part is at `Shard.path` of `path`; return the errors of failed shards.

    Raises Interrupted on SIGINT and SIGTERM, after the jobs were cancelled; ClusterError if none can be submitted.
    """
    failed: list[str] = []
    reported: Counter[tuple[Path, str]] = Counter()
    _report(shards, path, reported, Events())
    size = len(shards) if cluster.kind == "slurm" else 1
    with Signals() as signals:
        for begin in range(0, len(shards), size):
            array = shards[begin : begin + size]
            running = dict(enumerate(cluster.submit(job, array)))
            if cluster.kind == "slurm":
                ids = ", ".join(job.job_id for job in running.values())
                on_message(f"submitted {counted(len(array), 'job')}: {ids}"[:200])
            try:
                while running:
                    with signals.raised():
                        time.sleep(POLL_S[cluster.kind])
                    ended = cluster.ended([*running.values()])
                    _report(array, path, reported, events)
                    for index in [index for index, submitted in running.items() if submitted in ended]:
                        if (error := cluster.error(running.pop(index))) is not None:
                            failed.append(error)
                            on_message(f"shard {array[index]}: {error}")
            except BaseException:
                cluster.cancel(running.values())
                raise
    return failed


def _report(shards: Iterable[Shard], path: Path, reported: "Counter[tuple[Path, str]]", events: Events) -> None:
    for part in [shard.path(path) for shard in shards]:
        size = part.stat().st_size if part.exists() else 0
        if size == reported[part, "bytes"]:
            continue
        reported[part, "bytes"] = size
        records = read(part)
        for point in records.points[reported[part, "points"] :]:
            events.point(point, False)
        for load in records.requests[reported[part, "requests"] :]:
            events.requests(load, False)
        reported[part, "points"], reported[part, "requests"] = len(records.points), len(records.requests)
