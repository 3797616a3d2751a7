"""The lossless codec of the stream engine, as measured on each machine, and those of others, as published."""

from collections.abc import Iterator

from zinfer.plan.published import PublishedCodec, codecs
from zinfer.record.codec import COLUMNS
from zinfer.report.document import Block, Heading, Items, Row, Table
from zinfer.report.study import Findings
from zinfer.spec.units import gb


def blocks(findings: Findings) -> Iterator[Block]:
    """Nothing where no machine has a record."""
    for record in findings.codecs:
        yield Heading(f"Lossless coding of weights, {record.machine}")
        caption = (
            f"Measured by zinfer codec on {record.device}, link {gb(record.link)}/s. Bound: what coding exponents one "
            "by one can reach. Rates count raw bytes; pays: how many times the weights cross the link, at most."
        )
        rows = (
            Row(cells, "failed" if row.name in record.failed else "")
            for row, cells in zip(record.rows, record.cells(), strict=True)
        )
        yield Table(caption, COLUMNS, tuple(rows))
        yield Items(tuple(f"{row.name}: {row.told}." for row in record.rows))
    if findings.codecs:
        others = tuple(Row(one.cells) for one in codecs())
        yield Table("Published by others, not measured here.", PublishedCodec.columns, others)
