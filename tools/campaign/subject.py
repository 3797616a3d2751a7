"""Processes of zinfer, as a user starts them."""

import os
import pty
import signal
import site
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """End of a process: its exit code as a shell shows it (None if it took too long), its output, and its seconds."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")


class Subject:
    """One running zinfer. Its output is in `papers`, or, with a `terminal` of its own, `Ended.stdout`."""

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
        before: Callable[[], None] | None = None,
    ) -> None:
        self._papers, self._home, self._began = papers, Path(environment["HOME"]), time.monotonic()
        papers.mkdir(parents=True, exist_ok=True)
        (papers / "stdin").write_text(stdin)
        (papers / "stderr").touch()
        self._screen: threading.Thread | None = None
        if terminal:
            master, slave = pty.openpty()
            termios.tcsetwinsize(slave, (24, 80))
            self._screen = threading.Thread(target=_copy, args=(master, papers / "stdout"), daemon=True)
            self._screen.start()
            streams = [slave]
        else:
            paths = (stdout or papers / "stdout", papers / "stderr")
            streams = [os.open(papers / "stdin", os.O_RDONLY)]
            streams += [os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) for path in paths]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zinfer", *words], cwd=folder, env=environment, start_new_session=True,
            stdin=streams[0], stdout=streams[len(streams) // 2], stderr=streams[-1], preexec_fn=before,
        )  # fmt: skip
        self.pid = self._process.pid
        for stream in streams:
            os.close(stream)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for its end; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def signal(self, number: int, group: bool = False) -> bool:
        """Send a signal to the process, or to its group. Return False if it has ended."""
        if self.wait(0):
            return False
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        return True

    def victims(self) -> dict[int, str]:
        """Return the command lines of what it started, except shells."""
        others = {pid: words for pid, words in alive(self._home).items() if pid != self.pid}
        return {pid: words for pid, words in others.items() if os.path.basename(words.split(" ")[0]) != "sh"}

    @property
    def said(self) -> str:
        """Text on stderr so far, of one without a terminal."""
        return (self._papers / "stderr").read_text(errors="replace")

    def end(self, seconds: float) -> Ended:
        """Wait for its end, at most so long. One that takes longer tells where its threads are, and is killed."""
        ended = self.wait(seconds)
        took = time.monotonic() - self._began
        if not ended:
            kill(self._home, signal.SIGABRT)  # whose handler is Python's: PYTHONFAULTHANDLER
            time.sleep(1)
            kill(self._home)
        code = self._process.wait()
        if self._screen is not None:
            self._screen.join(10)
        stdout = (self._papers / "stdout").read_text(errors="replace") if (self._papers / "stdout").exists() else ""
        return Ended((128 - code if code < 0 else code) if ended else None, stdout, self.said, took)


def _copy(master: int, path: Path) -> None:
    """Write what a terminal shows into a file."""
    with path.open("wb") as file, suppress(OSError):
        while more := os.read(master, 1 << 16):
            file.write(more)
    os.close(master)


def alive(folder: Path) -> dict[int, str]:
    """Return the processes whose environment names a folder, with their command lines."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.fsencode(folder) in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    processes[int(entry.name)] = words
    return processes


def kill(folder: Path, number: int = signal.SIGKILL) -> dict[int, str]:
    """Send a signal to all processes whose environment names a folder; return them."""
    processes = alive(folder)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    return processes


def python_path() -> str:
    """Return PYTHONPATH for a process in any folder: this checkout, then the campaign's own entries."""
    inherited = os.environ.get("PYTHONPATH", "")
    entries = [os.path.abspath(entry) for entry in inherited.split(os.pathsep)] if inherited else []
    return os.pathsep.join(dict.fromkeys([str(ROOT), *entries]))


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a user's processes: few variables, folders below `root`."""
    kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "LANG") if key in os.environ}
    fixed = {"COLUMNS": "80", "TERM": "xterm", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    fixed |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    fixed |= {"PYTHONPATH": python_path(), "PYTHONUSERBASE": site.getuserbase(), "PYTHONFAULTHANDLER": "1"}
    return kept | fixed | {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp")}
