"""Results that a verb answers from: by machine, file or folder."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click

from zinfer.analysis.economics import Point
from zinfer.commands.options import option, option_group
from zinfer.commands.out import say
from zinfer.commands.verb import Failure
from zinfer.core.errors import NOTHING
from zinfer.core.units import counted
from zinfer.record.store import Records, files, read
from zinfer.system import local

ALL = "all"
results_options = option_group(  # which `choose` understands
    click.argument("results", required=False, type=click.Path(path_type=Path)),
    option(
        "--machine",
        str,
        "Machines, separated by commas: names or their beginnings, or all, which includes the records in git.  "
        "[default: this machine; all of RESULTS where it is given]",
        metavar="NAME,..|all",
    ),
)


class Chosen(NamedTuple):
    """Results to answer from."""

    path: Path
    machines: tuple[str, ...] | None  # None is all
    named: bool  # the path was given
    this_machine: bool  # the machine is this one because none was asked for

    def roots(self) -> tuple[Path, ...]:
        """Return the folders and files to read, without those of other machines."""
        if self.named or self.machines is None or not self.path.is_dir():
            return (self.path,)
        inside = sorted(self.path.iterdir())
        folders = {folder.name: folder for folder in inside if folder.is_dir()}
        loose = [file for file in inside if file.suffix == ".jsonl" and file.is_file()]
        return tuple(folders[name] for name in self._matching(folders)) + tuple(loose)

    def read(self) -> list[tuple[Path, Records]]:
        """Return each file's records of the chosen machines. Raises StoreError."""
        gc.disable()  # it would look through all records again and again, and find no garbage: half of the time
        try:
            by_file = [(file, read(file)) for root in self.roots() if root.exists() for file in files(root)]
            gc.freeze()
        finally:
            gc.enable()
        every = Records.joined(records for _, records in by_file)
        kept = self._matching({point.machine for point in (*every.points, *every.requests)})
        return [(file, records.those(lambda point: point.machine in kept)) for file, records in by_file]

    def keeps(self, machine: str) -> bool:
        """Return whether a study of `machine` is chosen."""
        return self.machines is None or any(machine.startswith(name) for name in self.machines)

    def nothing(self) -> Failure:
        """Return the error for no record at all."""
        if self.named and not self.path.exists():
            return Failure(f"{self.path} does not exist: name a results file, or a folder of them", NOTHING)
        every = read(self.path) if self.path.exists() else Records()
        there = ", ".join(sorted({point.machine for point in (*every.points, *every.requests)}))
        of = f" for machine {', '.join(self.machines)}" if self.machines else ""
        text = f"no results{of} in {self.path}: measure first, with `zinfer sweep`, or `zinfer sweep demo`"
        return Failure(text + (f"; --machine all shows the records of {there}" if there else ""), NOTHING)

    def _matching(self, names: Iterable[str]) -> list[str]:
        names = sorted(names)
        if self.machines is None:
            return names
        exact = {asked for asked in self.machines if asked in names}
        begun = tuple(asked for asked in self.machines if asked not in exact)
        if self.this_machine:  # and with a part of its GPU's memory (`Machine.limited`)
            begun = tuple(f"{asked}-gpu-" for asked in self.machines)
        return [name for name in names if name in exact or name.startswith(begun)]


def choose(results: Path | None, machine: str | None) -> Chosen:
    """Return the results that the argument and the option stand for."""
    path, named = results or local.RESULTS, results is not None
    if machine is not None:
        names = tuple(name.strip() for name in machine.split(",") if name.strip())
        return Chosen(path, None if ALL in names or not names else names, named, this_machine=False)
    return Chosen(path, None if named else (local.name(),), named, this_machine=not named)


def warned(records: Records) -> Records:
    """Print what was left out of `records`; return them."""
    if records.warning:
        say(records.warning, err=True)
    return records


def usable(by_file: list[tuple[Path, Records]], chosen: Chosen, requests_too: bool = False) -> Records:
    """Return all records joined, and print what was left out. Raises Failure unless one is usable."""
    joined = Records.joined(records for _, records in by_file)
    points, requests = joined.points, joined.requests
    every: tuple[Point, ...] = (*points, *(requests if requests_too else ()))
    if any(point.usable for point in every):
        return warned(joined)
    if every:
        statuses = ", ".join(sorted({point.status for point in every}))
        text = f"none of the {len(every)} points in {chosen.path} succeeded ({statuses}): see `zinfer report`"
    elif requests:
        loads = f"{counted(len(requests), 'load')} of requests and no point of equal sequences"
        text = f"{chosen.path} has {loads}: see `zinfer best`, `zinfer report`, `zinfer export --requests`"
    else:
        text = f"{chosen.nothing()}" + (f" ({joined.warning})" if joined.warning else "")
    raise Failure(text, NOTHING)
