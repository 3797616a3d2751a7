"""A campaign from its start to its table: classes, jobs, counts."""

import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import click

from tools.campaign import disks, kills, record, serve, shim, verbs
from tools.campaign.lab import Lab, Result, Stopped, undisturbed
from tools.campaign.subject import kill
from zinfer.record import study

Case = Callable[[Lab, int, bool], Result]
CLASSES: dict[str, Case] = {**kills.CLASSES, **disks.CLASSES, **serve.CLASSES}
FEW = {"kill-ranks": 3}  # cases of other classes for each case of a slow one
OVERTIME_S = 120.0  # for the cases under way when the time is up; those that then still run are not counted


def chosen(wanted: str | None) -> list[str]:
    """Return the names of the classes that `wanted` names, or begins. Raises UsageError for a name of none."""
    classes: list[str] = []
    for part in wanted.split(",") if wanted else ("",):
        matches = [name for name in CLASSES if name == part] or [name for name in CLASSES if name.startswith(part)]
        if not matches:
            raise click.UsageError(f"no class {part!r}: {', '.join(CLASSES)}")
        classes += matches
    return [*dict.fromkeys(classes)]


def prepare(root: Path, seed: int, names: Sequence[str], jobs: int) -> Lab:
    """Return a laboratory in `root` that knows the undisturbed runs of classes."""
    root.mkdir(exist_ok=True)
    lab = Lab(root, seed, shim.build(root))
    verbs.furnish(lab)
    wanted = {verb.name: verb for name in names if name not in serve.CLASSES for verb in disks.verbs_of(name)}
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda verb: undisturbed(lab, verb), wanted.values())
        lab.normals.update(zip(wanted, runs, strict=True))
    if {*names} & {*serve.CLASSES}:
        serve.furnish(lab)
    return lab


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of all dice.")
@click.option("--class", "wanted", help="Classes, separated by commas, or beginnings of their names.  [default: all]")
@click.option("--count", default=10, show_default=True, help="Cases of each class.")
@click.option("--number", type=int, help="Run only this case, and tell all that happened.")
@click.option("--jobs", default=1, show_default=True, help="Cases at a time.")
@click.option("--minutes", type=float, help="Begin no case after so many minutes.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File that the record is appended to.")
@click.option("--list", "listing", is_flag=True, help="List the classes.")
def main(wanted: str | None, count: int, number: int | None, listing: bool, **how: Any) -> None:
    """Disturb zinfer in every way, count what held, and print a table; exit with 1 if something failed."""
    if listing:
        click.echo("\n".join(f"{name:20} {record.title(name)}" for name in CLASSES))
        return
    numbers = range(count) if number is None else [number]
    sys.exit(campaign(names=chosen(wanted), numbers=numbers, tell=number is not None, **how))


def campaign(
    names: Sequence[str],
    numbers: Iterable[int],
    seed: int,
    jobs: int,
    minutes: float | None,
    output: Path | None,
    tell: bool = False,
) -> int:
    """Run the cases, print faults and table, append the record. Return 1 if a case failed.

    SIGINT, SIGTERM, and the end of the time (`minutes` and OVERTIME_S) end the cases under way. These are not counted;
    the record of the others is written all the same, and says how many were planned. Returns 128 and the number of a
    signal.
    """
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="zinfer-campaign-"))
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in (2, 15)}
    deadline = float("inf") if minutes is None else began + 60 * minutes
    results: list[Result] = []
    try:
        lab = prepare(root, seed, names, jobs)
        shimmed = "with" if lab.library else "without"
        click.echo(f"prepared in {time.monotonic() - began:.0f} s; {shimmed} shim", err=True)
        cases = [(name, n) for n in numbers for name in names if tell or n % FEW.get(name, 1) == 0]

        def attempt(case: tuple[str, int]) -> Result | None:
            return None if lab.stopped or time.monotonic() > deadline else _tried(lab, *case, tell)

        with ThreadPoolExecutor(jobs) as pool:
            waiting = {pool.submit(attempt, case): case for case in cases}
            while waiting:
                done = wait(waiting, 0.5, FIRST_COMPLETED).done
                if not lab.stopped and (came or time.monotonic() > deadline + OVERTIME_S):
                    for name, number in [case for future, case in waiting.items() if future.running()]:
                        click.echo(f"--seed {seed} --class {name} --number {number}: did not end")
                    lab.stopped = True
                if lab.stopped:
                    kill(root)
                for future in done:
                    del waiting[future]
                    if (result := future.result()) is not None and not lab.stopped:
                        results.append(result)
                        _show(result, seed, tell)
        run = record.Campaign.of(results, seed, time.monotonic() - began, len(cases))
        click.echo(run.table())
        if output is not None:
            study.append(output, run)
        return 128 + came[0] if came else int(not run.rows or any(row.held < row.tried for row in run.rows))
    finally:
        kill(root)
        for number, handler in before.items():
            signal.signal(number, handler)
        if tell:
            click.echo(f"kept: {root}", err=True)
        else:
            shutil.rmtree(root, ignore_errors=True)


def _tried(lab: Lab, name: str, number: int, tell: bool) -> Result | None:
    """Run a case; None if the campaign was ended meanwhile."""
    began = time.monotonic()
    try:
        result = CLASSES[name](lab, number, tell)
    except Stopped:
        return None
    except Exception as error:
        result = Result(name, number, [f"the campaign itself failed: {error}"], tale=[traceback.format_exc()])
    result.seconds = time.monotonic() - began
    return result


def _show(result: Result, seed: int, tell: bool) -> None:
    if tell:
        click.echo("\n".join(result.tale))
        click.echo(f"{result.name} {result.number}: {'held' if result.held else 'FAILED'} {result.skipped}")
    for fault in result.faults:
        click.echo(f"FAILED --seed {seed} --class {result.name} --number {result.number}: {fault}")
