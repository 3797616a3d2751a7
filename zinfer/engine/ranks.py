"""Processes of several GPUs of a host: their start, what they exchange, and their end.

Rank 0 is the worker's own process (`Leader`); it starts the others (`Follower`), one for each further GPU, and they
serve its commands. Orders and answers go through a socket to each, weights may lie in one shared arena
(`zinfer.engine.pinned`), and tensors of answers in memory that the two share (`Letters`).
Parts of layers go from GPU to GPU (`torch.distributed`: NCCL, or gloo on CPUs, which meet over the loopback device).
What the ranks compute is their members' business (`zinfer.engine.team`).

Nobody is left behind: a follower ends with its leader, whatever ends that (`zinfer.system.ending`), and the leader,
which may wait for a lost follower in the middle of a gather, ends as the follower did. So the parent sees one worker
end.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from zinfer.core.errors import error_line, is_out_of_memory
from zinfer.core.units import counted
from zinfer.engine import EngineError
from zinfer.engine.pinned import ALIGNMENT, PAGE, PinnedArena, TensorPlace, shared_memory
from zinfer.plan.planner import Plan
from zinfer.system import scratch
from zinfer.system.ending import MEMORY_CODES, NO_GPU_MEMORY, NO_HOST_MEMORY, PARENT

GATHER_S = 600.0  # for all ranks to take part in a gather, or to start
END_S = 20.0  # for a follower to end in order
LOST_S = 10.0  # for the thread that watches a follower to notice its end
COMMAND = (sys.executable, "-m", "zinfer.engine.rank")
# Addresses of this host alone; multicast over NVLink (NVLS) hangs on some hosts, and gains nothing here.
QUIET = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


# Its name from torch 2.13 on, and the earlier one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Letters:
    """Memory that two processes share, for tensors of one answer at a time: one end puts them, the other one takes
    them. It grows as they need it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._arena: PinnedArena | None = None

    def put(self, tensors: Sequence[Tensor]) -> list[TensorPlace]:
        """Copy tensors, from any device; return their places, for `take`."""
        places, end = list[TensorPlace](), 0
        for tensor in tensors:
            places.append(TensorPlace(end, tensor.shape, tensor.dtype))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if end > os.fstat(self._file).st_size:
            os.ftruncate(self._file, -(-end // PAGE) * PAGE)
        for place, tensor in zip(places, tensors, strict=True):
            self._view(place).copy_(tensor)
        return places

    def take(self, places: Sequence[TensorPlace]) -> list[Tensor]:
        """Return the tensors at `places`, as views that the next `put` overwrites."""
        return [self._view(place) for place in places]

    def _view(self, place: TensorPlace) -> Tensor:
        size = os.fstat(self._file).st_size
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = PinnedArena.attach(size, self._file)
            if torch.cuda.is_available():
                self._arena.lock()
        return place.view(self._arena.memory)

    def close(self) -> None:
        """Let the memory go. Views must not be used afterwards."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


@dataclass(frozen=True)
class Start:
    """First message to a follower."""

    rank: int
    size: int
    member: Callable[..., Any]  # class of the rank's end, which loads the engine
    plan: Plan
    store: str  # file through which the ranks find each other
    weights: int  # descriptor of the shared arena
    orders: int  # of memory for tensors of orders
    letters: int  # and of answers
    threads: int  # of the CPU


class Channel:
    """Socket to another rank: any Python object a message. Raises EOFError once the other end is gone."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            raise EOFError from None

    def receive(self) -> Any:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError:
            raise EOFError from None

    def close(self) -> None:
        self._connection.close()


class Group(ABC):
    """A rank's view of all of them: what they do at once."""

    def __init__(self, rank: int, size: int, store: str, weights: int) -> None:
        self.rank, self.size, self.weights = rank, size, weights
        self._store, self._joined = store, False

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Return the leader's `value` in all ranks. Raises EOFError in a follower whose leader ends."""

    @abstractmethod
    def agree(self) -> None:
        """Go on once all have come this far; in the leader, raise what a follower failed with instead."""

    def join(self) -> None:
        """Meet the others."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        cuda = torch.cuda.is_available()
        with self._losses():
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=FileStore(self._store, self.size),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=GATHER_S),
                device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
            )
        self._joined = True

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with the parts of all ranks (`zinfer.engine.stream.gather.Ranks`)."""
        with self._losses():
            _all_gather(whole, part)

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the leader's `tensor`, of any type."""
        same = tensor.contiguous()
        with self._losses():
            dist.broadcast(same.view(-1).view(torch.uint8), 0)
        if same is not tensor:
            tensor.copy_(same)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Run a block in which a failure of one rank leaves the others waiting for it: end all processes then, with an
        exit code that tells a want of memory (`zinfer.system.ending`)."""
        try:
            with self._losses():  # the end of another one may be the cause
                yield
        except BaseException as error:
            with suppress(OSError):
                os.write(2, f"GPU {self.rank}: {error_line(error)}\n".encode())
            os._exit(_exit_code(error))

    def leave(self) -> None:
        """Part from the others. Safe to call twice."""
        if self._joined:
            self._joined = False
            with suppress(Exception):  # one of them may be gone
                dist.destroy_process_group()

    def _losses(self) -> "_Losses":
        return _Losses()


class _Losses:
    """Gives the thread that watches the followers the time to end this process, where an exchange fails because one
    of them is gone; in a follower the kernel does so."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError) and _exit_code(error) not in MEMORY_CODES:
            time.sleep(LOST_S)


class Follower(Group):
    """A rank other than 0, in its own process."""

    def __init__(self, start: Start, channel: Channel) -> None:
        super().__init__(start.rank, start.size, start.store, start.weights)
        self._channel, self._orders, self._letters = channel, Letters(start.orders), Letters(start.letters)

    def share(self, value: Any) -> Any:
        return self.receive()

    def agree(self) -> None:
        self.answer(None)

    def receive(self) -> Any:
        """Return the leader's next message. Raises EOFError where it ends."""
        message = self._channel.receive()
        if message is None:
            raise EOFError
        return message

    def taken(self, places: Sequence[TensorPlace]) -> list[Tensor]:
        """Return the tensors of an order, until it is answered."""
        return self._orders.take(places)

    def answer(self, value: object, tensors: Sequence[Tensor] | None = None) -> None:
        """Answer the leader's last message; an exception is raised there."""
        value = portable(value) if isinstance(value, BaseException) else value
        self._channel.send((value, None if tensors is None else self._letters.put(tensors)))


class Leader(Group):
    """Rank 0, which starts the others when it is made, as `member` of an engine. `answers` collects what they say.

    Raises EngineError where the host has fewer GPUs than `plan` wants.
    """

    def __init__(self, plan: Plan, member: Callable[..., Any]) -> None:
        size = plan.placement.gpus
        if torch.cuda.is_available() and torch.cuda.device_count() < size:
            raise EngineError(f"gpus={size}: this host has {counted(torch.cuda.device_count(), 'GPU')}")
        self._folder = scratch.folder(Path(tempfile.gettempdir()), "ranks")
        super().__init__(0, size, str(self._folder.path / "store"), shared_memory())
        self._closing = False
        self._files = [self.weights]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._letters: list[Letters] = []
        self._orders: list[Letters] = []
        threads = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(1, size):
                self._start(rank, plan, member, threads)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, plan: Plan, member: Callable[..., Any], threads: int) -> None:
        orders, letters = shared_memory(), shared_memory()
        self._files += [orders, letters]
        self._orders.append(Letters(orders))
        self._letters.append(Letters(letters))
        files = [self.weights, orders, letters]
        channel = self._started(rank, files)
        self._channels.append(channel)
        start = Start(rank, self.size, member, plan, self._store, self.weights, orders, letters, threads)
        channel.send(start)

    def _started(self, rank: int, files: Sequence[int]) -> Channel:
        """Start a follower's process; return the channel to it."""
        ours, theirs = Pipe()
        channel = Channel(ours)
        process = subprocess.Popen(
            [*COMMAND, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *files],
            env={**os.environ, **_visible(rank), PARENT: str(os.getpid())},
        )
        self._processes.append(process)
        theirs.close()
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return channel

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """End this process as a follower ended, unless it was told to."""
        code = process.wait()
        self._end(rank, code, f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

    def _end(self, rank: int, code: int, how: str) -> None:
        if self._closing:
            return
        if code in MEMORY_CODES:  # it has said so
            os._exit(code)
        with suppress(OSError):
            os.write(2, f"the process of GPU {rank} ended: {how}\n".encode())
        if code < 0:
            os.kill(os.getpid(), -code)
            time.sleep(1)
        os._exit(1)

    def share(self, value: Any) -> Any:
        self.order([value] * len(self._channels))
        return value

    def agree(self) -> None:
        self.answers()

    def give(self, rank: int, tensors: Sequence[Tensor]) -> list[TensorPlace]:
        """Copy tensors to where a follower can take them while it does the next order."""
        return self._orders[rank - 1].put(tensors)

    def order(self, messages: Sequence[object]) -> None:
        """Send a message to each follower."""
        for channel, message in zip(self._channels, messages, strict=True):
            try:
                channel.send(message)
            except EOFError:
                self._lost()

    def answers(self) -> list[Any]:
        """Return the next answer of each follower, and raise the first of those that are exceptions. Tensors of
        answers are views that the next answer overwrites."""
        found: list[Any] = []
        for channel, letters in zip(self._channels, self._letters, strict=True):
            try:
                answer, places = channel.receive()
            except EOFError:
                self._lost()
            found.append(answer if places is None else (answer, letters.take(places)))
        for rank, answer in enumerate(found, start=1):
            if isinstance(answer, BaseException):
                answer.add_note(f"(GPU {rank})")
                raise answer
        return found

    def _lost(self) -> None:
        time.sleep(LOST_S)  # the watching thread ends this process
        raise EngineError("a process of another GPU ended")

    def dismiss(self) -> None:
        """Tell the followers to end."""
        if not self._closing:
            self._closing = True
            for channel in self._channels:
                with suppress(EOFError):
                    channel.send(None)

    def close(self) -> None:
        """Let the followers end in order; kill those that do not. Safe to call twice."""
        self.dismiss()
        self.leave()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()
        for letters in (*self._letters, *self._orders):
            letters.close()
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        self._processes, self._channels, self._letters, self._orders, self._files = [], [], [], [], []
        self._folder.cleanup()


def _visible(rank: int) -> dict[str, str]:
    """Return the environment in which GPU number `rank` of those that this process sees is the first one, so that it
    is the current one; its peers are visible, too."""
    if not torch.cuda.is_available():
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join([names[rank], *names[:rank], *names[rank + 1 :]])}


def _exit_code(error: BaseException) -> int:
    if isinstance(error, torch.OutOfMemoryError):
        return NO_GPU_MEMORY
    return NO_HOST_MEMORY if is_out_of_memory(error) else 1


def portable(error: BaseException) -> BaseException:
    """Return an exception as another process can have it: itself, or one of its kind that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error
