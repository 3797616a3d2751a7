"""Export: records as a flat table, one row a point, for spreadsheets, data frames and documents.

Failures are rows too; an unknown value is an empty cell, never 0. Only usable points have rates. Units are part of the
column names: tokens a second, milliseconds, seconds, bytes, bytes a second. The columns of `COLUMNS` always come first,
in that order; a column for each recorded prediction and for each recorded version follows::

    table = FlatTable.of([("bloom", point) for point in points])
    Path("bloom.csv").write_bytes(to_csv(table))

Model names and error texts come from outside and are never trusted: no cell starts a formula, a table or markup.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from zinfer.core.case import Case, Workload
from zinfer.core.units import figures
from zinfer.record.measurement import Effective, Measurement, Recorded, latest
from zinfer.record.requests import METRICS, PassCounts, RequestMetric, RequestPoint, Summary
from zinfer.record.stats import ci95_half_width
from zinfer.system.printable import markdown

Cell = str | int | float | None

# First characters of a formula in a spreadsheet (OWASP, "CSV Injection"): an apostrophe is put before them.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")


R = TypeVar("R", bound=Recorded)


class _Column(NamedTuple, Generic[R]):
    kind: type[Any]  # type of the cells that are not empty: str, int or float
    of: Callable[[R], Cell]


def _kind(annotation: Any) -> type[Any]:
    """Return the type of a field's cells: int for ``int | None``; str for all that is neither int nor float."""
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), str)


def _json(value: Any) -> str | None:
    """Return several values as JSON in one cell; None if there are none."""
    return json.dumps(value, sort_keys=True, default=str) if value else None


def _timed(get: Callable[[Measurement], Cell]) -> Callable[[Measurement], Cell]:
    return lambda point: get(point) if point.usable else None


def _asked(field: str) -> Callable[[Recorded], Cell]:
    return lambda point: _cell(dict(point.case.options) if field == "options" else getattr(point.case, field))


def _length(field: str) -> Callable[[Measurement], Cell]:
    return lambda point: _cell(getattr(point.case.workload, field))


def _placed(field: str) -> Callable[[Recorded], Cell]:
    return lambda point: _cell(getattr(point.effective, field, None))


def _cell(value: Any) -> Cell:
    """Return the value of a field as text or number."""
    if isinstance(value, dict | tuple):
        return _json(value)
    return str(value).lower() if isinstance(value, bool) else value


def _tpot_half_width(point: Measurement) -> float | None:
    return ci95_half_width([fmean(steps) for steps in point.step_ms if steps])


