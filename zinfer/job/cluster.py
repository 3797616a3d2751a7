"""Sweep over a cluster: each shard is a job of an array, which `sbatch` submits and waits for.

A job runs the command itself with `--shard i/n --resume` on the node that it is given. One that is preempted goes back
into the queue, and its next run finds in its part what it has. `zinfer.job.parts.merge` puts the parts together.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from zinfer.core.errors import ZinferError, environment_error, error_line
from zinfer.core.units import counted
from zinfer.job.shard import wait_until_free
from zinfer.job.signals import Signals
from zinfer.system import atomic

# A job that is preempted goes on until it is killed, and is queued again: it loses the point under way alone.
PATIENT = """bash -c 'trap "" TERM; exec "$0" "$@"'"""
RELEASE_S = 120.0  # for cancelled jobs of an earlier start to end
RESERVED = frozenset({"array", "output", "error", "open-mode", "requeue", "no-requeue", "wait", "wrap", "parsable"})


class ClusterError(ZinferError):
    """Cluster that takes no jobs, or options that it would not understand."""


class Cluster:
    """Queue of Slurm, with these options of sbatch. The jobs' logs are in `folder`, next to the results file."""

    def __init__(self, output: Path, words: Iterable[str] = ()) -> None:
        self.folder = output.with_name(output.name + ".cluster")
        self._id = self.folder / "job.id"
        self._before: list[str] = []  # commands before the job's own
        self._options = [f"--job-name=zinfer-{output.stem}", "--open-mode=append", "--requeue"]
        self._options += [f"--output={self.folder.absolute()}/%a.log"]
        for word in words:
            name, equals, value = word.removeprefix("--").partition("=")
            if not re.fullmatch("[a-z][a-z-]*", name) or "\n" in word or (equals and not value):
                raise ClusterError(f"--slurm-arg {word[:60]!r}: write an option of sbatch: partition=gpu or exclusive")
            if name in RESERVED:
                raise ClusterError(f"--slurm-arg {name}: zinfer sets it itself")
            if name == "setup":
                self._before.append(value)
            else:
                self._options.append(f"--{name}{equals}{value}")

    def run(self, command: Sequence[str], shards: int, on_message: Callable[[str], None]) -> None:
        """Run `command` with each shard in a job; wait for all. Raises ClusterError; Interrupted, jobs cancelled."""
        if shutil.which("sbatch") is None:
            none = "--cluster slurm needs a machine from which jobs are submitted: there is no sbatch"
            raise environment_error(ClusterError(none))
        script = self.folder / "job.sh"
        measure = f'srun {PATIENT} {shlex.join(command)} --shard "$SLURM_ARRAY_TASK_ID/{shards}" --resume --force'
        atomic.write(script, "\n".join(["#!/bin/bash", *self._before, measure, ""]))
        submit = ["sbatch", "--parsable", "--wait", *self._options, f"--array=1-{shards}", str(script)]
        with (
            Signals() as signals,
            subprocess.Popen(
                submit, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            ) as waiting,
        ):
            assert waiting.stdout is not None
            job = waiting.stdout.readline().strip().partition(";")[0]
            if not job:
                why = error_line(ValueError(waiting.communicate()[1]))
                raise environment_error(ClusterError(f"no job could be submitted: {why}"))
            atomic.write(self._id, job)
            on_message(f"submitted {counted(shards, 'job')}: {job}")
            try:
                with signals.raised():
                    waiting.wait()
            except BaseException:
                self._cancel()
                waiting.kill()
                raise

    def end_earlier(self, paths: Iterable[Path], on_message: Callable[[str], None]) -> None:
        """Cancel the jobs of an earlier start, whose parts are at `paths`. Raises StoreError if one still writes."""
        if earlier := self._cancel():
            on_message("cancelled the jobs of an earlier start, which go on with what they have")
        for path in paths:
            wait_until_free(path, RELEASE_S if earlier else 0)

    def _cancel(self) -> bool:
        """Cancel the jobs; return False if there are none."""
        if not self._id.exists():
            return False
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", "--quiet", self._id.read_text()], check=False, capture_output=True, timeout=60)
        return True

    def clear(self, paths: Iterable[Path]) -> None:
        """Remove the merged parts and the logs of the jobs."""
        for path in paths:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
