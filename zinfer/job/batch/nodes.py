"""Batch job on a Ray cluster's nodes, a task per shard.

The nodes share the folder of the command. A task runs the command itself with `--shard i/n`. Ray gives the shard of a
lost node to another one, where it goes on with the answers and tokens that its files hold.
"""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zinfer.core.errors import ENVIRONMENT, NOTHING, PARTIAL, ZinferError, error_line
from zinfer.core.units import counted
from zinfer.job.shard import Shard, shards_begun, wait_until_free
from zinfer.job.signals import Signals
from zinfer.system.ending import PARENT

CONNECT_S = 10.0  # within which a cluster answers
LOOK_S = 0.5  # seconds between two looks at the tasks
LOST_S = 60.0  # for a lost node's process to end, which writes the files of its shard
STOP_S = 10.0  # for cancelled tasks to save the tokens of unfinished rows
RETRIES = 20  # how often the shard of a lost node is done again


class NodesError(ZinferError):
    """Cluster that cannot be used, or node that cannot load the model."""

    exit_code = ENVIRONMENT


@contextmanager
def connected(address: str, debug: bool = False) -> Iterator[Any]:
    """Connect to Ray at `address` (``auto``, ``local``, ``host:port``); yield the module. Raises NodesError."""
    try:
        import ray
    except ImportError:
        raise NodesError("--ray needs Ray: pip install 'zinfer[ray]'") from None
    before = signal.getsignal(signal.SIGTERM)
    try:
        if match := re.fullmatch(r"\[?([^/]+?)\]?:([0-9]{1,5})", address):  # Ray itself would try for minutes
            socket.create_connection((match[1], int(match[2])), CONNECT_S).close()
        ray.init(address=address, log_to_driver=debug, logging_level="INFO" if debug else "ERROR")
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise NodesError(f"no Ray cluster at {address}: {error_line(error)[:300]}") from None
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray puts its own in place, which exits with code 15
    try:
        yield ray
    finally:
        ray.shutdown()


def shares(nodes: Sequence[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the number of nodes, and a shard's resources: all GPUs, or CPUs, of the smallest. Raises NodesError."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for kind in ("GPU", "CPU"):
        able = [resources[kind] for resources in alive if resources.get(kind, 0) >= 1]
        if able:
            return len(able), {"num_cpus": 1, f"num_{kind.lower()}s": min(able)}
    raise NodesError("the Ray cluster has no node with a GPU or a CPU to spare")


def answer_on_nodes(
    command: Sequence[str], output: Path, address: str, debug: bool, on_message: Callable[[str], None]
) -> None:
    """Run `command` for each shard of `output` on Ray's nodes. Raises ShardError, NodesError, Interrupted."""
    begun = shards_begun(output)
    with connected(address, debug) as ray, Signals() as signals:
        count, resources = shares(ray.nodes())
        shards = Shard.all(begun[0].total if begun else count)
        task = ray.remote(scheduling_strategy="SPREAD", max_retries=RETRIES, **resources)(answer_shard)
        running = {task.remote(command, Path.cwd(), shard, shard.path(output)): shard for shard in shards}
        on_message(f"{counted(count, 'node')} of Ray: {counted(len(shards), 'shard')} to answer")
        try:
            while running:
                with signals.raised():
                    ended, _ = ray.wait([*running], timeout=LOOK_S)
                for task_id in ended:
                    shard = running.pop(task_id)
                    try:
                        fault = ray.get(task_id)
                    except ray.exceptions.RayError as error:
                        fault = f"it ended without an answer: {error_line(error)[:300]}"
                    if fault is not None:
                        raise NodesError(f"shard {shard}: {fault}")
                    on_message(f"shard {shard} has ended")
        except BaseException:
            for task_id in running:
                ray.cancel(task_id, force=False)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=STOP_S)
            raise


def answer_shard(command: Sequence[str], folder: Path, shard: Shard, path: Path) -> str | None:
    """Answer a shard on this node; return None, or the error."""
    words = [*command, "--shard", str(shard)]
    try:
        os.chdir(folder)
        wait_until_free(path, LOST_S)
        env = {**os.environ, PARENT: str(os.getpid())}
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
            try:
                _, said = process.communicate()
            except BaseException:
                process.terminate()
                raise
    except Exception as error:
        return error_line(error)
    fine = process.returncode in (0, PARTIAL, NOTHING)  # as lines have an error for an answer
    return None if fine else error_line(ValueError(said[-1000:].rpartition("Error: ")[2]))
