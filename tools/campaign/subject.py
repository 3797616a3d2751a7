"""Processes of zinfer, forked in a fortieth of the usual time.

Importing torch and transformers takes seconds, so the campaign imports them once and forks: the child gets the words,
folder, environment, group and terminal of a new process and runs `zinfer.__main__.main`. The processes that zinfer
itself starts as ``python -m zinfer...`` (its workers) are forked from it in the same way, by a `subprocess.Popen` that
keeps everything else: real pipes, real sessions, real kills. With `ordinary` all of them are executed instead.
"""

import atexit
import faulthandler
import fcntl
import io
import os
import pty
import select
import signal
import site
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from zinfer.system import ending

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "tokenizers", "safetensors.torch",
    "zinfer.engine.stream.engine", "zinfer.engine.accelerate", "zinfer.worker.server", "zinfer.worker.tasks",
    "zinfer.worker.generation", "zinfer.worker.measure", "zinfer.worker.probe", "zinfer.worker.prefix_reuse",
    "zinfer.worker.teacher_forcing", "zinfer.engine.stream.weights.packed", "zinfer.commands.watch",
    "zinfer.commands.out", "zinfer.job.accuracy", "zinfer.job.batch.run", "zinfer.analysis.best", "rich.table",
    "accelerate", "zinfer.generation.chat", "zinfer.generation.scheduler", "zinfer.job.serve.server",
    "zinfer.job.batch.packing", "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto",
    "uvicorn.loops.auto", "uvicorn.loops.asyncio", "uvicorn.lifespan.off", "zinfer.__main__",
)  # fmt: skip
DRAWING = ("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "zinfer.report.plot.figures",
           "zinfer.report.page", "zinfer.report.measured", "zinfer.report.predicted")  # fmt: skip
STACKS = "stacks-"  # beginning of the names of files in `papers`, one for each process
EXECUTED = ("zinfer.engine.rank",)  # modules that no fork replaces: they take descriptors, and join a process group


def preload() -> None:
    """Import what the commands import, with one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    for module in (*PRELOADED, *DRAWING):
        with suppress(ImportError):
            import_module(module)
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)
        torch.ones(64, 64) @ torch.ones(64, 64)  # libraries that load at the first product
    from zinfer.cli import VERBS

    for verb in VERBS:
        with suppress(ImportError):
            import_module(f"zinfer.commands.{verb}")


@dataclass(frozen=True)
class Ended:
    """End of a process: its exit code as a shell shows it (None if it had to be stopped for taking too long), its
    output, and the seconds it took; for one that had to be stopped, the place where each of its threads was."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    stacks: str = ""

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")


