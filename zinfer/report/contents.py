"""Contents of a report, in order."""

from zinfer.report import cost, evidence, measured, predicted, summary
from zinfer.report.document import Document
from zinfer.report.findings import Findings


def document(findings: Findings) -> Document:
    """Return all sections that have content."""
    sections = (
        summary.summary(findings),
        measured.results(findings),
        predicted.predictions(findings),
        cost.costs(findings),
        measured.studies(findings),
        measured.system(findings),
        evidence.evidence(findings),
    )
    machines = dict.fromkeys(workload.group.machine for workload in findings.workloads)
    models = dict.fromkeys(workload.group.model_name for workload in findings.workloads)
    subject = f"{', '.join(models)} on {', '.join(machines)}. " if models else ""
    subtitle = f"{subject}{evidence.measured_with(findings.points)} Measured numbers are plain, predictions shaded."
    return Document("Capacity report", subtitle, tuple(section for section in sections if section.blocks))
