"""Parts of a sweep: a results file a shard, their merge, and the jobs of a cluster that measure them.

A part begins as every results file does, with a header that names its shard; a second header, which is `complete`, ends
it. `merge` believes no part: it must be one of this recipe, and have been measured to its end.

On a cluster each shard is a job of an array, which `sbatch` submits and waits for. It runs the command itself with
`--shard i/n --resume` on the node that it is given. One that is preempted goes back into the queue, and its next run
finds in its part what it has.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zinfer.core.errors import ZinferError, environment_error, error_line
from zinfer.core.units import counted
from zinfer.job.recipe import Sweep
from zinfer.job.shard import Shard, ShardError, shards_begun, wait_until_free, whole_split
from zinfer.job.signals import Signals
from zinfer.job.sweep import FINAL, Outcome, Point, key_of, recipe_of
from zinfer.record.jsonl import read_lines
from zinfer.record.store import Header, Store, decode, encode, read
from zinfer.system import atomic

# A job that is preempted goes on until it is killed, and is queued again: it loses the point under way alone.
PATIENT = """bash -c 'trap "" TERM; exec "$0" "$@"'"""
RELEASE_S = 120.0  # for cancelled jobs of an earlier start to end
RESERVED = frozenset({"array", "output", "error", "open-mode", "requeue", "no-requeue", "wait", "wrap", "parsable"})


class Part(NamedTuple):
    """Records of a part, in their order. `complete` if its last start came to its end without a damaged line."""

    headers: list[Header]
    points: list[Point]
    complete: bool


def parts_path(output: Path) -> Path:
    """Return the path whose shards (`Shard.path`) are the parts of `output`."""
    return output.with_suffix(".part")


def read_part(output: Path, shard: Shard, sweep: Sweep) -> Part:
    """Return the part of a shard. Raises ShardError for a part of another sweep or shard, StoreError."""
    path = shard.path(parts_path(output))
    headers: list[Header] = []
    points: list[Point] = []
    sound = complete = False
    for line in read_lines(path):
        try:
            record = decode(line)
        except ValueError:
            sound = complete = False
            continue
        if not isinstance(record, Header):
            points.append(record)
            continue
        if record.recipe != recipe_of(sweep):
            raise ShardError(f"{path} is a part of another sweep: remove it, or name the recipe that it was made with")
        if record.shard != str(shard):
            raise ShardError(f"{path} is that of shard {record.shard}: give each file its own name back")
        sound, complete = sound if record.complete else True, sound and record.complete
        headers.append(record)
    if points and not headers:
        raise ShardError(f"{path} does not say which sweep it belongs to: remove it, and run --shard {shard} again")
    return Part(headers, points, complete)


def merge(sweep: Sweep, output: Path, whole: bool = True, force: bool = False) -> Outcome:
    """Append the points of the parts to `output`, once each; return all. Raises ShardError for a foreign part, for an
    `output` of another recipe without `force`, and, if the sweep has to be `whole`, for parts that are missing or not
    complete; StoreError."""
    path = parts_path(output)
    shards = whole_split(path) if whole else shards_begun(path)
    parts = {shard: read_part(output, shard, sweep) for shard in shards}
    if whole and (lacking := [str(shard) for shard, part in parts.items() if not part.complete]):
        again = f"run them again with --resume, and they go on: --shard {', '.join(lacking)[:600]}"
        raise ShardError(f"{len(lacking):,} of {len(shards):,} shards have not ended: {again}")
    headers = [header for part in parts.values() for header in part.headers]
    models = {word for header in headers for word in header.model_revision.split(",") if word}
    alike = {"shard": None, "complete": False, "model_revision": ",".join(sorted(models))}
    firsts = {_undated(header): header for header in reversed(headers)}  # of each machine and versions
    headers = [header.model_copy(update=alike) for header in reversed(firsts.values())]
    points = [point for part in parts.values() for point in part.points]
    revisions: dict[object, str] = {}
    for point in points:
        model = point.case.model, point.case.layers, point.case.weights
        if revisions.setdefault(model, point.model_revision) != point.model_revision:
            raise ShardError(f"parts have different weights of {point.case.model}: remove those of one revision")
    with Store(output) as store:
        before = read(output)
        if before.headers and before.headers[-1].recipe != recipe_of(sweep) and not force:
            raise ShardError(f"{output} has points of another sweep: --force adds to them, -o takes another file")
        starts = {_undated(header) for header in before.headers}
        for header in headers:
            if _undated(header) not in starts:
                store.append(header)
        lines = {*read_lines(output)}
        new = [point for point in points if encode(point) not in lines]
        store.append(*new)
        store.check()
    every = [*before.points, *before.requests, *new]
    last = {key_of(point): point for point in every}  # failures that were tried again are left out
    return Outcome([point for point in every if point.status in FINAL or last[key_of(point)] is point])


def _undated(header: Header) -> str:
    return f"{header.machine} {sorted(header.versions.items())}"


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
