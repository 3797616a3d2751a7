"""The order of a report: what to do, what was asked, what it rests on, what it costs, and how to check it."""

from collections.abc import Iterable
from itertools import chain

from zinfer.report import coding, evidence, measured, money, predicted, studies
from zinfer.report.claims import claims
from zinfer.report.document import Block, Document, Section
from zinfer.report.study import Findings
from zinfer.report.traced import link_waits


def document(findings: Findings) -> Document:
    """Every section, also those with nothing to show, which say what is missing."""
    known = predicted.forecast(findings)
    sections = (
        measured.answer(findings),
        measured.question(findings),
        _with(measured.system(findings), coding.blocks(findings), studies.blocks(findings)),
        predicted.memory(findings),
        measured.results(findings),
        measured.offload(findings),
        _with(predicted.bottleneck(findings, known), link_waits(findings)),
        money.sizing(findings),
        _with(predicted.machines(findings, known), claims(findings, known)),
        evidence.comparison(findings),
        evidence.validity(findings),
        evidence.reproduce(findings),
    )
    return Document("Capacity report", _subtitle(findings), sections)


def _with(section: Section, *more: Iterable[Block]) -> Section:
    return section._replace(blocks=[*section.blocks, *chain(*more)])


def _subtitle(findings: Findings) -> str:
    if not findings.studies:
        return "No results were found."
    machines = dict.fromkeys(study.group.machine for study in findings.studies)
    models = dict.fromkeys(study.group.model_name for study in findings.studies)
    return (
        f"{', '.join(models)} on {', '.join(machines)}: {len(findings.points)} points of {len(findings.studies)} "
        "workloads. Measured numbers are plain; what was predicted says so and is shaded."
    )
