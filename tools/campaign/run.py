"""A campaign from its start to its table: classes, jobs, counts."""

import ctypes
import json
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tools.campaign import damage, disks, kills, plants, record, serve, subject, verbs, weights
from tools.campaign.lab import Lab, Result, Verb
from tools.campaign.shim import Shim

Case = Callable[[Lab, int, bool], Result]
CLASSES: dict[str, Case] = {**kills.CLASSES, **disks.CLASSES, **damage.CLASSES, **serve.CLASSES, **weights.CLASSES}
MANY = 3  # damaged inputs for each kill: they are quick
FEW = {"kill-ranks": 3, "kill-cluster": 5, "kill-ray": 15, "serve-crowd": 3}  # kills for each case of a slow class
OVERTIME_S = 120.0  # for the cases under way when the time is up; those that then still run are not counted
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>


def titles() -> dict[str, str]:
    """Return what each class does, in a line."""
    return {name: record.title(name) for name in CLASSES}


def chosen(wanted: str | None) -> list[str]:
    """Return the names of the classes that `wanted` names, or begins. Raises UsageError for a name of none."""
    if not wanted:
        return list(CLASSES)
    classes: list[str] = []
    for part in wanted.split(","):
        matches = [name for name in CLASSES if name == part] or [name for name in CLASSES if name.startswith(part)]
        if not matches:
            raise click.UsageError(f"no class {part!r}: {', '.join(CLASSES)}")
        classes += matches
    return [*dict.fromkeys(classes)]


def prepare(root: Path, seed: int, ordinary: float) -> Lab:
    """Return a laboratory in `root`, which forks the cases."""
    try:
        shim: Shim | None = Shim()
    except (LookupError, OSError):
        shim = None
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    lab = Lab(root, seed, shim, ordinary)
    os.environ |= {"HOME": str(root / "home"), "TMPDIR": str(root)}
    (root / "home").mkdir(parents=True, exist_ok=True)
    subject.preload()
    verbs.furnish(lab)
    verbs.warm_up(lab)
    return lab


def campaign(
    seed: int,
    names: Sequence[str],
    numbers: Iterable[int],
    jobs: int,
    minutes: float | None,
    ordinary: float,
    output: Path | None,
    tell: bool = False,
) -> int:
    """Run the cases, print faults and table, append the record. Return 1 if a case failed.

    SIGINT, SIGTERM, and the end of the time (`minutes` and OVERTIME_S) end the cases under way. These are not counted;
    the record of the others is written all the same, and says how many were planned. Returns 128 and the number of a
    signal.
    """
    began = time.monotonic()
    root = Path(os.environ.get("ZINFER_CAMPAIGN_ROOT") or tempfile.mkdtemp(prefix="zinfer-campaign-"))
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        lab = prepare(root, seed, ordinary)
        _undisturbed(lab, [*dict.fromkeys(verb for name in names for verb in _verbs(name))], jobs)
        _furnish(lab, names)
        click.echo(f"prepared in {time.monotonic() - began:.0f} s; {'with' if lab.shim else 'without'} shim", err=True)
        cases = _cases(names, numbers, tell)
        results: list[Result] = []
        with _Stop(minutes) as stop:
            for result in _spread(lab, cases, jobs, stop, tell):
                results.append(result)
                _show(result, seed, tell)
                if len(results) % 100 == 0:
                    click.echo(f"{len(results)} of {len(cases)} cases in {time.monotonic() - began:.0f} s", err=True)
            run = record.Campaign.of(results, seed, time.monotonic() - began, len(cases))
            click.echo(run.table())
            if output is not None:
                from zinfer.record import study

                study.append(output, run)
        if stop.signal:
            return 128 + stop.signal
        return 0 if run.rows and all(row.held == row.tried for row in run.rows) else 1
    finally:
        _end_all(())
        if not tell:
            shutil.rmtree(root, ignore_errors=True)
        else:
            click.echo(f"kept: {root}", err=True)