_LOAD: dict[str, _Column[Recorded]] = {
    name: _Column(_kind(field.annotation), _asked(name))
    for name, field in Case.model_fields.items()
    if name != "workload"
}
_EFFECTIVE: dict[str, _Column[Recorded]] = {
    f"effective_{name}": _Column(_kind(field.annotation), _placed(name))
    for name, field in Effective.model_fields.items()
}
_OUTCOME: dict[str, _Column[Recorded]] = {
    "model_revision": _Column(str, lambda p: p.model_revision or None),
    "num_layers": _Column(int, lambda p: p.num_layers),
    "total_layers": _Column(int, lambda p: p.total_layers),
    "status": _Column(str, lambda p: p.status),
    "stage": _Column(str, lambda p: p.stage),
    "error": _Column(str, lambda p: p.error),
}
_CONDITIONS: dict[str, _Column[Recorded]] = {
    "gpu_peak_bytes": _Column(int, lambda p: p.gpu_peak_bytes),
    "gpu_used_bytes": _Column(int, lambda p: p.gpu_used_bytes),
    "host_peak_bytes": _Column(int, lambda p: p.host_peak_bytes),
    **_EFFECTIVE,
    "gpu_readings": _Column(str, lambda p: _json(p.gpu)),
    "started_at": _Column(str, lambda p: p.started_at or None),
}
_COLUMNS: dict[str, _Column[Any]] = {
    "machine": _Column(str, lambda p: p.machine),
    **_LOAD,
    **{name: _Column(int, _length(name)) for name in Workload.model_fields},
    **_OUTCOME,
    "repeats": _Column(int, lambda p: len(p.ttft_ms) or None),
    "output_tok_s": _Column(float, _timed(lambda p: p.output_tok_s)),
    "output_tok_s_half_width": _Column(float, _timed(lambda p: ci95_half_width(p.output_tok_s_samples))),
    "decode_tok_s": _Column(float, _timed(lambda p: p.decode_tok_s)),
    "prefill_tok_s": _Column(float, _timed(lambda p: p.prefill_tok_s)),
    "ttft_ms": _Column(float, _timed(lambda p: fmean(p.ttft_ms))),
    "ttft_ms_half_width": _Column(float, _timed(lambda p: ci95_half_width(p.ttft_ms))),
    "tpot_ms": _Column(float, _timed(lambda p: p.tpot_ms)),
    "tpot_ms_half_width": _Column(float, _timed(_tpot_half_width)),
    "step_median_ms": _Column(float, _timed(lambda p: p.step_median_ms)),
    "e2e_ms": _Column(float, _timed(lambda p: fmean(p.e2e_ms))),
    "load_s": _Column(float, lambda p: p.load_s),
    "load_bytes": _Column(int, lambda p: p.load_bytes),
    "load_bandwidth_bytes_s": _Column(float, lambda p: p.load_bandwidth),
    "h2d_bandwidth_bytes_s": _Column(float, _timed(lambda p: p.h2d_bandwidth)),
    "link_bandwidth_bytes_s": _Column(float, lambda p: p.link_bandwidth),
    "links_bandwidth_bytes_s": _Column(float, lambda p: p.links_bandwidth),
    "link_share": _Column(float, _timed(lambda p: p.link_share)),
    **_CONDITIONS,
}
COLUMNS = ("file", *_COLUMNS)


def _counted(name: str) -> Callable[[RequestPoint], Cell]:
    return lambda point: getattr(point.counts, name) if point.pass_ms else None


def _statistic(metric: RequestMetric, name: str) -> Callable[[RequestPoint], Cell]:
    return lambda point: getattr(point.summary(metric), name, None) if point.usable else None


_REQUEST_COLUMNS: dict[str, _Column[Any]] = {
    "machine": _Column(str, lambda p: p.machine),
    **_LOAD,
    "source": _Column(str, lambda p: p.requests.source),
    "requests": _Column(int, lambda p: p.requests.requests),
    "seed": _Column(int, lambda p: p.requests.seed),
    "in_flight": _Column(str, lambda p: None if p.requests.in_flight is None else str(p.requests.in_flight)),
    "request_rate": _Column(str, lambda p: None if p.requests.request_rate is None else str(p.requests.request_rate)),
    "request_order": _Column(str, lambda p: p.requests.order),
    **_OUTCOME,
    "mean_input_len": _Column(float, lambda p: p.mean_lengths and p.mean_lengths[0]),
    "mean_output_len": _Column(float, lambda p: p.mean_lengths and p.mean_lengths[1]),
    "wall_ms": _Column(float, lambda p: p.wall_ms if p.usable else None),
    "busy_ms": _Column(float, lambda p: p.busy_ms if p.usable else None),
    "passes": _Column(int, lambda p: len(p.pass_ms) or None),
    **{name: _Column(float, attrgetter(name))
       for name in ("output_tok_s", "input_tok_s", "request_s", "waiting_tok_s", "steady_tok_s", "padding",
                    "link_busy")},
    **{f"{metric}_{name}": _Column(float, _statistic(metric, name)) for metric in METRICS for name in Summary._fields},
    **{name: _Column(_kind(field.annotation), _counted(name)) for name, field in PassCounts.model_fields.items()},
    "kv_positions": _Column(int, lambda p: p.kv_positions or None),
    "link_bandwidth_bytes_s": _Column(float, lambda p: p.link_bandwidth),
    "links_bandwidth_bytes_s": _Column(float, lambda p: p.links_bandwidth),
    **_CONDITIONS,
    "sla": _Column(str, lambda p: _json(p.sla)),
}  # fmt: skip


