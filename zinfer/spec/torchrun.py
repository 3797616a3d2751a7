"""Processes that torchrun has started on this host: rank 0 runs the command, the others compute for its worker.

They meet at a socket with a name that only processes of this host see, and that is gone with rank 0 (Linux: an abstract
one). Rank 0 hands its ends over to the worker, whose leader (`zinfer.engine.ranks`) tells each of the others what to
be: in place of the processes that it would start itself.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from zinfer.spec.errors import ZinferError

SOCKETS = "ZINFER_RANKS"  # environment variable: descriptors of the sockets to the ranks from 1 on
MEET_S = 60.0  # for all ranks to come
FIRST_S = 5.0  # for rank 0 to say what is wrong, before the others end
_NUMBER = struct.Struct("!I")


_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunError(ZinferError):
    """Processes that cannot be the ranks of one command."""


class Launch(NamedTuple):
    """This process's number among those that torchrun has started, and the name at which they meet."""

    rank: int
    size: int
    local: int  # of them on this host
    name: str

    def check(self, verb: str | None) -> None:
        """Raise TorchrunError for a verb that does not run on the ranks of torchrun, and for several nodes."""
        if self.local != self.size:
            raise TorchrunError(
                f"torchrun started {self.size} processes on several nodes, and a model runs on the GPUs of one host: "
                "docs/cluster.md says how to share out batches and sweeps"
            )
        if verb != "run":
            raise TorchrunError(
                f"torchrun is for `zinfer run`: start `zinfer {verb or '--help'}` by itself; a verb with --gpus "
                f"{self.size} starts the processes of its GPUs"
            )

    def meet(self) -> None:
        """Wait, as rank 0, for all others; the next `handed_over` has the sockets. Other programs that this process
        starts are none of torchrun's. Raises TorchrunError if the others do not come."""
        for name in _NAMES:
            os.environ.pop(name, None)
        found: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as board:
            try:
                board.bind(self.name)
                board.listen(self.size)
                board.settimeout(MEET_S)
                while len(found) < self.size - 1:
                    link, _ = board.accept()
                    if _is_own(link):
                        found[_NUMBER.unpack(_read(link, _NUMBER.size))[0]] = link
            except OSError as error:
                raise TorchrunError(f"{len(found) + 1} of torchrun's {self.size} processes came: {error}") from None
        os.environ[SOCKETS] = ",".join(str(link.detach()) for _, link in sorted(found.items()))

    def join(self) -> tuple[int, list[int]] | None:
        """Wait, as another rank, for the leader; take on the environment that it sends, and return the descriptors of
        the socket to it and of the memory that it shares. Return None if it ends without need of this rank. Raises
        TorchrunError where rank 0 does not come."""
        deadline = time.monotonic() + MEET_S
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(self.name)
                break
            except OSError:
                link.close()
                if time.monotonic() > deadline:
                    raise TorchrunError(f"rank 0 of torchrun did not come within {MEET_S:.0f} s") from None
                time.sleep(0.05)
        if not _is_own(link):
            raise TorchrunError("another user's process is in the place of torchrun's rank 0")
        link.sendall(_NUMBER.pack(self.rank))
        head, files, *_ = socket.recv_fds(link, _NUMBER.size, 8)
        if not head:
            return None
        os.environ.update(json.loads(_read(link, *_NUMBER.unpack(head))))
        return link.detach(), files


def launched() -> Launch | None:
    """Return this process's place among several that torchrun has started; None if it was not one of several. Raises
    TorchrunError for an environment that is none of torchrun's."""
    if any(name not in os.environ for name in _NAMES):
        return None
    size = os.environ["WORLD_SIZE"]
    numbers = [os.environ["RANK"], size, os.environ.get("LOCAL_WORLD_SIZE", size), os.environ["MASTER_PORT"]]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers):
        raise TorchrunError("RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_PORT are not the numbers of torchrun")
    rank, ranks, local, port = map(int, numbers)
    name = f"\0zinfer-{os.getuid()}-{port}-{os.environ.get('TORCHELASTIC_RUN_ID', '')[:40]}"
    return Launch(rank, ranks, local, name) if ranks > 1 else None


@contextmanager
def handed_over() -> Iterator[list[int]]:
    """Yield the descriptors of the sockets to other ranks, for a process that is started in the block; close them here
    afterwards. It gets their numbers in its environment."""
    sockets = _numbers(os.environ.get(SOCKETS, ""))
    try:
        yield sockets
    finally:
        os.environ.pop(SOCKETS, None)
        for one in sockets:
            os.close(one)


def taken() -> list[int]:
    """Return the descriptors of the sockets to the ranks from 1 on, once; none if torchrun has started none."""
    return _numbers(os.environ.pop(SOCKETS, ""))


def invite(descriptor: int, environment: Mapping[str, str], files: Sequence[int]) -> None:
    """Have a rank be a follower, with variables of the environment and memory to share. Raises OSError if it is
    gone."""
    told = json.dumps(dict(environment)).encode()
    with socket.socket(fileno=os.dup(descriptor)) as link:
        socket.send_fds(link, [_NUMBER.pack(len(told))], files)
        link.sendall(told)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def _is_own(link: socket.socket) -> bool:
    """Tell whether the process at the other end is this user's."""
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", peer)[1] == os.getuid())


def _read(link: socket.socket, size: int) -> bytes:
    """Return `size` bytes. Raises OSError if the other end is gone before."""
    found = b""
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise ConnectionResetError("one ended")
        found += more
    return found
