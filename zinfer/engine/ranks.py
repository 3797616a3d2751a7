"""Processes of several GPUs: their start, their messages and their end.

Rank 0 is the worker's process (`Leader`); it starts a `Follower` for each further GPU, which serves its commands. These
go through a socket, their tensors through `SharedTensors`; parts of layers go from GPU to GPU (`torch.distributed`).
A follower ends with its leader (`zinfer.system.ending`). The leader, which may wait for a lost follower in the middle
of a gather, ends as that did: the parent sees one worker end.
"""

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from zinfer.core.errors import error_line, is_out_of_memory
from zinfer.core.units import counted
from zinfer.engine import EngineError
from zinfer.engine.pinned import HUGE, PinnedArena, TensorPlace, lay_out
from zinfer.plan.planner import Plan
from zinfer.system import scratch
from zinfer.system.ending import MEMORY_CODES, NO_GPU_MEMORY, NO_HOST_MEMORY, PARENT

ENTRY = """import sys; from zinfer.system.ending import with_parent; with_parent()
from zinfer.engine.team import follow; follow(*map(int, sys.argv[1:]))"""  # of a follower: socket, orders, answers
COMMAND = (sys.executable, "-c", ENTRY)
# Seconds to wait; chosen with room for slow hosts, not measured.
GATHER_S = 600.0  # for all ranks to take part in a gather, or to start
END_S = 20.0  # for a follower to end in order
LOST_S = 10.0  # for the thread that watches a follower to notice its end
# Addresses of this host alone; multicast over NVLink (NVLS) hangs on some hosts, and gains nothing for one host.
QUIET = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}