def prove(seed: int, jobs: int) -> int:
    """Plant each fault and print whether the judges see it. Return 1 if they miss one."""
    root = Path(os.environ.get("ZINFER_CAMPAIGN_ROOT") or tempfile.mkdtemp(prefix="zinfer-campaign-"))
    missed = 0
    try:
        lab = prepare(root, seed, 0.0)
        names = [*dict.fromkeys(plant.seen_by for plant in plants.PLANTS)]
        _undisturbed(lab, [*dict.fromkeys(verb for name in names for verb in _verbs(name))], jobs)
        _furnish(lab, names)
        for plant in plants.PLANTS:
            lab.plant = plant.plant
            with _Stop(None) as stop:
                results = [*_spread(lab, _cases([plant.seen_by], range(plant.cases)), jobs, stop, False)]
            faults = [fault for result in results for fault in result.faults]
            blind = [word for word in plant.words if not any(word in fault for fault in faults)]
            click.echo(
                f"{'MISSED' if blind else 'seen'}: {plant.fault} {sum(not result.held for result in results)} of "
                f"{len(results)} cases of {plant.seen_by} fail" + "".join(f", none says {word!r}" for word in blind)
            )
            click.echo("\n".join(f"  {fault[:200]}" for fault in faults[:3]))
            missed += bool(blind)
        return int(missed > 0)
    finally:
        _end_all(())
        shutil.rmtree(root, ignore_errors=True)


def _furnish(lab: Lab, names: Sequence[str]) -> None:
    damage.furnish(lab, names)
    if {*names} & {*serve.CLASSES, *weights.CLASSES}:
        serve.furnish(lab)


