"""Laboratory of a campaign: models, a user's folder, undisturbed runs, and the room in which one case takes place."""

import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.campaign import judge
from tools.campaign.shim import Shim
from tools.campaign.subject import Ended, Subject, children_of

PATIENCE_S = 60.0  # after which a process hangs
GRACE_S = 10.0  # for processes to follow their parent
SLOW_S = 120.0  # for a compiler, or a worker that Ray was starting: they end by themselves
COMPILERS = ("cc", "gcc", "cc1", "as", "ld", "collect2", "clang")
RAYS_START = "/ray/_private/workers/default_worker.py"  # in the command line of a worker of Ray that has no work yet


@dataclass
class Result:
    """Result of a case: faults found, the number of disturbances that struck, and those that no judge can see."""

    name: str
    number: int
    faults: list[str] = field(default_factory=list)
    struck: int = 0
    skipped: str = ""  # why there was nothing to try
    blind: int = 0  # damages that cannot be told from data
    seconds: float = 0.0
    tale: list[str] = field(default_factory=list)  # what was done, for a repeat

    @property
    def held(self) -> bool:
        return not self.faults


class Lab:
    """State that all cases share. `root` holds models and the folder of a user, `bench`; cases get copies of it."""

    def __init__(self, root: Path, seed: int, shim: Shim | None, ordinary_share: float = 0.0) -> None:
        self.root, self.seed, self.shim, self.ordinary_share = root, seed, shim, ordinary_share
        self.model = root / "models" / "llama"
        self.bench = root / "bench"
        self.normals: dict[tuple[str, ...], Normal] = {}  # undisturbed runs by their words
        self.notes: dict[str, Any] = {}

    def dice(self, name: str, number: int) -> random.Random:
        """Return the dice of a case: the same for the same seed, class and number."""
        return random.Random(f"{self.seed}/{name}/{number}")


