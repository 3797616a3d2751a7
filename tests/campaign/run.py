"""A campaign from its start to its table: classes, jobs, counts."""

import ctypes
import json
import os
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tests.campaign import damage, disks, kills, record, subject, verbs
from tests.campaign.lab import Lab, Result, Verb
from tests.campaign.shim import Shim

Case = Callable[[Lab, int, bool], Result]
CLASSES: dict[str, Case] = {**kills.CLASSES, **disks.CLASSES, **damage.CLASSES}
MANY = 3  # damaged inputs for each kill: they are quick
PR_SET_CHILD_SUBREAPER = 36


def titles() -> dict[str, str]:
    """Return what each class does, in a line."""
    return {name: record.title(name) for name in CLASSES}


def chosen(wanted: str | None) -> list[str]:
    """Return the names of the classes that `wanted` names, or begins. Raises UsageError for a name of none."""
    if not wanted:
        return list(CLASSES)
    found: list[str] = []
    for part in wanted.split(","):
        own = [name for name in CLASSES if name == part] or [name for name in CLASSES if name.startswith(part)]
        if not own:
            raise click.UsageError(f"no class {part!r}: {', '.join(CLASSES)}")
        found += own
    return [*dict.fromkeys(found)]


def prepare(root: Path, seed: int, ordinary: float) -> Lab:
    """Return a laboratory in `root`, in this process, from which the cases are forked."""
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
    """Run the cases, print each fault and the table, append the record to `output`; return 1 if a case failed."""
    began = time.monotonic()
    root = Path(os.environ.get("ZINFER_CAMPAIGN_ROOT") or tempfile.mkdtemp(prefix="zinfer-campaign-"))
    try:
        lab = prepare(root, seed, ordinary)
        for verb in dict.fromkeys(verb for name in names for verb in _verbs(name)):
            kills.normal(lab, verb)
        damage.furnish(lab, names)
        click.echo(f"prepared in {time.monotonic() - began:.0f} s; {'with' if lab.shim else 'without'} shim", err=True)
        lab.plant = os.environ.get("ZINFER_CAMPAIGN_PLANT", "")
        share = {name: MANY if name in damage.CLASSES and not tell else 1 for name in names}
        cases = [
            (name, share[name] * number + part) for number in numbers for name in names for part in range(share[name])
        ]
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        results = []
        for result in _spread(lab, cases, jobs, deadline, tell):
            results.append(result)
            _show(result, seed, tell)
            if len(results) % 100 == 0:
                click.echo(f"{len(results)} of {len(cases)} cases in {time.monotonic() - began:.0f} s", err=True)
        run = record.Campaign.of(results, seed, time.monotonic() - began)
        click.echo(run.table())
        if output is not None:
            from zinfer.record import study

            study.append(output, run)
        return 0 if run.classes and all(row.held == row.tried for row in run.classes) else 1
    finally:
        if not tell:
            shutil.rmtree(root, ignore_errors=True)
        else:
            click.echo(f"kept: {root}", err=True)


def _verbs(name: str) -> list[Verb]:
    """Return the commands whose undisturbed runs the cases of a class compare with."""
    if name in kills.CLASSES or name in disks.CLASSES:
        return disks.verbs_of(name)
    return [verbs.VERBS[verb] for verb in damage.USES.get(name, ())]


def _show(result: Result, seed: int, tell: bool) -> None:
    if tell:
        click.echo("\n".join(result.tale))
        click.echo(f"{result.name} {result.number}: {'held' if result.held else 'FAILED'} {result.skipped}")
    for fault in result.faults:
        click.echo(f"FAILED --seed {seed} --class {result.name} --number {result.number}: {fault}")
    sys.stdout.flush()


def _spread(
    lab: Lab, cases: Sequence[tuple[str, int]], jobs: int, deadline: float | None, tell: bool
) -> Iterable[Result]:
    """Run the cases in `jobs` forked processes and yield the results as they come."""
    readers: dict[int, bytes] = {}
    for job in range(jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            _runner(lab, cases[job::jobs], deadline, tell, writer)
        os.close(writer)
        readers[reader] = b""
    while readers:
        ready, _, _ = select.select([*readers], [], [])
        for reader in ready:
            more = os.read(reader, 1 << 16)
            readers[reader] += more
            *lines, readers[reader] = readers[reader].split(b"\n")
            for line in lines:
                yield Result(**json.loads(line))
            if not more:
                del readers[reader]
                os.close(reader)


def _runner(lab: Lab, cases: Sequence[tuple[str, int]], deadline: float | None, tell: bool, writer: int) -> None:
    """Run cases one after the other in this process, write a line for each, and exit."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if lab.shim is not None:
        lab.shim = Shim()  # a page of its own
    with os.fdopen(writer, "w") as stream:
        for name, number in cases:
            if deadline is not None and time.monotonic() > deadline:
                break
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
    os._exit(0)
