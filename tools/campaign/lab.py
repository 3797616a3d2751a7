"""Laboratory of a campaign: a model, a user's folder, undisturbed runs, and the room in which one case takes place."""

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.campaign import judge, shim
from tools.campaign.shim import Shim
from tools.campaign.subject import Ended, Subject, alive, environment, kill

PATIENCE_S = 120.0  # after which a process hangs
GRACE_S = 10.0  # for processes to follow their parent


class Stopped(Exception):
    """The campaign is being ended, and starts nothing more."""


@dataclass
class Result:
    """Result of a case: faults found, and the number of disturbances that struck."""

    name: str
    number: int
    faults: list[str] = field(default_factory=list)
    struck: int = 0
    skipped: str = ""  # why there was nothing to try
    seconds: float = 0.0
    tale: list[str] = field(default_factory=list)  # what was done, for a repeat

    @property
    def held(self) -> bool:
        return not self.faults


class Lab:
    """State that all cases share. `root` holds the model and the folder of a user, `bench`; cases get copies of it."""

    def __init__(self, root: Path, seed: int, library: Path | None = None) -> None:
        self.root, self.seed, self.library = root, seed, library  # of the shim; None without a compiler
        self.model, self.bench = root / "models" / "llama", root / "bench"
        self.normals: dict[str, Normal] = {}  # undisturbed runs by the names of commands
        self.texts: dict[str, str] = {}  # of `zinfer run` after the prompts of `tools.campaign.serve`
        self.stopped = False

    def dice(self, name: str, number: int) -> random.Random:
        """Return the dice of a case: the same for the same seed, class and number."""
        return random.Random(f"{self.seed}/{name}/{number}")


class Room:
    """Folders of one case: `work`, where the user is, with `tmp`, `home` and `drive` beside it. All are removed at the
    end. With `cold`, nothing has been compiled before."""

    def __init__(self, lab: Lab, name: str, keep: bool = False, cold: bool = False) -> None:
        self.lab, self._keep = lab, keep
        self.root = lab.root / "rooms" / name
        self.work = self.root / "work"
        for folder in ("tmp", "home", "drive"):
            (self.root / folder).mkdir(parents=True)
        self._papers = lab.root / "papers" / name  # of the harness: no fault strikes there
        self._papers.mkdir(parents=True)
        shutil.copytree(lab.bench, self.work, symlinks=True)
        if not cold and (cache := lab.root / "cache").is_dir():
            shutil.copytree(cache, self.root / "home" / ".cache")
        self.shim = None if lab.library is None else Shim(lab.library, self._papers / "page")
        self._count = 0
        self.tale: list[str] = []

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_error: object) -> None:
        self.reap(0)
        if not self._keep:
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.rmtree(self._papers, ignore_errors=True)

    def start(self, words: Sequence[str], armed: bool = False, folder: Path | None = None, **settings: Any) -> Subject:
        """Start zinfer in the user's folder, `armed` with the shim; settings as `Subject` has them."""
        if self.lab.stopped:
            raise Stopped
        self._count += 1
        words = [self.fill(word) for word in words]
        self.tale.append("zinfer " + " ".join(words))
        variables = environment(self.root) | (self.shim.environment if armed and self.shim else {})
        return Subject(words, folder or self.work, variables, self._papers / str(self._count), **settings)

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
        """Return this room's files, without the cache."""
        names = set()
        for path in self.root.rglob("*"):
            name = str(path.relative_to(self.root))
            if name.startswith("tmp/torchinductor_"):
                continue  # an empty folder of torch
            if name.startswith("tmp/") and path.is_file() and b"blat".startswith(path.read_bytes()[:5]):
                continue  # Python's own test whether the folder can be written
            inside = not name.startswith("home/.cache") and (not path.is_dir() or path.is_symlink())
            names |= {name} if inside or name.startswith(("tmp/", "drive/")) else set()
        return names

    def reap(self, grace: float = GRACE_S) -> dict[int, str]:
        """Wait for processes that lost their parent; end those that go on, and return their command lines."""
        deadline = time.monotonic() + grace
        while alive(self.root) and time.monotonic() < deadline:
            time.sleep(0.05)
        return kill(self.root)


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

    def next(self, room: Room) -> tuple[str, ...]:
        """Return the words of the next start; it goes on with records."""
        return self.words + (self.again if any((room.work / name).exists() for name in self.grows) else ())


@dataclass(frozen=True)
class Normal:
    """An undisturbed run: what came out, its files, its seconds, operations on files, and bytes written."""

    outcome: Any
    files: frozenset[str]
    contents: Mapping[str, bytes]
    seconds: float
    operations: int = 0
    reads: int = 0
    written: int = 0


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Return the files below `folder` that match a pattern, by path."""
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def undisturbed(lab: Lab, verb: Verb) -> Normal:
    """Run a verb twice without disturbance. Raises RuntimeError if it fails or gives two results."""
    normals: list[Normal] = []
    for attempt in range(2):
        with Room(lab, f"normal-{verb.name}-{attempt}") as room:
            if room.shim:
                room.shim.arm(shim.COUNT, [room.root], kinds=shim.CHANGES if attempt else shim.READS | shim.OPENS)
            ended = room.run(verb.words, PATIENCE_S, stdin=verb.stdin, armed=True)
            problems = judge.words(ended) + judge.processes(room.reap())
            if ended.code != 0 or problems:
                raise RuntimeError(f"undisturbed `{verb.name}`: {ended.code} {problems} {ended.output[-2000:]}")
            counts = [0, 0, 0]
            if room.shim:
                counts = [room.shim.operations, normals[0].operations if normals else 0, room.shim.written]
            files = frozenset(room.files()), contents(room.work, *verb.at_once)
            normals.append(Normal(verb.outcome(room, ended), *files, ended.seconds, *counts))
    if problems := judge.equal(normals[1].outcome, normals[0].outcome, f"undisturbed runs of `{verb.name}`"):
        raise RuntimeError("; ".join(problems))
    return normals[1]
