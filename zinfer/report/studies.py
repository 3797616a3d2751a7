"""What was measured besides throughput: what settings cost in accuracy, and what a kept conversation saves."""

from collections.abc import Iterator

from zinfer.record import accuracy, prefix_reuse
from zinfer.report.document import Block, Heading, Items, Row, Table
from zinfer.report.study import Findings


def blocks(findings: Findings) -> Iterator[Block]:
    """Nothing where no machine has a record."""
    for record in findings.accuracies:
        yield Heading(f"Accuracy of settings, {record.machine}")
        caption = (
            f"{record.title}. Measured by zinfer accuracy on {record.device}, logits in {record.logits_dtype}; rows "
            f"begin with {record.prompts.name}. Led along the same tokens as the reference, its own greedy ones or the "
            "text's. Logit error: root mean square, over the standard deviation of the reference's logits. The first "
            "rows are the reference beside itself in smaller batches: what floating point alone does."
        )
        yield Table(caption, accuracy.COLUMNS, tuple(map(Row, record.cells())))
        failed = (f"{record.label(one.case)} failed ({one.status}): {one.error}" for one in record.failed)
        yield Items((f"The model: {record.told}.", *failed))
    for kept in findings.reuses:
        for run in kept.runs:
            yield Heading(f"Keeping a conversation, {run.title}, {kept.machine}")
            caption = (
                f"Time to the first token, computed whole or with what was kept reloaded; medians. Measured by zinfer "
                f"reuse on {kept.device}: {run.conditions}."
            )
            yield Table(caption, prefix_reuse.COLUMNS, tuple(Row(point.cells) for point in run.measured))
            yield Items(tuple(run.verdicts))
