"""`zinfer report`: measurements, the conclusions from them, and the cost, as a document."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zinfer.commands.prices import price_options
from zinfer.commands.results import results_options
from zinfer.core.machine import MachineError

if TYPE_CHECKING:
    from zinfer.commands.results import Chosen
    from zinfer.core.machine import Machine
    from zinfer.report.findings import Findings, PlanningQuestion

FORMS = (".html", ".md")


@click.command("report")
@results_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path),
    help="The page (.html), or its Markdown twin (.md); both are written, side by side.  "
    "[default: plots/MACHINE/report.html; plots/all/report.html for several machines]",
)  # fmt: skip
@click.option("--baseline", type=click.Path(exists=True, path_type=Path), help="Result file or folder to compare with.")
@price_options
def command(
    results: Path | None,
    machine: str | None,
    output: Path | None,
    baseline: Path | None,
    gpu_hour_usd: float | None,
    host_hour_usd: float | None,
    power_usd_kwh: float | None,
    gpus_per_server: int,
    demand: str | None,
    deadline: str | None,
    utilisation: float,
    spare: int,
) -> None:
    """Write the answers of this machine's results, or of RESULTS (a file or a folder), every point behind them, the
    system under test, predictions for other machines, and how far all of it may be trusted.

    The page is one file that needs no other and no network; the Markdown twin shows the figures that `zinfer plot` drew
    into its folder. Prints the paths it wrote. Equal results give equal bytes.
    """
    from zinfer.analysis.economics import Prices, parse_demand
    from zinfer.commands.failure import Failure
    from zinfer.commands.results import choose
    from zinfer.core.errors import ENVIRONMENT, NOTHING
    from zinfer.record.store import StoreError
    from zinfer.report import contents, markdown, page
    from zinfer.report.findings import Demand
    from zinfer.system import atomic

    if output is not None and output.suffix not in FORMS:
        raise click.BadParameter(f"{str(output)!r}: write a name that ends in .html or .md", param_hint="--output")
    if deadline is not None and demand is None:
        raise click.UsageError("--deadline is for a demand: add --demand 5Mtok")
    asked = None if demand is None else Demand(demand, *parse_demand(demand, deadline), utilisation, spare)
    prices = Prices(
        gpu_hour_usd=gpu_hour_usd, host_hour_usd=host_hour_usd, power_usd_kwh=power_usd_kwh,
        gpus_per_server=gpus_per_server,
    )  # fmt: skip
    chosen = choose(results, machine)
    try:
        found = _findings(chosen, baseline)
        if not (found.workloads or found.studies or found.requests):
            lost = f" (left out {found.damaged[0]})" if found.damaged else ""
            raise Failure(f"{chosen.nothing()}{lost}", NOTHING)
        output = output or Path("plots") / _folder(found) / "report.html"
        found = _with_figures(found, output.parent)
        found = found._replace(prices=prices, demand=asked, questions=_questions(found))
        document = contents.document(found)
    except StoreError as error:
        raise Failure(str(error), ENVIRONMENT) from error
    for path, text in (
        (output.with_suffix(".html"), page.html(document)),
        (output.with_suffix(".md"), markdown.markdown(document)),
    ):
        try:
            atomic.write(path, text)
        except OSError as error:
            raise Failure(f"cannot write {path}: {error.strerror}", ENVIRONMENT) from error
        click.echo(path)


def _findings(chosen: "Chosen", baseline: Path | None) -> "Findings":
    from itertools import product
    from typing import get_args

    from zinfer.analysis.group import groups, loads_of
    from zinfer.analysis.study import latest
    from zinfer.record import study
    from zinfer.record.store import read
    from zinfer.report.findings import Findings, WorkloadFindings

    workloads: list[WorkloadFindings] = []
    damaged: list[str] = []
    read_files = chosen.read()
    roots = [root for root in chosen.roots() if root.is_dir()]
    folders = dict.fromkeys([*(file.parent for file, _ in read_files), *roots])
    studies: list[study.Study] = []
    for name, path in product(get_args(study.StudyName), folders):
        for file in (path / f"{name}.json", path / f"{name}.jsonl"):
            if file.exists():
                runs, lost = study.read(file, name)
                studies += runs
                damaged += [f"{file.name}, line {damage.line}: {damage.reason}" for damage in lost]
    for file, records in read_files:
        damaged += [f"{file.name}, line {damage.line}: {damage.reason}" for damage in records.damaged]
        found = groups(records.points)
        for group, points in found.items():
            stem = group.stem(file.stem, alone=len(found) == 1)
            place = _machine(file.parent)
            loads = loads_of(group, records.points)
            workloads.append(WorkloadFindings(file.stem, group, points, place, records.headers, stem, loads=loads))
    workloads.sort(key=lambda workload: workload.group.layers is not None)  # a stable sort: whole models first
    against = None if baseline is None else (str(baseline), read(baseline).points)
    return Findings(
        tuple(workloads), tuple(damaged), against,
        studies=latest(run for run in studies if chosen.keeps(run.machine)),
        requests=tuple(point for _, records in read_files for point in records.requests),
        request_headers=tuple(header for _, records in read_files if records.requests for header in records.headers),
    )  # fmt: skip


def _folder(findings: "Findings") -> str:
    """Return the folder of the report in `plots`: the machine's, where its figures are too, or ``all``."""
    from zinfer.analysis.group import path_part

    machines = {*(one.group.machine for one in findings.workloads), *(run.machine for run in findings.studies)}
    machines |= {point.machine for point in findings.requests}
    return path_part(machines.pop()) if len(machines) == 1 else "all"


def _with_figures(findings: "Findings", folder: Path) -> "Findings":
    """Return the findings with links from `folder` to the existing figures of each workload."""
    workloads = tuple(one._replace(figures=_figures(folder, one.stem)) for one in findings.workloads)
    return findings._replace(workloads=workloads)


def _questions(findings: "Findings") -> "tuple[PlanningQuestion, ...]":
    """Return the questions of the planning recipes about models that were measured."""
    from zinfer.checkpoint.resolve import resolve
    from zinfer.job.recipe import make_sweep, read_toml, sweep_recipes
    from zinfer.report.findings import PlanningQuestion
    from zinfer.system import machines

    measured = {workload.group.model for workload in findings.workloads}
    found = []
    for path in sweep_recipes():
        wanted = make_sweep(read_toml(path), str(path))
        if wanted.machine and measured & set(wanted.model):
            cases = tuple(
                load.case("dummy", resolve(load.model, wanted.dtype, load.layers).dtype, *lengths)
                for load in wanted.loads(planning=True)
                for lengths in wanted.lengths()
            )
            title = f"{wanted.description.split(' (')[0]} (zinfer plan {path.stem})"
            found.append(PlanningQuestion(title, cases, tuple(map(machines.load, wanted.machine)), wanted.published))
    return tuple(found)


def _machine(folder: Path) -> "Machine | None":
    from zinfer.system import machines

    try:
        return machines.load(folder / "machine.json")
    except MachineError:
        return None


def _figures(folder: Path, stem: str) -> dict[str, str]:
    """Return links from `folder` to the existing figures of `stem`, SVG before PNG: in `folder`, or beside it where it
    is the machine's own."""
    from os.path import isfile  # unlike Path.is_file, of a name that is too long for the disk too

    candidates = {
        name: [f"{up}{stem}-{name}.{form}" for up in ("", "../") for form in ("svg", "png")]
        for name in ("throughput", "latency", "link", "residency", "timeline")
    }
    return {name: there[0] for name, links in candidates.items() if (there := [x for x in links if isfile(folder / x)])}
