"""Batch job on a Ray cluster's nodes, a task per shard.

The nodes share the folder of the command. Ray gives the shard of a lost node to another one, where it goes on with the
answers and tokens that its files hold. This process alone writes the job's own answers: the shards' answers, as they
come. A request is answered once, for its answer is written once.
"""

import json
import os
import re
import signal
import socket
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zinfer.core.errors import ENVIRONMENT, ZinferError, error_line
from zinfer.core.progress import Progress, silent
from zinfer.core.units import counted
from zinfer.job.batch.ledger import Ledger, job_path, read_job
from zinfer.job.batch.openai import BatchLine, Fault, decode
from zinfer.job.batch.run import JobFailed
from zinfer.job.shard import Shard, ShardError, shards_begun, wait_until_free
from zinfer.job.signals import Signals
from zinfer.record.jsonl import Garbled

CONNECT_S = 10.0  # within which a cluster answers
LOOK_S = 0.5  # seconds between two looks at the answers of shards
LOST_S = 60.0  # for a lost node's process to end, which writes the files of its shard
STOP_S = 10.0  # for cancelled tasks to save the tokens of unfinished rows
RETRIES = 20  # how often the shard of a lost node is done again


class NodesError(ZinferError):
    """Cluster that cannot be used, or node that cannot load the model."""

    exit_code = ENVIRONMENT


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM. Ray puts its own in place, which exits with code 15 and says nothing."""
    before, ended_by_it = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        ended_by_it = True
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)
    if ended_by_it:
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def connected(address: str, debug: bool = False) -> Iterator[Any]:
    """Connect to the Ray cluster at `address`, and yield the module.

    It is ``auto``, ``host:port``, or ``local`` for a cluster of this machine alone. Raises NodesError.
    """
    try:
        import ray
    except ImportError:
        raise NodesError("--ray needs Ray: pip install 'zinfer[ray]'") from None
    try:
        if match := re.fullmatch(r"\[?([^/]+?)\]?:([0-9]{1,5})", address):  # Ray itself would try for minutes
            socket.create_connection((match[1], int(match[2])), CONNECT_S).close()
        with _own_sigterm():
            ray.init(address=address, log_to_driver=debug, logging_level="INFO" if debug else "ERROR")
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise NodesError(f"no Ray cluster at {address}: {error_line(error)[:300]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def shares(nodes: Sequence[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the number of nodes, and the resources of a shard.

    These are all GPUs of the smallest node, or without any GPU all CPUs. Raises NodesError if there is nothing to run
    on.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for kind in ("GPU", "CPU"):
        able = [resources[kind] for resources in alive if resources.get(kind, 0) >= 1]
        if able:
            return len(able), {"num_cpus": 1, f"num_{kind.lower()}s": min(able)}
    raise NodesError("the Ray cluster has no node with a GPU or a CPU to spare")


def answer_on_nodes(
    answer: Callable[[Shard, Collection[str]], object],
    lines: Sequence[BatchLine | Fault],
    ledger: Ledger,
    output: Path,
    identity: Mapping[str, Any],
    address: str,
    debug: bool = False,
    on_progress: Progress = silent,
    on_message: Callable[[str], None] = lambda _text: None,
) -> None:
    """Answer a job's lines on the nodes of a Ray cluster.

    `answer` answers a shard, but for the ids given, into its file by `output`; it runs on the nodes. `identity` has
    the settings of the job for .job files. Raises ShardError for shards of another job, Interrupted on SIGINT and
    SIGTERM, NodesError if the cluster or the model on a node cannot be had, JobFailed if a line gets no answer,
    StoreError if an answer cannot be written.
    """
    begun = shards_begun(output)
    for path in [shard.path(output) for shard in begun]:
        header = read_job(job_path(path))[0] or {}
        if path.stat().st_size and any(header.get(key) != value for key, value in identity.items() if key != "shard"):
            raise ShardError(f"{path} has answers of another job: remove it, or name another file with --output")
    with connected(address, debug) as ray, Signals() as signals:
        count, resources = shares(ray.nodes())
        shards = Shard.all(begun[0].total if begun else count)
        answers = _Answers([shard.path(output) for shard in shards], ledger)
        answers.take()
        already = frozenset(ledger.done)
        task = ray.remote(scheduling_strategy="SPREAD", max_retries=RETRIES, **resources)(answer_shard)
        running = {
            task.remote(answer, Path.cwd(), shard, shard.path(output), already): shard
            for shard in shards
            if any(line.id not in already for line in shard.of(lines))
        }
        each = " and ".join(f"{value:g} {key.removeprefix('num_').upper()[:3]}" for key, value in resources.items())
        on_message(f"{counted(count, 'node')} of Ray, {each} each: {counted(len(running), 'shard')} to answer")
        try:
            while running:
                with signals.raised():
                    ended, _ = ray.wait([*running], timeout=LOOK_S)
                answers.take()
                on_progress(f"{len(ledger.done):,} of {len(lines):,} rows", len(ledger.done) / len(lines))
                for task_id in ended:
                    shard = running.pop(task_id)
                    try:
                        fault = ray.get(task_id)
                    except ray.exceptions.RayError as error:
                        fault = f"it ended without an answer: {error_line(error)[:300]}"
                    if fault is not None:
                        raise NodesError(f"shard {shard}: {fault}")
        except BaseException:
            for task_id in running:
                ray.cancel(task_id, force=False)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=STOP_S)
            answers.take()
            raise
    if missing := sum(line.id not in ledger.done for line in lines):
        raise JobFailed(f"{missing:,} requests have no answer here: the nodes must share the folder {Path.cwd()}")
    for path in answers.paths:
        for file in (path, job_path(path)):
            file.unlink(missing_ok=True)


def answer_shard(
    answer: Callable[[Shard, Collection[str]], object], folder: Path, shard: Shard, path: Path, already: Collection[str]
) -> str | None:
    """Answer a shard on this node; return None, or the error."""
    try:
        os.chdir(folder)
    except OSError as error:
        return f"a node does not have {folder}, which all must share: {error.strerror}"
    try:
        wait_until_free(path, LOST_S)
        answer(shard, already)
    except Exception as error:
        traceback.print_exc()
        return error_line(error)
    return None


class _Answers:
    """Answers in the files of shards, copied into the ledger."""

    def __init__(self, paths: Sequence[Path], ledger: Ledger) -> None:
        self.paths, self._ledger = paths, ledger
        self._read_offsets = dict.fromkeys(paths, 0)  # bytes

    def take(self) -> None:
        """Append the answers that the ledger lacks. Raises StoreError."""
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    file.seek(self._read_offsets[path])
                    content = file.read()
            except FileNotFoundError:
                continue
            whole = content[: content.rfind(b"\n") + 1]
            self._read_offsets[path] += len(whole)
            records = {}
            for line in whole.splitlines():
                with suppress(Garbled):
                    records[decode(line).id] = json.loads(line)
            self._ledger.add(record for key, record in records.items() if key not in self._ledger.done)
