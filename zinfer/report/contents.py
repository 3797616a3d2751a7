"""Contents of a report, in order: the answer, the question, the evidence, the cost, and how to check it."""

from collections.abc import Iterable
from itertools import chain

from zinfer.report import evidence, measured, predicted, sizing
from zinfer.report.document import Block, Details, Document, Section, Table
from zinfer.report.findings import Findings


def document(findings: Findings) -> Document:
    """Return all sections. Sections with nothing to show say what is missing."""
    known = predicted.forecast(findings)
    sections = (
        measured.answer(findings),
        measured.question(findings),
        measured.system(findings),
        predicted.memory(findings),
        measured.results(findings),
        measured.offload(findings),
        _with(predicted.bottleneck(findings, known), measured.link_waits(findings)),
        sizing.sizing(findings),
        _with(predicted.machines(findings, known), predicted.claims(findings, known)),
        evidence.comparison(findings),
        evidence.validity(findings),
        evidence.reproduce(findings),
    )
    filled = tuple(section._replace(blocks=tuple(map(_filled, section.blocks))) for section in sections)
    return Document("Capacity report", _subtitle(findings), filled)


def _filled(block: Block) -> Block:
    """Return a block whose tables have no empty column."""
    if isinstance(block, Table):
        return block.filled()
    if isinstance(block, Details):
        return block._replace(blocks=tuple(one.filled() if isinstance(one, Table) else one for one in block.blocks))
    return block


def _with(section: Section, *more: Iterable[Block]) -> Section:
    return section._replace(blocks=[*section.blocks, *chain(*more)])


def _subtitle(findings: Findings) -> str:
    if not findings.workloads:
        return "No results were found."
    machines = dict.fromkeys(workload.group.machine for workload in findings.workloads)
    models = dict.fromkeys(workload.group.model_name for workload in findings.workloads)
    return (
        f"{', '.join(models)} on {', '.join(machines)}: {len(findings.points)} points of {len(findings.workloads)} "
        f"workloads. {evidence.measured_with(findings.points)} Measured numbers are plain; what was predicted says so "
        "and is shaded."
    )