class Room:
    """Folders of one case: `work`, where the user is, with `tmp`, `home` and `drive` beside it. All are removed at the
    end. With `cold`, nothing has been compiled before."""

    def __init__(self, lab: Lab, name: str, keep: bool = False, cold: bool = False) -> None:
        self.lab, self._keep = lab, keep
        self.root = lab.root / "rooms" / f"{name}-{os.getpid()}"
        shutil.rmtree(self.root, ignore_errors=True)
        self.work = self.root / "work"
        for folder in ("tmp", "home", "drive"):
            (self.root / folder).mkdir(parents=True)
        self._papers = self.root.with_name(f"{self.root.name}-papers")  # of the harness: no fault strikes there
        shutil.rmtree(self._papers, ignore_errors=True)
        shutil.copytree(lab.bench, self.work, symlinks=True)
        if not cold and (cache := lab.root / "cache").is_dir():
            shutil.copytree(cache, self.root / "home" / ".cache")
        self._count = 0
        self.ordinary = False  # execute the next processes instead of forking them
        self.tale: list[str] = []

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_error: object) -> None:
        self.reap(0)
        if not self._keep:
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.rmtree(self._papers, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the user's processes: few variables, folders of this room."""
        kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "LANG") if key in os.environ}
        fixed = {"COLUMNS": "80", "TERM": "xterm", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        fixed |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
        fixed |= {"RAY_TMPDIR": str(self.lab.root), "RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}  # sockets have short names
        return kept | fixed | {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp")}

    def start(self, words: Sequence[str], **settings: Any) -> Subject:
        """Start zinfer with `words` in the user's folder; settings as `Subject` has them."""
        self._count += 1
        words = [self.fill(word) for word in words]
        self.tale.append("zinfer " + " ".join(words))
        papers = self._papers / str(self._count)
        shim, enter = self.lab.shim, settings.pop("enter", None)
        armed = settings.pop("armed", False)

        def begin() -> None:
            if armed and shim is not None:
                shim.enter()
            if enter is not None:
                enter()

        ordinary = settings.pop("ordinary", self.ordinary and not armed)
        work = settings.pop("folder", self.work)
        return Subject(words, work, self.environment, papers, ordinary=ordinary, enter=begin, **settings)

    def run(self, words: Sequence[str], seconds: float = PATIENCE_S, **settings: Any) -> Ended:
        """Run zinfer to its end."""
        ended = self.start(words, **settings).end(seconds)
        self.say(ended)
        return ended

    def say(self, ended: Ended) -> None:
        self.tale.append(f"  -> {ended.code} in {ended.seconds:.2f} s; {ended.last_line[:300]}")

    def fill(self, word: str) -> str:
        """Return an argument with the names of folders filled in: MODEL, DRIVE."""
        return word.replace("MODEL", str(self.lab.model)).replace("DRIVE", str(self.root / "drive"))

    def files(self) -> set[str]:
        """Return this room's files, without the harness and the cache."""
        names = set()
        for path in self.root.rglob("*"):
            name = str(path.relative_to(self.root))
            if name.startswith("tmp/torchinductor_"):
                continue  # an empty folder of torch
            if name.startswith("tmp/") and path.is_file() and b"blat".startswith(path.read_bytes()[:5]):
                continue  # Python's own test whether the folder can be written
            inside = not name.startswith("home/.cache") and (not path.is_dir() or path.is_symlink())
            if inside or name.startswith(("tmp/", "drive/")):
                names.add(name)
        return names

    def reap(self, grace: float = GRACE_S) -> dict[int, str]:
        """Wait for processes that lost their parent; end those that go on, and return their command lines."""
        began = time.monotonic()
        while left := children_of(os.getpid()):
            commands = [_command(child) for child in left]
            slow = [_ends_by_itself(command) for command in commands if not command.startswith(judge.RAYS_AGENTS)]
            patience = grace + SLOW_S if grace and slow and all(slow) else grace
            if time.monotonic() - began > patience:
                break
            _bury()
            time.sleep(0.02)
        commands_left = {}
        for child in left:
            if words := _command(child):
                commands_left[child] = words
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if left:
            time.sleep(0.02)
            commands_left |= self.reap(0)
        _bury()
        return commands_left


def _command(process: int) -> str:
    """Return the command line of a process, or its name. Empty if it has ended."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return text.strip() or Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _ends_by_itself(command: str) -> bool:
    """Tell whether a process ended, compiles, or is Ray's starting worker."""
    program = os.path.basename(command.partition(" ")[0])
    return not command or program in COMPILERS or RAYS_START in command


def _bury() -> None:
    """Wait for ended children that nobody waits for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@dataclass(frozen=True)
class Verb:
    """One command under test, in the folder of the bench.

    `outcome` returns what must be equal to an undisturbed run, from the room and its end; `grows` names files of
    records, which only grow, `at_once` globs of files that are written at once. `again` goes on after a kill.
    """

    name: str
    words: tuple[str, ...]
    outcome: Callable[[Room, Ended], Any]
    again: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()
    at_once: tuple[str, ...] = ()
    stdin: str = ""
    keeps: tuple[str, ...] = ()  # globs of files that may be there besides, such as copies of torn lines
    replaces: bool = False  # each file of `at_once` takes the place of an earlier one, whatever that holds
    good: Callable[[bytes], bool] | None = None  # tells a whole file of `at_once` where no two runs give equal ones
    chain: int = 1  # most disturbances before the last start
    executed: bool = False  # executed always, for what it starts cannot be forked
    victims: str = ""  # part of the command lines of those below it that may be killed
    codes: tuple[int, ...] = (0,)
    needs: str = ""  # package without which there is nothing to try

    @property
    def missing(self) -> bool:
        """True if the package that it needs is not installed."""
        return bool(self.needs) and find_spec(self.needs) is None

    @property
    def next(self) -> tuple[str, ...]:
        return (*self.words, *self.again)


@dataclass(frozen=True)
class Normal:
    """An undisturbed run: what came out, its files, the seconds it takes, its operations on files, and the bytes that
    it writes."""

    outcome: Any
    files: frozenset[str]
    contents: Mapping[str, bytes]
    code: int
    seconds: float
    operations: int = 0
    reads: int = 0
    written: int = 0  # bytes


def digest(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """Return a hash of each file below `folder` by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def contents(room: Room, verb: Verb) -> dict[str, bytes]:
    """Return the files that a verb writes at once, by path."""
    files = {}
    for pattern in verb.at_once:
        for path in sorted(room.work.glob(pattern)):
            if path.is_file():
                files[str(path.relative_to(room.work))] = path.read_bytes()
    return files


def undisturbed(lab: Lab, verb: Verb) -> Normal:
    """Run a verb twice without disturbance. Raises RuntimeError if it fails or gives two results."""
    from tools.campaign import shim as faults

    normals: list[Normal] = []
    armed = lab.shim is not None and not verb.executed
    for attempt in range(2):
        with Room(lab, f"normal-{verb.name}") as room:
            room.ordinary = verb.executed
            if lab.shim is not None and armed:
                kinds = faults.CHANGES if attempt else faults.READS | faults.OPENS
                lab.shim.arm(faults.COUNT, [room.root], kinds=kinds)
            ended = room.run(verb.words, PATIENCE_S * (5 if verb.executed else 1), stdin=verb.stdin, armed=armed)
            problems = judge.words(ended) + judge.processes(room.reap())
            if ended.code not in verb.codes or problems:
                raise RuntimeError(f"undisturbed `{verb.name}`: {ended.code} {problems} {ended.output[-2000:]}")
            outcome, operations = verb.outcome(room, ended), lab.shim.operations if armed and lab.shim else 0
            reads = normals[0].operations if normals else 0
            written = lab.shim.written if armed and lab.shim else 0
            files, texts = frozenset(room.files()), contents(room, verb)
            normals.append(Normal(outcome, files, texts, ended.code or 0, ended.seconds, operations, reads, written))
    if problems := judge.equal(normals[1].outcome, normals[0].outcome, f"undisturbed runs of `{verb.name}`"):
        raise RuntimeError("; ".join(problems))
    return normals[1]