class Subject:
    """One running zinfer. `words` are its arguments; stdout and stderr go to files in `papers`.

    With `terminal` it has a terminal of its own instead, whose output is `Ended.stdout`. `enter` runs in the child
    before anything else, to set limits, say.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        papers: Path,
        *,
        stdin: str = "",
        stdout: str | None = None,
        terminal: bool = False,
        ordinary: bool = False,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        environment = {**environment, "PYTHONPATH": python_path(), "PYTHONUSERBASE": site.getuserbase()}
        self._papers, self._began = papers, time.monotonic()
        self._screen = bytearray()
        self._master = -1
        papers.mkdir(parents=True, exist_ok=True)
        (papers / "stdin").write_text(stdin)
        ends: list[int] = []
        if terminal:
            self._master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\0\x50\0\0\0\0\0")  # 24 rows of 80
            ends = [slave, slave, slave]
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            ends = [
                os.open(papers / "stdin", os.O_RDONLY),
                os.open(stdout or papers / "stdout", flags, 0o600),
                os.open(papers / "stderr", flags, 0o600),
            ]
        (papers / "stdout").touch()
        (papers / "stderr").touch()
        if ordinary:
            self.pid = _execute(words, folder, environment, ends, enter)
        else:
            self.pid = _fork()
            if self.pid == 0:
                _become(["zinfer", *words], folder, environment, ends, enter, terminal, papers)
        for end in {*ends}:
            os.close(end)
        self._watched = os.pidfd_open(self.pid)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for its end, reading its terminal meanwhile; return whether it has ended."""
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._watched, select.POLLIN)
        if self._master >= 0:
            ready.register(self._master, select.POLLIN)
        while True:
            left = max(0.0, deadline - time.monotonic())
            events = dict(ready.poll(left * 1e3))
            if self._master in events and not self._read():
                ready.unregister(self._master)
            if self._watched in events:
                return True
            if left <= 0:
                return False

    def _read(self) -> bool:
        try:
            more = os.read(self._master, 1 << 16)
        except OSError:  # nobody has the other end
            more = b""
        self._screen += more
        return bool(more)

    @property
    def screen(self) -> str:
        return self._screen.decode(errors="replace")

    def signal(self, number: int, group: bool = False) -> bool:
        """Send a signal to the process, or to its group. Return False if it has ended."""
        if self.wait(0):
            return False
        with suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        return True

    def victims(self, name: str = "") -> list[int]:
        """Return the computing processes below it."""
        pids = []
        for process in descendants(self.pid):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                if name.encode() in words if name else os.path.basename(words.split(b"\0")[0]) != b"sh":
                    pids.append(process)
        return pids

    @property
    def said(self) -> str:
        """Text on stderr so far, of one without a terminal."""
        return (self._papers / "stderr").read_text(errors="replace")

    def end(self, seconds: float) -> Ended:
        """Wait for its end, at most so long, and return it. One that takes longer is killed with all it started."""
        ended = self.wait(seconds)
        took = time.monotonic() - self._began
        stacks = ""
        if not ended:
            stacks = stacks_of([self.pid, *descendants(self.pid)], self._papers)
            for child in (*descendants(self.pid), self.pid):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._watched)
        if self._master >= 0:
            os.set_blocking(self._master, False)
            while True:
                with suppress(BlockingIOError):
                    if self._read():
                        continue
                break
            os.close(self._master)
        code = os.waitstatus_to_exitcode(status)
        shown = (128 - code if code < 0 else code) if ended else None
        stdout, stderr = ((self._papers / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
        if self._master >= 0:
            stdout, stderr = self.screen, ""
        return Ended(shown, stdout, stderr, took, stacks)


def stacks_of(processes: Sequence[int], papers: Path) -> str:
    """Return where the threads of `processes` are.

    Forked ones write it at SIGUSR1, which ends the others.
    """
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    time.sleep(1)
    return "\n".join(path.read_text(errors="replace") for path in sorted(papers.glob(f"{STACKS}*")))


def descendants(process: int) -> list[int]:
    """Return the processes below `process`, parents first, without those that have ended."""
    processes = [process]
    for parent in processes:
        processes += children_of(parent)
    return processes[1:]


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`, without those that have ended."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and fields[0] not in "ZX":
                    children.append(int(entry))
    return children


_HELD = {signal.SIGINT, signal.SIGTERM}
_papers: Path | None = None  # folder of the harness for this forked process and those that it forks


def _tell_stacks() -> None:
    """Write this process's stacks into a file at SIGUSR1."""
    if _papers is not None:
        file = os.open(_papers / f"{STACKS}{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _fork() -> int:
    """Fork. Signals wait in the child until it unblocks them, and in this process while Python's own functions at a
    fork run: an exception in one of them, which a process that executes another never has, would leave a lock taken."""
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in _HELD}
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            os.kill(os.getpid(), number)
    return pid


def _execute(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], ends: Sequence[int], enter: Callable[[], None]
) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.chdir(folder)
            _take(ends)
            enter()
            os.execve(sys.executable, [sys.executable, "-m", "zinfer", *words], dict(environment))
        finally:
            os._exit(98)
    return pid


def python_path() -> str:
    """Return PYTHONPATH for an executed process: this checkout, then the campaign's own entries, absolute, for the
    process runs in another folder."""
    inherited = os.environ.get("PYTHONPATH", "")
    entries = [os.path.abspath(entry) for entry in inherited.split(os.pathsep)] if inherited else []
    return os.pathsep.join(dict.fromkeys([str(ROOT), *entries]))


def _take(ends: Sequence[int]) -> None:
    """Make `ends` the standard streams, and close everything else."""
    kept = [os.dup(end) for end in ends]
    for number, end in enumerate(kept):
        os.dup2(end, number)
    os.closerange(3, 4096)


def _become(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    ends: Sequence[int],
    enter: Callable[[], None],
    terminal: bool,
    papers: Path,
) -> NoReturn:
    """Turn this forked process into `zinfer`."""
    global _papers
    try:
        os.setsid()
        os.chdir(folder)
        _take(ends)
        _papers = papers
        _tell_stacks()
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _renew(words, environment)
        from zinfer.__main__ import _interrupted, main

        for number in (signal.SIGINT, signal.SIGTERM):  # as its first lines do
            signal.signal(number, _interrupted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        subprocess.Popen = _ForkingPopen  # type: ignore[misc]
        enter()
    except BaseException:
        traceback.print_exc()
        os._exit(97)
    _end_with(main)


def _renew(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set what a new interpreter would have: signals, environment, arguments, streams."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words)
    sys.modules["__main__"].__package__ = None  # by which click names the program
    tempfile.tempdir = None
    ending._callbacks.clear()  # of the process that this one was forked from
    ending._ending = False
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    for name, end, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw: Any = io.FileIO(end, mode, closefd=False)
        buffer: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        errors = "surrogateescape" if name == "stdin" else "backslashreplace" if name == "stderr" else "strict"
        stream = io.TextIOWrapper(
            buffer, "utf-8", errors, line_buffering=name == "stderr" or os.isatty(end), write_through=name == "stderr"
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end_with(main: Callable[[], None]) -> NoReturn:
    """Run `main` and end this process, whatever happens: nothing may return into the campaign it was forked from."""
    try:
        _run_to_the_end(main)
    finally:
        os._exit(120)


def _run_to_the_end(main: Callable[[], None]) -> NoReturn:
    """Run `main`, then end as the interpreter does: threads, functions of `atexit`, streams, exit code."""
    code, interrupted = 0, False
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        interrupted = True
    except BaseException:
        traceback.print_exc()
        code = 1
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException:
            print(f"Exception ignored at the end\n{traceback.format_exc()}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
            print("Exception ignored while flushing sys.stdout", file=sys.stderr)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


class _ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks ``python -m zinfer`` instead of executing it."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        command = [os.fspath(part) for part in args] if isinstance(args, list | tuple) else []
        ours = command[:2] == [sys.executable, "-m"] and command[2].split(".")[0] == "zinfer"
        if not ours or command[2] in EXECUTED:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        names = _PARAMETERS[: len(rest)]
        given = dict(zip(names, rest, strict=True))
        streams = [
            given[end] if given[end] != -1 else number for number, end in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        sys.stdout.flush()
        started, starting = os.pipe()  # closed by the child where it would execute the program, as in the real Popen
        pid = _fork()
        if pid == 0:
            try:
                if given["start_new_session"]:
                    os.setsid()
                elif given["process_group"] >= 0:
                    os.setpgid(0, given["process_group"])
                if given["cwd"] is not None:
                    os.chdir(given["cwd"])
                _take(streams)  # closes `starting`: from here on the child has its session
                _tell_stacks()
                _renew([command[2], *command[3:]], dict(os.environ if given["env"] is None else given["env"]))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
                if given["preexec_fn"] is not None:
                    given["preexec_fn"]()
                name = command[2] if command[2] != "zinfer" else "zinfer.__main__"
                main = import_module(name).main
            except BaseException:
                traceback.print_exc()
                os._exit(97)
            _end_with(main)
        self.pid = pid
        self._child_created = True
        os.close(starting)
        try:
            os.read(started, 1)
        finally:
            os.close(started)
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


_PARAMETERS = (
    "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell",
    "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid", "gids", "uid",
    "umask", "start_new_session", "process_group",
)  # fmt: skip
