"""`zinfer report`: measurements, conclusions and cost as a document."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zinfer.commands.prices import price_options
from zinfer.commands.results import results_options
from zinfer.core.machine import MachineError

if TYPE_CHECKING:
    from zinfer.commands.results import Chosen
    from zinfer.core.case import Case
    from zinfer.core.machine import Machine
    from zinfer.record.store import Records
    from zinfer.record.study import Study
    from zinfer.report.findings import Findings

FORMS = ("html", "md")


@click.command("report")
@results_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File.  [default: plots/MACHINE/report.html; plots/all/report.html for several machines]",
)
@click.option(
    "--format", "form", type=click.Choice(FORMS), help="Format.  [default: that of the name of --output, else html]"
)
@click.option("-m", "--model", help="Report only this model.")
@price_options
def command(
    results: Path | None,
    machine: str | None,
    output: Path | None,
    form: str | None,
    model: str | None,
    gpu_hour_usd: float | None,
    host_hour_usd: float | None,
    power_usd_kwh: float | None,
    gpus_per_server: int,
    demand: str | None,
    deadline: str | None,
    utilisation: float,
    spare: int,
) -> None:
    """Write a report on this machine's results, or on RESULTS. RESULTS is a file or a folder. The report is a page with
    the decision and its risks, then the results, predictions and evidence behind it.

    The page needs no other file and no network. Prints the path it wrote. Equal results give equal bytes.
    """
    from zinfer.analysis.economics import Prices, parse_demand
    from zinfer.commands.failure import Failure
    from zinfer.commands.files import write
    from zinfer.commands.results import choose
    from zinfer.core.errors import NOTHING
    from zinfer.report import contents, markdown, page
    from zinfer.report.findings import Demand

    suffix = output.suffix[1:] if output else "html"
    if form is None and suffix not in FORMS:
        raise click.BadParameter(f"{str(output)!r}: name a file .html or .md, or add --format", param_hint="--output")
    form = form or suffix
    if deadline is not None and demand is None:
        raise click.UsageError("--deadline is for a demand: add --demand 5Mtok")
    asked = None if demand is None else Demand(demand, *parse_demand(demand, deadline), utilisation, spare)
    prices = Prices(
        gpu_hour_usd=gpu_hour_usd,
        host_hour_usd=host_hour_usd,
        power_usd_kwh=power_usd_kwh,
        gpus_per_server=gpus_per_server,
    )
    chosen = choose(results, machine)
    findings = _findings(chosen, model)
    if not (findings.workloads or findings.studies or findings.requests):
        lost = f" (left out {findings.damaged[0]})" if findings.damaged else ""
        other = f"no results of {model} in {chosen.path}: `zinfer best` names the models that were measured"
        raise Failure(other if model else f"{chosen.nothing()}{lost}", NOTHING)
    output = output or Path("plots") / _folder(findings) / f"report.{form}"
    document = contents.document(findings._replace(prices=prices, demand=asked))
    write(output, page.html(document) if form == "html" else markdown.markdown(document))
    click.echo(output)


def _findings(chosen: "Chosen", model: str | None) -> "Findings":
    from typing import get_args

    from zinfer.analysis.group import groups, loads_of
    from zinfer.analysis.study import latest
    from zinfer.record import study
    from zinfer.record.store import Records
    from zinfer.report.findings import Findings, WorkloadFindings

    by_file = [(file, _of_model(records, model)) for file, records in chosen.read()]
    every = Records.together(records for _, records in by_file)
    roots = [root for root in chosen.roots() if root.is_dir()]
    folders = dict.fromkeys([*(file.parent for file, _ in by_file), *roots])
    names = [
        (name, folder / f"{name}{suffix}")
        for name in get_args(study.StudyName)
        for folder in folders
        for suffix in (".json", ".jsonl")
    ]
    runs = study.Runs.together(study.read(file, name) for name, file in names if file.exists())
    sweeps: dict[tuple[str, Case], Path] = {}
    for file, records in by_file:
        sweeps |= {(point.machine, point.case): file for point in records.points}
    loads = loads_of(every.points)
    workloads: list[WorkloadFindings] = []
    for group, points in groups(every.points).items():
        files = dict.fromkeys(sweeps[group.machine, point.case] for point in points)
        described = next(filter(None, (_machine(file.parent) for file in files)), None)
        rates = {point.case: loads.get((point.machine, point.case), ()) for point in points}
        workloads.append(WorkloadFindings(tuple(file.stem for file in files), group, points, described, rates))
    workloads.sort(key=lambda workload: workload.group.layers is not None)  # a stable sort: whole models first
    return Findings(
        tuple(workloads),
        tuple(f"{fault.path.name}, line {fault.line}: {fault.reason}" for fault in (*runs.damaged, *every.damaged)),
        studies=latest(run for run in runs.runs if _studied(run, model) and chosen.keeps(run.machine)),
        requests=every.requests,
        headers=every.headers,
    )


def _of_model(records: "Records", model: str | None) -> "Records":
    """Return the records and headers of one model, or all."""
    if not model:
        return records
    headers = (header for header in records.headers if any(_is(model, name) for name in header.recipe.get("model", ())))
    return records.those(lambda point: _is(model, point.case.model))._replace(headers=tuple(headers))


def _is(wanted: str | None, model: str) -> bool:
    """Return whether a model, with or without its folder, is wanted."""
    from zinfer.checkpoint.resolve import is_wanted

    return is_wanted(wanted, model)


def _studied(run: "Study", model: str | None) -> bool:
    return _is(model, run.model if run.case is None else run.case.model)


def _folder(findings: "Findings") -> str:
    """Return the folder of the report in `plots`: the machine's, or ``all``."""
    from zinfer.analysis.group import path_part

    machines = {
        *(workload.group.machine for workload in findings.workloads),
        *(run.machine for run in findings.studies),
    }
    machines |= {point.machine for point in findings.requests}
    return path_part(machines.pop()) if len(machines) == 1 else "all"


def _machine(folder: Path) -> "Machine | None":
    from zinfer.system import machines

    try:
        return machines.load(folder / "machine.json")
    except MachineError:
        return None
