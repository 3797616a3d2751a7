"""A campaign from its start to its table: classes, jobs, counts."""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import click

from tools.campaign import damage, disks, kills, record, serve, subject, verbs, weights
from tools.campaign.lab import Lab, Normal, Result, Verb
from tools.campaign.shim import Shim

Case = Callable[[Lab, int, bool], Result]
CLASSES: dict[str, Case] = {**kills.CLASSES, **disks.CLASSES, **damage.CLASSES, **serve.CLASSES, **weights.CLASSES}
MANY = 3  # damaged inputs for each kill: they are quick
FEW = {"kill-ranks": 3, "kill-ray": 15}  # kills for each case of a slow class
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
        _end_all()
        if not tell:
            shutil.rmtree(root, ignore_errors=True)
        else:
            click.echo(f"kept: {root}", err=True)


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
    names = {verb.words: verb.name for verb in wanted if not verb.missing}
    with _pool(lab, jobs) as pool:
        lab.normals.update(zip(names, pool.map(_usual, names.values()), strict=True))


def _pool(lab: Lab, jobs: int) -> ProcessPoolExecutor:
    """Return processes forked from this one, which run cases."""
    return ProcessPoolExecutor(jobs, get_context("fork"), _alone, (lab,))


def _alone(lab: Lab) -> None:
    """Make this forked process one that runs cases: it ends with the campaign, whose signals are not for it."""
    global _lab
    for number in (signal.SIGINT, signal.SIGTERM):  # a program that it executes has them as usual
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if lab.shim is not None:
        lab.shim = Shim()  # a page of its own
    _lab = lab


_lab: Lab  # of a process that runs cases


def _usual(name: str) -> Normal:
    return kills.normal(_lab, verbs.VERBS[name])


def _try(name: str, number: int, tell: bool, deadline: float) -> Result | None:
    """Run a case; None if it is too late to begin one."""
    if (began := time.monotonic()) > deadline:
        return None
    try:
        result = CLASSES[name](_lab, number, tell)
    except Exception as error:
        trace = traceback.format_exc()
        result = Result(name, number, [f"the campaign itself failed: {error}"], tale=[trace])
        if not tell:
            print(trace, file=sys.stderr)
    result.seconds = time.monotonic() - began
    return result


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
        self.deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    @property
    def now(self) -> bool:
        """True if the cases under way are to be ended."""
        return bool(self.signal) or time.monotonic() > self.deadline + OVERTIME_S

    def __enter__(self) -> "_Stop":
        self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, _frame: object) -> None:
        self.signal = number


def _spread(lab: Lab, cases: Sequence[tuple[str, int]], jobs: int, stop: _Stop, tell: bool) -> Iterator[Result]:
    """Run the cases in `jobs` forked processes. Yield the results as they come."""
    with _pool(lab, jobs) as pool:
        waiting = {pool.submit(_try, *case, tell, stop.deadline): case for case in cases}
        while waiting:
            for future in wait(waiting, 0.5, FIRST_COMPLETED).done:
                del waiting[future]
                if (result := future.result()) is not None:
                    yield result
            if stop.now:
                for name, number in [case for future, case in waiting.items() if future.running()]:
                    click.echo(f"--seed {lab.seed} --class {name} --number {number}: did not end")
                _end_all()
                return


def _end_all() -> None:
    """End all processes below this one."""
    while left := subject.descendants(os.getpid()):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