# Its name from torch 2.13 on, and the earlier one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SharedTensors:
    """Memory that two processes share, for the tensors of one message. It grows as they need it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._arena: PinnedArena | None = None

    def put(self, tensors: Sequence[Tensor]) -> list[TensorPlace]:
        """Copy tensors, from any device; return their places, for `take`."""
        blocks, end = lay_out((str(number), tensor) for number, tensor in enumerate(tensors))
        places, size = list(blocks.values()), -(-max(end, 1) // HUGE) * HUGE
        if places and size > os.fstat(self._file).st_size:
            os.ftruncate(self._file, size)
        for target, tensor in zip(self.take(places), tensors, strict=True):
            target.copy_(tensor)
        return places

    def take(self, places: Sequence[TensorPlace]) -> list[Tensor]:
        """Return the tensors at `places`, as views that the next `put` overwrites."""
        if not places:
            return []
        size = os.fstat(self._file).st_size
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = PinnedArena.attach(size, self._file)
            if torch.cuda.is_available():
                self._arena.lock()
        return [place.view(self._arena.memory) for place in places]

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()


class _Pickler(pickle.Pickler):
    """Pickler that leaves tensors out: `tensors` collects them, each once."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[Tensor] = []
        self._numbers: dict[object, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[key]


class Channel:
    """Socket to another rank: any Python object a message. Raises EOFError once the other end is gone. Tensors go
    through shared memory (files `outgoing` and `incoming`); a received one is valid until the next message."""

    def __init__(self, descriptor: int, outgoing: int, incoming: int) -> None:
        self._connection: Connection[Any, Any] = Connection(descriptor)
        self._outgoing, self._incoming = SharedTensors(outgoing), SharedTensors(incoming)

    def send(self, message: object) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(message)
        places = self._outgoing.put(pickler.tensors)
        try:
            self._connection.send((stream.getvalue(), places))
        except OSError:
            raise EOFError from None

    def receive(self) -> Any:
        try:
            content, places = self._connection.recv()
        except OSError:
            raise EOFError from None
        unpickler = pickle.Unpickler(io.BytesIO(content))
        unpickler.persistent_load = self._incoming.take(places).__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def close(self) -> None:
        self._connection.close()
        self._outgoing.close()
        self._incoming.close()


class Group(ABC):
    """A rank's view of all ranks: what they do at once. They find each other through the file `store`; `weights` is the
    descriptor of the arena that they share."""

    def __init__(self, rank: int, size: int, store: str, weights: int) -> None:
        self.rank, self.size, self.weights = rank, size, weights
        self._store, self._joined = store, False

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Return the leader's `value` in all ranks. Raises EOFError in a follower whose leader ends."""

    @abstractmethod
    def agree(self) -> None:
        """Wait for all ranks; the leader raises the error of a follower."""

    def join(self) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        cuda = torch.cuda.is_available()
        with _losses():
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
        """Fill `whole` with the parts of all ranks, in rank order. It is uint8 ``[size * n]`` on the device, `part`,
        this rank's, ``[n]``, perhaps its place in `whole`. Runs in the current queue."""
        with _losses():
            _all_gather(whole, part)

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the leader's `tensor`, of any type."""
        same = tensor.contiguous()
        with _losses():
            dist.broadcast(same.view(-1).view(torch.uint8), 0)
        if same is not tensor:
            tensor.copy_(same)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """End all processes where the block fails. The other ranks would wait for this one forever."""
        try:
            with _losses():  # the end of another one may be the cause
                yield
        except BaseException as error:
            with suppress(OSError):
                os.write(2, f"GPU {self.rank}: {error_line(error)}\n".encode())
            os._exit(_exit_code(error))

    def leave(self) -> None:
        """Leave the process group. Safe to call twice."""
        if self._joined:
            self._joined = False
            with suppress(Exception):  # one of them may be gone
                dist.destroy_process_group()


@contextmanager
def _losses() -> Iterator[None]:
    """Wait for the end of this process, where another rank is gone. The watching thread, or the kernel, ends it."""
    try:
        yield
    except RuntimeError as error:
        if _exit_code(error) not in MEMORY_CODES:
            time.sleep(LOST_S)
        raise


class Follower(Group):
    """A rank other than 0, in its own process."""

    def __init__(self, channel: Channel, rank: int, size: int, store: str, weights: int) -> None:
        super().__init__(rank, size, store, weights)
        self._channel = channel

    def share(self, value: Any) -> Any:
        return pickle.loads(self.receive())

    def agree(self) -> None:
        self.answer(None)

    def receive(self) -> Any:
        """Return the leader's next message. Raises EOFError at its end."""
        message = self._channel.receive()
        if message is None:
            raise EOFError
        return message

    def answer(self, value: object) -> None:
        """Send a result to the leader, which re-raises exceptions."""
        if isinstance(value, BaseException):
            try:
                pickle.loads(pickle.dumps(value))
            except Exception:  # of a class that another process cannot unpickle
                value = EngineError(f"{type(value).__name__}: {value}")
        self._channel.send(value)


class Leader(Group):
    """Rank 0, which starts the others, each as a `member`. Raises EngineError without enough GPUs."""

    def __init__(self, plan: Plan, member: Callable[..., Any]) -> None:
        size = plan.placement.gpus
        if torch.cuda.is_available() and torch.cuda.device_count() < size:
            raise EngineError(f"gpus={size}: this host has {counted(torch.cuda.device_count(), 'GPU')}")
        self._folder = scratch.folder(Path(tempfile.gettempdir()), "ranks")
        super().__init__(0, size, str(self._folder.path / "store"), os.memfd_create("zinfer"))
        self._closing = False
        self._files = [self.weights]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        threads = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(1, size):
                self._start(rank, plan, member, threads)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, plan: Plan, member: Callable[..., Any], threads: int) -> None:
        ours, theirs = socket.socketpair()
        orders, answers = os.memfd_create("zinfer"), os.memfd_create("zinfer")
        self._files += [orders, answers]
        files = [theirs.fileno(), orders, answers]
        channel = Channel(ours.detach(), orders, answers)
        self._channels.append(channel)
        process = subprocess.Popen(
            [*COMMAND, *map(str, files)],
            stdin=subprocess.DEVNULL,
            pass_fds=[*files, self.weights],
            env={**os.environ, **_visible(rank), PARENT: str(os.getpid())},
        )
        self._processes.append(process)
        theirs.close()
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        channel.send((member, plan, threads, (rank, self.size, self._store, self.weights)))  # see `follow`

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """End this process as a follower ended, unless the team closes."""
        code = process.wait()
        if self._closing:
            return
        if code in MEMORY_CODES:  # it has said so
            os._exit(code)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with suppress(OSError):
            os.write(2, f"the process of GPU {rank} ended: {how}\n".encode())
        if code < 0:
            os.kill(os.getpid(), -code)
            time.sleep(1)
        os._exit(1)

    def share(self, value: Any) -> Any:
        self.order([pickle.dumps(value)] * len(self._channels))
        return value

    def agree(self) -> None:
        self.answers()

    def order(self, messages: Sequence[object]) -> None:
        for channel, message in zip(self._channels, messages, strict=True):
            try:
                channel.send(message)
            except EOFError:
                self._lost()

    def answers(self) -> list[Any]:
        """Return the next answer of each follower; raise the first exception. Tensors last until the next answer."""
        answers: list[Any] = []
        for channel in self._channels:
            try:
                answers.append(channel.receive())
            except EOFError:
                self._lost()
        for rank, answer in enumerate(answers, start=1):
            if isinstance(answer, BaseException):
                answer.add_note(f"(GPU {rank})")
                raise answer
        return answers

    def _lost(self) -> NoReturn:
        time.sleep(LOST_S)  # the watching thread ends this process
        raise EngineError("a process of another GPU ended")

    def dismiss(self) -> None:
        if not self._closing:
            self._closing = True
            for channel in self._channels:
                with suppress(EOFError):
                    channel.send(None)

    def close(self) -> None:
        """Let the followers end in order; kill the rest. Safe to call twice."""
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
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        self._processes, self._channels, self._files = [], [], []
        self._folder.cleanup()


def _visible(rank: int) -> dict[str, str]:
    """Return the environment in which GPU `rank` is the first. Its peers are visible, too."""
    if not torch.cuda.is_available():
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join([names[rank], *names[:rank], *names[rank + 1 :]])}


def _exit_code(error: BaseException) -> int:
    host = NO_HOST_MEMORY if is_out_of_memory(error) else 1
    return NO_GPU_MEMORY if isinstance(error, torch.OutOfMemoryError) else host