class FlatTable(NamedTuple):
    """Columns with the type of their cells, and rows with a cell for each column."""

    columns: dict[str, type[Any]]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[str, Measurement]]) -> "FlatTable":
        """Return the table of points, each with the name of its file; from each file the latest of each case."""
        files: dict[str, list[Measurement]] = {}
        for file, point in points:
            files.setdefault(file, []).append(point)
        kept = [(file, point) for file, own in files.items() for point in latest(own)]
        predicted = sorted({name for _, point in kept for name in point.predicted})
        versions = sorted({name for _, point in kept for name in point.versions})
        columns: dict[str, type[Any]] = {"file": str} | {name: column.kind for name, column in _COLUMNS.items()}
        columns |= {f"predicted_{name}": float for name in predicted} | {f"version_{name}": str for name in versions}
        rows = tuple(
            (
                file,
                *(column.of(point) for column in _COLUMNS.values()),
                *(point.predicted.get(name) for name in predicted),
                *(point.versions.get(name) for name in versions),
            )
            for file, point in kept
        )
        return cls(columns, rows)


def request_table(
    points: Iterable[tuple[str, RequestPoint]], goodput: Callable[[RequestPoint], float | None]
) -> FlatTable:
    """Return the table of loads of requests, each with the name of its file, all records of repeated ones included;
    `goodput` gives the requests a second that keep the service levels."""
    columns = {"file": str} | {name: column.kind for name, column in _REQUEST_COLUMNS.items()}
    rows = tuple(
        (file, *(column.of(point) for column in _REQUEST_COLUMNS.values()), goodput(point)) for file, point in points
    )
    return FlatTable(columns | {"goodput_request_s": float}, rows)


def to_csv(table: FlatTable) -> bytes:
    """Return comma-separated UTF-8 with a header. Every line break is one newline; numbers are as exact as in the
    records; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_unarmed, table.columns))
    writer.writerows([_plain(cell) for cell in row] for row in table.rows)
    return text.getvalue().encode()


def to_json(table: FlatTable) -> bytes:
    """Return a JSON list of objects, each with all columns; null is unknown."""
    return json.dumps([dict(zip(table.columns, row, strict=True)) for row in table.rows], indent=1).encode() + b"\n"


def to_md(table: FlatTable) -> bytes:
    """Return a Markdown table for reading: floats with four significant digits, and no columns that are empty in all
    rows."""
    kept = [nth for nth in range(len(table.columns)) if any(row[nth] is not None for row in table.rows)]
    names = list(table.columns)
    lines = [[_md(names[nth]) for nth in kept], ["---"] * len(kept)]
    lines += [[_md(row[nth]) for nth in kept] for row in table.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).encode()


def to_parquet(table: FlatTable) -> bytes:
    """Return an Apache Parquet file: strings, 64-bit integers and floats, null for unknown. Raises ModuleNotFoundError
    without pyarrow."""
    import pyarrow
    import pyarrow.parquet

    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in table.columns.items()])
    columns = [pyarrow.array([row[nth] for row in table.rows], type=field.type) for nth, field in enumerate(schema)]
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, schema=schema), target)
    return target.getvalue()


WRITERS: dict[str, Callable[[FlatTable], bytes]] = {"csv": to_csv, "parquet": to_parquet, "md": to_md, "json": to_json}


def _plain(cell: Cell) -> Cell:
    return _unarmed(cell) if isinstance(cell, str) else cell


def _unarmed(text: str) -> str:
    text = "\n".join(re.split("\r\n?", text))  # the csv module of Python 3.12 and before leaves a lone \r unquoted
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text


def _md(cell: Cell) -> str:
    """Return a cell as one line of text, without markup."""
    if cell is None or isinstance(cell, float):
        return "" if cell is None else figures(cell, 4).replace(",", "")
    return markdown(str(cell))
