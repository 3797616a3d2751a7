"""Where the time of a decode step goes, for the points that have a timeline."""

from zinfer.analysis.group import Points
from zinfer.analysis.rates import best_by_load
from zinfer.analysis.timeline import busy, busy_bandwidth, length_ms, share, waits
from zinfer.report.document import Block, Heading, Row, Table
from zinfer.report.study import Findings


def link_waits(findings: Findings) -> tuple[Block, ...]:
    """A table for each workload with traced points; nothing without them."""
    blocks: list[Block] = []
    for study in findings.studies:
        if rows := _rows(study.points):
            columns = (
                "configuration", "#batch", "#traced", "#timed", "#link busy", "#unpacking", "#computing", "#link waits",
                "#busy link",
            )  # fmt: skip
            caption = (
                "When the link waits: one decode step, traced after the timed ones, at each configuration's own best "
                "batch. What the link does not wait for is the time that its bytes take."
            )
            blocks += [Heading(f"{study.group.title}: one step"), Table(caption, columns, rows)]
    return tuple(blocks)


def _rows(points: Points) -> tuple[Row, ...]:
    rows = []
    for point in best_by_load([point for point in points if busy(point.timeline, "copy")]):
        spans, bandwidth = point.timeline, busy_bandwidth(point)
        rows.append(
            Row((
                point.case.label(),
                str(point.case.workload.batch_size),
                f"{length_ms(spans):,.1f} ms",
                f"{point.step_median_ms:,.1f} ms" if point.step_median_ms else "",
                *(f"{share(spans, lane):.1%}" for lane in ("copy", "decode", "compute")),
                f"{waits(spans).total_ms:,.2f} ms",
                f"{bandwidth / 1e9:.1f} GB/s" if bandwidth else "unknown",
            ))
        )  # fmt: skip
    return tuple(rows)
