"""`zinfer report`: measurements, conclusions and cost as a document."""

import gc
import os
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, get_args

import click

from zinfer.analysis.calibrate import load_machines
from zinfer.analysis.group import groups, loads_of, path_part
from zinfer.analysis.study import latest
from zinfer.checkpoint.resolve import is_wanted
from zinfer.commands.options import PATH, option, price
from zinfer.commands.out import say, write
from zinfer.commands.results import Chosen, choose, results_options
from zinfer.commands.verb import Failure, Verb
from zinfer.core.errors import ENVIRONMENT, NOTHING, ZinferError
from zinfer.record import study
from zinfer.record.measurement import Recorded
from zinfer.record.store import Records, files
from zinfer.report import contents
from zinfer.report.document import Document, html
from zinfer.report.live import LiveServer
from zinfer.report.measured import Findings, WorkloadFindings


@click.command("report", cls=Verb)
@results_options
@option("-o --output", PATH, "File.  [default: plots/MACHINE/report.html; plots/all/report.html for several machines]")
@option("-m --model", str, metavar="MODEL", text="Report only this model.")
@price
@option("--serve", bool, "Serve the page to browsers of this machine instead; it fills while a sweep runs.")
@option("--port", click.IntRange(0, 65535), "Port of --serve; 0 is any that is free.", default=8001)
def command(
    results: Path | None,
    machine: str | None,
    output: Path | None,
    model: str | None,
    serve: bool,
    port: int,
    **more: Any,
) -> None:
    """Write a report on this machine's results, or on RESULTS. RESULTS is a file or a folder. The report is a page with
    the decision and its risks, then the results, predictions and evidence behind it.

    The page needs no other file and no network. Prints the path it wrote. Equal results give equal bytes.
    """
    if output is not None and output.suffix != ".html":
        raise click.BadParameter(f"{str(output)!r}: the report is HTML, name a file .html", param_hint="--output")
    chosen = choose(results, machine)
    if serve:
        if output is not None:
            raise click.UsageError("--serve writes no file: leave out --output")
        _serve(chosen, model, port, more)
    findings = _findings(chosen, model)
    output = output or Path("plots") / _folder(findings) / "report.html"
    write(output, html(contents.document(findings._replace(**more))))
    click.echo(output)


def _serve(chosen: Chosen, model: str | None, port: int, more: dict[str, Any]) -> NoReturn:
    """Serve the report until a signal. Raises Failure if the port is taken."""

    def made() -> str:
        gc.collect()  # figures are cycles, and `Chosen.read` exempts what is left of the last ones from collection
        try:
            document = contents.document(_findings(chosen, model)._replace(**more))
        except (Failure, ZinferError) as error:
            why = f"Nothing to show yet: {error}. This page looks again by itself."
            document = Document("Capacity report", why, ())
        return html(document, live=True)

    try:
        server = LiveServer(port)
    except OSError as error:
        why = f"--port {port}: {error.strerror}; --port 0 takes any that is free"
        raise Failure(why, ENVIRONMENT) from None
    os.nice(19)  # what is measured goes first
    say(f"the report is at {server.address}, until ctrl-C")
    server.run(made, lambda: _state(chosen))


def _state(chosen: Chosen) -> set[tuple[Path, int, int]]:
    """Return the files of a report, with their sizes and times."""
    read = {file for root in chosen.roots() for file in files(root)}
    folders = {*(file.parent for file in read), *filter(Path.is_dir, chosen.roots())}
    state = set()
    for file in read.union(*(folder.glob("*.json*") for folder in folders)):
        with suppress(OSError):
            stat = file.stat()
            state.add((file, stat.st_size, stat.st_ctime_ns))
    return state


def _findings(chosen: Chosen, model: str | None) -> Findings:
    """Return what a report is made from. Raises Failure if that is nothing."""

    def wanted(point: Recorded) -> bool:
        return model is None or is_wanted(model, point.case.model)

    by_file = [(file, records.those(wanted)) for file, records in chosen.read()]
    every = Records.joined(records for _, records in by_file)
    folders = dict.fromkeys([*(file.parent for file, _ in by_file), *filter(Path.is_dir, chosen.roots())])
    named = product(get_args(study.StudyName), folders, ("json", "jsonl"))
    paths = [(folder / f"{name}.{suffix}", name) for name, folder, suffix in named]
    studies = [study.read(path, name) for path, name in paths if path.exists()]
    loads = loads_of(every.points)
    workloads: list[WorkloadFindings] = []
    for group, points in groups(every.points).items():
        rates = {point.case: loads.get((point.machine, point.case), ()) for point in points}
        workloads.append(WorkloadFindings(group, points, rates))
    all_runs = [run for read in studies for run in read.runs if chosen.keeps(run.machine)]
    described = {name: machine for root in chosen.roots() for name, machine in load_machines(root).items()}
    names = dict.fromkeys(workload.group.machine for workload in workloads)
    faults = [fault for read in studies for fault in read.damaged]
    findings = Findings(
        tuple(workloads),
        tuple(f"{fault.path.name}, line {fault.line}: {fault.reason}" for fault in (*faults, *every.damaged)),
        studies=latest(run for run in all_runs if is_wanted(model, run.case.model if run.case else run.model)),
        requests=every.requests,
        machines={name: described[name] for name in names if name in described},
    )
    if not (findings.workloads or findings.studies or findings.requests):
        lost = f" (left out {findings.damaged[0]})" if findings.damaged else ""
        other = f"no results of {model} in {chosen.path}: `zinfer best` names the models that were measured"
        raise Failure(other if model else f"{chosen.nothing()}{lost}", NOTHING)
    return findings


def _folder(findings: Findings) -> str:
    names = {workload.group.machine for workload in findings.workloads}
    names |= {run.machine for run in findings.studies} | {point.machine for point in findings.requests}
    return path_part(names.pop()) if len(names) == 1 else "all"