def _cases(names: Sequence[str], numbers: Iterable[int], tell: bool = False) -> list[tuple[str, int]]:
    """Return the cases of classes by name and number; with `tell` no class has more or fewer than the others."""
    cases = []
    for number in numbers:
        for name in names:
            many, few = (1, 1) if tell else (MANY if name in damage.CLASSES else 1, FEW.get(name, 1))
            if number % few == 0:
                cases += [(name, many * number // few + part) for part in range(many)]
    return cases


def _verbs(name: str) -> list[Verb]:
    """Return the commands whose undisturbed runs a class compares with."""
    if name in kills.CLASSES or name in disks.CLASSES:
        return disks.verbs_of(name)
    return [verbs.VERBS[verb] for verb in {**damage.USES, **dict.fromkeys(weights.CLASSES, weights.USES)}.get(name, ())]


def _undisturbed(lab: Lab, wanted: Sequence[Verb], jobs: int) -> None:
    """Run commands without disturbance, `jobs` at a time, and note their runs. Raises RuntimeError if one fails."""
    wanted = [*{verb.words: verb for verb in wanted if not verb.missing}.values()]
    readers = []
    for job in range(jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                _alone(lab)
                results: Any = [(verb.words, kills.normal(lab, verb)) for verb in wanted[job::jobs]]
            except BaseException:
                results = traceback.format_exc()
            with suppress(BaseException), os.fdopen(writer, "wb") as stream:
                pickle.dump(results, stream)
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    for reader in readers:
        with os.fdopen(reader, "rb") as stream:
            results = pickle.load(stream)
        if isinstance(results, str):
            raise RuntimeError(results)
        lab.normals.update(results)


def _alone(lab: Lab) -> None:
    """Make this forked process one that runs cases: it ends with the campaign, whose signals are not for it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a program that it executes has them as usual
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if lab.shim is not None:
        lab.shim = Shim()  # a page of its own


def _show(result: Result, seed: int, tell: bool) -> None:
    if tell:
        click.echo("\n".join(result.tale))
        click.echo(f"{result.name} {result.number}: {'held' if result.held else 'FAILED'} {result.skipped}")
    for fault in result.faults:
        click.echo(f"FAILED --seed {seed} --class {result.name} --number {result.number}: {fault}")
    sys.stdout.flush()


class _Stop:
    """End of a campaign before its last case: by a signal, whose number is `signal`, or as the time is up."""

    def __init__(self, minutes: float | None) -> None:
        self.signal = 0
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def late(self) -> bool:
        """True if no case is to begin any more."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def now(self) -> bool:
        """True if the cases under way are to be ended."""
        return bool(self.signal) or (self._deadline is not None and time.monotonic() > self._deadline + OVERTIME_S)

    def __enter__(self) -> "_Stop":
        self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, _frame: object) -> None:
        self.signal = number


def _spread(lab: Lab, cases: Sequence[tuple[str, int]], jobs: int, stop: _Stop, tell: bool) -> Iterable[Result]:
    """Run the cases in `jobs` forked processes. Yield the results as they come."""
    readers: dict[int, bytes] = {}
    runners: list[int] = []
    under_way: dict[int, tuple[str, int, float]] = {}  # case and its start, by the pipe that its result comes from
    with tempfile.TemporaryFile() as queue:  # of numbers of cases; all processes share its position
        queue.write(b"".join(index.to_bytes(4, "big") for index in range(len(cases))))
        queue.flush()
        os.lseek(queue.fileno(), 0, os.SEEK_SET)
        for _ in range(jobs):
            reader, writer = os.pipe()
            runner = os.fork()
            if runner == 0:
                os.close(reader)
                _runner(lab, _take_from(cases, queue.fileno(), stop), tell, writer)
            os.close(writer)
            runners.append(runner)
            readers[reader] = b""
    try:
        while readers:
            ready, _, _ = select.select([*readers], [], [], 0.5)
            if stop.now:
                _end_all(runners)  # what they have written is read
            for reader in ready:
                more = os.read(reader, 1 << 16)
                readers[reader] += more
                *lines, readers[reader] = readers[reader].split(b"\n")
                for record in map(json.loads, lines):
                    if isinstance(record, list):
                        under_way[reader] = (*record, time.monotonic())
                    else:
                        del under_way[reader]
                        yield Result(**record)
                if not more:
                    del readers[reader]
                    os.close(reader)
    finally:
        _end_all(runners)
        for name, number, began in under_way.values():
            seconds = time.monotonic() - began
            click.echo(f"--seed {lab.seed} --class {name} --number {number}: did not end within {seconds:.0f} s")


def _take_from(cases: Sequence[tuple[str, int]], queue: int, stop: _Stop) -> Iterator[tuple[str, int]]:
    """Yield cases that no other process has taken."""
    while not stop.late and (taken := os.read(queue, 4)):
        yield cases[int.from_bytes(taken, "big")]


def _end_all(runners: Iterable[int]) -> None:
    """End runners, and all that they have started."""
    for runner in runners:
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(runner, os.WNOHANG)[0]:
                continue  # a second time this raises ChildProcessError
            os.kill(runner, signal.SIGSTOP)  # it starts nothing more
            for process in (*subject.descendants(runner), runner):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(runner, 0)
    while left := subject.descendants(os.getpid()):  # whose parents have ended
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _runner(lab: Lab, cases: Iterable[tuple[str, int]], tell: bool, writer: int) -> None:
    """Run cases in this process, log each, and exit."""
    try:
        _alone(lab)
        with os.fdopen(writer, "w") as stream:
            for name, number in cases:
                print(json.dumps([name, number]), file=stream, flush=True)
                began = time.monotonic()
                try:
                    result = CLASSES[name](lab, number, tell)
                except Exception as error:
                    trace = traceback.format_exc()
                    result = Result(name, number, [f"the campaign itself failed: {error}"], tale=[trace])
                    if not tell:
                        print(trace, file=sys.stderr)
                result.seconds = time.monotonic() - began
                print(json.dumps(asdict(result)), file=stream, flush=True)
    finally:  # nothing may return into the campaign it was forked from
        os._exit(0)
